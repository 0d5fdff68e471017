//! What the table promises: exact keys, eviction, and decisions that outlive their place.

use crate::quota::Curve;
use std::collections::HashSet;
use std::sync::atomic::AtomicBool;

use super::*;
use crate::algorithm::TurnRule;
use crate::bucket::key_hash::tests::SEEDS;
use crate::bucket::new_key::NewKey;
use crate::bucket::spend_result::{Ask, LocalAsk};
use crate::bucket::{BucketRef, Collected, Lease, LeaseBucket, LocalBucket};

/// A token a microsecond, and a burst of 100.
const SCALE: Scale = Scale { rate: 1, token: 1, burst: 100, curve: Curve::Refill };

fn table_with(hasher: KeyHasher, max_keys: usize) -> Arc<Table<LeaseBucket>> {
    let budget = Arc::new(KeyBudget::new(max_keys, 1));
    Arc::new(Table::new(0, hasher, budget, 0).unwrap())
}

fn table(max_keys: usize) -> Arc<Table<LeaseBucket>> {
    table_with(KeyHasher::new(SEEDS), max_keys)
}

fn at(us: u64) -> Timestamp {
    Timestamp::from_micros(us)
}

/// The place of a key, which has a token of credit if it is new.
fn insert(table: &Table<LeaseBucket>, key: &[u8]) -> u32 {
    table.find_or_insert(key, NewKey::with_credit(1), Room::Any).place
}

fn find<B: TableBucket>(table: &Table<B>, key: &[u8]) -> Option<u32> {
    table.find(key).map(|found| found.place)
}

fn ask(cost: u32) -> Ask {
    Ask { cost, scale: SCALE, first_credit: 1, plan: NewKey::NO_PLAN, can_wait: false }
}

fn spend(table: &Arc<Table<LeaseBucket>>, place: u32, now: Timestamp) -> bool {
    BucketRef::new(table, place).decide(ask(1), now).is_allowed()
}

fn evict(table: &Table<LeaseBucket>, most: u32, now: Timestamp) -> usize {
    table.evict(most, now, &SCALE, Evictable::Full)
}

#[test]
fn bucket_ref_has_the_limit_of_its_table_and_is_overflow_at_the_overflow_place_only() {
    let budget = Arc::new(KeyBudget::new(10, 1));
    let table = Arc::new(Table::<LeaseBucket>::new(3, KeyHasher::new(SEEDS), budget, 0).unwrap());
    for (place, is_overflow) in [(insert(&table, b"key"), false), (OVERFLOW, true)] {
        let bucket = BucketRef::new(&table, place);
        assert_eq!((bucket.limit(), bucket.is_overflow()), (3, is_overflow));
    }
}

/// Makes all keys, which differ, and finds each of them again, in a bucket of its own.
fn assert_no_two_share(table: &Arc<Table<LeaseBucket>>, keys: &[Vec<u8>]) {
    let places: Vec<u32> = keys.iter().map(|key| insert(table, key)).collect();
    let distinct: HashSet<u32> = places.iter().copied().collect();
    assert_eq!((distinct.len(), distinct.contains(&OVERFLOW)), (keys.len(), false));
    for (key, place) in keys.iter().zip(places) {
        assert_eq!(find(table, key), Some(place), "{key:?}");
        assert_eq!(*BucketRef::new(table, place).key(), key[..]);
    }
}

/// Pairs of keys of all lengths to 128 bytes: those that a hash cannot tell apart that mixes the length
/// into the first byte, and those that differ by repetition, padding, a prefix or a suffix only.
fn twins() -> Vec<Vec<u8>> {
    const LENGTH_MAX: u8 = 128;
    let mut keys = Vec::new();
    for long in 1..=LENGTH_MAX {
        for short in 1..long {
            let (all, part) = (usize::from(long), usize::from(short));
            let mut mixed = vec![b'0'; all];
            mixed[0] ^= short ^ long;
            let mut padded = vec![b'x'; part];
            padded.resize(all, 0);
            let mut prefixed = vec![0; all - part];
            prefixed.resize(all, b'x');
            keys.extend([vec![b'0'; part], mixed, vec![b'x'; part], padded, prefixed]);
        }
        keys.push(vec![b'x'; long.into()]);
    }
    let mut seen = HashSet::new();
    keys.retain(|key| seen.insert(key.clone()));
    keys
}

#[test]
fn decimal_keys_never_share_a_bucket() {
    let keys: u32 = std::env::var("TIDEGATE_TEST_KEYS")
        .map_or(1_000_000, |keys| keys.parse().expect("TIDEGATE_TEST_KEYS: a number of keys"));
    let table = table(keys as usize);
    for key in 0..keys {
        // Places are given one after the other, so a key that shared one would be seen.
        assert_eq!(insert(&table, key.to_string().as_bytes()), key + 1);
    }
    for key in 0..keys {
        assert_eq!(find(&table, key.to_string().as_bytes()), Some(key + 1));
    }
}

#[test]
fn twins_of_all_lengths_never_share_a_bucket() {
    let keys = twins();
    assert_no_two_share(&table(keys.len()), &keys);
}

#[test]
fn twins_with_one_hash_never_share_a_bucket() {
    for keys in twins().chunks(2_000) {
        assert_no_two_share(&table_with(KeyHasher::constant(u64::MAX), keys.len()), keys);
    }
}

#[test]
fn random_keys_with_one_hash_never_share_a_bucket_and_are_evicted() {
    let mut rng = fastrand::Rng::with_seed(11);
    let mut key = || (0..rng.usize(1..=512)).map(|_| rng.u8(..)).collect::<Vec<u8>>();
    let keys: HashSet<Vec<u8>> = (0..10_000).map(|_| key()).collect();
    let keys: Vec<Vec<u8>> = keys.into_iter().collect();
    let table = table_with(KeyHasher::constant(u64::MAX), keys.len());
    assert_no_two_share(&table, &keys);
    // Those that were spent from stay.
    for key in keys.iter().take(100) {
        assert!(spend(&table, find(&table, key).unwrap(), at(1)));
    }
    assert_eq!(evict(&table, keys.len() as u32, at(2)), keys.len() - 100);
    for (index, key) in keys.iter().enumerate() {
        assert_eq!(find(&table, key).is_some(), index < 100, "{key:?}");
    }
    assert_no_two_share(&table, &keys[100..2_100]);
    assert_eq!(table.budget.used(), 2_100);
}

#[test]
fn long_keys_are_compared_to_the_last_byte_and_their_room_is_given_again() {
    let table = table(100);
    for length in [32, 33, 64, 65, 100, 511, 512] {
        let key = vec![b'k'; length];
        let others = (0..length).map(|at| {
            let mut other = key.clone();
            other[at] = b'K';
            other
        });
        let place = insert(&table, &key);
        for other in others {
            assert_eq!(find(&table, &other), None);
        }
        assert_eq!(*BucketRef::new(&table, place).key(), key[..]);
        assert_eq!(evict(&table, EVICTION_SLICE, at(1)), 1);
        assert_eq!(find(&table, &key), None);
        assert_eq!(insert(&table, &vec![b'n'; length]), place, "the place is given again");
        assert_eq!(evict(&table, EVICTION_SLICE, at(1)), 1);
    }
}

/// With a tag of 0 an empty index entry looked like that of place 0, and an empty key like the key there: the
/// overflow bucket.
#[test]
fn empty_key_whose_hash_has_no_tag_is_not_the_overflow_bucket() {
    for hash in [0, 1 << 40, u64::MAX] {
        let table = table_with(KeyHasher::constant(hash), 10);
        assert_eq!(find(&table, b""), None, "hash {hash:x}");
        assert!(table.find_first(b"").is_none());
        assert_ne!(insert(&table, b""), OVERFLOW, "hash {hash:x}");
    }
}

#[test]
fn keys_beyond_the_budget_share_the_overflow_bucket() {
    let table = table(2);
    let places: Vec<u32> = (0..4_u8).map(|key| insert(&table, &[key])).collect();
    assert_eq!(places, [1, 2, OVERFLOW, OVERFLOW]);
    assert_eq!(table.budget.used(), 2);
    assert!(BucketRef::new(&table, OVERFLOW).is_overflow());
}

#[test]
fn limit_finds_room_for_its_share_whatever_the_others_hold() {
    let budget = Arc::new(KeyBudget::new(100, 2));
    let tables = [0, 1].map(|limit| {
        Table::<LeaseBucket>::new(limit, KeyHasher::new(SEEDS), budget.clone(), 0).unwrap()
    });
    let held = |table: &Table<LeaseBucket>, keys: u32| {
        (0..keys).filter(|key| insert(table, &key.to_le_bytes()) != OVERFLOW).count()
    };
    assert_eq!(held(&tables[0], 1000), 75, "its share of 25, and the 50 that are for all");
    assert_eq!((tables[0].free_64ths(), tables[1].free_64ths()), (0, 64));
    assert_eq!(held(&tables[1], 1000), 25);
    assert_eq!((budget.used(), tables[1].free_64ths()), (100, 0));
    // What one gives back, the other one can have.
    assert_eq!(evict(&tables[0], 100, at(10)), 75);
    assert_eq!(held(&tables[1], 1000), 75);
    assert_eq!(held(&tables[0], 1000), 25);
    assert_eq!(budget.used(), 100);
}

#[test]
fn key_evicted_before_it_is_full_has_no_first_credit_when_it_returns() {
    let table = table(2);
    let place = insert(&table, b"spent");
    assert!(spend(&table, place, at(1)));
    let bucket = BucketRef::new(&table, place);
    bucket.open_account(7);
    let evict_reported = |now| table.evict(10, now, &SCALE, Evictable::Reported);
    assert_eq!(evict_reported(at(1)), 0, "the store does not know of it");
    assert_eq!(bucket.collect(false, |credit| credit).spent, 1);
    assert_eq!(evict_reported(at(1)), 0, "the engine has an account");
    assert!(bucket.try_close_account(at(100), true));
    assert_eq!(evict(&table, 10, at(2)), 0, "it is not full");
    assert_eq!(evict_reported(at(2)), 1);
    let place = insert(&table, b"spent");
    assert!(table.is_marked(b"spent") && !table.is_marked(b"other"));
    table.set_credit_at_rest(1);
    assert!(!spend(&table, place, at(2)));
    assert!(spend(&table, insert(&table, b"other"), at(2)));
    // As long as an empty bucket takes to fill, and at most twice as long.
    table.forget_marks(at(2 + 2 * 101), &SCALE);
    assert!(table.writer().marks.is_empty());
}

#[test]
fn key_that_was_asked_for_often_is_kept_longer_than_one_asked_for_once() {
    let table = table(2);
    for (key, is_seen_once) in [(b"often", false), (b"once!", true)] {
        let place = insert(&table, key);
        assert!(spend(&table, place, at(1)));
        let bucket = BucketRef::new(&table, place);
        bucket.open_account(7);
        bucket.collect(false, |credit| credit);
        assert!(bucket.try_close_account(at(100), is_seen_once));
    }
    assert_eq!(table.evict(10, at(2), &SCALE, Evictable::Full), 0);
    assert_eq!(table.evict(10, at(2), &SCALE, Evictable::SeenOnce), 1);
    assert!(find(&table, b"often").is_some());
    assert_eq!(table.evict(10, at(2), &SCALE, Evictable::Reported), 1);
}

#[test]
fn last_room_is_for_callers_who_wait() {
    // 640 keys in all, a 64th of them last.
    let budget = KeyBudget::new(640, 1);
    let (share, mut held) = (budget.share_of(0), 0);
    while budget.take_room(share, held, Room::NotLast) {
        held += 1;
    }
    assert_eq!(held, 630);
    while budget.take_room(share, held, Room::Any) {
        held += 1;
    }
    assert_eq!((held, budget.used(), budget.max()), (640, 640, 640));
}

#[test]
fn eviction_looks_at_as_many_places_as_it_is_told_to() {
    let table = table(200);
    for key in 0..200_u32 {
        insert(&table, &key.to_le_bytes());
    }
    // The rest of the second slice too.
    let most = EVICTION_SLICE + EVICTION_SLICE / 2;
    assert_eq!(evict(&table, most, at(1)), most as usize);
    assert_eq!(evict(&table, 1000, at(1)), 200 - most as usize);
}

#[test]
fn decisions_are_counted_by_what_the_bucket_does_not_count() {
    let table = table(2);
    let result = |verdict, is_sure, is_uncounted| {
        let result = LeaseBucket::default().result(verdict, is_sure, 0);
        SpendResult { is_uncounted, ..result }
    };
    let counted = |place, result: SpendResult, cost| {
        table.count(place, &result, cost);
        let LimitCounts { unsure, denied, denied_surplus, overflowed, .. } = table.take_counts();
        [unsure, denied, denied_surplus, overflowed]
    };
    let (allowed, denied) = (Verdict::Allowed, Verdict::Denied);
    for place in [1, STRIPES as u32 + 1] {
        assert_eq!(counted(place, result(allowed, true, false), 5), [0, 0, 0, 0]);
        assert_eq!(counted(place, result(allowed, false, false), 5), [1, 0, 0, 0]);
        assert_eq!(counted(place, result(denied, true, false), 5), [0, 0, 4, 0]);
        assert_eq!(counted(place, result(denied, true, false), 1), [0, 0, 0, 0]);
        assert_eq!(counted(place, result(denied, false, true), 5), [1, 1, 0, 0]);
        assert_eq!(counted(place, result(denied, false, true), 0), [0, 0, 0, 0]);
        assert_eq!(counted(place, result(Verdict::Unsure, false, false), 5), [0, 0, 0, 0]);
    }
    assert_eq!(counted(OVERFLOW, result(allowed, true, false), 1), [0, 0, 0, 1]);
    assert_eq!(counted(OVERFLOW, result(Verdict::Unsure, false, false), 1), [0, 0, 0, 0]);
}

#[test]
fn credit_at_rest_is_set_on_all_keys_and_a_new_key_would_have_what_it_is_given() {
    let table = table(3);
    let places = [OVERFLOW, insert(&table, b"a"), insert(&table, b"b")];
    table.set_credit_at_rest(5);
    for place in places {
        assert_eq!(table.at(place).credit_at_rest(), 5, "{place}");
    }
    assert_eq!(table.new_bucket(b"c", NewKey::with_credit(3)).credit_at_rest(), 3);
    assert_eq!(format!("{table:?}"), "Table { limit: 0, .. }");
}

#[test]
fn slabs_are_allocated_when_their_first_place_is_needed() {
    let table = table(10 * SLAB);
    let allocated = || table.slabs.iter().filter(|slab| slab.get().is_some()).count();
    assert_eq!(allocated(), 1);
    for key in 0..SLAB as u32 {
        insert(&table, &key.to_le_bytes());
    }
    assert_eq!(allocated(), 2);
}

#[test]
fn eviction_takes_only_keys_that_are_idle_and_not_pinned() {
    let table = table(3);
    let now = at(10);
    let (pinned, again) = (
        table.pin(b"pinned", NewKey::with_credit(1)),
        table.pin(b"pinned", NewKey::with_credit(1)),
    );
    assert_eq!(pinned, again);
    let spent = insert(&table, b"spent");
    insert(&table, b"idle");
    assert!(spend(&table, spent, now));
    assert_eq!(evict(&table, EVICTION_SLICE, now), 1, "the idle one");
    table.unpin(pinned);
    assert_eq!((table.budget.used(), evict(&table, EVICTION_SLICE, now)), (2, 0), "pinned twice");
    table.unpin(pinned);
    assert_eq!(evict(&table, EVICTION_SLICE, now), 1);
    assert_eq!(find(&table, b"spent"), Some(spent));
    assert_eq!((find(&table, b"idle"), find(&table, b"pinned")), (None, None));
}

#[test]
fn decision_whose_place_went_to_another_key_changes_nothing_there() {
    let table = table(1);
    insert(&table, b"a");
    // The decision about `a` has found the bucket and is suspended.
    let Found { bucket, word, place } = table.find(b"a").unwrap();
    assert_eq!(evict(&table, 1, at(2)), 1);
    assert!(BucketRef::new(&table, place).is_retired());
    for cost in [1, 2] {
        assert_eq!(bucket.decide(word, ask(cost), at(2)), None, "nothing is left");
    }
    assert_eq!(insert(&table, b"b"), place, "`b` has the place");
    bucket.open_account(7);
    let lease = Lease { rate: 1, depth: 100, ends: at(1000), ..Lease::default() };
    bucket.amend(at(2), lease, 60, 0, SCALE.token);
    assert!(spend(&table, place, at(2)));
    let before = (bucket.held_and_pending(), bucket.demand(), bucket.view_and_refill());
    // It goes on.
    for cost in [1, 2, 70] {
        for can_wait in [false, true] {
            assert_eq!(bucket.decide(word, Ask { can_wait, ..ask(cost) }, at(2)), None);
        }
        assert_eq!(bucket.spend(word, cost, at(2), || SCALE.token), None);
    }
    assert_eq!(bucket.deny(word, at(2), SCALE.token), None);
    assert_eq!((bucket.held_and_pending(), bucket.demand(), bucket.view_and_refill()), before);
}

#[test]
fn denial_whose_place_went_to_another_key_is_not_counted_there() {
    let table = table(1);
    insert(&table, b"a");
    let Found { bucket, word, .. } = table.find(b"a").unwrap();
    assert_eq!(evict(&table, 1, at(2)), 1);
    insert(&table, b"b");
    assert_eq!(bucket.decide(word, ask(5), at(2)), None);
    assert_eq!(
        bucket.collect(false, |credit| credit),
        Collected { credit: 1, ..Collected::default() }
    );
}

#[test]
fn every_key_is_found_while_others_come_and_go_and_the_index_grows() {
    let table = table(20_000);
    let mut rng = fastrand::Rng::with_seed(7);
    let mut alive = HashMap::new();
    for step in 0..100_000_u64 {
        let now = at(step * 100);
        let key = rng.u64(0..30_000);
        let place = insert(&table, &key.to_le_bytes());
        if place != OVERFLOW {
            let before = alive.insert(key, place);
            assert!(before.is_none_or(|before| before == place), "{key} was moved");
        }
        if step % 1000 == 0 {
            // Keys with odd numbers are in use.
            for (key, place) in alive.iter().filter(|(key, _)| *key % 2 == 1) {
                spend(&table, *place, now);
                assert_eq!(find(&table, &key.to_le_bytes()), Some(*place));
            }
            evict(&table, 4096, now);
            alive.retain(|key, place| {
                let is_gone = BucketRef::new(&table, *place).is_retired();
                assert_eq!(find(&table, &key.to_le_bytes()), (!is_gone).then_some(*place));
                !is_gone
            });
            assert_eq!(table.budget.used(), alive.len());
        }
    }
    assert!(alive.len() > 10_000, "the index has grown");
}

#[test]
#[allow(clippy::disallowed_methods, reason = "a test's own thread")]
fn readers_without_a_lock_always_find_keys_that_stay() {
    let table = table(4_000);
    let stay: Vec<u32> = (0..500_u64).map(|key| insert(&table, &key.to_le_bytes())).collect();
    for &place in &stay {
        assert!(spend(&table, place, at(1)));
    }
    let done = Arc::new(AtomicBool::new(false));
    let reader = {
        let (table, stay, done) = (table.clone(), stay.clone(), done.clone());
        std::thread::spawn(move || {
            let (mut looks, mut missed) = (0_u64, 0_u64);
            while !done.load(Ordering::Relaxed) || looks == 0 {
                for (key, place) in (0_u64..).zip(&stay) {
                    let found = find(&table, &key.to_le_bytes());
                    missed += u64::from(found.is_none());
                    // Missed while it was moved: with the lock held it is found.
                    let found = found.unwrap_or_else(|| insert(&table, &key.to_le_bytes()));
                    assert_eq!(found, *place);
                    looks += 1;
                }
            }
            (looks, missed)
        })
    };
    for round in 0..200_u64 {
        for key in 0..3_000 {
            insert(&table, &(1_000 + round * 3_000 + key).to_le_bytes());
        }
        while evict(&table, 8_192, at(round)) > 0 {}
    }
    done.store(true, Ordering::Relaxed);
    let (looks, missed) = reader.join().unwrap();
    assert!(missed * 100 < looks, "{missed} of {looks} looks missed their keys");
}

/// Two keys fight for one place, and the evictor takes it from either as soon as it is idle.
#[test]
#[allow(clippy::disallowed_methods, reason = "a test's own threads")]
fn tokens_are_charged_to_the_key_that_asked_while_places_change_hands() {
    const EACH: u64 = 500;
    let table = table(1);
    // A place that was never given has no key to charge.
    insert(&table, b"a");
    let stop = Arc::new(AtomicBool::new(false));
    let spenders = [b"a", b"b"].map(|key| {
        let table = table.clone();
        std::thread::spawn(move || {
            let mut spent = 0_u64;
            while spent < EACH {
                let found = table.find_or_insert(key, NewKey::with_credit(1), Room::Any);
                if found.place != OVERFLOW {
                    let decided = found.bucket.decide(found.word, ask(1), at(2));
                    spent += u64::from(decided.is_some_and(|result| result.is_allowed()));
                }
                std::thread::yield_now();
            }
            spent
        })
    });
    // The engine's part: what it collects, it charges to the key that the bucket has.
    let engine = {
        let (table, stop) = (table.clone(), stop.clone());
        std::thread::spawn(move || {
            let mut charged = HashMap::new();
            let mut last_round = false;
            while !last_round {
                last_round = stop.load(Ordering::SeqCst);
                let bucket = BucketRef::new(&table, 1);
                if !bucket.is_retired() {
                    let key = bucket.key();
                    *charged.entry(key).or_insert(0) += bucket.collect(false, |_| 1).spent;
                }
                evict(&table, 1, at(1_000));
            }
            charged
        })
    };
    let spent = spenders.map(|one| one.join().unwrap());
    stop.store(true, Ordering::SeqCst);
    let charged = engine.join().unwrap();
    let of = |key: &[u8]| charged.get(key).copied().unwrap_or_default();
    assert_eq!([of(b"a"), of(b"b")], spent);
}

const RULE: &TurnRule =
    &TurnRule::TokenBucket(Scale { rate: 1, token: 10, burst: 20, curve: Curve::Refill });

#[test]
#[allow(clippy::disallowed_methods, reason = "a test's own threads")]
fn local_keys_are_never_mistaken_for_each_other_while_places_change_hands() {
    let budget = Arc::new(KeyBudget::new(2, 1));
    let ask = LocalAsk { cost: 1, rule: RULE, within_us: 0, plan: NewKey::NO_PLAN };
    let table = Arc::new(Table::<LocalBucket>::new(0, KeyHasher::new(SEEDS), budget, 0).unwrap());
    let stop = Arc::new(AtomicBool::new(false));
    // In each round the time is 100 us later: each of three keys has two tokens, if it has room.
    let spend = |key: u8| {
        let table = table.clone();
        std::thread::spawn(move || {
            for round in 1..20_000_u64 {
                let now = at(round * 100);
                let mut spent = 0;
                for _ in 0..4 {
                    let found = table.find_or_insert(&[key], NewKey::with_credit(0), Room::Any);
                    if found.place != OVERFLOW
                        && let Some(answer) = found.bucket.try_decide(found.word, ask, now)
                    {
                        spent += u32::from(answer.is_allowed);
                    }
                }
                assert!(spent <= 2, "{spent} in round {round}");
            }
        })
    };
    let spenders = [1, 2, 3].map(spend);
    let evictor = {
        let (table, stop) = (table.clone(), stop.clone());
        std::thread::spawn(move || {
            let mut evicted = 0;
            // Before the first decision's time: what is full by then was not spent from.
            while !stop.load(Ordering::SeqCst) {
                evicted += table.evict(4, at(100), RULE, Evictable::Full);
            }
            evicted
        })
    };
    for spender in spenders {
        spender.join().unwrap();
    }
    stop.store(true, Ordering::SeqCst);
    evictor.join().unwrap();
}

#[test]
fn first_matching_entry_is_that_of_the_key_for_nearly_all_keys() {
    for keys in [1_000, 100_000] {
        let table = table(1_000_000);
        let key = |number: u32| format!("user:{number:015}").into_bytes();
        for number in 0..keys {
            insert(&table, &key(number));
        }
        let is_first = |number: &u32| table.find_first(&key(*number)).is_some();
        let first = (0..keys).filter(is_first).count() as u32;
        assert!(first * 100 > keys * 97, "{first} of {keys}");
    }
}
