//! Whether a key's requests come in bursts, and how far apart.
//!
//! What a node holds is reckoned as if requests came one by one, each by its own chance. Clients also send many at
//! once, and then nothing for a while. A node that gave back between two bursts what the next one needs would deny
//! nearly all of it.

use super::LINGER_MAX_US;
use crate::time::Timestamp;

/// Requests have come in a burst if in the silence before them so many more were to be expected, had they been spread
/// evenly over both: chance alone leaves such a silence once in three thousand times.
const BURST_REQUESTS: u64 = 8;
/// The next burst is to be expected until a silence is so many times as long as the one before.
const PATIENCE: u64 = 2;
/// Bursts are forgotten after so many observations without one. Two of them make a pattern: the first may be a
/// client that comes back.
const REMEMBERED: u8 = 4;

/// What is known of the bursts of a key.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bursts {
    /// The silence before the last burst, in microseconds.
    silence_us: u64,
    /// The tokens that it asked for.
    tokens: u64,
    /// There were two, and each observation since can have been a part of one.
    is_pattern: bool,
    /// Observations until bursts are forgotten.
    remembered: u8,
    /// Requests had come up to then.
    last: Timestamp,
    /// No requests had come from `last` up to then.
    silent_until: Timestamp,
    /// Requests have come since.
    has_begun: bool,
}

impl Bursts {
    pub(super) fn new(now: Timestamp) -> Self {
        let (last, silent_until) = (now, now);
        let (silence_us, tokens, remembered) = (0, 0, 0);
        let (is_pattern, has_begun) = (false, false);
        Self { silence_us, tokens, is_pattern, remembered, last, silent_until, has_begun }
    }

    /// A request has come now.
    pub(super) fn begin(&mut self, now: Timestamp) {
        if !self.has_begun {
            (self.silent_until, self.has_begun) = (now, true);
        }
    }

    /// So many requests for so many tokens have come since the last observation.
    pub(super) fn observe(&mut self, requests: u64, tokens: u64, now: Timestamp) {
        self.has_begun = false;
        if requests == 0 {
            self.silent_until = now;
            return;
        }
        let silence_us = self.silent_until.micros_since(self.last);
        let span_us = now.micros_since(self.last).max(1);
        if requests.saturating_mul(silence_us) >= BURST_REQUESTS * span_us {
            self.silence_us = silence_us.min(LINGER_MAX_US);
            self.tokens = tokens.max(self.tokens - self.tokens / 8);
            self.is_pattern |= self.remembered > 0;
            self.remembered = REMEMBERED;
        } else {
            self.remembered = self.remembered.saturating_sub(1);
            self.is_pattern &= self.remembered > 0;
        }
        (self.last, self.silent_until) = (now, now);
    }

    /// How long a silence may last until it says that requests have ceased, in microseconds.
    pub(super) fn patience_us(&self) -> u64 {
        if self.is_pattern { PATIENCE * self.silence_us } else { 0 }
    }

    /// Whether the next burst is to be expected.
    pub(super) fn are_to_come(&self, now: Timestamp) -> bool {
        now.micros_since(self.last) < self.patience_us()
    }

    /// Tokens of the next burst; none if requests do not come in bursts.
    pub(super) fn expected(&self) -> i64 {
        if self.is_pattern { self.tokens as i64 } else { 0 }
    }
}
