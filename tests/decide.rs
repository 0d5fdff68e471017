//! The form that may wait: when it asks the store, who asks together, and when nobody is waited for.
#![cfg(feature = "testing")]
#![allow(clippy::disallowed_methods, reason = "a real store's time is real")]

#[cfg(feature = "redis")]
mod parts;

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tidegate::testing::{ManualClock, ScriptedStore};
use tidegate::{
    ActiveLimit, CheckError, DEFAULT_MAX_WAIT, Decision, Event, Limit, Limiter, OutagePolicy, Quota,
};

/// How far a driven clock moves at a time.
const STEP: Duration = Duration::from_millis(1);
/// After so long without the store every lease has ended.
const CUT_OFF: Duration = Duration::from_secs(4);
const BURST: u64 = 20;

/// A decision that may not be there yet.
type Asked = Pin<Box<dyn Future<Output = Decision> + Send>>;

fn ask(api: &ActiveLimit, key: &str) -> Asked {
    ask_n(api, key, 1)
}

fn ask_n(api: &ActiveLimit, key: &str, cost: u32) -> Asked {
    let (api, key) = (api.clone(), key.to_owned());
    Box::pin(async move { api.check_sure_n(&key, cost).await.expect("a good key and cost") })
}

/// The decision, if it is there. Nothing else runs meanwhile.
fn look(asked: &mut Asked) -> Option<Decision> {
    match asked.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(decision) => Some(decision),
        Poll::Pending => None,
    }
}

/// So many who ask for one token of a key, all of them waiting.
fn waiting(api: &ActiveLimit, key: &str, callers: u64) -> Vec<Asked> {
    (0..callers)
        .map(|_| {
            let mut asked = ask(api, key);
            assert!(look(&mut asked).is_none(), "nobody can be sure yet");
            asked
        })
        .collect()
}

/// The decisions, which must be there.
fn answers(asked: &mut [Asked]) -> Vec<Decision> {
    asked.iter_mut().map(|asked| look(asked).expect("everybody is answered by now")).collect()
}

fn admitted(decisions: &[Decision]) -> u64 {
    decisions.iter().filter(|decision| decision.is_allowed()).count() as u64
}

/// Counts the batches that carried keys, whatever became of them.
fn count_batches(batches: &Arc<AtomicU64>) -> impl Fn(&Event) + Send + Sync + 'static {
    let batches = batches.clone();
    move |event| {
        if matches!(event, Event::Synced { keys: 1.., .. }) {
            batches.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// A limit whose tokens do not come back while a test lasts, and of which a node gives one token unasked.
fn limit() -> Limit {
    Limit::new("api", Quota::per_day(BURST)).credit(1)
}

/// Nodes on one scripted store, under one driven clock.
struct Cluster {
    clock: ManualClock,
    store: ScriptedStore,
    nodes: Vec<Limiter>,
    apis: Vec<ActiveLimit>,
    batches: Arc<AtomicU64>,
}

impl Cluster {
    /// Nodes that have met their store.
    async fn new(nodes: usize, limit: &Limit) -> Self {
        let clock = ManualClock::new();
        let store = ScriptedStore::new(&clock);
        let batches = Arc::default();
        let nodes: Vec<Limiter> = (0..nodes)
            .map(|_| {
                let builder = Limiter::builder().limit(limit.clone()).store(store.clone());
                builder.lanes(2).clock(&clock).listen(count_batches(&batches)).build().unwrap()
            })
            .collect();
        let apis = nodes.iter().map(|node| node.limit("api").unwrap()).collect();
        let cluster = Self { clock, store, nodes, apis, batches };
        cluster.pass(Duration::from_secs(2)).await;
        for node in &cluster.nodes {
            node.ready(Duration::ZERO).await.expect("the store is there");
        }
        cluster
    }

    async fn settle(&self) {
        for node in &self.nodes {
            node.settle().await;
        }
    }

    async fn pass(&self, time: Duration) {
        for _ in 0..time.as_micros() / STEP.as_micros() {
            self.clock.advance(STEP);
            self.settle().await;
        }
    }

    /// The answers, once everybody has one, which must be before the deadline.
    async fn answered(&self, mut asked: Vec<Asked>) -> Vec<Decision> {
        let mut answers: Vec<Option<Decision>> = vec![None; asked.len()];
        for _ in 0..DEFAULT_MAX_WAIT.as_micros() / STEP.as_micros() {
            for (answer, asked) in answers.iter_mut().zip(&mut asked) {
                *answer = answer.take().or_else(|| look(asked));
            }
            if answers.iter().all(Option::is_some) {
                return answers.into_iter().flatten().collect();
            }
            self.pass(STEP).await;
        }
        panic!("not before the deadline: {answers:?}");
    }

    /// Asks for one token after the other, for longer than there can be any; returns how many there
    /// were. One denial says little: a key that is asked for so often waits for its next sync.
    async fn drain(&self, key: &str) -> u64 {
        let mut drained = 0;
        for _ in 0..5 * BURST {
            drained += admitted(&self.answered(vec![ask(&self.apis[0], key)]).await);
            self.pass(DEFAULT_MAX_WAIT).await;
        }
        drained
    }
}

// ---- sure and unsure -------------------------------------------------------------------------

#[tokio::test]
async fn a_sure_answer_comes_at_once_and_an_unsure_one_waits_for_the_store() {
    let cluster = Cluster::new(1, &Limit::new("api", Quota::per_second(100))).await;
    let api = &cluster.apis[0];
    for _ in 0..1000 {
        cluster.pass(STEP).await;
        for _ in 0..2 {
            let _ = api.check("busy");
        }
    }
    // Nothing answers any more, and refill goes on flowing into the lease.
    cluster.store.set_away(true);
    cluster.clock.advance(Duration::from_millis(100));
    let mut decisions = Vec::new();
    while decisions.last().is_none_or(Decision::is_allowed) {
        decisions.push(look(&mut ask(api, "busy")).expect("a lease answers at once"));
        assert!(decisions.len() < 100, "{decisions:?}");
    }
    assert!(decisions.len() > 5, "the lease held some: {decisions:?}");
    assert!(decisions.iter().all(Decision::is_sure), "{decisions:?}");
    assert!(look(&mut ask(api, "quiet")).is_none(), "no lease, and the store may have tokens");
}

#[tokio::test]
async fn all_who_wait_on_a_key_share_one_round_trip_and_go_on_first_come_first() {
    let cluster = Cluster::new(1, &limit()).await;
    let asked = waiting(&cluster.apis[0], "user", 50);
    let decisions = cluster.answered(asked).await;
    let batches = cluster.batches.load(Ordering::Relaxed);
    assert_eq!(batches, 1, "one for all 50");
    let allowed: Vec<bool> = decisions.iter().map(Decision::is_allowed).collect();
    let expected: Vec<bool> = (0..50).map(|caller| caller < BURST).collect();
    assert_eq!(allowed, expected);
    assert!(decisions.iter().all(Decision::is_sure), "the store has said so");
}

/// They were denied, and told that it was sure: the store gave nothing yet.
#[tokio::test]
async fn who_waits_for_a_store_that_has_lost_its_memory_is_told_what_check_says() {
    // After a loss a key that fills within a minute begins empty, and then credit waits too.
    for (quota, on_credit) in [(Quota::per_day(BURST), true), (Quota::per_second(1), false)] {
        let mut cluster = Cluster::new(2, &Limit::new("api", quota).credit(1)).await;
        // The store waits for a node that has died, until its leases would have ended.
        cluster.nodes.truncate(1);
        cluster.apis.truncate(1);
        cluster.store.clear();
        cluster.pass(Duration::from_millis(100)).await;
        let decisions = cluster.answered(waiting(&cluster.apis[0], "user", 2)).await;
        let said: Vec<_> = decisions.iter().map(|one| (one.is_allowed(), one.is_sure())).collect();
        assert_eq!(said, [(on_credit, false), (false, false)]);
        cluster.pass(Duration::from_secs(5)).await;
        let decisions = cluster.answered(waiting(&cluster.apis[0], "other", 2)).await;
        assert!(decisions.iter().all(Decision::is_sure), "it gives again");
        let allowed = decisions.iter().filter(|one| one.is_allowed()).count();
        assert_eq!(allowed, if on_credit { 2 } else { 1 }, "as many as it has tokens");
    }
}

#[tokio::test]
async fn as_many_of_those_who_wait_on_all_nodes_are_admitted_as_there_are_tokens() {
    let cluster = Cluster::new(3, &limit()).await;
    let asked: Vec<Asked> =
        cluster.apis.iter().flat_map(|api| waiting(api, "user", BURST)).collect();
    let decisions = cluster.answered(asked).await;
    assert_eq!(admitted(&decisions), BURST, "three nodes, one burst, no credit used");
    assert!(decisions.iter().all(Decision::is_sure));
}

#[tokio::test]
async fn a_cost_is_waited_for_whole_and_an_impossible_one_is_an_error_that_asks_nobody() {
    let cluster = Cluster::new(1, &limit()).await;
    let api = &cluster.apis[0];
    let most = BURST as u32;
    let handle = api.handle("user");
    let too_high = CheckError::CostTooHigh { limit: "api", cost: most + 1, max: most };
    assert_eq!(api.check_sure_n("user", most + 1).await.unwrap_err(), too_high);
    assert_eq!(handle.check_sure_n(most + 1).await.unwrap_err(), too_high);
    assert!(api.check_sure_n("user", 0).await.unwrap().is_allowed());
    assert!(handle.check_sure_n(0).await.unwrap().is_allowed());
    cluster.pass(Duration::from_millis(100)).await;
    assert_eq!(cluster.batches.load(Ordering::Relaxed), 0, "nobody was asked");

    let costs = [most - 5, 6, 5];
    let mut asked = Vec::from(costs.map(|cost| ask_n(api, "user", cost)));
    assert!(asked.iter_mut().all(|asked| look(asked).is_none()));
    let allowed =
        cluster.answered(asked).await.iter().map(Decision::is_allowed).collect::<Vec<_>>();
    assert_eq!(allowed, [true, false, true]);
}

// ---- when the store does not answer ----------------------------------------------------------

#[tokio::test]
async fn after_its_deadline_a_decision_is_what_check_says_and_not_before() {
    let cluster = Cluster::new(1, &limit()).await;
    cluster.store.set_away(true);
    let mut asked = waiting(&cluster.apis[0], "user", 3);
    cluster.settle().await;
    cluster.clock.advance(DEFAULT_MAX_WAIT.saturating_sub(Duration::from_micros(1)));
    cluster.settle().await;
    assert!(asked.iter_mut().all(|asked| look(asked).is_none()), "the store may answer yet");
    cluster.clock.advance(Duration::from_micros(1));
    let decisions = cluster.answered(asked).await;
    assert_eq!(admitted(&decisions), 1, "the credit, as for check: {decisions:?}");
    assert!(!decisions.iter().any(Decision::is_sure), "{decisions:?}");
    // What was admitted is charged when the store is back.
    cluster.store.set_away(false);
    cluster.pass(Duration::from_secs(1)).await;
    assert_eq!(cluster.drain("user").await, BURST - 1);
}

#[tokio::test]
async fn while_an_outage_policy_is_in_force_it_answers_at_once() {
    for (policy, admits) in [(OutagePolicy::Open, true), (OutagePolicy::Closed, false)] {
        let cluster = Cluster::new(1, &limit().outage(policy)).await;
        cluster.store.set_away(true);
        // The key must be known: an outage begins for a key when it is asked for.
        let _ = cluster.apis[0].check("user");
        cluster.pass(CUT_OFF).await;
        for _ in 0..2 * BURST {
            let decision = look(&mut ask(&cluster.apis[0], "user")).expect("nobody to wait for");
            assert_eq!((decision.is_allowed(), decision.is_sure()), (admits, false), "{policy:?}");
        }
    }
}

#[tokio::test]
async fn who_waits_while_an_outage_begins_is_answered_by_its_policy_at_once() {
    let cluster = Cluster::new(1, &limit().outage(OutagePolicy::Closed)).await;
    cluster.store.set_away(true);
    cluster.pass(CUT_OFF).await;
    let asked = waiting(&cluster.apis[0], "unknown until now", 1);
    assert_eq!(
        admitted(&cluster.answered(asked).await),
        0,
        "not even the credit, which its deadline gives"
    );
}

// ---- who goes away ---------------------------------------------------------------------------

#[tokio::test]
async fn who_goes_away_before_anybody_was_asked_costs_nothing() {
    let cluster = Cluster::new(1, &limit()).await;
    drop(waiting(&cluster.apis[0], "user", BURST));
    cluster.pass(Duration::from_secs(1)).await;
    assert_eq!(cluster.batches.load(Ordering::Relaxed), 0, "nobody wants to know");
    assert_eq!(cluster.drain("user").await, BURST);
}

#[tokio::test]
async fn who_goes_away_while_the_store_hangs_costs_nothing_and_is_not_waited_for() {
    let cluster = Cluster::new(1, &limit().credit(0)).await;
    cluster.store.set_away(true);
    let asked = waiting(&cluster.apis[0], "user", BURST / 2);
    cluster.settle().await;
    drop(asked);
    cluster.pass(2 * DEFAULT_MAX_WAIT).await;
    // The batch that asks for them is sent again, and its answer finds nobody.
    cluster.store.set_away(false);
    cluster.pass(Duration::from_secs(1)).await;
    assert_eq!(cluster.drain("user").await, BURST);
    let node = &cluster.nodes[0];
    let leave = node.shutdown(Duration::from_secs(1));
    let (left, ()) = tokio::join!(leave, cluster.pass(Duration::from_secs(1)));
    left.expect("nobody is waited for");
}

#[tokio::test]
async fn who_goes_away_with_the_answer_under_way_costs_what_was_asked_and_nobody_elses() {
    let cluster = Cluster::new(1, &limit()).await;
    let gone = 5;
    let mut asked = waiting(&cluster.apis[0], "user", gone + 3);
    // The question has been taken, and the answer finds that they have left.
    tokio::task::yield_now().await;
    drop(asked.drain(..gone as usize));
    assert_eq!(admitted(&cluster.answered(asked).await), 3, "who stays is answered");
    assert_eq!(cluster.drain("user").await, BURST - gone - 3);
}

#[tokio::test]
async fn who_waits_while_the_node_leaves_is_answered() {
    for away in [false, true] {
        let cluster = Cluster::new(1, &limit()).await;
        cluster.store.set_away(away);
        let mut asked = waiting(&cluster.apis[0], "user", 3);
        let leave = cluster.nodes[0].shutdown(Duration::from_secs(1));
        let (left, ()) = tokio::join!(leave, cluster.pass(Duration::from_secs(2)));
        assert_eq!(left.is_err(), away, "{left:?}");
        let decisions = answers(&mut asked);
        assert_eq!(admitted(&decisions), if away { 1 } else { 3 }, "away: {away}, {decisions:?}");
    }
}

#[test]
fn who_waits_while_the_runtime_ends_is_answered_as_check_would() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let cluster = runtime.block_on(Cluster::new(1, &limit()));
    let api = cluster.apis[0].clone();
    let mut asked = waiting(&api, "user", 2);
    drop(runtime);
    let decisions = answers(&mut asked);
    assert_eq!(admitted(&decisions), 1, "the credit: {decisions:?}");
    let late = look(&mut ask(&api, "user")).expect("nobody to wait for");
    assert!(late.is_denied() && !late.is_sure(), "{late:?}");
}

// ---- on a real Redis -------------------------------------------------------------------------

#[cfg(feature = "redis")]
mod on_a_real_redis {
    use std::time::Instant;

    use tidegate::{RedisStore, ShutdownError};

    use super::parts::RedisServer;
    use super::*;

    /// For what must come.
    const DEADLINE: Duration = Duration::from_secs(20);
    /// A new lane waits for two of these until it gives, and each test for that.
    const STORE_TIMEOUT: Duration = Duration::from_secs(1);
    /// Before this no frozen store is given up, also where the machine stands still for a while.
    const LONG_STORE_TIMEOUT: Duration = Duration::from_secs(3);
    /// The cached clock lags so far behind at most, and the deadline counts from what it shows.
    const CLOCK_GRAIN: Duration = Duration::from_millis(1);

    /// A node with few occasions to call the store but that somebody waits for it.
    async fn node(server: &RedisServer, limit: Limit) -> (Limiter, ActiveLimit, Arc<AtomicU64>) {
        node_with(server, limit, STORE_TIMEOUT).await
    }

    async fn node_with(
        server: &RedisServer,
        limit: Limit,
        timeout: Duration,
    ) -> (Limiter, ActiveLimit, Arc<AtomicU64>) {
        let batches = Arc::default();
        let store = RedisStore::open(&server.url()).unwrap().timeout(timeout);
        let limit = limit.sync_interval(Duration::from_millis(200));
        let builder = Limiter::builder().limit(limit).lanes(1).store(store);
        let node = builder.listen(count_batches(&batches)).build_ready(DEADLINE).await.unwrap();
        let api = node.limit("api").unwrap();
        (node, api, batches)
    }

    async fn all(asked: Vec<Asked>) -> Vec<Decision> {
        let mut decisions = Vec::new();
        for asked in asked {
            decisions.push(asked.await);
        }
        decisions
    }

    /// Asks for the rest of the tokens, and for some more that are not there; returns how many
    /// there were in all.
    async fn drain(api: &ActiveLimit, mut admitted: u64) -> u64 {
        let deadline = Instant::now() + DEADLINE;
        while admitted < BURST {
            assert!(Instant::now() < deadline, "{admitted} of {BURST}, and no more come");
            admitted += u64::from(api.check_sure("user").await.is_allowed());
        }
        admitted + super::admitted(&all(waiting_or_not(api, BURST)).await)
    }

    fn waiting_or_not(api: &ActiveLimit, callers: u64) -> Vec<Asked> {
        (0..callers).map(|_| ask(api, "user")).collect()
    }

    /// Waits for all of them, who are answered at their deadline and not before.
    async fn answered_at_the_deadline(asked: Vec<Asked>, since: Instant) -> Vec<Decision> {
        let decisions = all(asked).await;
        let waited = since.elapsed();
        assert!(waited + CLOCK_GRAIN >= DEFAULT_MAX_WAIT, "{waited:?}: too soon");
        decisions
    }

    #[tokio::test]
    async fn waiters_of_two_nodes_share_round_trips_and_are_admitted_the_burst_once() {
        let server = RedisServer::start();
        let limit = limit().credit(0);
        let (_first, one, batches) = node(&server, limit.clone()).await;
        let (_second, other, others_batches) = node(&server, limit).await;
        let mut asked = waiting(&one, "user", 50);
        asked.extend(waiting(&other, "user", 50));
        let decisions = all(asked).await;
        for batches in [batches, others_batches] {
            let batches = batches.load(Ordering::Relaxed);
            // Two, and on a slow machine one in each interval meanwhile.
            assert!((1..=20).contains(&batches), "{batches} for 50 who waited");
        }
        // Whoever met its deadline on a slow machine has left a token for somebody else.
        assert_eq!(drain(&one, admitted(&decisions)).await, BURST);
    }

    #[tokio::test]
    async fn a_frozen_store_is_waited_for_until_the_deadline_and_then_check_answers() {
        let server = RedisServer::start();
        let (_node, api, batches) = node_with(&server, limit(), LONG_STORE_TIMEOUT).await;
        server.stop();
        let start = Instant::now();
        let decisions = answered_at_the_deadline(waiting(&api, "user", 5), start).await;
        assert_eq!(batches.load(Ordering::Relaxed), 0, "the store has not been given up");
        assert_eq!(admitted(&decisions), 1, "the credit: {decisions:?}");
        assert!(!decisions.iter().any(Decision::is_sure), "{decisions:?}");
        server.cont();
        let total = drain(&api, 1).await;
        assert!((BURST..=BURST + 1).contains(&total), "{total}: the burst, and the credit again");
    }

    #[tokio::test]
    async fn who_times_out_on_its_own_while_the_store_is_frozen_costs_nothing() {
        let server = RedisServer::start();
        let (node, api, _) = node(&server, limit().credit(0)).await;
        server.stop();
        let impatient = waiting(&api, "user", BURST);
        let patience = Duration::from_millis(5);
        let timed_out = tokio::time::timeout(patience, all(impatient)).await;
        assert!(timed_out.is_err(), "answered within {patience:?} by a frozen store");
        // Who asks later is answered later: by then nobody waits any more.
        assert!(api.check_sure("user").await.is_denied());
        server.cont();
        assert_eq!(drain(&api, 0).await, BURST);
        node.shutdown(DEADLINE).await.expect("nobody is waited for");
    }

    #[tokio::test]
    async fn a_dead_store_is_waited_for_until_the_policy_is_in_force_and_then_nobody_is() {
        let mut server = RedisServer::start();
        let (_node, api, _) = node(&server, limit().outage(OutagePolicy::Closed)).await;
        server.kill();
        let start = Instant::now();
        let decisions = answered_at_the_deadline(waiting(&api, "user", 5), start).await;
        assert_eq!(admitted(&decisions), 1, "the credit: {decisions:?}");
        // By its policy it never waits, and says that it is not sure.
        let mut at_once = 0;
        while at_once < 2 * BURST {
            assert!(start.elapsed() < DEADLINE, "no policy, {at_once} answers at once");
            let mut asked = ask(&api, "user");
            let decision = look(&mut asked);
            at_once = if decision.is_some() { at_once + 1 } else { 0 };
            let decision = if let Some(decision) = decision { decision } else { asked.await };
            assert!(decision.is_denied() && !decision.is_sure(), "{decision:?}");
            tokio::task::yield_now().await;
        }
        server.restart();
        let start = Instant::now();
        while !api.check_sure("user").await.is_sure() {
            assert!(start.elapsed() < DEADLINE, "the store is back and is not asked");
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn who_waits_while_the_node_leaves_a_frozen_store_is_answered() {
        let server = RedisServer::start();
        let (node, api, _) = node(&server, limit()).await;
        server.stop();
        let within = 2 * DEFAULT_MAX_WAIT;
        let start = Instant::now();
        let asked = waiting(&api, "user", 5);
        let answers = answered_at_the_deadline(asked, start);
        let (left, decisions) = tokio::join!(node.shutdown(within), answers);
        assert!(matches!(left, Err(ShutdownError { .. })), "{left:?}");
        assert_eq!(admitted(&decisions), 1, "the credit: {decisions:?}");
        server.cont();
    }
}
