//! What a bucket and the engine leave for each other: flags, and where the books on the key are.

use std::sync::atomic::Ordering;

use super::fields::Moment;
use super::line::{Bucket, CLOSED};
use super::outcome::Touch;
use crate::decision::{RoughTokens, View};
use crate::time::Timestamp;

/// The bucket is on its way to the engine.
const QUEUED: u64 = 1;
/// The engine was told that the bucket runs low.
const URGENT: u64 = 2;
/// The engine has been told all that it can be told by flags.
pub(super) const TOLD: u64 = QUEUED | URGENT;

const SLOT_AT: u32 = 2;
const VIEW_AT: u32 = 32;

/// The most books that an engine can keep.
pub(crate) const SLOT_MAX: u32 = (1 << (VIEW_AT - SLOT_AT)) - 2;
const NO_SLOT: u32 = SLOT_MAX + 1;

/// ```text
///  63                  32 31        2   1        0
/// | view, milliseconds   |   slot    | urgent | queued |
/// ```
///
/// *view* is when the store's last word came, in milliseconds that wrap, 0 for never, written by the
/// engine; *slot* is where the engine keeps its books on the key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Desk(pub u64);

impl Desk {
    /// No view, no books, no flags.
    pub(super) const SHUT: Self = Self((NO_SLOT as u64) << SLOT_AT);

    fn slot(self) -> u32 {
        self.0 as u32 >> SLOT_AT
    }

    fn with_slot(self, slot: u32) -> Self {
        let slots = u64::from(u32::MAX) & !TOLD;
        Self(self.0 & !slots | u64::from(slot) << SLOT_AT)
    }

    fn view_ms(self) -> u32 {
        (self.0 >> VIEW_AT) as u32
    }

    fn with_view_ms(self, view_ms: u32) -> Self {
        Self(self.0 & u64::from(u32::MAX) | u64::from(view_ms) << VIEW_AT)
    }
}

impl Bucket {
    fn load_desk(&self) -> Desk {
        Desk(self.desk().load(Ordering::Acquire))
    }

    /// Raises flags and says what of it is news, and whether the engine has to be told the key.
    #[inline]
    pub(super) fn raise(&self, flags: u64) -> (Touch, bool) {
        if self.desk().load(Ordering::SeqCst) & flags == flags {
            return (Touch::None, false);
        }
        let before = Desk(self.desk().fetch_or(flags, Ordering::AcqRel));
        let unknown = before.slot() == NO_SLOT;
        if before.0 & flags == flags {
            (Touch::None, unknown)
        } else if flags & URGENT != 0 {
            (Touch::Urgent, unknown)
        } else {
            (Touch::Dirty, unknown)
        }
    }

    /// Raises the flag of a bucket with something pending.
    #[inline]
    pub(super) fn raise_queued(&self) -> (Touch, bool) {
        self.raise(QUEUED)
    }

    /// Whether the engine has been told all that it can be told by flags.
    #[inline(always)]
    pub(super) fn is_told(&self) -> bool {
        self.desk().load(Ordering::SeqCst) & TOLD == TOLD
    }

    /// The next decision need not tell the engine (`muted`), or shall.
    pub(super) fn set_told(&self, muted: bool) {
        if muted {
            self.desk().fetch_or(TOLD, Ordering::SeqCst);
        } else {
            self.desk().fetch_and(!TOLD, Ordering::SeqCst);
        }
    }

    /// Whether the bucket has run low since it was last collected.
    pub(crate) fn is_urgent(&self) -> bool {
        self.load_desk().0 & URGENT != 0
    }

    // ---- books -------------------------------------------------------------------------------

    /// Where the engine keeps its books on this key.
    pub(crate) fn slot(&self) -> Option<u32> {
        let slot = self.load_desk().slot();
        (slot != NO_SLOT).then_some(slot)
    }

    /// Whether the engine keeps no books, and is not told of anything.
    pub(super) fn is_shut(&self) -> bool {
        self.load_desk().with_view_ms(0) == Desk::SHUT && !self.has_spilled()
    }

    /// The engine opens its books on this key. The new epoch makes a concurrent
    /// [`renew_first_credit`](Self::renew_first_credit) fail.
    pub(crate) fn open_books(&self, slot: u32) {
        debug_assert!(slot <= SLOT_MAX);
        debug_assert!(self.minted_us().load(Ordering::Relaxed) >= CLOSED, "no lease without books");
        self.minted_us().store(u64::MAX, Ordering::Release);
        self.update_desk(|desk| desk.with_slot(slot));
        let _ = self.update(|word| Some(word.next_epoch()));
    }

    /// The engine closes its books on this key, which is full at `full_at` if left alone and may not
    /// be forgotten before. Fails when a decision has just been taken that the engine is told of.
    pub(crate) fn try_close_books(&self, full_at: Timestamp) -> bool {
        if self.has_spilled() {
            return false;
        }
        // A full bucket has a whole token, so credit may be used from then on at the latest.
        let seen = Moment(self.seen().load(Ordering::Relaxed));
        if seen.micros() > full_at.as_micros() {
            let seen = Moment::not_before(full_at, seen.tokens());
            self.seen().store(seen.0, Ordering::Relaxed);
        }
        let minted = CLOSED | full_at.as_micros().min(CLOSED - 1);
        self.minted_us().store(minted, Ordering::Release);
        let open = Desk(self.load_desk().0 & !TOLD);
        let shut = open.with_slot(NO_SLOT);
        let order = (Ordering::AcqRel, Ordering::Relaxed);
        let swapped = self.desk().compare_exchange(open.0, shut.0, order.0, order.1);
        if swapped.is_err() {
            self.minted_us().store(u64::MAX, Ordering::Release);
        }
        swapped.is_ok()
    }

    fn update_desk(&self, change: impl Fn(Desk) -> Desk) {
        let change = |desk| Some(change(Desk(desk)).0);
        let _ = self.desk().fetch_update(Ordering::AcqRel, Ordering::Acquire, change);
    }

    // ---- the store's word --------------------------------------------------------------------

    /// When the store's last word came.
    pub(super) fn set_view_at(&self, at: Timestamp) {
        self.update_desk(|desk| desk.with_view_ms((at.millis() as u32).max(1)));
    }

    /// The store's last word, so many tokens, and when it came.
    #[inline(always)]
    pub(super) fn view_of(&self, tokens: RoughTokens) -> View {
        View::new(tokens, Desk(self.desk().load(Ordering::Relaxed)).view_ms())
    }
}
