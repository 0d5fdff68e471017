//! The table of costs: nanoseconds a decision.

use serde::Serialize;

use crate::case::{Asks, Case};
use crate::contender::{BASE, Contender, contenders};
use crate::round::{median, once, tight};
use crate::server::Server;
use crate::{Options, print};

/// What a contender came to in a case.
#[derive(Serialize)]
struct Line {
    case: String,
    contender: &'static str,
    /// Nanoseconds of wall-clock time a decision, over all threads; the median of all rounds.
    ns: f64,
    /// Nanoseconds of processor time of the whole process a decision: drivers and stores in memory count too.
    cpu_ns: Option<f64>,
    /// How many times faster than governor keyed by String in the same case.
    ratio: f64,
    /// The part of its decisions that went the other way, in the worst round.
    strays: f64,
}

/// What the rounds of a contender came to.
#[derive(Default)]
struct Seen {
    ns: Vec<f64>,
    cpu_ns: Vec<f64>,
    strays: f64,
}

struct Medians {
    ns: f64,
    /// `None` where syncs come too rarely to fall into each round.
    cpu_ns: Option<f64>,
    strays: f64,
}

impl Seen {
    fn medians(self, case: &Case) -> Medians {
        let cpu_ns = (case.keys <= 10_000).then(|| median(self.cpu_ns));
        Medians { ns: median(self.ns), cpu_ns, strays: self.strays }
    }
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
    let head = format!("| ns a decision |{} tidegate, all threads |", columns.concat());
    println!("{head}\n|{}", "---|".repeat(head.matches('|').count() - 1));
}

/// Prints what the contenders of a case came to as a row of `--table`.
fn print_row(case: &str, costs: &[(&str, &Medians)]) {
    let of = |name| costs.iter().find(|one| one.0 == name).map(|one| one.1);
    let cost = |name| of(name).map(|medians| medians.ns);
    let cell = |value: Option<f64>| match value {
        Some(value) if value < 10.0 => format!(" {value:.1} |"),
        Some(value) => format!(" {value:.0} |"),
        None => " - |".to_owned(),
    };
    let cells = COLUMNS.map(|(name, base)| {
        let ratio = base.map(|base| cost(base).zip(cost(name)).map(|(base, own)| base / own));
        cell(cost(name)) + &ratio.map_or(String::new(), cell)
    });
    println!(
        "| {case} |{}{}",
        cells.concat(),
        cell(of("tidegate").and_then(|medians| medians.cpu_ns))
    );
}

/// Runs all contenders of a case, interleaved, and prints them; whether all did what it says.
pub fn run(case: &Case, options: &Options, server: Option<&Server>) -> bool {
    let keys = case.keys();
    let contenders: Vec<Box<dyn Contender>> = contenders(case, server)
        .into_iter()
        .filter(|one| one.name() == BASE || one.name().contains(&options.contender))
        .collect();
    let mut seen: Vec<Seen> = contenders.iter().map(|_| Seen::default()).collect();
    if !case.is_new() && case.asks != Asks::OneOfFew {
        contenders.iter().for_each(|contender| contender.warm_up(&keys));
    }
    let length = options.round(case, &contenders, 100);
    let new = keys.stream.len() / options.rounds.max(1);
    for round in 0..options.rounds {
        for (contender, seen) in contenders.iter().zip(&mut seen) {
            let came_to = if case.is_new() {
                once(contender.as_ref(), &keys, round * new..(round + 1) * new)
            } else {
                tight(case, contender.as_ref(), &keys, length)
            };
            seen.ns.push(came_to.ns_a_decision());
            seen.cpu_ns.push(came_to.cpu_ns_a_decision());
            seen.strays = seen.strays.max(came_to.strays());
        }
    }
    contenders.iter().for_each(|contender| contender.check(&keys));
    let medians: Vec<Medians> = seen.into_iter().map(|seen| seen.medians(case)).collect();
    let base = contenders.iter().position(|one| one.name() == BASE).map(|base| medians[base].ns);
    let mut good = true;
    let names = contenders.iter().map(|contender| contender.name());
    if options.table {
        print_row(&case.name(), &names.zip(&medians).collect::<Vec<_>>());
    }
    for (contender, Medians { ns, cpu_ns, strays }) in contenders.iter().zip(medians) {
        let ratio = base.unwrap_or(f64::NAN) / ns;
        let line =
            Line { case: case.name(), contender: contender.name(), ns, cpu_ns, ratio, strays };
        good &= case.holds(contender.name(), strays);
        if options.table {
            continue;
        }
        print(options, &line, |line| {
            let Line { case, contender, ns, cpu_ns, ratio, .. } = line;
            let all = cpu_ns.map_or(String::new(), |ns| format!(" {ns:>9.1} ns of all threads"));
            format!("{case:<48} {contender:<34} {ns:>9.1} ns {ratio:>8.3}x{all}")
        });
    }
    good
}
