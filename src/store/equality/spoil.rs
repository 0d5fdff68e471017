//! Entries with absurd numbers.

use super::Random;
use crate::sync::message::Entry;

/// Puts an absurd number into a random field.
pub(super) fn spoil(entry: &mut Entry, random: &mut Random) {
    let mut none = 0;
    let previous = entry.claim.as_mut().map_or(&mut none, |claim| &mut claim.previous);
    let absurd = random.among(&[i64::MIN, -1, 0, (1 << 52) + 1, 1 << 53, i64::MAX]);
    let fields: [&mut i64; 30] = [
        &mut entry.scale.rate,
        &mut entry.scale.token,
        &mut entry.scale.burst,
        &mut entry.version,
        &mut entry.epoch_us,
        &mut entry.spent,
        &mut entry.debt,
        &mut entry.allowed,
        &mut entry.taken,
        &mut entry.taken_before,
        &mut entry.returned,
        &mut entry.lost,
        &mut entry.back_rate,
        &mut entry.held.rate,
        &mut entry.back_depth,
        &mut entry.spent_before,
        &mut entry.refunded.tokens,
        &mut entry.refunded.from_us,
        &mut entry.unspent.tokens,
        &mut entry.unspent.from_us,
        &mut entry.held.depth,
        &mut entry.held.outstanding,
        &mut entry.held.stamp_us,
        &mut entry.held.demand,
        &mut entry.held.tag,
        &mut entry.demand,
        &mut entry.needed,
        &mut entry.want,
        &mut entry.want_rate,
        previous,
    ];
    let chosen = random.below(fields.len() as u64) as usize;
    for (index, field) in fields.into_iter().enumerate() {
        if index == chosen {
            *field = absurd;
        }
    }
}
