//! What a node tells the store about a key of a concurrency limit, and what the store replies.

use crate::error::StoreError;

/// A lease epoch: a node renews its permits once in it.
const EPOCH_US: u64 = 1_000_000;
/// How long the store keeps permits of a node that is silent.
pub(crate) const LEASE_US: u64 = 2 * EPOCH_US;
/// How long a message may be without an answer: a renewal that is lost is sent again before the lease ends.
pub(crate) const CALL_MAX_US: u64 = LEASE_US / 4;
/// How long after its last message a node that waits keeps its place. At least [`CALL_MAX_US`]: a node asks again only when it was
/// answered.
const PLACE_US: u64 = 500_000;
/// How long a node may pass on a permit beyond its even part, from caller to caller, while another node waits.
const SLICE_US: u64 = 100_000;
const POLL_MIN_US: u64 = 2_000;
const POLL_MAX_US: u64 = 20_000;

/// The most permits that one message hands over, and that have one id.
pub(crate) const HANDED_OVER_MAX: u32 = 1000;

/// The numbers of a message, as the script has them.
pub(crate) const MESSAGE_NUMBERS: usize = 12;
/// The numbers of a reply.
pub(crate) const REPLY_NUMBERS: usize = 6;
/// Numbers beyond this are no reply.
const NUMBER_MAX: f64 = (1_u64 << 53) as f64;

/// The state of one key on one node. It is no increment, so that the store may get it twice, late or never.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PermitMessage {
    /// The store ignores a message whose number is not higher than that of the last one.
    pub(crate) sequence: u64,
    /// Permits that callers hold. The store takes the node to hold these and no others.
    pub(crate) in_use: u32,
    /// Permits that the node wants in all.
    pub(crate) want: u32,
    /// Fewer than this in addition are of no use.
    pub(crate) least: u32,
    /// Whether callers wait for their turn: the node is to have a place in the line of nodes.
    pub(crate) waits: bool,
    /// The limit, as this node has it.
    pub(crate) max: u32,
    /// Permits that are handed over to the store. They are not in `in_use` any more.
    pub(crate) timed: Vec<TimedPermit>,
}

/// The id of timed permits, random so that it cannot be guessed.
pub(crate) type PermitId = [u8; 16];

/// Timed permits: no node renews them, and they count until they are released by their id, or their time ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TimedPermit {
    pub(crate) id: PermitId,
    pub(crate) permits: u32,
    pub(crate) time_us: u64,
}

/// What the store says about a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PermitReply {
    /// Permits that this node holds now.
    pub(crate) held: u32,
    /// Permits that all nodes hold.
    pub(crate) held_by_all: u32,
    /// Permits to give back, as they come free, though callers wait here: other nodes have less than their part.
    pub(crate) give: u32,
    /// From when on, in microseconds from now.
    pub(crate) give_in_us: u64,
    /// When to ask again, while callers wait here.
    pub(crate) poll_us: u64,
    /// How many permits of the message the store took over: all, or none.
    pub(crate) taken_over: u32,
}

impl PermitMessage {
    /// The message as the script has it. The record is kept for `keep_us` longer than it counts.
    pub(crate) fn numbers(&self, keep_us: u64) -> [f64; MESSAGE_NUMBERS] {
        [
            self.sequence as f64,
            self.in_use.into(),
            self.want.into(),
            self.least.into(),
            u8::from(self.waits).into(),
            self.max.into(),
            LEASE_US as f64,
            PLACE_US as f64,
            SLICE_US as f64,
            POLL_MIN_US as f64,
            POLL_MAX_US as f64,
            keep_us as f64,
        ]
    }
}

impl PermitReply {
    /// Reads the script's numbers.
    pub(crate) fn read(numbers: &[f64]) -> Result<Self, StoreError> {
        let wrong = || StoreError::Reply { field: "permits", value: format!("{numbers:?}") };
        let is_natural =
            |number: &f64| (0.0..=NUMBER_MAX).contains(number) && number.fract() == 0.0;
        let &[held, held_by_all, give, give_in_us, poll_us, taken_over] = numbers else {
            return Err(wrong());
        };
        let is_count = |number: f64| number <= u32::MAX.into();
        if !numbers.iter().all(is_natural)
            || ![held, held_by_all, give, taken_over].into_iter().all(is_count)
        {
            return Err(wrong());
        }
        Ok(Self {
            held: held as u32,
            held_by_all: held_by_all as u32,
            give: give as u32,
            give_in_us: give_in_us as u64,
            poll_us: (poll_us as u64).clamp(POLL_MIN_US, POLL_MAX_US),
            taken_over: taken_over as u32,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reply_of_the_script_has_whole_numbers_and_counts_that_fit() {
        let numbers = [1.0, 2.0, 0.0, 5e9, 3e4, 0.0];
        assert!(PermitReply::read(&numbers).is_ok());
        assert!(PermitReply::read(&numbers[1..]).is_err());
        for (place, wrong) in [(0, 0.5), (1, -1.0), (2, f64::NAN), (0, 5e9), (1, 5e9), (5, 5e9)] {
            let mut numbers = numbers;
            numbers[place] = wrong;
            assert!(PermitReply::read(&numbers).is_err(), "{numbers:?}");
        }
    }
}
