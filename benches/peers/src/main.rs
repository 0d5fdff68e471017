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
//! hybrid limiter: a store, and a driver that syncs with it meanwhile. A case fails that measures
//! something else than its name says: decisions are counted by outcome, and so are syncs.
//!
//! A redis-server is started for the contenders that need one. With `--redis` only they take part,
//! tidegate with its Redis store among them.
#![allow(
    clippy::disallowed_methods,
    reason = "measures time, and waits for a driver that lives by it"
)]

use clap::Parser;
use serde::Serialize;

use crate::case::{Case, cases, shared_cases};
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
    /// One JSON object a line
    #[arg(long)]
    json: bool,
}

fn print<T: Serialize>(options: &Options, line: &T, text: impl Fn(&T) -> String) {
    if options.json {
        println!("{}", serde_json::to_string(line).expect("numbers and names"));
    } else {
        println!("{}", text(line));
    }
}

fn main() {
    let options = Options::parse();
    let chosen = |case: &Case| case.name().contains(&options.case);
    let server = Server::start();
    if options.redis {
        let server = server.expect("--redis needs redis-server on the PATH");
        shared_cases().iter().filter(|case| chosen(case)).for_each(|case| {
            latencies::run(case, &options, &server);
        });
        return;
    }
    if let Err(error) = &server {
        eprintln!("no redis-server ({error}): what needs one is left out");
    }
    cases().iter().filter(|case| chosen(case)).for_each(|case| {
        costs::run(case, &options, server.as_ref().ok());
    });
}
