//! What one decision costs, next to other limiters' decisions, in one interleaved run.
//!
//! ```text
//! cargo run --release --manifest-path benches/peers/Cargo.toml
//! cargo run --release --manifest-path benches/peers/Cargo.toml -- --json --case 'handle'
//! ```
//!
//! Each case is a stream of keys and a number of threads; each contender decides about the same
//! stream, in rounds, one after the other; the median of all rounds counts. tidegate is the whole
//! hybrid limiter: a store, and a driver that syncs with it meanwhile. A case fails that measures
//! something else than its name says: decisions are counted by outcome, and so are syncs.
#![allow(
    clippy::disallowed_methods,
    reason = "measures time, and waits for a driver that lives by it"
)]

use std::time::{Duration, Instant};

use clap::Parser;
use serde::Serialize;

use crate::case::{Case, cases};
use crate::contender::{Contender, contenders};

mod case;
mod contender;

#[derive(Parser)]
struct Options {
    /// Only cases whose name contains this
    #[arg(long, default_value = "")]
    case: String,
    /// Only contenders whose name contains this, and governor
    #[arg(long, default_value = "")]
    contender: String,
    /// Rounds of each contender
    #[arg(long, default_value_t = 9)]
    rounds: usize,
    /// How long one round of one contender takes, in milliseconds
    #[arg(long, default_value_t = 100)]
    round_ms: u64,
    /// One JSON object a line: case, contender, ns, ratio
    #[arg(long)]
    json: bool,
}

/// What a contender came to in a case.
#[derive(Serialize)]
struct Line {
    case: String,
    contender: &'static str,
    /// Nanoseconds of wall-clock time a decision, over all threads; the median of all rounds.
    ns: f64,
    /// How many times faster than governor keyed by String in the same case.
    ratio: f64,
}

fn median(mut numbers: Vec<f64>) -> f64 {
    numbers.sort_by(f64::total_cmp);
    numbers[numbers.len() / 2]
}

/// Runs all contenders of a case, interleaved.
fn run(case: &Case, options: &Options) -> Vec<Line> {
    let keys = case.keys();
    let contenders: Vec<Box<dyn Contender>> = contenders(case, &keys)
        .into_iter()
        .filter(|one| one.name() == BASE || one.name().contains(&options.contender))
        .collect();
    let mut seen: Vec<Vec<f64>> = contenders.iter().map(|_| Vec::new()).collect();
    for contender in &contenders {
        contender.warm_up(&keys);
    }
    let round = Duration::from_millis(options.round_ms);
    for _ in 0..options.rounds {
        for (contender, seen) in contenders.iter().zip(&mut seen) {
            seen.push(one_round(case, contender.as_ref(), &keys, round));
        }
    }
    contenders.iter().for_each(|contender| contender.check());
    let medians: Vec<f64> = seen.into_iter().map(median).collect();
    let base = contenders.iter().position(|one| one.name() == BASE).map(|base| medians[base]);
    let lines = contenders.iter().zip(medians);
    lines
        .map(|(contender, ns)| Line {
            case: case.name(),
            contender: contender.name(),
            ns,
            ratio: base.unwrap_or(f64::NAN) / ns,
        })
        .collect()
}

const BASE: &str = "governor";

/// Nanoseconds a decision: wall-clock time over the decisions of all threads.
fn one_round(case: &Case, contender: &dyn Contender, keys: &case::Keys, round: Duration) -> f64 {
    let start = Instant::now() + RUN_UP;
    let total: u64 = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..case.threads)
            .map(|thread| {
                scope.spawn(move || {
                    let (mut decisions, mut wrong) = (0_u64, 0_u64);
                    let mut at = thread * keys.stream.len() / case.threads;
                    while start.elapsed() < round {
                        let end = (at + BLOCK).min(keys.stream.len());
                        let counts = Instant::now() >= start;
                        let denied = contender.decide(keys, at..end, case.isolated);
                        if !counts {
                            at = if end == keys.stream.len() { 0 } else { end };
                            continue;
                        }
                        decisions += (end - at) as u64;
                        wrong += if case.denied { (end - at) as u64 - denied } else { denied };
                        at = if end == keys.stream.len() { 0 } else { end };
                    }
                    assert!(
                        wrong * case.strays_one_in() <= decisions,
                        "{}: {}: {wrong} of {decisions} went the other way",
                        case.name(),
                        contender.name()
                    );
                    decisions
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("no thread panics")).sum()
    });
    start.elapsed().as_nanos() as f64 / total as f64
}

/// Each round begins with so much that does not count: the load that a limiter has seen coming.
const RUN_UP: Duration = Duration::from_millis(30);
/// Decisions between two looks at the clock.
const BLOCK: usize = 4096;

fn main() {
    let options = Options::parse();
    for case in cases().into_iter().filter(|case| case.name().contains(&options.case)) {
        let lines = run(&case, &options);
        for line in lines {
            if options.json {
                println!("{}", serde_json::to_string(&line).expect("numbers and names"));
            } else {
                let Line { case, contender, ns, ratio } = line;
                println!("{case:<44} {contender:<24} {ns:>9.1} ns {ratio:>7.2}x");
            }
        }
    }
}
