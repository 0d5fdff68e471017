//! A store that answers anything: replies are decoded and reach the engine and the buckets of a whole limiter.

use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::{Bytes, replace};
use crate::limit::Limit;
use crate::limiter::{ActiveLimit, Limiter};
use crate::quota::{Quota, TOKENS_MAX};
use crate::store::exact::ExactRequest;
use crate::store::exchange::{Deciding, Exchange, Overriding, Permitting};
#[cfg(feature = "server")]
use crate::store::exchange::{Releasing, Reserving};
use crate::store::overrides::OverridesRequest;
use crate::store::permits::PermitRequest;
#[cfg(feature = "server")]
use crate::store::reservations::ReservationRequest;
#[cfg(feature = "server")]
use crate::store::timed_permits::TimedPermitRelease;
use crate::store::{AnyStore, MemoryStore, Store};
use crate::sync::message::{BatchVerdict, Grant, Receipt, Reply, Request};
use crate::testing::ManualClock;

/// The head of a reply, and where its status stands.
const HEAD_BYTES: usize = 122;
const STATUS_AT: usize = 2 + 4 * 8;
const BURST: u32 = 20;
/// The most that a bucket can hold beyond its burst: what may be owed on credit.
const CREDIT: u32 = 15;
const LIMITS: [&str; 2] = ["api", "strict"];
const KEYS: [&str; 3] = ["a", "b", "c"];
/// Virtual time in which lanes hear that the store is sound.
const HEARING_STEPS: [Duration; 4] = [
    Duration::from_millis(50),
    Duration::from_millis(50),
    Duration::from_secs(1),
    Duration::from_secs(1),
];
/// At most so many steps of this length, in virtual time, pass until a lane works again, however its store answered.
const MENDING_STEPS: (usize, Duration) = (6, Duration::from_secs(20));

/// Lets a store answer a limiter as `bytes` say. Whatever it answers, no key has more than its burst and the most
/// credit at once, or the burst of a newer quota that it told and the most credit, and every lane works again within
/// minutes after the store is sound.
pub fn reply(bytes: &[u8]) {
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    runtime.block_on(answered(bytes));
}

async fn answered(bytes: &[u8]) {
    let clock = ManualClock::new();
    let time = clock.clone();
    let memory = MemoryStore::new().with_time(move || time.now(), 0);
    let store = HostileStore {
        memory,
        script: Arc::new(Mutex::new(bytes.to_vec())),
        most_bursts: Arc::new(LIMITS.map(|_| AtomicI64::new(BURST.into()))),
    };
    let limiter = Limiter::builder()
        .limit(Limit::new(LIMITS[0], Quota::per_second(100).burst(u64::from(BURST))))
        .limit(Limit::new(LIMITS[1], Quota::per_minute(6).burst(u64::from(BURST))).strict())
        .store(AnyStore::other(store.clone()))
        .lanes(2)
        .max_keys(64)
        .clock(&clock)
        .build()
        .expect("the limiter is sound");
    let limits = LIMITS.map(|name| limiter.limit(name).expect("it is there"));
    let mut rounds = 0;
    while !store.is_sound() && rounds < 64 {
        rounds += 1;
        spend(&limits, store.most_bursts(), rounds);
        clock.advance(Duration::from_millis(20 << (rounds % 6)));
        limiter.settle().await;
    }
    store.become_sound();
    let let_time_pass = async |time| {
        clock.advance(time);
        limiter.settle().await;
        for limit in &limits {
            let _ = limit.check(KEYS[0]);
        }
    };
    for time in HEARING_STEPS {
        let_time_pass(time).await;
    }
    let (most_steps, step) = MENDING_STEPS;
    for _ in 0..most_steps {
        if limiter.ready(Duration::ZERO).await.is_ok() {
            return;
        }
        let_time_pass(step).await;
    }
    limiter.ready(Duration::ZERO).await.expect("every lane works again");
}

/// Spends all that one key of each limit has at this instant.
fn spend(limits: &[ActiveLimit; 2], bursts: [i64; 2], round: usize) {
    for (limit, burst) in limits.iter().zip(bursts) {
        let most = burst + i64::from(CREDIT);
        let key = KEYS[round % KEYS.len()];
        let spent = (0..=most.min(100)).take_while(|_| limit.check(key).is_allowed()).count();
        assert!(spent as i64 <= most, "{spent} at once of {burst}");
    }
}

/// A store in memory whose replies a script spoils.
#[derive(Clone)]
struct HostileStore {
    memory: MemoryStore,
    script: Arc<Mutex<Vec<u8>>>,
    /// The largest burst of each limit, in tokens: its own, or that of a newer quota that the store told.
    most_bursts: Arc<[AtomicI64; 2]>,
}

impl HostileStore {
    fn most_bursts(&self) -> [i64; 2] {
        [0, 1].map(|limit| self.most_bursts[limit].load(Ordering::Relaxed))
    }

    /// Notes the bursts of newer quotas in a reply, of those that a limit can have.
    fn note_newer_quotas(&self, request: &Request, reply: &Reply) {
        let BatchVerdict::Applied(grants) = &reply.verdict else { return };
        for (grant, entry) in grants.iter().zip(&request.entries) {
            let Grant::OtherQuota { version, scale } = grant else { continue };
            let tokens = scale.burst / scale.token;
            if *version > entry.version && scale.rate > 0 && tokens <= TOKENS_MAX as i64 {
                let limit = usize::from(&*entry.limit == LIMITS[1]);
                self.most_bursts[limit].fetch_max(tokens, Ordering::Relaxed);
            }
        }
    }

    fn is_sound(&self) -> bool {
        self.script.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }

    fn become_sound(&self) {
        self.script.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// The reply's bytes, spoiled as the script says next, and what the store leaves out of what it has read.
    fn spoiled(&self, mut reply: Vec<u8>) -> (Vec<u8>, Lacks) {
        let mut script = self.script.lock().unwrap_or_else(PoisonError::into_inner);
        let mut bytes = Bytes(&script);
        let first = bytes.byte();
        let (changes, lacks) = (first % 8, first / 8);
        let lacks = match lacks {
            30 => Lacks::NodesOfALimit,
            31 => Lacks::Grant,
            _ => Lacks::Nothing,
        };
        for _ in 0..changes {
            // A grant has 57, 65, 81 or 89 bytes, of which the first is its status.
            let grant = HEAD_BYTES + bytes.below(4) * [57, 81][bytes.below(2)];
            match bytes.byte() % 16 {
                // Another number in the head, where they stand behind two letters.
                0..=3 => {
                    let at = 2 + 8 * bytes.below(12);
                    replace(&mut reply, at, &bytes.wire_number());
                }
                4 => {
                    let status = f64::from(bytes.byte() % 7);
                    replace(&mut reply, STATUS_AT, &status.to_le_bytes());
                }
                5..=8 => {
                    let number = 1 + 8 * bytes.below(10);
                    replace(&mut reply, grant + number, &bytes.wire_number());
                }
                9 | 10 => replace(&mut reply, grant, &[bytes.byte() % 64]),
                11 => replace(&mut reply, grant, &[bytes.byte() % 128]),
                12 => {
                    let at = bytes.below(reply.len());
                    replace(&mut reply, at, &[bytes.byte()]);
                }
                13 => reply.truncate(bytes.below(reply.len() + 1)),
                14 => reply.truncate(HEAD_BYTES),
                _ => reply.extend(bytes.take::<8>()),
            }
        }
        let left = bytes.0.to_vec();
        *script = left;
        (reply, lacks)
    }
}

/// What a store leaves out that does not speak by bytes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Lacks {
    Nothing,
    NodesOfALimit,
    Grant,
}

impl Store for HostileStore {
    fn exchange(&self, request: Arc<Request>) -> Exchange<'_> {
        Box::pin(async move {
            let reply = self.memory.exchange(request.clone()).await?;
            let sound = reply.encode(Receipt::default(), &request.entries);
            let decoded = Reply::decode(&sound, &request.entries, request.limits.len());
            assert_eq!(decoded.as_ref(), Ok(&reply), "a reply survives its encoding");
            if self.is_sound() {
                return Ok(reply);
            }
            let (answered, lacks) = self.spoiled(sound);
            let mut reply = Reply::decode(&answered, &request.entries, request.limits.len())?;
            let again = reply.encode(Receipt::default(), &request.entries);
            let decoded = Reply::decode(&again, &request.entries, request.limits.len());
            assert_eq!(decoded.as_ref(), Ok(&reply), "what was read is written");
            self.note_newer_quotas(&request, &reply);
            match &mut reply {
                Reply { limit_nodes, .. } if lacks == Lacks::NodesOfALimit => {
                    limit_nodes.pop();
                }
                Reply { verdict: BatchVerdict::Applied(grants), .. } if lacks == Lacks::Grant => {
                    grants.pop();
                }
                _ => {}
            }
            Ok(reply)
        })
    }

    fn decide(&self, request: ExactRequest) -> Deciding<'_> {
        self.memory.decide(request)
    }

    fn overrides(&self, request: OverridesRequest) -> Overriding<'_> {
        self.memory.overrides(request)
    }

    fn permits(&self, request: PermitRequest) -> Permitting<'_> {
        self.memory.permits(request)
    }

    #[cfg(feature = "server")]
    fn reservations(&self, request: ReservationRequest) -> Reserving<'_> {
        self.memory.reservations(request)
    }

    #[cfg(feature = "server")]
    fn release(&self, request: TimedPermitRelease) -> Releasing<'_> {
        self.memory.release(request)
    }

    fn timeout(&self) -> Duration {
        Duration::from_millis(100)
    }
}
