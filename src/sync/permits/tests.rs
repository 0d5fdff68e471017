//! One node, whose store is away and comes back.

use super::*;
use crate::limit::Concurrency;

fn at(millis: u64) -> Timestamp {
    Timestamp::from_micros(1000 * millis)
}

/// One lost message of a node that had been idle gave it its share, beside what others held.
#[test]
fn idle_node_follows_its_policy_only_when_the_store_was_silent_for_a_lease() {
    let limit = Concurrency::new("x", 1).outage(OutagePolicy::Open);
    let mut permits = Permits::new(limit.validate(false, 16, 10).unwrap(), 1);
    let key: PermitKey = b"a"[..].into();
    let mut outcomes = Vec::new();
    for attempt in 0..60 {
        let now = 10_000 + 60 * attempt;
        let _ = permits.acquire(&key, PermitAsk { cost: 1, within_us: None }, at(now));
        permits.tick(at(now));
        permits.tick(at(now + 51));
        while let Some(output) = permits.poll_output() {
            match output {
                PermitOutput::Decided { outcome, .. } => outcomes.push((now, outcome.is_ok())),
                PermitOutput::Send { key, message } => {
                    let lost = Err(StoreError::TimedOut(Duration::from_millis(50)));
                    permits.answered(&key, message.sequence, lost, at(now + 51));
                }
                PermitOutput::Outage(_) | PermitOutput::HandedOver { .. } => {}
            }
        }
    }
    let first = outcomes.iter().find(|(_, is_given)| *is_given).map(|(now, _)| *now);
    assert!(first.is_some_and(|now| now >= 10_000 + 2_000 - 60), "{outcomes:?}");
    assert!(outcomes.iter().take(20).all(|(_, is_given)| !is_given), "{outcomes:?}");
}

const UNREACHABLE: StoreError = StoreError::Unreachable(String::new());

/// A node that is alone with its store, which answers each message at once.
struct Alone {
    permits: Permits,
    now: Timestamp,
    /// Why messages come to nothing, if they do.
    failure: Option<StoreError>,
    /// Other nodes hold all permits that this one does not.
    is_full: bool,
    messages: u32,
    /// What callers were told since they were asked about last.
    outcomes: Vec<Result<(), AcquireError>>,
}

impl Alone {
    /// With `Open`; the store cannot be reached.
    fn cut_off(max_keys: usize) -> Self {
        let limit = Concurrency::new("x", 10).outage(OutagePolicy::Open);
        let permits = Permits::new(limit.validate(false, 16, max_keys).unwrap(), 1);
        let failure = Some(UNREACHABLE);
        let (now, outcomes) = (Timestamp::ZERO, Vec::new());
        Self { permits, now, failure, is_full: false, messages: 0, outcomes }
    }

    /// Whether a caller gets a permit of `key` before the store has said anything.
    fn gets_at_once(&mut self, key: &[u8]) -> bool {
        let ask = PermitAsk { cost: 1, within_us: None };
        let in_use = self.permits.counts().in_use;
        let asked = self.permits.acquire(&PermitKey::from(key), ask, self.now);
        let is_granted = asked.is_ok() && self.permits.counts().in_use > in_use;
        self.answer();
        is_granted
    }

    fn release(&mut self, key: &[u8]) {
        self.permits.release(&PermitKey::from(key), 1, self.now);
        self.answer();
    }

    /// Somebody begins to wait for a permit of `key`.
    fn begin_to_wait(&mut self, key: &[u8], millis: u64) {
        let ask = PermitAsk { cost: 1, within_us: Some(1000 * millis) };
        self.permits.acquire(&PermitKey::from(key), ask, self.now).unwrap();
        self.answer();
    }

    /// What somebody is told who waits for a permit of `key` for so long in vain.
    fn told_after(&mut self, key: &[u8], millis: u64) -> AcquireError {
        self.outcomes.clear();
        self.begin_to_wait(key, millis);
        self.pass(self.now.plus_micros(1000 * millis));
        self.outcomes.remove(0).unwrap_err()
    }

    /// The store answers what was sent.
    fn answer(&mut self) {
        while let Some(output) = self.permits.poll_output() {
            let (key, message) = match output {
                PermitOutput::Send { key, message } => (key, message),
                PermitOutput::Decided { outcome, .. } => {
                    self.outcomes.push(outcome);
                    continue;
                }
                PermitOutput::Outage(_) | PermitOutput::HandedOver { .. } => continue,
            };
            self.messages += 1;
            let PermitMessage { sequence, in_use, want, .. } = message;
            let reply = PermitReply {
                held: if self.is_full { in_use } else { want },
                held_by_all: want,
                give: 0,
                give_in_us: 0,
                poll_us: 20_000,
                taken_over: 0,
            };
            let result = self.failure.clone().map_or(Ok(reply), Err);
            self.permits.answered(&key, sequence, result, self.now);
        }
    }

    /// Time passes: nothing happens but what is due.
    fn pass(&mut self, until: Timestamp) {
        while self.permits.poll_timeout() <= until {
            self.now = self.permits.poll_timeout().max(self.now);
            self.permits.tick(self.now);
            self.answer();
        }
        self.now = until;
    }

    fn is_on_policy(&self) -> bool {
        self.permits.outage.is_on_policy()
    }
}

/// A node whose store was away for three seconds, and that had let go of all permits by then.
fn idle_after_three_seconds_without_the_store() -> Alone {
    let mut node = Alone::cut_off(1);
    for step in 0..60 {
        node.pass(at(50 * step));
        node.gets_at_once(b"a");
    }
    assert!(node.is_on_policy() && node.permits.counts().in_use > 0);
    while node.permits.counts().in_use > 0 {
        node.release(b"a");
    }
    node
}

/// Its policy went on until somebody asked it, an hour later maybe, and gave what others held by then.
#[test]
fn policy_of_an_idle_node_ends_with_the_outage_and_nothing_is_asked_after() {
    let mut node = idle_after_three_seconds_without_the_store();
    node.pass(at(10_000));
    assert!(node.is_on_policy());
    node.failure = None;
    node.pass(at(10_500));
    assert!(!node.is_on_policy());
    assert_eq!(node.permits.poll_timeout(), Timestamp::NEVER);
    node.pass(at(60_000));
    assert!(!node.gets_at_once(b"a"));
    assert_eq!(node.permits.counts().in_use, 1, "the store gives it");
}

/// The caller was told that there was none, though the store had given it one.
#[test]
fn reply_that_comes_after_its_lease_denies_nobody_and_the_store_is_asked_again() {
    for within_us in [None, Some(5_000_000)] {
        let limit = Concurrency::new("x", 10).max_wait(Duration::from_secs(5));
        let mut permits = Permits::new(limit.validate(false, 16, 10).unwrap(), 1);
        let key = PermitKey::from(&b"a"[..]);
        permits.acquire(&key, PermitAsk { cost: 1, within_us }, at(0)).unwrap();
        for (now, granted) in [(2_500, false), (2_501, true)] {
            let sent = permits.poll_output();
            let Some(PermitOutput::Send { message, .. }) = sent else { panic!("{now}: {sent:?}") };
            let (held, held_by_all, give, give_in_us) = (1, 1, 0, 0);
            let reply =
                PermitReply { held, held_by_all, give, give_in_us, poll_us: 20_000, taken_over: 0 };
            permits.answered(&key, message.sequence, Ok(reply), at(now));
            assert_eq!(permits.counts().in_use, u64::from(granted), "{now}");
        }
        let decided = permits.poll_output();
        let is_granted = matches!(decided, Some(PermitOutput::Decided { outcome: Ok(()), .. }));
        assert!(is_granted, "{decided:?}");
    }
}

/// The first caller after a pause was served, and the others were refused for two seconds.
#[test]
fn policy_of_an_idle_node_goes_on_with_the_outage_and_the_store_is_asked_twice_a_second() {
    let mut node = idle_after_three_seconds_without_the_store();
    node.pass(at(60_000));
    assert!((100..150).contains(&node.messages), "{}", node.messages);
    assert!(node.gets_at_once(b"a"));
    for later in 1..200 {
        node.pass(at(60_000 + 10 * later));
        assert!(node.gets_at_once(b"a"), "{later}");
    }
}

/// The key was forgotten before the policy could begin, each time anew.
#[test]
fn policy_begins_though_callers_come_each_five_seconds_only() {
    let mut node = Alone::cut_off(1);
    for second in (0..60).step_by(5) {
        node.pass(at(1000 * second));
        let is_granted = node.gets_at_once(b"a");
        assert_eq!(is_granted, second > 0, "{second}");
        if is_granted {
            node.release(b"a");
        }
    }
}

#[test]
fn key_that_asks_whether_the_store_is_back_takes_no_room_and_shutdown_does_not_wait_for_it() {
    let mut node = idle_after_three_seconds_without_the_store();
    assert!(!node.permits.is_empty(), "the store may have it down for what it asked for last");
    node.pass(at(6_000));
    let messages = node.messages;
    node.pass(at(10_000));
    assert!(node.messages > messages && node.permits.is_empty());
    assert!(node.gets_at_once(b"b"), "there is room for one key");
    assert!(!node.permits.is_empty());
    node.release(b"b");
    node.pass(at(20_000));
    assert!(node.permits.is_empty());
    assert_eq!(node.permits.keys.len(), 1);
}

/// Another program's value is in the way for as long as nobody removes it.
#[test]
fn store_that_has_another_programs_value_is_there_and_is_not_asked_for_ever() {
    let mut node = idle_after_three_seconds_without_the_store();
    node.failure = Some(StoreError::ForeignKey { key: "a".to_owned(), found: "list".to_owned() });
    node.pass(at(10_000));
    assert!(!node.is_on_policy() && node.permits.is_empty());
    assert_eq!(node.permits.poll_timeout(), Timestamp::NEVER);
}

/// It was told that none came free, as if the store had said so.
#[test]
fn caller_who_waits_is_told_that_the_store_is_away_if_it_answers_nothing_meanwhile() {
    let away = AcquireError::StoreAway { limit: "x".into() };
    let timed_out = |millis| {
        let within = Duration::from_millis(millis);
        AcquireError::TimedOut { limit: "x".into(), max: 10, within }
    };
    let mut node = Alone::cut_off(10);
    assert_eq!(node.told_after(b"a", 100), away);
    assert!(!node.is_on_policy(), "it is too early for that");
    (node.failure, node.is_full) = (None, true);
    node.pass(at(2000));
    assert_eq!(node.told_after(b"a", 100), timed_out(100));
    // Another caller waits, and the store has said that there is none: until it is asked again that holds for all.
    node.begin_to_wait(b"a", 10_000);
    assert_eq!(node.told_after(b"a", 1), timed_out(1));
    node.failure = Some(UNREACHABLE);
    assert_eq!(node.told_after(b"a", 100), away);
    assert!(!node.is_on_policy());
}

#[test]
fn caller_who_waits_for_a_permit_of_this_node_alone_is_told_that_none_came_free() {
    let limit = Concurrency::new("x", 1).validate(true, 1, 10).unwrap();
    let mut node = Alone { permits: Permits::new(limit, 1), ..Alone::cut_off(10) };
    assert!(node.gets_at_once(b"a"));
    let within = Duration::from_millis(10);
    let timed_out = AcquireError::TimedOut { limit: "x".into(), max: 1, within };
    assert_eq!(node.told_after(b"a", 10), timed_out);
}

/// A poll that was under way hid what the store had said before it.
#[test]
fn caller_whose_time_ends_while_a_poll_is_under_way_is_told_that_none_came_free() {
    let mut node = Alone { failure: None, is_full: true, ..Alone::cut_off(10) };
    node.begin_to_wait(b"a", 10_000);
    node.pass(at(5));
    let ask = PermitAsk { cost: 1, within_us: Some(25_000) };
    node.permits.acquire(&b"a"[..].into(), ask, node.now).unwrap();
    // The poll is sent, and is not answered any more.
    node.permits.tick(at(29));
    node.permits.tick(at(30));
    let outputs: Vec<PermitOutput> = std::iter::from_fn(|| node.permits.poll_output()).collect();
    let told = outputs.iter().find_map(|output| match output {
        PermitOutput::Decided { outcome, .. } => Some(outcome.clone()),
        _ => None,
    });
    assert!(outputs.iter().any(|output| matches!(output, PermitOutput::Send { .. })));
    let within = Duration::from_millis(25);
    assert_eq!(told, Some(Err(AcquireError::TimedOut { limit: "x".into(), max: 10, within })));
}

/// Its deadline is seconds later.
#[test]
fn caller_who_does_not_wait_gets_store_away_when_the_policy_begins() {
    let limit = Concurrency::new("x", 10).outage(OutagePolicy::Closed);
    let limit = limit.max_wait(Duration::from_secs(5)).validate(false, 16, 10).unwrap();
    let mut node = Alone { permits: Permits::new(limit, 1), ..Alone::cut_off(10) };
    assert!(!node.gets_at_once(b"a"));
    while node.outcomes.is_empty() {
        assert!(!node.is_on_policy() && node.now < at(20_000), "{:?}", node.now);
        node.pass(node.now.plus_micros(10_000));
    }
    assert!(node.is_on_policy());
    assert_eq!(node.outcomes, [Err(AcquireError::StoreAway { limit: "x".into() })]);
}

/// The store keeps a place in the line for all callers of a node who wait.
#[test]
fn only_a_caller_who_waits_is_left_to_the_next_poll_while_the_node_gets_in_line() {
    let waits = PermitAsk { cost: 1, within_us: Some(5_000_000) };
    let takes = PermitAsk { cost: 1, within_us: None };
    for (second, messages) in [(waits, 0), (takes, 1)] {
        let limit = Concurrency::new("x", 10).validate(false, 16, 10).unwrap();
        let mut permits = Permits::new(limit, 1);
        let key = PermitKey::from(&b"a"[..]);
        permits.acquire(&key, waits, at(0)).unwrap();
        let sent = permits.poll_output();
        let Some(PermitOutput::Send { message, .. }) = sent else { panic!("{sent:?}") };
        permits.acquire(&key, second, at(0)).unwrap();
        let (held, held_by_all, give, give_in_us) = (0, 10, 0, 0);
        let reply =
            PermitReply { held, held_by_all, give, give_in_us, poll_us: 20_000, taken_over: 0 };
        permits.answered(&key, message.sequence, Ok(reply), at(1));
        let outputs = std::iter::from_fn(|| permits.poll_output());
        let sent = outputs.filter(|output| matches!(output, PermitOutput::Send { .. })).count();
        assert_eq!(sent, messages, "{second:?}");
    }
}

#[test]
fn cost_of_nothing_or_of_more_than_there_is_at_all_is_refused_by_name() {
    let limit = Concurrency::new("x", 10).validate(false, 16, 10).unwrap();
    let mut permits = Permits::new(limit, 1);
    for cost in [0, 11] {
        let ask = PermitAsk { cost, within_us: None };
        let refused = permits.acquire(&PermitKey::from(&b"a"[..]), ask, at(0));
        assert_eq!(refused, Err(AcquireError::Cost { limit: "x".into(), cost, max: 10 }));
    }
}

#[test]
fn caller_who_does_not_wait_is_denied_at_once_by_a_node_that_shares_nothing() {
    let limit = Concurrency::new("x", 1).validate(true, 1, 10).unwrap();
    let mut permits = Permits::new(limit, 1);
    let mut take = || {
        let ask = PermitAsk { cost: 1, within_us: None };
        permits.acquire(&PermitKey::from(&b"a"[..]), ask, at(0))
    };
    assert!(take().is_ok());
    assert_eq!(take(), Err(AcquireError::Denied { limit: "x".into(), max: 1, in_use: 1 }));
}

#[test]
fn waiting_callers_are_bounded_and_each_answer_makes_room_for_another() {
    let limit = Concurrency::new("x", 1).max_waiting(2).validate(true, 1, 10).unwrap();
    let mut node = Alone { permits: Permits::new(limit, 1), ..Alone::cut_off(10) };
    assert!(node.gets_at_once(b"a"));
    for round in 1..=3 {
        node.begin_to_wait(b"a", 10);
        node.begin_to_wait(b"a", 10);
        assert_eq!(node.permits.counts().waiting, 2);
        let ask = PermitAsk { cost: 1, within_us: Some(10_000) };
        let third = node.permits.acquire(&PermitKey::from(&b"a"[..]), ask, node.now);
        let limit = "x".into();
        assert_eq!(third, Err(AcquireError::TooManyWaiting { limit, max_waiting: 2 }));
        node.pass(at(100 * round));
        assert_eq!(node.permits.counts().waiting, 0);
    }
}
