//! What is odd about a configuration, in words. Nothing here is an error.

use std::time::Duration;

use tidegate::sim::{Algorithm, Policy, Setup};
use tidegate::{Incidents, bound};

use crate::flags::{LimitSpec, LoadFlags};
use crate::output;
use crate::values::Part;

/// Credit of all nodes, as a part of the burst, from which it is worth a word.
const MUCH_CREDIT: Part = Part(0.2);

/// Writes what is odd to standard error, a line each.
pub(crate) fn show(flags: &LoadFlags, policy: Policy, rtt: Option<Duration>) {
    for oddity in oddities(flags, policy, rtt) {
        output::note(&format!("note: {oddity}"));
    }
}

fn oddities(flags: &LoadFlags, policy: Policy, rtt: Option<Duration>) -> Vec<String> {
    let limit = flags.limit();
    let nodes = flags.cluster.nodes;
    // Write-behind syncs each interval, and divides no tokens among nodes.
    let has_leases = policy != Policy::WriteBehind;
    [
        much_credit(&limit, nodes).filter(|_| policy == Policy::Default),
        few_tokens(&limit, nodes).filter(|_| has_leases),
        idle_interval(&limit).filter(|_| has_leases),
        long_way(&limit, rtt),
        limit_out_of_reach(flags),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// A credit is spent before the store is asked: on each node.
fn much_credit(limit: &LimitSpec, nodes: u16) -> Option<String> {
    if limit.accuracy.is_some() {
        return None;
    }
    let credit = bound(&limit.limit(), nodes.into(), &Incidents::default());
    let part = Part(credit / limit.burst.max(1) as f64);
    (credit.is_finite() && part >= MUCH_CREDIT).then(|| {
        format!(
            "the credit of {nodes} nodes is {credit:.0} tokens, {:.0}% of the burst: so much may be \
             spent before the store is asked",
            part.percent()
        )
    })
}

/// The burst of a leaky bucket is its queue.
fn few_tokens(limit: &LimitSpec, nodes: u16) -> Option<String> {
    if limit.algorithm == Algorithm::LeakyBucket {
        return None;
    }
    let burst = limit.burst;
    (burst < u64::from(nodes)).then(|| {
        format!(
            "a burst of {burst} is less than a token for each of {nodes} nodes: expect denials \
             while tokens are there"
        )
    })
}

fn idle_interval(limit: &LimitSpec) -> Option<String> {
    if limit.algorithm == Algorithm::LeakyBucket {
        return None;
    }
    let tick_s = Setup::new(limit.limit(), 1, 0).tick_s().ok()?;
    let interval_s = limit.interval_us as f64 / 1e6;
    (limit.accuracy.is_none() && tick_s < interval_s).then(|| {
        format!(
            "a busy key is synced each {} ms and not each {} ms: this limit's burst fills fast",
            tick_s * 1e3,
            interval_s * 1e3
        )
    })
}

fn long_way(limit: &LimitSpec, rtt: Option<Duration>) -> Option<String> {
    let rtt = rtt?;
    let interval = Duration::from_micros(limit.interval_us);
    (limit.accuracy.is_none() && rtt > interval).then(|| {
        format!("a round trip of {rtt:?} is longer than the interval: the next sync waits for it")
    })
}

/// A load above the rate that ends before the burst is spent.
fn limit_out_of_reach(flags: &LoadFlags) -> Option<String> {
    let load = flags.load.unwrap_or(flags.scenario.load());
    if flags.replay.trace.is_some() || load <= 1.0 {
        return None;
    }
    let spent_after_s =
        flags.cluster.burst as f64 / (flags.cluster.rate.per_second() * (load - 1.0));
    let seconds = flags.seconds();
    (spent_after_s > seconds).then(|| {
        format!(
            "this load takes {spent_after_s:.1} s to spend the burst, and the run lasts {seconds} s: the \
             limit is not reached"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flags::parsed;

    #[test]
    fn each_oddity_is_named_and_the_defaults_have_none() {
        let said = |flags: &str, rtt_ms: Option<u64>| {
            let flags = parsed::<LoadFlags>(flags).unwrap_or_else(|error| panic!("{error}"));
            oddities(&flags, Policy::Default, rtt_ms.map(Duration::from_millis)).join("\n")
        };
        assert_eq!(said("", Some(1)), "");
        let cases = [
            (
                "--nodes 20 --burst 100 --credit 2",
                None,
                "the credit of 20 nodes is 40 tokens, 40% of",
            ),
            ("--nodes 20 --burst 10 --rate 10", None, "a burst of 10 is less than a token"),
            ("--rate 10000 --burst 100 --interval 1s", None, "and not each 1000 ms"),
            ("", Some(80), "a round trip of 80ms is longer than the interval"),
            ("--seconds 0.1", None, "takes 0.5 s to spend the burst, and the run lasts 0.1 s"),
        ];
        for (flags, rtt_ms, expected) in cases {
            let said = said(flags, rtt_ms);
            assert!(said.contains(expected), "{flags}: {said}");
        }
    }

    #[test]
    fn each_policy_and_algorithm_has_the_notes_that_are_true_of_it() {
        let said = |flags: &str, policy: Policy| {
            let flags = parsed::<LoadFlags>(flags).unwrap_or_else(|error| panic!("{error}"));
            oddities(&flags, policy, None).join("\n")
        };
        let [default, strict, write_behind] = Policy::ALL;
        let many_nodes = "--nodes 20 --burst 100 --rate 100";
        assert!(said(many_nodes, default).contains("the credit of 20 nodes is 40 tokens, 40%"));
        assert_eq!(said(many_nodes, strict), "");
        assert_eq!(said(many_nodes, write_behind), "");
        let small_burst = "--nodes 20 --burst 10 --rate 10 --credit 0";
        assert!(said(small_burst, default).contains("a burst of 10 is less than a token"));
        assert_eq!(said(small_burst, strict), said(small_burst, default));
        assert_eq!(said(small_burst, write_behind), "");
        assert_eq!(said(&format!("{small_burst} --algorithm leaky-bucket"), default), "");
        let long_interval = "--rate 10000 --burst 100 --interval 1s";
        assert!(said(long_interval, strict).contains("and not each 1000 ms"));
        assert_eq!(said(long_interval, write_behind), "");
    }
}
