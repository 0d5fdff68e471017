//! The table of costs: nanoseconds a decision.

use std::time::Duration;

use serde::Serialize;

use crate::case::Case;
use crate::contender::{BASE, Contender, contenders};
use crate::round::{median, tight};
use crate::server::Server;
use crate::{Options, print};

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

/// Runs all contenders of a case, interleaved, and prints them.
pub fn run(case: &Case, options: &Options, server: Option<&Server>) {
    let keys = case.keys();
    let contenders: Vec<Box<dyn Contender>> = contenders(case, server)
        .into_iter()
        .filter(|one| one.name() == BASE || one.name().contains(&options.contender))
        .collect();
    let mut seen: Vec<Vec<f64>> = contenders.iter().map(|_| Vec::new()).collect();
    for contender in &contenders {
        contender.warm_up(&keys);
    }
    let round = Duration::from_millis(options.round_ms.unwrap_or(100));
    for _ in 0..options.rounds {
        for (contender, seen) in contenders.iter().zip(&mut seen) {
            seen.push(tight(case, contender.as_ref(), &keys, round).ns_a_decision());
        }
    }
    contenders.iter().for_each(|contender| contender.check(&keys));
    let medians: Vec<f64> = seen.into_iter().map(median).collect();
    let base = contenders.iter().position(|one| one.name() == BASE).map(|base| medians[base]);
    for (contender, ns) in contenders.iter().zip(medians) {
        let ratio = base.unwrap_or(f64::NAN) / ns;
        let line = Line { case: case.name(), contender: contender.name(), ns, ratio };
        print(options, &line, |line| {
            let Line { case, contender, ns, ratio } = line;
            format!("{case:<44} {contender:<26} {ns:>9.1} ns {ratio:>8.3}x")
        });
    }
}
