//! Decisions by key, beside keys that are inserted and evicted.

use super::*;
use crate::algorithm::{LogRule, TurnRule};
use crate::bucket::key_hash::KeyHasher;
use crate::bucket::key_hash::tests::SEEDS;
use crate::bucket::lease_bucket::LeaseBucket;
use crate::bucket::local_bucket::LocalBucket;
use crate::bucket::log_bucket::LogBucket;
use crate::bucket::new_key::NewKey;
use crate::bucket::spend_result::{Ask, LocalAsk};
use crate::bucket::table::{Evictable, KeyBudget, Room, Table, TableBucket};
use crate::quota::{Curve, Scale};
use crate::time::{CLOCK_AGE_MAX_US, Timestamp};

/// A token in a million years, and a burst of one.
const SCALE: Scale = Scale { rate: 1, token: 1 << 50, burst: 1 << 50, curve: Curve::Refill };
/// A credit of one.
const ASK: Ask =
    Ask { cost: 1, scale: SCALE, first_credit: 1, plan: NewKey::NO_PLAN, can_wait: false };
const RULE: TurnRule = TurnRule::TokenBucket(SCALE);
const LOCAL_ASK: LocalAsk<TurnRule> =
    LocalAsk { cost: 1, rule: &RULE, within_us: 0, plan: NewKey::NO_PLAN };
/// A token in a million years.
const LOG_RULE: LogRule = LogRule { tokens: 1, period_us: 1 << 50 };
const LOG_ASK: LocalAsk<LogRule> =
    LocalAsk { cost: 1, rule: &LOG_RULE, within_us: 0, plan: NewKey::NO_PLAN };
const NOW: Timestamp = Timestamp::from_micros(1);
const LATER: Timestamp = Timestamp::from_micros(3 + CLOCK_AGE_MAX_US);

fn table<B: TableBucket>(max_keys: usize, first_credit: u32) -> Table<B> {
    let budget = StdArc::new(KeyBudget::new(max_keys, 1));
    Table::new(0, KeyHasher::new(SEEDS), budget, first_credit).unwrap()
}

/// Decides as [`Limiter`](crate::Limiter) does about a key of a local limit.
fn decide_local(table: &Table<LocalBucket>, key: &[u8], now: Timestamp) -> bool {
    loop {
        let found = table.find_or_insert(key, NewKey::with_credit(0), Room::Any);
        if let Some(answer) = found.bucket.try_decide(found.word, LOCAL_ASK, now) {
            return answer.is_allowed;
        }
    }
}

/// The same of a log of one token.
fn decide_log(table: &Table<LogBucket>, key: &[u8], now: Timestamp) -> bool {
    loop {
        let found = table.find_or_insert(key, NewKey::with_credit(0), Room::Any);
        if let Some(answer) = found.bucket.try_decide(found.word, LOG_ASK, now) {
            return answer.is_allowed;
        }
    }
}

/// The same of a hybrid limit, on a credit of one.
fn decide_leased(table: &Table<LeaseBucket>, key: &[u8]) -> bool {
    loop {
        let found = table.find_or_insert(key, NewKey::with_credit(1), Room::Any);
        if let Some(result) = found.bucket.decide(found.word, ASK, NOW) {
            return result.is_allowed();
        }
    }
}

#[test]
fn key_that_two_threads_insert_has_one_bucket() {
    check("insert against insert", || {
        let table = Arc::new(table::<LocalBucket>(4, 0));
        let other = run(&table, |table| decide_local(table, b"a", NOW));
        let allowed = decide_local(&table, b"a", NOW);
        assert!(allowed != other.join().unwrap());
    });
}

#[test]
fn key_is_found_while_the_index_grows() {
    check("look-up against growth", || {
        let table = Arc::new(table::<LocalBucket>(16, 0));
        assert!(decide_local(&table, b"a", NOW));
        let insert = |table: &Table<LocalBucket>| {
            [b"b", b"c", b"d", b"e", b"f"]
                .map(|key| table.find_or_insert(key, NewKey::with_credit(0), Room::Any).place)
        };
        let inserter = run(&table, insert);
        assert!(!decide_local(&table, b"a", NOW));
        assert_eq!(inserter.join().unwrap(), [2, 3, 4, 5, 6]);
        assert_eq!(insert(&table), [2, 3, 4, 5, 6]);
        assert!(!decide_local(&table, b"a", NOW));
    });
}

#[test]
fn local_key_does_not_pay_for_another_key_that_had_its_place() {
    check("local decision against eviction", || {
        let table = Arc::new(table::<LocalBucket>(1, 0));
        // Full since long, so that it can be evicted.
        table.find_or_insert(b"a", NewKey::with_credit(0), Room::Any);
        let old = run(&table, |table| {
            let found = table.find(b"a");
            found.and_then(|found| found.bucket.try_decide(found.word, LOCAL_ASK, NOW)).is_some()
        });
        let (now, cached) = (LATER, LATER.minus_micros(CLOCK_AGE_MAX_US));
        let is_evicted = table.evict(1, now, &RULE, Evictable::Full) == 1;
        let allowed = is_evicted.then(|| decide_local(&table, b"b", cached));
        let is_old_spent = old.join().unwrap();
        assert_ne!(allowed, Some(false), "the new key is denied");
        assert!(!(is_old_spent && is_evicted), "what the old key spent is forgotten");
    });
}

#[test]
fn hybrid_key_does_not_pay_for_another_key_that_had_its_place() {
    check("leased decision against eviction", || {
        let table = Arc::new(table::<LeaseBucket>(1, 0));
        table.find_or_insert(b"a", NewKey::with_credit(1), Room::Any);
        let old = run(&table, |table| {
            let found = table.find(b"a");
            found.and_then(|found| found.bucket.decide(found.word, ASK, NOW)).is_some()
        });
        let is_evicted = table.evict(1, LATER, &SCALE, Evictable::Full) == 1;
        let allowed = is_evicted.then(|| decide_leased(&table, b"b"));
        let is_old_spent = old.join().unwrap();
        assert_ne!(allowed, Some(false), "the new key is denied");
        assert!(!(is_old_spent && is_evicted), "what the old key spent is forgotten");
    });
}

#[test]
fn log_of_a_key_is_not_written_by_another_key_that_had_its_place() {
    check("log's decision against eviction", || {
        let table = Arc::new(table::<LogBucket>(1, 0));
        table.find_or_insert(b"a", NewKey::with_credit(0), Room::Any);
        let old = run(&table, |table| {
            let found = table.find(b"a");
            found.and_then(|found| found.bucket.try_decide(found.word, LOG_ASK, NOW)).is_some()
        });
        let is_evicted = table.evict(1, LATER, &LOG_RULE, Evictable::Full) == 1;
        let allowed = is_evicted.then(|| decide_log(&table, b"b", LATER));
        let is_old_spent = old.join().unwrap();
        assert_ne!(allowed, Some(false), "the new key is denied");
        assert!(!(is_old_spent && is_evicted), "what the old key spent is forgotten");
    });
}
