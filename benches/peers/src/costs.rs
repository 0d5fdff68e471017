//! The table of costs: nanoseconds a decision.

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
    /// The part of its decisions that went the other way, in the worst round.
    strays: f64,
}

/// The columns of `--table`: contenders, and whose cost theirs is compared with.
const COLUMNS: [(&str, Option<&str>); 8] = [
    (BASE, None),
    ("governor with foldhash", None),
    ("tidegate's bucket in dashmap", None),
    ("tidegate's bucket in scc", None),
    ("tidegate's bucket in papaya", None),
    ("tidegate", Some(BASE)),
    ("tidegate alone", Some("governor with foldhash")),
    ("no limiter", None),
];

/// Prints the head of `--table`.
pub fn print_head() {
    let columns = COLUMNS.map(|(name, base)| match base {
        Some(base) => format!(" {name} | to {base} |"),
        None => format!(" {name} |"),
    });
    println!("| ns a decision |{}", columns.concat());
    println!("|---|{}", columns.map(|column| "---|".repeat(column.matches('|').count())).concat());
}

/// Prints what the contenders of a case came to as a row of `--table`.
fn print_row(case: &str, costs: &[(&str, f64)]) {
    let cost = |name| costs.iter().find(|one| one.0 == name).map(|one| one.1);
    let cell = |value: Option<f64>| match value {
        Some(value) if value < 10.0 => format!(" {value:.1} |"),
        Some(value) => format!(" {value:.0} |"),
        None => " - |".to_owned(),
    };
    let cells = COLUMNS.map(|(name, base)| {
        let ratio = base.map(|base| cost(base).zip(cost(name)).map(|(base, own)| base / own));
        cell(cost(name)) + &ratio.map_or(String::new(), |ratio| cell(ratio))
    });
    println!("| {case} |{}", cells.concat());
}

/// Runs all contenders of a case, interleaved, and prints them; whether all did what it says.
pub fn run(case: &Case, options: &Options, server: Option<&Server>) -> bool {
    let keys = case.keys();
    let contenders: Vec<Box<dyn Contender>> = contenders(case, server)
        .into_iter()
        .filter(|one| one.name() == BASE || one.name().contains(&options.contender))
        .collect();
    let mut seen: Vec<(Vec<f64>, f64)> = contenders.iter().map(|_| (Vec::new(), 0.0)).collect();
    for contender in &contenders {
        contender.warm_up(&keys);
    }
    for _ in 0..options.rounds {
        for (contender, (ns, strays)) in contenders.iter().zip(&mut seen) {
            let length = options.round(case, contender.as_ref(), 100);
            let round = tight(case, contender.as_ref(), &keys, length);
            ns.push(round.ns_a_decision());
            *strays = strays.max(round.strays());
        }
    }
    contenders.iter().for_each(|contender| contender.check(&keys));
    let medians: Vec<(f64, f64)> =
        seen.into_iter().map(|(ns, strays)| (median(ns), strays)).collect();
    let base = contenders.iter().position(|one| one.name() == BASE).map(|base| medians[base].0);
    let mut good = true;
    let names = contenders.iter().map(|contender| contender.name());
    if options.table {
        print_row(&case.name(), &names.zip(medians.iter().map(|one| one.0)).collect::<Vec<_>>());
    }
    for (contender, (ns, strays)) in contenders.iter().zip(medians) {
        let ratio = base.unwrap_or(f64::NAN) / ns;
        let line = Line { case: case.name(), contender: contender.name(), ns, ratio, strays };
        good &= case.holds(contender.name(), strays);
        if options.table {
            continue;
        }
        print(options, &line, |line| {
            let Line { case, contender, ns, ratio, .. } = line;
            format!("{case:<44} {contender:<26} {ns:>9.1} ns {ratio:>8.3}x")
        });
    }
    good
}
