use super::*;
use crate::driver::LimitParts;
use crate::limit::{Limit, NodeTerms};
use crate::quota::Quota;

const NOW: Timestamp = Timestamp::from_micros(1_000_000);

fn set(overrides: &LimitOverrides, subject: Subject, setting: Setting, until: Timestamp) {
    overrides.set(subject, setting, until, None, &definition());
}

/// Of a limit without plans that is in shadow mode.
fn definition() -> Definition {
    let limit = Limit::new("api", Quota::per_second(1)).switch(Switch::Shadow);
    let node = NodeTerms { has_store: false, max_nodes: None, uncounted: 1 };
    let parts = LimitParts::new(&limit, node, None);
    parts.expect("it can be kept").define(None, 0)
}

#[cfg(feature = "http")]
fn network(text: &str) -> Subject {
    Subject::Network(text.parse().unwrap())
}

#[cfg(feature = "http")]
#[test]
fn key_wins_over_networks_and_these_over_prefixes_and_the_narrower_over_the_wider() {
    let overrides = LimitOverrides::new(Switch::On);
    assert!(!overrides.is_any(&definition()));
    let [allow, block] =
        [Ruling::Allow, Ruling::Block].map(|ruling| move || Setting::Keys(ruling.clone()));
    let ruling =
        |key: &str| overrides.find(key.as_bytes(), key.as_bytes(), NOW).map(|held| held.ruling);
    let rules = [
        (Subject::Prefix(b"10.".to_vec()), allow(), "10.9.9.9"),
        (network("10.0.0.0/8"), block(), "10.9.9.9"),
        (network("10.9.0.0/16"), allow(), "10.9.9.9"),
        (Subject::Key(b"10.9.9.9".to_vec()), block(), "10.9.9.9"),
        (Subject::Prefix(b"bot".to_vec()), block(), "bot-7"),
        (Subject::Prefix(b"bot-".to_vec()), allow(), "bot-7"),
        (network("2001:db8::/32"), block(), "2001:db8:1::/64"),
        (network("2001:db8:1::/48"), allow(), "2001:db8:1::/64"),
    ];
    for (subject, setting, key) in rules {
        let is_allowed = setting == allow();
        set(&overrides, subject, setting, Timestamp::NEVER);
        let expected = if is_allowed { InForce::Allow } else { InForce::Block };
        assert_eq!(ruling(key), Some(expected), "{key} by the newest of its rules");
    }
    assert!(overrides.is_any(&definition()));
    assert_eq!(ruling("10.1.1.1"), Some(InForce::Block));
    assert_eq!(ruling("10.x"), Some(InForce::Allow), "no address");
    assert_eq!(ruling("bo"), None);
    assert_eq!(ruling("2001::/16"), None, "a network that is wider than any that is named");
}

#[test]
fn override_ends_on_time_and_is_gone_when_it_is_removed() {
    let overrides = LimitOverrides::new(Switch::On);
    let block = Setting::Keys(Ruling::Block);
    let end = NOW.plus_micros(10);
    let subjects = [
        (Subject::Key(b"a".to_vec()), "a"),
        (Subject::Prefix(Vec::new()), "a"),
        #[cfg(feature = "http")]
        (network("::/0"), "::1"),
    ];
    for (subject, key) in subjects {
        let key = key.as_bytes();
        set(&overrides, subject.clone(), block.clone(), end);
        assert!(overrides.find(key, key, NOW.plus_micros(9)).is_some(), "{subject:?}");
        assert_eq!(overrides.find(key, key, end), None, "{subject:?}");
        set(&overrides, subject, Setting::Removed, Timestamp::ZERO);
        assert_eq!(overrides.find(key, key, NOW), None);
        assert!(!overrides.is_any(&definition()));
    }
}

#[test]
fn switch_goes_back_to_what_was_configured() {
    let overrides = LimitOverrides::new(Switch::Shadow);
    assert!(overrides.is_any(&definition()));
    set(&overrides, Subject::Limit, Setting::Limit(Switch::On), Timestamp::NEVER);
    assert_eq!((overrides.switch(), overrides.is_any(&definition())), (Switch::On, false));
    set(&overrides, Subject::Limit, Setting::Removed, Timestamp::ZERO);
    assert_eq!(overrides.switch(), Switch::Shadow);
}

#[test]
fn blocked_keys_are_at_most_so_many_and_those_that_are_over_make_room() {
    let overrides = LimitOverrides::new(Switch::On);
    let is_blocked = |key: &[u8], at| overrides.find(key, key, at).is_some();
    let block = |key: &[u8], until| overrides.block(key, Blocked { until, retry_at: until }, 2);
    block(b"a", NOW.plus_micros(10));
    block(b"b", NOW.plus_micros(10));
    block(b"c", NOW.plus_micros(10));
    assert!(is_blocked(b"a", NOW) && is_blocked(b"b", NOW) && !is_blocked(b"c", NOW));
    block(b"a", NOW.plus_micros(15));
    assert!(is_blocked(b"a", NOW.plus_micros(12)), "blocked anew");
    assert!(!is_blocked(b"b", NOW.plus_micros(12)), "over");
    overrides.sweep(NOW.plus_micros(12));
    block(b"c", NOW.plus_micros(22));
    assert!(is_blocked(b"c", NOW.plus_micros(12)), "the place of one that is over");
}

#[test]
fn prefix_that_has_ended_does_not_hide_a_shorter_one() {
    let overrides = LimitOverrides::new(Switch::On);
    let (allow, block) = (Setting::Keys(Ruling::Allow), Setting::Keys(Ruling::Block));
    set(&overrides, Subject::Prefix(b"bot".to_vec()), block, Timestamp::NEVER);
    set(&overrides, Subject::Prefix(b"bot-7".to_vec()), allow, NOW);
    let ruling = overrides.find(b"bot-7", b"bot-7", NOW).map(|held| held.ruling);
    assert_eq!(ruling, Some(InForce::Block));
}

#[test]
fn quota_is_one_for_all_keys_that_have_it_and_the_engine_is_told_once() {
    let overrides = LimitOverrides::new(Switch::On);
    let quota = |tokens| Setting::Keys(Ruling::Quota(Quota::per_hour(tokens)));
    let given = |key: &[u8]| overrides.find(key, key, NOW).and_then(|held| held.plan());
    for (key, tokens) in [("a", 500), ("b", 500), ("c", 600)] {
        let subject = Subject::Key(key.into());
        set(&overrides, subject, quota(tokens), Timestamp::NEVER);
    }
    let [a, b, c] = [b"a", b"b", b"c"].map(|key| given(key).expect("it has a quota"));
    assert!(std::ptr::eq(a, b) && !std::ptr::eq(a, c));
    assert_eq!(a.plan_name(), None);
    assert_ne!(a.number, definition().info.number);
    assert_eq!(overrides.cost_max(), 600);
    let slowest = overrides.slowest().expect("there are two");
    assert_eq!(slowest.fill_us(), c.terms.scale.fill_us());
    let told: Vec<u32> = overrides.take_new_quotas().iter().map(|info| info.number).collect();
    assert_eq!(told, [a.number, c.number]);
    assert!(overrides.take_new_quotas().is_empty());
}

#[test]
fn quota_that_the_limit_cannot_keep_is_as_if_nothing_were_set() {
    let overrides = LimitOverrides::new(Switch::On);
    let subject = || Subject::Prefix(b"a".to_vec());
    set(&overrides, subject(), Setting::Keys(Ruling::Block), Timestamp::NEVER);
    let quota = Ruling::Quota(Quota::per_second(0));
    let until = Timestamp::NEVER;
    assert!(!overrides.set(subject(), Setting::Keys(quota), until, None, &definition()));
    assert_eq!(overrides.find(b"a", b"a", NOW), None);
    assert!(!overrides.may_give_plans() && overrides.take_new_quotas().is_empty());
}
