//! A node: a process with one limiter and its part of the load, and the parent's end of it.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use tidegate::{Event, Limit, Limiter, Quota, RedisStore};

use crate::judge::Decided;
use crate::{BURST, KEY, LOAD, NODES, RATE};

/// The first argument of a node's process.
pub(crate) const WORD: &str = "--node";
const READY_WITHIN: Duration = Duration::from_secs(10);
const LEAVE_WITHIN: Duration = Duration::from_secs(10);
/// A request that is later than this was due while the process was stopped: it never arrived.
const LATE_NS: u64 = 100_000_000;
/// Below this, waiting for the next request is not worth a sleep.
const SLEEP_LEAST_NS: u64 = 60_000;

/// The clock that all processes of a machine share.
pub(crate) fn now_ns() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// What a node knows of its excess, the highest it told.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Told {
    pub(crate) bound: Option<f64>,
    pub(crate) observed: f64,
}

impl Told {
    fn merge(&mut self, other: Self) {
        self.bound = self.bound.into_iter().chain(other.bound).reduce(f64::max);
        self.observed = self.observed.max(other.observed);
    }
}

/// The process of node number `arguments[0]`: ready, load, report.
pub(crate) fn run(arguments: &[String]) -> Result<(), Box<dyn std::error::Error>> {
    let [number, address, namespace, seconds] = arguments else { return Err("arguments".into()) };
    let (number, seconds): (u64, f64) = (number.parse()?, seconds.parse()?);
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let _entered = runtime.enter();
    let told = Arc::new(Mutex::new(Told::default()));
    let heard = told.clone();
    let limiter = Limiter::builder()
        .name(format!("node-{number}"))
        .limit(Limit::new("api", Quota::per_second(RATE).burst(BURST)))
        .store(RedisStore::open(address)?.namespace(namespace)?)
        .listen(move |event| {
            if let Event::Excess { excess, .. } = event {
                let told = Told { bound: excess.bound_tokens, observed: excess.observed_tokens };
                heard.lock().unwrap_or_else(PoisonError::into_inner).merge(told);
            }
        })
        .build()?;
    runtime.block_on(limiter.ready(READY_WITHIN))?;
    println!("ready");
    io::stdout().flush()?;
    let mut orders = BufReader::new(io::stdin()).lines();
    let start_ns: u64 = orders.next().ok_or("no start")??.parse()?;
    // A node does not outlive its parent, which keeps the other end open.
    std::thread::spawn(move || {
        let _ = orders.next();
        std::process::exit(1);
    });
    let (decided, skipped) = drive(&limiter, number, start_ns, seconds);
    let of_load = *told.lock().unwrap_or_else(PoisonError::into_inner);
    let bound = limiter.limit("api")?.excess().bound_tokens;
    let left = runtime.block_on(limiter.shutdown(LEAVE_WITHIN));
    let observed = limiter.limit("api")?.excess().observed_tokens;
    // That all nodes leave is no part of the case, and would count as so many deaths. What they have seen by then is.
    let mut told = of_load;
    told.merge(Told { bound, observed });
    let mut out = io::BufWriter::new(io::stdout().lock());
    let bound = told.bound.map_or("-".to_owned(), |bound| bound.to_string());
    let left = left.map_or_else(|error| error.to_string(), |()| "-".to_owned());
    writeln!(out, "told {bound} {} {skipped} {left}", told.observed)?;
    for Decided { at_us, allowed, took_ns } in decided {
        writeln!(out, "{at_us} {} {took_ns}", u8::from(allowed))?;
    }
    out.flush()?;
    Ok(())
}

/// Requests at random instants (Poisson), an open loop; returns decisions and skipped requests.
fn drive(limiter: &Limiter, number: u64, start_ns: u64, seconds: f64) -> (Vec<Decided>, u64) {
    let limit = limiter.limit("api").expect("it was built with it");
    let mut random = fastrand::Rng::with_seed(number + 1);
    let gap_ns = NODES as f64 * 1e9 / (LOAD * RATE as f64);
    let mut decided = Vec::with_capacity((2.0 * seconds * 1e9 / gap_ns) as usize);
    let (mut due, mut skipped) = (0.0, 0);
    loop {
        due -= gap_ns * (1.0 - random.f64()).ln();
        if due > seconds * 1e9 {
            return (decided, skipped);
        }
        let due_ns = start_ns + due as u64;
        let late_ns = wait_until(due_ns);
        if late_ns > LATE_NS {
            skipped += 1;
            continue;
        }
        let began_ns = now_ns();
        let allowed = limit.check(KEY).is_allowed();
        let ended_ns = now_ns();
        decided.push(Decided {
            at_us: ended_ns.saturating_sub(start_ns) / 1000,
            allowed,
            took_ns: ended_ns - began_ns,
        });
    }
}

/// Returns how much later it is.
fn wait_until(due_ns: u64) -> u64 {
    loop {
        let now = now_ns();
        if now >= due_ns {
            return now - due_ns;
        }
        if due_ns - now > SLEEP_LEAST_NS {
            std::thread::sleep(Duration::from_nanos(due_ns - now - SLEEP_LEAST_NS / 2));
        }
    }
}

/// The parent's end.
pub(crate) struct Node {
    child: Child,
    output: BufReader<ChildStdout>,
}

/// What a node's process brought back.
pub(crate) struct Brought {
    pub(crate) decided: Vec<Decided>,
    pub(crate) told: Told,
    pub(crate) skipped: u64,
    /// Why it could not leave in good order.
    pub(crate) left: Option<String>,
}

impl Node {
    /// Starts a process; it is ready when [`wait_until_ready`](Self::wait_until_ready) says so.
    pub(crate) fn start(
        number: usize,
        address: &str,
        namespace: &str,
        seconds: f64,
    ) -> io::Result<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .args([WORD, &number.to_string(), address, namespace, &seconds.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let output = child.stdout.take().ok_or_else(|| io::Error::other("no pipe"))?;
        Ok(Self { child, output: BufReader::new(output) })
    }

    pub(crate) fn wait_until_ready(&mut self) -> io::Result<()> {
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        if line.trim() == "ready" { Ok(()) } else { Err(io::Error::other("a node did not start")) }
    }

    pub(crate) fn begin(&mut self, start_ns: u64) -> io::Result<()> {
        let input = self.child.stdin.as_mut().ok_or_else(|| io::Error::other("no pipe"))?;
        writeln!(input, "{start_ns}")
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits for its end and reads what it decided.
    pub(crate) fn gather(mut self) -> io::Result<Brought> {
        let mut text = String::new();
        self.output.read_to_string(&mut text)?;
        self.child.wait()?;
        parse(&text).ok_or_else(|| io::Error::other("a node ended early"))
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        // A process that has ended needs no killing.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn parse(text: &str) -> Option<Brought> {
    let mut lines = text.lines();
    let mut head = lines.next()?.strip_prefix("told ")?.splitn(4, ' ');
    let told = Told { bound: head.next()?.parse().ok(), observed: head.next()?.parse().ok()? };
    let skipped = head.next()?.parse().ok()?;
    let left = head.next().filter(|left| *left != "-").map(str::to_owned);
    let decided = lines.map(|line| {
        let mut words = line.split(' ');
        let mut next = || words.next()?.parse::<u64>().ok();
        Some(Decided { at_us: next()?, allowed: next()? == 1, took_ns: next()? })
    });
    Some(Brought { decided: decided.collect::<Option<_>>()?, told, skipped, left })
}
