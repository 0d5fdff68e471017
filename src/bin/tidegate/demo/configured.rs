//! The limits of a configuration file, as a demo runs them: one after the other.

use std::path::Path;
use std::time::Duration;

use tidegate::sim::Algorithm;
use tidegate::{Limit, Limiter, MemoryStore, Mode, Rule, Switch, SyncPolicy};

use super::DemoError;
use super::options::Options;
use crate::check_config;
use crate::flags::InputError;
use crate::output;
use crate::values::{Part, Rate};

/// The options of a run for each limit of the file that a demo can show. The others are named on standard error.
pub(super) fn runs(options: &Options, file: &Path) -> Result<Vec<Options>, DemoError> {
    let config = check_config::load(file)?;
    let mut runs = Vec::new();
    for limit in config.limits() {
        match run_of(options, limit)? {
            Ok(run) => runs.push(run),
            Err(reason) => {
                output::note(&format!("note: limit {:?} is not shown: {reason}", limit.name()));
            }
        }
    }
    if runs.is_empty() {
        let reason = "it has no limit that a demo can show";
        return Err(InputError::flag("--config", &file.display(), reason).into());
    }
    Ok(runs)
}

/// The options of a run, or why a demo cannot show the limit.
fn run_of(options: &Options, limit: &Limit) -> Result<Result<Options, &'static str>, DemoError> {
    let limiter = Limiter::builder().limit(limit.clone()).store(MemoryStore::new()).build()?;
    let (mode, quota) = (limiter.async_limit(limit.name())?.mode(), limit.quota());
    let Ok(algorithm) = limit.rule().algorithm().parse::<Algorithm>() else {
        return Ok(Err("its algorithm is not one that nodes share"));
    };
    Ok(match mode {
        Mode::Exact => {
            Err("the store decides each request, and a demo asks nodes, which do not wait")
        }
        Mode::Local => Err("each node is alone, so that there is no limit of all to compare with"),
        _ if is_of_a_zone(limit.rule()) => Err("the windows of its zone are longer than a demo"),
        _ if quota.period().subsec_nanos() > 0 => Err("its period is not of whole seconds"),
        _ => {
            let mut run = options.clone();
            let flags = &mut run.load;
            (flags.algorithm, flags.cluster.rate) = (algorithm, Rate::of_quota(&quota));
            flags.cluster.burst = Algorithm::burst_of(limit.rule());
            flags.credit = limit.fixed_credit();
            match limit.sync_policy() {
                SyncPolicy::Interval(interval) => flags.interval = interval,
                // Of a leaky bucket it says nothing.
                SyncPolicy::Accuracy { excess, .. } if algorithm != Algorithm::LeakyBucket => {
                    flags.accuracy = Some(Part(excess));
                }
                _ => {}
            }
            // The ideal limit beside it is on, and blocks no key.
            run.limit = Some(limit.clone().switch(Switch::On).block_for(Duration::ZERO));
            run.validate()?;
            Ok(run)
        }
    })
}

fn is_of_a_zone(rule: Rule) -> bool {
    match rule {
        Rule::FixedWindow(window) => {
            window != tidegate::FixedWindow::new(window.tokens(), window.period())
        }
        _ => false,
    }
}
