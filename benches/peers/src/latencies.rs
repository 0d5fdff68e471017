//! The table of limits shared through a Redis: decisions a second, and how long one takes.

use hdrhistogram::Histogram;
use serde::Serialize;

use crate::case::Case;
use crate::contender::{Contender, over_redis};
use crate::round::{median, tight, timed};
use crate::server::Server;
use crate::{Options, print};

/// What a contender came to in a case.
#[derive(Serialize)]
struct Line {
    case: String,
    contender: &'static str,
    /// Decisions a second, over all threads, without a clock between them; the median of all rounds.
    per_second: f64,
    /// Nanoseconds that one decision takes, over all rounds, reading the clock included.
    p50_ns: u64,
    p99_ns: u64,
    p999_ns: u64,
    max_ns: u64,
    /// The part of its decisions that went the other way, in the worst round.
    strays: f64,
}

/// What a contender's rounds came to.
#[derive(Default)]
struct Seen {
    per_second: Vec<f64>,
    took: Option<Histogram<u64>>,
    strays: f64,
}

/// Runs all contenders of a case on one Redis, interleaved, and prints them; whether all did what
/// it says.
pub fn run(case: &Case, options: &Options, server: &Server) -> bool {
    let keys = case.keys();
    let contenders: Vec<Box<dyn Contender>> = over_redis(case, server)
        .into_iter()
        .filter(|one| one.name().contains(&options.contender))
        .collect();
    let mut seen: Vec<Seen> = contenders.iter().map(|_| Seen::default()).collect();
    for contender in &contenders {
        contender.warm_up(&keys);
    }
    let round = options.round(case, &contenders, 300);
    for _ in 0..options.rounds {
        for (contender, seen) in contenders.iter().zip(&mut seen) {
            let fast = tight(case, contender.as_ref(), &keys, round);
            seen.per_second.push(1e9 / fast.ns_a_decision());
            let (slow, took) = timed(case, contender.as_ref(), &keys, round);
            match &mut seen.took {
                Some(all) => all.add(took).expect("the same bounds"),
                None => seen.took = Some(took),
            }
            seen.strays = seen.strays.max(fast.strays()).max(slow.strays());
        }
    }
    contenders.iter().for_each(|contender| contender.check(&keys));
    let mut good = true;
    for (contender, Seen { per_second, took, strays }) in contenders.iter().zip(seen) {
        let Some(took) = took else { continue };
        good &= case.holds(contender.name(), strays);
        let line = Line {
            case: case.name(),
            contender: contender.name(),
            per_second: median(per_second),
            p50_ns: took.value_at_quantile(0.5),
            p99_ns: took.value_at_quantile(0.99),
            p999_ns: took.value_at_quantile(0.999),
            max_ns: took.max(),
            strays,
        };
        print(options, &line, |line| {
            let Line { case, contender, per_second, p50_ns, p99_ns, p999_ns, max_ns, .. } = line;
            format!(
                "{case:<44} {contender:<26} {per_second:>10.0}/s  p50 {p50_ns:>8}  p99 {p99_ns:>8}  \
                 p99.9 {p999_ns:>9}  max {max_ns:>10} ns"
            )
        });
    }
    good
}
