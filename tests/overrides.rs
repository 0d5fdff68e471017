//! Overrides and switches: on one node, on nodes that share a store, and on a real Redis that forgets.
//!
//! `cargo test --features testing,http --test overrides -- --nocapture` prints how long nodes took to obey.
#![cfg(all(feature = "redis", feature = "testing", feature = "http"))]
#![allow(
    clippy::disallowed_methods,
    reason = "nodes on a real server hear of changes in real time, with a deadline"
)]

mod parts;

use std::time::{Duration, Instant};

use parts::RedisServer;
use tidegate::testing::{ManualClock, ScriptedStore};
use tidegate::{
    CheckError, Decision, FixedWindow, Hashed, LeakyBucket, Limit, Limiter, MemoryStore, Override,
    OverrideError, Quota, RedisStore, Rule, SlidingLog, SlidingWindow, Switch,
};

const NODES: usize = 8;
/// Nodes ask once a second; the rest is a machine that is busy with other tests.
const OBEYED_WITHIN: Duration = Duration::from_secs(20);
/// Between two looks at whether nodes obey.
const LOOKS: Duration = Duration::from_millis(10);
const SECOND: Duration = Duration::from_secs(1);

type Outcome = Result<(), Box<dyn std::error::Error>>;
type Answers = Result<Vec<Result<Decision, CheckError>>, Box<dyn std::error::Error>>;

/// A node whose limit `api` has so many tokens a day, and a clock that stands still.
fn node(tokens: u64) -> (Limiter, ManualClock) {
    let clock = ManualClock::new();
    let limit = Limit::new("api", Quota::per_day(tokens)).local();
    let builder = Limiter::builder().limit(limit).key_secret("a secret of 16 bytes and more");
    let limiter = builder.clock(&clock).build().expect("it is valid");
    (limiter, clock)
}

#[tokio::test]
async fn blocked_keys_are_denied_and_allowed_ones_are_not_charged() -> Outcome {
    let (limiter, clock) = node(2);
    let (api, overrides) = (limiter.limit("api")?, limiter.overrides());
    overrides.set("api", Override::key("mallory").block()).await?;
    overrides.set("api", Override::key("ann").allow().lasting(60 * SECOND)).await?;
    let denied = api.check("mallory");
    assert!(denied.is_denied() && denied.is_override() && denied.is_sure());
    assert_eq!((denied.remaining(), denied.limit_name()), (0, "api"));
    assert_eq!(denied.retry_after(), tidegate::PERIOD_MAX);
    for _ in 0..10 {
        let allowed = api.check("ann");
        assert_eq!((allowed.is_allowed(), allowed.remaining()), (true, 2));
    }
    clock.advance(60 * SECOND);
    let allowed = [(); 3].map(|()| api.check("ann").is_allowed());
    assert_eq!(allowed, [true, true, false], "the override is over, and nothing was charged");
    overrides.remove("api", Override::key("mallory")).await?;
    assert!(api.check("mallory").is_allowed());
    Ok(())
}

#[tokio::test]
async fn blocked_key_may_return_when_its_override_ends() -> Outcome {
    let (limiter, clock) = node(2);
    let api = limiter.limit("api")?;
    limiter.overrides().set("api", Override::key("a").block().lasting(10 * SECOND)).await?;
    clock.advance(4 * SECOND);
    let wait = api.check("a").retry_after();
    assert_eq!(wait, 6 * SECOND);
    clock.advance(wait);
    assert!(api.check("a").is_allowed());
    Ok(())
}

#[tokio::test]
async fn overrides_hold_for_hashed_keys_by_their_plain_bytes() -> Outcome {
    let (limiter, _) = node(2);
    let (api, overrides) = (limiter.limit("api")?, limiter.overrides());
    let is_denied = |key: &str| api.check(&Hashed(key)).is_denied();
    let handle = api.handle(&Hashed("192.0.2.7"));
    assert!(!is_denied("a") && handle.check().is_allowed());
    overrides.set("api", Override::key("a").block()).await?;
    overrides.set("api", Override::network("192.0.2.0/24".parse()?).block()).await?;
    overrides.set("api", Override::prefix("bot-").block()).await?;
    assert!(is_denied("a") && is_denied("192.0.2.7") && is_denied("bot-1"));
    assert!(api.check("a").is_denied() && api.check("bot-1").is_denied());
    assert!(handle.check().is_denied(), "a handle from before");
    assert!(!is_denied("b") && !is_denied("192.0.3.7") && !is_denied("robot"));
    overrides.set("api", Override::key(Hashed("b")).block()).await?;
    assert!(is_denied("b") && api.check("b").is_allowed(), "only the hashed key was named");
    Ok(())
}

#[tokio::test]
async fn every_way_to_ask_obeys_overrides() -> Outcome {
    let clock = ManualClock::new();
    let builder = Limiter::builder()
        .limit(Limit::new("api", Quota::per_day(5)).local())
        .limit(Limit::new("mail", LeakyBucket::per_second(1).queue(SECOND)).local())
        .limit(Limit::new("hybrid", Quota::per_day(5)))
        .limit(Limit::new("exact", SlidingLog::per_minute(5)).exact())
        .store(ScriptedStore::new(&clock));
    let limiter = builder.clock(&clock).build()?;
    for limit in ["api", "mail", "hybrid", "exact"] {
        limiter.overrides().set(limit, Override::key("a").block()).await?;
    }
    let mut denied: Vec<(&str, Decision)> = Vec::new();
    for name in ["api", "mail", "hybrid"] {
        let limit = limiter.limit(name)?;
        let handle = limit.handle("a");
        denied.push((name, limit.check("a")));
        denied.push((name, limit.check_n("a", 1)?));
        denied.push((name, limit.check_sure("a").await));
        denied.push((name, limit.check_sure_n("a", 1).await?));
        denied.push((name, limit.schedule("a")));
        denied.push((name, limit.until_ready("a", SECOND).await));
        denied.push((name, handle.check()));
        denied.push((name, handle.check_n(1)?));
        denied.push((name, handle.check_sure().await));
        denied.push((name, handle.schedule()));
        denied.push((name, handle.until_ready(SECOND).await));
        if name != "mail" {
            assert!(limit.reserve("a", 1).await.is_err());
        }
    }
    let exact = limiter.async_limit("exact")?;
    denied.push(("exact", exact.check_sure("a").await));
    denied.push(("exact", exact.schedule("a").await));
    denied.push(("exact", exact.until_ready("a", SECOND).await));
    for (at, (limit, decision)) in denied.into_iter().enumerate() {
        assert!(decision.is_denied() && decision.is_override(), "{limit}, call {at}");
    }
    Ok(())
}

/// What a limit answers to a request that costs more than it can ever admit, whatever way it is asked.
async fn answers_above_max(limiter: &Limiter, name: &str, key: &str) -> Answers {
    const COST: u32 = u32::MAX;
    let limit = limiter.async_limit(name)?;
    let mut answers = vec![
        limit.check_sure_n(key, COST).await,
        limit.schedule_n(key, COST).await,
        limit.until_ready_n(key, COST, SECOND).await,
        limiter.async_group([name])?.check_sure_n(key, COST).await,
        limiter.check_all([limit.on(key).cost(COST)]).await,
    ];
    answers.extend(limiter.check_each([limit.on(key).cost(COST)]).await);
    // An exact limit is asked by those alone that wait.
    let Ok(limit) = limiter.limit(name) else { return Ok(answers) };
    let handle = limit.handle(key);
    answers.extend([
        limit.check_n(key, COST),
        limit.schedule_n(key, COST),
        limiter.group([name])?.check_n(key, COST),
        handle.check_n(COST),
        handle.check_sure_n(COST).await,
    ]);
    Ok(answers)
}

/// Once, each of them was an error.
#[tokio::test]
async fn no_cost_is_too_high_for_an_override_or_a_limit_that_denies_nothing() -> Outcome {
    let clock = ManualClock::new();
    let builder = Limiter::builder()
        .limit(Limit::new("api", Quota::per_day(5)).local())
        .limit(Limit::new("mail", LeakyBucket::per_second(1).queue(SECOND)).local())
        .limit(Limit::new("hybrid", Quota::per_day(5)))
        .limit(Limit::new("slots", LeakyBucket::per_second(1).queue(SECOND)))
        .limit(Limit::new("exact", SlidingLog::per_minute(5)).exact())
        .store(ScriptedStore::new(&clock));
    let limiter = builder.clock(&clock).build()?;
    let overrides = limiter.overrides();
    for name in ["api", "mail", "hybrid", "slots", "exact"] {
        let ask = |key: &'static str| answers_above_max(&limiter, name, key);
        overrides.set(name, Override::key("mallory").block()).await?;
        overrides.set(name, Override::key("ann").allow()).await?;
        for answer in ask("bob").await? {
            assert!(matches!(answer, Err(CheckError::CostTooHigh { .. })), "{name}: {answer:?}");
        }
        for (key, is_allowed) in [("mallory", false), ("ann", true)] {
            for answer in ask(key).await? {
                let told = answer.map(|decision| (decision.is_allowed(), decision.is_override()));
                assert_eq!(told, Ok((is_allowed, true)), "{name}: {key}");
            }
        }
        overrides.switch(name, Switch::Shadow).await?;
        for answer in ask("bob").await? {
            let answer = answer?;
            let is_override = answer.is_override();
            assert!(answer.is_allowed() && answer.is_shadow_denied() && !is_override, "{name}");
            assert_eq!((answer.cost(), answer.delay()), (u32::MAX, Duration::ZERO), "{name}");
        }
        overrides.switch(name, Switch::Off).await?;
        for key in ["bob", "mallory"] {
            for answer in ask(key).await? {
                assert!(answer?.is_override() && answer?.is_allowed(), "{name}: {key}");
            }
        }
        overrides.switch_back(name).await?;
    }
    let api = limiter.limit("api")?;
    assert_eq!(api.check_n("bob", 0)?.remaining(), 5, "nothing was charged");
    Ok(())
}

#[tokio::test]
async fn several_limits_at_once_obey_the_overrides_of_each() -> Outcome {
    let builder = Limiter::builder()
        .limit(Limit::new("a", Quota::per_day(20)))
        .limit(Limit::new("b", Quota::per_day(5)).local())
        .limit(Limit::new("c", SlidingLog::per_day(2)).exact().max_wait(SECOND))
        .store(MemoryStore::new());
    let limiter = builder.build_ready(OBEYED_WITHIN).await?;
    let (overrides, all) = (limiter.overrides(), limiter.async_group(["a", "b", "c"])?);
    let (a, b, c) = (limiter.limit("a")?, limiter.limit("b")?, limiter.async_limit("c")?);
    overrides.set("a", Override::prefix("eve").block()).await?;
    let denied = all.check_sure(&Hashed("eve")).await;
    assert_eq!((denied.is_denied(), denied.is_override(), denied.limit_name()), (true, true, "a"));
    let denied = limiter.check_all([a.on(&Hashed("eve")), b.on("eve")]).await?;
    assert!(denied.is_denied() && denied.is_override());
    assert!(limiter.group(["a", "b"])?.check("eve").is_denied());
    assert_eq!(b.check_n("eve", 0)?.remaining(), 5, "nothing was charged");

    overrides.set("c", Override::key("ann").allow()).await?;
    for _ in 0..4 {
        assert!(all.check_sure("ann").await.is_allowed());
    }
    assert_eq!(c.check_sure_n("ann", 0).await?.remaining(), 2, "nothing was charged");
    overrides.remove("c", Override::key("ann")).await?;
    let left = || b.check_n("ann", 0).map(|look| look.remaining());
    assert_eq!(left()?, 1);

    // What is denied in shadow mode takes nothing, so that nothing of it comes back.
    overrides.switch("c", Switch::Shadow).await?;
    for _ in 0..2 {
        assert!(c.check_sure("ann").await.is_allowed());
    }
    let allowed = all.check_sure("ann").await;
    assert!(allowed.is_allowed());
    assert!(all.check_sure("ann").await.is_denied(), "b has nothing left");
    overrides.switch_back("c").await?;
    assert!(c.check_sure("ann").await.is_denied(), "nothing came back to c");
    assert_eq!(left()?, 0);
    Ok(())
}

/// The five algorithms, small enough to deny much.
fn rules() -> [Rule; 5] {
    [
        Quota::per_second(4).into(),
        LeakyBucket::per_second(4).queue(SECOND / 2).into(),
        FixedWindow::per_second(4).into(),
        SlidingWindow::per_second(4).into(),
        SlidingLog::per_second(4).into(),
    ]
}

#[tokio::test]
async fn shadow_mode_decides_as_ever_and_denies_nothing() -> Outcome {
    for rule in rules() {
        let clock = ManualClock::new();
        let limiter = |switch| {
            let limit = Limit::new("x", rule).local().switch(switch);
            let built = Limiter::builder().limit(limit).clock(&clock);
            built.build().and_then(|limiter| limiter.limit("x"))
        };
        let (on, shadow) = (limiter(Switch::On)?, limiter(Switch::Shadow)?);
        let (mut random, mut denied) = (fastrand::Rng::with_seed(3), 0);
        for _ in 0..2000 {
            clock.advance(Duration::from_micros(random.u64(..150_000)));
            let (key, cost) = (random.u8(..3), random.u32(..3));
            let (enforced, tried) = (on.check_n(&key, cost)?, shadow.check_n(&key, cost)?);
            assert!(tried.is_allowed());
            assert_eq!(tried.is_shadow_denied(), enforced.is_denied(), "{rule:?}");
            assert_eq!(tried.remaining(), enforced.remaining(), "{rule:?}");
            denied += u32::from(enforced.is_denied());
        }
        assert!(denied > 100, "{rule:?}: {denied} denied");
        let tried = shadow.until_ready(&0, SECOND).await;
        assert!(tried.is_allowed() && tried.delay().is_zero(), "nobody waits in shadow mode");
    }
    Ok(())
}

#[tokio::test]
async fn reservation_that_shadow_mode_let_go_on_neither_gives_back_nor_owes() -> Outcome {
    let (limiter, _) = node(10);
    let api = limiter.limit("api")?;
    let kept = api.reserve("a", 8).await?;
    limiter.overrides().switch("api", Switch::Shadow).await?;
    let shadow = api.reserve("a", 8).await?;
    assert!(shadow.decision().is_shadow_denied());
    drop(shadow);
    // More than the limit ever admits.
    drop(api.reserve("a", 11).await?);
    api.reserve("a", 8).await?.commit(20);
    assert_eq!(api.check_n("a", 0)?.remaining(), 2);
    kept.commit(9);
    assert_eq!(api.check_n("a", 0)?.remaining(), 1);
    limiter.overrides().switch("api", Switch::Off).await?;
    api.reserve("a", 8).await?.commit(20);
    limiter.overrides().switch_back("api").await?;
    assert_eq!(api.check_n("a", 0)?.remaining(), 1);
    Ok(())
}

#[tokio::test]
async fn limit_that_is_off_allows_everything_and_charges_nothing() -> Outcome {
    let (limiter, _) = node(1);
    let (api, overrides) = (limiter.limit("api")?, limiter.overrides());
    overrides.set("api", Override::key("a").block()).await?;
    overrides.switch("api", Switch::Off).await?;
    assert!((0..10).all(|_| api.check("a").is_allowed()), "blocked keys too");
    overrides.switch("api", Switch::On).await?;
    overrides.remove("api", Override::key("a")).await?;
    assert!(api.check("a").is_allowed() && api.check("a").is_denied());
    Ok(())
}

#[tokio::test]
async fn key_is_blocked_for_a_while_after_a_denial() -> Outcome {
    let clock = ManualClock::new();
    let limit = Limit::new("login", Quota::per_second(1)).local().block_for(60 * SECOND);
    let builder = Limiter::builder().limit(limit);
    let limiter = builder.clock(&clock).build()?;
    let login = limiter.limit("login")?;
    assert!(login.check("a").is_allowed());
    assert_eq!(login.check_n("a", 0)?.remaining(), 0, "a look blocks nobody");
    let denied = login.check("a");
    assert!(!denied.is_override());
    let told = [denied.retry_after(), denied.reset_after(), denied.next_token_after()];
    assert_eq!(told, [60 * SECOND; 3], "it is blocked from now on");
    let limit = Limit::new("slow", Quota::per_hour(1)).local().block_for(60 * SECOND);
    let slow = Limiter::builder().limit(limit).clock(&clock).build()?.limit("slow")?;
    assert!(slow.check("a").is_allowed());
    assert_eq!(slow.check("a").retry_after(), 3600 * SECOND, "its token comes later than that");
    assert_eq!(slow.check("a").retry_after(), 3600 * SECOND, "and is told again");
    let limit = Limit::new("large", Quota::per_hour(100)).local().block_for(60 * SECOND);
    let large = Limiter::builder().limit(limit).clock(&clock).build()?.limit("large")?;
    assert!(large.check_n("a", 60)?.is_allowed() && large.check_n("a", 60)?.is_denied());
    assert_eq!(large.check("a").retry_after(), 60 * SECOND, "there are 40 tokens then");
    clock.advance(30 * SECOND);
    let again = slow.check("a");
    assert_eq!((again.is_override(), again.retry_after()), (true, 3570 * SECOND));
    let blocked = login.check("a");
    assert_eq!((blocked.is_override(), blocked.retry_after()), (true, 30 * SECOND));
    assert!(login.check("b").is_allowed());
    clock.advance(30 * SECOND);
    assert!(login.check("a").is_allowed());
    Ok(())
}

#[tokio::test]
async fn override_of_an_unknown_limit_or_without_a_ruling_is_refused_by_name() -> Outcome {
    let (limiter, _) = node(1);
    let overrides = limiter.overrides();
    let unknown = overrides.set("web", Override::key("a").block()).await.unwrap_err();
    assert_eq!(
        unknown.to_string(),
        "override of limit \"web\": the limit is not known; known are: api"
    );
    let nothing = overrides.set("api", Override::key("a")).await.unwrap_err();
    assert!(matches!(nothing, OverrideError::NothingSet { .. }), "{nothing}");
    let long = Override::prefix("x".repeat(513)).block();
    let long = overrides.set("api", long).await.unwrap_err();
    assert_eq!(long.to_string(), "override: prefix = 513 bytes: must be 0 to 512");
    let switch = overrides.switch("web", Switch::Off).await.unwrap_err();
    assert!(matches!(switch, OverrideError::UnknownLimit { .. }), "{switch}");
    Ok(())
}

#[tokio::test]
async fn one_override_more_than_there_may_be_is_refused_and_one_that_is_there_is_not() -> Outcome {
    let (limiter, _) = node(1);
    let overrides = limiter.overrides();
    let mut setting = tokio::task::JoinSet::new();
    for number in 0..tidegate::OVERRIDES_MAX {
        let overrides = overrides.clone();
        setting.spawn(async move { overrides.set("api", Override::key(number).block()).await });
    }
    assert!(setting.join_all().await.into_iter().all(|outcome| outcome.is_ok()));
    let one_more = overrides.set("api", Override::key("one more").block()).await;
    assert_eq!(one_more, Err(OverrideError::TooMany));
    overrides.set("api", Override::key(0).allow()).await?;
    let api = limiter.limit("api")?;
    assert!(api.check(&0).is_allowed() && api.check(&99_999).is_denied());
    assert!(api.check("one more").is_allowed());
    // There is room for a switch all the same, and again once one is removed.
    overrides.switch("api", Switch::Off).await?;
    assert!(api.check(&99_999).is_allowed());
    overrides.remove("api", Override::key(1)).await?;
    overrides.set("api", Override::key("one more").block()).await?;
    Ok(())
}

#[tokio::test]
async fn node_that_was_away_forgets_what_was_removed_meanwhile() -> Outcome {
    let clock = ManualClock::new();
    let store = ScriptedStore::new(&clock);
    let start = |store: ScriptedStore| {
        let limit = Limit::new("api", Quota::per_second(100));
        Limiter::builder().limit(limit).store(store).clock(&clock).build()
    };
    let (near, far) = (start(store.clone())?, start(store.clone())?);
    for key in ["removed", "kept"] {
        near.overrides().set("api", Override::key(key).block()).await?;
    }
    for _ in 0..3 {
        clock.advance(SECOND);
        far.settle().await;
    }
    let api = far.limit("api")?;
    assert!(api.check("removed").is_denied());
    store.set_away(true);
    assert!(matches!(
        near.overrides().set("api", Override::key("x").block()).await,
        Err(OverrideError::Store(_))
    ));
    clock.advance(3600 * SECOND);
    far.settle().await;
    assert!(api.check("removed").is_denied(), "what is known holds on");
    store.set_away(false);
    near.overrides().remove("api", Override::key("removed")).await?;
    // Another node forgets that there was one.
    clock.advance(3600 * SECOND);
    near.settle().await;
    clock.advance(10 * SECOND);
    far.settle().await;
    assert!(api.check("removed").is_allowed() && api.check("kept").is_denied());
    Ok(())
}

/// A node that was the first to hear of the loss forgot all but a hundred, until it had told the store the others.
#[tokio::test]
async fn overrides_hold_on_while_a_store_that_lost_its_memory_hears_of_them_again() -> Outcome {
    let clock = ManualClock::new();
    let store = ScriptedStore::new(&clock);
    let limit = Limit::new("api", Quota::per_second(100));
    let limiter = Limiter::builder().limit(limit).store(store.clone()).clock(&clock).build()?;
    for number in 0..300 {
        limiter.overrides().set("api", Override::key(number).block()).await?;
    }
    let api = limiter.limit("api")?;
    store.clear();
    for _ in 0..50 {
        clock.advance(SECOND / 20);
        tokio::task::yield_now().await;
        assert!((0..300).all(|number| api.check(&number).is_denied()));
    }
    for _ in 0..3 {
        clock.advance(SECOND);
        limiter.settle().await;
        assert!((0..300).all(|number| api.check(&number).is_denied()));
    }
    Ok(())
}

#[tokio::test]
async fn override_of_a_hashed_key_outlives_one_of_its_plain_form() -> Outcome {
    let (limiter, _) = node(2);
    let (api, overrides) = (limiter.limit("api")?, limiter.overrides());
    overrides.set("api", Override::key(Hashed("a")).block()).await?;
    overrides.set("api", Override::key("a").allow()).await?;
    assert!(api.check(&Hashed("a")).is_denied(), "its own override wins");
    overrides.remove("api", Override::key("a")).await?;
    assert!(api.check(&Hashed("a")).is_denied());
    Ok(())
}

#[tokio::test]
async fn store_that_lost_its_memory_hears_of_overrides_again() -> Outcome {
    let clock = ManualClock::new();
    let store = ScriptedStore::new(&clock);
    let start = || {
        let limit = Limit::new("api", Quota::per_second(100));
        let builder = Limiter::builder().limit(limit).store(store.clone());
        builder.clock(&clock).build()
    };
    let old = start()?;
    for number in 0..1200 {
        old.overrides().set("api", Override::key(number).block()).await?;
    }
    old.overrides().switch("api", Switch::On).await?;
    store.clear();
    let fresh = start()?;
    for _ in 0..40 {
        clock.advance(SECOND);
        old.settle().await;
        fresh.settle().await;
    }
    for limiter in [old, fresh] {
        let api = limiter.limit("api")?;
        assert!((0..1200).all(|number| api.check(&number).is_denied()));
        assert!(api.check("x").is_allowed());
    }
    Ok(())
}

/// Waits until all nodes do as `obeys` says, and returns how long that took.
async fn obeyed(nodes: &[Limiter], obeys: impl Fn(&Limiter) -> bool) -> Duration {
    let begun = Instant::now();
    while !nodes.iter().all(&obeys) {
        assert!(begun.elapsed() < OBEYED_WITHIN, "a node does not obey");
        tokio::time::sleep(LOOKS).await;
    }
    begun.elapsed()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn eight_nodes_on_redis_obey_what_one_of_them_sets() -> Outcome {
    let server = RedisServer::start();
    let store = RedisStore::open(&server.url())?;
    let start = || {
        let limit = Limit::new("api", Quota::per_hour(10).burst(10));
        Limiter::builder().limit(limit).store(store.clone()).build_ready(OBEYED_WITHIN)
    };
    let mut nodes = Vec::new();
    for _ in 0..NODES {
        nodes.push(start().await?);
    }
    let check = |node: &Limiter, key: &str| node.limit("api").map(|api| api.check(key));
    let is_denied = |key: &'static str| {
        move |node: &Limiter| check(node, key).is_ok_and(|decision| decision.is_denied())
    };
    let is_allowed = |key: &'static str| {
        move |node: &Limiter| check(node, key).is_ok_and(|decision| decision.is_override())
    };
    let overrides = nodes[0].overrides();
    let say = |what: &str, took: Duration| println!("{what}: {:.2} s", took.as_secs_f64());

    overrides.set("api", Override::key("mallory").block()).await?;
    assert!(is_denied("mallory")(&nodes[0]), "at once where it is set");
    say("a key is blocked", obeyed(&nodes, is_denied("mallory")).await);
    overrides.set("api", Override::network("192.0.2.0/24".parse()?).block()).await?;
    say("a network is blocked", obeyed(&nodes, is_denied("192.0.2.9")).await);
    overrides.set("api", Override::prefix("test-").allow()).await?;
    say("a prefix is allowed", obeyed(&nodes, is_allowed("test-7")).await);
    overrides.switch("api", Switch::Off).await?;
    say("the limit is off", obeyed(&nodes, is_allowed("anybody")).await);
    overrides.switch("api", Switch::Shadow).await?;
    let is_shadow =
        |node: &Limiter| check(node, "mallory").is_ok_and(|decision| decision.is_shadow_denied());
    say("the limit is in shadow mode", obeyed(&nodes, is_shadow).await);
    overrides.switch_back("api").await?;
    say("the limit is on", obeyed(&nodes, is_denied("mallory")).await);

    redis::cmd("FLUSHALL")
        .query::<()>(&mut redis::Client::open(server.url())?.get_connection()?)?;
    let late = start().await?;
    say("a new node after a loss of memory", obeyed(&[late], is_denied("mallory")).await);
    overrides.remove("api", Override::key("mallory")).await?;
    let is_free =
        |node: &Limiter| check(node, "mallory").is_ok_and(|decision| !decision.is_override());
    say("the key is not blocked any more", obeyed(&nodes, is_free).await);
    Ok(())
}

#[tokio::test]
async fn limiters_in_one_process_share_overrides_by_their_memory_store() -> Outcome {
    let store = MemoryStore::new();
    let start = || {
        let limit = Limit::new("api", Quota::per_second(100));
        Limiter::builder().limit(limit).store(store.clone()).build()
    };
    let (one, other) = (start()?, start()?);
    one.overrides().set("api", Override::key("a").block()).await?;
    let is_denied = |node: &Limiter| node.limit("api").is_ok_and(|api| api.check("a").is_denied());
    obeyed(&[other], is_denied).await;
    Ok(())
}

/// What docs/REDIS.md says that a server's user needs, for a limiter and for its overrides.
const COMMANDS: &str = "+evalsha +eval +time +get +getrange +mget +type +set +setrange +zadd +zrem +zcard +zremrangebyscore \
                        +pexpire +hello +hget +hset +hdel +hlen +exists +del +zrangebyscore";

#[tokio::test]
async fn documented_commands_suffice_for_overrides_and_without_one_limits_go_on() -> Outcome {
    let server = RedisServer::start();
    let user = ["ACL", "SETUSER", "me", "on", ">pw", "~tg2:{tidegate/*"];
    server.command(&user.into_iter().chain(COMMANDS.split_whitespace()).collect::<Vec<_>>());
    let address = format!("redis://me:pw@127.0.0.1:{}", server.port());
    let limit = Limit::new("api", Quota::per_second(100));
    let limiter = Limiter::builder().limit(limit).store(RedisStore::open(&address)?);
    let limiter = limiter.build_ready(OBEYED_WITHIN).await?;
    let (api, overrides) = (limiter.limit("api")?, limiter.overrides());
    overrides.set("api", Override::key("a").block().lasting(SECOND)).await?;
    assert!(api.check("a").is_denied());
    for missing in ["hget", "hset", "hlen", "zrangebyscore"] {
        server.command(&["ACL", "SETUSER", "me", &format!("-{missing}")]);
        let refused = overrides.set("api", Override::key("b").block()).await.unwrap_err();
        assert!(refused.to_string().contains("HGET, HSET"), "{missing}: {refused}");
        assert!(api.check_sure("b").await.is_allowed(), "{missing}");
        server.command(&["ACL", "SETUSER", "me", &format!("+{missing}")]);
    }
    Ok(())
}
