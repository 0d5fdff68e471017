//! The scripts on a real Redis and their reference are the same machine.

#![allow(clippy::unwrap_used, reason = "a test's helpers may fail the test")]

use std::time::Duration;

use redis::Script;

use super::*;
use crate::algorithm::{FixedWindow, LeakyBucket, Rule, SlidingLog, SlidingWindow, WindowRule};
use crate::limit::Limit;
use crate::quota::{Quota, TOKENS_MAX};
use crate::store::redis::exact::{KEEP_BY_GIVEN_TIME_US, script_by_given_time};
use crate::store::redis_server::RedisServer;

const OPERATIONS: u64 = 100_000;
const BEGIN_US: u64 = 1_700_000_000_000_000;

/// One algorithm in both machines.
struct Pair {
    _server: RedisServer,
    connection: redis::Connection,
    script: Script,
    model: ExactModel,
    operations: u64,
}

impl Pair {
    fn new(rule: &KeyRule) -> Self {
        let server = RedisServer::start();
        let connection = redis::Client::open(server.url()).unwrap().get_connection().unwrap();
        let script = script_by_given_time(rule);
        let model = ExactModel::default();
        Self { _server: server, connection, script, model, operations: 0 }
    }

    /// Asks both, and returns whether the request was allowed.
    fn ask(&mut self, request: &ExactRequest, time_us: u64) -> bool {
        self.reply(request, time_us)[0] > 0.0
    }

    /// Asks both. Returns by what the request is found again, if it was allowed.
    fn spend(&mut self, request: &ExactRequest, time_us: u64) -> Option<SpentAt> {
        let reply = self.reply(request, time_us);
        let reply = request.read(&reply).ok().filter(|reply| reply.is_allowed)?;
        let ahead = if let Standing::Turn(_, turn) = reply.standing { turn.ahead } else { 0 };
        Some(SpentAt { at_us: reply.at_us, ahead })
    }

    fn reply(&mut self, request: &ExactRequest, time_us: u64) -> Numbers {
        let key = format!("{}:{:?}", request.limit.rule.algorithm(), request.key);
        let bytes = request.bytes(KEEP_BY_GIVEN_TIME_US);
        let mut call = self.script.prepare_invoke();
        call.key(key).arg(bytes).arg(time_us);
        let reply: Vec<u8> = call.invoke(&mut self.connection).unwrap();
        let (reply, _) = reply.as_chunks::<8>();
        let reply: Numbers = reply.iter().map(|bytes| f64::from_le_bytes(*bytes)).collect();
        let expected = self.model.reply(request, time_us).unwrap();
        self.operations += 1;
        assert_eq!(reply, expected, "operation {}: {request:?} at {time_us}", self.operations);
        reply
    }
}

/// The rule of a limit of which the store decides.
fn limit(rule: impl Into<Rule>) -> (&'static LimitInfo, &'static KeyRule) {
    let rule = rule.into();
    let terms = Limit::new("x", rule).exact().validate_exact(1).unwrap();
    let info = LimitInfo::intern("x", (None, false), &terms, rule, 0);
    (info, info.key_rule.as_ref().unwrap())
}

/// Random requests by rules that take turns, about keys of which each has its own pace.
fn same_machine(seed: u64, rules: &[Rule]) {
    let rules: Vec<_> = rules.iter().copied().map(limit).collect();
    let (mut pair, mut random) = (Pair::new(rules[0].1), fastrand::Rng::with_seed(seed));
    let (mut now, mut allowed, mut returned) = (BEGIN_US, 0, 0);
    // Hours of a calendar take four, and numbers of scripts are exact up to 2^53.
    let latest_us = if windows_of(rules[0].1, now).is_some() { 1 << 51 } else { 2 * BEGIN_US };
    // What was allowed of late.
    let mut spent: Vec<(ExactRequest, SpentAt)> = Vec::new();
    while pair.operations < OPERATIONS {
        // A plan changes seldom.
        let (limit, rule) = rules[(pair.operations / 500) as usize % rules.len()];
        for _ in 0..500 {
            let quota = limit.rule.quota();
            let (period_us, most) = (quota.period().as_micros() as u64, quota.burst_tokens());
            let token_us = period_us / quota.tokens();
            now = next_time(now, period_us, token_us, &mut random).clamp(BEGIN_US / 2, latest_us);
            let cost = match random.u32(..10) {
                0 => 0,
                1..6 => 1,
                6..9 => random.u64(1..=(most / 10).max(1)),
                // Another plan may allow more than this one.
                _ => random.u64(1..=2 * most),
            };
            let cost = cost.min(u32::MAX.into()) as u32;
            let slot_within_us = *random.choice(&[0, 0, token_us, period_us, u64::MAX]).unwrap();
            let key = vec![random.u8(..4)].into();
            let deed = match random.u32(..200) {
                0 => Deed::Reset,
                1 | 2 => Deed::Charge,
                _ => Deed::Ask,
            };
            let windows = windows_of(rule, now);
            let request = ExactRequest { limit, rule, key, cost, deed, slot_within_us, windows };
            if random.u32(..5) == 0 && !spent.is_empty() {
                returned += u64::from(pair.ask(&random_return(&mut spent, now, &mut random), now));
                continue;
            }
            let Some(at) = pair.spend(&request, now) else { continue };
            allowed += 1;
            if request.cost > 0 && request.deed != Deed::Reset {
                spent.push((request, at));
                spent.drain(..spent.len().saturating_sub(20));
            }
        }
    }
    println!("{allowed} of {} allowed, {returned} given back", pair.operations);
    let least = pair.operations / 50;
    assert!((least..pair.operations - least).contains(&allowed), "{allowed}");
    assert!(returned > pair.operations / 100, "{returned} given back");
}

/// When the next request comes: mostly later, and often at the edge of a period.
fn next_time(now: u64, period_us: u64, token_us: u64, random: &mut fastrand::Rng) -> u64 {
    match random.u32(..100) {
        0..30 => now,
        30..60 => now + random.u64(..=2 * token_us),
        60..80 => now + random.u64(..=period_us / 10),
        80..90 => (now / period_us + 1) * period_us - random.u64(..2),
        90..94 => now + random.u64(..=2 * period_us),
        94..98 => now.saturating_sub(random.u64(..=period_us / 100)),
        _ => now.saturating_sub(random.u64(..=3 * period_us)),
    }
}

/// What goes back of something that was spent: mostly the last, all or a part of it, and now and then again.
fn random_return(
    spent: &mut Vec<(ExactRequest, SpentAt)>,
    now: u64,
    random: &mut fastrand::Rng,
) -> ExactRequest {
    let last = spent.len() - 1;
    let place = if random.bool() { last } else { random.usize(..=last) };
    let (request, at) = spent[place].clone();
    if random.u32(..4) > 0 {
        spent.remove(place);
    }
    let cost = if random.bool() { request.cost } else { random.u32(1..=request.cost) };
    let windows = windows_of(request.rule, now);
    ExactRequest { cost, deed: Deed::Return(at), windows, ..request }
}

/// The windows about now, where they are a calendar's.
fn windows_of(rule: &KeyRule, now: u64) -> Option<Windows> {
    match rule {
        KeyRule::Window(WindowRule { calendar: Some(calendar), .. }) => Some(calendar.around(now)),
        _ => None,
    }
}

/// Of two keys one also takes tokens, and gives them back at once.
#[test]
fn cost_that_is_returned_at_once_leaves_the_record_as_if_unspent() {
    let rules: [Rule; 5] = [
        Quota::per_second(10).burst(20).into(),
        LeakyBucket::per_second(7).queue(Duration::from_secs(2)).into(),
        FixedWindow::per_second(10).into(),
        SlidingWindow::per_second(10).into(),
        SlidingLog::per_second(10).into(),
    ];
    for rule in rules {
        let (limit, rule) = limit(rule);
        let (mut pair, mut random) = (Pair::new(rule), fastrand::Rng::with_seed(1));
        let (mut now, mut allowed, mut returned) = (BEGIN_US, 0, 0);
        let request = |key: u8, cost, deed| {
            let key = vec![key].into();
            ExactRequest { limit, rule, key, cost, deed, slot_within_us: u64::MAX, windows: None }
        };
        for _ in 0..5000 {
            now += random.u64(..200_000);
            let cost = random.u32(1..5);
            if let Some(at) = pair.spend(&request(1, cost, Deed::Ask), now) {
                assert!(pair.ask(&request(1, cost, Deed::Return(at)), now), "{limit:?}");
                returned += 1;
            }
            let cost = random.u32(1..3);
            let one = pair.ask(&request(1, cost, Deed::Ask), now);
            let other = pair.ask(&request(2, cost, Deed::Ask), now);
            assert_eq!(one, other, "{limit:?}");
            allowed += u32::from(one);
        }
        assert!((500..4900).contains(&allowed) && returned > 500, "{allowed}, {returned}");
    }
}

/// Nothing goes back twice, of a window that has ended, before a slot that was given since, or to another plan.
#[test]
fn cost_of_an_ended_window_is_not_returned() {
    let rules: [(Rule, Rule); 5] = [
        (Quota::per_hour(10).into(), Quota::per_hour(20).into()),
        (
            LeakyBucket::per_second(7).queue(YEAR).into(),
            LeakyBucket::per_second(8).queue(YEAR).into(),
        ),
        (FixedWindow::per_hour(10).into(), FixedWindow::per_day(10).into()),
        (SlidingWindow::per_hour(10).into(), SlidingWindow::per_day(10).into()),
        (SlidingLog::per_hour(10).into(), SlidingLog::per_day(10).into()),
    ];
    for (rule, other) in rules {
        let is_of = |algorithm| rule.algorithm() == algorithm;
        let (is_slot, is_log) = (is_of("leaky-bucket"), is_of("sliding-log"));
        let (plan, other) = (limit(rule), limit(other));
        let mut pair = Pair::new(plan.1);
        let request = |(limit, rule): (&'static LimitInfo, _), key: u8, deed| {
            let key = vec![key].into();
            ExactRequest {
                limit,
                rule,
                key,
                cost: 3,
                deed,
                slot_within_us: u64::MAX,
                windows: None,
            }
        };
        let at = pair.spend(&request(plan, 1, Deed::Ask), BEGIN_US).unwrap();
        let later = BEGIN_US + 3 * 3_600_000_000;
        let after = pair.ask(&request(plan, 1, Deed::Return(at)), later);
        let is_idle = is_slot || is_of("token-bucket");
        assert_eq!(after, is_idle, "a bucket is full by then: {rule:?}");

        let at = pair.spend(&request(plan, 2, Deed::Ask), later).unwrap();
        assert!(pair.spend(&request(plan, 2, Deed::Ask), later + 1).is_some());
        assert_eq!(pair.ask(&request(plan, 2, Deed::Return(at)), later + 2), !is_slot, "{rule:?}");
        let again = pair.ask(&request(plan, 2, Deed::Return(at)), later + 2);
        assert!(!again || !(is_log || is_slot), "{rule:?}");

        let at = pair.spend(&request(plan, 3, Deed::Ask), later).unwrap();
        assert!(pair.spend(&request(other, 3, Deed::Ask), later + 1).is_some());
        let kept = pair.ask(&request(plan, 3, Deed::Return(at)), later + 2);
        assert_eq!(kept, is_log, "by another plan: {rule:?}");
    }
}

/// Whatever was spent, by this plan or another, in debt, or not at all.
#[test]
fn key_that_is_reset_has_all_its_tokens_in_lua_and_in_rust() {
    let rules: [(Rule, Rule); 5] = [
        (Quota::per_hour(10).into(), Quota::per_hour(20).into()),
        (LeakyBucket::per_hour(7).into(), LeakyBucket::per_hour(8).into()),
        (FixedWindow::per_hour(10).into(), FixedWindow::per_day(10).into()),
        (SlidingWindow::per_hour(10).into(), SlidingWindow::per_day(10).into()),
        (SlidingLog::per_hour(10).into(), SlidingLog::per_day(10).into()),
    ];
    for (rule, other) in rules {
        let (plan, other) = (limit(rule), limit(other));
        let mut pair = Pair::new(plan.1);
        let request = |(limit, rule): (&'static LimitInfo, _), key: u8, cost, deed| {
            let key = vec![key].into();
            ExactRequest { limit, rule, key, cost, deed, slot_within_us: 0, windows: None }
        };
        let left = |pair: &mut Pair, key, at_us| {
            let look = request(plan, key, 0, Deed::Ask);
            let numbers = pair.reply(&look, at_us);
            look.read(&numbers).unwrap().standing.remaining()
        };
        let unused = left(&mut pair, 9, BEGIN_US);
        for (key, spender, charged) in [(1, plan, 4), (2, plan, 400), (3, other, 15), (4, plan, 0)]
        {
            pair.reply(&request(spender, key, charged, Deed::Charge), BEGIN_US);
            let later_us = BEGIN_US + 10;
            assert_eq!(left(&mut pair, key, later_us) == unused, charged == 0, "{rule:?}");
            assert!(pair.ask(&request(plan, key, 0, Deed::Reset), later_us), "{rule:?}");
            assert_eq!(left(&mut pair, key, later_us), unused, "{rule:?}, key {key}");
            // Nor does the window before count.
            assert_eq!(left(&mut pair, key, later_us + 3_600_000_000), unused, "{rule:?}");
        }
    }
}

/// The reply could not be read, so that the outage policy decided: of a key that owed much.
#[test]
fn key_that_owes_more_than_anybody_can_is_denied_until_it_is_reset() {
    let rules: [Rule; 7] = [
        Quota::per_minute(10).into(),
        Quota::new(1, YEAR).into(),
        Quota::new(TOKENS_MAX, Duration::from_millis(64)).into(),
        LeakyBucket::per_hour(7).into(),
        FixedWindow::per_hour(10).into(),
        SlidingWindow::new(TOKENS_MAX, YEAR).into(),
        SlidingLog::per_hour(10).into(),
    ];
    for rule in rules {
        let (limit, rule) = limit(rule);
        let mut pair = Pair::new(rule);
        let request = |cost, deed| {
            let key = b"key"[..].into();
            ExactRequest { limit, rule, key, cost, deed, slot_within_us: 0, windows: None }
        };
        for at in 0..3 {
            let charge = request(u32::MAX, Deed::Charge);
            let reply = pair.reply(&charge, BEGIN_US + at);
            charge.read(&reply).unwrap();
        }
        let ask = request(1, Deed::Ask);
        let reply = pair.reply(&ask, BEGIN_US + 10);
        assert!(!ask.read(&reply).unwrap().is_allowed, "{rule:?}");
        assert!(pair.ask(&request(0, Deed::Reset), BEGIN_US + 11), "{rule:?}");
        assert!(pair.ask(&ask, BEGIN_US + 12), "{rule:?}");
    }
}

/// The longest period.
const YEAR: Duration = Duration::from_secs(366 * 24 * 3600);

#[test]
fn token_bucket_is_the_same_in_lua_and_in_rust() {
    let largest = Quota::new(TOKENS_MAX, YEAR);
    same_machine(1, &[Quota::per_second(10).burst(20).into(), Quota::per_minute(7).into()]);
    same_machine(2, &[largest.into(), Quota::new(16_383, YEAR).into(), Quota::new(1, YEAR).into()]);
}

#[test]
fn leaky_bucket_is_the_same_in_lua_and_in_rust() {
    let queue = Duration::from_millis(700);
    let largest = LeakyBucket::new(16_381, Duration::from_micros(1_000_003)).queue(YEAR);
    same_machine(3, &[LeakyBucket::per_second(7).queue(queue).into()]);
    same_machine(4, &[largest.into(), LeakyBucket::new(3, YEAR).queue(YEAR).into()]);
}

#[test]
fn fixed_window_is_the_same_in_lua_and_in_rust() {
    same_machine(5, &[FixedWindow::per_second(10).into(), FixedWindow::per_minute(7).into()]);
    same_machine(6, &[FixedWindow::new(TOKENS_MAX, YEAR).into(), FixedWindow::new(1, YEAR).into()]);
}

#[cfg(feature = "calendar")]
#[test]
fn window_of_a_zone_is_the_same_in_lua_and_in_rust() {
    let zone = |window: FixedWindow| window.zone("America/St_Johns").into();
    same_machine(11, &[zone(FixedWindow::per_hour(100))]);
    let (hour, minute) = (zone(FixedWindow::per_hour(10)), FixedWindow::per_minute(7).into());
    same_machine(
        12,
        &[hour, zone(FixedWindow::per_day(40)), minute, zone(FixedWindow::per_month(90))],
    );
}

/// What was spent by another plan was spent now at each request, so nothing was admitted until the record expired.
#[cfg(feature = "calendar")]
#[test]
fn window_of_a_zone_that_follows_another_plan_counts_what_was_spent_until_its_own_end() {
    const MIDNIGHT: u64 = 1_774_738_800_000_000;
    const HOUR: u64 = 3_600_000_000;
    let zone = |window: FixedWindow| limit(window.zone("Europe/Berlin"));
    let (month, day) = (zone(FixedWindow::per_month(1000)), zone(FixedWindow::per_day(100)));
    let mut pair = Pair::new(day.1);
    let mut ask = |(limit, rule): (&'static LimitInfo, &'static KeyRule), cost, now| {
        let KeyRule::Window(WindowRule { calendar: Some(calendar), .. }) = rule else { panic!() };
        let (key, windows) = (b"key"[..].into(), Some(calendar.around(now)));
        let request =
            ExactRequest { limit, rule, key, cost, deed: Deed::Ask, slot_within_us: 0, windows };
        pair.ask(&request, now)
    };
    assert!(ask(month, 1000, MIDNIGHT + HOUR));
    assert!(!ask(day, 1, MIDNIGHT + 2 * HOUR) && !ask(day, 1, MIDNIGHT + 22 * HOUR));
    // That day has 23 hours.
    assert!(ask(day, 100, MIDNIGHT + 23 * HOUR));
    assert!(ask(month, 900, MIDNIGHT + 24 * HOUR) && !ask(month, 1, MIDNIGHT + 48 * HOUR));
}

#[test]
fn sliding_window_is_the_same_in_lua_and_in_rust() {
    let largest = SlidingWindow::new(TOKENS_MAX, YEAR);
    same_machine(7, &[SlidingWindow::per_second(10).into(), SlidingWindow::per_minute(7).into()]);
    same_machine(8, &[largest.into(), SlidingWindow::new(999_999_937, YEAR).into()]);
}

#[test]
fn sliding_log_is_the_same_in_lua_and_in_rust() {
    same_machine(9, &[SlidingLog::per_second(10).into(), SlidingLog::per_minute(7).into()]);
    same_machine(10, &[SlidingLog::new(1000, YEAR).into(), SlidingLog::per_hour(300).into()]);
}

/// Sums since then are written anew, so there is an end to it.
#[test]
fn tokens_of_a_log_do_not_go_back_once_501_elements_are_there_from_then_on() {
    let (limit, rule) = limit(SlidingLog::per_hour(1000));
    let mut pair = Pair::new(rule);
    let request = |deed| {
        let key = b"key"[..].into();
        ExactRequest { limit, rule, key, cost: 1, deed, slot_within_us: 0, windows: None }
    };
    let spent: Vec<SpentAt> =
        (0..600).filter_map(|at| pair.spend(&request(Deed::Ask), BEGIN_US + at)).collect();
    let now = BEGIN_US + 1000;
    let mut goes_back = |index: usize| pair.ask(&request(Deed::Return(spent[index])), now);
    assert!(!goes_back(0) && !goes_back(99) && goes_back(100));
    // Of those that are left 499 are later than this one.
    assert!(goes_back(99) && !goes_back(97) && goes_back(599) && goes_back(98));
    let reply = pair.reply(&request(Deed::Ask), now);
    assert_eq!(reply[2] as u64, 1000 - 600 + 4 - 1);
}

/// nginx before 1.15 gave a fresh burst where the clock went back; a script that keeps the later time denies for a year.
#[test]
fn clock_that_jumps_back_a_year_gives_no_fresh_burst_and_denies_for_two_periods_at_most() {
    let rules: [Rule; 5] = [
        Quota::per_second(10).into(),
        LeakyBucket::per_second(10).queue(Duration::from_millis(900)).into(),
        FixedWindow::per_second(10).into(),
        SlidingWindow::per_second(10).into(),
        SlidingLog::per_second(10).into(),
    ];
    for rule in rules {
        let (limit, rule) = limit(rule);
        let mut pair = Pair::new(rule);
        let year_us = YEAR.as_micros() as u64;
        let mut ask = |now: u64| {
            let key: Arc<[u8]> = b"key"[..].into();
            pair.ask(
                &ExactRequest {
                    limit,
                    rule,
                    key,
                    cost: 1,
                    slot_within_us: u64::MAX,
                    deed: Deed::Ask,
                    windows: None,
                },
                now,
            )
        };
        let allowed = (0..20).filter(|_| ask(BEGIN_US + year_us)).count();
        assert_eq!(allowed, 10, "{limit:?}");
        let at_once = (0..20).filter(|_| ask(BEGIN_US)).count();
        assert_eq!(at_once, 0, "what was spent counts: {limit:?}");
        let later = (0..40).filter(|step| ask(BEGIN_US + step * 50_000)).count();
        assert!(later >= 9, "{later} within two seconds: {limit:?}");
    }
}

/// A full bucket of 5 an hour, raised to 100 an hour and lowered again, gives nothing twice.
#[test]
fn plan_that_flaps_adds_nothing() {
    let pairs: [([Rule; 2], u32); 4] = [
        // A bucket keeps what it had; a window's plan tells how much may be spent in it.
        ([Quota::per_hour(5).into(), Quota::per_hour(100).into()], 5),
        ([FixedWindow::per_hour(5).into(), FixedWindow::per_hour(100).into()], 100),
        ([SlidingWindow::per_hour(5).into(), SlidingWindow::per_hour(100).into()], 100),
        ([SlidingLog::per_hour(5).into(), SlidingLog::per_hour(100).into()], 100),
    ];
    for (plans, expected) in pairs {
        let plans = plans.map(limit);
        let mut pair = Pair::new(plans[0].1);
        let mut allowed = 0;
        for step in 0..400 {
            let (limit, rule) = plans[step / 20 % 2];
            let request = ExactRequest {
                limit,
                rule,
                key: b"key"[..].into(),
                cost: 1,
                slot_within_us: 0,
                deed: Deed::Ask,
                windows: None,
            };
            allowed += u32::from(pair.ask(&request, BEGIN_US));
        }
        assert_eq!(allowed, expected, "{plans:?}");
    }
}

/// A look at it by the small quota cut what the large one owed: the next request had a full bucket, 170 tokens in 2 ms.
#[test]
fn look_by_another_quota_changes_nothing() {
    let pairs: [[Rule; 2]; 2] = [
        [Quota::per_hour(10).burst(20).into(), Quota::per_hour(50).burst(100).into()],
        [FixedWindow::per_day(20).into(), FixedWindow::per_day(100).into()],
    ];
    for plans in pairs {
        let [small, large] = plans.map(limit);
        let mut pair = Pair::new(large.1);
        let mut ask = |(limit, rule): (&'static LimitInfo, _), cost, now| {
            let key = b"key"[..].into();
            let (deed, slot_within_us, windows) = (Deed::Ask, 0, None);
            pair.ask(&ExactRequest { limit, rule, key, cost, deed, slot_within_us, windows }, now)
        };
        assert!(ask(large, 70, BEGIN_US));
        ask(small, 0, BEGIN_US + 1_000);
        assert!(!ask(large, 31, BEGIN_US + 2_000), "{plans:?}");
        assert!(ask(large, 30, BEGIN_US + 2_000), "{plans:?}");
        // A look by a rule that has another period neither.
        if let [Rule::FixedWindow(_), _] = plans {
            ask(self::limit(FixedWindow::per_hour(20)), 0, BEGIN_US + 3_000);
            assert!(!ask(large, 1, BEGIN_US + 4_000), "{plans:?}");
        }
    }
}

/// A small plan's bucket was full and forgotten long before the large one's: 200 tokens in two seconds, of 120.
#[test]
fn bucket_that_filled_up_by_a_small_plan_has_no_more_by_a_large_one() {
    let (small, large) = (limit(Quota::per_second(20)), limit(Quota::per_second(10).burst(100)));
    let mut pair = Pair::new(large.1);
    let mut ask = |(limit, rule): (&'static LimitInfo, _), cost, now| {
        let key = b"key"[..].into();
        let (deed, slot_within_us, windows) = (Deed::Ask, 0, None);
        pair.ask(&ExactRequest { limit, rule, key, cost, deed, slot_within_us, windows }, now)
    };
    assert!(ask(large, 100, BEGIN_US));
    assert!(!ask(small, 1, BEGIN_US + 1_000));
    assert!(!ask(large, 21, BEGIN_US + 2_002_000));
    assert!(ask(large, 20, BEGIN_US + 2_002_000), "what the small one had");
}

#[test]
fn record_that_another_rule_wrote_is_forgotten_no_earlier_than_before() {
    let (small, large) = (limit(Quota::per_second(10)), limit(Quota::per_hour(1000)));
    let mut model = ExactModel::default();
    let ask = |model: &mut ExactModel, (limit, rule): (&'static LimitInfo, _), cost, now| {
        let key = b"key"[..].into();
        let (deed, slot_within_us, windows) = (Deed::Ask, 0, None);
        model.expire(now);
        let request = ExactRequest { limit, rule, key, cost, deed, slot_within_us, windows };
        model.decide(&request, now).unwrap().is_allowed
    };
    assert!(ask(&mut model, large, 1000, BEGIN_US));
    assert!(!ask(&mut model, small, 1, BEGIN_US + 1));
    assert!(!ask(&mut model, large, 11, BEGIN_US + 2_000_000), "ten have flowed in");
    assert!(ask(&mut model, large, 10, BEGIN_US + 2_000_000));
    // A reset forgets all of it.
    let deed = Deed::Reset;
    let (limit, rule) = small;
    let key = b"key"[..].into();
    let reset = ExactRequest { limit, rule, key, cost: 0, deed, slot_within_us: 0, windows: None };
    model.decide(&reset, BEGIN_US + 2_000_001).unwrap();
    assert!(ask(&mut model, large, 1000, BEGIN_US + 2_010_000));
    let hour_us = 3_600_000_000;
    assert!(
        ask(&mut model, large, 1000, BEGIN_US + 2_010_000 + hour_us),
        "it is full, and forgotten"
    );
}

/// A denied request converted the bucket, and forgot that it had: it refilled by the old plan until something was allowed.
#[test]
fn bucket_refills_by_the_new_plan_from_the_first_request_on() {
    let key = || -> Arc<[u8]> { b"key"[..].into() };
    let (slow, quick) = (limit(Quota::per_hour(1)), limit(Quota::per_second(100)));
    let mut pair = Pair::new(slow.1);
    let mut ask = |(limit, rule): (&'static LimitInfo, _), cost, now| {
        pair.ask(
            &ExactRequest {
                limit,
                rule,
                key: key(),
                cost,
                slot_within_us: 0,
                deed: Deed::Ask,
                windows: None,
            },
            now,
        )
    };
    assert!(ask(slow, 1, BEGIN_US));
    assert!(!ask(quick, 1, BEGIN_US + 1), "nothing was left");
    assert!(!ask(quick, 1, BEGIN_US + 9_000) && ask(quick, 1, BEGIN_US + 10_002));
    let low = limit(Quota::per_hour(1).burst(100));
    let later = BEGIN_US + 3_600_000_000;
    assert!(ask(quick, 100, later));
    assert!(!ask(low, 1, later + 1));
    let allowed = (1..=3000).filter(|second| ask(low, 100, later + second * 1_000_000)).count();
    assert_eq!(allowed, 0, "a hundred tokens take a hundred hours");
}

/// It was counted in hours until something was allowed.
#[test]
fn window_of_another_length_counts_what_was_spent_in_its_own_windows() {
    let rules: [[Rule; 2]; 2] = [
        [FixedWindow::per_hour(1000).into(), FixedWindow::per_second(10).into()],
        [SlidingWindow::per_hour(1000).into(), SlidingWindow::per_second(10).into()],
    ];
    for plans in rules {
        let [hour, second] = plans.map(limit);
        let mut pair = Pair::new(hour.1);
        let mut ask = |(limit, rule): (&'static LimitInfo, _), cost, now| {
            let key = b"key"[..].into();
            pair.ask(
                &ExactRequest {
                    limit,
                    rule,
                    key,
                    cost,
                    slot_within_us: 0,
                    deed: Deed::Ask,
                    windows: None,
                },
                now,
            )
        };
        assert!(ask(hour, 1000, BEGIN_US));
        assert!(!ask(second, 1, BEGIN_US + 1), "the second of the requests is full");
        assert!(ask(second, 1, BEGIN_US + 2_000_000), "and two seconds later nothing counts");
        assert!(!ask(second, 10, BEGIN_US + 2_000_001));
    }
}

/// It read all elements, 51 ms for 100,000.
#[test]
fn long_log_is_searched_in_few_looks() {
    let (limit, rule) = limit(SlidingLog::per_hour(50_000));
    let mut pair = Pair::new(rule);
    let fill =
        "for i = 1, 40000 do redis.call('RPUSH', KEYS[1], struct.pack('<dd', ARGV[1] + i, i)) end";
    let key: Arc<[u8]> = b"key"[..].into();
    let name = format!("{}:{key:?}", limit.rule.algorithm());
    let (): () = Script::new(fill).key(name).arg(BEGIN_US).invoke(&mut pair.connection).unwrap();
    let halfway = BEGIN_US + 3_600_000_000 + 20_000;
    for (cost, now) in [(50_000, BEGIN_US + 50_000), (40_000, halfway), (0, halfway), (1, halfway)]
    {
        let (): () = redis::cmd("CONFIG").arg("RESETSTAT").query(&mut pair.connection).unwrap();
        let request = ExactRequest {
            limit,
            rule,
            key: key.clone(),
            cost,
            slot_within_us: 0,
            deed: Deed::Ask,
            windows: None,
        };
        let mut call = pair.script.prepare_invoke();
        call.key(format!("{}:{key:?}", limit.rule.algorithm()));
        call.arg(request.bytes(KEEP_BY_GIVEN_TIME_US)).arg(now);
        let reply: Vec<u8> = call.invoke(&mut pair.connection).unwrap();
        let reply = request.decode(&reply).unwrap();
        let stats: String =
            redis::cmd("INFO").arg("commandstats").query(&mut pair.connection).unwrap();
        let calls = stats.split("cmdstat_lindex:calls=").nth(1).unwrap();
        let calls: u32 = calls.split(',').next().unwrap().parse().unwrap();
        assert!(calls <= 70, "{calls} looks for {cost} tokens: {reply:?}");
        assert_eq!(reply.is_allowed, cost <= 1);
    }
}

#[test]
fn malformed_reply_is_an_error_with_field_and_value() {
    let rules: [(Rule, usize); 3] = [
        (Quota::per_second(10).into(), 4),
        (SlidingWindow::per_second(10).into(), 4),
        (SlidingLog::per_second(10).into(), 6),
    ];
    for (rule, numbers) in rules {
        let (limit, rule) = limit(rule);
        let key = b"key"[..].into();
        let request = ExactRequest {
            limit,
            rule,
            key,
            cost: 1,
            slot_within_us: 0,
            deed: Deed::Ask,
            windows: None,
        };
        let reply = |numbers: &[f64]| -> Vec<u8> {
            numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
        };
        assert!(request.decode(&reply(&vec![0.0; numbers])).is_ok(), "{rule:?}");
        let mut wrong = vec![Vec::new(), vec![0.0; numbers - 1], vec![0.0; numbers + 1]];
        for number in [-1.0, f64::NAN, f64::INFINITY, 1e300] {
            wrong.extend((0..numbers).map(|place| {
                let mut numbers = vec![0.0; numbers];
                numbers[place] = number;
                numbers
            }));
        }
        for wrong in wrong {
            let error = request.decode(&reply(&wrong)).unwrap_err();
            assert!(matches!(error, StoreError::Reply { field: "decision", .. }), "{wrong:?}");
        }
        let odd = request.decode(&[0; 33]).unwrap_err();
        assert!(odd.to_string().contains("33 bytes"), "{odd}");
    }
}
