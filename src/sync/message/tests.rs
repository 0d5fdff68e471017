use super::reply::{
    CREDIT_WITHHELD, GIVEN_VOID, LOST, PREVIOUS, REPLY_HEADER_BYTES, TIMED, WITHHELD,
};
use super::*;
use crate::quota::Curve;
use proptest::prelude::*;

fn given() -> impl Strategy<Value = Grant> {
    (0..WIRE_MAX, 0..WIRE_MAX, -WIRE_MAX..WIRE_MAX, any::<[bool; 2]>(), 0..3_usize).prop_map(
        |(tokens, rate, level, [void, lost], withheld)| {
            let withheld =
                [Withheld::Nothing, Withheld::Tokens, Withheld::TokensAndCredit][withheld];
            let previous = rate / 2;
            let rest = Given { stamp_us: tokens, life_us: rate, previous, ..Given::default() };
            Grant::Given(Given { tokens, rate, level, void, lost, withheld, ..rest })
        },
    )
}

impl Entry {
    /// An entry that says nothing.
    pub(crate) fn empty(scale: Scale) -> Self {
        Self::blank("limit".into(), b"key"[..].into(), scale, 1)
    }
}

fn entries(count: usize) -> Vec<Entry> {
    vec![Entry::empty(Scale { rate: 1, token: 1, burst: 1, curve: Curve::Refill }); count]
}

#[test]
fn node_says_whether_it_has_settled_and_whether_it_leaves() {
    for (settled, leaving, flags) in [
        (false, false, 0),
        (true, false, SETTLED),
        (false, true, LEAVING),
        (true, true, SETTLED | LEAVING),
    ] {
        assert_eq!(Knowledge { settled, leaving, ..Knowledge::default() }.flags(), flags);
    }
}

#[test]
fn entry_says_what_follows_it() {
    let entry = || entries(1).remove(0);
    let claim = |previous, viewed_us| Some(Claim { unleased: 1, previous, viewed_us });
    let of_claim = |restore, previous, viewed_us| Entry {
        restore,
        claim: claim(previous, viewed_us),
        ..entry()
    };
    for (entry, rest_follows, flags) in [
        (entry(), false, 0),
        (entry(), true, FLAG_REST),
        (Entry { restore: true, ..entry() }, false, FLAG_RESTORE),
        (Entry { reset: true, ..entry() }, false, FLAG_RESET),
        (of_claim(false, 0, 5), false, FLAG_CLAIM),
        (of_claim(false, 3, 5), false, FLAG_CLAIM | FLAG_PREVIOUS),
        (of_claim(true, 0, 5), false, FLAG_RESTORE | FLAG_CLAIM | FLAG_VIEWED),
    ] {
        assert_eq!(entry.flags(rest_follows), flags, "{entry:?}");
    }
    for (entry, numbers) in [
        (entry(), 0),
        (Entry { debt: 1, ..entry() }, REST_NUMBERS),
        (of_claim(true, 3, 5), 2),
        (Entry { debt: 1, ..of_claim(true, 0, 5) }, REST_NUMBERS + 1),
    ] {
        let mut body = Vec::new();
        assert_eq!(entry.encode(1, &mut body), numbers);
        assert_eq!(body.len(), 2 + 8 * (12 + numbers), "{entry:?}");
    }
}

#[test]
fn quotas_of_a_batch_are_numbered_in_the_order_of_their_first_entries() {
    let of = |burst, spent| Entry {
        spent,
        ..Entry::empty(Scale { rate: 1, token: 1, burst, curve: Curve::Refill })
    };
    let entries = [of(10, 1), of(20, 2), of(10, 3)];
    let header = Header {
        lane: 0,
        lanes: 1,
        instance: [7; 16],
        incarnation: None,
        sequence: 1,
        times: Times::default(),
        knowledge: Knowledge::default(),
        limits: Vec::new(),
    };
    let mut body = Vec::new();
    for (entry, place) in entries.iter().zip([1, 2, 1]) {
        entry.encode(place, &mut body);
    }
    assert!(encode(&header, &entries).ends_with(&body));
}

#[test]
fn numbers_of_an_entry_keep_their_order() {
    let held = Held { rate: 2, depth: 3, outstanding: 4, stamp_us: 5, demand: 6, tag: 7 };
    let claim = Some(Claim { unleased: 12, previous: 0, viewed_us: 0 });
    let entry = Entry {
        spent: 1,
        held,
        demand: 8,
        want: 9,
        want_rate: 10,
        lost: 11,
        claim,
        ..entries(1).remove(0)
    };
    assert_eq!(entry.numbers(), [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]);
}

proptest! {
    #[test]
    fn reply_survives_its_encoding(
        grants in prop::collection::vec(given(), 0..5), time_us in 0..1_i64 << 52,
        limit_nodes in prop::collection::vec(0..1_i64 << 52, 0..4),
    ) {
        let entries = entries(grants.len());
        let reply = Reply {
            time_us,
            incarnation: Incarnation::new(&[7; 16], time_us),
            nodes: 3,
            recovering_until_us: 5,
            recovering_since_us: 4,
            silence_us: 6,
            limit_nodes: limit_nodes.clone(),
            verdict: BatchVerdict::Applied(grants),
        };
        let bytes = reply.encode(Receipt::default(), &entries);
        prop_assert_eq!(Reply::decode(&bytes, &entries, limit_nodes.len()), Ok(reply));
    }

    #[test]
    fn hostile_reply_is_an_error_and_never_a_panic(
        bytes in prop::collection::vec(any::<u8>(), 0..400), count in 0..4_usize,
    ) {
        let _ = Reply::decode(&bytes, &entries(count), count);
        let hostile = [&MAGIC, &bytes[..]].concat();
        let _ = Reply::decode(&hostile, &entries(count), count);
    }

    #[test]
    fn grant_of_hostile_numbers_is_an_error_and_never_a_panic(
        status in any::<u8>(), numbers in prop::collection::vec(any::<f64>(), 11),
    ) {
        let entries = entries(1);
        let reply = Reply {
            time_us: 1,
            incarnation: Incarnation([1; 24]),
            nodes: 1,
            recovering_until_us: 0,
            recovering_since_us: 0,
            silence_us: 0,
            limit_nodes: Vec::new(),
            verdict: BatchVerdict::Applied(vec![Grant::Foreign]),
        };
        let mut bytes = reply.encode(Receipt::default(), &entries);
        bytes.truncate(REPLY_HEADER_BYTES);
        bytes.push(status);
        let count = 7 + if status & TIMED > 0 { 3 } else { 0 } + usize::from(status & PREVIOUS > 0);
        bytes.extend(numbers[..count].iter().flat_map(|number| number.to_le_bytes()));
        if let Ok(Reply { verdict: BatchVerdict::Applied(grants), .. }) = Reply::decode(&bytes, &entries, 0) {
            prop_assert_eq!(grants.len(), 1);
            let all = GIVEN_VOID + TIMED + LOST + WITHHELD + CREDIT_WITHHELD + PREVIOUS;
            prop_assert!(status <= all, "{}", status);
        }
    }

    #[test]
    fn reply_cut_short_at_any_byte_is_refused(cut in 0..203_usize) {
        let entries = entries(1);
        let reply = Reply {
            time_us: 1,
            incarnation: Incarnation([1; 24]),
            nodes: 1,
            recovering_until_us: 0,
            recovering_since_us: 0,
            silence_us: 0,
            limit_nodes: Vec::new(),
            verdict: BatchVerdict::Applied(vec![Grant::Given(Given::default())]),
        };
        let bytes = reply.encode(Receipt::default(), &entries);
        prop_assert_eq!(bytes.len(), 203);
        prop_assert!(Reply::decode(&bytes[..cut], &entries, 0).is_err());
    }
}

#[test]
fn quotas_have_no_higher_rate_than_the_wire() {
    assert_eq!(crate::quota::RATE_UNITS_MAX, RATE_MAX);
}
