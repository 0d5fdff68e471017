//! A service's limits, and what they say of a request.

use std::fmt;
use std::sync::OnceLock;
use std::time::Duration;

use http::{HeaderMap, HeaderValue, Response, StatusCode, header};

use super::fields::{Fields, Said, Worded, list_of_policies};
use super::retry_after::RetryAfter;
use super::rule::{Head, KeyText, NO_KEY, Question, Rule};
use crate::decision::Decision;
use crate::error::CheckError;
use crate::quota::Scale;

type Skip = dyn Fn(&Head<'_>) -> bool + Send + Sync;

/// The limits of a service, in the order in which they are asked.
///
/// A request that one of them denies is not charged to those after it; what it was charged to those
/// before it is spent.
pub struct Door {
    rules: Vec<Rule>,
    fields: Fields,
    retry: RetryAfter,
    skip: Option<Box<Skip>>,
    waits: bool,
    policy: OnceLock<(Scale, HeaderValue)>,
}

impl fmt::Debug for Door {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut door = f.debug_struct("Door");
        door.field("rules", &self.rules).field("fields", &self.fields);
        door.field("waits", &self.waits).finish_non_exhaustive()
    }
}

/// Why a request is not passed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Refusal<'a> {
    /// This limit denied it; there may be tokens after so many seconds.
    Denied {
        /// The limit's name.
        policy: &'a str,
        /// What `Retry-After` says.
        retry_after_s: u64,
    },
    /// It has no key, and the rule of this limit says so.
    NoKey {
        /// The limit's name.
        policy: &'a str,
        /// The status that the rule says.
        status: StatusCode,
    },
    /// It costs more tokens than this limit can ever have.
    TooCostly {
        /// The limit's name.
        policy: &'a str,
    },
}

impl Refusal<'_> {
    /// The status of the response.
    pub fn status(&self) -> StatusCode {
        match self {
            Self::Denied { .. } => StatusCode::TOO_MANY_REQUESTS,
            Self::NoKey { status, .. } => *status,
            Self::TooCostly { .. } => StatusCode::BAD_REQUEST,
        }
    }

    /// The name of the limit.
    pub fn policy(&self) -> &str {
        match self {
            Self::Denied { policy, .. }
            | Self::NoKey { policy, .. }
            | Self::TooCostly { policy } => policy,
        }
    }

    /// A response with status, `Retry-After` and a body that says so as `application/problem+json`
    /// (RFC 9457): for a denial by the problem type of the rate limit draft.
    pub fn response<B: From<String>>(&self) -> Response<B> {
        let status = self.status();
        let phrase = status.canonical_reason().unwrap_or_default();
        let (kind, title) = match self {
            Self::Denied { .. } => (QUOTA_EXCEEDED, "The quota is used up"),
            Self::NoKey { .. } | Self::TooCostly { .. } => ("about:blank", phrase),
        };
        let detail = self.detail();
        // Names of limits have no character that would have to be escaped.
        let body = format!(
            "{{\"type\":\"{kind}\",\"title\":\"{title}\",\"status\":{},\"detail\":\"{detail}\",\"violated-policies\":[\"{}\"]}}",
            status.as_u16(),
            self.policy(),
        );
        let mut response = Response::new(B::from(body));
        *response.status_mut() = status;
        let problem = HeaderValue::from_static("application/problem+json");
        response.headers_mut().insert(header::CONTENT_TYPE, problem);
        self.tell(response.headers_mut());
        response
    }

    /// What is wrong, in a sentence.
    pub(super) fn detail(&self) -> &'static str {
        match self {
            Self::Denied { .. } => "Try again later",
            Self::NoKey { .. } => "The request does not say who is asking",
            Self::TooCostly { .. } => "The request costs more than can be asked for at once",
        }
    }

    /// Writes `Retry-After`, if there is something to wait for and nothing is said of it.
    pub(super) fn tell(&self, headers: &mut HeaderMap) {
        if let Self::Denied { retry_after_s, .. } = *self {
            // A map that is full of others' fields stays as it is.
            if let Ok(entry) = headers.try_entry(header::RETRY_AFTER) {
                let _ = entry.or_try_insert(retry_after_s.into());
            }
        }
    }
}

/// What the draft calls it when a client has used up its quota.
const QUOTA_EXCEEDED: &str = "https://iana.org/assignments/http-problem-types#quota-exceeded";

/// A request's way through the limits.
struct Passage<'a> {
    door: &'a Door,
    rules: std::slice::Iter<'a, Rule>,
    answers: Answers<'a>,
    refusal: Option<Refusal<'a>>,
    /// By then no limit that was asked would deny the same again.
    next: Duration,
}

/// What limits said, if it is to be told. Mostly there is one, which needs no room of its own.
#[derive(Default)]
struct Answers<'a> {
    first: Option<Said<'a>>,
    more: Vec<Said<'a>>,
}

impl<'a> Passage<'a> {
    /// Nothing was asked yet.
    fn new(door: &'a Door, head: &Head<'_>) -> Self {
        let skipped = door.skip.as_ref().is_some_and(|skip| skip(head));
        let rules: &[Rule] = if skipped { &[] } else { &door.rules };
        let (answers, next) = (Answers::default(), Duration::ZERO);
        Self { door, rules: rules.iter(), answers, refusal: None, next }
    }

    /// The next limit that is to be asked, and about which cost; `key` is about which key. None after a
    /// refusal.
    fn next_question(&mut self, head: &Head<'_>, key: &mut KeyText) -> Option<(&'a Rule, u32)> {
        while self.refusal.is_none() {
            let rule = self.rules.next()?;
            match rule.question(head, key) {
                Question::None => (),
                Question::Asked(cost) => return Some((rule, cost)),
                Question::Refused(status) => {
                    self.refusal = Some(Refusal::NoKey { policy: rule.limit.name(), status });
                }
            }
        }
        None
    }

    /// Takes in what a limit said.
    fn hear(&mut self, rule: &'a Rule, answer: &Result<Decision, CheckError>, head: &Head<'_>) {
        let policy = rule.limit.name();
        let &Ok(decision) = answer else {
            // Key and cost were looked at, but for this.
            self.refusal = Some(Refusal::TooCostly { policy });
            return;
        };
        if decision.is_denied() {
            let later = self.rules.clone().filter_map(|rule| rule.wait(head)).max();
            let wait = decision.retry_after().max(self.next).max(later.unwrap_or_default());
            let retry_after_s = self.door.retry.spread_from(wait, &decision);
            self.refusal = Some(Refusal::Denied { policy, retry_after_s });
        } else if !self.rules.as_slice().is_empty() {
            self.next = self.next.max(decision.left_after(decision.cost()));
        }
        if self.door.fields != Fields::none() {
            let said = Said { policy, decision };
            match self.answers.first {
                None => self.answers.first = Some(said),
                Some(_) => self.answers.more.push(said),
            }
        }
    }

    /// Words what limits said; returns why the request is refused, if it is.
    fn end(self, told: &mut Worded) -> Option<Refusal<'a>> {
        let Self { door, answers: Answers { first, more }, refusal, .. } = self;
        match &first {
            Some(said) if more.is_empty() => {
                door.fields.word(std::iter::once(said), |_| door.policy_of(said), told);
            }
            _ => door.fields.word(first.iter().chain(&more), list_of_policies, told),
        }
        refusal
    }
}

impl Door {
    /// One limit, and no header fields but `Retry-After`.
    pub fn new(rule: Rule) -> Self {
        let (fields, retry) = (Fields::none(), RetryAfter::new());
        Self { rules: vec![rule], fields, retry, skip: None, waits: false, policy: OnceLock::new() }
    }

    /// One limit more, which is asked after the others.
    #[must_use]
    pub fn and(mut self, rule: Rule) -> Self {
        self.rules.push(rule);
        self
    }

    /// The header fields of responses to requests that limits were asked about.
    #[must_use]
    pub fn fields(mut self, fields: Fields) -> Self {
        self.fields = fields;
        self
    }

    /// When denied clients are told to return.
    #[must_use]
    pub fn retry_after(mut self, retry: RetryAfter) -> Self {
        self.retry = retry;
        self
    }

    /// Requests that no limit is asked about.
    #[must_use]
    pub fn skip(mut self, skip: impl Fn(&Head<'_>) -> bool + Send + Sync + 'static) -> Self {
        self.skip = Some(Box::new(skip));
        self
    }

    /// Asks the store where a limit is unsure, as [`ActiveLimit::check_sure`](crate::ActiveLimit::check_sure)
    /// does, and waits for it: for [`Limit::max_wait`](crate::Limit::max_wait) at most.
    #[must_use]
    pub fn waiting(mut self) -> Self {
        self.waits = true;
        self
    }

    /// `RateLimit-Policy` of one limit: of the door's only one it is written once, and anew only where its
    /// quota has become another.
    fn policy_of(&self, said: &Said<'_>) -> HeaderValue {
        let written = || list_of_policies(std::iter::once(said));
        if self.rules.len() > 1 {
            return written();
        }
        let scale = said.decision.limit.scale;
        let (kept_scale, kept) = self.policy.get_or_init(|| (scale, written()));
        if *kept_scale == scale { kept.clone() } else { written() }
    }

    pub(super) fn is_waiting(&self) -> bool {
        self.waits
    }

    /// Asks the limits without waiting; returns why the request is refused, if it is. What they said is worded
    /// into `told`.
    pub(super) fn ask(&self, head: &Head<'_>, told: &mut Worded) -> Option<Refusal<'_>> {
        let (mut passage, mut key) = (Passage::new(self, head), KeyText::new());
        while let Some((rule, cost)) = passage.next_question(head, &mut key) {
            let answer = rule.limit.check_n(key.get().unwrap_or(NO_KEY), cost);
            passage.hear(rule, &answer, head);
        }
        passage.end(told)
    }

    /// The same, but limits that are unsure ask the store.
    pub(super) async fn ask_store(
        &self,
        head: &Head<'_>,
        told: &mut Worded,
    ) -> Option<Refusal<'_>> {
        let (mut passage, mut key) = (Passage::new(self, head), KeyText::new());
        while let Some((rule, cost)) = passage.next_question(head, &mut key) {
            let answer = rule.limit.check_sure_n(key.get().unwrap_or(NO_KEY), cost).await;
            passage.hear(rule, &answer, head);
        }
        passage.end(told)
    }
}
