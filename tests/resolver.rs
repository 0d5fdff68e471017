//! Resolvers of plans: a decision never waits for one; a key has the default plan until its plan is known, and what is known
//! holds while the resolver is asked again or fails.
#![cfg(feature = "testing")]
#![allow(clippy::unwrap_used, reason = "a test's helpers may fail the test")]

#[path = "parts/virtual_nodes.rs"]
mod virtual_nodes;

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tidegate::testing::ManualClock;
use tidegate::{
    ActiveLimit, Builder, ConfigError, Decision, Event, FixedWindow, Hashed, LeakyBucket, Limit,
    Limiter, Override, PLAN_RESOLVER_CALLS_MAX, PLAN_RESOLVER_PAUSE, PLAN_RESOLVER_TIMEOUT,
    PLAN_RESOLVER_WAITING_MAX, Quota, Switch,
};
use tokio::runtime::Runtime;
use tokio::sync::Semaphore;
use virtual_nodes::VirtualNodes;

const SECOND: Duration = Duration::from_secs(1);
const TTL: Duration = Duration::from_secs(600);

/// As good as no refill.
fn burst(tokens: u64) -> Quota {
    Quota::new(1, Duration::from_secs(8 * 3600)).burst(tokens)
}

/// What a resolver does about a key.
#[derive(Clone, Copy)]
enum Does {
    Names(&'static str),
    Fails,
    Panics,
    /// Without a future.
    PanicsAtOnce,
    NeverAnswers,
}

/// A database of plans, as a test has written it.
#[derive(Clone)]
struct Plans {
    /// Others have the default plan.
    keys: Arc<Mutex<HashMap<String, Does>>>,
    asked: Arc<Mutex<Vec<String>>>,
    /// Closed, it holds all calls.
    gate: Arc<Semaphore>,
    /// Of those who call.
    calls: Arc<()>,
}

impl Plans {
    fn new<const COUNT: usize>(keys: [(&str, Does); COUNT]) -> Self {
        let keys = keys.map(|(key, does)| (key.to_owned(), does)).into();
        Self {
            keys: Arc::new(Mutex::new(keys)),
            asked: Arc::default(),
            gate: Arc::new(Semaphore::new(Semaphore::MAX_PERMITS)),
            calls: Arc::new(()),
        }
    }

    fn set(&self, key: &str, does: Does) {
        self.keys.lock().unwrap().insert(key.to_owned(), does);
    }

    fn resolve(
        &self,
        key: Vec<u8>,
    ) -> impl Future<Output = Result<Option<String>, &'static str>> + Send + use<> {
        let key = String::from_utf8(key).unwrap();
        self.asked.lock().unwrap().push(key.clone());
        let does = self.keys.lock().unwrap().get(&key).copied();
        assert!(!matches!(does, Some(Does::PanicsAtOnce)), "the resolver's own mistake");
        let (gate, call) = (self.gate.clone(), self.calls.clone());
        async move {
            drop(gate.acquire().await.unwrap());
            let answer = match does {
                None => Ok(None),
                Some(Does::Names(plan)) => Ok(Some(plan.to_owned())),
                Some(Does::Fails) => Err("no database"),
                Some(Does::Panics | Does::PanicsAtOnce) => panic!("the resolver's own mistake"),
                Some(Does::NeverAnswers) => std::future::pending().await,
            };
            drop(call);
            answer
        }
    }

    /// The keys that it was asked for since the last time.
    fn asked(&self) -> Vec<String> {
        std::mem::take(&mut *self.asked.lock().unwrap())
    }

    fn close(&self) {
        self.gate.forget_permits(Semaphore::MAX_PERMITS);
    }

    fn open(&self) {
        self.gate.add_permits(Semaphore::MAX_PERMITS);
    }
}

/// A limiter of one node, on a runtime that stands still but while a test waits for something.
struct Node {
    limiter: Limiter,
    api: ActiveLimit,
    clock: ManualClock,
    runtime: Runtime,
    heard: Arc<Mutex<Vec<Event>>>,
}

/// Ten tokens, and a hundred under the plan pro.
fn limit() -> Limit {
    Limit::new("api", burst(10)).plan("pro", burst(100))
}

fn resolved(builder: Builder, plans: &Plans, ttl: Duration) -> Builder {
    let plans = plans.clone();
    builder.resolve_plans("api", ttl, move |key| plans.resolve(key))
}

impl Node {
    fn new(plans: &Plans) -> Self {
        Self::with(plans, limit(), |builder| builder)
    }

    fn with(plans: &Plans, limit: Limit, build: impl FnOnce(Builder) -> Builder) -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let clock = ManualClock::new();
        let heard: Arc<Mutex<Vec<Event>>> = Arc::default();
        let (entered, hears) = (runtime.enter(), heard.clone());
        let builder = Limiter::builder().limit(limit.local()).clock(&clock);
        let builder = resolved(builder, plans, TTL);
        let builder = builder.listen(move |event| hears.lock().unwrap().push(event.clone()));
        let limiter = build(builder).build().unwrap();
        drop(entered);
        let api = limiter.limit("api").unwrap();
        let node = Self { limiter, api, clock, runtime, heard };
        node.settle();
        node
    }

    fn settle(&self) {
        self.runtime.block_on(self.limiter.settle());
    }

    /// Lets time pass at once.
    fn pass(&self, time: Duration) {
        self.clock.advance(time);
        self.settle();
    }

    /// Lets the tasks do what they can while calls are held.
    fn run(&self) {
        self.runtime.block_on(async {
            for _ in 0..1000 {
                tokio::task::yield_now().await;
            }
        });
    }

    /// The burst of the plan that a key has.
    fn burst_of(&self, key: &str) -> u64 {
        self.api.check_n(key, 0).unwrap().burst()
    }

    /// Asks for a key, and waits until its plan is known.
    fn learn(&self, key: &str) {
        self.burst_of(key);
        self.settle();
    }

    /// What was resolved, unknown, failed and not asked since the last time.
    fn counts(&self) -> [u64; 4] {
        self.pass(SECOND);
        let mut sums = [0; 4];
        self.heard.lock().unwrap().retain(|event| {
            let Event::PlansResolved { limit, resolved, unknown, failed, not_asked } = event else {
                return true;
            };
            assert_eq!(&**limit, "api");
            let counts = [*resolved, *unknown, *failed, *not_asked];
            sums.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
            false
        });
        sums
    }

    /// What events of failures and of unknown plans say since the last time.
    fn complaints(&self) -> Vec<String> {
        let mut all = Vec::new();
        self.heard.lock().unwrap().retain(|event| {
            all.push(match event {
                Event::PlanResolverFailed { error, .. } => error.clone(),
                Event::PlanNotKnown { plan, .. } => plan.clone(),
                _ => return true,
            });
            false
        });
        all
    }
}

const PRO: Does = Does::Names("pro");

#[test]
fn key_has_the_default_plan_until_the_resolver_answers_and_then_its_plan_and_what_it_had() {
    let plans = Plans::new([("acme", PRO)]);
    let node = Node::new(&plans);
    let first = node.api.check("acme");
    assert_eq!((first.burst(), first.remaining()), (10, 9));
    assert!(plans.asked().is_empty(), "the decision does not call it");
    node.settle();
    let next = node.api.check("acme");
    assert_eq!((next.burst(), next.remaining()), (100, 8), "no fresh burst");
    assert_eq!(node.burst_of("ann"), 10);
    node.settle();
    assert_eq!((node.burst_of("ann"), node.burst_of("acme")), (10, 100));
    assert_eq!(plans.asked(), ["acme", "ann"]);
    assert_eq!(node.counts(), [2, 0, 0, 0]);
    assert!(node.complaints().is_empty());
}

#[test]
fn resolver_gets_the_bytes_of_a_key_before_they_are_hashed() {
    let long = "k".repeat(1000);
    let plans = Plans::new([("sk-1", PRO), ("eu:7", PRO), ("42", PRO), (&long, PRO)]);
    let node = Node::with(&plans, limit(), |builder| builder.key_secret([7; 16]));
    let handle = node.api.handle(&Hashed("sk-1"));
    let bursts = || {
        let looks = [
            node.api.check_n(&Hashed("sk-1"), 0),
            node.api.check_n(&("eu", 7), 0),
            node.api.check_n(&42, 0),
            node.api.check_n(&long, 0),
            handle.check_n(0),
        ];
        looks.map(|look| look.unwrap().burst())
    };
    assert_eq!(bursts(), [10; 5]);
    node.settle();
    assert_eq!(bursts(), [100; 5]);
    assert_eq!(plans.asked(), ["sk-1", "eu:7", "42", &long]);
}

#[test]
fn key_is_asked_for_once_while_a_call_is_under_way() {
    let plans = Plans::new([("acme", PRO)]);
    let node = Node::new(&plans);
    plans.close();
    for _ in 0..100 {
        assert_eq!(node.burst_of("acme"), 10);
        node.run();
    }
    assert_eq!(plans.asked(), ["acme"]);
    plans.open();
    node.settle();
    assert_eq!(node.burst_of("acme"), 100);
    assert!(plans.asked().is_empty());
}

#[test]
fn answer_holds_for_its_time_to_live_and_then_until_the_next_one() {
    let plans = Plans::new([("acme", PRO)]);
    let node = Node::new(&plans);
    node.learn("acme");
    plans.keys.lock().unwrap().clear();
    node.pass(TTL.saturating_sub(Duration::from_micros(1)));
    assert_eq!(node.burst_of("acme"), 100);
    node.settle();
    assert_eq!(plans.asked(), ["acme"], "not again");
    node.pass(Duration::from_micros(1));
    assert!(plans.asked().is_empty(), "nobody asks for a key that has no requests");
    plans.close();
    for _ in 0..10 {
        assert_eq!(node.burst_of("acme"), 100, "the old one holds while it is asked again");
        node.run();
    }
    plans.open();
    node.settle();
    assert_eq!((node.burst_of("acme"), plans.asked().len()), (10, 1));
}

#[test]
fn last_known_plan_holds_while_the_resolver_fails_panics_or_takes_too_long() {
    let cases = [
        ("fails", Does::Fails, "no database"),
        ("panics", Does::Panics, "the resolver's own mistake"),
        ("panics at once", Does::PanicsAtOnce, "the resolver's own mistake"),
        ("never answers", Does::NeverAnswers, "no answer in 5s"),
    ];
    for (name, does, expected) in cases {
        let plans = Plans::new([("acme", PRO), ("new", does)]);
        let node = Node::new(&plans);
        node.learn("acme");
        assert_eq!(node.counts(), [1, 0, 0, 0], "{name}");
        plans.set("acme", does);
        node.clock.advance(TTL);
        let looks = || [node.burst_of("acme"), node.burst_of("new")];
        assert_eq!((looks(), plans.asked().len()), ([100, 10], 1), "{name}");
        node.run();
        if matches!(does, Does::NeverAnswers) {
            node.clock.advance(PLAN_RESOLVER_TIMEOUT.saturating_sub(Duration::from_micros(1)));
            node.run();
            assert_eq!(Arc::strong_count(&plans.calls), 4, "both calls go on");
            node.clock.advance(Duration::from_micros(1));
            node.run();
        }
        assert_eq!(Arc::strong_count(&plans.calls), 2, "{name}: no call goes on");
        node.settle();
        assert_eq!((looks(), plans.asked().len()), ([100, 10], 2), "{name}: no sooner");
        node.settle();
        assert!(plans.asked().is_empty(), "{name}: not before the pause is over");
        assert_eq!(node.counts(), [0, 0, 2, 0], "{name}");
        let complaints = node.complaints();
        assert!(complaints.len() == 1 && complaints[0].contains(expected), "{complaints:?}");

        plans.set("acme", Does::Names("pro"));
        plans.set("new", Does::Names("pro"));
        node.pass(PLAN_RESOLVER_PAUSE);
        assert_eq!(looks(), [100, 10], "{name}");
        node.settle();
        assert_eq!((looks(), plans.asked().len()), ([100, 100], 2), "{name}: tried again");
        assert_eq!((node.counts(), node.complaints().len()), ([2, 0, 0, 0], 0), "{name}");
    }
}

#[test]
fn events_of_failures_come_once_a_minute_and_counts_are_of_all() {
    let plans = Plans::new([("acme", Does::Fails)]);
    let node = Node::new(&plans);
    let mut failed = 0;
    for _ in 0..20 {
        node.learn("acme");
        failed += 1;
        node.pass(PLAN_RESOLVER_PAUSE);
    }
    assert_eq!(node.counts()[2], failed);
    assert_eq!(node.complaints(), ["no database", "no database"], "in 100 seconds");
}

#[test]
fn override_wins_over_the_caller_who_wins_over_the_resolver() {
    let plans = Plans::new([]);
    for key in ["resolved", "named", "both", "blocked", "allowed", "planned"] {
        plans.set(key, PRO);
    }
    let node = Node::with(&plans, limit().plan("max", burst(1000)), |builder| builder);
    let named = node.api.plan("max").unwrap();
    let set = |set: Override<'_>| {
        node.runtime.block_on(node.limiter.overrides().set("api", set)).unwrap();
    };
    set(Override::key("both").plan("max"));
    set(Override::key("planned").plan("max"));
    set(Override::key("blocked").block());
    set(Override::prefix("allowed").allow());
    let bursts = || {
        let named = ["named", "both"].map(|key| named.check_n(key, 0).unwrap().burst());
        (node.burst_of("resolved"), named, node.burst_of("planned"))
    };
    assert_eq!(bursts(), (10, [1000, 1000], 1000));
    assert!(node.api.check("blocked").is_denied() && node.api.check("allowed").is_override());
    drop([node.api.handle("blocked"), node.api.handle("allowed")]);
    node.settle();
    assert_eq!(bursts(), (100, [1000, 1000], 1000));
    assert_eq!(plans.asked(), ["resolved"]);
    assert_eq!(named.check_n("resolved", 0).unwrap().burst(), 1000, "the caller wins");

    set(Override::key("resolved").plan("max"));
    assert_eq!(node.burst_of("resolved"), 1000);
    let overrides = node.limiter.overrides();
    node.runtime.block_on(overrides.remove("api", Override::key("resolved"))).unwrap();
    assert_eq!(node.burst_of("resolved"), 100);
    node.runtime.block_on(overrides.switch("api", Switch::Off)).unwrap();
    assert!(node.api.check("resolved").is_override());
    assert!(plans.asked().is_empty());
}

#[test]
fn plan_that_the_limit_does_not_have_is_the_default_plan_and_is_told() {
    let plans = Plans::new([("acme", Does::Names("gold")), ("beta", Does::Names("silver"))]);
    let node = Node::new(&plans);
    node.learn("acme");
    node.learn("beta");
    assert_eq!((node.burst_of("acme"), node.burst_of("beta")), (10, 10));
    assert_eq!((node.counts(), node.complaints()), ([0, 2, 0, 0], vec!["gold".to_owned()]));
    node.clock.advance(TTL);
    node.learn("beta");
    assert_eq!((node.counts(), node.complaints()), ([0, 1, 0, 0], vec!["silver".to_owned()]));
}

#[test]
fn plans_that_are_known_follow_an_update_of_the_limit() {
    let plans = Plans::new([("acme", PRO), ("beta", Does::Names("gold"))]);
    let node = Node::new(&plans);
    let update = |limit: Limit| node.limiter.update([limit.local()]).unwrap();
    let own = || Limit::new("api", burst(20));
    let looks = || {
        let after = node.limiter.limit("api").unwrap();
        let bursts = ["acme", "beta"].map(|key| {
            let looks = [&node.api, &after].map(|limit| limit.check_n(key, 0).unwrap().burst());
            assert_eq!(looks[0], looks[1]);
            looks[0]
        });
        (bursts[0], bursts[1])
    };
    node.learn("acme");
    node.learn("beta");
    assert_eq!(looks(), (100, 10));
    update(own().plan("pro", burst(200)).plan("gold", burst(500)));
    assert_eq!(looks(), (200, 500));
    update(own().plan("gold", burst(600)));
    assert_eq!(looks(), (20, 600));
    update(own());
    assert_eq!(looks(), (20, 20));
    assert!(node.api.check_n("acme", 21).is_err());
    update(own().plan("pro", burst(300)));
    assert_eq!(looks(), (300, 20));
    assert_eq!(plans.asked(), ["acme", "beta"], "it was not asked again");
    assert_eq!(node.limiter.limit("api").unwrap().check_n("new", 0).unwrap().burst(), 20);
    node.settle();
    assert_eq!(plans.asked(), ["new"], "it is asked for new keys");
}

/// Waits until something is so, for ten seconds at most.
#[allow(clippy::disallowed_methods, reason = "a deadline")]
fn eventually(is_so: impl Fn() -> bool) {
    let begin = std::time::Instant::now();
    while !is_so() {
        assert!(begin.elapsed() < 10 * SECOND, "it does not come to be so");
        std::thread::yield_now();
    }
}

#[test]
fn plans_of_as_many_keys_are_kept_as_there_is_room_for_and_those_that_are_over_make_room() {
    let plans = Plans::new([]);
    let keys = ["a", "b", "c", "d", "e"];
    let node = Node::with(&plans, limit(), |builder| builder.max_keys(4));
    for key in keys {
        plans.set(key, PRO);
        node.learn(key);
    }
    let bursts = || keys.map(|key| node.burst_of(key));
    assert_eq!(bursts(), [100, 100, 100, 100, 10]);
    assert_eq!(plans.asked(), keys[..4]);
    assert_eq!(node.counts(), [4, 0, 0, 2]);

    node.pass(TTL.saturating_sub(3 * SECOND));
    assert_eq!(bursts(), [100, 100, 100, 100, 10]);
    node.clock.advance(10 * SECOND);
    assert_eq!(keys[..2].iter().map(|key| node.burst_of(key)).sum::<u64>(), 200);
    node.settle();
    eventually(|| {
        node.learn("e");
        node.burst_of("e") == 100
    });
    assert_eq!(bursts()[..2], [100, 100], "those that are in use stay");
    assert_eq!(plans.asked(), ["a", "b", "e"]);
}

#[test]
fn calls_and_keys_that_wait_for_one_are_bounded_and_the_others_are_counted() {
    let plans = Plans::new([]);
    let node = Node::new(&plans);
    plans.close();
    let ask = |range: std::ops::Range<usize>| {
        range.for_each(|key| assert_eq!(node.burst_of(&format!("key {key}")), 10));
    };
    ask(0..PLAN_RESOLVER_WAITING_MAX + 200);
    node.run();
    assert_eq!(plans.asked().len(), PLAN_RESOLVER_CALLS_MAX);
    ask(20_000..20_000 + PLAN_RESOLVER_CALLS_MAX + 50);
    node.run();
    assert!(plans.asked().is_empty(), "as many as may be are under way");
    plans.open();
    node.settle();
    assert_eq!(plans.asked().len(), PLAN_RESOLVER_WAITING_MAX);
    let answered = (PLAN_RESOLVER_WAITING_MAX + PLAN_RESOLVER_CALLS_MAX) as u64;
    assert_eq!(node.counts(), [answered, 0, 0, 250]);
    ask(0..PLAN_RESOLVER_WAITING_MAX + 200);
    node.settle();
    assert_eq!(plans.asked().len(), 200, "they are asked for once there is room");
}

#[cfg(feature = "metrics")]
#[test]
fn metrics_count_calls_by_outcome_and_keys_that_found_no_room() {
    let recorder = metrics_exporter_prometheus::PrometheusBuilder::new().build_recorder();
    let shown = recorder.handle();
    let count_of = |text: &str| {
        let shown = shown.render();
        let line = shown.lines().find_map(|line| line.strip_prefix(&format!("tidegate_{text} ")));
        line.map(str::to_owned)
    };
    let counts = || {
        let outcomes = ["ok", "unknown_plan", "error"].map(|outcome| {
            count_of(&format!("plan_resolutions_total{{limit=\"api\",outcome=\"{outcome}\"}}"))
        });
        let not_asked = count_of("plans_not_asked_total{limit=\"api\"}");
        outcomes.into_iter().chain([not_asked]).map(|count| count.unwrap().parse().unwrap())
    };
    let plans = Plans::new([("pro", PRO), ("gold", Does::Names("gold")), ("fails", Does::Fails)]);
    metrics::with_local_recorder(&recorder, || {
        let node = Node::with(&plans, limit(), |builder| builder.max_keys(4));
        assert_eq!(counts().collect::<Vec<u64>>(), [0; 4], "none is absent");
        for key in ["pro", "default", "gold", "fails", "no room", "none neither", "nor here"] {
            node.learn(key);
        }
        node.pass(SECOND);
    });
    assert_eq!(counts().collect::<Vec<u64>>(), [2, 1, 1, 3]);
    let other = metrics_exporter_prometheus::PrometheusBuilder::new().build_recorder();
    let shown = other.handle();
    metrics::with_local_recorder(&other, || {
        let limiter = Limiter::builder().limit(limit().local()).build().unwrap();
        assert!(limiter.limit("api").unwrap().check("key").is_allowed());
    });
    assert!(!shown.render().contains("plan_resolutions"), "a limit without a resolver has none");
}

/// A way to ask for a decision.
type Way<'a> = Box<dyn Fn(&str) -> Decision + 'a>;

#[test]
fn every_way_to_ask_follows_the_resolver() {
    let plans = Plans::new([]);
    let limits = [limit(), Limit::new("exact", burst(10)).plan("pro", burst(100)).exact()];
    let nodes = VirtualNodes::new(1, &limits, |builder| {
        let exact = plans.clone();
        resolved(builder, &plans, TTL).resolve_plans("exact", TTL, move |key| exact.resolve(key))
    });
    let node = &nodes.nodes[0];
    let api = node.limit("api").unwrap();
    let (of_node, exact) = (node.async_limit("api").unwrap(), node.async_limit("exact").unwrap());
    let (group, all) = (node.group(["api"]).unwrap(), node.async_group(["api"]).unwrap());
    let handles = Mutex::new(HashMap::new());
    let handle = |key: &str| {
        let handles = &mut *handles.lock().unwrap();
        handles.entry(key.to_owned()).or_insert_with(|| api.handle(key)).clone()
    };
    let ways: [Way<'_>; 13] = [
        Box::new(|key| api.check(key)),
        Box::new(|key| api.check_n(key, 50).unwrap()),
        Box::new(|key| handle(key).check()),
        Box::new(|key| group.check(key)),
        Box::new(|key| nodes.wait(node.check_all([api.on(key)])).unwrap()),
        Box::new(|key| nodes.wait(api.check_sure(key))),
        Box::new(|key| nodes.wait(of_node.check_sure(key))),
        Box::new(|key| nodes.wait(all.check_sure(key))),
        Box::new(|key| api.schedule(key)),
        Box::new(|key| nodes.wait(api.until_ready(key, SECOND))),
        Box::new(|key| nodes.wait(api.reserve(key, 1)).unwrap().decision()),
        Box::new(|key| nodes.wait(handle(key).check_sure())),
        Box::new(|key| nodes.wait(exact.check_sure(key))),
    ];
    for (place, way) in ways.iter().enumerate() {
        let key = format!("way {place}");
        plans.set(&key, PRO);
        assert_eq!(way(&key).burst(), 10, "{key}");
        nodes.pass(SECOND, SECOND / 100);
        assert_eq!(plans.asked(), [&*key]);
        assert_eq!(way(&key).burst(), 100, "{key}");
    }
}

#[cfg(feature = "tower")]
#[test]
fn layer_without_a_plan_of_its_own_follows_the_resolver() {
    use std::convert::Infallible;
    use tidegate::http::{KeyOf, KeyedLimit, RateLimit, RateLimitLayer};
    use tower::{Layer, ServiceExt, service_fn};

    let plans = Plans::new([("acme", PRO), ("named", PRO)]);
    let limit = Limit::new("api", Quota::per_hour(10)).plan("pro", Quota::per_hour(100));
    let node = Node::with(&plans, limit, |builder| builder);
    let key = http::HeaderName::from_static("x-api-key");
    let policy = |limit: KeyedLimit, name: &'static str| {
        let layer: RateLimitLayer<String> = RateLimitLayer::new(RateLimit::new(limit));
        let inner = service_fn(|_: http::Request<()>| async {
            Ok::<_, Infallible>(http::Response::new(String::new()))
        });
        let request = http::Request::builder().header(&key, name).body(()).unwrap();
        let response = node.runtime.block_on(layer.layer(inner).oneshot(request)).unwrap();
        response.headers()["ratelimit-policy"].to_str().unwrap().to_owned()
    };
    let plain = || KeyedLimit::new(node.api.clone(), KeyOf::plain_header(key.clone()));
    let hashed = || KeyedLimit::new(node.api.clone(), KeyOf::header(key.clone()));
    assert!(policy(plain(), "acme").starts_with("\"api\";q=10;"));
    node.settle();
    assert!(policy(plain(), "acme").starts_with("\"api\";q=100;"));
    assert_eq!(plans.asked(), ["acme"]);
    policy(hashed(), "acme");
    node.settle();
    assert!(policy(hashed(), "acme").starts_with("\"api\";q=100;"));
    assert_eq!(plans.asked(), ["acme"], "before it was hashed");
    policy(plain().plan(|_| Some("pro")), "named");
    node.settle();
    assert!(plans.asked().is_empty(), "the request names its plan");
}

/// Nodes hear of a plan one after the other; a node that begins anew names the default plan until it has its answer.
#[test]
fn nodes_that_share_a_limit_agree_on_what_their_resolvers_say() {
    let plans = Plans::new([("key", Does::Names("large"))]);
    let limit = Limit::new("api", Quota::per_second(50)).plan("large", Quota::per_second(400));
    let differ: Arc<Mutex<u32>> = Arc::default();
    let nodes = VirtualNodes::new(4, &[limit], |builder| {
        let differ = differ.clone();
        resolved(builder, &plans, TTL).listen(move |event| {
            *differ.lock().unwrap() += u32::from(matches!(event, Event::PlansDiffer { .. }));
        })
    });
    let held: Vec<_> = nodes.nodes.iter().map(|node| node.limit("api").unwrap()).collect();
    let allowed = |seconds: u64| {
        let mut allowed = 0;
        for _ in 0..seconds * 100 {
            for limit in &held {
                allowed += (0..3).filter(|_| limit.check("key").is_allowed()).count();
            }
            nodes.pass(SECOND / 100, SECOND / 100);
        }
        allowed
    };
    allowed(3);
    let large = allowed(10);
    assert!((3900..=4010).contains(&large), "{large}");
    plans.keys.lock().unwrap().clear();
    nodes.pass(TTL, SECOND);
    allowed(12);
    let own = allowed(10);
    assert!((480..=510).contains(&own), "{own}");
    assert_eq!((plans.asked().len(), *differ.lock().unwrap()), (8, 0));
}

/// On the system's clock and the limiter's own thread.
#[test]
fn limiter_outside_a_runtime_asks_on_its_own_thread_and_ends_calls_when_it_ends() {
    let plans = Plans::new([("acme", PRO), ("waits", Does::NeverAnswers)]);
    let builder = resolved(Limiter::builder().limit(limit().local()), &plans, TTL);
    let limiter = builder.build().unwrap();
    let api = limiter.limit("api").unwrap();
    eventually(|| api.check_n("acme", 0).unwrap().burst() == 100);
    assert_eq!(api.check("waits").burst(), 10);
    eventually(|| Arc::strong_count(&plans.calls) == 3);
    drop((limiter, api));
    eventually(|| Arc::strong_count(&plans.calls) == 1);
}

#[test]
fn calls_end_when_the_limiter_does_and_the_runtime_goes_on() {
    let plans = Plans::new([("waits", Does::NeverAnswers)]);
    let node = Node::new(&plans);
    node.burst_of("waits");
    node.run();
    let Node { limiter, api, runtime, .. } = node;
    assert_eq!(Arc::strong_count(&plans.calls), 3);
    drop((limiter, api));
    runtime.block_on(async {
        for _ in 0..1000 {
            tokio::task::yield_now().await;
        }
    });
    assert_eq!(Arc::strong_count(&plans.calls), 1);
}

#[test]
fn decision_of_a_key_whose_plan_is_known_allocates_nothing() {
    let plans = Plans::new([("acme", PRO)]);
    let node = Node::new(&plans);
    let handle = node.api.handle("acme");
    node.learn("acme");
    let count = allocation_counter::measure(|| {
        for _ in 0..50 {
            let decisions = [node.api.check("acme"), handle.check()];
            assert!(decisions.iter().all(|decision| decision.burst() == 100));
        }
    });
    assert_eq!(count.count_total, 0);
}

#[test]
fn resolver_that_cannot_be_kept_is_refused_by_field_and_value() {
    let year = 366 * 24 * 3600 * SECOND;
    let local = || limit().local();
    let cases = [
        ("api", local(), Duration::ZERO, "limit \"api\": resolve_plans.ttl = 0ns: must be 1 ms"),
        ("api", local(), Duration::from_micros(999), "resolve_plans.ttl = 999µs"),
        ("api", local(), year + SECOND, "resolve_plans.ttl = 31622401s"),
        ("api", Limit::new("api", burst(1)), TTL, "resolve_plans.limit = api: has no plans"),
        ("api", Limit::new("api", LeakyBucket::per_second(1)), TTL, "has no plans"),
        (
            "api",
            Limit::new("api", LeakyBucket::per_second(1)).plan("pro", LeakyBucket::per_second(2)),
            TTL,
            "plan = pro: slots that nodes share are of one grid",
        ),
        ("apo", local(), TTL, "limit \"apo\" is not known; known are: api"),
    ];
    for (name, limit, ttl, expected) in cases {
        let store = tidegate::MemoryStore::new();
        let plans = Plans::new([]);
        let builder = Limiter::builder().limit(limit).store(store);
        let builder = builder.resolve_plans(name, ttl, move |key| plans.resolve(key));
        let error = builder.build().unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    for ttl in [Duration::from_millis(1), year] {
        assert!(resolved(Limiter::builder().limit(local()), &Plans::new([]), ttl).build().is_ok());
    }
    let windows = FixedWindow::per_day(1);
    let windows = Limit::new("api", windows).plan("pro", FixedWindow::per_day(2));
    assert!(resolved(Limiter::builder().limit(windows), &Plans::new([]), TTL).build().is_ok());
    let twice = resolved(Limiter::builder().limit(local()), &Plans::new([]), TTL);
    let error = resolved(twice, &Plans::new([]), TTL).build().unwrap_err();
    assert!(matches!(error, ConfigError::Limit { field: "resolve_plans.limit", .. }), "{error}");
    assert!(error.to_string().contains("has a resolver already"), "{error}");
}
