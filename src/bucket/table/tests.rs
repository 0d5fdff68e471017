//! What the table promises: exact keys, eviction, and decisions that outlive their place.

use std::collections::HashSet;
use std::sync::atomic::AtomicBool;

use super::*;
use crate::bucket::LocalRefill;
use crate::bucket::key_hash::tests::SEEDS;
use crate::bucket::outcome::Collected;

const UNIT: i64 = 1;

fn table_with(hasher: KeyHasher, max_keys: usize) -> Arc<Table> {
    let budget = Arc::new(KeyBudget::new(max_keys));
    Arc::new(Table::new(0, hasher, budget, Start::at_rest(0)).unwrap())
}

fn table(max_keys: usize) -> Arc<Table> {
    table_with(KeyHasher::new(SEEDS), max_keys)
}

fn at(us: u64) -> Timestamp {
    Timestamp::from_micros(us)
}

fn make_bytes(table: &Table, key: &[u8]) -> u32 {
    table.make(table.hash(key), key, || Start::at_rest(1))
}

fn find_bytes(table: &Table, key: &[u8]) -> Option<u32> {
    table.find(table.hash(key), key).map(|found| table.place(found.bucket))
}

fn make(table: &Table, key: u64) -> u32 {
    find(table, key).unwrap_or_else(|| make_bytes(table, &key.to_le_bytes()))
}

fn find(table: &Table, key: u64) -> Option<u32> {
    let key = key.to_le_bytes();
    let at_home = table.find_at_home(table.hash(&key), &key);
    let at_home = at_home.map(|found| table.place(found.bucket));
    let found = find_bytes(table, &key);
    if at_home.is_some() && found.is_some() {
        assert_eq!(at_home, found, "{key:?}");
    }
    at_home.or(found)
}

/// Makes all keys, which differ, and finds each of them again, in a bucket of its own.
fn assert_no_two_share(table: &Arc<Table>, keys: &[Vec<u8>]) {
    let places: Vec<u32> = keys.iter().map(|key| make_bytes(table, key)).collect();
    let distinct: HashSet<u32> = places.iter().copied().collect();
    assert_eq!((distinct.len(), distinct.contains(&OVERFLOW)), (keys.len(), false));
    for (key, place) in keys.iter().zip(places) {
        assert_eq!(find_bytes(table, key), Some(place), "{key:?}");
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
        assert_eq!(make_bytes(&table, key.to_string().as_bytes()), key + 1);
    }
    for key in 0..keys {
        assert_eq!(find_bytes(&table, key.to_string().as_bytes()), Some(key + 1));
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
        assert_no_two_share(&table_with(KeyHasher::constant(), keys.len()), keys);
    }
}

#[test]
fn random_keys_with_one_hash_never_share_a_bucket_and_are_evicted() {
    let mut rng = fastrand::Rng::with_seed(11);
    let mut key = || (0..rng.usize(1..=512)).map(|_| rng.u8(..)).collect::<Vec<u8>>();
    let keys: HashSet<Vec<u8>> = (0..10_000).map(|_| key()).collect();
    let keys: Vec<Vec<u8>> = keys.into_iter().collect();
    let table = table_with(KeyHasher::constant(), keys.len());
    assert_no_two_share(&table, &keys);
    // Those that were spent from stay.
    for key in keys.iter().take(100) {
        let place = find_bytes(&table, key).unwrap();
        assert!(table.at(place).take(1, at(1), UNIT).allowed());
    }
    let evicted = table.evict(keys.len() as u32, at(2), UNIT, false);
    assert_eq!(evicted, keys.len() - 100);
    for (index, key) in keys.iter().enumerate() {
        assert_eq!(find_bytes(&table, key).is_some(), index < 100, "{key:?}");
    }
    let again = &keys[100..2_100];
    assert_no_two_share(&table, again);
    assert_eq!(table.budget.used(), 2_100);
}

#[test]
fn long_keys_are_compared_to_the_last_byte_and_their_room_is_given_again() {
    let table = table(100);
    for length in [64, 65, 100, 511, 512] {
        let key = vec![b'k'; length];
        let others = (0..length).map(|at| {
            let mut other = key.clone();
            other[at] = b'K';
            other
        });
        let place = make_bytes(&table, &key);
        for other in others {
            assert_eq!(find_bytes(&table, &other), None);
        }
        assert_eq!(*BucketRef::new(&table, place).key(), key[..]);
        assert_eq!(table.evict(SCAN, at(1), UNIT, false), 1);
        assert_eq!(find_bytes(&table, &key), None);
        assert_eq!(make_bytes(&table, &vec![b'n'; length]), place, "the place is given again");
        assert_eq!(table.evict(SCAN, at(1), UNIT, false), 1);
    }
    assert_eq!(table.keeper().long.take(&table.long), Some(0), "one slot was enough");
}

#[test]
fn keys_beyond_the_budget_share_the_overflow_bucket() {
    let table = table(2);
    let places: Vec<u32> = (0..4).map(|key| make(&table, key)).collect();
    assert_eq!(places, [1, 2, OVERFLOW, OVERFLOW]);
    assert_eq!(table.budget.used(), 2);
    assert!(BucketRef::new(&table, OVERFLOW).is_overflow());
}

#[test]
fn eviction_takes_only_buckets_that_nobody_holds_and_that_are_idle() {
    let table = table(3);
    let now = at(10);
    let held = Held::new(&table, b"held", || Start::at_rest(1));
    let spent = make(&table, 1);
    make(&table, 2);
    assert!(table.at(spent).take(1, now, UNIT).allowed());
    let evict = || table.evict(SCAN, now, UNIT, false);
    assert_eq!(evict(), 1, "the idle one");
    assert_eq!((table.budget.used(), evict()), (2, 0));
    drop(held);
    assert_eq!(evict(), 1);
    assert_eq!(find(&table, 1), Some(spent));
    assert_eq!((find(&table, 2), find_bytes(&table, b"held")), (None, None));
}

/// A full local bucket of 100 tokens, refilled by a token a microsecond.
fn full() -> Start {
    Start { credit: 0, local: Some(LocalRefill { rate: 1, depth: 100, from: at(1) }) }
}

#[test]
fn decision_whose_place_went_to_another_key_changes_nothing_there() {
    let table = table(1);
    let (a, b) = (b"a", b"b");
    table.make(table.hash(a), a, full);
    // The decision about `a` has found the bucket and is held up.
    let Found { bucket, word } = table.find(table.hash(a), a).unwrap();
    assert_eq!(table.evict(1, at(2), UNIT, true), 1);
    assert!(bucket.is_gone() && !bucket.take(1, at(2), UNIT).allowed(), "nothing is left");
    table.make(table.hash(b), b, full);
    let found = table.find(table.hash(b), b).unwrap();
    assert!(std::ptr::eq(found.bucket, bucket), "`b` has the place");
    assert!(bucket.take(50, at(2), UNIT).allowed());
    let before = (bucket.held_and_pending(), bucket.demand(), bucket.refill());
    // It goes on.
    let is_mine = || table.is_of(bucket, a);
    for cost in [1, 2, 60] {
        assert!(bucket.spend_by_look(word, cost, at(2), UNIT).is_none());
        assert!(bucket.take_further(cost, at(2), UNIT, is_mine).is_none());
        assert!(bucket.take_sure_of(cost, at(2), UNIT, is_mine).is_none());
    }
    assert!(bucket.take_at_once(word, at(2)).is_none());
    assert!(bucket.deny_at_once(word, at(2), || UNIT).is_none());
    assert_eq!((bucket.held_and_pending(), bucket.demand(), bucket.refill()), before);
}

#[test]
fn denial_whose_place_went_to_another_key_is_not_counted_there() {
    let table = table(1);
    table.make(table.hash(b"a"), b"a", || Start::at_rest(0));
    let bucket = table.find(table.hash(b"a"), b"a").unwrap().bucket;
    // After its word was loaded and the key compared, the place changes hands.
    let changes = std::cell::Cell::new(0);
    let is_mine = || {
        let is_mine = table.is_of(bucket, b"a");
        if changes.replace(1) == 0 {
            assert_eq!(table.evict(1, at(2), UNIT, false), 1);
            table.make(table.hash(b"b"), b"b", || Start::at_rest(0));
        }
        is_mine
    };
    assert!(bucket.take_further(5, at(2), UNIT, is_mine).is_none());
    assert_eq!(bucket.collect(false, |credit| credit), Collected::default());
}

#[test]
fn every_key_is_found_while_others_come_and_go_and_the_index_grows() {
    let table = table(20_000);
    let mut rng = fastrand::Rng::with_seed(7);
    let mut alive = HashMap::new();
    for step in 0..100_000_u64 {
        let now = at(step * 100);
        let key = rng.u64(0..30_000);
        let place = make(&table, key);
        if place != OVERFLOW {
            let before = alive.insert(key, place);
            assert!(before.is_none_or(|before| before == place), "{key} was moved");
        }
        if step % 1000 == 0 {
            // Keys with odd numbers are in use.
            for (key, place) in alive.iter().filter(|(key, _)| *key % 2 == 1) {
                table.at(*place).take(1, now, UNIT);
                assert_eq!(find(&table, *key), Some(*place));
            }
            table.evict(4096, now, UNIT, false);
            alive.retain(|key, place| {
                let gone = table.at(*place).is_gone();
                assert_eq!(find(&table, *key), (!gone).then_some(*place));
                !gone
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
    let stay: Vec<u32> = (0..500).map(|key| make(&table, key)).collect();
    for &place in &stay {
        assert!(table.at(place).take(1, at(1), UNIT).allowed());
    }
    let done = Arc::new(AtomicBool::new(false));
    let reader = {
        let (table, stay, done) = (table.clone(), stay.clone(), done.clone());
        std::thread::spawn(move || {
            let (mut looks, mut missed) = (0_u64, 0_u64);
            while !done.load(Ordering::Relaxed) || looks == 0 {
                for (key, place) in (0..).zip(&stay) {
                    let found = find(&table, key);
                    missed += u64::from(found.is_none());
                    // Missed while it was moved: with the lock held it is found.
                    assert_eq!(found.unwrap_or_else(|| make(&table, key)), *place);
                    looks += 1;
                }
            }
            (looks, missed)
        })
    };
    for round in 0..200_u64 {
        for key in 0..3_000 {
            make(&table, 1_000 + round * 3_000 + key);
        }
        while table.evict(8_192, at(round), UNIT, false) > 0 {}
    }
    done.store(true, Ordering::Relaxed);
    let (looks, missed) = reader.join().unwrap();
    assert!(missed * 100 < looks, "{missed} of {looks} looks missed their keys");
}

#[test]
#[allow(clippy::disallowed_methods, reason = "a test's own threads")]
fn tokens_are_charged_to_the_key_that_asked_while_places_change_hands() {
    const EACH: u64 = 30_000;
    // Two keys fight for one place, and the evictor takes it from either as soon as it is idle.
    let table = table(1);
    // A place that was never given has no key to charge.
    table.make(table.hash(b"a"), b"a", full);
    let stop = Arc::new(AtomicBool::new(false));
    let spenders: Vec<_> = [b"a", b"b"]
        .into_iter()
        .map(|key| {
            let table = table.clone();
            std::thread::spawn(move || {
                let mut spent = 0_u64;
                for _ in 0..EACH {
                    let Some(Found { bucket, .. }) = table.find(table.hash(key), key) else {
                        table.make(table.hash(key), key, full);
                        continue;
                    };
                    let taken = bucket.take_further(1, at(2), UNIT, || table.is_of(bucket, key));
                    spent += u64::from(taken.is_some_and(|taken| taken.allowed()));
                }
                spent
            })
        })
        .collect();
    // The engine's part: what it collects, it books on the key that the bucket has.
    let engine = {
        let (table, stop) = (table.clone(), stop.clone());
        std::thread::spawn(move || {
            let mut charged = HashMap::new();
            let mut last_round = false;
            while !last_round {
                last_round = stop.load(Ordering::SeqCst);
                let place = BucketRef::new(&table, 1);
                if !place.is_gone() {
                    let key = place.key();
                    *charged.entry(key).or_insert(0) += place.collect(false, |left| left).spent;
                }
                table.evict(1, at(1_000), UNIT, true);
            }
            charged
        })
    };
    let spent: Vec<u64> = spenders.into_iter().map(|one| one.join().unwrap()).collect();
    stop.store(true, Ordering::SeqCst);
    let charged = engine.join().unwrap();
    let of = |key: &[u8]| charged.get(key).copied().unwrap_or_default();
    assert_eq!(vec![of(b"a"), of(b"b")], spent);
}

#[test]
fn most_keys_are_found_where_they_are_looked_for_first() {
    for keys in [1_000, 100_000] {
        let table = table(1_000_000);
        let key = |number: u32| format!("user:{number:015}").into_bytes();
        (0..keys).for_each(|number| _ = make_bytes(&table, &key(number)));
        let at_home = |number: &u32| {
            let key = key(*number);
            table.find_at_home(table.hash(&key), &key).is_some()
        };
        let at_home = (0..keys).filter(at_home).count() as u32;
        assert!(at_home * 10 > keys * 8, "{at_home} of {keys}");
    }
}
