//! What a decision of an exact limit takes of Redis, beside the smallest script that decides the same.
//!
//! ```text
//! cargo bench --bench exact -- [--quick]
//! ```
//!
//! Both scripts of an algorithm get the same keys in turns, in pipelines of 100 calls, on one redis-server that nobody else
//! uses. *In the script* is `usec` of `evalsha` in `INFO commandstats`; *in all* is the server's processor time by
//! `INFO cpu`, the network included. The median of seven rounds, and the median of their ratios. The exit status is 1 if a
//! ratio in all is above 1.5. `--quick` has one short round.
#![allow(clippy::disallowed_methods, reason = "the server is real, and so is time")]

use std::process::ExitCode;

use redis::{Commands, Connection};

#[path = "../tests/parts/redis_server.rs"]
mod redis_server;

use redis_server::RedisServer;

const RATIO_MOST: f64 = 1.5;
const PIPELINE: usize = 100;
const KEYS: usize = 1000;

/// A script and its arguments.
struct Script {
    hash: String,
    arguments: Vec<u8>,
}

impl Script {
    fn new(connection: &mut Connection, text: &str, numbers: &[f64]) -> Self {
        let hash = redis::cmd("SCRIPT").arg("LOAD").arg(text).query(connection);
        let arguments = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        Self { hash: hash.expect("the script loads"), arguments }
    }

    /// Microseconds a call in the script, and in all.
    fn cost(&self, connection: &mut Connection, prefix: &str, calls: usize) -> [f64; 2] {
        let before = used(connection);
        for first in (0..calls).step_by(PIPELINE) {
            let mut pipeline = redis::pipe();
            for call in first..first + PIPELINE {
                let key = format!("{prefix}:{:016}", call % KEYS);
                let command = pipeline.cmd("EVALSHA").arg(&self.hash).arg(1).arg(key);
                command.arg(&self.arguments).ignore();
            }
            pipeline.exec(connection).expect("the scripts run");
        }
        let after = used(connection);
        [0, 1].map(|index| (after[index] - before[index]) / calls as f64)
    }
}

/// Microseconds of all `evalsha`, and of the server's processor.
fn used(connection: &mut Connection) -> [f64; 2] {
    let mut info = |section: &str| -> String {
        redis::cmd("INFO").arg(section).query(connection).expect("the server answers")
    };
    let stats = info("commandstats");
    let calls = stats.lines().find(|line| line.starts_with("cmdstat_evalsha"));
    let usec = calls.and_then(|line| number_after(line, "usec=")).unwrap_or_default();
    let cpu = info("cpu");
    let seconds = |name| cpu.lines().find_map(|line| number_after(line, name)).expect("it is told");
    [usec, 1e6 * (seconds("used_cpu_sys:") + seconds("used_cpu_user:"))]
}

fn number_after(line: &str, name: &str) -> Option<f64> {
    let (_, rest) = line.split_once(name)?;
    rest.split(',').next()?.trim().parse().ok()
}

/// An algorithm: its name, our script with its arguments, and the smallest one with its own.
struct Case {
    name: &'static str,
    ours: (&'static str, Vec<f64>),
    smallest: (&'static str, Vec<f64>),
}

const TURN: &str = include_str!("../lua/exact-turn.lua");
const WINDOW: &str = include_str!("../lua/exact-window.lua");
const LOG: &str = include_str!("../lua/exact-log.lua");

const TOKEN_BUCKET: &str = r"
local rate, burst, cost = struct.unpack('<ddd', ARGV[1])
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local record, level, stamp = redis.call('GET', KEYS[1]), burst, now
if record then level, stamp = struct.unpack('<dd', record) end
level = math.min(burst, level + math.max(0, now - stamp) * rate)
if level < cost then return struct.pack('<ddd', 0, now, level) end
level = level - cost
redis.call('SET', KEYS[1], struct.pack('<dd', level, now), 'PX', math.ceil((burst - level) / rate / 1000) + 1)
return struct.pack('<ddd', 1, now, level)";

const LEAKY_BUCKET: &str = r"
local token, queue = struct.unpack('<dd', ARGV[1])
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local record, start = redis.call('GET', KEYS[1]), now
if record then start = math.max(now, struct.unpack('<d', record)) end
if start - now > queue then return struct.pack('<ddd', 0, now, start - now) end
redis.call('SET', KEYS[1], struct.pack('<d', start + token), 'PX', math.ceil((start + token - now) / 1000) + 1)
return struct.pack('<ddd', 1, now, start - now)";

const WINDOWS: &str = r"
local tokens, period, sliding, cost = struct.unpack('<dddd', ARGV[1])
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local record, index, current, previous = redis.call('GET', KEYS[1]), math.floor(now / period), 0, 0
if record then
  local last
  last, current, previous = struct.unpack('<ddd', record)
  if index == last + 1 then current, previous = 0, current elseif index > last then current, previous = 0, 0 end
end
local left = period - now % period
if current + sliding * math.floor(previous * left / period) + cost > tokens then
  return struct.pack('<dddd', 0, now, current, previous)
end
current = current + cost
redis.call('SET', KEYS[1], struct.pack('<ddd', index, current, previous), 'PX',
  math.ceil((left + sliding * period) / 1000) + 1)
return struct.pack('<dddd', 1, now, current, previous)";

const SORTED_SET: &str = r"
local tokens, period = struct.unpack('<dd', ARGV[1])
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - period)
local spent = redis.call('ZCARD', KEYS[1])
if spent >= tokens then return struct.pack('<ddd', 0, now, spent) end
redis.call('ZADD', KEYS[1], now, struct.pack('<dd', now, spent))
redis.call('PEXPIRE', KEYS[1], math.ceil(period / 1000) + 1)
return struct.pack('<ddd', 1, now, spent + 1)";

/// 100 tokens a second, of which each key gets a part: most requests are allowed.
fn cases() -> [Case; 5] {
    let (second, keep) = (1e6, 2e3);
    let window = |sliding: f64| Case {
        name: if sliding > 0.0 { "sliding-window" } else { "fixed-window" },
        ours: (WINDOW, vec![1e5, second, sliding, 1.0, 1.0, keep]),
        smallest: (WINDOWS, vec![1e5, second, sliding, 1.0]),
    };
    [
        Case {
            name: "token-bucket",
            ours: (TURN, vec![1.0, 1e4, 1e5, 1e4, 0.0, 1e9 - 1e4, 0.0, 1e9, keep]),
            smallest: (TOKEN_BUCKET, vec![1.0, 1e9, 1e4]),
        },
        Case {
            name: "leaky-bucket",
            ours: (TURN, vec![1.0, 1e4, 0.0, 1e4, 0.0, 1e9, 0.0, 1e9, keep]),
            smallest: (LEAKY_BUCKET, vec![1e4, 1e9]),
        },
        window(0.0),
        window(1.0),
        Case {
            name: "sliding-log",
            ours: (LOG, vec![100.0, second, 1.0, 1.0, keep]),
            smallest: (SORTED_SET, vec![100.0, second]),
        },
    ]
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() -> ExitCode {
    let is_quick = std::env::args().any(|argument| argument == "--quick");
    let (rounds, calls) = if is_quick { (1, 20_000) } else { (7, 60_000) };
    let server = RedisServer::start();
    let client = redis::Client::open(server.url()).expect("a good address");
    let mut connection = client.get_connection().expect("the server runs");
    println!(
        "us a call         in the script: ours  smallest  ratio    in all: ours  smallest  ratio"
    );
    let mut is_kept = true;
    for case in cases() {
        let [ours, smallest] = [&case.ours, &case.smallest]
            .map(|(text, numbers)| Script::new(&mut connection, text, numbers));
        let mut costs = Vec::new();
        for _ in 0..rounds {
            let _: () = connection.flushall().expect("the server answers");
            // Each has the server's caches to itself half of the time.
            let begun = smallest.cost(&mut connection, "less", calls / 2);
            let whole = ours.cost(&mut connection, "ours", calls);
            let ended = smallest.cost(&mut connection, "less", calls / 2);
            costs.push((whole, [0, 1].map(|index| f64::midpoint(begun[index], ended[index]))));
        }
        print!("{:16}", case.name);
        for (index, width) in [20, 16].into_iter().enumerate() {
            let ours: Vec<f64> = costs.iter().map(|(ours, _)| ours[index]).collect();
            let smallest: Vec<f64> = costs.iter().map(|(_, smallest)| smallest[index]).collect();
            let ratios = ours.iter().zip(&smallest).map(|(ours, smallest)| ours / smallest);
            let ratio = median(ratios.collect());
            print!(" {:width$.2} {:9.2} {ratio:6.2}", median(ours), median(smallest));
            is_kept &= index == 0 || ratio <= RATIO_MOST;
        }
        println!();
    }
    if is_kept { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
