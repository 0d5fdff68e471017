//! One limit of a service: which requests it counts, by which key, and at what cost.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use http::StatusCode;
use tracing::warn;

use super::client_ip::ClientIp;
use super::head::{Head, ResponseHead};
use super::key_of::{KeyOf, Presence};
use super::refusal::Refusal;
use super::retry_after::RetryAfter;
use crate::algorithm::Rule;
use crate::decision::Decision;
use crate::key::WrittenKey;
use crate::limiter::{ActiveLimit, AsyncLimit};

type Cost = dyn Fn(&Head<'_>) -> u32 + Send + Sync;
type PlanOf = dyn for<'a> Fn(&'a Head<'_>) -> Option<&'a str> + Send + Sync;
type ChargeIf = dyn Fn(&ResponseHead<'_>) -> bool + Send + Sync;

/// What happens to a request that has no key.
///
/// A request whose client's address is unknown, because the server did not say where the connection comes from, is
/// answered with status 500 unless this is [`Shared`](Self::Shared).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnMissingKey {
    /// It is answered with this status, which should be a client error. Status 400 is the default.
    Refused(StatusCode),
    /// All requests without a key share one bucket: that of the empty key.
    Shared,
    /// This limit does not count it. A request with several values of a header field is refused with status 400,
    /// so that no client can choose to be unlimited.
    Unlimited,
}

impl Default for OnMissingKey {
    fn default() -> Self {
        Self::Refused(StatusCode::BAD_REQUEST)
    }
}

/// One limit of a service, and the key and cost of a request.
#[derive(Clone)]
pub struct KeyedLimit {
    pub(super) limit: ActiveLimit,
    key: KeyOf,
    on_missing_key: OnMissingKey,
    cost: Option<Arc<Cost>>,
    charge_if: Option<Arc<ChargeIf>>,
    plans: Option<Arc<Plans>>,
    retry_after: Arc<RetryAfter>,
    protects_service: bool,
}

/// The plans of a limit, and which of them a request is under.
struct Plans {
    of: Box<PlanOf>,
    all: Vec<ActiveLimit>,
    /// The log has said that a plan is not known.
    is_told: AtomicBool,
}

/// What a limit is asked about a request.
pub(super) enum Question {
    /// The limit does not count the request.
    Uncounted,
    /// Whether the key has as many tokens as the cost. `is_unreported`: the key is an address that is
    /// trusted as a proxy's, and no client beyond it is known.
    /// `plan` is the place of the request's plan among the limit's, if it is under one.
    Ask { key: WrittenKey, cost: u32, is_unreported: bool, plan: Option<usize> },
    /// The request is refused without asking.
    Refuse(Refusal),
}

impl KeyedLimit {
    /// Each request costs a token of its key's bucket. Requests without a key are refused: see [`OnMissingKey`].
    pub fn new(limit: impl Into<AsyncLimit>, key: KeyOf) -> Self {
        Self {
            limit: limit.into().0,
            key,
            on_missing_key: OnMissingKey::default(),
            cost: None,
            charge_if: None,
            plans: None,
            retry_after: Arc::default(),
            protects_service: false,
        }
    }

    /// Each client address has a bucket. No proxy is trusted: see [`ClientIp`] for services behind one.
    pub fn per_client(limit: impl Into<AsyncLimit>) -> Self {
        Self::new(limit, KeyOf::client(ClientIp::peer()))
    }

    /// All requests share one bucket: that of the empty key.
    pub fn shared(limit: impl Into<AsyncLimit>) -> Self {
        Self::new(limit, KeyOf::shared())
    }

    /// What happens to requests that have no key.
    #[must_use]
    pub fn on_missing_key(mut self, on_missing_key: OnMissingKey) -> Self {
        self.on_missing_key = on_missing_key;
        self
    }

    /// The cost of a request, in tokens. A request that costs 0 is not counted. One that can never be
    /// admitted ([`CheckError`](crate::CheckError)) is refused with status 400, unless the limit is off or in shadow mode,
    /// or an override decides.
    #[must_use]
    pub fn cost(mut self, cost: impl Fn(&Head<'_>) -> u32 + Send + Sync + 'static) -> Self {
        self.cost = Some(Arc::new(cost));
        self
    }

    /// The name of the [plan](crate::Limit::plan) that a request is under; `None` is the limit's own quota.
    ///
    /// It has to come from somebody whom you trust: a header field that your gateway sets, say, and takes off the requests of
    /// clients. If the limit has no plan of that name, its own quota holds, and the log says so once.
    ///
    /// Cost: compares the name with those of the limit's plans.
    ///
    /// ```
    /// use tidegate::http::KeyedLimit;
    /// use tidegate::{Limit, Limiter, Quota};
    ///
    /// let limit = Limit::new("api", Quota::per_minute(60)).plan("pro", Quota::per_second(50));
    /// let limiter = Limiter::builder().limit(limit).build()?;
    /// let api = KeyedLimit::per_client(limiter.limit("api")?)
    ///     .plan(|head| head.headers.get("x-plan")?.to_str().ok());
    /// # Ok::<(), tidegate::ConfigError>(())
    /// ```
    #[must_use]
    pub fn plan(
        mut self,
        plan: impl for<'a> Fn(&'a Head<'_>) -> Option<&'a str> + Send + Sync + 'static,
    ) -> Self {
        let (of, all, is_told) = (Box::new(plan), self.limit.all_plans(), AtomicBool::new(false));
        self.plans = Some(Arc::new(Plans { of, all, is_told }));
        self
    }

    /// The limit under one of its plans, or by its own quota.
    pub(super) fn under(&self, plan: Option<usize>) -> &ActiveLimit {
        let planned = self.plans.as_ref().zip(plan);
        planned.and_then(|(plans, place)| plans.all.get(place)).unwrap_or(&self.limit)
    }

    /// The place of the request's plan.
    fn plan_of(&self, head: &Head<'_>) -> Option<usize> {
        let Plans { of, all, is_told } = &**self.plans.as_ref()?;
        let plan = of(head)?;
        let place = all.iter().position(|limit| limit.plan_name() == Some(plan));
        if place.is_none() && !is_told.swap(true, Ordering::Relaxed) {
            let limit = self.limit.name();
            warn!(
                limit,
                plan, "a request names a plan that the limit does not have: its own quota holds"
            );
        }
        place
    }

    /// Charges a request only if `charge_if` returns true for its response: only failed logins, say.
    ///
    /// The request is decided and charged before the service is called, so that no more requests are under way than the key
    /// has tokens. What it was charged goes back when the service has answered and `charge_if` returns false. Without a
    /// response it stays charged: when the service returns an error or panics, or the client disconnects before. The
    /// response's header fields say how the key stands after that, but those of an exact limit what it said before.
    ///
    /// Tokens go back as those of a [`Reservation`](crate::Reservation) do, with its cost: those of a window that has ended do
    /// not, for example. The slots of a [`LeakyBucket`](crate::LeakyBucket) pass whether they are charged or not: of one
    /// this changes nothing, and the log has a warning.
    ///
    /// A call of gRPC that failed has its status in the header field `grpc-status` of the response, if it failed before the
    /// first message.
    ///
    /// Cost: two short locks of the limit's table, four allocations, and what goes back.
    ///
    /// ```
    /// use http::StatusCode;
    /// use tidegate::Quota;
    /// use tidegate::http::KeyedLimit;
    ///
    /// let failed_logins = KeyedLimit::per_client(tidegate::local(Quota::per_hour(10))?)
    ///     .charge_if(|response| response.status == StatusCode::UNAUTHORIZED);
    /// # Ok::<(), tidegate::ConfigError>(())
    /// ```
    #[must_use]
    pub fn charge_if(
        mut self,
        charge_if: impl Fn(&ResponseHead<'_>) -> bool + Send + Sync + 'static,
    ) -> Self {
        if let Rule::LeakyBucket(_) = self.limit.rule() {
            let limit = self.limit.name();
            warn!(limit, "the slots of a leaky bucket pass whether they are charged or not");
            return self;
        }
        self.charge_if = Some(Arc::new(charge_if));
        self
    }

    /// Whether the response decides about the charge.
    pub(super) fn may_return(&self) -> bool {
        self.charge_if.is_some()
    }

    /// Whether a request with this response is charged.
    pub(super) fn charges(&self, response: &ResponseHead<'_>) -> bool {
        self.charge_if.as_ref().is_none_or(|charge_if| charge_if(response))
    }

    /// When denied clients may return. By default that is when their request has a chance, and those of a fixed window
    /// are spread ([`RetryAfter::default`]); choose [`RetryAfter::spread`] for a bucket that many clients share, so that
    /// they do not return in the same second.
    #[must_use]
    pub fn retry_after(mut self, retry_after: RetryAfter) -> Self {
        self.retry_after = Arc::new(retry_after);
        self
    }

    /// This limit protects the service, whoever its clients are: denials have status 503 and the problem type
    /// `temporary-reduced-capacity`, and in gRPC the status `UNAVAILABLE`.
    #[must_use]
    pub fn protects_service(mut self) -> Self {
        self.protects_service = true;
        self
    }

    /// What to ask the limit about a request.
    pub(super) fn question(&self, head: &Head<'_>) -> Question {
        let (key, presence) = self.limit.shared.secret.write_key(|key| self.key.write(head, key));
        let limit = self.limit.name();
        let refused = |status| Question::Refuse(Refusal::MissingKey { limit, status });
        let key = match (presence, self.on_missing_key) {
            (Presence::Present | Presence::Unreported, _) => key,
            (_, OnMissingKey::Shared) => WrittenKey::default(),
            (Presence::UnknownPeer, _) => {
                return Question::Refuse(Refusal::UnknownClient { limit });
            }
            (_, OnMissingKey::Refused(status)) => return refused(status),
            (Presence::Missing, OnMissingKey::Unlimited) => return Question::Uncounted,
            (Presence::Ambiguous, OnMissingKey::Unlimited) => {
                return refused(StatusCode::BAD_REQUEST);
            }
        };
        match self.cost.as_ref().map_or(1, |cost| cost(head)) {
            0 => Question::Uncounted,
            cost => {
                let is_unreported = presence == Presence::Unreported;
                Question::Ask { key, cost, is_unreported, plan: self.plan_of(head) }
            }
        }
    }

    /// The refusal of a request that this limit denied, and that has a chance after `wait`.
    pub(super) fn denial(&self, decision: &Decision, wait: Duration) -> Refusal {
        let limit = self.limit.name();
        let retry_after = self.retry_after.after(wait, decision);
        if self.protects_service {
            Refusal::ReducedCapacity { limit, retry_after }
        } else {
            Refusal::Denied { limit, retry_after }
        }
    }
}

impl fmt::Debug for KeyedLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeyedLimit")
            .field("limit", &self.limit.name())
            .field("key", &self.key)
            .field("on_missing_key", &self.on_missing_key)
            .finish_non_exhaustive()
    }
}
