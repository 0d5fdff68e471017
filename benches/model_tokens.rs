//! Costs that are known later, on eight nodes and a real Redis: what is spent, how soon a settlement takes effect, and how
//! deep debts are.
//!
//! ```text
//! cargo bench --features testing --bench model_tokens -- [--short] [--case WORD]... [--burst TOKENS] [--answer SECONDS]
//! ```
//!
//! Requests come at random, to a node at random. Each reserves an estimate of 400 to 4000 tokens and commits what it cost a
//! second later (`--answer`); denied ones do not come again. All live in virtual time: the shipped scripts read the clock from a key, and a
//! call takes a millisecond each way. `--short` plays two minutes in place of ten.
//!
//! | figure | is |
//! |---|---|
//! | spent | what requests cost that came in the time, in percent of what flows in and of the burst |
//! | later | the same of those that came after the first minute, in percent of what flows in from then on |
//! | in the store | p99 of the time from a commit until the store has charged or given back the difference |
//! | elsewhere | p99 of the time until another node has had an answer of the store after that |
//! | debt | how far the store's level was below zero at most |
//! | in flight | the most that requests in flight at one time cost beyond their estimates: from a reservation until four sync intervals after its commit |
//!
//! The exit status is 1 if the first case spends less than 99% or more than 101%, or if in any case the store has not charged
//! what was spent, or a debt was deeper than what was in flight and the credit of the nodes.
#![allow(clippy::disallowed_methods, reason = "the server is real")]

use std::process::ExitCode;

#[path = "../tests/parts/model_tokens.rs"]
mod model_tokens;
#[path = "../tests/parts/record.rs"]
mod record;
#[path = "../tests/parts/redis_server.rs"]
mod redis_server;
#[path = "model_tokens/wire.rs"]
mod wire;

use model_tokens::{CREDIT, KeyOutcome, LIMIT, NODES, Outcome, Play, Settled, VirtualTime, play};
use redis_server::RedisServer;
use tidegate::{Limit, Limiter, Quota, RedisStore};
use wire::{Call, Wire};

const TOKENS_PER_MINUTE: u64 = 600_000;
/// Ten seconds of the rate.
const BURST: u64 = 100_000;

/// Tokens that requests reserve, and small ones.
const ESTIMATES: (f64, f64) = (400.0, 4000.0);
const SMALL: (f64, f64) = (40.0, 400.0);

struct Case {
    name: &'static str,
    /// Of each key, in multiples of the limit.
    loads: &'static [f64],
    estimates: (f64, f64),
    /// What requests cost, in multiples of their estimates.
    factors: (f64, f64),
}

const CASES: [Case; 7] = [
    Case { name: "one key", loads: &[3.0], estimates: ESTIMATES, factors: (0.25, 4.0) },
    Case { name: "four keys", loads: &[3.0; 4], estimates: ESTIMATES, factors: (0.25, 4.0) },
    Case { name: "0.8 times the limit", loads: &[0.8], estimates: ESTIMATES, factors: (0.25, 4.0) },
    Case { name: "within 10%", loads: &[3.0], estimates: ESTIMATES, factors: (0.9, 1.1) },
    Case { name: "all too low", loads: &[3.0], estimates: ESTIMATES, factors: (4.0, 4.0) },
    Case { name: "all too low, small", loads: &[3.0], estimates: SMALL, factors: (4.0, 4.0) },
    Case { name: "all too high", loads: &[3.0], estimates: ESTIMATES, factors: (0.25, 0.25) },
];

/// What the store saw of one key.
struct Seen {
    charged: u64,
    deepest_debt: f64,
}

fn run(server: &RedisServer, plan: &Play) -> (Outcome, Vec<Call>, Vec<Seen>) {
    server.command(&["FLUSHALL"]);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.expect("a runtime").block_on(async {
        let time = VirtualTime::default();
        let wires = Wire::connect(server, &time, plan.loads.len()).await;
        let quota = Quota::per_minute(plan.tokens_per_minute).burst(plan.burst);
        let node = |wire: &Wire| {
            let builder = Limiter::builder().limit(Limit::new(LIMIT, quota)).lanes(1);
            let builder = builder.store(RedisStore::with_connection(wire.clone()));
            builder.clock(&time.clock).build().expect("the limit is valid")
        };
        let nodes: Vec<Limiter> = wires.iter().map(node).collect();
        let outcome = play(plan, &time, &nodes).await;
        let calls = wires[0].take_calls();
        let seen = (0..plan.loads.len()).map(|key| seen(&calls, key)).collect();
        (outcome, calls, seen)
    })
}

fn seen(calls: &[Call], key: usize) -> Seen {
    let of_key = || calls.iter().filter(|call| call.key == key);
    let lowest = of_key().map(|call| call.level).fold(0.0, f64::min);
    Seen { charged: of_key().next_back().map_or(0, |call| call.charged), deepest_debt: -lowest }
}

/// Microseconds from settlements to their effect: in the store, and on the last of the other nodes.
fn effects(settled: &[Settled], calls: &[Call]) -> [Vec<u64>; 2] {
    let [mut in_store, mut elsewhere] = [Vec::new(), Vec::new()];
    for settled in settled.iter().filter(|settled| settled.estimate != settled.cost) {
        let from = calls.partition_point(|call| call.applied_us < settled.at_us);
        let later = || calls[from..].iter().filter(|call| call.key == settled.key);
        let told = |call: &&Call| call.node == settled.node && call.sent_us >= settled.at_us;
        let Some(applied_us) = later().find(told).map(|call| call.applied_us) else {
            panic!("a settlement was never told");
        };
        in_store.push(applied_us - settled.at_us);
        let heard = |node| {
            let answer = later().find(|call| call.node == node && call.applied_us >= applied_us);
            answer.map(|call| call.replied_us)
        };
        let others = (0..NODES).filter(|&node| node != settled.node);
        if let Some(heard_us) = others.filter_map(heard).min() {
            elsewhere.push(heard_us - settled.at_us);
        }
    }
    [in_store, elsewhere]
}

fn p99_ms(mut times_us: Vec<u64>) -> f64 {
    times_us.sort_unstable();
    times_us.get(times_us.len() * 99 / 100).map_or(0.0, |&time_us| time_us as f64 / 1000.0)
}

/// The figures of a case.
struct Figures {
    burst: f64,
    requests: u64,
    allowed: u64,
    spent: u64,
    charged: u64,
    spent_pct: f64,
    later_pct: f64,
    in_store_ms: f64,
    elsewhere_ms: f64,
    debt: f64,
    in_flight: f64,
}

impl Figures {
    fn of(plan: &Play, (outcome, calls, seen): &(Outcome, Vec<Call>, Vec<Seen>)) -> Self {
        let sum = |of: fn(&KeyOutcome) -> u64| outcome.keys.iter().map(of).sum::<u64>();
        let (keys, spent) = (plan.loads.len() as f64, sum(|key| key.spent));
        let limit = keys * (plan.refill() + plan.burst as f64);
        let later_limit = keys * (plan.refill() - plan.tokens_per_minute as f64);
        let [in_store, elsewhere] = effects(&outcome.settled, calls);
        Self {
            burst: plan.burst as f64,
            requests: sum(|key| key.requests),
            allowed: sum(|key| key.allowed),
            spent,
            charged: seen.iter().map(|seen| seen.charged).sum(),
            spent_pct: 100.0 * spent as f64 / limit,
            later_pct: 100.0 * sum(|key| key.spent_later) as f64 / later_limit,
            in_store_ms: p99_ms(in_store),
            elsewhere_ms: p99_ms(elsewhere),
            debt: seen.iter().map(|seen| seen.deepest_debt).fold(0.0, f64::max),
            in_flight: outcome.keys.iter().map(|key| key.most_beyond).fold(0.0, f64::max),
        }
    }

    fn debt_pct(&self) -> f64 {
        100.0 * self.debt / self.burst
    }

    /// In seconds of refill.
    fn debt_s(&self) -> f64 {
        60.0 * self.debt / TOKENS_PER_MINUTE as f64
    }

    fn show(&self, name: &str) {
        println!(
            "| {name} | {} | {} | {:.2} | {:.2} | {:.0} | {:.0} | {:.0} | {:.0} | {:.1} | {:.0} |",
            self.requests,
            self.allowed,
            self.spent_pct,
            self.later_pct,
            self.in_store_ms,
            self.elsewhere_ms,
            self.debt,
            self.debt_pct(),
            self.debt_s(),
            self.in_flight,
        );
    }

    /// The first case in words.
    fn tell(&self, options: &Options) {
        let Options { minutes, answer_s, .. } = options;
        println!(
            "\nModel tokens: {NODES} nodes, one Redis, 3x load, {minutes} virtual minutes, estimates wrong by up to 4x both \
             ways, settled after {answer_s} s: spent {:.2}% of the limit; from settlement to effect {:.0} ms (p99); deepest \
             debt {:.0} tokens ({:.0}% of the burst, {:.1} s of refill)",
            self.spent_pct,
            self.in_store_ms,
            self.debt,
            self.debt_pct(),
            self.debt_s(),
        );
    }

    /// What is not as it should be.
    fn faults(&self, is_first: bool) -> Vec<String> {
        let Self { spent, charged, spent_pct, debt, in_flight, .. } = *self;
        let mut faults = Vec::new();
        if is_first && !(99.0..=101.0).contains(&spent_pct) {
            faults.push("spent not within 99 and 101%".to_owned());
        }
        if spent != charged {
            faults.push(format!("{charged} charged of {spent} spent"));
        }
        if debt > in_flight + CREDIT {
            faults.push(format!("a debt of {debt:.0}, above {in_flight:.0} and {CREDIT}"));
        }
        faults
    }
}

/// What the user asked for.
struct Options {
    minutes: u64,
    burst: u64,
    answer_s: u64,
    cases: Vec<String>,
}

impl Options {
    fn read(mut arguments: impl Iterator<Item = String>) -> Result<Self, String> {
        let mut options = Self { minutes: 10, burst: BURST, answer_s: 1, cases: Vec::new() };
        while let Some(argument) = arguments.next() {
            let mut value = || arguments.next().ok_or_else(|| format!("{argument}: value missing"));
            let number = |text: String| text.parse().map_err(|error| format!("{text}: {error}"));
            match argument.as_str() {
                "--short" => options.minutes = 2,
                "--case" => options.cases.push(value()?),
                "--burst" => options.burst = number(value()?)?,
                "--answer" => options.answer_s = number(value()?)?,
                // Cargo adds it.
                "--bench" => {}
                unknown => return Err(format!("unknown argument: {unknown}")),
            }
        }
        if CASES.iter().any(|case| options.wants(case)) {
            return Ok(options);
        }
        Err(format!("no case has one of {:?} in its name", options.cases))
    }

    fn wants(&self, case: &Case) -> bool {
        self.cases.is_empty() || self.cases.iter().any(|word| case.name.contains(word.as_str()))
    }

    fn plan(&self, case: &Case) -> Play {
        Play {
            tokens_per_minute: TOKENS_PER_MINUTE,
            burst: self.burst,
            loads: case.loads.to_vec(),
            estimates: case.estimates,
            factors: case.factors,
            settled_after_us: self.answer_s * 1_000_000,
            minutes: self.minutes,
            seed: 1,
        }
    }
}

/// Plays the cases. Returns what is not as it should be.
fn play_all(options: &Options) -> Vec<String> {
    let server = RedisServer::start();
    println!(
        "| case | requests | allowed | spent, % | later, % | in the store, ms | elsewhere, ms | debt, tokens | % of burst | \
         s of refill | in flight |\n|---|---|---|---|---|---|---|---|---|---|---|"
    );
    let mut faults = Vec::new();
    let mut first = None;
    for (number, case) in CASES.iter().enumerate().filter(|(_, case)| options.wants(case)) {
        let (plan, is_first) = (options.plan(case), number == 0);
        let figures = Figures::of(&plan, &run(&server, &plan));
        figures.show(case.name);
        let of_case = figures.faults(is_first);
        faults.extend(of_case.into_iter().map(|fault| format!("{}: {fault}", case.name)));
        first = first.or(is_first.then_some(figures));
    }
    if let Some(first) = first {
        first.tell(options);
    }
    faults
}

fn main() -> ExitCode {
    let faults = match Options::read(std::env::args().skip(1)) {
        Ok(options) => play_all(&options),
        Err(error) => vec![error],
    };
    for fault in &faults {
        eprintln!("model_tokens: {fault}");
    }
    if faults.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
