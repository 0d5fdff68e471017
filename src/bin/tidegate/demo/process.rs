//! Nodes as operating-system processes: the parent sends each its orders on standard input and
//! reads what it decided from standard output.
#![allow(clippy::disallowed_methods, reason = "parent and children agree on a start by the clock")]

use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tidegate::sim::workload::{Arrival, Workload};

use super::DemoError;
use super::node::{self, Driven, Live, Load, Traffic};
use crate::flags::{InputError, LimitSpec};
use crate::trace::Trace;
use crate::{output, warnings};

/// Between the parent's word and the start of the load.
const START_AFTER: Duration = Duration::from_millis(300);

/// What a node's process is to do.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Orders {
    pub(crate) node: u16,
    pub(crate) store: StoreSpec,
    pub(crate) limit: LimitSpec,
    pub(crate) source: Source,
}

/// Where the nodes' processes meet.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct StoreSpec {
    pub(crate) address: String,
    pub(crate) namespace: String,
}

/// Where the arrivals come from: each process makes or reads its own part.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Source {
    Synthetic(Workload),
    Trace { file: PathBuf, speed: f64, nodes: u16, seed: u64 },
}

/// What came of it.
#[derive(Debug, Serialize, Deserialize)]
struct Outcome {
    driven: Driven,
    traffic: Traffic,
}

/// What a node's process tells its parent, a line of standard output each.
#[derive(Debug, Serialize, Deserialize)]
enum Message {
    Ready,
    Warned(Vec<(String, u64)>),
    Failed(String),
    Done(Outcome),
}

impl Source {
    /// The arrivals of one node and the names of the keys.
    fn arrivals_of(&self, node: u16) -> Result<(Vec<Arrival>, Vec<String>), InputError> {
        match self {
            Self::Synthetic(workload) => {
                Ok((workload.arrivals_of_node(node), super::key_names(workload.keys_in_all())))
            }
            Self::Trace { file, speed, nodes, seed } => {
                let trace = Trace::load(file)?;
                let mut arrivals = trace.arrivals(*speed, *nodes, *seed);
                arrivals.retain(|arrival| arrival.node == node);
                Ok((arrivals, trace.keys))
            }
        }
    }
}

/// The machine's time, in microseconds since 1970.
pub(super) fn unix_us() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_micros() as u64
}

/// A node's process. Its parent hears of warnings and errors, so that many nodes' are told once.
pub(crate) fn run_node() -> Result<(), DemoError> {
    let last = match play() {
        Ok(Some(outcome)) => Message::Done(outcome),
        Ok(None) => return Ok(()),
        Err(error) => Message::Failed(error.to_string()),
    };
    output::json(&Message::Warned(warnings::take()))?;
    Ok(output::json(&last)?)
}

/// The next order, or nothing if the parent has gone.
fn order<T: DeserializeOwned>() -> Result<Option<T>, DemoError> {
    let line = std::io::stdin().lines().next().transpose()?;
    Ok(line.map(|line| serde_json::from_str(&line)).transpose()?)
}

fn play() -> Result<Option<Outcome>, DemoError> {
    let Some(orders) = order::<Orders>()? else { return Ok(None) };
    let (arrivals, keys) = orders.source.arrivals_of(orders.node)?;
    let runtime = super::runtime()?;
    let live = Arc::new(Live::default());
    let _entered = runtime.enter();
    let store =
        tidegate::RedisStore::open(&orders.store.address)?.namespace(&orders.store.namespace)?;
    let limiter = node::start(orders.limit.limit(), store.into(), orders.node, &live)?;
    runtime.block_on(node::ready(std::slice::from_ref(&limiter), &live))?;
    output::json(&Message::Ready)?;
    let Some(start_us) = order::<u64>()? else { return Ok(None) };
    end_with_parent();
    let start = Instant::now() + Duration::from_micros(start_us.saturating_sub(unix_us()));
    let limit = orders.limit.limit();
    let load = Load { limit: limit.name(), arrivals: &arrivals, keys: &keys, start };
    let (who, limit) = (format!("node {:<3}", orders.node), format!("{} a key", orders.limit.rate));
    let over = AtomicBool::new(false);
    let driven = std::thread::scope(|scope| {
        scope.spawn(|| super::report::each_second(&live, &who, &limit, start, &over));
        let _end = super::EndOfLoad(&over);
        node::drive(&load, |_| Some(&limiter), &live)
    })?;
    // What leaving cost is no part of the load.
    let mut traffic = live.traffic().clone();
    runtime.block_on(node::leave(std::slice::from_ref(&limiter)));
    traffic.excess = live.traffic().excess;
    Ok(Some(Outcome { driven, traffic }))
}

/// Ends this process when its standard input closes: its parent has ended, by whatever signal.
fn end_with_parent() {
    std::thread::spawn(|| {
        std::io::stdin().lines().for_each(drop);
        std::process::exit(0);
    });
}

/// The nodes' processes, ready to start.
pub(crate) struct Processes {
    children: Vec<(Child, BufReader<ChildStdout>)>,
}

impl Processes {
    /// Starts a process a node and waits until all are ready.
    pub(crate) fn start(
        nodes: u16,
        store: &StoreSpec,
        limit: LimitSpec,
        source: &Source,
    ) -> Result<Self, DemoError> {
        let program = std::env::current_exe()?;
        let mut children = Vec::new();
        for node in 0..nodes {
            let mut child = Command::new(&program)
                .arg("demo-node")
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()?;
            let orders = Orders { node, store: store.clone(), limit, source: source.clone() };
            let line = serde_json::to_string(&orders)? + "\n";
            let (Some(input), Some(output)) = (&mut child.stdin, child.stdout.take()) else {
                return Err(DemoError::Process(node));
            };
            input.write_all(line.as_bytes())?;
            children.push((child, BufReader::new(output)));
        }
        let mut processes = Self { children };
        for (node, (_, output)) in (0..).zip(&mut processes.children) {
            match next(output, node)? {
                Message::Ready => {}
                _ => return Err(DemoError::Process(node)),
            }
        }
        Ok(processes)
    }

    /// Lets all begin at one instant, which is returned.
    pub(crate) fn begin(&mut self) -> Result<Instant, DemoError> {
        let line = format!("{}\n", unix_us() + START_AFTER.as_micros() as u64);
        let start = Instant::now() + START_AFTER;
        for (node, (child, _)) in (0..).zip(&mut self.children) {
            let input = child.stdin.as_mut().ok_or(DemoError::Process(node))?;
            input.write_all(line.as_bytes())?;
        }
        Ok(start)
    }

    /// Waits for all and gathers what they decided.
    pub(crate) fn gather(mut self) -> Result<(Driven, Traffic), DemoError> {
        let (mut driven, mut traffic) = (Driven::default(), Traffic::default());
        for (node, (child, output)) in (0..).zip(&mut self.children) {
            let Message::Done(outcome) = next(output, node)? else {
                return Err(DemoError::Process(node));
            };
            driven.merge(outcome.driven);
            traffic.merge(outcome.traffic);
            child.wait()?;
        }
        driven.decided.sort_by_key(|decided| decided.at_us);
        Ok((driven, traffic))
    }
}

/// The next message of a node that is neither a warning, which is shown, nor a failure.
fn next(output: &mut impl BufRead, node: u16) -> Result<Message, DemoError> {
    loop {
        let mut line = String::new();
        output.read_line(&mut line)?;
        match serde_json::from_str(&line).map_err(|_| DemoError::Process(node))? {
            Message::Warned(warned) => {
                for (text, times) in &warned {
                    warnings::give(text, *times);
                }
            }
            Message::Failed(reason) => return Err(DemoError::Node { node, reason }),
            message => return Ok(message),
        }
    }
}

impl Drop for Processes {
    fn drop(&mut self) {
        for (child, _) in &mut self.children {
            // Those that have ended need no killing.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
