//! The five algorithms, where one node decides and where the store does: worked examples, and each against an oracle that
//! keeps all admissions and applies the algorithm's definition to them.
#![cfg(all(feature = "testing", feature = "redis"))]

mod parts;

use std::time::Duration;

use proptest::prelude::*;
use tidegate::testing::{ManualClock, ScriptedStore};
use tidegate::{
    ActiveLimit, AsyncLimit, CheckError, ConfigError, Decision, FixedWindow, Incidents,
    LeakyBucket, Limit, Limiter, MemoryStore, OutagePolicy, Quota, RedisStore, Rule, SlidingLog,
    SlidingWindow,
};

use parts::RedisServer;

/// Where the examples' time begins: windows of each length in them begin here too.
const BEGIN_US: u64 = 3_600_000_000;

fn micros(micros: u64) -> Duration {
    Duration::from_micros(micros)
}

/// Who decides.
#[derive(Clone, Copy)]
enum By<'a> {
    /// This node alone.
    Node,
    /// The store inside this process.
    Memory,
    /// A real Redis, which is told the time.
    Redis(&'a RedisServer),
    /// This node, from leases of a store inside this process. All times are a thousand times as long.
    Leases,
}

/// One limit on a clock that the test drives.
struct Node {
    clock: ManualClock,
    limit: AsyncLimit,
    /// The limiter's task runs here.
    runtime: tokio::runtime::Runtime,
    /// Slots ahead are taken.
    is_queue: bool,
    /// How late tokens may come to a node that has leases.
    late: Duration,
    /// The limiter whose task is run as time passes, if the node has leases.
    syncs: Option<Limiter>,
}

/// How far time moves at once while a node syncs.
const STEP: Duration = Duration::from_millis(50);
/// How much longer times are where a node has leases.
const SLOWER: u64 = 1000;
/// And when they begin.
const SLOW_BEGIN_US: u64 = 100_000_000_000;

/// A rule whose periods are longer.
fn slower(rule: Rule) -> Rule {
    let (tokens, period) = (rule.quota().tokens(), rule.quota().period() * SLOWER as u32);
    match rule {
        Rule::TokenBucket(quota) => Quota::new(tokens, period).burst(quota.burst_tokens()).into(),
        Rule::FixedWindow(_) => FixedWindow::new(tokens, period).into(),
        Rule::SlidingWindow(_) => SlidingWindow::new(tokens, period).into(),
        Rule::SlidingLog(_) => SlidingLog::new(tokens, period).into(),
        Rule::LeakyBucket(rule) => {
            LeakyBucket::new(tokens, period).queue(rule.longest_wait() * SLOWER as u32).into()
        }
        other => panic!("{other:?} is not leased"),
    }
}

impl Node {
    fn new(rule: Rule, by: By<'_>) -> Self {
        let clock = ManualClock::new();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let entered = runtime.enter();
        let (limit, builder) = (Limit::new("x", rule), Limiter::builder().max_keys(16));
        let builder = match by {
            By::Node => builder.limit(limit.local()),
            By::Memory => builder.limit(limit.exact()).store(ScriptedStore::new(&clock)),
            By::Redis(server) => {
                let store = RedisStore::open(&server.url()).unwrap().clock(&clock);
                builder.limit(limit.exact()).store(store)
            }
            By::Leases => {
                let store = ScriptedStore::new(&clock);
                let limit = Limit::new("x", slower(rule));
                builder.limit(limit).store(store).max_nodes(1).lanes(1)
            }
        };
        let limiter = builder.clock(&clock).build().unwrap();
        let limit = limiter.async_limit("x").unwrap();
        drop(entered);
        let is_queue = matches!(rule, Rule::LeakyBucket(_));
        let syncs = matches!(by, By::Leases).then_some(limiter);
        let late = match rule {
            // Tokens come back up to a slot late, of 64 in a window; what is then spent late comes back later still.
            Rule::SlidingLog(_) => rule.quota().period() * SLOWER as u32 / 16 + 2 * STEP,
            // Parts of the last token may be here and there: a node asks for it within two ticks.
            _ => 2 * STEP,
        };
        let node = Self { clock, limit, runtime, is_queue, late, syncs };
        node.at(0);
        node
    }

    /// Sets the clock, unless that would be back.
    fn at(&self, us: u64) {
        let now = self.clock.now().as_micros();
        let Some(limiter) = &self.syncs else {
            self.clock.advance(micros((BEGIN_US + us).saturating_sub(now)));
            return;
        };
        let mut left = micros((SLOW_BEGIN_US + us * SLOWER).saturating_sub(now));
        if us == 0 {
            // The node and its store meet in the last seconds.
            let alone = left.saturating_sub(Duration::from_secs(10));
            self.clock.advance(alone);
            left -= alone;
        }
        while left > Duration::ZERO {
            let step = left.min(STEP);
            self.clock.advance(step);
            self.runtime.block_on(limiter.settle());
            left -= step;
        }
        self.runtime.block_on(limiter.settle());
    }

    fn ask(&self, cost: u32) -> Result<Decision, CheckError> {
        match &self.syncs {
            Some(limiter) => self.runtime.block_on(self.ask_store(limiter, cost)),
            None if self.is_queue => self.runtime.block_on(self.limit.schedule_n("key", cost)),
            None => self.runtime.block_on(self.limit.check_sure_n("key", cost)),
        }
    }
}

impl Node {
    /// Asks, and lets time pass while the store is waited for: a little at a time.
    async fn ask_store(&self, limiter: &Limiter, cost: u32) -> Result<Decision, CheckError> {
        let ask = async || {
            if self.is_queue {
                self.limit.schedule_n("key", cost).await
            } else {
                self.limit.check_sure_n("key", cost).await
            }
        };
        let mut decision = std::pin::pin!(ask());
        loop {
            tokio::select! {
                biased;
                decision = &mut decision => return decision,
                () = limiter.settle() => self.clock.advance(micros(20)),
            }
        }
    }
}

/// Plays one row, whoever decides.
fn plays(rule: impl Into<Rule>, row: &str) {
    let (rule, server) = (rule.into(), RedisServer::start());
    for by in [By::Node, By::Memory, By::Redis(&server)] {
        plays_on(&Node::new(rule, by), row);
    }
    plays_on(&Node::new(rule, By::Leases), row);
}

/// Plays one row: `time/cost yes|no remaining` in milliseconds, with `+` the time to retry after, `d` the delay, and
/// `never` for a cost that cannot be.
fn plays_on(node: &Node, row: &str) {
    for step in row.split('|').map(str::trim) {
        let mut words = step.split_whitespace();
        let (time, cost) = words.next().unwrap().split_once('/').unwrap();
        node.at(micros_of(time));
        let (allowed, remaining) = (words.next().unwrap() == "yes", words.next().unwrap());
        let more = words.next();
        if node.syncs.is_some() && more == Some("+0.001") {
            // So long a caller waits for the store, and is admitted.
            continue;
        }
        let mut answer = node.ask(cost.parse().unwrap());
        let until_us = node.clock.now().as_micros() + node.late.as_micros() as u64;
        while let (true, Some(limiter), Ok(denied)) = (allowed, &node.syncs, &answer)
            && denied.is_denied()
            && node.clock.now().as_micros() < until_us
        {
            node.clock.advance(STEP);
            node.runtime.block_on(limiter.settle());
            answer = node.ask(cost.parse().unwrap());
        }
        if more == Some("never") {
            assert!(answer.is_err(), "{step}");
            continue;
        }
        let decision = answer.unwrap();
        assert_eq!(decision.is_allowed(), allowed, "{step}: {decision:?}");
        let is_hint = node.syncs.is_some();
        if !is_hint || allowed {
            assert_eq!(decision.remaining().to_string(), remaining, "{step}: {decision:?}");
        }
        if node.is_queue && allowed {
            let millis = more.map_or("0", |more| more.trim_start_matches('d'));
            let expected = micros_of(millis) * if is_hint { SLOWER } else { 1 };
            let within = if is_hint { STEP.as_micros() as u64 } else { 0 };
            let delay = decision.delay().as_micros() as u64;
            assert!(delay.abs_diff(expected) <= within, "{step}: {decision:?}");
        }
        if is_hint {
            // A caller who is denied has waited, and more may have come meanwhile.
            continue;
        }
        assert!(decision.is_sure(), "{step}");
        let (mut retry, mut delay) = (0, 0);
        match more.map(|more| more.split_at(1)) {
            Some(("+", time)) => retry = micros_of(time),
            Some(("d", time)) => delay = micros_of(time),
            _ => {}
        }
        assert_eq!(decision.retry_after(), micros(retry), "{step}");
        assert_eq!(decision.delay(), micros(delay), "{step}");
    }
}

/// Microseconds in a decimal number of milliseconds.
fn micros_of(millis: &str) -> u64 {
    let (whole, part) = millis.split_once('.').unwrap_or((millis, ""));
    let part = format!("{part:0<3}");
    whole.parse::<u64>().unwrap() * 1000 + part.parse::<u64>().unwrap()
}

#[test]
fn token_bucket_plays_its_example() {
    plays(
        Quota::per_second(4),
        "0/1 yes 3 | 0/3 yes 0 | 0/1 no 0 +250 | 249/1 no 0 +1 | 250/1 yes 0 | 700/2 no 1 +50 | 750/2 yes 0 \
         | 2000/5 no 4 never | 2000/4 yes 0 | 1900/1 no 0 +250",
    );
}

#[test]
fn leaky_bucket_as_a_meter_is_the_token_bucket() {
    plays(
        Quota::per_second(5).burst(3),
        "0/3 yes 0 | 0/1 no 0 +200 | 199/1 no 0 +1 | 200/1 yes 0 | 500/2 no 1 +100 | 500/1 yes 0 | 700/1 yes 0 \
         | 5000/4 no 3 never | 5000/2 yes 1 | 4000/1 yes 0",
    );
}

#[test]
fn gcra_is_the_token_bucket_to_the_microsecond() {
    plays(
        Quota::per_second(3).burst(2),
        "0/2 yes 0 | 333.333/1 no 0 +0.001 | 333.334/1 yes 0 | 666.666/1 no 0 +0.001 | 666.667/1 yes 0 \
         | 1000/1 yes 0 | 1000/1 no 0 +333.334 | 1333.333/1 no 0 +0.001 | 1333.334/1 yes 0 | 3000/3 no 2 never",
    );
}

#[test]
fn leaky_bucket_plays_its_example() {
    plays(
        LeakyBucket::per_second(4).queue(Duration::from_millis(500)),
        "0/1 yes 2 | 0/1 yes 1 d250 | 0/1 yes 0 d500 | 0/1 no 0 +250 | 249/1 no 0 +1 | 250/1 yes 0 d500 \
         | 250/2 no 0 +250 | 2000/3 yes 0 | 2100/1 no 0 +150 | 2250/1 yes 0 d500",
    );
}

#[test]
fn fixed_window_plays_its_example() {
    plays(
        FixedWindow::per_second(4),
        "999/3 yes 1 | 999/2 no 1 +1 | 999/1 yes 0 | 999.999/1 no 0 +0.001 | 1000/4 yes 0 | 1000/1 no 0 +1000 \
         | 1999.999/1 no 0 +0.001 | 2000/5 no 4 never | 2000/2 yes 2 | 1999/1 yes 1",
    );
}

#[test]
fn sliding_window_plays_its_example() {
    plays(
        SlidingWindow::per_second(4),
        "900/4 yes 0 | 999.999/1 no 0 +0.002 | 1000/1 no 0 +0.001 | 1000.001/1 yes 0 | 1250/1 no 0 +0.001 \
         | 1250.001/1 yes 0 | 1500/2 no 0 +250.001 | 1750.001/2 yes 0 | 2000/2 no 0 +250.001 | 2000.001/1 yes 0",
    );
}

#[test]
fn sliding_log_plays_its_example() {
    plays(
        SlidingLog::per_second(4),
        "900/3 yes 1 | 950/2 no 1 +950 | 950/1 yes 0 | 1000/1 no 0 +900 | 1899.999/1 no 0 +0.001 | 1900/3 yes 0 \
         | 1900/1 no 0 +50 | 1950/1 yes 0 | 1949/1 no 0 +950 | 2900/3 yes 0",
    );
}

/// Windows of a zone, whoever decides: 5 tokens in each, of which all are spent.
#[cfg(feature = "calendar")]
#[test]
fn windows_of_a_zone_end_where_its_clock_says() {
    const HOUR: u64 = 3_600_000_000;
    // Midnight in Berlin as the 29th of March 2026 begins, which has 23 hours.
    const MIDNIGHT: u64 = 1_774_738_800_000_000;
    let cases = [
        (FixedWindow::per_day(5).zone("Europe/Berlin"), [MIDNIGHT, MIDNIGHT + 23 * HOUR]),
        (
            FixedWindow::per_hour(5).zone("Asia/Kathmandu"),
            [MIDNIGHT - HOUR * 3 / 4, MIDNIGHT + HOUR / 4],
        ),
        // April begins in summer time.
        (
            FixedWindow::per_month(5).zone("Europe/Berlin"),
            [MIDNIGHT - 28 * 24 * HOUR, MIDNIGHT + (3 * 24 - 1) * HOUR],
        ),
    ];
    for (rule, [begin, end]) in cases {
        let server = RedisServer::start();
        for by in [By::Node, By::Memory, By::Redis(&server)] {
            let node = Node::new(rule.into(), by);
            let at = |us: u64| node.clock.advance(micros(us - node.clock.now().as_micros()));
            let spend = |times: u64| {
                for left in (0..times).rev() {
                    let decision = node.ask(1).unwrap();
                    assert!(decision.is_allowed() && decision.remaining() == left, "{decision:?}");
                }
                node.ask(1).unwrap()
            };
            at(begin - 1);
            assert_eq!(spend(5).retry_after(), micros(1), "{rule:?}");
            at(begin);
            assert_eq!(spend(5).retry_after(), micros(end - begin), "{rule:?}");
            at(begin + 1_000_000);
            assert!(node.ask(1).unwrap().is_denied());
            at(end - 1);
            let denied = node.ask(1).unwrap();
            assert_eq!(denied.retry_after(), micros(1), "{rule:?}");
            at(end);
            assert!(node.ask(5).unwrap().is_allowed(), "{rule:?}");
            let shown = node.ask(1).unwrap().store_time();
            assert!(shown.is_none_or(|shown| shown == micros(end)), "{shown:?}");
        }
    }
}

// ---- oracles ---------------------------------------------------------------------------------

/// All that a key was allowed: when, and how many tokens.
type Admissions = [(u64, u64)];

/// What an algorithm's definition says of a request of `cost` tokens at `now`, where earlier ones are `admissions`.
type Definition = fn(&Numbers, &Admissions, now: u64, cost: u64) -> bool;

#[derive(Clone, Debug)]
struct Numbers {
    tokens: u64,
    period_us: u64,
    burst: u64,
    queue_us: u64,
}

fn wide(number: u64) -> u128 {
    number.into()
}

/// After every earlier admission, no more was spent from it on than the burst and what has flowed in since.
fn token_bucket(of: &Numbers, admissions: &Admissions, now: u64, cost: u64) -> bool {
    let (mut spent, period) = (cost, wide(of.period_us));
    cost <= of.burst
        && admissions.iter().rev().all(|&(at, cost)| {
            spent += cost;
            wide(spent) * period <= wide(of.burst) * period + wide(of.tokens) * wide(now - at)
        })
}

/// When a request at `now` starts, in parts of a microsecond of which there are `tokens`.
fn start(of: &Numbers, admissions: &Admissions, now: u64) -> u128 {
    let next = admissions.iter().fold(0, |next, &(at, cost)| {
        next.max(wide(at) * wide(of.tokens)) + wide(cost) * wide(of.period_us)
    });
    next.max(wide(now) * wide(of.tokens))
}

fn queue(of: &Numbers, admissions: &Admissions, now: u64, _: u64) -> bool {
    start(of, admissions, now) <= wide(now + of.queue_us) * wide(of.tokens)
}

/// What was spent in the window of this number.
fn spent_in(of: &Numbers, admissions: &Admissions, window: u64) -> u64 {
    admissions.iter().filter(|(at, _)| at / of.period_us == window).map(|(_, cost)| cost).sum()
}

fn fixed_window(of: &Numbers, admissions: &Admissions, now: u64, cost: u64) -> bool {
    spent_in(of, admissions, now / of.period_us) + cost <= of.tokens
}

fn sliding_window(of: &Numbers, admissions: &Admissions, now: u64, cost: u64) -> bool {
    let window = now / of.period_us;
    let left = (window + 1) * of.period_us - now;
    let before = wide(spent_in(of, admissions, window - 1)) * wide(left) / wide(of.period_us);
    wide(spent_in(of, admissions, window)) + before + wide(cost) <= wide(of.tokens)
}

fn sliding_log(of: &Numbers, admissions: &Admissions, now: u64, cost: u64) -> bool {
    let inside = admissions.iter().filter(|(at, _)| at + of.period_us > now);
    inside.map(|(_, cost)| cost).sum::<u64>() + cost <= of.tokens
}

fn rule_and_definition(algorithm: u8, of: &Numbers) -> (Rule, Definition) {
    let (tokens, period) = (of.tokens, micros(of.period_us));
    match algorithm {
        0 => (Quota::new(tokens, period).burst(of.burst).into(), token_bucket),
        1 => (LeakyBucket::new(tokens, period).queue(micros(of.queue_us)).into(), queue),
        2 => (FixedWindow::new(tokens, period).into(), fixed_window),
        3 => (SlidingWindow::new(tokens, period).into(), sliding_window),
        _ => (SlidingLog::new(tokens, period).into(), sliding_log),
    }
}

/// Plays random requests, and compares every answer with the definition: what was allowed; what remains; and that the
/// request is allowed at the time to retry, and not a microsecond before.
fn compare(algorithm: u8, of: &Numbers, seed: u64, by: By<'_>) {
    let (rule, allows) = rule_and_definition(algorithm, of);
    let (node, mut rng) = (Node::new(rule, by), fastrand::Rng::with_seed(seed));
    let mut admissions: Vec<(u64, u64)> = Vec::new();
    let (most, mut now) = (if algorithm == 0 { of.burst } else { of.tokens }, BEGIN_US);
    for step in 0..60 {
        let token_us = of.period_us / of.tokens.max(1);
        let to_edge = of.period_us - now % of.period_us;
        now += match rng.u8(..8) {
            0 | 1 => 0,
            2 => to_edge - 1,
            3 => to_edge,
            4 => rng.u64(..=token_us),
            5 => rng.u64(..=3 * of.period_us),
            6 => 1,
            _ => rng.u64(..=of.period_us / 2),
        };
        node.at(now - BEGIN_US);
        let cost = if rng.bool() { 1 } else { rng.u64(1..=most) };
        let label = format!("{rule:?}, seed {seed}, step {step}: {cost} tokens at {now}");
        let expected = allows(of, &admissions, now, cost);
        let delay = start(of, &admissions, now).div_ceil(wide(of.tokens)) as u64 - now;
        let decision = node.ask(cost as u32).unwrap();
        assert_eq!(decision.is_allowed(), expected, "{label}");
        if expected {
            admissions.push((now, cost));
            assert_eq!(decision.retry_after(), Duration::ZERO, "{label}");
        } else {
            let later = now + decision.retry_after().as_micros() as u64;
            assert!(later > now && allows(of, &admissions, later, cost), "{label}: too early");
            assert!(!allows(of, &admissions, later - 1, cost), "{label}: later than needed");
        }
        let is_delayed = algorithm == 1 && expected;
        let expected = if is_delayed { micros(delay) } else { Duration::ZERO };
        assert_eq!(decision.delay(), expected, "{label}");
        assert_eq!(decision.remaining(), remaining(of, allows, &admissions, now), "{label}");
        assert_returns(algorithm, of, &admissions, &decision, now, &label);
    }
}

/// Compares when the next token comes, and when the key is as if it had never been used.
fn assert_returns(
    algorithm: u8,
    of: &Numbers,
    admissions: &Admissions,
    decision: &Decision,
    now: u64,
    label: &str,
) {
    let (_, allows) = rule_and_definition(algorithm, of);
    let next = now + decision.next_token_after().as_micros() as u64;
    let left = |at| remaining(of, allows, admissions, at);
    let is_next = next == now || (left(next) > left(now) && left(next - 1) <= left(now));
    assert!(is_next, "{label}: the next token comes at {next}");
    let is_most = left(now) >= remaining(of, allows, &[], now);
    assert_eq!(next == now, is_most, "{label}: whether there can be more");
    let whole = now + decision.reset_after().as_micros() as u64;
    let newest = admissions.last().map_or(0, |&(at, _)| at);
    let ends = |at: u64| at - at % of.period_us + of.period_us;
    let expected = match algorithm {
        2 => ends(newest),
        3 => ends(newest) + of.period_us,
        _ => newest + of.period_us,
    };
    assert!(algorithm < 2 || whole == expected.max(now), "{label}: reset at {whole}");
    let fresh = remaining(of, allows, &[], whole);
    assert_eq!(remaining(of, allows, admissions, whole), fresh, "{label}: reset");
}

/// How many requests of one token would be allowed one after the other.
fn remaining(of: &Numbers, allows: Definition, admissions: &Admissions, now: u64) -> u64 {
    let with = |tokens: u64| [admissions, &[(now, tokens)]].concat();
    let (mut least, mut above) = (0, of.burst + of.tokens * (of.queue_us / of.period_us + 2));
    // By halves: what is allowed after many is allowed after fewer.
    while above - least > 1 {
        let middle = least + (above - least) / 2;
        if allows(of, &with(middle - 1), now, 1) { least = middle } else { above = middle }
    }
    if least == 1 && !allows(of, admissions, now, 1) { 0 } else { least }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn decisions_are_those_of_the_definition(
        algorithm in 0..5_u8,
        tokens in prop_oneof![1..=5_u64, 1..=1000_u64, Just(16_000)],
        period_us in prop_oneof![
            Just(100_000_u64), Just(1_000_000), Just(60_000_000), Just(3_600_000_000), 100_000..=10_000_000_u64,
        ],
        burst in prop_oneof![1..=5_u64, 1..=2000_u64],
        queue_us in prop_oneof![Just(0_u64), 1..=2_000_000_u64],
        seed in any::<u64>(),
    ) {
        for by in [By::Node, By::Memory] {
            compare(algorithm, &Numbers { tokens, period_us, burst, queue_us }, seed, by);
        }
    }
}

#[test]
fn decisions_of_redis_are_those_of_the_definition() {
    let server = RedisServer::start();
    for seed in 0..20 {
        let mut rng = fastrand::Rng::with_seed(seed);
        for algorithm in 0..5 {
            let of = Numbers {
                tokens: rng.u64(1..1000),
                period_us: rng.u64(100_000..100_000_000),
                burst: rng.u64(1..2000),
                queue_us: rng.u64(..2_000_000),
            };
            assert_eq!(server.command(&["FLUSHALL"]), "OK");
            compare(algorithm, &of, seed, By::Redis(&server));
        }
    }
}

#[test]
fn largest_and_smallest_numbers_are_decided_by_the_definition() {
    const YEAR_US: u64 = 366 * 24 * 3600 * 1_000_000;
    let server = RedisServer::start();
    let compare = |algorithm, of: &Numbers, seed| {
        for by in [By::Node, By::Memory, By::Redis(&server)] {
            server.command(&["FLUSHALL"]);
            compare(algorithm, of, seed, by);
        }
    };
    let windows = [(1, 100_000), (1, YEAR_US), (1_000_000_000, 100_000), (1_000_000_000, YEAR_US)];
    for (tokens, period_us) in windows {
        for algorithm in [2, 3] {
            compare(algorithm, &Numbers { tokens, period_us, burst: tokens, queue_us: 0 }, 7);
        }
    }
    for (tokens, period_us) in [(1, 100_000), (1, YEAR_US), (100_000, YEAR_US)] {
        compare(4, &Numbers { tokens, period_us, burst: tokens, queue_us: 0 }, 7);
    }
    for (tokens, period_us, queue_us) in [(1, 1, 0), (1, YEAR_US, YEAR_US), (16_384, 3, 5)] {
        compare(1, &Numbers { tokens, period_us, burst: 1, queue_us }, 7);
    }
}

/// They were refused for want of a unit that only leases need.
#[test]
fn one_node_keeps_any_number_of_tokens_in_any_period() {
    for (tokens, days) in [(9_973, 7), (7_451, 7), (1_000_003, 30), (99_991, 30)] {
        let period = Duration::from_secs(days * 24 * 3600);
        let rules: [Rule; 5] = [
            Quota::new(tokens, period).burst(tokens + 3).into(),
            LeakyBucket::new(tokens, period).into(),
            FixedWindow::new(tokens, period).into(),
            SlidingWindow::new(tokens, period).into(),
            SlidingLog::new(tokens.min(99_991), period).into(),
        ];
        for rule in rules {
            assert!(tidegate::local(rule).expect("one node keeps it").check(&()).is_allowed());
        }
    }
}

#[test]
fn impossible_rules_are_refused_with_field_and_value() {
    let quick = Duration::from_millis(99);
    let zone = |window: FixedWindow| window.zone("Europe/Berlin").into();
    let cases: [(Rule, &str); 11] = [
        (FixedWindow::per_month(5).into(), "window.zone"),
        (FixedWindow::per_day(5).zone("Europe/Berlim").into(), "window.zone"),
        (zone(FixedWindow::per_minute(5)), "window.period"),
        (FixedWindow::new(5, quick).into(), "window.period"),
        (SlidingWindow::new(5, quick).into(), "window.period"),
        (SlidingLog::new(5, quick).into(), "window.period"),
        (SlidingLog::per_second(100_001).into(), "quota.tokens"),
        (FixedWindow::per_second(0).into(), "quota.tokens"),
        (SlidingWindow::new(1, Duration::MAX).into(), "quota.period"),
        (LeakyBucket::per_second(0).into(), "quota.tokens"),
        (LeakyBucket::per_second(1).queue(Duration::MAX).into(), "queue"),
    ];
    for (rule, expected) in cases {
        let error = tidegate::local(rule).unwrap_err();
        let ConfigError::Limit { field, value, .. } = &error else { panic!("{rule:?}: {error}") };
        assert_eq!((*field, value.is_empty()), (expected, false), "{rule:?}");
    }
    let hybrid = Limit::new("x", LeakyBucket::per_second(5)).outage(OutagePolicy::LastRate);
    let hybrid = Limiter::builder().limit(hybrid).store(MemoryStore::new());
    let error = hybrid.build().unwrap_err().to_string();
    assert!(error.contains("outage") && error.contains("LastRate"), "{error}");
}

/// Each request is allowed exactly if the definition allows it at the time that the store decided, after all that it had
/// allowed by then: whichever of 8 nodes asked, with 64 requests in flight.
#[test]
fn requests_of_many_nodes_at_once_are_decided_as_if_they_came_one_by_one() {
    const NODES: u64 = 8;
    const IN_FLIGHT: u64 = 64;
    const REQUESTS: u64 = 100;
    let server = RedisServer::start();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    for algorithm in 0..5 {
        let of = Numbers { tokens: 200, period_us: 300_000, burst: 90, queue_us: 60_000 };
        let (rule, allows) = rule_and_definition(algorithm, &of);
        let entered = runtime.enter();
        let asked = (0..NODES).flat_map(|_| {
            let limit = Limit::new("x", rule).exact().max_wait(Duration::from_secs(10));
            let store = RedisStore::open(&server.url()).unwrap().timeout(Duration::from_secs(10));
            let limiter = Limiter::builder().limit(limit).store(store).build().unwrap();
            let limit = limiter.async_limit("x").unwrap();
            (0..IN_FLIGHT / NODES).map(move |_| limit.clone()).collect::<Vec<_>>()
        });
        let tasks: Vec<_> = asked
            .map(|limit| {
                runtime.spawn(async move {
                    let mut decisions = Vec::new();
                    for _ in 0..REQUESTS {
                        decisions.push(limit.schedule("key").await);
                    }
                    decisions
                })
            })
            .collect();
        drop(entered);
        let mut decisions = Vec::new();
        for task in tasks {
            decisions.extend(runtime.block_on(task).unwrap());
        }
        assert!(decisions.iter().all(Decision::is_sure));
        // Of those of one microsecond the allowed came first: nothing returns meanwhile.
        decisions.sort_by_key(|one| (one.store_time(), one.is_denied(), one.delay()));
        let mut admissions: Vec<(u64, u64)> = Vec::new();
        for decision in &decisions {
            let now = decision.store_time().unwrap().as_micros() as u64;
            let expected = allows(&of, &admissions, now, 1);
            assert_eq!(decision.is_allowed(), expected, "{rule:?} at {now}");
            if expected {
                admissions.push((now, 1));
            }
        }
        let (all, allowed) = (decisions.len(), admissions.len());
        println!("{}: {allowed} of {all} allowed, all as defined", rule.algorithm());
        assert!(all as u64 == IN_FLIGHT * REQUESTS && allowed < all);
    }
}

// ---- windows on several nodes ----------------------------------------------------------------

/// Nodes that share a limit in virtual time.
struct Cluster {
    clock: ManualClock,
    store: ScriptedStore,
    runtime: tokio::runtime::Runtime,
    limiters: Vec<Limiter>,
}

impl Cluster {
    fn new(nodes: usize, limit: &Limit) -> Self {
        let clock = ManualClock::new();
        let store = ScriptedStore::new(&clock);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let mut cluster = Self { clock, store, runtime, limiters: Vec::new() };
        for _ in 0..nodes {
            cluster.join(limit);
        }
        cluster
    }

    /// Adds a node.
    fn join(&mut self, limit: &Limit) -> ActiveLimit {
        let _entered = self.runtime.enter();
        let builder = Limiter::builder().limit(limit.clone()).store(self.store.clone()).lanes(1);
        let limiter = builder.clock(&self.clock).build().unwrap();
        self.limiters.push(limiter.clone());
        limiter.limit("x").unwrap()
    }

    /// What is admitted of a request in each of so many milliseconds.
    fn admits(&self, limit: &ActiveLimit, millis: u64) -> u64 {
        let mut admitted = 0;
        for _ in 0..millis {
            self.pass();
            admitted += u64::from(limit.check("key").is_allowed());
        }
        admitted
    }

    /// Lets a millisecond pass. Returns the time, in microseconds.
    fn pass(&self) -> u64 {
        self.clock.advance(Duration::from_millis(1));
        for limiter in &self.limiters {
            self.runtime.block_on(limiter.settle());
        }
        self.clock.now().as_micros()
    }
}

/// What nodes admitted of random requests of one key, and what one central window would have.
#[derive(Debug, Default)]
struct Admitted {
    tokens: u64,
    ideal: u64,
    /// The most that was admitted beyond the definition at any time.
    excess: u64,
}

/// Four nodes, asked for `load` times the tokens of the limit.
fn share(limit: &Limit, load: f64, windows: u64, seed: u64) -> Admitted {
    let rule = limit.rule();
    let (tokens, period_us) = (rule.quota().tokens(), rule.quota().period().as_micros() as u64);
    let of = Numbers { tokens, period_us, burst: 0, queue_us: 0 };
    let allows: Definition = match rule {
        Rule::FixedWindow(_) => fixed_window,
        Rule::SlidingWindow(_) => sliding_window,
        _ => sliding_log,
    };
    let beyond = |tokens, seen: &Admissions, now| {
        !allows(&Numbers { tokens: of.tokens + tokens, ..of.clone() }, seen, now, 1)
    };
    let cluster = Cluster::new(4, limit);
    let limits: Vec<_> = cluster.limiters.iter().map(|one| one.limit("x").unwrap()).collect();
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut admitted = Admitted::default();
    let (mut seen, mut ideal) = (Vec::<(u64, u64)>::new(), Vec::<(u64, u64)>::new());
    // Two seconds before the tenth window.
    let begin = 10 * period_us;
    cluster.clock.advance(micros(begin - 2_000_000 - cluster.clock.now().as_micros()));
    let mut due = 0.0;
    loop {
        let now = cluster.pass();
        if now >= begin + windows * period_us {
            return admitted;
        }
        if now >= begin {
            due += 2.0 * rng.f64() * load * tokens as f64 * 1000.0 / period_us as f64;
        }
        while due >= 1.0 {
            due -= 1.0;
            if allows(&of, &ideal, now, 1) {
                ideal.push((now, 1));
                admitted.ideal += 1;
            }
            if limits[rng.usize(..limits.len())].check("key").is_allowed() {
                let excess = (0..tokens).take_while(|&tokens| beyond(tokens, &seen, now)).count();
                admitted.excess = admitted.excess.max(excess as u64);
                seen.push((now, 1));
                admitted.tokens += 1;
            }
        }
        for admissions in [&mut seen, &mut ideal] {
            admissions.retain(|(at, _)| at + 2 * period_us > now);
        }
    }
}

#[test]
fn nodes_that_share_windows_admit_what_one_would_and_without_credit_never_more() {
    const QUIET: f64 = 0.9;
    const BUSY: f64 = 3.0;
    // In percent of one central window: the least without credit, and by default.
    let cases: [(Rule, f64, [f64; 2]); 9] = [
        (FixedWindow::per_second(200).into(), QUIET, [98.0, 99.0]),
        (FixedWindow::per_second(200).into(), BUSY, [99.0, 99.0]),
        (SlidingWindow::per_second(200).into(), QUIET, [97.0, 98.0]),
        (SlidingWindow::per_second(200).into(), BUSY, [97.5, 98.5]),
        (FixedWindow::new(100, Duration::from_secs(20)).into(), QUIET, [97.0, 99.0]),
        (SlidingWindow::new(100, Duration::from_secs(20)).into(), BUSY, [98.0, 99.0]),
        (SlidingLog::new(200, Duration::from_secs(10)).into(), QUIET, [99.0, 99.0]),
        (SlidingLog::new(200, Duration::from_secs(10)).into(), BUSY, [99.0, 99.0]),
        (SlidingLog::per_minute(30).into(), BUSY, [99.0, 99.0]),
    ];
    for (rule, load, least) in cases {
        for (strict, least) in [true, false].into_iter().zip(least) {
            let windows = if rule.quota().period() > Duration::from_secs(10) { 2 } else { 12 };
            let limit = Limit::new("x", rule);
            let limit = if strict { limit.strict() } else { limit };
            let admitted = share(&limit, load, windows, 1);
            let percent = 100.0 * admitted.tokens as f64 / admitted.ideal as f64;
            let label = format!("{limit:?}, load {load}: {percent:.1}%, {admitted:?}");
            println!("{label}");
            let most = tidegate::bound(&limit, 4, &Incidents::default());
            assert!(admitted.excess as f64 <= most, "{label}: at most {most}");
            assert!(percent >= least, "{label}: at least {least}%");
        }
    }
}

/// Three seconds before and after each edge, four nodes are asked for three times what a window has.
#[cfg(feature = "calendar")]
#[test]
fn nodes_that_share_days_of_a_zone_admit_each_day_what_it_has_and_no_more() {
    const HOUR: u64 = 3_600_000_000;
    const AROUND_US: u64 = 3_000_000;
    const TOKENS: u64 = 200;
    // Midnights in Berlin: of the 29th of March 2026, which has 23 hours, and of the 25th of October, which has 25.
    for (midnight, hours) in [(1_774_738_800_000_000, 23), (1_792_879_200_000_000, 25)] {
        for strict in [true, false] {
            let rule = FixedWindow::per_day(TOKENS).zone("Europe/Berlin");
            let limit = Limit::new("x", rule);
            let limit = if strict { limit.strict() } else { limit };
            let cluster = Cluster::new(4, &limit);
            let limits: Vec<_> =
                cluster.limiters.iter().map(|one| one.limit("x").unwrap()).collect();
            let mut rng = fastrand::Rng::with_seed(1);
            let mut admitted = Vec::new();
            for edge in [midnight, midnight + hours * HOUR] {
                let begin = edge - AROUND_US - 2_000_000;
                cluster.clock.advance(micros(begin - cluster.clock.now().as_micros()));
                while cluster.pass() < edge - AROUND_US {}
                for end in [edge, edge + AROUND_US] {
                    admitted.push(0);
                    while cluster.clock.now().as_micros() < end {
                        if rng.u64(..10) < 2 {
                            let is_allowed = limits[rng.usize(..4)].check("key").is_allowed();
                            *admitted.last_mut().unwrap() += u64::from(is_allowed);
                        }
                        cluster.pass();
                    }
                }
            }
            let [before, first, end, second] = admitted[..] else { panic!("{admitted:?}") };
            let label = format!("{hours} hours, strict: {strict}: {admitted:?} of {TOKENS} each");
            println!("{label}");
            let most = if strict { TOKENS } else { TOKENS + 4 };
            let days = [before, first + end, second];
            assert!(days.iter().all(|day| (TOKENS * 97 / 100..=most).contains(day)), "{label}");
            assert!(end <= 4, "{label}");
        }
    }
}

/// Each window's edge renewed the credit of each node, however much was owed: 16 of 3 were admitted in each window.
#[test]
fn credit_of_windows_is_given_once_and_not_again_while_it_is_owed() {
    const NODES: usize = 16;
    let period = Duration::from_secs(2);
    let rules: [Rule; 3] = [
        FixedWindow::new(3, period).into(),
        SlidingWindow::new(3, period).into(),
        SlidingLog::new(3, period).into(),
    ];
    for rule in rules {
        let cluster = Cluster::new(NODES, &Limit::new("x", rule));
        let limits: Vec<_> = cluster.limiters.iter().map(|one| one.limit("x").unwrap()).collect();
        cluster.clock.advance(Duration::from_secs(17));
        let (mut admitted, mut windows) = (0_u64, 0);
        // Requests just after each edge, and some before it.
        for _ in 0..60_000 {
            let since_ms = cluster.pass() / 1000 % 2000;
            if [1, 3, 60, 400, 1900, 1990].contains(&since_ms) {
                windows += u64::from(since_ms == 1);
                admitted +=
                    limits.iter().map(|one| u64::from(one.check("key").is_allowed())).sum::<u64>();
            }
        }
        let most = 3 * (windows + 1) + 2 * NODES as u64;
        println!("{}: {admitted} in {windows} windows, at most {most}", rule.algorithm());
        assert!(admitted <= most && admitted >= 2 * windows, "{rule:?}: {admitted} of {most}");
    }
}

#[test]
fn fixed_window_that_is_leased_tells_when_it_ends_unless_its_view_is_of_an_earlier_one() {
    let node = Node::new(FixedWindow::per_second(5).into(), By::Leases);
    let retry_s = |node: &Node| {
        let denied = node.ask(5).unwrap();
        assert!(denied.is_denied());
        denied.retry_after().as_secs()
    };
    assert!(node.ask(5).unwrap().is_allowed());
    node.at(300_000);
    assert!((690..=700).contains(&retry_s(&node)), "{}", retry_s(&node));
    // The next window has begun, and nobody has asked since.
    node.at(999_000);
    let left = Duration::from_millis(1100);
    node.clock.advance(left);
    let limit = node.syncs.as_ref().unwrap().limit("x").unwrap();
    let decision = limit.check("key");
    assert!(
        decision.is_allowed() || decision.retry_after() < Duration::from_secs(1),
        "{decision:?}"
    );
}

/// What an earlier plan had allowed was owed, window by window: nothing was admitted in six of them.
#[test]
fn window_whose_plan_is_lowered_gives_its_tokens_again_from_the_second_next_window_on() {
    let period = Duration::from_secs(2);
    let rules: [fn(u64, Duration) -> Rule; 3] = [
        |tokens, period| FixedWindow::new(tokens, period).into(),
        |tokens, period| SlidingWindow::new(tokens, period).into(),
        |tokens, period| SlidingLog::new(tokens, period).into(),
    ];
    for rule in rules {
        let limit = Limit::new("x", rule(1000, period)).strict();
        let mut cluster = Cluster::new(1, &limit);
        let old = cluster.limiters[0].limit("x").unwrap();
        cluster.clock.advance(Duration::from_secs(16));
        cluster.admits(&old, 1000);
        let spent = cluster.admits(&old, 1990);
        // A log gives no token again before a period has passed.
        let least = if matches!(limit.rule(), Rule::SlidingLog(_)) { 700 } else { 900 };
        assert!(spent > least, "{spent}");
        let new = cluster.join(&Limit::new("x", rule(10, period)).strict().version(1));
        cluster.admits(&new, 4000);
        let admitted = cluster.admits(&new, 4000);
        assert!((15..=21).contains(&admitted), "{limit:?}: {admitted} in two windows");
    }
}

/// A node kept what a token bucket had leased to it, ten times what windows give.
#[test]
fn refill_that_was_leased_ends_where_the_limit_becomes_one_by_windows() {
    let mut cluster = Cluster::new(1, &Limit::new("x", Quota::per_second(500)).strict());
    let old = cluster.limiters[0].limit("x").unwrap();
    cluster.clock.advance(Duration::from_secs(16));
    assert!(cluster.admits(&old, 4000) > 1800, "the bucket's rate is leased");
    let windows = FixedWindow::new(100, Duration::from_secs(2));
    let new = cluster.join(&Limit::new("x", windows).strict().version(1));
    let mut admitted = 0;
    for millis in 0..6000 {
        cluster.pass();
        let both = [&old, &new].map(|limit| u64::from(limit.check("key").is_allowed()));
        // The old node hears of the newer quota with its next report.
        admitted += if millis >= 2000 { both[0] + both[1] } else { 0 };
    }
    assert!(admitted <= 300, "{admitted} in two windows and parts of a third");
}

// ---- slots on several nodes ------------------------------------------------------------------

/// When requests of nodes that share a leaky bucket went on, in microseconds.
struct Starts {
    /// In order.
    at_us: Vec<u64>,
    /// Those of one central queue.
    ideal: u64,
    /// Requests, and how many questions the store had.
    asked: u64,
    questions: u64,
}

/// Four nodes, asked for `load` times the tokens of the limit for so many seconds; a question to the store takes a
/// millisecond. The store forgets everything so many times.
fn starts(rule: LeakyBucket, load: f64, seconds: u64, losses: u64) -> Starts {
    const BEGIN_US: u64 = 100_000_000;
    let limit = Limit::new("x", rule);
    let cluster = Cluster::new(4, &limit);
    cluster.clock.advance(micros(BEGIN_US - 2_000_000 - cluster.clock.now().as_micros()));
    while cluster.pass() < BEGIN_US {}
    cluster.store.set_round_trip(Duration::from_millis(1));
    let limits: Vec<_> = cluster.limiters.iter().map(|one| one.async_limit("x").unwrap()).collect();
    let token_us = rule.period().as_micros() as f64 / rule.tokens() as f64;
    let (starts, clock) = (std::rc::Rc::new(std::cell::RefCell::new(Vec::new())), &cluster.clock);
    let (mut rng, mut next_us, mut ideal) =
        (fastrand::Rng::with_seed(3), BEGIN_US as f64, Vec::<(u64, u64)>::new());
    let (tokens, period_us) = (rule.tokens(), rule.period().as_micros() as u64);
    let queue_us = rule.longest_wait().as_micros() as u64;
    let of = Numbers { tokens, period_us, burst: 0, queue_us };
    let (mut allowed, mut asked) = (0, 0);
    let tasks = tokio::task::LocalSet::new();
    tasks.block_on(&cluster.runtime, async {
        while clock.now().as_micros() < BEGIN_US + seconds * 1_000_000 {
            clock.advance(micros(100));
            let since_us = clock.now().as_micros() - BEGIN_US;
            if since_us * (losses + 1) % (seconds * 1_000_000) < 100 * (losses + 1) {
                cluster.store.clear();
            }
            for _ in 0..20 {
                tokio::task::yield_now().await;
            }
            let now = clock.now().as_micros();
            while next_us <= now as f64 {
                next_us -= (1.0 - rng.f64()).ln() * token_us / load;
                asked += 1;
                if queue(&of, &ideal, now, 1) {
                    ideal.push((now, 1));
                    allowed += 1;
                }
                let (limit, starts, clock) =
                    (limits[rng.usize(..4)].clone(), starts.clone(), clock.clone());
                tokio::task::spawn_local(async move {
                    let decision = limit.schedule("key").await;
                    if decision.is_allowed() {
                        let start = clock.now().as_micros() + decision.delay().as_micros() as u64;
                        starts.borrow_mut().push(start);
                    }
                });
            }
        }
    });
    let mut at_us = starts.take();
    at_us.sort_unstable();
    Starts { at_us, ideal: allowed, asked, questions: cluster.store.questions() }
}

#[test]
fn nodes_that_share_a_leaky_bucket_hold_slots_of_one_grid() {
    const TOKEN_US: u64 = 20_000;
    // The load, and the queue in slots: from six for each node on, 95% are promised.
    for (load, queue) in [(0.9, 24), (1.2, 24), (3.0, 24), (3.0, 0), (3.0, 4)] {
        let longest = micros(queue * TOKEN_US);
        let rule = LeakyBucket::per_second(50).queue(longest);
        let Starts { at_us, ideal, asked, questions } = starts(rule, load, 20, 0);
        let gaps: Vec<u64> = at_us.windows(2).map(|pair| pair[1] - pair[0]).collect();
        let near = gaps.iter().filter(|gap| gap.abs_diff(TOKEN_US) <= TOKEN_US / 4).count();
        let mut histogram = [0; 11];
        for gap in &gaps {
            histogram[(gap * 10 / TOKEN_US / 2).min(10) as usize] += 1;
        }
        assert!(gaps.iter().all(|gap| *gap >= TOKEN_US * 3 / 4));
        let percent = 100.0 * at_us.len() as f64 / ideal as f64;
        println!(
            "load {load}, queue of {queue}: {} of {ideal} ({percent:.1}%), {near} of {} gaps within a quarter; \
             {asked} asked, {questions} questions; gaps by a fifth of a slot: {histogram:?}",
            at_us.len(),
            gaps.len()
        );
        assert!((95.0..=100.5).contains(&percent));
        // Twelve begin in no time that has ten slots, but for a millisecond by which clocks may differ.
        assert!(at_us.windows(12).all(|starts| starts[11] - starts[0] >= 10 * TOKEN_US - 1000));
        if (load, queue) == (3.0, 24) {
            assert!(near * 10 >= gaps.len() * 9, "{near} of {}", gaps.len());
        }
    }
}

#[test]
fn store_that_forgets_gives_the_slots_again_that_nodes_hold_and_no_more() {
    const LOSSES: u64 = 7;
    let rule = LeakyBucket::per_second(50).queue(Duration::from_millis(480));
    let at_us = starts(rule, 3.0, 20, LOSSES).at_us;
    // Of the starts in any time, those beyond one and one for each slot that passes.
    let (mut least, mut excess) = (f64::INFINITY, 0.0_f64);
    for (index, at_us) in at_us.iter().enumerate() {
        let ahead = index as f64 - *at_us as f64 / 20_000.0;
        least = least.min(ahead);
        excess = excess.max(ahead - least);
    }
    let mut incidents = Incidents::default();
    incidents.losses_of_memory = LOSSES as u32;
    let limit = Limit::new("x", rule);
    let most = tidegate::bound(&limit, 4, &incidents);
    println!("{LOSSES} losses: {excess:.1} starts too many, at most {most:.1}");
    assert!(excess > most / 3.0 && excess <= most);
    assert!(tidegate::bound(&limit, 4, &Incidents::default()) <= 4.0);
}

/// A leaky bucket on some nodes, which know of each other.
fn queue_on(nodes: usize, limit: &Limit) -> (Cluster, Vec<ActiveLimit>) {
    let cluster = Cluster::new(nodes, limit);
    let limits = cluster.limiters.iter().map(|one| one.limit("x").unwrap()).collect();
    for _ in 0..3000 {
        cluster.pass();
    }
    (cluster, limits)
}

#[test]
fn new_key_of_a_shared_leaky_bucket_is_admitted_at_once_and_owed_to_the_store() {
    let limit = Limit::new("x", LeakyBucket::per_second(10).queue(Duration::from_secs(1)));
    let (cluster, limits) = queue_on(2, &limit);
    let first = limits[0].check("key");
    assert!(first.is_allowed() && !first.is_sure());
    let second = limits[0].check("key");
    assert!(second.is_denied() && second.is_sure() && second.retry_after() > micros(90_000));
    cluster.pass();
    // The other node hears of it: the next slot is a tenth of a second after the first.
    let limit = cluster.limiters[1].async_limit("x").unwrap();
    let third = cluster.runtime.block_on(limit.schedule("key"));
    assert!(third.is_allowed() && third.is_sure());
    assert!((95_000..=100_000).contains(&(third.delay().as_micros() as u64)), "{third:?}");

    let strict = Limit::new("x", LeakyBucket::per_second(10)).strict();
    let (cluster, limits) = queue_on(1, &strict);
    assert!(limits[0].check("key").is_denied());
    assert!(cluster.runtime.block_on(limits[0].check_sure("key")).is_allowed());
    // A handle asked nobody, and denied.
    let handle = limits[0].handle("another");
    assert!(handle.check().is_denied());
    assert!(cluster.runtime.block_on(handle.check_sure()).is_allowed());
    assert!(cluster.runtime.block_on(handle.check_sure()).is_denied());
}

#[test]
fn slot_of_a_caller_who_goes_away_is_the_next_ones() {
    let limit = Limit::new("x", LeakyBucket::per_second(10).queue(Duration::from_secs(1)));
    let (cluster, limits) = queue_on(1, &limit);
    let limit = cluster.limiters[0].async_limit("x").unwrap();
    cluster.runtime.block_on(async {
        let delay = async || limit.schedule("key").await.delay().as_millis();
        assert_eq!(delay().await, 0);
        let mut waiting = Box::pin(limits[0].until_ready("key", Duration::from_secs(1)));
        tokio::select! {
            biased;
            decision = &mut waiting => panic!("{decision:?}"),
            () = cluster.limiters[0].settle() => {}
        }
        assert_eq!(delay().await, 200);
        drop(waiting);
        assert_eq!(delay().await, 100);
        assert_eq!(delay().await, 300);
    });
}

/// The slot that a caller gave back was preferred to those that the store has before it: all were denied for 50 s.
#[test]
fn slot_that_was_promised_before_a_reset_does_not_hide_the_free_ones() {
    let limit = Limit::new("x", LeakyBucket::per_second(1).queue(Duration::from_secs(60)));
    let (cluster, limits) = queue_on(1, &limit);
    let limit = cluster.limiters[0].async_limit("x").unwrap();
    cluster.runtime.block_on(async {
        for _ in 0..50 {
            assert!(limit.schedule("key").await.is_allowed());
        }
        let mut waiting = Box::pin(limits[0].until_ready("key", Duration::from_secs(60)));
        tokio::select! {
            biased;
            decision = &mut waiting => panic!("{decision:?}"),
            () = cluster.limiters[0].settle() => {}
        }
        limits[0].reset("key").await.unwrap();
        drop(waiting);
        let decision = limit.check_sure("key").await;
        assert!(decision.is_allowed(), "{decision:?}");
    });
}

async fn pass_millis(cluster: &Cluster, millis: u64) {
    for _ in 0..10 * millis {
        cluster.clock.advance(micros(100));
        for _ in 0..20 {
            tokio::task::yield_now().await;
        }
    }
}

/// What callers do who can take slots ahead of a key of which three are taken.
fn in_line(
    limit: &Limit,
    does: impl AsyncFnOnce(&Cluster, &dyn Fn() -> tokio::task::JoinHandle<Decision>),
) {
    let (cluster, _) = queue_on(1, limit);
    let limit = cluster.limiters[0].async_limit("x").unwrap();
    let ask = || {
        let limit = limit.clone();
        tokio::task::spawn_local(async move { limit.schedule("key").await })
    };
    tokio::task::LocalSet::new().block_on(&cluster.runtime, async {
        cluster.store.set_round_trip(Duration::from_millis(2));
        for _ in 0..3 {
            let first = ask();
            pass_millis(&cluster, 3).await;
            assert!(first.await.unwrap().is_allowed());
        }
        does(&cluster, &ask).await;
    });
}

/// Who asked for others took their slots away when it went before the answer.
#[test]
fn slots_of_those_in_line_are_theirs_though_the_one_who_asked_goes_away() {
    let limit = Limit::new("x", LeakyBucket::per_second(10).queue(Duration::from_secs(2)));
    in_line(&limit, async |cluster, ask| {
        let (gone, waits) = (ask(), [ask(), ask()]);
        pass_millis(cluster, 1).await;
        gone.abort();
        pass_millis(cluster, 20).await;
        let mut slots = Vec::new();
        for task in waits {
            assert!(task.is_finished(), "nobody asked");
            let decision = task.await.unwrap();
            assert!(decision.is_allowed(), "{decision:?}");
            slots.push((decision.delay().as_millis() + 50) / 100);
        }
        slots.sort_unstable();
        // The fourth slot was given to the one who went away.
        assert_eq!(slots, [3, 4]);
        let next = ask();
        pass_millis(cluster, 3).await;
        let delay = next.await.unwrap().delay().as_millis();
        assert!(
            (440..=500).contains(&delay),
            "the queue is {delay} ms long, and five slots are used"
        );
    });
}

/// Who had waited in line waited as long again for the answer.
#[test]
fn caller_in_line_waits_for_the_store_no_longer_than_the_limit_says() {
    let queue = LeakyBucket::per_second(10).queue(Duration::from_secs(2));
    let limit = Limit::new("x", queue).max_wait(Duration::from_millis(50));
    in_line(&limit, async |cluster, ask| {
        cluster.store.set_round_trip(Duration::from_millis(45));
        let first = ask();
        pass_millis(cluster, 1).await;
        let second = ask();
        pass_millis(cluster, 45).await;
        assert!(first.is_finished() && !second.is_finished());
        pass_millis(cluster, 6).await;
        assert!(second.is_finished());
    });
}

/// The slots of all but one of them passed unused.
#[test]
fn slots_of_callers_in_line_who_leave_one_after_the_other_are_for_those_who_come_later() {
    let limit = Limit::new("x", LeakyBucket::per_second(10).queue(Duration::from_secs(2)));
    in_line(&limit, async |cluster, ask| {
        cluster.store.set_round_trip(Duration::from_millis(8));
        for gone in [ask(), ask(), ask()] {
            pass_millis(cluster, 1).await;
            gone.abort();
        }
        pass_millis(cluster, 20).await;
        let mut slots = Vec::new();
        for _ in 0..4 {
            let next = ask();
            pass_millis(cluster, 9).await;
            slots.push((next.await.unwrap().delay().as_millis() + 70) / 100);
        }
        assert_eq!(slots, [3, 4, 5, 6]);
    });
}

#[test]
fn shared_leaky_bucket_lives_on_its_share_in_an_outage_and_asks_again_after_it() {
    let limit = Limit::new("x", LeakyBucket::per_second(100)).strict();
    let cluster = Cluster::new(1, &limit);
    let limit = cluster.limiters[0].limit("x").unwrap();
    for _ in 0..3000 {
        cluster.pass();
    }
    cluster.store.set_away(true);
    // A node that knows no other has a sixteenth, one that was told of one alone all of it.
    let admitted = cluster.admits(&limit, 4000);
    println!("{admitted} in 4 s of an outage");
    assert!((20..=27).contains(&admitted), "{admitted} of 25");
    cluster.store.set_away(false);
    cluster.admits(&limit, 2000);
    let sure = cluster.runtime.block_on(limit.check_sure("another key"));
    assert!(sure.is_allowed() && sure.is_sure(), "{sure:?}");
}
