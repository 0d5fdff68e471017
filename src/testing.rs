//! For users' own tests: a clock that tests drive, and a store that tests script.
//!
//! ```
//! use std::time::Duration;
//! use tidegate::testing::{Fault, ManualClock, ScriptedStore};
//! use tidegate::{Limit, Limiter, Quota};
//!
//! # tokio::runtime::Builder::new_current_thread().build()?.block_on(async {
//! let clock = ManualClock::new();
//! let store = ScriptedStore::new(&clock);
//! let limiter = Limiter::builder()
//!     .limit(Limit::new("api", Quota::per_second(10)))
//!     .store(store.clone())
//!     .clock(&clock)
//!     .build()?;
//! let api = limiter.limit("api")?;
//! assert!(api.check("user:42").is_allowed());
//! store.fail(Fault::ReplyLost);
//! clock.advance(Duration::from_millis(60));
//! limiter.settle().await;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! # })?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

pub use crate::driver::manual::ManualClock;

use crate::builder::Builder;
use crate::driver::clock::TimeSource;
use crate::error::StoreError;
use crate::store::exact::ExactRequest;
use crate::store::exchange::{Deciding, Exchange, Overriding, Permitting};
#[cfg(feature = "server")]
use crate::store::exchange::{Releasing, Reserving};
use crate::store::overrides::OverridesRequest;
use crate::store::permits::PermitRequest;
#[cfg(feature = "redis")]
use crate::store::redis::RedisStore;
#[cfg(feature = "server")]
use crate::store::reservations::ReservationRequest;
#[cfg(feature = "server")]
use crate::store::timed_permits::TimedPermitRelease;
use crate::store::{AnyStore, MemoryStore, Store};
use crate::sync::message::Request;
use crate::time::micros;

impl Builder {
    /// Lives by `clock` instead of the system's.
    pub fn clock(mut self, clock: &ManualClock) -> Self {
        self.time = Some(TimeSource::Manual(clock.clone()));
        self
    }
}

#[cfg(feature = "redis")]
impl RedisStore {
    /// Exact and concurrency limits take the time of `clock` for the server's.
    #[must_use]
    pub fn clock(mut self, clock: &ManualClock) -> Self {
        self.clock = Some(clock.shown());
        self
    }
}

/// What goes wrong with one exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// The batch never arrives.
    RequestLost,
    /// The batch is applied; its reply is lost.
    ReplyLost,
    /// The batch arrives twice; the second reply is the one that is seen.
    Duplicated,
}

/// A [`MemoryStore`] whose exchanges go wrong as a test says. Cheap to clone; clones are one store.
#[derive(Clone, Debug)]
pub struct ScriptedStore {
    memory: MemoryStore,
    script: Arc<Mutex<Script>>,
    time: TimeSource,
}

#[derive(Debug, Default)]
struct Script {
    next: VecDeque<Fault>,
    away: bool,
    round_trip: Duration,
    questions: u64,
}

impl ScriptedStore {
    /// A store in which nothing goes wrong yet, living by `clock`.
    pub fn new(clock: &ManualClock) -> Self {
        let (clock, time) = (clock.clone(), TimeSource::Manual(clock.clone()));
        let memory = MemoryStore::new().with_time(move || clock.now(), 0);
        Self { memory, script: Arc::default(), time }
    }

    /// Lets questions about single requests, those of exact limits and leaky buckets, and messages about permits, take so long: half of it before the
    /// store decides, and half after. [`Limiter::settle`](crate::Limiter::settle) then waits for them, so time has to
    /// pass meanwhile.
    pub fn set_round_trip(&self, round_trip: Duration) {
        self.lock().round_trip = round_trip;
    }

    /// How many questions about single requests and messages about permits there were, those that went wrong included.
    pub fn questions(&self) -> u64 {
        self.lock().questions
    }

    /// Waits for one way to the store or back.
    async fn travel(&self) {
        let way = micros(self.lock().round_trip) / 2;
        if way > 0 {
            self.time.sleep_until(self.time.now().plus_micros(way)).await;
        }
    }

    /// Lets `fault` happen to the next exchange that has none planned.
    pub fn fail(&self, fault: Fault) {
        self.lock().next.push_back(fault);
    }

    /// Takes the store away, or brings it back: meanwhile no batch arrives.
    pub fn set_away(&self, away: bool) {
        self.lock().away = away;
    }

    /// Forgets everything, as a store does that restarts without its data.
    pub fn clear(&self) {
        self.memory.clear();
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Script> {
        self.script.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn next_fault(&self) -> Option<Fault> {
        let mut script = self.lock();
        if script.away { Some(Fault::RequestLost) } else { script.next.pop_front() }
    }

    /// Makes a call, to which the next fault happens, if there is one.
    async fn scripted<T, F>(&self, call: impl Fn() -> F) -> Result<T, StoreError>
    where
        F: Future<Output = Result<T, StoreError>>,
    {
        let lost = Err(StoreError::TimedOut(self.timeout()));
        match self.next_fault() {
            None => call().await,
            Some(Fault::RequestLost) => lost,
            Some(Fault::ReplyLost) => {
                call().await?;
                lost
            }
            Some(Fault::Duplicated) => {
                call().await?;
                call().await
            }
        }
    }

    /// The same about a single request, which takes its time.
    async fn question<T, F>(&self, call: impl Fn() -> F) -> Result<T, StoreError>
    where
        F: Future<Output = Result<T, StoreError>>,
    {
        self.lock().questions += 1;
        self.travel().await;
        let reply = self.scripted(call).await;
        self.travel().await;
        reply
    }
}

impl Store for ScriptedStore {
    fn exchange(&self, request: Arc<Request>) -> Exchange<'_> {
        Box::pin(self.scripted(move || self.memory.exchange(request.clone())))
    }

    fn decide(&self, request: ExactRequest) -> Deciding<'_> {
        Box::pin(self.question(move || self.memory.decide(request.clone())))
    }

    fn overrides(&self, request: OverridesRequest) -> Overriding<'_> {
        Box::pin(async move {
            if self.lock().away {
                return Err(StoreError::TimedOut(self.timeout()));
            }
            self.memory.overrides(request).await
        })
    }

    fn permits(&self, request: PermitRequest) -> Permitting<'_> {
        Box::pin(self.question(move || self.memory.permits(request.clone())))
    }

    #[cfg(feature = "server")]
    fn reservations(&self, request: ReservationRequest) -> Reserving<'_> {
        Box::pin(self.scripted(move || self.memory.reservations(request.clone())))
    }

    #[cfg(feature = "server")]
    fn release(&self, request: TimedPermitRelease) -> Releasing<'_> {
        Box::pin(self.scripted(move || self.memory.release(request.clone())))
    }

    fn timeout(&self) -> Duration {
        Duration::from_millis(100)
    }
}

impl From<ScriptedStore> for AnyStore {
    fn from(store: ScriptedStore) -> Self {
        Self::other(store)
    }
}
