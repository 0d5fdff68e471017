//! The token bucket and the leaky bucket as `lua/exact-turn.lua` has them, step for step.

use smallvec::smallvec;

use super::{Deed, ExactRequest, Numbers, RESET, Record, SpentAt};
use crate::algorithm::{STATE_MAX, Standing, Turn, TurnRule};

/// Microseconds, and the rest in units: of these a microsecond has as many as the rate.
type Span = (i64, i64);

/// When the key is as if it had never been used, and the rule by which.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct TurnRecord {
    free: Span,
    /// When the key was allowed something last.
    stamp_us: i64,
    /// Rate, token and burst.
    rule: [i64; 3],
}

/// No key is further ahead: what it owes beyond that, 17 years, is forgotten. In units it is below [`STATE_MAX`].
const AHEAD_MAX_US: i64 = 1 << 49;

/// Units as a span.
fn span(rule: &TurnRule, units: u64) -> [f64; 2] {
    let rate = rule.scale().rate as u64;
    [(units / rate) as f64, (units % rate) as f64]
}

pub(super) fn numbers(rule: &TurnRule, request: &ExactRequest) -> Numbers {
    let scale = rule.scale();
    let (burst, most, clock_us) = match rule {
        TurnRule::TokenBucket(_) => {
            let most = (scale.burst as u64).checked_sub(rule.units_of(request.cost.max(1).into()));
            (scale.burst / scale.token, most, scale.fill_us())
        }
        TurnRule::LeakyBucket { queue, .. } => {
            let clock = queue + scale.token as u64;
            let is_possible = rule.units_of(request.cost.into()) <= rule.max_request_units();
            let most = is_possible.then(|| rule.max_delay(request.slot_within_us));
            (0, most, rule.micros(clock))
        }
    };
    let most = if request.deed == Deed::Charge { Some(STATE_MAX) } else { most };
    let most = most.map_or([-1.0, 0.0], |most| span(rule, most));
    let [cost_us, cost_part] = span(rule, rule.units_of(request.cost.into()));
    let cost = [cost_us.min(AHEAD_MAX_US as f64), cost_part];
    let (cost, was) = match request.deed {
        Deed::Return(SpentAt { at_us, ahead }) => {
            let [ahead_us, part] = span(rule, ahead);
            (cost.map(|number| -number), [at_us as f64 + ahead_us, part])
        }
        Deed::Reset => ([RESET as f64, 0.0], [0.0, 0.0]),
        _ => (cost, [0.0, 0.0]),
    };
    smallvec![
        scale.rate as f64,
        scale.token as f64,
        burst as f64,
        cost[0],
        cost[1],
        most[0],
        most[1],
        clock_us as f64,
        was[0],
        was[1]
    ]
}

pub(super) fn standing(
    rule: &'static TurnRule,
    request: &ExactRequest,
    reply: &[f64],
) -> Option<Standing> {
    let &[allowed, _, ahead_us, ahead_part] = reply else { return None };
    let rate = rule.scale().rate as u64;
    let whole = (ahead_us as u64).checked_mul(rate)?;
    let ahead = whole.checked_add(ahead_part as u64).filter(|_| ahead_part < rate as f64)?;
    let before = ahead.saturating_sub(rule.units_of(request.cost.into()));
    let delay = match rule {
        TurnRule::LeakyBucket { .. } if allowed > 0.0 => before,
        _ => 0,
    };
    let max_delay = rule.max_delay(request.slot_within_us);
    Some(Standing::Turn(rule, Turn { ahead, delay, max_delay }))
}

impl Record for TurnRecord {
    const IS_KEPT_AS_LONG: bool = true;

    fn decide(record: &mut Option<Self>, numbers: &[f64], time_us: u64) -> Numbers {
        let rule = [0, 1, 2].map(|index| numbers[index] as i64);
        let [rate, ..] = rule;
        let [cost, most]: [Span; 2] =
            [(numbers[3] as i64, numbers[4] as i64), (numbers[5] as i64, numbers[6] as i64)];
        let clock_us = numbers[7] as i64;
        let (was, is_return): (Span, _) = ((numbers[8] as i64, numbers[9] as i64), cost < (0, 0));
        let (mut now, mut free, mut is_written) = (time_us as i64, (0, 0), false);
        let (is_reset, is_look) = (cost.0 == RESET, cost == (0, 0));
        // A bucket without a record is full.
        let mut goes_back = rule[2] > 0 || is_reset;
        if let Some(Self { free: known, stamp_us, rule: known_rule }) = *record {
            free = known;
            if is_return && known_rule != rule && !is_reset {
                return smallvec![0.0, now as f64, 0.0, 0.0];
            }
            goes_back = rule[2] > 0 || free == was || is_reset;
            if stamp_us - now > clock_us {
                free.0 -= stamp_us - now;
                is_written = true;
            } else {
                now = now.max(stamp_us);
            }
            if known_rule != rule {
                free = converted(free.max((now, 0)), now, known_rule, rule);
                is_written = true;
            }
        }
        if free.0 < now {
            free = (now, 0);
        }
        let is_allowed = if is_return { goes_back } else { (free.0 - now, free.1) <= most };
        if is_allowed && !is_look && (record.is_some() || !is_return) {
            free = moved(free, cost, now, rate);
            is_written = true;
        }
        if is_written && !is_look {
            *record = Some(Self { free, stamp_us: now, rule });
        }
        let ahead_us = (free.0 - now) as f64;
        smallvec![f64::from(u8::from(is_allowed)), now as f64, ahead_us, free.1 as f64]
    }

    fn ends_us(&self, _: &[f64]) -> u64 {
        (self.free.0 + 1) as u64
    }
}

/// Adds a cost to the time when the key is free: between `now` and [`AHEAD_MAX_US`] later.
fn moved(free: Span, cost: Span, now: i64, rate: i64) -> Span {
    let (mut us, mut part) = (free.0 + cost.0, free.1 + cost.1);
    if part >= rate {
        (us, part) = (us + 1, part - rate);
    }
    if part < 0 {
        (us, part) = (us - 1, part + rate);
    }
    match us - now {
        ..0 => (now, 0),
        ahead_us if ahead_us > AHEAD_MAX_US => (now + AHEAD_MAX_US, 0),
        _ => (us, part),
    }
}

/// When the key is free by the new rule: it keeps what it has, and what it owes, both cut at the new burst.
fn converted(free: Span, now: i64, known: [i64; 3], rule: [i64; 3]) -> Span {
    let [known_rate, known_token, known_burst] = known.map(|number| number as f64);
    let [rate, token, burst] = rule.map(|number| number as f64);
    if rule[2] == 0 {
        // The slots before this one were promised.
        return (free.0 + i64::from(free.1 > 0), 0);
    }
    let missing = ((free.0 - now) as f64 * known_rate + free.1 as f64) / known_token;
    let left = (known_burst - missing).max(-burst).min(burst);
    (now + ((burst - left) * token / rate).ceil() as i64, 0)
}
