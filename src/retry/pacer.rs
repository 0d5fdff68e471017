//! Hands out permits to send requests, so that a server's limits are kept as far as its responses state them.

#![allow(clippy::disallowed_methods, reason = "a pacer waits, and reads the clock")]

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use http::{HeaderMap, StatusCode};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until, timeout_at};

use super::hints::{Allowance, RateLimitHints};

/// The longest wait after a first denial without `Retry-After`.
pub const DEFAULT_FIRST_BACKOFF: Duration = Duration::from_millis(200);
/// The longest wait after any denial without `Retry-After`.
pub const DEFAULT_MAX_BACKOFF: Duration = Duration::from_secs(30);

/// The longest wait after any response, whatever it says.
pub const WAIT_MAX: Duration = Duration::from_secs(24 * 60 * 60);

/// The longest wait of the other requests for the response to the one that was sent alone.
const AHEAD_MAX: Duration = Duration::from_secs(1);

/// Paces requests to one API, or to one key of it. Clones share their state.
///
/// At first one request is sent alone, and the others wait for its response, at most a second. Once a response names
/// a limit, as many requests are sent as are left, less those under way, and later as many as the limit allows more.
/// Until then nothing is held back. After a denial no request is sent before `Retry-After` is over or, without it,
/// before an exponential back-off. Permits come in the order in which they are asked for.
///
/// ```
/// use std::time::Duration;
/// use http::{HeaderMap, StatusCode};
/// use tidegate::retry::{Pacer, ResponseKind};
/// use tokio::time::Instant;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let pacer = Pacer::new();
/// let within = Instant::now() + Duration::from_secs(5);
/// let permit = pacer.permit(within).await?;
/// // ... send the request, and record its response.
/// let headers = HeaderMap::from_iter([(http::header::RETRY_AFTER, "60".parse()?)]);
/// assert_eq!(permit.record(StatusCode::TOO_MANY_REQUESTS, &headers), ResponseKind::Denied);
/// assert!(pacer.permit(within).await.is_err(), "there is none for a minute");
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Pacer {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    backoff_first: Duration,
    backoff_max: Duration,
    state: Mutex<State>,
    /// The first caller in the queue holds the lock while it waits.
    queue: tokio::sync::Mutex<()>,
    news: Notify,
}

/// No request may be sent before the deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("gave up: no request may be sent before the deadline, which is in {remaining:?}")]
pub struct GaveUp {
    /// The time to the deadline.
    pub remaining: Duration,
}

/// What a pacer makes of a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ResponseKind {
    /// The service handled the request, with any result.
    Answered,
    /// The service denied the request for now: status 429 or 503.
    Denied,
}

/// Permission to send one request. It counts as under way until its response is [recorded](Self::record) or it is
/// dropped.
#[derive(Debug)]
#[must_use = "dropping a permit consumes it; call `give_back` if nothing was sent"]
pub struct Permit {
    shared: Arc<Shared>,
    taken: Instant,
    /// When the request was sent whose response brought the pace that this was taken from.
    pace_sent: Option<Instant>,
}

impl Default for Pacer {
    fn default() -> Self {
        Self::new()
    }
}

impl Pacer {
    /// With the default back-off.
    pub fn new() -> Self {
        Self::with_backoff(DEFAULT_FIRST_BACKOFF, DEFAULT_MAX_BACKOFF)
    }

    /// After a denial without `Retry-After`, waits at most `first`, doubled with each further denial up to `most`; the
    /// wait is random, and at least half of that. With `Retry-After`, this is the least wait.
    pub fn with_backoff(first: Duration, most: Duration) -> Self {
        let shared = Shared {
            backoff_first: first,
            backoff_max: most,
            state: Mutex::default(),
            queue: tokio::sync::Mutex::default(),
            news: Notify::new(),
        };
        Self { shared: Arc::new(shared) }
    }

    /// Waits until a request may be sent. Dropping the future gives its place in the queue back.
    ///
    /// # Errors
    ///
    /// [`GaveUp`] as soon as it is known that no request may be sent before `deadline`.
    pub async fn permit(&self, deadline: Instant) -> Result<Permit, GaveUp> {
        let gave_up = || GaveUp { remaining: deadline.saturating_duration_since(Instant::now()) };
        let in_time = async {
            let mut next = std::pin::pin!(self.shared.queue.lock());
            let _next = loop {
                let news = self.shared.news.notified();
                // A caller in the queue need not wait for the lock to know that its deadline is too early.
                if self.shared.state().closed_until().is_some_and(|opens| opens > deadline) {
                    return Err(gave_up());
                }
                tokio::select! {
                    biased;
                    guard = &mut next => break guard,
                    () = news => (),
                }
            };
            loop {
                let news = self.shared.news.notified();
                let until = {
                    let mut state = self.shared.state();
                    let now = Instant::now();
                    match state.take(now) {
                        Ok(()) => {
                            let pace_sent = state.pace_sent.filter(|_| state.pace.is_some());
                            return Ok(Permit {
                                shared: self.shared.clone(),
                                taken: now,
                                pace_sent,
                            });
                        }
                        Err(_) if state.closed_until().is_some_and(|opens| opens > deadline) => {
                            return Err(gave_up());
                        }
                        Err(until) => until,
                    }
                };
                tokio::select! {
                    () = sleep_until(until) => (),
                    () = news => (),
                }
            }
        };
        timeout_at(deadline, in_time).await.unwrap_or_else(|_| Err(gave_up()))
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing in there panics half-way.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The least wait after a denial. A random part of up to the same again is added to it.
    fn backoff(&self, denials: u32) -> Duration {
        let doubled = 1_u32.checked_shl(denials.saturating_sub(1)).unwrap_or(u32::MAX);
        let longest = self.backoff_first.saturating_mul(doubled).min(self.backoff_max);
        longest / 2
    }
}

impl Permit {
    /// Reads the response's status and header fields.
    pub fn record(self, status: StatusCode, headers: &HeaderMap) -> ResponseKind {
        let hints = RateLimitHints::read(headers, SystemTime::now());
        let denied = [StatusCode::TOO_MANY_REQUESTS, StatusCode::SERVICE_UNAVAILABLE];
        let mut state = self.shared.state();
        // Read under the lock, or another permit would seem to be taken after a response that it did not know of.
        let now = Instant::now();
        // The response to a later request is newer, whenever it arrives.
        let is_newest = state.pace_sent.is_none_or(|pace_sent| self.taken >= pace_sent);
        if let Some(allowance) = hints.allowance.filter(|_| is_newest) {
            // This request is not under way any more.
            let others = state.under_way.saturating_sub(1);
            state.pace = Some(Pace::new(allowance, others, state.pace.as_ref(), now));
            state.pace_sent = Some(self.taken);
        }
        // Denials of requests that were sent together count once.
        let is_news = state.denied.is_none_or(|denied| self.taken > denied);
        if !denied.contains(&status) {
            if is_news {
                (state.denials, state.ahead) = (0, Ahead::Answered);
            }
            // A server that names limits only in denials has no limit to keep now.
            if hints.allowance.is_none() && state.pace.as_ref().is_some_and(Pace::is_over) {
                state.pace = None;
            }
            return ResponseKind::Answered;
        }
        if is_news {
            state.denials = state.denials.saturating_add(1);
            (state.denied, state.ahead) = (Some(now), Ahead::Nobody);
        }
        let least = self.shared.backoff(state.denials);
        let wait = hints.retry_after.unwrap_or_default().max(least);
        let wait = wait.saturating_add(least.mul_f64(fastrand::f64()));
        let opens = after(wait, now);
        state.opens = state.opens.max(Some(opens));
        let has_both = hints.allowance.is_some() && is_newest && hints.retry_after.is_some();
        if let Some(pace) = state.pace.as_mut()
            && status == StatusCode::TOO_MANY_REQUESTS
        {
            if pace.step.is_some() {
                // Other clients spend too: what becomes free until then is theirs.
                pace.free = 0;
                pace.next = pace.next.max(Some(opens));
            } else if has_both && pace.free == 0 {
                // Retry-After comes before the reset, and is about one request.
                (pace.next, pace.quota) = (Some(opens), 1);
            }
        }
        ResponseKind::Denied
    }

    /// Gives the permit back: the request was not sent, and another one may be.
    pub fn give_back(self) {
        let mut state = self.shared.state();
        let pace_sent = state.pace_sent;
        if let Some(pace) =
            state.pace.as_mut().filter(|_| self.pace_sent.is_some() && self.pace_sent == pace_sent)
        {
            pace.free = pace.free.saturating_add(1).min(pace.quota.max(pace.free));
        }
    }
}

/// The time after a wait, of [`WAIT_MAX`] at most.
pub(super) fn after(wait: Duration, now: Instant) -> Instant {
    now + wait.min(WAIT_MAX)
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.shared.state().under_way -= 1;
        self.shared.news.notify_waiters();
    }
}

#[derive(Debug, Default)]
struct State {
    /// Requests that were sent and have no response yet.
    under_way: u64,
    /// When the last of them got its permit.
    taken: Option<Instant>,
    /// Denials in a row, each of a request that was sent after the response before.
    denials: u32,
    /// When the last of them arrived.
    denied: Option<Instant>,
    /// No request is sent before.
    opens: Option<Instant>,
    ahead: Ahead,
    /// What the server allows, once a response said so.
    pace: Option<Pace>,
    /// When the request was sent whose response said so.
    pace_sent: Option<Instant>,
}

/// At first, and after a denial, one request is sent alone.
#[derive(Clone, Copy, Debug, Default)]
enum Ahead {
    #[default]
    Nobody,
    /// It was sent at this time.
    Sent(Instant),
    /// Its response has arrived.
    Answered,
}

/// What may be sent now, and when there is more.
#[derive(Debug)]
struct Pace {
    free: u64,
    /// Requests that are free at the next time or, where they come one by one, at most.
    quota: u64,
    next: Option<Instant>,
    step: Option<Duration>,
}

impl State {
    /// No request is sent before this time, whatever responses arrive until then.
    fn closed_until(&self) -> Option<Instant> {
        let used_up = self.pace.as_ref().filter(|pace| pace.free == 0 && self.under_way == 0);
        self.opens.max(used_up.and_then(|pace| pace.next))
    }

    /// Takes a permit or, if there is none, returns when to try again unless a response arrives before.
    fn take(&mut self, now: Instant) -> Result<(), Instant> {
        if let Some(opens) = self.opens.filter(|&opens| opens > now) {
            return Err(opens);
        }
        if let Ahead::Sent(at) = self.ahead
            && self.under_way > 0
            && now < at + AHEAD_MAX
        {
            return Err(at + AHEAD_MAX);
        }
        if let Some(pace) = &mut self.pace {
            pace.refill(now);
            match (pace.free.checked_sub(1), pace.next) {
                (Some(left), _) => pace.free = left,
                (None, Some(next)) => return Err(next),
                // Nothing is known any more: one request is sent alone, and another if no response arrives.
                (None, None) if self.under_way == 0 => (),
                (None, None) => {
                    let again = self.taken.map_or(now, |taken| taken + AHEAD_MAX);
                    if again > now {
                        return Err(again);
                    }
                }
            }
        }
        let is_alone = self.under_way == 0;
        if matches!(self.ahead, Ahead::Nobody) || is_alone && !matches!(self.ahead, Ahead::Answered)
        {
            self.ahead = Ahead::Sent(now);
        }
        self.under_way += 1;
        self.taken = Some(now);
        Ok(())
    }
}

impl Pace {
    /// What a server allows that may not know of the requests under way.
    fn new(allowance: Allowance, under_way: u64, last: Option<&Self>, now: Instant) -> Self {
        let Allowance { remaining, next_after, step, .. } = allowance;
        let wait = next_after.map(|wait| match step {
            Some(step) => first_wait(wait, step, under_way.saturating_sub(remaining)),
            None => wait,
        });
        Self {
            free: remaining.saturating_sub(under_way),
            quota: most_at_once(allowance, last),
            next: wait.map(|wait| after(wait, now)),
            step,
        }
    }

    /// Whether all of it is used, and it is unknown when there is more.
    fn is_over(&self) -> bool {
        self.free == 0 && self.next.is_none()
    }

    /// Counts what has become free by now.
    fn refill(&mut self, now: Instant) {
        let Some(next) = self.next.filter(|&next| next <= now) else { return };
        let Some(step) = self.step.filter(|step| !step.is_zero()) else {
            (self.free, self.next) = (self.free.max(self.quota), None);
            return;
        };
        let steps = now.duration_since(next).as_nanos() / step.as_nanos() + 1;
        let steps = u32::try_from(steps).unwrap_or(u32::MAX);
        self.free = self.free.saturating_add(steps.into()).min(self.quota);
        let next = step.checked_mul(steps).and_then(|passed| next.checked_add(passed));
        let latest = after(WAIT_MAX, now);
        self.next = Some(next.map_or(latest, |next| next.min(latest)));
    }
}

/// How long until the next request where they come one by one, `step` apart, and `debt` requests are under way for
/// which there is nothing left. Servers say whole seconds, rounded up: within the first one, `step` is more precise.
fn first_wait(wait: Duration, step: Duration, debt: u64) -> Duration {
    let wait = if wait <= Duration::from_secs(1) { wait.min(step) } else { wait };
    wait.saturating_add(step.saturating_mul(u32::try_from(debt).unwrap_or(u32::MAX)))
}

/// The most that can be left at once. Where requests come one by one, that is the burst. It may be above the quota of
/// a window or below it: if the response does not say it, it is the most that was left before a request so far.
fn most_at_once(allowance: Allowance, last: Option<&Pace>) -> u64 {
    let Allowance { remaining, step, quota, burst, .. } = allowance;
    if step.is_none() {
        return quota.unwrap_or(1).max(1);
    }
    let seen = last.filter(|last| last.step == step).map_or(1, |last| last.quota);
    burst.unwrap_or_else(|| seen.max(remaining.saturating_add(1))).max(1)
}
