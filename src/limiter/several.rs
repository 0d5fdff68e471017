//! Requests of several limits: all of them are spent from or none (`check_all`), or each by itself (`check_each`).

use std::fmt;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;

use smallvec::SmallVec;

use super::together::part::{Part, Patience, USUAL, fewer_left};
use super::together::{ask_all, decide_all};
use super::{ActiveLimit, AsyncLimit, Limiter};
use crate::decision::Decision;
use crate::error::CheckError;
use crate::key::{Key, KeyName};

/// One for each of several requests.
type Decisions = Vec<Result<Decision, CheckError>>;

/// A request that the store is to be asked about, and its place among several.
type Undecided<'a> = (usize, OnKey<'a>);

/// The most requests that `check_each` has under way.
const ASKED_AT_ONCE: usize = 256;

/// A limit with the key of a request, for [`Limiter::check_all`] and [`Limiter::check_each`].
#[must_use]
pub struct OnKey<'a> {
    limit: &'a ActiveLimit,
    key: KeyName<'a>,
    /// The key before it is hashed, if overrides look for that.
    plain: Option<Arc<[u8]>>,
    cost: u32,
}

/// Without the key, which may be secret.
impl fmt::Debug for OnKey<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { limit, cost, .. } = self;
        f.debug_struct("OnKey").field("limit", &limit.name()).field("cost", cost).finish()
    }
}

impl OnKey<'_> {
    /// The request costs so many tokens of this limit, instead of one.
    pub fn cost(self, cost: u32) -> Self {
        Self { cost, ..self }
    }
}

impl Limiter {
    /// Decides about one request that is to fit several limits, each for a key of its own: all of them are spent from, or
    /// none. Where this node alone cannot be sure, the store is asked, as by [`ActiveLimit::check_sure`].
    ///
    /// The decision is as that of [`Group::check`](crate::Group::check). Exact limits have a part in it too:
    /// [`AsyncLimit::on`] names them, and they are asked as by [`AsyncGroup`](crate::AsyncGroup).
    ///
    /// ```
    /// # let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    /// # runtime.block_on(async {
    /// use tidegate::{Limit, Limiter, Quota};
    ///
    /// let limiter = Limiter::builder()
    ///     .limit(Limit::new("user", Quota::per_minute(60)).local())
    ///     .limit(Limit::new("address", Quota::per_minute(600)).local())
    ///     .build()?;
    /// let (user, address) = (limiter.limit("user")?, limiter.limit("address")?);
    /// let parts = [user.on("alice"), address.on("192.0.2.7").cost(3)];
    /// assert!(limiter.check_all(parts).await?.is_allowed());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// # })?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`CheckError`] if a limit can never admit so high a cost, as of [`ActiveLimit::check_n`], or if there is no limit. If a
    /// limit comes twice with one key, the costs are added up.
    ///
    /// Dropping the future before it is ready may leave what the store was asked about spent.
    pub async fn check_all<'a>(
        &self,
        parts: impl IntoIterator<Item = OnKey<'a>>,
    ) -> Result<Decision, CheckError> {
        self.check_all_with(parts, Patience::Store).await
    }

    /// The same with another patience.
    #[allow(clippy::unused_self, reason = "limits are those of the limiter")]
    pub(crate) async fn check_all_with<'a>(
        &self,
        parts: impl IntoIterator<Item = OnKey<'a>>,
        patience: Patience,
    ) -> Result<Decision, CheckError> {
        let mut parts: SmallVec<[OnKey<'a>; USUAL]> = parts.into_iter().collect();
        parts.sort_by(|a, b| (a.limit.state.index, &*a.key).cmp(&(b.limit.state.index, &*b.key)));
        let mut asked = SmallVec::<[Part<'_>; USUAL]>::new();
        for part in parts.iter().map(OnKey::part) {
            let part = Part { patience, ..part };
            let same = |last: &&mut Part<'_>| {
                Arc::ptr_eq(&last.limit.state, &part.limit.state) && last.key == part.key
            };
            if let Some(last) = asked.last_mut().filter(same) {
                last.cost = last.cost.saturating_add(part.cost);
            } else {
                asked.push(part);
            }
        }
        asked.iter().try_for_each(Part::validate_cost)?;
        ask_for_decision(&asked).await.ok_or(CheckError::NoLimit)
    }

    /// Decides about many requests, each by itself: a denial of one takes nothing back from the others. Those of one key share
    /// its tokens; which of them is charged first is not said. Where this node alone cannot be sure, it asks the store about up to
    /// 256 of them at the same time, so that these wait for about one round trip.
    ///
    /// The decisions come in the order of the requests, each as by [`AsyncLimit::check_sure_n`]. [`check_all`](Self::check_all) is
    /// for one request that is to fit several limits.
    ///
    /// Cost: what each of them takes, and an allocation for each that the store is asked about.
    ///
    /// ```
    /// # let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    /// # runtime.block_on(async {
    /// use tidegate::{Limit, Limiter, Quota};
    ///
    /// let limiter = Limiter::builder().limit(Limit::new("mail", Quota::per_hour(3)).local()).build()?;
    /// let mail = limiter.limit("mail")?;
    /// let decisions = limiter.check_each([mail.on("ann"), mail.on("bob"), mail.on("ann").cost(5)]).await;
    /// assert!(decisions[0]?.is_allowed() && decisions[1]?.is_allowed());
    /// assert!(decisions[2].is_err(), "more than the limit ever allows");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// # })?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`CheckError`] in the place of each request whose limit can never admit so high a cost, as of [`ActiveLimit::check_n`].
    ///
    /// Dropping the future before it is ready may leave what the store was asked about spent.
    pub async fn check_each<'a>(
        &self,
        requests: impl IntoIterator<Item = OnKey<'a>>,
    ) -> Vec<Result<Decision, CheckError>> {
        let (mut decisions, waiting) = decide_ready(requests);
        // A store that is asked too much at once does not answer in time.
        for waiting in waiting.chunks(ASKED_AT_ONCE) {
            let mut begun = Vec::with_capacity(waiting.len());
            for (place, request) in waiting {
                begun.push((*place, poll_once(Box::pin(request.ask())).await));
            }
            // The store has been asked about all of this chunk.
            for (place, begun) in begun {
                decisions[place] = match begun {
                    Ok(decided) => decided,
                    Err(asked) => asked.await,
                };
            }
        }
        decisions
    }
}

/// Decides about those that have nothing to wait for. The others have a place among the decisions, and are returned too.
fn decide_ready<'a>(
    requests: impl IntoIterator<Item = OnKey<'a>>,
) -> (Decisions, Vec<Undecided<'a>>) {
    let requests = requests.into_iter();
    let (mut decisions, mut waiting) = (Vec::with_capacity(requests.size_hint().0), Vec::new());
    for (place, request) in requests.enumerate() {
        decisions.push(request.decide_if_no_wait().unwrap_or_else(|| {
            let undecided = request.limit.undecided(request.cost);
            waiting.push((place, request));
            Ok(undecided)
        }));
    }
    (decisions, waiting)
}

/// Polls once: the store is asked about this request before it is asked about the next one. `Err` gives the future back.
async fn poll_once<F: Future + Unpin>(mut asked: F) -> Result<F::Output, F> {
    match poll_fn(|context| Poll::Ready(Pin::new(&mut asked).poll(context))).await {
        Poll::Ready(answer) => Ok(answer),
        Poll::Pending => Err(asked),
    }
}

impl OnKey<'_> {
    fn part(&self) -> Part<'_> {
        let Self { limit, key, plain, cost } = self;
        let (plain, patience) = (plain.as_deref(), Patience::Store);
        Part { limit, key, plain, cost: *cost, patience }
    }

    /// Decides, unless the request has to wait. Slots that nodes share are asked for as by [`ask`](Self::ask), for a request
    /// that is not held.
    fn decide_if_no_wait(&self) -> Option<Result<Decision, CheckError>> {
        let part = self.part();
        if self.cost > self.limit.cost_max() {
            return Some(self.limit.decide_above_max(part.looked_up(), self.cost));
        }
        if self.limit.slots().is_some() { None } else { part.decide_if_no_wait().map(Ok) }
    }

    /// Decides about the request by itself. Its limit can admit the cost.
    async fn ask(&self) -> Result<Decision, CheckError> {
        Ok(self.part().ask().await)
    }
}

/// The decision of all parts, where the store is asked if need be. `None` of no parts.
pub(super) async fn ask_for_decision(parts: &[Part<'_>]) -> Option<Decision> {
    if parts.iter().any(|part| part.cost > 0) {
        return ask_all(parts).await.decision();
    }
    // Nothing is to be spent.
    let mut all: Option<Decision> = None;
    for part in parts {
        let look = match part.look() {
            Some(look) if !part.limit.is_unsure_look(&look, 0) => look,
            _ => part.ask().await,
        };
        all = Some(all.map_or(look, |one| less_allowed(one, look)));
    }
    all
}

/// The same at once, where the store decides none.
pub(super) fn decide_at_once(parts: &[Part<'_>]) -> Option<Decision> {
    if parts.iter().any(|part| part.cost > 0) {
        return decide_all(parts).decision();
    }
    parts.iter().filter_map(Part::look).reduce(less_allowed)
}

fn less_allowed(one: Decision, other: Decision) -> Decision {
    match (one.allowed, other.allowed) {
        (true, true) => fewer_left(one, other),
        (false, false) => longer_wait(one, other),
        (true, false) => other,
        (false, true) => one,
    }
}

fn longer_wait(one: Decision, other: Decision) -> Decision {
    if other.retry_after() > one.retry_after() { other } else { one }
}

impl ActiveLimit {
    /// This limit with the key of a request, for [`Limiter::check_all`] and [`Limiter::check_each`].
    pub fn on<'a, K: Key + ?Sized>(&'a self, key: &'a K) -> OnKey<'a> {
        let (name, plain) = (self.shared.secret.name(key), self.plain_for_overrides(key));
        OnKey { limit: self, key: name, plain, cost: 1 }
    }
}

impl AsyncLimit {
    /// This limit with the key of a request, for [`Limiter::check_all`] and [`Limiter::check_each`].
    pub fn on<'a, K: Key + ?Sized>(&'a self, key: &'a K) -> OnKey<'a> {
        self.0.on(key)
    }
}
