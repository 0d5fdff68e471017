//! The windows of a calendar. The store has no zones: nodes tell it which window it is.

use super::key::{Key, flow};
use crate::quota::Curve;

impl Key {
    /// Opens the window of a calendar that it is now, if the one before has ended: each that ended pays a burst. A node has
    /// `told` when it began and when it ends, and is not believed unless it is now.
    pub(super) fn open_window(&mut self, told: [i64; 2], now_us: i64) {
        if self.scale.curve != Curve::CalendarWindow {
            return;
        }
        let latest_us = now_us.saturating_add(self.scale.longest_window_us());
        if self.window_ends_us > latest_us {
            // The lane's time went back.
            self.window_ends_us = 0;
        }
        let [begins_us, ends_us] = told;
        let is_now = begins_us <= now_us && now_us < ends_us && ends_us <= latest_us;
        if !is_now || now_us < self.window_ends_us {
            return;
        }
        if self.window_ends_us > 0 {
            // Leases that had ended by then are of the window before.
            let epochs = begins_us / self.epoch_us - self.epoch();
            self.end_leases((2 - epochs.clamp(0, 2)) as usize);
            let gap_us = (begins_us - self.window_ends_us).max(0);
            let windows = 1 + gap_us / self.scale.window_us();
            self.level = flow(self.level, self.scale.burst, windows, self.scale.burst);
        }
        self.window_ends_us = ends_us;
    }

    /// Microseconds until the key is as if it had never been used, at the latest.
    pub(super) fn full_us(&self) -> i64 {
        let missing = self.scale.burst - self.unleased;
        let full_us = self.scale.full_us(missing) as i64;
        if missing <= 0 || self.window_ends_us == 0 {
            return full_us;
        }
        // The first window ends when the node says.
        let later_us = (full_us - self.scale.longest_window_us()).max(0);
        later_us + (self.window_ends_us - self.stamp_us).max(0)
    }
}

#[cfg(test)]
mod tests {
    use super::super::key::RECORD_MARGIN_MS;
    use super::super::key::tests::sliding;
    use super::*;
    use crate::quota::Scale;

    /// Days of 24 hours, with 1000 tokens; the one now ends at 100 days.
    fn of_a_calendar(level: i64) -> Key {
        let (rate, token, burst) = (1000, DAY_US, 1000 * DAY_US);
        let scale = Scale { rate, token, burst, curve: Curve::CalendarWindow };
        Key {
            scale,
            level: level * scale.burst / 1000,
            window_ends_us: 100 * DAY_US,
            ..sliding(0, 0)
        }
    }

    const DAY_US: i64 = 86_400_000_000;
    const HOUR_US: i64 = DAY_US / 24;

    #[test]
    fn window_of_a_calendar_pays_a_burst_at_its_end_as_nodes_tell() {
        let ends_us = 100 * DAY_US;
        let next = [ends_us, ends_us + 25 * HOUR_US];
        for (level, told, now_us, expected, expected_ends_us) in [
            // It has not ended, whatever a node of another zone or another clock says.
            (10, next, ends_us - 1, 10, ends_us),
            (10, [ends_us - HOUR_US, ends_us + DAY_US], ends_us - 1, 10, ends_us),
            // A new one has begun.
            (10, next, ends_us, 1000, next[1]),
            (10, next, next[1] - 1, 1000, next[1]),
            // Of what was charged beyond a window each one pays a burst.
            (-300, next, ends_us, 700, next[1]),
            (-2300, next, ends_us, -1300, next[1]),
            (
                -2300,
                [ends_us + DAY_US, ends_us + 2 * DAY_US],
                ends_us + DAY_US,
                -300,
                ends_us + 2 * DAY_US,
            ),
            // Nobody has told which one it is.
            (10, [0; 2], ends_us, 10, ends_us),
            (10, next, next[1], 10, ends_us),
            (10, [ends_us, ends_us + 5 * DAY_US], ends_us, 10, ends_us),
            // The lane's time went back.
            (10, [95 * DAY_US, 96 * DAY_US], 95 * DAY_US, 10, 96 * DAY_US),
        ] {
            let mut key = of_a_calendar(level);
            key.open_window(told, now_us);
            let of = key.scale.burst / 1000;
            let label = format!("{level}, {told:?} at {now_us}");
            assert_eq!(
                (key.level, key.window_ends_us),
                (expected * of, expected_ends_us),
                "{label}"
            );
        }
    }

    /// What a node held at midnight was missing in the next day.
    #[test]
    fn lease_that_ended_before_a_window_of_a_calendar_is_charged_to_the_one_before() {
        let ends_us = 100 * DAY_US;
        for (epochs_before, expected) in [(0, 970), (1, 980), (2, 1000)] {
            let mut key = of_a_calendar(100);
            let of = key.scale.burst / 1000;
            key.outstanding = [20 * of, 10 * of];
            key.stamp_us = ends_us - epochs_before * key.epoch_us;
            let now_us = ends_us + 4 * key.epoch_us;
            key.open_window([ends_us, ends_us + DAY_US], now_us);
            key.end_leases(0);
            assert_eq!(key.level, expected * of, "{epochs_before} epochs before");
        }
    }

    #[test]
    fn record_of_a_calendar_is_kept_until_its_window_ends() {
        let mut key = of_a_calendar(10);
        key.stamp_us = 99 * DAY_US - HOUR_US;
        key.unleased = key.level;
        let margin_ms = 2 * key.epoch_us / 1000 + RECORD_MARGIN_MS;
        assert_eq!(key.keep_ms(), 25 * HOUR_US / 1000 + margin_ms);
        key.unleased -= key.scale.burst;
        assert_eq!(key.keep_ms(), (25 * HOUR_US + 4 * DAY_US) / 1000 + margin_ms);
        key.window_ends_us = 0;
        assert_eq!(
            key.keep_ms(),
            8 * DAY_US / 1000 + margin_ms,
            "nobody has told which window it is"
        );
    }
}
