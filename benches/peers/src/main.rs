//! What one decision costs, next to other limiters' decisions, in one interleaved run.
//!
//! ```text
//! cargo run --release --manifest-path benches/peers/Cargo.toml
//! cargo run --release --manifest-path benches/peers/Cargo.toml -- --json --case 'handle'
//! cargo run --release --manifest-path benches/peers/Cargo.toml -- --redis
//! ```
//!
//! Each case is a stream of keys and a number of threads; each contender decides about the same
//! stream, in rounds, one after the other; the median of all rounds counts. tidegate is the whole
//! hybrid limiter: a store, and a driver that syncs with it meanwhile; *tidegate alone* has no store.
//! A run fails that measures something else than a case's name says: decisions are counted by outcome,
//! and so are syncs.
//!
//! A redis-server is started for the contenders that need one. With `--redis` only they take part,
//! tidegate with its Redis store among them.
#![allow(
    clippy::disallowed_methods,
    reason = "measures time, and waits for a driver that lives by it"
)]

use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use serde::Serialize;

use crate::case::{Case, cases, shared_cases};
use crate::contender::Contender;
use crate::round::Length;
use crate::server::Server;

mod case;
mod contender;
mod costs;
mod latencies;
mod round;
mod server;

#[derive(Parser)]
struct Options {
    /// Limits shared through a Redis: decisions a second, and how long one takes
    #[arg(long)]
    redis: bool,
    /// Only cases whose name contains this
    #[arg(long, default_value = "")]
    case: String,
    /// Only contenders whose name contains this, and governor
    #[arg(long, default_value = "")]
    contender: String,
    /// Rounds of each contender
    #[arg(long, default_value_t = 9)]
    rounds: usize,
    /// How long one round of one contender takes, in milliseconds [default: 100, with --redis 300]
    #[arg(long)]
    round_ms: Option<u64>,
    /// How long each round runs before it counts, in milliseconds [default: 200, with more than
    /// 10,000 keys two seconds]
    #[arg(long)]
    run_up_ms: Option<u64>,
    /// One JSON object a line
    #[arg(long)]
    json: bool,
    /// The table of docs/BENCHMARKS.md
    #[arg(long, conflicts_with_all = ["json", "redis"])]
    table: bool,
}

impl Options {
    /// The same for all contenders of a case.
    fn round(&self, case: &Case, contenders: &[Box<dyn Contender>], default_ms: u64) -> Length {
        // A hybrid has given back its leases while the others had their turn. With few keys it has
        // them again after some syncs; with many that takes as long as it says.
        let run_up = Duration::from_millis(if case.keys > 10_000 { 30 } else { 200 });
        let returns = contenders.iter().map(|contender| contender.returns_within(case.keys));
        let run_up = returns.fold(run_up, Duration::max);
        Length {
            run_up: self.run_up_ms.map_or(run_up, Duration::from_millis),
            counted: Duration::from_millis(self.round_ms.unwrap_or(default_ms)),
        }
    }
}

fn print<T: Serialize>(options: &Options, line: &T, text: impl Fn(&T) -> String) {
    if options.json {
        println!("{}", serde_json::to_string(line).expect("numbers and names"));
    } else {
        println!("{}", text(line));
    }
}

fn main() -> ExitCode {
    let options = Options::parse();
    let server = Server::start();
    if let Err(error) = &server {
        eprintln!("no redis-server ({error}): what needs one is left out");
    }
    let server = server.as_ref().ok();
    let mut good = !options.redis || server.is_some();
    if options.table {
        costs::print_head();
    }
    let cases = if options.redis { shared_cases() } else { cases() };
    for case in cases.into_iter().filter(|case| case.name().contains(&options.case)) {
        good &= match server {
            Some(server) if options.redis => latencies::run(&case, &options, server),
            _ if options.redis => false,
            server => costs::run(&case, &options, server),
        };
    }
    if good { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
