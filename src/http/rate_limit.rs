//! The limits of a service, and their evaluation for a request.

use std::fmt;
use std::sync::OnceLock;
use std::time::Duration;

use http::HeaderValue;
use smallvec::SmallVec;

use super::head::Head;
use super::header_style::{HeaderStyle, HeaderValues, LimitReport};
use super::keyed_limit::{KeyedLimit, Question};
use super::refusal::{ErrorBody, Refusal};
use super::unknown_client::{self, UnknownClients};
use crate::decision::Decision;
use crate::error::CheckError;
use crate::key::WrittenKey;
use crate::limit::{LimitInfo, Mode};
use crate::limiter::{AsyncLimit, Handle};

type Skip = dyn Fn(&Head<'_>) -> bool + Send + Sync;

/// The limits of a service, in the order in which they are asked.
///
/// A request that one limit denies is not charged to the limits after it. What it was charged to the limits before
/// it stays spent.
pub struct RateLimit {
    limits: Vec<KeyedLimit>,
    headers: HeaderStyle,
    error_body: ErrorBody,
    skip: Option<Box<Skip>>,
    waits: bool,
    /// `RateLimit-Policy` of the only limit, which does not change.
    policy: OnceLock<(&'static LimitInfo, HeaderValue)>,
    unknown_clients: UnknownClients,
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

    /// Adds a limit, which is asked after the others.
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

/// How far a request has come through the limits. It borrows nothing, so that it can wait.
#[derive(Debug)]
pub(super) struct Evaluation {
    /// The next limit to ask.
    next: usize,
    /// What the limits said, for the header fields.
    decisions: SmallVec<[Decision; 1]>,
    pub(super) refusal: Option<Refusal>,
    /// After this time no limit that was asked denies the same request again.
    wait: Duration,
}

/// A question that the store or time has to answer.
pub(super) struct Open {
    handle: Handle,
    cost: u32,
    is_unreported: bool,
}

impl RateLimit {
    /// Begins with the first limit; with none if the request is skipped.
    pub(super) fn begin(&self, head: &Head<'_>) -> Evaluation {
        let skipped = self.skip.as_ref().is_some_and(|skip| skip(head));
        let next = if skipped { self.limits.len() } else { 0 };
        Evaluation { next, decisions: SmallVec::new(), refusal: None, wait: Duration::ZERO }
    }

    /// Asks the limits in their order, until one refuses or has to wait.
    pub(super) fn advance(&self, evaluation: &mut Evaluation, head: &Head<'_>) -> Option<Open> {
        while evaluation.refusal.is_none() {
            let limit = self.limits.get(evaluation.next)?;
            evaluation.next += 1;
            let (key, cost, is_unreported) = match limit.question(head) {
                Question::Uncounted => continue,
                Question::Ask { key, cost, is_unreported } => (key, cost, is_unreported),
                Question::Refuse(refusal) => {
                    if let Refusal::UnknownClient { .. } = refusal {
                        self.unknown_clients.unknown_peer(&limit.limit);
                    }
                    evaluation.refusal = Some(refusal);
                    continue;
                }
            };
            match self.check(limit, &key, cost) {
                Ok(Ok(decision)) => {
                    self.record(evaluation, limit, decision, is_unreported, head);
                }
                Ok(Err(handle)) => return Some(Open { handle, cost, is_unreported }),
                Err(CheckError::CostTooHigh { limit, .. }) => {
                    evaluation.refusal = Some(Refusal::CostTooHigh { limit });
                }
                // One limit is asked.
                Err(CheckError::NoLimit) => {}
            }
        }
        None
    }

    /// Waits, and then asks the limits that are left.
    pub(super) async fn finish(
        &self,
        evaluation: &mut Evaluation,
        question: Open,
        head: &Head<'_>,
    ) {
        let mut open = Some(question);
        while let Some(Open { handle, cost, is_unreported }) = open {
            let decision =
                if self.waits { handle.wait(cost).await } else { handle.ask_store(cost).await };
            if let Some(limit) = self.limits.get(evaluation.next - 1) {
                self.record(evaluation, limit, decision, is_unreported, head);
            }
            open = self.advance(evaluation, head);
        }
    }

    fn check(
        &self,
        limit: &KeyedLimit,
        key: &WrittenKey,
        cost: u32,
    ) -> Result<Result<Decision, Handle>, CheckError> {
        if self.waits || limit.limit.mode() == Mode::Exact {
            limit.limit.check_or_wait(key, cost)
        } else {
            limit.limit.check_n(key, cost).map(Ok)
        }
    }

    fn record(
        &self,
        evaluation: &mut Evaluation,
        limit: &KeyedLimit,
        decision: Decision,
        is_unreported: bool,
        head: &Head<'_>,
    ) {
        let later = self.limits.get(evaluation.next..).unwrap_or_default();
        if decision.is_denied() {
            if is_unreported {
                self.unknown_clients.unreported(&limit.limit);
            }
            let later = later.iter().filter_map(|limit| limit.wait(head)).max();
            let wait = decision.retry_after().max(evaluation.wait).max(later.unwrap_or_default());
            evaluation.refusal = Some(limit.denial(&decision, wait));
        } else if !later.is_empty() {
            evaluation.wait = evaluation.wait.max(decision.left_after(decision.cost()));
        }
        if self.headers != HeaderStyle::none() {
            evaluation.decisions.push(decision);
        }
    }

    /// The header fields of the response.
    pub(super) fn header_values(&self, evaluation: &Evaluation) -> HeaderValues {
        let reports: SmallVec<[LimitReport<'_>; 1]> =
            evaluation.decisions.iter().copied().map(LimitReport::from).collect();
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
