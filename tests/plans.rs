//! Plans: a key that comes under another plan keeps what it has, gets nothing new, and is denied no longer than its plan and
//! its debt explain; nodes that share a limit agree on one.
#![cfg(feature = "testing")]
#![allow(clippy::unwrap_used, reason = "a test's helpers may fail the test")]

#[path = "parts/changing_quotas.rs"]
mod changing_quotas;
#[cfg(feature = "redis")]
mod parts;
#[path = "parts/virtual_nodes.rs"]
mod virtual_nodes;
#[path = "parts/ways.rs"]
mod ways;

use std::ops::Deref;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use changing_quotas::{Central, alone, burst, raises, spend_all};
use tidegate::testing::{ManualClock, ScriptedStore};
use tidegate::{
    ActiveLimit, AsyncLimit, Builder, ConfigError, Event, FixedWindow, LeakyBucket, Limit, Limiter,
    Override, OverrideError, Quota, Rule, SlidingLog, SlidingWindow,
};
use virtual_nodes::VirtualNodes;
use ways::ways;

const NODES: usize = 4;
const SECOND: Duration = Duration::from_secs(1);
const HOUR: Duration = Duration::from_secs(3600);
/// How far time goes between two looks of the nodes.
const STEP: Duration = Duration::from_millis(10);

/// Nodes that share a limit in virtual time.
struct Cluster {
    shared: VirtualNodes,
    heard: Arc<Mutex<Vec<Event>>>,
}

impl Deref for Cluster {
    type Target = VirtualNodes;

    fn deref(&self) -> &VirtualNodes {
        &self.shared
    }
}

impl Cluster {
    fn new(limit: &Limit) -> Self {
        let heard = Arc::new(Mutex::new(Vec::new()));
        let listens = |builder: Builder| {
            let heard = heard.clone();
            builder.listen(move |event: &Event| {
                if matches!(event, Event::PlansDiffer { .. }) {
                    heard.lock().unwrap().push(event.clone());
                }
            })
        };
        Self { shared: VirtualNodes::new(NODES, std::slice::from_ref(limit), listens), heard }
    }

    /// The limit on one node, under a plan or by its own quota.
    fn limit(&self, node: usize, plan: &str) -> AsyncLimit {
        let limit = self.nodes[node].async_limit("api").unwrap();
        if plan.is_empty() { limit } else { limit.plan(plan).unwrap() }
    }

    /// Spends what a key has on one node, and says how much that was.
    fn drain(&self, node: usize, plan: &str) -> u32 {
        self.shared.drain(&self.limit(node, plan))
    }
}

fn limit(own: impl Into<Rule>, large: impl Into<Rule>) -> Limit {
    Limit::new("api", own).plan("large", large)
}

#[test]
fn key_of_one_node_keeps_what_it_has_under_another_plan() {
    for (name, own, large, left) in raises() {
        let (api, _) = alone(limit(own, large));
        let plan = api.plan("large").unwrap();
        for _ in 0..5 {
            assert!(api.check("key").is_allowed());
        }
        let look = |limit: &ActiveLimit| limit.check_n("key", 0).unwrap().remaining();
        assert_eq!((look(&plan), look(&api)), (left.into(), 15), "{name}: a look changes nothing");
        assert_eq!(spend_all(&plan), left, "{name}");
        assert_eq!((spend_all(&api), spend_all(&plan)), (0, 0), "{name}: nothing is made");
        let news = [plan.check("new").remaining(), api.check("another").remaining()];
        let all = [large, own].map(|rule| rule.quota().burst_tokens() - 1);
        assert_eq!(news, all, "{name}: a new key has all of its plan");
    }
}

#[test]
fn key_that_nodes_share_keeps_what_it_has_under_another_plan() {
    for (name, own, large, left) in raises() {
        let cluster = Cluster::new(&limit(own, large).strict());
        for _ in 0..5 {
            assert!(cluster.wait(cluster.limit(0, "").check_sure("key")).is_allowed());
        }
        cluster.pass(60 * SECOND, SECOND / 10);
        assert_eq!(cluster.drain(1, "large"), left, "{name}");
        assert_eq!(cluster.drain(0, ""), 0, "{name}: nothing is made");
        assert_eq!(cluster.drain(2, "large"), 0, "{name}: nothing is made");
    }
}

#[test]
fn key_of_which_the_store_decides_keeps_what_it_has_under_another_plan() {
    for (name, own, large, left) in raises() {
        let cluster = Cluster::new(&limit(own, large).exact());
        for _ in 0..5 {
            assert!(cluster.wait(cluster.limit(0, "").check_sure("key")).is_allowed());
        }
        assert_eq!(cluster.drain(1, "large"), left, "{name}");
        assert_eq!((cluster.drain(0, ""), cluster.drain(2, "large")), (0, 0), "{name}");
    }
}

#[test]
fn group_under_a_plan_asks_by_it_those_limits_that_have_it() {
    let modes = [Limit::strict as fn(Limit) -> Limit, Limit::exact, Limit::local];
    for ((name, own, large, left), mode) in
        raises().into_iter().flat_map(|raise| modes.map(|mode| (raise, mode)))
    {
        let limits = [mode(limit(own, large)), mode(Limit::new("other", burst(200)))];
        let nodes = VirtualNodes::new(1, &limits, |builder| builder);
        let group = nodes.nodes[0].async_group(["other", "api"]).unwrap();
        let under = group.plan("large").unwrap();
        for _ in 0..5 {
            assert!(nodes.wait(group.check_sure("key")).is_allowed(), "{name}");
        }
        let mut allowed = 0;
        for _ in 0..2 {
            nodes.pass(60 * SECOND, SECOND / 10);
            while nodes.wait(under.check_sure("key")).is_allowed() {
                allowed += 1;
            }
        }
        assert_eq!(allowed, left, "{name}");
        assert_eq!(nodes.wait(group.check_sure("key")).limit_name(), "api", "{name}");
        let other = nodes.nodes[0].async_limit("other").unwrap();
        assert_eq!(nodes.drain(&other), 200 - 5 - left, "{name}");
        let unknown = group.plan("small").unwrap_err().to_string();
        assert!(unknown.contains("small"), "{unknown}");
    }
}

#[test]
fn group_under_a_plan_decides_at_once_by_the_plans_burst() {
    let limits = [limit(burst(20), burst(100)), Limit::new("other", burst(200))].map(Limit::local);
    let nodes = VirtualNodes::new(1, &limits, |builder| builder);
    let group = nodes.nodes[0].group(["api", "other"]).unwrap().plan("large").unwrap();
    let decision = group.check("new");
    assert_eq!(
        (decision.plan_name(), decision.burst(), decision.remaining()),
        (Some("large"), 100, 99)
    );
    assert!(group.check_n("new", 101).is_err(), "above the plan's burst");
    assert!(group.check_n("new", 99).unwrap().is_allowed());
    assert!(group.check("new").is_denied());
}

#[test]
fn bucket_of_one_node_is_the_definition_while_its_plan_changes_at_random() {
    const PLANS: [(&str, u32, u32); 3] = [("", 100, 10), ("a", 7, 100), ("b", 2000, 50)];
    let quota =
        |(_, rate, burst): (&str, u32, u32)| Quota::per_second(rate.into()).burst(burst.into());
    for seed in 0..50 {
        let limit = Limit::new("api", quota(PLANS[0]));
        let (api, clock) = alone(limit.plan("a", quota(PLANS[1])).plan("b", quota(PLANS[2])));
        let limits = [api.clone(), api.plan("a").unwrap(), api.plan("b").unwrap()];
        let mut rng = fastrand::Rng::with_seed(seed);
        let (mut now_us, mut plan, mut allowed, mut edges) = (0, 0, 0, 0);
        let mut central = Central { level: 10_000_000, at_us: 0, plan: (100, 10) };
        for request in 0..5000 {
            if rng.u8(..) < 10 {
                plan = rng.usize(..3);
            }
            let us = if rng.u8(..) < 3 { rng.u64(..2_000_000) } else { rng.u64(..1000) };
            clock.advance(Duration::from_micros(us));
            now_us += us;
            let (_, rate, burst) = PLANS[plan];
            let expected = central.allows((rate, burst), now_us);
            let decided = limits[plan].check("key").is_allowed();
            if decided != expected {
                // A state is rounded down to a unit, which may cost a microsecond.
                let is_edge = expected && central.level < rate.into();
                assert!(is_edge, "seed {seed}, request {request}: {decided}, {}", central.level);
                central.level += 1_000_000;
                edges += 1;
            }
            allowed += u32::from(decided);
        }
        assert!((500..4900).contains(&allowed) && edges < 50, "{allowed}, {edges} at an edge");
    }
}

/// Bucket4j's ADDITIVE would make 100 tokens at each raise, and a change in proportion would double them.
#[test]
fn flapping_plans_make_no_tokens() {
    let (api, _) = alone(limit(burst(100), burst(200)));
    let large = api.plan("large").unwrap();
    assert_eq!(spend_all(&api), 100);
    for _ in 0..100 {
        assert!(large.check("key").is_denied() && api.check("key").is_denied());
    }
}

/// What was spent, kept over a change from 1000 an hour to 10, would deny for 99 hours.
#[test]
fn lowered_plan_denies_no_longer_than_its_own_rate_explains() {
    let (api, clock) = alone(limit(Quota::per_hour(10), Quota::per_hour(1000)));
    let large = api.plan("large").unwrap();
    assert_eq!(spend_all(&large), 1000);
    let denied = api.check("key");
    assert!(denied.retry_after() <= HOUR / 10 + Duration::from_micros(1), "{denied:?}");
    clock.advance(denied.retry_after());
    assert!(api.check("key").is_allowed());
}

#[test]
fn slots_of_a_leaky_bucket_stay_where_they_were_promised() {
    let queue = |tokens| LeakyBucket::per_second(tokens).queue(10 * SECOND);
    let (api, clock) = alone(limit(queue(1), queue(100)));
    let large = api.plan("large").unwrap();
    let delays = [(); 3].map(|()| api.schedule("key").delay());
    assert_eq!(delays, [Duration::ZERO, SECOND, 2 * SECOND]);
    assert_eq!(large.schedule("key").delay(), 3 * SECOND, "after the slots that were promised");
    assert_eq!(large.schedule("key").delay(), 3 * SECOND + SECOND / 100);
    clock.advance(4 * SECOND);
    assert!(large.check("key").is_allowed());
}

/// What a key of a busy cluster is allowed in `seconds`, where callers of each node name the plan that `plan_of` says.
fn allowed(cluster: &Cluster, seconds: u64, plan_of: impl Fn(usize, u64) -> &'static str) -> u32 {
    let mut allowed = 0;
    for step in 0..seconds * 100 {
        for node in 0..NODES {
            let name = plan_of(node, step / 100);
            let limit = cluster.nodes[node].limit("api").unwrap();
            let limit = if name.is_empty() { limit } else { limit.plan(name).unwrap() };
            for _ in 0..3 {
                allowed += u32::from(limit.check("key").is_allowed());
            }
        }
        cluster.pass(STEP, STEP);
    }
    allowed
}

#[test]
fn key_that_nodes_share_gets_the_rate_of_the_plan_that_was_named_last() {
    let cluster = Cluster::new(&limit(Quota::per_second(50), Quota::per_second(400)));
    let first = allowed(&cluster, 10, |_, _| "");
    assert!((500..=570).contains(&first), "{first}");
    let raised = allowed(&cluster, 10, |_, _| "large");
    assert!((3500..=4050).contains(&raised), "{raised}");
    let lowered = allowed(&cluster, 10, |_, _| "");
    assert!((450..=1000).contains(&lowered), "{lowered}: leases of the plan before ran out");
    let again = allowed(&cluster, 10, |_, _| "");
    assert!((480..=520).contains(&again), "{again}");
    assert!(cluster.heard.lock().unwrap().is_empty());
}

#[test]
fn node_that_named_its_plan_last_is_followed_by_those_that_go_on_naming_another() {
    let cluster = Cluster::new(&limit(Quota::per_second(50), Quota::per_second(400)));
    allowed(&cluster, 3, |_, _| "");
    allowed(&cluster, 2, |node, _| if node == 0 { "large" } else { "" });
    let raised = allowed(&cluster, 10, |node, _| if node == 0 { "large" } else { "" });
    assert!((3500..=4050).contains(&raised), "{raised}");
    let heard = cluster.heard.lock().unwrap().len();
    assert_eq!(heard, NODES - 1, "each of the others tells once a minute");
}

/// A node that had not heard of a change asked once, and was gone: the others followed it for ever.
#[test]
fn plan_of_a_node_that_is_gone_gives_way_to_that_which_callers_go_on_naming() {
    let cluster = Cluster::new(&limit(Quota::per_second(50), Quota::per_second(400)));
    allowed(&cluster, 3, |_, _| "large");
    let _ = cluster.wait(cluster.limit(0, "").check_sure("key"));
    cluster.pass(SECOND / 10, STEP);
    let large: Vec<_> = (1..NODES)
        .map(|node| cluster.nodes[node].limit("api").unwrap().plan("large").unwrap())
        .collect();
    let allowed_in = |seconds: u32| {
        let mut allowed = 0;
        for _ in 0..100 * seconds {
            for limit in &large {
                allowed += [(); 4].iter().filter(|()| limit.check("key").is_allowed()).count();
            }
            cluster.pass(STEP, STEP);
        }
        allowed
    };
    let followed = allowed_in(10);
    assert!(followed < 1500, "{followed}: the plan that was named last holds");
    allowed_in(55);
    let again = allowed_in(10);
    assert!(again > 3500, "{again}");
}

/// A look under the default plan asked the store for that plan, and all nodes followed it for a minute.
#[test]
fn look_that_waits_changes_no_plan_and_takes_nothing_of_it() {
    let cluster = Cluster::new(&limit(Quota::per_hour(5).burst(5), Quota::per_hour(50).burst(50)));
    assert!(cluster.wait(cluster.limit(0, "large").check_sure("key")).is_allowed());
    cluster.pass(2 * SECOND, STEP);
    for node in 1..NODES {
        let look = cluster.wait(cluster.limit(node, "").check_sure_n("key", 0));
        assert!(!look.unwrap().is_sure(), "it is not asked about");
    }
    cluster.pass(2 * SECOND, STEP);
    let drained = cluster.drain(0, "large");
    assert!((45..=50).contains(&drained), "{drained} of 49");
}

#[test]
fn debt_of_a_bucket_stays_under_another_plan() {
    let per_hour = |tokens| Quota::per_hour(tokens).burst(100);
    for limit in [
        limit(per_hour(3600), per_hour(7200)).exact(),
        limit(per_hour(3600), per_hour(7200)).local(),
        limit(per_hour(3600), per_hour(7200)).strict(),
    ] {
        let mode = format!("{limit:?}");
        let cluster = Cluster::new(&limit);
        let reservation = cluster.wait(cluster.limit(0, "").reserve("key", 90)).unwrap();
        reservation.commit(180);
        cluster.pass(2 * SECOND, STEP);
        // 80 tokens are owed, less what flows in at one a second, then at two.
        let large = cluster.limit(0, "large");
        assert!(cluster.wait(large.check_sure("key")).is_denied(), "{mode}");
        cluster.pass(35 * SECOND, SECOND / 10);
        assert!(cluster.wait(large.check_sure("key")).is_denied(), "{mode}: it owes for 40 s");
        cluster.pass(10 * SECOND, SECOND / 10);
        assert!(cluster.wait(large.check_sure("key")).is_allowed(), "{mode}");
    }
}

/// What was spent beyond the lower plan stayed, and its refund came on top: 100 fresh tokens.
#[test]
fn refund_of_what_a_larger_plan_had_allowed_gives_nothing_fresh() {
    let windows: [fn(u64) -> Rule; 2] = [
        |tokens| FixedWindow::per_day(tokens).into(),
        |tokens| SlidingWindow::per_day(tokens).into(),
    ];
    for window in windows {
        let cluster = Cluster::new(&limit(window(100), window(1000)).strict());
        let large = cluster.limit(0, "large");
        let spent = cluster.wait(large.reserve("key", 500)).unwrap();
        let held = cluster.wait(large.reserve("key", 500)).unwrap();
        cluster.pass(2 * SECOND, STEP);
        spent.commit(500);
        assert!(cluster.wait(cluster.limit(0, "").check_sure("key")).is_denied());
        cluster.pass(2 * SECOND, STEP);
        held.commit(0);
        cluster.pass(2 * SECOND, STEP);
        assert_eq!(cluster.drain(0, ""), 0, "{:?}", window(100));
        assert_eq!(cluster.drain(1, "large"), 500, "{:?}", window(100));
    }
}

#[test]
fn services_that_name_different_plans_by_turns_make_no_tokens() {
    let cluster =
        Cluster::new(&limit(Quota::per_second(10).burst(10), Quota::per_second(20).burst(200)));
    let plan_of = |node: usize, second: u64| {
        if (node as u64 + second).is_multiple_of(2) { "large" } else { "" }
    };
    let seconds = 60;
    let admitted = allowed(&cluster, seconds, plan_of);
    // A bucket of the higher rate, from what the key had, and a first credit of each node.
    assert!(admitted <= 10 + 20 * seconds as u32 + 4 * NODES as u32, "{admitted}");
    assert!(admitted >= 10 * seconds as u32 * 8 / 10, "{admitted}");
}

#[test]
fn plans_that_cannot_be_kept_name_field_and_value() {
    let quota = Quota::per_second(10);
    let day = |tokens| FixedWindow::per_day(tokens);
    let cases = [
        (Limit::new("api", quota).plan("", quota), "plan = :"),
        (Limit::new("api", quota).plan("a b", quota), "plan = a b:"),
        (Limit::new("api", quota).plan("a", quota).plan("a", quota), "plan = a: is defined twice"),
        (Limit::new("api", quota).plan("a", SlidingLog::per_second(1)), "the limit's algorithm"),
        (Limit::new("api", day(1)).plan("a", FixedWindow::per_hour(1)), "the same windows"),
        (Limit::new("api", day(1)).plan("a", day(1).zone("Europe/Berlin")), "the same windows"),
        (Limit::new("api", quota).plan("a", Quota::per_second(0)), "quota.tokens = 0"),
    ];
    for (limit, expected) in cases {
        let error = Limiter::builder().limit(limit.local()).build().unwrap_err().to_string();
        assert!(error.contains("\"api\"") && error.contains(expected), "{error}");
    }
    let leaky = Limit::new("api", LeakyBucket::per_second(1)).plan("a", LeakyBucket::per_second(2));
    let store = ScriptedStore::new(&ManualClock::new());
    let error = Limiter::builder().limit(leaky).store(store).build().unwrap_err();
    assert!(error.to_string().contains("plan = a: slots that nodes share"), "{error}");
    let (api, _) = alone(limit(quota, quota));
    let error = api.plan("gold").unwrap_err();
    let known = ConfigError::UnknownPlan {
        limit: "api".to_owned(),
        name: "gold".to_owned(),
        known: "large".to_owned(),
    };
    assert_eq!(error, known);
    assert!(api.check_n("key", 11).is_err());
}

#[test]
fn keys_are_under_the_plan_of_their_override_whatever_way_they_are_asked() {
    let cluster = Cluster::new(&limit(Quota::per_second(10), Quota::per_second(1000)));
    let overrides = cluster.nodes[0].overrides();
    for (key, set) in [
        ("acme", Override::key("acme").plan("large").lasting(HOUR)),
        ("beta-7", Override::prefix("beta-").plan("large").lasting(HOUR)),
    ] {
        let handle = cluster.nodes[0].limit("api").unwrap().handle(key);
        assert_eq!(handle.check().plan_name(), None);
        cluster.wait(overrides.set("api", set)).unwrap();
        for (way, ask) in ways(&cluster, key) {
            let decision = ask();
            assert_eq!((decision.plan_name(), decision.burst()), (Some("large"), 1000), "{way}");
            assert!(decision.is_allowed() && !decision.is_override(), "{way}");
            cluster.pass(SECOND / 20, STEP);
        }
        assert_eq!(cluster.nodes[0].limit("api").unwrap().check("other").plan_name(), None);
        assert!(handle.check_n(900).is_ok(), "more than the limit's own burst");
    }
    let first = cluster.limit(1, "");
    cluster.pass(3 * SECOND, STEP);
    assert_eq!(cluster.wait(first.check_sure("acme")).plan_name(), Some("large"), "on all nodes");
    cluster.pass(HOUR, SECOND);
    for key in ["acme", "beta-7"] {
        for (way, ask) in ways(&cluster, key) {
            assert_eq!(ask().plan_name(), None, "{way}: the override is over");
            cluster.pass(SECOND / 5, STEP);
        }
    }
}

#[test]
fn exact_and_local_keys_are_under_the_plan_of_their_override_too() {
    for limit in [limit(burst(20), burst(100)).exact(), limit(burst(20), burst(100)).local()] {
        let cluster = Cluster::new(&limit);
        let api = cluster.limit(0, "");
        for _ in 0..5 {
            assert!(cluster.wait(api.check_sure("key")).is_allowed());
        }
        let set = Override::key("key").plan("large");
        cluster.wait(cluster.nodes[0].overrides().set("api", set)).unwrap();
        assert_eq!(cluster.drain(0, ""), 15, "it keeps what it has");
        let reserved = cluster.wait(api.reserve("another", 100));
        assert!(reserved.is_err(), "more than the limit's own burst, and no override");
        let set = Override::key("new").plan("large");
        cluster.wait(cluster.nodes[0].overrides().set("api", set)).unwrap();
        let reserved = cluster.wait(api.reserve("new", 100)).unwrap();
        reserved.commit(40);
        cluster.pass(SECOND, STEP);
        let left = cluster.wait(api.check_sure_n("new", 0)).unwrap().remaining();
        assert_eq!(left, 60, "what is not used goes back by the plan that decided");
        let removed = Override::key("key");
        cluster.wait(cluster.nodes[0].overrides().remove("api", removed)).unwrap();
        assert_eq!(cluster.wait(api.check_sure("key")).plan_name(), None);
    }
}

/// It was asked again and again, for ever, and a denial said to come back at once. The script of an exact log broke.
#[test]
fn request_of_more_than_the_keys_own_plan_is_denied_and_told_to_wait() {
    let pairs: [(Rule, Rule); 4] = [
        (Quota::per_minute(5).into(), Quota::per_minute(100).into()),
        (FixedWindow::per_minute(5).into(), FixedWindow::per_minute(100).into()),
        (SlidingWindow::per_minute(5).into(), SlidingWindow::per_minute(100).into()),
        (SlidingLog::per_minute(5).into(), SlidingLog::per_minute(100).into()),
    ];
    let modes = [Limit::local, Limit::exact, Limit::strict];
    for ((own, large), mode) in pairs.into_iter().flat_map(|pair| modes.map(|mode| (pair, mode))) {
        let limit = mode(limit(own, large));
        let cluster = Cluster::new(&limit);
        let set = Override::key("acme").plan("large");
        cluster.wait(cluster.nodes[0].overrides().set("api", set)).unwrap();
        let api = cluster.limit(0, "");
        for spent in [0, 2] {
            if spent > 0 {
                let decision = cluster.wait(api.check_sure_n("key", spent)).unwrap();
                assert!(decision.is_allowed(), "{limit:?}");
            }
            let denied = cluster.wait(api.check_sure_n("key", 50)).unwrap();
            assert!(denied.is_denied(), "{limit:?}");
            assert!(denied.retry_after() >= Duration::from_millis(1), "{limit:?}: {denied:?}");
            let waited = api.until_ready_n("key", 50, SECOND / 10);
            let waited = cluster.wait_by(STEP, async {
                tokio::time::timeout(60 * SECOND, waited).await.expect("it ends")
            });
            assert!(waited.unwrap().is_denied(), "{limit:?}");
        }
    }
}

/// They were allowed as soon as a key could have had the tokens without the burst; and slots of years were promised, or so many that
/// the node took the key's place for a free one, and lost it.
#[test]
fn no_wait_and_no_queue_allows_more_than_the_keys_own_plan_holds() {
    let minute = limit(Quota::per_minute(5), Quota::per_minute(100)).local();
    let leaky = limit(LeakyBucket::per_minute(1), LeakyBucket::per_second(1000));
    for (limit, cost) in [(minute, 50), (leaky.clone().local(), 600_000), (leaky.exact(), 600_000)]
    {
        let cluster = Cluster::new(&limit);
        let set = Override::key("acme").plan("large");
        cluster.wait(cluster.nodes[0].overrides().set("api", set)).unwrap();
        let api = cluster.limit(0, "");
        for cost in [cost, 10_000_000, 20_000_000] {
            let Ok(denied) = cluster.wait(api.check_sure_n("key", cost)) else { continue };
            assert!(denied.is_denied(), "{limit:?}: {cost}");
            let scheduled = cluster.wait(api.schedule_n("key", cost)).unwrap();
            assert!(scheduled.is_denied(), "{limit:?}: {cost}");
            let waited = cluster.wait_by(SECOND, api.until_ready_n("key", cost, HOUR)).unwrap();
            assert!(waited.is_denied(), "{limit:?}: {cost}");
            assert!(waited.retry_after() >= denied.retry_after(), "{limit:?}: {cost}");
        }
        assert!(cluster.wait(api.check_sure("key")).is_allowed(), "{limit:?}: nothing was taken");
        let again: Vec<bool> =
            (0..6).map(|_| cluster.wait(api.check_sure("key")).is_allowed()).collect();
        assert!(!again[5], "{limit:?}: {again:?}");
        assert!(cluster.wait(api.check_sure_n("acme", cost)).unwrap().is_allowed(), "{limit:?}");
    }
}

#[test]
fn override_with_a_plan_that_the_limit_does_not_have_is_refused() {
    let cluster = Cluster::new(&limit(Quota::per_second(10), Quota::per_second(1000)));
    let set = Override::key("acme").plan("gold");
    let error = cluster.wait(cluster.nodes[0].overrides().set("api", set)).unwrap_err();
    let expected = OverrideError::UnknownPlan {
        limit: "api".to_owned(),
        name: "gold".to_owned(),
        known: "large".to_owned(),
    };
    assert_eq!(error, expected);
}

#[test]
fn key_with_a_plan_by_override_is_blocked_after_a_denial_as_any_other() {
    let limit = limit(burst(1), burst(2)).block_for(10 * SECOND).local();
    let cluster = Cluster::new(&limit);
    let api = cluster.nodes[0].limit("api").unwrap();
    let set = Override::key("key").plan("large");
    cluster.wait(cluster.nodes[0].overrides().set("api", set)).unwrap();
    assert_eq!(spend_all(&api), 2);
    assert!(api.check("key").is_override(), "blocked");
    cluster.pass(11 * SECOND, STEP);
    assert_eq!(api.check("key").plan_name(), Some("large"));
}

/// Plans that change and limits that are updated on 8 nodes that share a real Redis.
/// `TIDEGATE_PLANS_FLAP=10 cargo test --features testing --test plans redis -- --nocapture` prints what was admitted.
#[cfg(feature = "redis")]
#[allow(clippy::disallowed_methods, reason = "the server and its load are real")]
mod on_redis {
    use std::time::Instant;

    use tidegate::{Incidents, RedisStore, bound};

    use tokio::sync::Mutex;

    use super::parts::RedisServer;
    use super::*;

    const NODES: usize = 8;
    const FREE: Quota = Quota::per_second(200);
    const LARGE: Quota = Quota::per_second(2000);
    /// How long plans flap, in seconds, unless the environment's `TIDEGATE_PLANS_FLAP` says so.
    const FLAP_SECONDS: u64 = 2;
    /// Between two rounds of requests, of which each node then makes some.
    const ROUND: Duration = Duration::from_millis(2);
    const REQUESTS: usize = 4;
    const READY_WITHIN: Duration = Duration::from_secs(20);

    /// One load at a time: its rates are measured.
    static ALONE: Mutex<()> = Mutex::const_new(());

    /// How callers' quotas change.
    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Change {
        /// They name another plan.
        Plan,
        /// The limit is updated on their node.
        Update,
    }

    struct Load {
        nodes: Vec<Limiter>,
        /// Each node's limit, by its own quota and under the plan.
        limits: Vec<[ActiveLimit; 2]>,
        change: Change,
        /// Nodes whose limit was updated to the larger quota.
        updated: Vec<bool>,
        begun: Instant,
        /// When each request was admitted, in seconds.
        admitted: Vec<f64>,
    }

    impl Load {
        async fn new(server: &RedisServer, change: Change) -> Self {
            let limit = Limit::new("api", FREE).plan("large", LARGE);
            let (mut nodes, mut limits) = (Vec::new(), Vec::new());
            for _ in 0..NODES {
                let store = RedisStore::open(&server.url()).unwrap();
                let builder = Limiter::builder().limit(limit.clone()).store(store);
                let node = builder.build_ready(READY_WITHIN).await.unwrap();
                let api = node.limit("api").unwrap();
                limits.push([api.clone(), api.plan("large").unwrap()]);
                nodes.push(node);
            }
            let (updated, admitted) = (vec![false; NODES], Vec::new());
            Self { nodes, limits, change, updated, begun: Instant::now(), admitted }
        }

        /// The limit that callers of a node ask.
        fn limit(&mut self, node: usize, is_large: bool) -> &ActiveLimit {
            if self.change == Change::Plan {
                return &self.limits[node][usize::from(is_large)];
            }
            if self.updated[node] != is_large {
                self.updated[node] = is_large;
                let quota = if is_large { LARGE } else { FREE };
                self.nodes[node].update([Limit::new("api", quota).plan("large", LARGE)]).unwrap();
            }
            &self.limits[node][0]
        }

        /// Makes requests for `time`; each node has the larger quota when `is_large` says so.
        async fn run(&mut self, time: Duration, is_large: impl Fn(usize, Duration) -> bool) {
            let begun = Instant::now();
            while begun.elapsed() < time {
                for node in 0..NODES {
                    let limit = self.limit(node, is_large(node, begun.elapsed())).clone();
                    for _ in 0..REQUESTS {
                        if limit.check("key").is_allowed() {
                            self.admitted.push(self.begun.elapsed().as_secs_f64());
                        }
                    }
                }
                tokio::time::sleep(ROUND).await;
            }
        }

        /// Admitted a second, in the last `seconds`.
        fn rate(&self, seconds: f64) -> f64 {
            let now = self.begun.elapsed().as_secs_f64();
            let last = self.admitted.iter().filter(|at| **at > now - seconds);
            last.count() as f64 / seconds
        }

        /// The most that was admitted beyond one bucket of the larger plan, in tokens.
        fn beyond_one_bucket(&self) -> f64 {
            let (rate, burst) = (LARGE.tokens_per_second(), LARGE.burst_tokens() as f64);
            let (mut level, mut last, mut deepest) = (burst, 0.0, 0.0_f64);
            for at in &self.admitted {
                level = (level + rate * (at - last)).min(burst) - 1.0;
                last = *at;
                deepest = deepest.max(-level);
            }
            deepest
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn nodes_on_redis_follow_plans_that_change_under_load() {
        follow(Change::Plan).await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn nodes_on_redis_follow_updates_under_load() {
        follow(Change::Update).await;
    }

    async fn follow(change: Change) {
        let _alone = ALONE.lock().await;
        let server = RedisServer::start();
        let mut load = Load::new(&server, change).await;
        let allowed = bound(&Limit::new("api", LARGE), NODES as u32, &Incidents::default());

        let seconds = std::env::var("TIDEGATE_PLANS_FLAP").ok().and_then(|text| text.parse().ok());
        let flaps = Duration::from_secs(seconds.unwrap_or(FLAP_SECONDS));
        load.run(flaps, |_, at| (at.as_millis() / 100).is_multiple_of(2)).await;
        let (beyond, rate) = (load.beyond_one_bucket(), load.rate(flaps.as_secs_f64()));
        println!(
            "{change:?}, changed each 100 ms: {rate:.0} a second, {beyond:.0} beyond one bucket"
        );
        assert!(beyond <= allowed, "{beyond} of {allowed}");

        // One node after the other, as a rolling deploy has it, and back.
        let is_rolled = |node: usize, at: Duration| at.as_millis() as usize / 125 > node;
        load.run(SECOND, is_rolled).await;
        load.run(3 * SECOND, |_, _| true).await;
        let raised = load.rate(1.0);
        load.run(SECOND, |node, at| !is_rolled(node, at)).await;
        load.run(4 * SECOND, |_, _| false).await;
        let lowered = load.rate(2.0);
        let beyond = load.beyond_one_bucket();
        println!(
            "{change:?}, rolled out: {raised:.0} a second of 2000; rolled back: {lowered:.0} of 200; {beyond:.0} beyond one bucket"
        );
        assert!((1600.0..=2100.0).contains(&raised), "{raised}");
        assert!((150.0..=230.0).contains(&lowered), "{lowered}");
        assert!(beyond <= allowed, "{beyond} of {allowed}");
    }
}
