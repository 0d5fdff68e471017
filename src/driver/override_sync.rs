//! Keeps this node's overrides in step with the store's: asks once a second what has changed, and tells what is set here.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use tokio::sync::oneshot;
use tokio::task::{JoinError, JoinSet};

use super::Limits;
use crate::error::StoreError;
use crate::key::KeySecret;
use crate::overrides::{End, OverrideError, Subject, Switch, read_record};
use crate::store::Store;
use crate::store::overrides::{Known, OverridesReply, OverridesRequest, PUTS_MAX, Put, Told};
use crate::sync::Event;
use crate::time::Timestamp;

/// How often the store is asked what has changed.
const INTERVAL_US: u64 = 1_000_000;
/// The longest time between two attempts while the store does not answer.
const BACKOFF_MAX_US: u64 = 2_000_000;
/// While the store refuses, an event says so once in this time.
const REFUSAL_EVENTS_US: u64 = 60_000_000;

/// An override to be set, and where to tell the outcome.
#[derive(Debug)]
pub(crate) struct OverrideQuery {
    pub(crate) put: Put,
    pub(crate) done: oneshot::Sender<Result<(), OverrideError>>,
}

/// How a call ended.
pub(super) type Outcome = Result<Result<OverridesReply, StoreError>, JoinError>;

/// What a record says, as it was told last.
#[derive(Debug)]
struct Record {
    value: Vec<u8>,
    /// In milliseconds since 1970 by the store's clock; 0 for never.
    ends_ms: u64,
    until: Timestamp,
    /// The reading of all records in which it was told last.
    reading: u64,
}

/// A reading of all records, page by page.
#[derive(Debug, Default)]
struct Reading {
    number: u64,
    is_under_way: bool,
    /// Records that are not told in it were lost by the store, and are told to it again.
    has_lost: bool,
}

/// The overrides of a node.
pub(super) struct OverrideSync {
    store: Arc<dyn Store>,
    /// Other nodes may change them too.
    is_shared: bool,
    secret: KeySecret,
    known: Known,
    reading: Reading,
    /// The store has told all of them once, or has refused to. Not while it is away.
    has_heard: bool,
    records: HashMap<Vec<u8>, Record>,
    /// To be told to the store.
    queue: VecDeque<OverrideQuery>,
    lost: VecDeque<Put>,
    /// What the call under way tells.
    sent: Vec<OverrideQuery>,
    sent_lost: Vec<Put>,
    /// Those whose overrides the store has, which may not hold here yet.
    set: Vec<oneshot::Sender<Result<(), OverrideError>>>,
    call: JoinSet<Result<OverridesReply, StoreError>>,
    due_at: Timestamp,
    failures: u32,
    refusal_event_from: Timestamp,
}

impl OverrideSync {
    /// `is_shared`: other nodes have the same store.
    pub(super) fn new(store: Arc<dyn Store>, is_shared: bool, secret: KeySecret) -> Self {
        Self {
            store,
            is_shared,
            secret,
            known: Known::default(),
            reading: Reading::default(),
            has_heard: false,
            records: HashMap::new(),
            queue: VecDeque::new(),
            lost: VecDeque::new(),
            sent: Vec::new(),
            sent_lost: Vec::new(),
            set: Vec::new(),
            call: JoinSet::new(),
            due_at: if is_shared { Timestamp::ZERO } else { Timestamp::NEVER },
            failures: 0,
            refusal_event_from: Timestamp::ZERO,
        }
    }

    pub(super) fn set(&mut self, query: OverrideQuery) {
        self.queue.push_back(query);
        self.due_at = Timestamp::ZERO;
    }

    /// Whether nothing is under way, and nobody waits.
    pub(super) fn is_idle(&self) -> bool {
        self.call.is_empty() && self.queue.is_empty() && self.set.is_empty()
    }

    /// Whether the store has told all records once, or has refused to.
    pub(super) fn has_heard(&self) -> bool {
        self.has_heard
    }

    /// When the store is to be asked.
    pub(super) fn due_at(&self) -> Timestamp {
        if self.call.is_empty() { self.due_at } else { Timestamp::NEVER }
    }

    /// Asks the store, if it is time.
    pub(super) fn begin(&mut self, now: Timestamp) {
        if now < self.due_at() {
            return;
        }
        let asked = self.queue.len().min(PUTS_MAX);
        self.sent.extend(self.queue.drain(..asked));
        let lost = self.lost.len().min(PUTS_MAX - asked);
        self.sent_lost.extend(self.lost.drain(..lost));
        let asked = self.sent.iter().map(|query| query.put.clone());
        let puts = asked.chain(self.sent_lost.iter().cloned()).collect();
        let (known, reads_all) = (self.known, self.reading.is_under_way);
        let request = OverridesRequest { known, reads_all, puts };
        let store = self.store.clone();
        self.call.spawn(async move { store.overrides(request).await });
    }

    /// The outcome of the call under way; `None` while there is none.
    pub(super) async fn next(&mut self) -> Option<Outcome> {
        self.call.join_next().await
    }

    /// Takes an outcome in. Returns what is worth telling.
    pub(super) fn ended(
        &mut self,
        outcome: Outcome,
        limits: &Limits,
        now: Timestamp,
    ) -> Vec<Event> {
        let outcome =
            outcome.unwrap_or_else(|error| Err(StoreError::Unreachable(error.to_string())));
        match outcome {
            Ok(reply) => {
                self.failures = 0;
                self.take_back_untaken(reply.taken);
                let has_more = reply.has_more;
                let events = self.learn(reply, limits, now);
                if !has_more {
                    self.answer();
                }
                let is_due = has_more || !self.queue.is_empty() || !self.lost.is_empty();
                let pause_us = if is_due { 0 } else { INTERVAL_US };
                let is_asked = is_due || self.is_shared;
                self.due_at = if is_asked { now.plus_micros(pause_us) } else { Timestamp::NEVER };
                events
            }
            Err(error) => self.failed(&error, now),
        }
    }

    /// Of what was sent, `taken` were taken in. The next one is told that there is no room, and the others go again.
    fn take_back_untaken(&mut self, taken: usize) {
        let mut sent = std::mem::take(&mut self.sent);
        let mut refused = sent.split_off(taken.min(sent.len()));
        let lost_taken = taken.saturating_sub(sent.len());
        self.set.extend(sent.into_iter().map(|query| query.done));
        let was_refused = !refused.is_empty();
        if was_refused {
            let _ = refused.remove(0).done.send(Err(OverrideError::TooMany));
            refused.into_iter().rev().for_each(|query| self.queue.push_front(query));
        }
        // One that was lost and for which there is no room any more holds on the nodes that know it.
        let done = if was_refused { 0 } else { lost_taken + 1 };
        self.lost.extend(std::mem::take(&mut self.sent_lost).into_iter().skip(done));
    }

    /// Tells those whose overrides are set and hold here.
    fn answer(&mut self) {
        for done in std::mem::take(&mut self.set) {
            // Whoever gave up waiting has dropped the other end.
            let _ = done.send(Ok(()));
        }
    }

    fn failed(&mut self, error: &StoreError, now: Timestamp) -> Vec<Event> {
        for query in std::mem::take(&mut self.sent) {
            let _ = query.done.send(Err(OverrideError::Store(error.clone())));
        }
        self.lost.extend(std::mem::take(&mut self.sent_lost));
        let pause_us = INTERVAL_US << self.failures.min(1);
        self.failures += 1;
        let is_away = matches!(error, StoreError::TimedOut(_) | StoreError::Unreachable(_));
        // A store that refuses to tell is not waited for, but one that is loading is.
        self.has_heard |= matches!(error, StoreError::Denied(_) | StoreError::ForeignKey { .. });
        self.due_at = if self.is_shared || !self.queue.is_empty() || !self.set.is_empty() {
            now.plus_micros(pause_us.min(BACKOFF_MAX_US))
        } else {
            Timestamp::NEVER
        };
        // Lanes tell of a store that is away.
        if is_away || now < self.refusal_event_from {
            return Vec::new();
        }
        self.refusal_event_from = now.plus_micros(REFUSAL_EVENTS_US);
        vec![Event::OverridesUnknown { error: error.clone() }]
    }

    // ---- what the store tells ----------------------------------------------------------------

    fn learn(&mut self, reply: OverridesReply, limits: &Limits, now: Timestamp) -> Vec<Event> {
        if reply.begins_anew {
            self.reading.number += 1;
            self.reading.is_under_way = true;
            // A store that had nothing at the last look has begun anew with what nodes have told it since.
            let begins_after_loss = self.known.birth == 0 && !self.records.is_empty();
            self.reading.has_lost |= reply.has_lost || begins_after_loss;
        }
        self.known = reply.known;
        let changes = Changes::new(limits, &self.secret);
        let mut events = Vec::new();
        for told in reply.told {
            if !self.keep(&told, reply.now_ms, now) {
                changes.make(&told.name, b"", Timestamp::ZERO);
            } else if let Some(until) = self.records.get(&told.name).map(|record| record.until)
                && !changes.make(&told.name, &told.value, until)
            {
                changes.make(&told.name, b"", Timestamp::ZERO);
                events.push(Event::OverrideNotUnderstood { record: shown(&told.name) });
            }
        }
        self.has_heard |= !reply.has_more;
        if self.reading.is_under_way && !reply.has_more {
            self.reading.is_under_way = false;
            self.forget_untold(&changes);
        }
        self.forget_ended(now, &changes);
        events.extend(changes.end());
        events
    }

    /// Keeps what was told. False if it says nothing any more.
    fn keep(&mut self, told: &Told, now_ms: u64, now: Timestamp) -> bool {
        let is_over = told.ends_ms > 0 && told.ends_ms <= now_ms;
        if told.value.is_empty() || is_over {
            self.records.remove(&told.name);
            return false;
        }
        let until = match told.ends_ms {
            0 => Timestamp::NEVER,
            ends_ms => now.plus_micros((ends_ms - now_ms).saturating_mul(1000)),
        };
        let Told { value, ends_ms, .. } = told.clone();
        let record = Record { value, ends_ms, until, reading: self.reading.number };
        self.records.insert(told.name.clone(), record);
        true
    }

    /// Limits have other definitions: what records say may be something else for these.
    pub(super) fn apply_again(&self, limits: &Limits) -> Vec<Event> {
        let changes = Changes::new(limits, &self.secret);
        for limit in limits.all() {
            // A switch that was set stays.
            if !self.records.contains_key(&Subject::Limit.record(&limit.name)) {
                limit.overrides.set_switch(limit.definition().limit.switch);
            }
        }
        let mut events = Vec::new();
        for (name, record) in &self.records {
            if !changes.make(name, &record.value, record.until) && events.is_empty() {
                // One of them says enough: there may be thousands of a plan that is gone.
                events.push(Event::OverrideNotUnderstood { record: shown(name) });
            }
        }
        events.extend(changes.end());
        events
    }

    /// All records were read: the others were removed, or the store has lost them and hears of them again.
    fn forget_untold(&mut self, changes: &Changes<'_>) {
        let reading = self.reading.number;
        let has_lost = std::mem::take(&mut self.reading.has_lost);
        let untold = self.records.extract_if(|_, record| record.reading < reading && !has_lost);
        for (name, _) in untold {
            changes.make(&name, b"", Timestamp::ZERO);
        }
        let lost = self.records.iter().filter(|(_, record)| record.reading < reading);
        let put = |(name, record): (&Vec<u8>, &Record)| Put {
            name: name.clone(),
            value: record.value.clone(),
            end: if record.ends_ms > 0 { End::At(record.ends_ms) } else { End::Never },
            is_restored: true,
        };
        // Those that waited to be told again are among them.
        self.lost = lost.map(put).collect();
    }

    /// Forgets records that have ended by this node's clock.
    fn forget_ended(&mut self, now: Timestamp, changes: &Changes<'_>) {
        for (name, _) in self.records.extract_if(|_, record| record.until <= now) {
            changes.make(&name, b"", Timestamp::ZERO);
        }
    }

    /// Forgets what has ended, while nothing is asked of the store.
    pub(super) fn sweep(&mut self, limits: &Limits, now: Timestamp) -> Vec<Event> {
        for limit in limits.all() {
            limit.overrides.sweep(now);
        }
        if !self.records.values().any(|record| record.until <= now) {
            return Vec::new();
        }
        let secret = self.secret.clone();
        let changes = Changes::new(limits, &secret);
        self.forget_ended(now, &changes);
        changes.end()
    }
}

/// Changes of the limits' overrides.
struct Changes<'a> {
    limits: &'a Limits,
    secret: KeySecret,
    switches: Vec<Switch>,
}

impl<'a> Changes<'a> {
    fn new(limits: &'a Limits, secret: &KeySecret) -> Self {
        Self {
            limits,
            secret: secret.clone(),
            switches: limits.all().map(|limit| limit.overrides.switch()).collect(),
        }
    }

    /// Makes one change. False if the record is of no kind that is known here, or names a plan that the limit does not have. Records of limits that this node does not have
    /// are others' business.
    fn make(&self, name: &[u8], value: &[u8], until: Timestamp) -> bool {
        let Some((limit, subject, setting)) = read_record(name, value) else { return false };
        let Some(limit) = self.limits.ever_named(limit) else { return true };
        // A key is also known hashed.
        let hashed = match &subject {
            Subject::Key(name) => self.secret.hashed_name(name).map(|name| Box::from(&name[..])),
            _ => None,
        };
        limit.overrides.set(subject, setting, until, hashed, &limit.definition())
    }

    /// Lets decisions look for what there is now. Returns an event for each limit whose switch has changed.
    fn end(self) -> Vec<Event> {
        let mut events = Vec::new();
        for (limit, before) in self.limits.all().zip(self.switches) {
            limit.notice_overrides();
            let switch = limit.overrides.switch();
            if switch != before {
                events.push(Event::Switched { limit: limit.name.clone(), switch });
            }
        }
        events
    }
}

/// A record's kind and limit: the key may be secret.
fn shown(name: &[u8]) -> String {
    let mut parts = name.splitn(3, |byte| *byte == b':').take(2).map(String::from_utf8_lossy);
    let kind = parts.next().unwrap_or_default();
    format!("{kind}:{}", parts.next().unwrap_or_default())
}
