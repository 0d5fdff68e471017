//! The table of limits shared through a Redis: decisions a second, and how long one takes.

use std::time::Duration;

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
}

/// Runs all contenders of a case on one Redis, interleaved, and prints them.
pub fn run(case: &Case, options: &Options, server: &Server) {
    let keys = case.keys();
    let contenders: Vec<Box<dyn Contender>> = over_redis(case, server)
        .into_iter()
        .filter(|one| one.name().contains(&options.contender))
        .collect();
    let mut seen: Vec<(Vec<f64>, Option<Histogram<u64>>)> =
        contenders.iter().map(|_| (Vec::new(), None)).collect();
    for contender in &contenders {
        contender.warm_up(&keys);
    }
    let round = Duration::from_millis(options.round_ms.unwrap_or(300));
    for _ in 0..options.rounds {
        for (contender, (per_second, took)) in contenders.iter().zip(&mut seen) {
            let ns = tight(case, contender.as_ref(), &keys, round).ns_a_decision();
            per_second.push(1e9 / ns);
            let more = timed(case, contender.as_ref(), &keys, round);
            match took {
                Some(took) => took.add(more).expect("the same bounds"),
                None => *took = Some(more),
            }
        }
    }
    contenders.iter().for_each(|contender| contender.check(&keys));
    for (contender, (per_second, took)) in contenders.iter().zip(seen) {
        let Some(took) = took else { continue };
        let line = Line {
            case: case.name(),
            contender: contender.name(),
            per_second: median(per_second),
            p50_ns: took.value_at_quantile(0.5),
            p99_ns: took.value_at_quantile(0.99),
            p999_ns: took.value_at_quantile(0.999),
            max_ns: took.max(),
        };
        print(options, &line, |line| {
            let Line { case, contender, per_second, p50_ns, p99_ns, p999_ns, max_ns } = line;
            format!(
                "{case:<34} {contender:<26} {per_second:>10.0}/s  p50 {p50_ns:>8}  p99 {p99_ns:>8}  \
                 p99.9 {p999_ns:>9}  max {max_ns:>10} ns"
            )
        });
    }
}
