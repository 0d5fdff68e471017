//! The limits of a service.

use std::fmt;
use std::sync::OnceLock;

use http::HeaderValue;
use smallvec::SmallVec;

use super::head::Head;
use super::header_style::{HeaderStyle, HeaderValues, LimitReport};
use super::keyed_limit::KeyedLimit;
use super::refusal::ErrorBody;
use super::unknown_client::{self, UnknownClients};
use crate::decision::Decision;
use crate::limit::LimitInfo;
use crate::limiter::{ActiveLimit, AsyncLimit};

type Skip = dyn Fn(&Head<'_>) -> bool + Send + Sync;

/// The limits of a service.
///
/// A request has to fit all of them: one that a limit denies is charged to none, and the response names the limit with the
/// longest wait. One that a limit refuses whatever it has left, because a key is missing or it costs too much, is not counted
/// by any. What the store or an outage policy decided goes back as in [`AsyncGroup`](crate::AsyncGroup).
pub struct RateLimit {
    pub(super) limits: Vec<KeyedLimit>,
    headers: HeaderStyle,
    error_body: ErrorBody,
    pub(super) skip: Option<Box<Skip>>,
    pub(super) waits: bool,
    /// `RateLimit-Policy` of the only limit, which does not change.
    policy: OnceLock<(&'static LimitInfo, HeaderValue)>,
    pub(super) unknown_clients: UnknownClients,
}

impl fmt::Debug for RateLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RateLimit")
            .field("limits", &self.limits)
            .field("headers", &self.headers)
            .field("waits", &self.waits)
            .finish_non_exhaustive()
    }
}

impl From<KeyedLimit> for RateLimit {
    fn from(limit: KeyedLimit) -> Self {
        Self::new(limit)
    }
}

impl RateLimit {
    /// One limit. Responses have the header fields of [`HeaderStyle::draft`].
    pub fn new(limit: KeyedLimit) -> Self {
        unknown_client::show_at_start(&limit.limit);
        Self {
            limits: vec![limit],
            headers: HeaderStyle::default(),
            error_body: ErrorBody::default(),
            skip: None,
            waits: true,
            policy: OnceLock::new(),
            unknown_clients: UnknownClients::default(),
        }
    }

    /// One limit with a bucket for each client address: see [`KeyedLimit::per_client`].
    pub fn per_client(limit: impl Into<AsyncLimit>) -> Self {
        Self::new(KeyedLimit::per_client(limit))
    }

    /// One limit with one bucket for all requests: see [`KeyedLimit::shared`].
    pub fn shared(limit: impl Into<AsyncLimit>) -> Self {
        Self::new(KeyedLimit::shared(limit))
    }

    /// Adds a limit, which requests have to fit too.
    #[must_use]
    pub fn and(mut self, limit: KeyedLimit) -> Self {
        unknown_client::show_at_start(&limit.limit);
        self.limits.push(limit);
        self
    }

    /// The header fields of responses to counted requests; [`HeaderStyle::draft`] is the default.
    #[must_use]
    pub fn headers(mut self, headers: HeaderStyle) -> Self {
        self.headers = headers;
        self
    }

    /// The body of responses to refused requests; [`ErrorBody::Problem`] is the default.
    #[must_use]
    pub fn error_body(mut self, error_body: ErrorBody) -> Self {
        self.error_body = error_body;
        self
    }

    /// Requests for which `skip` returns true are not counted by any limit.
    #[must_use]
    pub fn skip(mut self, skip: impl Fn(&Head<'_>) -> bool + Send + Sync + 'static) -> Self {
        self.skip = Some(Box::new(skip));
        self
    }

    /// Decides at once, as [`ActiveLimit::check`](crate::ActiveLimit::check) does; exact limits still ask the
    /// store. By default a request for which this node is not sure waits for the store, as in
    /// [`ActiveLimit::check_sure`](crate::ActiveLimit::check_sure); and one of a
    /// [`LeakyBucket`](crate::LeakyBucket) is held until its slot, as in
    /// [`ActiveLimit::until_ready`](crate::ActiveLimit::until_ready), within the queue: at most
    /// [`Limit::max_waiting`](crate::Limit::max_waiting) at a time, and others are denied at once. A client that
    /// disconnects leaves the queue.
    #[must_use]
    pub fn without_waiting(mut self) -> Self {
        self.waits = false;
        self
    }

    pub(super) fn body(&self) -> ErrorBody {
        self.error_body
    }
}

impl RateLimit {
    /// Whether responses have header fields.
    pub(super) fn has_headers(&self) -> bool {
        self.headers != HeaderStyle::none()
    }

    /// The header fields of a response, by what the limits said. Limits in shadow mode are left out, so that clients do not slow down
    /// for them.
    pub(super) fn header_values(&self, decisions: &[Decision]) -> HeaderValues {
        let limits = self.limits.iter().map(|limit| &limit.limit);
        let in_shadow: SmallVec<[&str; 1]> =
            limits.filter(|limit| limit.is_shadow()).map(ActiveLimit::name).collect();
        let enforced =
            decisions.iter().filter(|decision| !in_shadow.contains(&decision.limit_name()));
        let reports: SmallVec<[LimitReport<'_>; 1]> =
            enforced.copied().map(LimitReport::from).collect();
        let policy = match &*reports {
            [report] if self.limits.len() == 1 => Some(self.policy_of(report)),
            _ => None,
        };
        self.headers.values(&reports, policy)
    }

    /// `RateLimit-Policy` of the only limit.
    fn policy_of(&self, report: &LimitReport<'_>) -> HeaderValue {
        let written = || self.headers.policies(std::slice::from_ref(report));
        let info = report.decision.limit;
        let (kept_info, kept) = self.policy.get_or_init(|| (info, written()));
        if std::ptr::eq(*kept_info, info) { kept.clone() } else { written() }
    }
}
