//! Each way is asked the same requests in real time, by nodes in this process.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use tidegate::{
    AsyncLimit, Builder, FixedWindow, LeakyBucket, Limit, Limiter, MemoryStore, Mode, Quota,
    RedisStore, Rule, SlidingLog, SlidingWindow,
};
use tokio::task::JoinSet;

use super::definition::{Central, most_in_a_period};
use super::load::{Plan, Request};
use super::usual::{Counts, WriteBehind};
use super::{CompareError, config_error, sleep};
use crate::progress;
use crate::store::{Store, namespace};

/// Until nodes know of each other.
const MEETING: Duration = Duration::from_millis(1500);
/// How long a store may take to answer at first.
const READY: Duration = Duration::from_secs(10);

/// A way to limit, and the definition that it is judged by.
#[derive(Clone, Copy, Debug)]
pub(super) struct Way {
    pub(super) rule: Rule,
    pub(super) kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Mode(Mode),
    /// Each node has its part of the tokens, and knows of no other.
    PartOnEachNode,
    /// All requests of a key go to one node.
    StickyRouting,
    /// A store counts each request.
    CentralCall,
    /// Nodes count, and tell a store now and then.
    WriteBehind,
}

impl Way {
    pub(super) const fn name(&self) -> &'static str {
        match self.kind {
            Kind::Mode(Mode::Hybrid) => "hybrid",
            Kind::Mode(Mode::Exact) => "exact",
            Kind::Mode(_) => "local",
            Kind::PartOnEachNode => "a part on each node",
            Kind::StickyRouting => "sticky routing",
            Kind::CentralCall => "a central call",
            Kind::WriteBehind => "write-behind",
        }
    }

    const fn has_store(&self) -> bool {
        matches!(self.kind, Kind::Mode(Mode::Hybrid | Mode::Exact))
    }
}

/// Each algorithm in each mode, and the `usual` ways.
pub(super) fn all(rules: &[Rule], mode: Option<Mode>, usual: bool) -> Vec<Way> {
    let modes = mode.map_or(vec![Mode::Hybrid, Mode::Exact, Mode::Local], |mode| vec![mode]);
    let modes = modes.iter();
    let kinds = |rule: &Rule| {
        let rule = *rule;
        modes.clone().map(move |mode| Way { rule, kind: Kind::Mode(*mode) })
    };
    let mut ways: Vec<Way> = rules.iter().flat_map(kinds).collect();
    let bucket = rules.iter().find(|rule| matches!(rule, Rule::TokenBucket(_)));
    let window = rules.iter().find(|rule| matches!(rule, Rule::FixedWindow(_)));
    if let (true, Some(bucket), Some(window)) = (usual, bucket, window) {
        let of_buckets = [Kind::PartOnEachNode, Kind::StickyRouting];
        ways.extend(of_buckets.map(|kind| Way { rule: *bucket, kind }));
        let of_windows = [Kind::CentralCall, Kind::WriteBehind];
        ways.extend(of_windows.map(|kind| Way { rule: *window, kind }));
    }
    ways
}

/// What became of a way.
pub(super) struct Row {
    pub(super) way: Way,
    /// When admitted requests began, in microseconds from the first period's beginning; of all keys, in order.
    pub(super) admitted_us: Vec<u64>,
    /// What one central limit for each key would have admitted.
    pub(super) ideal: u64,
    /// The most beyond the definition, at any time on any key.
    pub(super) excess: f64,
    /// The most of one key that began within a period.
    pub(super) worst_period: u64,
    /// Calls of the store for each decision, if they can be counted.
    pub(super) calls: Option<f64>,
    /// Of a decision, in microseconds.
    pub(super) p50_us: f64,
    pub(super) p99_us: f64,
}

/// Asks one way after the other.
pub(super) fn run(ways: &[Way], plan: &Plan, store: &Store) -> Result<Vec<Row>, CompareError> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let runtime = runtime.map_err(|error| CompareError::Started(error.to_string()))?;
    let bar = progress::bar(ways.len(), "ways");
    let mut rows = Vec::new();
    for way in ways {
        rows.push(runtime.block_on(ask(*way, plan, store))?);
        bar.inc(1);
    }
    bar.finish_and_clear();
    Ok(rows)
}

/// Who decides about requests of a node.
#[derive(Clone)]
enum Node {
    Limit(AsyncLimit),
    Counts(Arc<Counts>),
    WriteBehind(Arc<WriteBehind>),
}

/// The nodes of a way, and what counts their calls.
struct Cluster {
    nodes: Vec<Node>,
    limiters: Vec<Limiter>,
    counts: Option<Arc<Counts>>,
    memory: MemoryStore,
    tasks: JoinSet<()>,
}

/// When a request began, if it was admitted, and how long the decision took.
struct Decided {
    key: usize,
    start_us: Option<u64>,
    took: Duration,
}

/// The clock of the machine, in microseconds since 1970.
#[allow(
    clippy::disallowed_methods,
    reason = "requests come in real time, and windows begin by the machine's clock"
)]
fn unix_us() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_micros() as u64
}

#[allow(clippy::disallowed_methods, reason = "decisions are timed")]
fn instant() -> Instant {
    Instant::now()
}

async fn ask(way: Way, plan: &Plan, store: &Store) -> Result<Row, CompareError> {
    let cluster = Cluster::open(way, plan, store).await?;
    let calls_before = cluster.calls(store).await;
    let begin_us = (unix_us() / plan.period_us + 1) * plan.period_us;
    let mut asked = JoinSet::new();
    for &Request { at_us, key, node } in &plan.requests {
        let wait_us = (begin_us + at_us).saturating_sub(unix_us());
        if wait_us > 0 {
            sleep(Duration::from_micros(wait_us)).await;
        }
        let node = if way.kind == Kind::StickyRouting { key % plan.nodes } else { node };
        let (node, tokens) = (cluster.nodes[node].clone(), way.rule.quota().tokens());
        asked.spawn(async move {
            let begun = instant();
            let start_us = node.decide(tokens, key).await;
            Decided { key, start_us, took: begun.elapsed() }
        });
    }
    let decided = asked.join_all().await;
    let calls = match (calls_before, cluster.calls(store).await) {
        (Some(before), Some(after)) => Some((after - before) as f64 / decided.len().max(1) as f64),
        _ => None,
    };
    cluster.close().await;
    Ok(Row::new(way, plan, begin_us, &decided, calls))
}

impl Node {
    /// When the request begins, if it is admitted, in microseconds since 1970.
    async fn decide(&self, tokens: u64, key: usize) -> Option<u64> {
        match self {
            Self::Limit(limit) => {
                let decision = match limit.rule() {
                    Rule::LeakyBucket(_) => limit.schedule(&key.to_string()).await,
                    _ => limit.check_sure(&key.to_string()).await,
                };
                let at_us = decision.store_time().map_or_else(unix_us, |at| at.as_micros() as u64);
                let start_us = at_us + decision.delay().as_micros() as u64;
                decision.is_allowed().then_some(start_us)
            }
            Self::Counts(counts) => {
                let now_us = unix_us();
                counts.allows(tokens, key, now_us).await.then_some(now_us)
            }
            Self::WriteBehind(node) => {
                let now_us = unix_us();
                node.allows(tokens, key, now_us).then_some(now_us)
            }
        }
    }
}

impl Cluster {
    async fn open(way: Way, plan: &Plan, store: &Store) -> Result<Self, CompareError> {
        let (memory, tasks) = (MemoryStore::new(), JoinSet::new());
        let mut cluster =
            Self { nodes: Vec::new(), limiters: Vec::new(), counts: None, memory, tasks };
        let Kind::Mode(mode) = way.kind else { return cluster.usual(way, plan, store).await };
        let namespace = namespace();
        for _ in 0..plan.nodes {
            let limit = Limit::new("x", way.rule).mode(mode).sync_interval(plan.interval);
            let builder = Limiter::builder().limit(limit);
            let builder = match store {
                _ if !way.has_store() => builder,
                Store::Memory => builder.store(cluster.memory.clone()).max_nodes(plan.nodes as u32),
                Store::Redis(address) => {
                    let store = RedisStore::open(address)?;
                    builder.store(store.namespace(&namespace).map_err(config_error)?)
                }
            };
            cluster.add(builder)?;
        }
        if way.has_store() {
            for limiter in &cluster.limiters {
                limiter.ready(READY).await?;
            }
            sleep(MEETING).await;
        }
        Ok(cluster)
    }

    fn add(&mut self, builder: Builder) -> Result<(), CompareError> {
        let limiter = builder.build().map_err(config_error)?;
        self.nodes.push(Node::Limit(limiter.async_limit("x").map_err(config_error)?));
        self.limiters.push(limiter);
        Ok(())
    }

    /// The nodes of a usual way.
    async fn usual(mut self, way: Way, plan: &Plan, store: &Store) -> Result<Self, CompareError> {
        let counts = match way.kind {
            Kind::CentralCall | Kind::WriteBehind => {
                Some(Counts::open(store, plan.period_us).await?)
            }
            _ => None,
        };
        for _ in 0..plan.nodes {
            match (way.kind, &counts) {
                (Kind::CentralCall, Some(counts)) => self.nodes.push(Node::Counts(counts.clone())),
                (Kind::WriteBehind, Some(counts)) => {
                    let node = Arc::new(WriteBehind::new(counts.clone()));
                    let (syncing, interval) = (node.clone(), plan.interval);
                    self.tasks.spawn(async move { syncing.sync(interval, unix_us).await });
                    self.nodes.push(Node::WriteBehind(node));
                }
                (Kind::PartOnEachNode, _) => {
                    self.add(
                        Limiter::builder().limit(Limit::new("x", part(way.rule, plan.nodes))),
                    )?;
                }
                _ => self.add(Limiter::builder().limit(Limit::new("x", way.rule)))?,
            }
        }
        Ok(Self { counts, ..self })
    }

    /// Calls of the store so far.
    async fn calls(&self, store: &Store) -> Option<u64> {
        if let Some(counts) = &self.counts {
            return Some(counts.calls());
        }
        match store {
            Store::Memory => Some(self.memory.calls()),
            Store::Redis(address) => script_calls(address).await,
        }
    }

    async fn close(mut self) {
        self.tasks.shutdown().await;
        for limiter in &self.limiters {
            // The run is over: what it leaves in the store expires.
            let _ = limiter.shutdown(READY).await;
        }
    }
}

/// Calls of scripts that a server has answered.
async fn script_calls(address: &str) -> Option<u64> {
    let client = redis::Client::open(address).ok()?;
    let mut connection = client.get_multiplexed_async_connection().await.ok()?;
    let told: String =
        redis::cmd("INFO").arg("commandstats").query_async(&mut connection).await.ok()?;
    let of = |line: &str| -> Option<u64> {
        let name = line.strip_prefix("cmdstat_")?;
        let (name, rest) = name.split_once(":calls=")?;
        let is_script = ["eval", "evalsha"].contains(&name);
        is_script.then(|| rest.split(',').next()?.parse().ok()).flatten()
    };
    Some(told.lines().filter_map(of).sum())
}

/// The part of a rule that one of so many nodes has: a token at least.
fn part(rule: Rule, nodes: usize) -> Rule {
    let quota = rule.quota();
    let part = |tokens: u64| (tokens / nodes as u64).max(1);
    let (tokens, period) = (part(quota.tokens()), quota.period());
    match rule {
        Rule::LeakyBucket(rule) => {
            LeakyBucket::new(tokens, period).queue(rule.longest_wait()).into()
        }
        Rule::FixedWindow(_) => FixedWindow::new(tokens, period).into(),
        Rule::SlidingWindow(_) => SlidingWindow::new(tokens, period).into(),
        Rule::SlidingLog(_) => SlidingLog::new(tokens, period).into(),
        _ => Quota::new(tokens, period).burst(part(quota.burst_tokens())).into(),
    }
}

impl Row {
    fn new(way: Way, plan: &Plan, begin_us: u64, decided: &[Decided], calls: Option<f64>) -> Self {
        let (mut ideal, mut excess, mut worst_period) = (0, 0.0_f64, 0);
        let mut all = Vec::new();
        for key in 0..plan.keys {
            let mut central = Central::new(way.rule);
            let requests = plan.requests.iter().filter(|request| request.key == key);
            ideal += requests.filter(|one| central.allows(begin_us + one.at_us)).count() as u64;
            let of_key = decided.iter().filter(|one| one.key == key);
            let mut starts: Vec<u64> = of_key.filter_map(|one| one.start_us).collect();
            starts.sort_unstable();
            let mut judge = Central::new(way.rule);
            excess = starts.iter().map(|at_us| judge.charge(*at_us)).fold(excess, f64::max);
            worst_period = worst_period.max(most_in_a_period(&starts, plan.period_us));
            all.extend(starts.iter().map(|at_us| at_us.saturating_sub(begin_us)));
        }
        all.sort_unstable();
        let mut took: Vec<Duration> = decided.iter().map(|one| one.took).collect();
        took.sort_unstable();
        let quantile = |part: f64| {
            let at = (took.len() as f64 * part) as usize;
            took.get(at.min(took.len().saturating_sub(1)))
                .map_or(0.0, |took| took.as_secs_f64() * 1e6)
        };
        let (p50_us, p99_us) = (quantile(0.5), quantile(0.99));
        Self { way, admitted_us: all, ideal, excess, worst_period, calls, p50_us, p99_us }
    }
}
