//! `tidegate demo`: nodes under load, and what one ideal bucket would have admitted.
#![allow(clippy::disallowed_methods, reason = "a demo runs by the real clock")]

use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tidegate::sim::Policy;
use tidegate::sim::figures::Figures;
use tidegate::sim::workload::Arrival;
use tidegate::{AnyStore, ConfigError, Limiter, MemoryStore, RedisStore, StoreError};

use crate::advice;
use crate::check_config::CheckConfigError;
use crate::exporter::exporter;
use crate::flags::InputError;
use crate::output::{self, OutputError};
use crate::store::{Store, namespace};
use crate::summary::{Summary, print};
use crate::trace::Trace;
use crate::values::Address;

mod configured;
mod node;
pub(crate) mod options;
pub(crate) mod outage;
pub(crate) mod process;
mod report;

use node::{Driven, Live, Load, Traffic};
use options::Options;
use outage::OwnRedis;
use process::{Processes, Source, unix_us};
use report::Report;

/// What can stop a demo.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DemoError {
    #[error(transparent)]
    Input(#[from] InputError),
    #[error(transparent)]
    File(#[from] CheckConfigError),
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(
        "redis-server could not be started: {0}: install it (Debian: apt-get install redis-server)"
    )]
    OwnRedis(String),
    #[error("the demo's redis-server has gone")]
    OwnRedisGone,
    #[error("node {0}'s process ended early")]
    Process(u16),
    #[error("node {node}: {reason}")]
    Node { node: u16, reason: String },
    #[error("metrics: {0}")]
    Metrics(#[from] metrics_exporter_prometheus::BuildError),
    #[error(transparent)]
    Output(#[from] OutputError),
    #[error("--metrics {0}: {1}")]
    Address(Address, String),
    #[error("a node's message could not be read: {0}")]
    Message(#[from] serde_json::Error),
    #[error(transparent)]
    Io(#[from] std::io::Error),
}

/// The input of a run: who asks for what when.
struct Input {
    arrivals: Vec<Arrival>,
    keys: Vec<String>,
    /// What the keys may spend, for the reader.
    limit: String,
    seconds: f64,
    source: Source,
    trace: Option<Trace>,
}

/// The output of a run, before it is judged.
struct Output {
    driven: Driven,
    traffic: Traffic,
    start: Instant,
}

pub(crate) fn run(options: &Options) -> Result<(), DemoError> {
    options.validate()?;
    let runs = match &options.config {
        Some(file) => configured::runs(options, file)?,
        None => vec![options.clone()],
    };
    let own_redis = options.outage.is_some().then(OwnRedis::start).transpose()?;
    let store = match &own_redis {
        Some(server) => Store::Redis(server.address()),
        None => options.store.clone(),
    };
    let runtime = runtime()?;
    let _entered = runtime.enter();
    if let Some(address) = &options.metrics {
        exporter()?.with_http_listener(resolved(address)?).install()?;
    }
    runs.iter().try_for_each(|run| play(run, &store, own_redis.as_ref(), &runtime))
}

/// One run: of one limit.
fn play(
    options: &Options,
    store: &Store,
    own_redis: Option<&OwnRedis>,
    runtime: &tokio::runtime::Runtime,
) -> Result<(), DemoError> {
    let input = read_input(options)?;
    options.outage.map_or(Ok(()), |outage| outage.validate(input.seconds))?;
    advice::show(&options.load, Policy::Default, None);
    let output = match store {
        Store::Redis(address) if options.processes => {
            run_processes(options, &input, address, own_redis)?
        }
        _ => run_here(options, &input, store, own_redis, runtime)?,
    };
    report(options, store, &input, output)
}

fn resolved(address: &Address) -> Result<SocketAddr, DemoError> {
    let failed = |reason: String| DemoError::Address(address.clone(), reason);
    let found = address.to_string().to_socket_addrs().map_err(|error| failed(error.to_string()));
    found?.next().ok_or_else(|| failed("no such host".to_owned()))
}

fn report(
    options: &Options,
    store: &Store,
    input: &Input,
    output: Output,
) -> Result<(), DemoError> {
    let Output { driven: Driven { decided, took_ns }, traffic, start } = output;
    let (flags, trace) = (&options.load, input.trace.as_ref());
    let rule = options.limit().rule();
    let began_us = unix_us().saturating_sub(start.elapsed().as_micros() as u64);
    let figures = Figures::by_rule(&decided, rule, began_us, input.seconds);
    let (excess, round_trips_us) = (traffic.excess, traffic.took_us.clone());
    let traffic = traffic.into();
    let summary = Summary::new(flags, store.name(), input.seconds, &traffic, figures, trace);
    let limit = options.limit.as_ref().map(|limit| limit.name().to_owned());
    let times = (&took_ns[..], &round_trips_us[..]);
    let report = Report::new(limit, summary, excess, times, options.outage);
    print(&report, flags.json, flags.verbose)?;
    Ok(())
}

/// All nodes' drivers share a thread: the rest of the machine decides.
fn runtime() -> Result<tokio::runtime::Runtime, DemoError> {
    Ok(tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?)
}

fn key_names(keys: u32) -> Vec<String> {
    (0..keys).map(|key| format!("key-{key}")).collect()
}

fn read_input(options: &Options) -> Result<Input, DemoError> {
    let flags = &options.load;
    let (Some(trace), Some(file)) = (flags.replay.read()?, &flags.replay.trace) else {
        let workload = flags.workload();
        return Ok(Input {
            arrivals: if options.processes { Vec::new() } else { workload.arrivals() },
            keys: key_names(workload.keys_in_all()),
            limit: flags.cluster.rate.times(flags.keys).to_string(),
            seconds: flags.seconds(),
            source: Source::Synthetic(workload),
            trace: None,
        });
    };
    let (speed, nodes, seed) = (flags.replay.speed, flags.cluster.nodes, flags.seed);
    let (arrivals, seconds) = flags.replay.arrivals(&trace, nodes, seed);
    Ok(Input {
        seconds,
        arrivals,
        keys: trace.keys.clone(),
        limit: format!("{} a key", flags.cluster.rate),
        source: Source::Trace { file: file.clone(), speed, nodes, seed },
        trace: Some(trace),
    })
}

/// All nodes in this process.
fn run_here(
    options: &Options,
    input: &Input,
    store: &Store,
    own_redis: Option<&OwnRedis>,
    runtime: &tokio::runtime::Runtime,
) -> Result<Output, DemoError> {
    let live = Arc::new(Live::default());
    let memory = MemoryStore::new();
    let namespace = namespace();
    let limiters = (0..options.load.cluster.nodes)
        .map(|node| {
            let store: AnyStore = match store {
                Store::Memory => memory.clone().into(),
                Store::Redis(address) => RedisStore::open(address)?.namespace(&namespace)?.into(),
            };
            node::start(options.limit(), store, node, &live)
        })
        .collect::<Result<Vec<Limiter>, DemoError>>()?;
    runtime.block_on(node::ready(&limiters, &live))?;
    let (limit, start) = (options.limit(), Instant::now());
    let load = Load { limit: limit.name(), arrivals: &input.arrivals, keys: &input.keys, start };
    let over = AtomicBool::new(false);
    let driven = std::thread::scope(|scope| {
        scope.spawn(|| report::each_second(&live, "", &input.limit, load.start, &over));
        let end = EndOfLoad(&over);
        let outage = own_redis.zip(options.outage).map(|(server, outage)| {
            let start = load.start;
            scope.spawn(move || server.suffer(outage, start))
        });
        let driven = node::drive(&load, |node| limiters.get(usize::from(node)), &live);
        drop(end);
        if let Some(Ok(result)) = outage.map(std::thread::ScopedJoinHandle::join) {
            result?;
        }
        driven
    })?;
    let mut traffic = live.traffic().clone();
    runtime.block_on(node::leave(&limiters));
    // What leaving cost is no part of the load; what was seen of the excess by then is.
    traffic.excess = live.traffic().excess;
    Ok(Output { driven, traffic, start: load.start })
}

/// Each node in a process of its own.
fn run_processes(
    options: &Options,
    input: &Input,
    address: &str,
    own_redis: Option<&OwnRedis>,
) -> Result<Output, DemoError> {
    let store = process::StoreSpec { address: address.to_owned(), namespace: namespace() };
    let flags = &options.load;
    let mut processes =
        Processes::start(flags.cluster.nodes, &store, flags.limit(), &input.source)?;
    let start = processes.begin()?;
    let nodes = flags.cluster.nodes;
    output::note(&format!("{nodes} processes under load for {:.1} s", input.seconds));
    if let (Some(server), Some(outage)) = (own_redis, options.outage) {
        server.suffer(outage, start)?;
    }
    let (driven, traffic) = processes.gather()?;
    Ok(Output { driven, traffic, start })
}

/// Says when it is dropped that the load is over, so that nobody waits for one that ended in a panic.
struct EndOfLoad<'a>(&'a AtomicBool);

impl Drop for EndOfLoad<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// Sleeps until `instant`, or until `over`; returns whether it is over.
fn sleep_until(instant: Instant, over: &AtomicBool) -> bool {
    while Instant::now() < instant {
        if over.load(Ordering::Acquire) {
            return true;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    over.load(Ordering::Acquire)
}
