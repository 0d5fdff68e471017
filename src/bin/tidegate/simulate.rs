//! `tidegate simulate`: the same nodes in virtual time, over a network and a store that fail to
//! order. The same flags print the same bytes.

use std::time::Duration;

use clap::Args;
use serde::Serialize;
use tidegate::ConfigError;
use tidegate::sim::faults::{Planned, last_fault_seconds, of_scenario};
use tidegate::sim::figures::Figures;
use tidegate::sim::workload::Workload;
use tidegate::sim::{self, Form, Network, Policy, Setup, Traffic};

use crate::advice;
use crate::flags::{
    ClusterSpec, InputError, LoadFlags, SEEDS_MAX, form_parser, policy_help, policy_parser,
    seed_range,
};
use crate::output::{self, OutputError};
use crate::summary::{self, Reported, Summary, pct, print, tokens};
use crate::trace::Trace;
use crate::values::{Part, duration};

mod faults;

/// What can stop a simulation.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SimulateError {
    #[error(transparent)]
    Input(#[from] InputError),
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    Output(#[from] OutputError),
}

const EXAMPLES: &str = "\
Examples:
  tidegate simulate --scenario outage
  tidegate simulate --nodes 20 --rate 100/s --burst 100 --faults hang@5s+3s,die@2s/3
  tidegate simulate --scenario herd --loss 1% --seeds 5 --seconds 8
  tidegate simulate --algorithm sliding-window --rate 100/s --burst 100 --seconds 10";

/// Plays nodes, network and store in virtual time, faults included, from a seed.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Options {
    #[command(flatten)]
    load: LoadFlags,
    /// Round trip between node and store, such as 1ms [default: the scenario's]
    #[arg(long, value_parser = duration, allow_hyphen_values = true)]
    rtt: Option<Duration>,
    /// Part of requests, and of replies, that are lost, such as 1% or 0.01 [default: the scenario's]
    #[arg(long, allow_hyphen_values = true)]
    loss: Option<Part>,
    /// What goes wrong besides the scenario's own: a list of <kind>@<time>[/<node>][+<duration>],
    /// such as hang@5s+3s,die@2s/3
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = faults::parse,
          long_help = faults_help())]
    faults: Vec<Planned>,
    /// What nodes spend from: default, strict or, to compare with, write-behind
    #[arg(long, default_value = Policy::Default.name(), long_help = policy_help(),
          value_parser = policy_parser(), hide_possible_values = true)]
    policy: Policy,
    /// How requests are decided: check (at once) or async (after a round trip where unsure)
    #[arg(long, default_value = Form::Check.name(), value_parser = form_parser(),
          hide_possible_values = true)]
    form: Form,
    /// Run so many seeds, from --seed on
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=SEEDS_MAX))]
    seeds: u64,
}

fn faults_help() -> String {
    format!(
        "What goes wrong besides the scenario's own: a comma-separated list of \
         <kind>@<time>[/<node>][+<duration>], such as hang@5s+3s,die@2s/3. Times count from the \
         load's beginning, nodes and keys from 0. Kinds:\n  {}",
        faults::KINDS_HELP
    )
}

impl Options {
    /// Refuses what cannot be simulated.
    fn validate(&self) -> Result<(), InputError> {
        self.load.validate()?;
        if let (Policy::Strict, Some(credit @ 1..)) = (self.policy, self.load.credit) {
            return Err(InputError::flag("--credit", &credit, "must be 0 with --policy strict"));
        }
        self.cluster().validate()?;
        seed_range(self.load.seed, self.seeds)?;
        let (seconds, least) = (self.load.seconds(), last_fault_seconds(self.load.scenario));
        if self.load.replay.trace.is_none() && seconds <= least {
            let reason =
                format!("the last fault of {} is over at {least} s", self.load.scenario.name());
            return Err(InputError::Value {
                flag: "--seconds",
                value: seconds.to_string(),
                reason,
            });
        }
        faults::validate(&self.faults, self.load.cluster.nodes)
    }

    fn cluster(&self) -> ClusterSpec {
        ClusterSpec {
            limit: self.load.limit(),
            nodes: self.load.cluster.nodes,
            network: self.network(),
            policy: self.policy,
            form: self.form,
        }
    }

    /// The scenario's network, and what the flags put in its place.
    fn network(&self) -> Network {
        let own = Network::of_scenario(self.load.scenario)
            .unwrap_or_else(|| Network::new(Duration::from_millis(1)));
        Network {
            request_loss: self.loss.map_or(own.request_loss, |Part(part)| part),
            reply_loss: self.loss.map_or(own.reply_loss, |Part(part)| part),
            ..self.rtt.map_or(own, Network::new)
        }
    }

    fn workload(&self, seed: u64) -> Workload {
        Workload { seed, ..self.load.workload() }
    }
}

/// What came of one seed.
#[derive(Debug, Serialize)]
struct Report {
    #[serde(flatten)]
    summary: Summary,
    seed: u64,
    policy: Policy,
    form: Form,
    /// The shortest, where nodes have round trips of their own.
    rtt_ms: f64,
    /// Those of the nodes in turn, if they are not the same.
    #[serde(skip_serializing_if = "Option::is_none")]
    rtt_by_node_ms: Option<[f64; 4]>,
    store_calls_per_second: f64,
    keys_synced_per_second: f64,
    keys_synced_per_tick_and_node: f64,
    /// None where nothing bounds it.
    excess_bound_tokens: Option<f64>,
    store_busy_pct: f64,
    store_useful_pct: f64,
    leases_alive_pct: f64,
    invented_keys_synced: u64,
}

impl Reported for Report {
    fn headline(&self) -> String {
        self.summary.headline()
    }

    fn lines(&self) -> Vec<summary::Line> {
        let bound = self.excess_bound_tokens.map_or("none".to_owned(), tokens);
        let busy =
            format!("{} busy, {} useful", pct(self.store_busy_pct), pct(self.store_useful_pct));
        let rtt = match self.rtt_by_node_ms {
            Some([one, two, three, four]) => {
                format!("{one}, {two}, {three} or {four} ms, by node in turn")
            }
            None => format!("{} ms", self.rtt_ms),
        };
        let mut lines = self.summary.lines();
        lines.push(("bound of the excess", bound));
        lines.push((
            "played with",
            format!(
                "seed {}, policy {}, form {}, round trip {rtt}",
                self.seed,
                self.policy.name(),
                self.form.name()
            ),
        ));
        // A store without a service time is never busy.
        lines.extend((self.store_busy_pct > 0.0).then_some(("time of the store", busy)));
        lines
    }
}

/// What a run tells beside its figures.
struct Told {
    traffic: Traffic,
    tick_s: f64,
    excess_bound_tokens: f64,
}

impl Report {
    fn new(options: &Options, setup: &Setup, summary: Summary, outcome: &Told) -> Self {
        let Told { traffic, tick_s, excess_bound_tokens } = outcome;
        let [store_busy_pct, store_useful_pct] = traffic.store_busy_pct(summary.seconds.max(1.0));
        let per_second = |count: u64| count as f64 / summary.seconds.max(1.0);
        Self {
            store_calls_per_second: per_second(traffic.store_calls),
            keys_synced_per_second: per_second(traffic.keys_synced),
            keys_synced_per_tick_and_node: traffic.keys_synced_per_tick(*tick_s),
            excess_bound_tokens: excess_bound_tokens.is_finite().then_some(*excess_bound_tokens),
            store_busy_pct,
            store_useful_pct,
            leases_alive_pct: traffic.leases_alive_pct(),
            invented_keys_synced: traffic.invented_synced,
            summary,
            seed: setup.seed,
            policy: options.policy,
            form: options.form,
            rtt_ms: millis(setup.network.rtt),
            rtt_by_node_ms: setup.network.rtt_by_node.map(|rtts| rtts.map(millis)),
        }
    }
}

pub(crate) fn run(options: &Options) -> Result<(), SimulateError> {
    options.validate()?;
    let trace = options.load.replay.read()?;
    advice::show(&options.load, options.policy, Some(options.network().rtt));
    let mut worst: Option<Line> = None;
    for seed in seed_range(options.load.seed, options.seeds)? {
        let report = simulate(options, trace.as_ref(), seed)?;
        if options.load.json || options.seeds == 1 {
            print(&report, options.load.json, options.load.verbose)?;
            continue;
        }
        let line = Line::of(&report.summary.figures);
        output::write(&format!("seed {seed:<8} {line}\n"))?;
        worst = Some(worst.map_or(line, |worst| worst.worse(line)));
    }
    if let Some(worst) = worst {
        output::write(&format!("the worst     {worst}\n"))?;
    }
    Ok(())
}

fn simulate(options: &Options, trace: Option<&Trace>, seed: u64) -> Result<Report, SimulateError> {
    let workload = options.workload(seed);
    let (arrivals, mut planned, seconds) = match trace {
        Some(trace) => {
            let (arrivals, seconds) =
                options.load.replay.arrivals(trace, options.load.cluster.nodes, seed);
            (arrivals, Vec::new(), seconds)
        }
        None => (workload.arrivals(), of_scenario(&workload), workload.seconds),
    };
    faults::validate_times(&options.faults, seconds)?;
    planned.extend(&options.faults);
    let (setup, network) = (options.cluster().setup(seed), options.network());
    let setup = match trace {
        Some(_) => setup,
        None => Setup { network, ..setup.of_scenario(workload.scenario) },
    };
    let tick_s = setup.tick_s()?;
    let excess_bound_tokens = options.policy.excess_bound(&setup, &planned);
    let outcome = options.policy.run(&setup, &arrivals, &planned, seconds);
    let outcome = outcome.map_err(InputError::of_config)?;
    let sim::Outcome { figures, traffic } = outcome;
    let summary = Summary::new(&options.load, "simulated", seconds, &traffic, figures, trace);
    Ok(Report::new(options, &setup, summary, &Told { traffic, tick_s, excess_bound_tokens }))
}

fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// What one line a seed has room for, in %.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Line {
    admitted_vs_ideal: f64,
    excess_of_burst: f64,
    wrong_denials: f64,
    unsure: f64,
    waited: f64,
}

impl Line {
    fn of(figures: &Figures) -> Self {
        Self {
            admitted_vs_ideal: figures.admitted_vs_ideal_pct,
            excess_of_burst: figures.excess_pct_of_burst,
            wrong_denials: figures.wrong_denials_pct,
            unsure: figures.unsure_pct,
            waited: figures.waited_pct,
        }
    }

    /// The worse of each figure. Admitting too little counts here; too much is excess.
    fn worse(self, other: Self) -> Self {
        Self {
            admitted_vs_ideal: self.admitted_vs_ideal.min(other.admitted_vs_ideal),
            excess_of_burst: self.excess_of_burst.max(other.excess_of_burst),
            wrong_denials: self.wrong_denials.max(other.wrong_denials),
            unsure: self.unsure.max(other.unsure),
            waited: self.waited.max(other.waited),
        }
    }
}

impl std::fmt::Display for Line {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "admitted {:>7.3}% of ideal  excess {:>7.3}% of burst  wrong denials {:>6.3}%  \
             unsure {:>6.3}%  waited {:>6.3}%",
            self.admitted_vs_ideal,
            self.excess_of_burst,
            self.wrong_denials,
            self.unsure,
            self.waited,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flags::parsed;
    use tidegate::sim::workload::Scenario;

    fn options(flags: &str) -> Options {
        parsed(flags).unwrap_or_else(|error| panic!("{error}"))
    }

    #[test]
    fn without_flags_of_its_own_a_scenario_is_the_one_that_the_library_plays() {
        for scenario in Scenario::ALL {
            let name = scenario.name();
            // Invented keys are 40000 a second.
            let faults = last_fault_seconds(scenario);
            let seconds = if scenario == Scenario::Junk { 0.5 } else { 6.0_f64.max(faults + 1.0) };
            let flags = format!("--scenario {name} --seconds {seconds} --rate 50 --keys 2");
            let options = options(&flags);
            let workload = options.workload(3);
            let setup = Setup::new(options.load.limit().limit(), options.load.cluster.nodes, 3);
            let played = sim::play(&setup, &workload).unwrap();
            let report = simulate(&options, None, 3).unwrap();
            assert_eq!(report.summary.figures, played.figures, "{name}");
        }
    }

    #[test]
    fn the_same_flags_give_the_same_bytes() {
        let flags = "--seconds 4 --loss 0.05 --faults die@1s/1,join@2s,hang@1s+1s --form async";
        let print = || {
            let report = simulate(&options(flags), None, 5).unwrap();
            serde_json::to_string(&report).unwrap()
        };
        assert_eq!(print(), print());
    }

    #[test]
    fn what_cannot_be_simulated_is_refused_by_flag() {
        let cases = [
            ("--policy strict --credit 1", "--credit"),
            ("--rtt 61s", "--rtt"),
            ("--rate 0", "--rate"),
            ("--burst 0", "--burst"),
            ("--interval 1ms", "--interval"),
            ("--seconds 0", "--seconds"),
            ("--keys 0", "--keys"),
            ("--load=-1", "--load"),
            ("--policy write-behind --form async", "--form"),
            ("--seed 18446744073709551615 --seeds 2", "--seed"),
            ("--faults die@1s/4", "--faults"),
            ("--scenario old_snapshot --seconds 12", "--seconds"),
            ("--scenario outage --seconds 6", "--seconds"),
        ];
        for (flags, expected) in cases {
            let refused = options(flags).validate();
            let Err(InputError::Flag { flag, .. } | InputError::Value { flag, .. }) = refused
            else {
                panic!("{flags}: {refused:?}")
            };
            assert_eq!(flag, expected);
        }
        assert!(options("--policy strict --credit 0").validate().is_ok());
        let refused = simulate(&options("--policy write-behind --faults forget@1s"), None, 1);
        let refused = refused.unwrap_err().to_string();
        let expected = "invalid value 'StoreForgets' for '--faults': ";
        assert!(refused.starts_with(expected), "{refused}");
    }

    #[test]
    fn bound_is_none_where_many_messages_are_lost_and_of_a_policy_that_is_not_the_products() {
        let bound = |flags: &str| {
            let flags = format!("--rate 20 --burst 20 --seconds 4 {flags}");
            simulate(&options(&flags), None, 2).unwrap().excess_bound_tokens
        };
        assert!(bound("").is_some() && bound("--loss 1%").is_some());
        assert_eq!((bound("--loss 20%"), bound("--policy write-behind")), (None, None));
    }

    #[test]
    fn fault_after_the_end_is_refused_and_a_scenario_lasts_until_its_last_fault_is_over() {
        let late = options("--seconds 3 --faults forget@2s,hang@3s+1s");
        let error = simulate(&late, None, 1).unwrap_err().to_string();
        assert_eq!(error, "invalid value 'at 3 s' for '--faults': the run is over after 3 s");
        let lasts = ["--scenario old_snapshot", "", "--seconds 3"];
        let seconds = lasts.map(|flags| options(flags).load.seconds() as u64);
        assert_eq!(seconds, [17, 10, 3]);
    }

    #[test]
    fn round_trips_of_far_nodes_are_shown_by_node() {
        let far = simulate(&options("--scenario far_under --seconds 1"), None, 1).unwrap();
        let text = format!("{:?}", far.lines());
        assert!(text.contains("round trip 1, 5, 20 or 80 ms, by node in turn"), "{text}");
    }

    #[test]
    fn the_flags_stand_above_the_scenarios_network() {
        let network = options("--scenario slow_store --rtt 5ms").network();
        assert_eq!((network.rtt, network.request_loss), (Duration::from_millis(5), 0.0));
        assert!((network.reply_loss - 0.01).abs() < 1e-9);
        let network = options("--scenario slow_store --loss 0").network();
        assert_eq!(network, Network::new(Duration::from_millis(20)));
    }
}
