//! The requests that all ways are asked.

use std::time::Duration;

use clap::{Args, ValueEnum};
use serde::Serialize;
use tidegate::Quota;

use crate::flags::InputError;
use crate::values::duration;

/// A way is asked no more than this: requests are judged one by one.
const REQUESTS_MAX: f64 = 200_000.0;
const SEED: u64 = 7;

/// Requests by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Case {
    /// Random requests of each key on random nodes, --load times its quota
    Steady,
    /// A period's tokens in the last hundredth of a period, and as many in the first of the next
    Edge,
    /// 2 nodes, 500/s, 800 requests a second of one key, and an interval of 200 ms: the figures that APISIX's delayed sync
    /// was reported with were 590, later 438 a second
    Apisix,
}

/// What the nodes are asked.
#[derive(Args)]
pub(crate) struct Load {
    /// Requests by name [default: steady]
    #[arg(long, value_enum, conflicts_with = "arrivals")]
    pub(super) case: Option<Case>,
    /// Nodes that share each limit [default: 4]
    #[arg(long, conflicts_with = "arrivals")]
    nodes: Option<usize>,
    /// Keys [default: 4; edge and apisix: 1]
    #[arg(long, conflicts_with = "arrivals")]
    keys: Option<usize>,
    /// Requests, in times of a key's quota; not with --case edge [default: 1.5]
    #[arg(long = "load", value_name = "TIMES", conflicts_with = "arrivals")]
    times_quota: Option<f64>,
    /// How long each way is asked [default: 4s]
    #[arg(long, value_parser = duration, conflicts_with = "arrivals")]
    time: Option<Duration>,
    /// The sync interval, of write-behind too [default: 50ms]
    #[arg(long, value_parser = duration, conflicts_with = "arrivals")]
    interval: Option<Duration>,
}

/// A request, in microseconds from the beginning of a period.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request {
    pub(super) at_us: u64,
    pub(super) key: usize,
    pub(super) node: usize,
}

/// All of them.
pub(crate) struct Plan {
    pub(super) case: Case,
    pub(super) nodes: usize,
    pub(super) keys: usize,
    pub(super) interval: Duration,
    pub(super) period_us: u64,
    pub(super) time_us: u64,
    pub(super) requests: Vec<Request>,
}

impl Load {
    pub(super) fn plan(&self, quota: Quota) -> Result<Plan, InputError> {
        let case = self.case.unwrap_or(Case::Steady);
        let is_apisix = case == Case::Apisix;
        let nodes = self.nodes.unwrap_or(if is_apisix { 2 } else { 4 });
        let keys = self.keys.unwrap_or(if case == Case::Steady { 4 } else { 1 });
        let load = self.times_quota.unwrap_or(if is_apisix { 1.6 } else { 1.5 });
        let interval = Duration::from_millis(if is_apisix { 200 } else { 50 });
        let interval = self.interval.unwrap_or(interval);
        let time = self.time.unwrap_or(Duration::from_secs(4));
        let small = |flag, value: usize| {
            let is_small = (1..=1000).contains(&value);
            if is_small { Ok(()) } else { Err(InputError::flag(flag, &value, "must be 1 to 1000")) }
        };
        small("--nodes", nodes)?;
        small("--keys", keys)?;
        if !(load > 0.0 && load <= 1000.0) {
            return Err(InputError::flag("--load", &load, "must be above 0, and at most 1000"));
        }
        let period_us = quota.period().as_micros() as u64;
        let time_us = time.as_micros() as u64;
        if time_us < period_us || time > Duration::from_secs(600) {
            let value = format!("{time:?}");
            return Err(InputError::flag(
                "--time",
                &value,
                "must be a period at least, and 10 minutes at most",
            ));
        }
        let plan = Plan { case, nodes, keys, interval, period_us, time_us, requests: Vec::new() };
        let periods = time_us as f64 / period_us as f64;
        // Around every second edge, on both sides.
        let load_of_case = if case == Case::Edge { 1.0 } else { load };
        let all = quota.tokens() as f64 * load_of_case * keys as f64 * (periods + 1.0);
        if all > REQUESTS_MAX {
            let value = format!("{:?} in {time:?}", quota.tokens());
            return Err(InputError::flag(
                "--quota",
                &value,
                "more than 200000 requests: ask for less, or for a shorter time",
            ));
        }
        let mut random = fastrand::Rng::with_seed(SEED);
        let mut requests = match case {
            Case::Edge => plan.at_edges(quota.tokens(), &mut random),
            Case::Steady | Case::Apisix => plan.steady(quota.tokens() as f64 * load, &mut random),
        };
        requests.sort_by_key(|request| request.at_us);
        Ok(Plan { requests, ..plan })
    }
}

impl Plan {
    /// Random times, so many of each key in a period.
    fn steady(&self, per_period: f64, random: &mut fastrand::Rng) -> Vec<Request> {
        let mut requests = Vec::new();
        for key in 0..self.keys {
            let mut at = 0.0;
            loop {
                at -= (1.0 - random.f64()).ln() * self.period_us as f64 / per_period;
                if at >= self.time_us as f64 {
                    break;
                }
                requests.push(Request { at_us: at as u64, key, node: random.usize(..self.nodes) });
            }
        }
        requests
    }

    /// A period's tokens before each second edge, and after it.
    fn at_edges(&self, tokens: u64, random: &mut fastrand::Rng) -> Vec<Request> {
        let (near_us, mut requests) = ((self.period_us / 100).max(1), Vec::new());
        for edge in (1..=self.time_us / self.period_us).step_by(2) {
            let edge_us = edge * self.period_us;
            for key in 0..self.keys {
                for _ in 0..tokens {
                    for from_us in [edge_us - near_us, edge_us] {
                        let at_us = from_us + random.u64(..near_us);
                        requests.push(Request { at_us, key, node: random.usize(..self.nodes) });
                    }
                }
            }
        }
        requests
    }
}
