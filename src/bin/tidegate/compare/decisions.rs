//! Decisions about the requests of a file, on one node in virtual time.

use std::fs::File;
use std::path::Path;
use std::time::Duration;

use tidegate::testing::{ManualClock, ScriptedStore};
use tidegate::{AsyncLimit, CheckError, Decision, Limit, Limiter, Mode, RedisStore, Rule};

use super::{CompareError, Options, config_error};
use crate::flags::InputError;
use crate::output;
use crate::store::{Store, namespace};

/// Arrivals may lie so far apart.
const SPAN_MAX: Duration = Duration::from_secs(10 * 366 * 24 * 3600);
/// With a zone, times begin with 1990.
const ZONES_FROM_US: u64 = 631_152_000_000_000;
/// And so far where a node syncs meanwhile: a day takes a minute.
const HYBRID_SPAN_MAX: Duration = Duration::from_secs(24 * 3600);
/// How far the time moves at once while a node syncs.
const STEP: Duration = Duration::from_millis(50);
/// The same in microseconds while its store is waited for.
const WAIT_STEP: Duration = Duration::from_micros(20);
/// Time that a node with leases has for its store before the first arrival, in microseconds.
const MEETING_US: u64 = 10_000_000;

/// A line of the file.
struct Arrival {
    /// As the file has it.
    t_us: u64,
    /// The time at which it is decided.
    at_us: u64,
    key: String,
    cost: u64,
}

pub(super) fn run(
    options: &Options,
    rule: Rule,
    (arrivals, decisions): (&Path, &Path),
) -> Result<(), CompareError> {
    let arrivals = read(arrivals)?;
    let mode = options.mode().unwrap_or(Mode::Local);
    if mode != Mode::Exact && options.store != Store::Memory {
        let reason = "only --mode exact asks a server: leave --store out";
        return Err(InputError::flag("--store", &options.store.name(), reason).into());
    }
    let span = arrivals.last().map_or(0, |last| last.at_us - arrivals[0].at_us);
    if mode == Mode::Hybrid && Duration::from_micros(span) > HYBRID_SPAN_MAX {
        let reason = "its arrivals span more than a day: use --mode local, or a part of them";
        return Err(
            InputError::flag("--mode", &options.mode.clone().unwrap_or_default(), reason).into()
        );
    }
    let most = rule.quota().burst_tokens();
    let is_uncounted = |one: &&Arrival| one.cost > tidegate::COST_MAX && one.cost <= most;
    if let (Mode::Hybrid, Some(one)) = (mode, arrivals.iter().find(is_uncounted)) {
        let reason =
            format!("one request can cost 16777215 tokens at most, and one costs {}", one.cost);
        let value = options.mode.clone().unwrap_or_default();
        return Err(InputError::Value { flag: "--mode", value, reason }.into());
    }
    let node = Node::new(rule, mode, &options.store, &arrivals, options.zone.is_some())?;
    if let (Some(zone), Some(first)) = (&options.zone, arrivals.first())
        && first.at_us < ZONES_FROM_US
    {
        let reason = "the first t_us is before 1990: with a zone it is microseconds since 1970";
        return Err(InputError::flag("--zone", zone, reason).into());
    }
    let mut text = csv::Writer::from_writer(Vec::new());
    let failed = |source| CompareError::File { path: decisions.to_owned(), source };
    text.write_record(["t_us", "key", "cost", "allowed", "delay_us"]).map_err(failed)?;
    for (line, arrival) in arrivals.iter().enumerate() {
        let (allowed, delay_us) = node.decide(arrival).ok_or(CompareError::Undecided(line + 1))?;
        let [t_us, cost, delay_us] = [arrival.t_us, arrival.cost, delay_us].map(|n| n.to_string());
        let allowed = if allowed { "1" } else { "0" };
        text.write_record([&t_us, &arrival.key, &cost, allowed, &delay_us]).map_err(failed)?;
    }
    let text = text.into_inner().map_err(|error| failed(error.into_error().into()))?;
    if decisions == Path::new("-") {
        output::write(&String::from_utf8_lossy(&text))?;
        return Ok(());
    }
    std::fs::write(decisions, text).map_err(|error| failed(error.into()))
}

/// Reads the requests.
fn read(path: &Path) -> Result<Vec<Arrival>, CompareError> {
    let failed = |source| CompareError::File { path: path.into(), source };
    let file = File::open(path).map_err(|error| failed(error.into()))?;
    let mut reader = csv::ReaderBuilder::new().has_headers(false).flexible(true).from_reader(file);
    let (mut arrivals, mut newest) = (Vec::<Arrival>::new(), 0);
    for record in reader.records() {
        let record = record.map_err(failed)?;
        let line = record.position().map_or(0, csv::Position::line);
        let field = |name: &'static str, value: &str, reason| CompareError::Field {
            path: path.into(),
            line,
            field: name,
            value: value.into(),
            reason,
        };
        let [t_us, key, cost] = [0, 1, 2].map(|index| record.get(index).unwrap_or_default());
        if record.len() != 3 {
            return Err(field("fields", &record.len().to_string(), "expected t_us,key,cost"));
        }
        if arrivals.is_empty() && newest == 0 && [t_us, key, cost] == ["t_us", "key", "cost"] {
            continue;
        }
        let number = |name, value: &str| {
            value.trim().parse::<u64>().map_err(|_| field(name, value, "expected a whole number"))
        };
        let (t_us, cost) = (number("t_us", t_us)?, number("cost", cost)?);
        newest = newest.max(t_us);
        let first = arrivals.first().map_or(t_us, |first| first.at_us);
        if Duration::from_micros(newest - first) > SPAN_MAX {
            return Err(field("t_us", &t_us.to_string(), "more than ten years after the first"));
        }
        arrivals.push(Arrival { t_us, at_us: newest, key: key.to_owned(), cost });
    }
    Ok(arrivals)
}

/// A node in virtual time, and its store.
struct Node {
    runtime: tokio::runtime::Runtime,
    clock: ManualClock,
    limiter: Limiter,
    limit: AsyncLimit,
    /// The origin of the node's clock, on the arrivals' one.
    origin_us: i128,
}

impl Node {
    fn new(
        rule: Rule,
        mode: Mode,
        store: &Store,
        arrivals: &[Arrival],
        has_zone: bool,
    ) -> Result<Self, CompareError> {
        let started = |error: &dyn ToString| CompareError::Started(error.to_string());
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|error| started(&error))?;
        let clock = ManualClock::new();
        let keys = arrivals.iter().map(|one| &one.key).collect::<std::collections::HashSet<_>>();
        let builder = Limiter::builder()
            .limit(Limit::new("compare", rule).mode(mode))
            // Twice: the last keys of a limit are for those who wait for a store.
            .max_keys((2 * keys.len()).max(128))
            .max_nodes(1)
            .clock(&clock);
        let builder = match (mode, store) {
            (Mode::Local, _) => builder,
            (_, Store::Memory) => builder.store(ScriptedStore::new(&clock)),
            (_, Store::Redis(address)) => {
                let store =
                    RedisStore::open(address)?.namespace(&namespace()).map_err(config_error)?;
                builder.store(store.clock(&clock))
            }
        };
        let entered = runtime.enter();
        let limiter = builder.build().map_err(config_error)?;
        drop(entered);
        let limit = limiter.async_limit("compare").map_err(config_error)?;
        // Windows begin at the origins of both clocks.
        let period_us = match rule {
            Rule::FixedWindow(_) | Rule::SlidingWindow(_) => {
                rule.quota().period().as_micros() as u64
            }
            _ => 1,
        };
        let first_us = arrivals.first().map_or(0, |first| first.at_us);
        // The node and its store have met.
        let meets_us = if mode == Mode::Hybrid { MEETING_US } else { 0 };
        // A zone's windows are where the file's times say.
        let begins_us = if has_zone {
            first_us
        } else {
            (clock.now().as_micros() + meets_us).div_ceil(period_us) * period_us
        };
        let origin_us = i128::from(first_us - first_us % period_us) - i128::from(begins_us);
        let origin_us = if has_zone { 0 } else { origin_us };
        let alone_us = begins_us.saturating_sub(meets_us + clock.now().as_micros());
        clock.advance(Duration::from_micros(alone_us));
        let node = Self { runtime, clock, limiter, limit, origin_us };
        node.pass(meets_us);
        Ok(node)
    }

    /// Whether a request goes on, and the microseconds that it waits. `None` if the store should have decided, and did not.
    fn decide(&self, arrival: &Arrival) -> Option<(bool, u64)> {
        let at_us = i128::from(arrival.at_us) - self.origin_us;
        self.pass((at_us - i128::from(self.clock.now().as_micros())).max(0) as u64);
        if arrival.cost == 0 {
            return Some((true, 0));
        }
        let Ok(cost) = u32::try_from(arrival.cost) else { return Some((false, 0)) };
        let decided = self.runtime.block_on(self.ask(&arrival.key, cost));
        let is_decided = |one: &Decision| self.limit.mode() != Mode::Exact || one.is_sure();
        match decided {
            Ok(one) => is_decided(&one).then(|| (one.is_allowed(), one.delay().as_micros() as u64)),
            // It can never fit.
            Err(_) => Some((false, 0)),
        }
    }

    /// Asks, and lets a little time pass while a node that syncs waits for its store.
    async fn ask(&self, key: &str, cost: u32) -> Result<Decision, CheckError> {
        let ask = async {
            match self.limit.rule() {
                Rule::LeakyBucket(_) => self.limit.schedule_n(key, cost).await,
                _ => self.limit.check_sure_n(key, cost).await,
            }
        };
        let mut decision = std::pin::pin!(ask);
        loop {
            tokio::select! {
                biased;
                decision = &mut decision => return decision,
                () = self.limiter.settle(), if self.limit.mode() == Mode::Hybrid => {
                    self.clock.advance(WAIT_STEP);
                }
            }
        }
    }

    /// Lets time pass. A node that syncs does so meanwhile.
    fn pass(&self, mut us: u64) {
        if self.limit.mode() == Mode::Hybrid {
            while us > 0 {
                let step = Duration::from_micros(us).min(STEP);
                self.clock.advance(step);
                self.runtime.block_on(self.limiter.settle());
                us -= step.as_micros() as u64;
            }
        }
        self.clock.advance(Duration::from_micros(us));
    }
}
