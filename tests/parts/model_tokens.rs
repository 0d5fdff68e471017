//! Nodes that share a limit of model tokens in virtual time: requests reserve an estimate, and commit what they cost a
//! second later.
//!
//! Beside them one central bucket is charged at once by all that is reserved and committed.

#![allow(dead_code, reason = "each file uses some of the functions only")]
#![allow(clippy::disallowed_methods, reason = "each request is a task of its service")]

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tidegate::testing::ManualClock;
use tidegate::{ActiveLimit, Limiter, Reservation, ReserveError};
use tokio::sync::Notify;

pub(crate) const NODES: usize = 8;
/// The limit's name.
pub(crate) const LIMIT: &str = "tokens";
const MINUTE_US: u64 = 60_000_000;
const STEP: Duration = Duration::from_millis(1);
/// After so many rounds of all tasks, with no call of the store under way, nothing is left to do at this time.
const QUIET_ROUNDS: u32 = 16;
/// In which nodes get to know each other before the load, and report all after it.
const PAUSE: Duration = Duration::from_secs(3);
/// Four sync intervals: nodes that have tokens left have heard of a settlement by then.
const KNOWN_AFTER_US: u64 = 200_000;
/// What the nodes may spend beyond the limit together, in tokens: 15 each at most.
pub(crate) const CREDIT: f64 = 15.0 * NODES as f64;

/// The time, which goes on when nothing is left to do. Clones are one.
#[derive(Clone, Default)]
pub(crate) struct VirtualTime {
    pub(crate) clock: ManualClock,
    moved: Arc<Notify>,
    /// Calls of a store that is outside of this time.
    calls: Arc<AtomicUsize>,
}

/// While it lives, time stands still.
pub(crate) struct Standstill(Arc<AtomicUsize>);

impl Drop for Standstill {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl VirtualTime {
    pub(crate) fn now_us(&self) -> u64 {
        self.clock.now().as_micros()
    }

    pub(crate) fn stand_still(&self) -> Standstill {
        self.calls.fetch_add(1, Ordering::Relaxed);
        Standstill(self.calls.clone())
    }

    pub(crate) async fn wait(&self, time: Duration) {
        let until_us = self.now_us() + time.as_micros() as u64;
        loop {
            let moved = self.moved.notified();
            if self.now_us() >= until_us {
                return;
            }
            moved.await;
        }
    }

    async fn pass(&self, time: Duration) {
        for _ in 0..time.div_duration_f64(STEP) as u64 {
            self.step().await;
        }
    }

    async fn step(&self) {
        self.clock.advance(STEP);
        self.moved.notify_waiters();
        self.quiet().await;
    }

    /// Lets all tasks do what is to be done now.
    async fn quiet(&self) {
        let mut rounds = 0;
        while rounds < QUIET_ROUNDS {
            tokio::task::yield_now().await;
            rounds = if self.calls.load(Ordering::Relaxed) > 0 { 0 } else { rounds + 1 };
        }
    }
}

/// What is played.
#[derive(Clone, Debug)]
pub(crate) struct Play {
    /// The limit of each key.
    pub(crate) tokens_per_minute: u64,
    pub(crate) burst: u64,
    /// How much the requests of each key cost, in multiples of its limit.
    pub(crate) loads: Vec<f64>,
    /// Estimates lie between these, small ones as often as large ones.
    pub(crate) estimates: (f64, f64),
    /// Costs lie between these multiples of the estimates, likewise.
    pub(crate) factors: (f64, f64),
    /// What a model takes to answer.
    pub(crate) settled_after_us: u64,
    pub(crate) minutes: u64,
    pub(crate) seed: u64,
}

impl Play {
    fn tokens_per_us(&self) -> f64 {
        self.tokens_per_minute as f64 / MINUTE_US as f64
    }

    /// What flows in within the time of the play.
    pub(crate) fn refill(&self) -> f64 {
        (self.tokens_per_minute * self.minutes) as f64
    }

    /// Requests of a key come after so many microseconds on average.
    fn gap_us(&self, key: usize) -> f64 {
        let mean_cost = mean(self.estimates) * mean(self.factors);
        mean_cost / (self.loads[key] * self.tokens_per_us())
    }
}

/// A number between two, whose logarithm is anywhere between theirs.
fn draw(rng: &mut fastrand::Rng, (least, most): (f64, f64)) -> f64 {
    least * (most / least).powf(rng.f64())
}

fn mean((least, most): (f64, f64)) -> f64 {
    if least < most { (most - least) / (most / least).ln() } else { least }
}

/// The name of a key.
pub(crate) fn key_name(key: usize) -> String {
    format!("model:{key}")
}

/// A request that was allowed and has been settled.
pub(crate) struct Settled {
    pub(crate) key: usize,
    pub(crate) node: usize,
    pub(crate) at_us: u64,
    pub(crate) estimate: u32,
    pub(crate) cost: u32,
}

/// How it went with one key, in tokens.
#[derive(Clone, Debug, Default)]
pub(crate) struct KeyOutcome {
    pub(crate) requests: u64,
    pub(crate) allowed: u64,
    /// What requests cost that came within the time.
    pub(crate) spent: u64,
    /// The same of those that came after the first minute.
    pub(crate) spent_later: u64,
    /// How far the central bucket was below zero at most.
    pub(crate) deepest_debt: f64,
    /// The most that requests in flight together cost beyond their estimates. One is in flight from its reservation until
    /// four sync intervals after its settlement.
    pub(crate) most_beyond: f64,
}

pub(crate) struct Outcome {
    pub(crate) keys: Vec<KeyOutcome>,
    pub(crate) settled: Vec<Settled>,
}

/// One bucket that knows all at once.
struct Central {
    level: f64,
    at_us: u64,
    /// What requests in flight cost beyond their estimates.
    beyond: f64,
}

struct Open {
    due_us: u64,
    asked_us: u64,
    node: usize,
    key: usize,
    cost: u32,
    reservation: Reservation,
}

struct Ledger {
    play: Play,
    begin_us: u64,
    central: Vec<Central>,
    open: VecDeque<Open>,
    /// Requests that are settled and in flight: until when, which key, and what they cost beyond.
    settled: VecDeque<(u64, usize, f64)>,
    outcome: Outcome,
}

impl Ledger {
    fn new(play: &Play, begin_us: u64) -> Self {
        let full = |_: &f64| Central { level: play.burst as f64, at_us: begin_us, beyond: 0.0 };
        Self {
            play: play.clone(),
            begin_us,
            central: play.loads.iter().map(full).collect(),
            open: VecDeque::new(),
            settled: VecDeque::new(),
            outcome: Outcome {
                keys: vec![KeyOutcome::default(); play.loads.len()],
                settled: Vec::new(),
            },
        }
    }

    fn charge(&mut self, key: usize, tokens: f64, now_us: u64) {
        let (central, outcome) = (&mut self.central[key], &mut self.outcome.keys[key]);
        let flowed = (now_us - central.at_us) as f64 * self.play.tokens_per_us();
        let burst = self.play.burst as f64;
        central.level = ((central.level + flowed).min(burst) - tokens).min(burst);
        central.at_us = now_us;
        outcome.deepest_debt = outcome.deepest_debt.max(-central.level);
    }

    /// Nodes know of what was settled a while ago.
    fn forget_known(&mut self, now_us: u64) {
        while let Some(&(_, key, beyond)) = self.settled.front().filter(|known| known.0 <= now_us) {
            self.central[key].beyond -= beyond;
            self.settled.pop_front();
        }
    }

    fn allow(&mut self, open: Open, now_us: u64) {
        let estimate = open.reservation.estimate();
        self.charge(open.key, f64::from(estimate), now_us);
        self.forget_known(now_us);
        let (central, outcome) = (&mut self.central[open.key], &mut self.outcome.keys[open.key]);
        central.beyond += beyond(estimate, open.cost);
        outcome.most_beyond = outcome.most_beyond.max(central.beyond);
        outcome.allowed += 1;
        outcome.spent += u64::from(open.cost);
        if open.asked_us >= self.begin_us + MINUTE_US {
            outcome.spent_later += u64::from(open.cost);
        }
        self.open.push_back(open);
    }

    /// Settles what is due.
    fn settle(&mut self, now_us: u64) -> bool {
        if self.open.front().is_none_or(|open| open.due_us > now_us) {
            return false;
        }
        let Some(open) = self.open.pop_front() else { return false };
        let Open { node, key, cost, reservation, .. } = open;
        let estimate = reservation.estimate();
        reservation.commit(cost);
        self.charge(key, f64::from(cost) - f64::from(estimate), now_us);
        self.settled.push_back((now_us + KNOWN_AFTER_US, key, beyond(estimate, cost)));
        self.outcome.settled.push(Settled { key, node, at_us: now_us, estimate, cost });
        true
    }
}

fn beyond(estimate: u32, cost: u32) -> f64 {
    f64::from(cost.saturating_sub(estimate))
}

fn lock(ledger: &Mutex<Ledger>) -> MutexGuard<'_, Ledger> {
    ledger.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A request of a key.
struct Request {
    limit: ActiveLimit,
    time: VirtualTime,
    node: usize,
    key: usize,
    estimate: u32,
    cost: u32,
}

impl Request {
    async fn go(self, ledger: Arc<Mutex<Ledger>>) {
        let Self { limit, time, node, key, estimate, cost } = self;
        let asked_us = time.now_us();
        match limit.reserve(&key_name(key), estimate).await {
            Ok(reservation) => {
                let now_us = time.now_us();
                let mut ledger = lock(&ledger);
                let due_us = now_us + ledger.play.settled_after_us;
                ledger.allow(Open { due_us, asked_us, node, key, cost, reservation }, now_us);
            }
            Err(ReserveError::Denied(_)) => {}
            Err(error) => panic!("{error}"),
        }
    }
}

/// Plays it on these nodes, which are in this time.
pub(crate) async fn play(play: &Play, time: &VirtualTime, nodes: &[Limiter]) -> Outcome {
    let limits: Vec<_> =
        nodes.iter().map(|node| node.limit(LIMIT).expect("the nodes have it")).collect();
    time.pass(PAUSE).await;
    let mut rng = fastrand::Rng::with_seed(play.seed);
    let begin_us = time.now_us();
    let end_us = begin_us + play.minutes * MINUTE_US;
    let ledger = Arc::new(Mutex::new(Ledger::new(play, begin_us)));
    let gap_us = |rng: &mut fastrand::Rng, key| -(1.0 - rng.f64()).ln() * play.gap_us(key);
    let mut due_us: Vec<f64> =
        (0..play.loads.len()).map(|key| begin_us as f64 + gap_us(&mut rng, key)).collect();
    while time.now_us() < end_us {
        time.step().await;
        while lock(&ledger).settle(time.now_us()) {
            time.quiet().await;
        }
        for (key, due_us) in due_us.iter_mut().enumerate() {
            while *due_us < time.now_us().min(end_us) as f64 {
                *due_us += gap_us(&mut rng, key);
                let (node, estimate) = (rng.usize(..NODES), draw(&mut rng, play.estimates));
                let cost = (estimate * draw(&mut rng, play.factors)) as u32;
                let (limit, estimate) = (limits[node].clone(), estimate as u32);
                let request = Request { limit, time: time.clone(), node, key, estimate, cost };
                lock(&ledger).outcome.keys[key].requests += 1;
                tokio::spawn(request.go(ledger.clone()));
                time.quiet().await;
            }
        }
    }
    while !lock(&ledger).open.is_empty() {
        time.step().await;
        while lock(&ledger).settle(time.now_us()) {}
    }
    time.pass(PAUSE).await;
    let outcome = &mut lock(&ledger).outcome;
    std::mem::replace(outcome, Outcome { keys: Vec::new(), settled: Vec::new() })
}
