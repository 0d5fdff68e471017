//! Faults as they are written on the command line: `<kind>@<time>[/<node>][+<duration>]`.

use std::time::Duration;

use tidegate::sim::faults::{Fault, Planned};
use tidegate::sim::workload::RUN_SECONDS_MAX;

use crate::flags::InputError;
use crate::values::{ValueError, duration};

/// The most faults of one run: each node that joins is held in memory.
pub(super) const FAULTS_MAX: usize = 1_000;

/// The kinds, in the order in which help and errors name them.
pub(super) const KINDS: &str = "die, replace, join, pause, cut, clock, clock-stall, hang, gone, \
                                stall, forget, lag, snapshot, restore, evict, store-clock";

/// What each kind does, for the help.
pub(super) const KINDS_HELP: &str = "\
  die@2s/3            node 3 dies; replace@2s/3: a new node takes its place
  join@3s             one node more
  pause@2s/1+500ms    the whole process of node 1 is frozen; its clock goes on
  cut@2s/1+3s         nothing passes between node 1 and the store
  clock@2s/1+1s       the clock of node 1 jumps ahead
  clock-stall@2s/1+20ms  the cached clock of node 1 stands still
  hang@5s+3s          the store executes nothing, then everything at once, and answers nobody
  gone@5s+3s          nobody reaches the store: what is sent to it is lost
  stall@5s+2s         the store serves nothing, then everything in the order of arrival
  forget@7s           the store restarts empty
  lag@7s+200ms        a replica takes over that is behind
  snapshot@2s         the store saves its state; restore@4s: it comes back with the last one saved
  evict@3s/0          the store loses the record of key 0
  store-clock@3s-60s  the store's clock steps back; +60s: ahead";

/// A fault that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum FaultError {
    #[error("{0:?} has no time: write <kind>@<time>[/<node>][+<duration>], such as die@2s/3")]
    NoTime(String),
    #[error("no fault is called {0:?}; there are {KINDS}")]
    Kind(String),
    #[error("{0}")]
    Time(#[from] ValueError),
    #[error("{0:?} is longer than a week")]
    TooLong(String),
    #[error("{0:?} is no node: write its number, from 0")]
    Node(String),
    #[error("{0} befalls one node: write its number, from 0, after the time, such as {0}@2s/1")]
    NodeMissing(String),
    #[error("{0} befalls no single node: leave /<node> out")]
    NodeGiven(String),
    #[error("{0:?} is no key: write its number, from 0")]
    Key(String),
    #[error("{0} befalls one key: write its number, from 0, after the time, such as {0}@2s/0")]
    KeyMissing(String),
    #[error("{0} needs to know how long: write it at the end, such as +500ms")]
    DurationMissing(String),
    #[error("{0} is over at once: leave +<duration> out")]
    DurationGiven(String),
    #[error("{0} cannot go backwards: write + before the duration")]
    Backwards(String),
}

/// The parts of one fault as they stand on the command line.
struct Parts<'a> {
    kind: &'a str,
    /// The number of a node, or of a key.
    place: Option<&'a str>,
    /// Below zero after a minus sign.
    by_us: Option<i64>,
}

impl Parts<'_> {
    fn kind(&self) -> String {
        self.kind.to_owned()
    }

    fn place(&self) -> Result<u16, FaultError> {
        let place = self.place.ok_or_else(|| FaultError::NodeMissing(self.kind()))?;
        place.parse().map_err(|_| FaultError::Node(place.to_owned()))
    }

    fn key(&self) -> Result<u32, FaultError> {
        let key = self.place.ok_or_else(|| FaultError::KeyMissing(self.kind()))?;
        key.parse().map_err(|_| FaultError::Key(key.to_owned()))
    }

    fn by_us(&self) -> Result<i64, FaultError> {
        self.by_us.ok_or_else(|| FaultError::DurationMissing(self.kind()))
    }

    fn duration_us(&self) -> Result<u64, FaultError> {
        u64::try_from(self.by_us()?).map_err(|_| FaultError::Backwards(self.kind()))
    }

    fn fault(&self) -> Result<Fault, FaultError> {
        let fault = match self.kind {
            "die" => Fault::NodeDies { place: self.place()? },
            "replace" => Fault::NodeReplaced { place: self.place()? },
            "join" => Fault::NodeJoins,
            "pause" => Fault::NodePauses { place: self.place()?, for_us: self.duration_us()? },
            "cut" => Fault::NodeCutOff { place: self.place()?, for_us: self.duration_us()? },
            "clock" => Fault::ClockJumps { place: self.place()?, by_us: self.duration_us()? },
            "clock-stall" => {
                Fault::ClockStalls { place: self.place()?, for_us: self.duration_us()? }
            }
            "hang" => Fault::StoreHangs { for_us: self.duration_us()? },
            "gone" => Fault::StoreGone { for_us: self.duration_us()? },
            "stall" => Fault::StoreStalls { for_us: self.duration_us()? },
            "forget" => Fault::StoreForgets,
            "lag" => Fault::StoreLags { by_us: self.duration_us()? },
            "snapshot" => Fault::StoreSaves,
            "restore" => Fault::StoreRestores,
            "evict" => Fault::RecordLost { key: self.key()? },
            "store-clock" => Fault::StoreClockSteps { by_us: self.by_us()? },
            _ => return Err(FaultError::Kind(self.kind())),
        };
        let of_a_key = matches!(fault, Fault::RecordLost { .. });
        if self.place.is_some() && place_of(fault).is_none() && !of_a_key {
            return Err(FaultError::NodeGiven(self.kind()));
        }
        if self.by_us.is_some() && is_over_at_once(fault) {
            return Err(FaultError::DurationGiven(self.kind()));
        }
        Ok(fault)
    }
}

const fn is_over_at_once(fault: Fault) -> bool {
    matches!(
        fault,
        Fault::NodeDies { .. }
            | Fault::NodeReplaced { .. }
            | Fault::NodeJoins
            | Fault::StoreForgets
            | Fault::StoreSaves
            | Fault::StoreRestores
            | Fault::RecordLost { .. }
    )
}

/// Reads one fault.
pub(super) fn parse(text: &str) -> Result<Planned, FaultError> {
    let (kind, rest) = text.split_once('@').ok_or_else(|| FaultError::NoTime(text.to_owned()))?;
    let (rest, by) = match rest.find(['+', '-']) {
        Some(at) => (&rest[..at], Some(rest.split_at(at).1)),
        None => (rest, None),
    };
    let (time, place) = rest.split_once('/').map_or((rest, None), |(time, on)| (time, Some(on)));
    let by_us = by.map(signed_us).transpose()?;
    let at_us = bounded_us(time)?;
    let fault = Parts { kind, place, by_us }.fault()?;
    Ok(Planned { at_us, fault })
}

/// A duration behind its sign.
fn signed_us(text: &str) -> Result<i64, FaultError> {
    let (sign, text) = text.split_at(1);
    let micros = bounded_us(text)? as i64;
    Ok(if sign == "-" { -micros } else { micros })
}

/// The simulator adds times up in microseconds: what is no longer than a run cannot overflow.
fn bounded_us(text: &str) -> Result<u64, FaultError> {
    let parsed = duration(text)?;
    if parsed > Duration::from_secs(RUN_SECONDS_MAX as u64) {
        return Err(FaultError::TooLong(text.to_owned()));
    }
    Ok(parsed.as_micros() as u64)
}

/// The node that a fault befalls, if it is a node's.
fn place_of(fault: Fault) -> Option<u16> {
    match fault {
        Fault::NodeDies { place }
        | Fault::NodeReplaced { place }
        | Fault::NodePauses { place, .. }
        | Fault::NodeCutOff { place, .. }
        | Fault::ClockJumps { place, .. }
        | Fault::ClockStalls { place, .. } => Some(place),
        _ => None,
    }
}

/// Refuses more faults than a run can hold, those of nodes that are not there at their time, and a
/// return to a state that was never saved.
pub(super) fn validate(planned: &[Planned], nodes: u16) -> Result<(), InputError> {
    if planned.len() > FAULTS_MAX {
        return Err(InputError::flag("--faults", &planned.len(), "no more than 1000 in one run"));
    }
    let mut by_time = planned.to_vec();
    by_time.sort_by_key(|planned| planned.at_us);
    let mut places = nodes;
    let mut saved = false;
    for planned in by_time {
        saved |= planned.fault == Fault::StoreSaves;
        if planned.fault == Fault::StoreRestores && !saved {
            let reason = "needs a snapshot before it, such as snapshot@2s";
            return Err(InputError::flag("--faults", &"restore", reason));
        }
        if planned.fault == Fault::NodeJoins {
            places += 1;
        }
        if let Some(place) = place_of(planned.fault).filter(|&place| place >= places) {
            let value = format!("node {place} of {places}");
            return Err(InputError::flag("--faults", &value, "nodes are numbered from 0"));
        }
    }
    Ok(())
}

/// Refuses faults after the end of a run: they would not be played.
pub(super) fn validate_times(planned: &[Planned], seconds: f64) -> Result<(), InputError> {
    let late = planned.iter().map(|planned| planned.at_us as f64 / 1e6).find(|at| *at >= seconds);
    late.map_or(Ok(()), |at| {
        let (flag, value) = ("--faults", format!("at {at} s"));
        Err(InputError::Value { flag, value, reason: format!("the run is over after {seconds} s") })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(at_us: u64, fault: Fault) -> Planned {
        Planned { at_us, fault }
    }

    #[test]
    fn every_kind_of_fault_can_be_written() {
        let cases = [
            ("die@2s/3", at(2_000_000, Fault::NodeDies { place: 3 })),
            ("replace@2s/0", at(2_000_000, Fault::NodeReplaced { place: 0 })),
            ("join@3s", at(3_000_000, Fault::NodeJoins)),
            ("pause@2s/1+500ms", at(2_000_000, Fault::NodePauses { place: 1, for_us: 500_000 })),
            ("cut@0s/1+3s", at(0, Fault::NodeCutOff { place: 1, for_us: 3_000_000 })),
            ("clock@1.5s/1+1s", at(1_500_000, Fault::ClockJumps { place: 1, by_us: 1_000_000 })),
            (
                "clock-stall@2s/1+20ms",
                at(2_000_000, Fault::ClockStalls { place: 1, for_us: 20_000 }),
            ),
            ("hang@5s+3s", at(5_000_000, Fault::StoreHangs { for_us: 3_000_000 })),
            ("gone@5s+3s", at(5_000_000, Fault::StoreGone { for_us: 3_000_000 })),
            ("stall@5s+2s", at(5_000_000, Fault::StoreStalls { for_us: 2_000_000 })),
            ("forget@7s", at(7_000_000, Fault::StoreForgets)),
            ("lag@7s+200ms", at(7_000_000, Fault::StoreLags { by_us: 200_000 })),
            ("snapshot@2s", at(2_000_000, Fault::StoreSaves)),
            ("restore@4s", at(4_000_000, Fault::StoreRestores)),
            ("evict@3s/70000", at(3_000_000, Fault::RecordLost { key: 70_000 })),
            ("store-clock@4s-60s", at(4_000_000, Fault::StoreClockSteps { by_us: -60_000_000 })),
        ];
        for (text, planned) in cases {
            assert_eq!(parse(text), Ok(planned), "{text}");
        }
        let kinds: Vec<&str> =
            cases.iter().filter_map(|(text, _)| text.split('@').next()).collect();
        assert_eq!(kinds.join(", "), KINDS);
        assert!(kinds.iter().all(|kind| KINDS_HELP.contains(&format!("{kind}@"))));
        let ahead = at(4_000_000, Fault::StoreClockSteps { by_us: 1_000_000 });
        assert_eq!(parse("store-clock@4s+1s"), Ok(ahead));
    }

    #[test]
    fn what_is_missing_or_too_much_is_named() {
        let owned = str::to_owned;
        let cases = [
            ("hang", FaultError::NoTime(owned("hang"))),
            ("", FaultError::NoTime(owned(""))),
            ("burn@2s", FaultError::Kind(owned("burn"))),
            ("die@2s", FaultError::NodeMissing(owned("die"))),
            ("die@2s/x", FaultError::Node(owned("x"))),
            ("die@2s/70000", FaultError::Node(owned("70000"))),
            ("die@2s/1+1s", FaultError::DurationGiven(owned("die"))),
            ("pause@2s/1", FaultError::DurationMissing(owned("pause"))),
            ("hang@2s/1+1s", FaultError::NodeGiven(owned("hang"))),
            ("forget@200h", FaultError::TooLong(owned("200h"))),
            ("hang@1s+200h", FaultError::TooLong(owned("200h"))),
            ("hang@1s-3s", FaultError::Backwards(owned("hang"))),
            ("evict@1s", FaultError::KeyMissing(owned("evict"))),
            ("evict@1s/x", FaultError::Key(owned("x"))),
            ("restore@1s+1s", FaultError::DurationGiven(owned("restore"))),
        ];
        for (text, error) in cases {
            assert_eq!(parse(text), Err(error), "{text}");
        }
        for text in ["forget@", "forget@5", "forget@-1s", "hang@1s+", "hang@1s+1s+1s", "die@/1"] {
            assert!(matches!(parse(text), Err(FaultError::Time(_))), "{text}");
        }
    }

    #[test]
    fn a_fault_befalls_only_a_node_that_is_there_at_its_time() {
        let list = |texts: &[&str]| -> Vec<Planned> {
            texts.iter().map(|text| parse(text).unwrap()).collect()
        };
        assert!(validate(&list(&["die@2s/3"]), 4).is_ok());
        assert!(validate(&list(&["die@2s/4"]), 4).is_err());
        // Written in any order, played by time.
        assert!(validate(&list(&["die@2s/4", "join@1s"]), 4).is_ok());
        assert!(validate(&list(&["join@3s", "die@2s/4"]), 4).is_err());
        assert!(validate(&vec![at(0, Fault::NodeJoins); FAULTS_MAX + 1], 4).is_err());
    }

    #[test]
    fn a_restore_without_an_earlier_snapshot_is_refused() {
        let list = |texts: [&str; 2]| texts.map(|text| parse(text).unwrap());
        assert!(validate(&list(["restore@2s", "snapshot@1s"]), 4).is_ok());
        assert!(validate(&list(["restore@2s", "snapshot@3s"]), 4).is_err());
    }
}
