//! What the limits of a request say of it.

use std::sync::Arc;
use std::time::Duration;

use smallvec::SmallVec;

use super::head::{Head, ResponseHead};
use super::header_style::HeaderValues;
use super::keyed_limit::{KeyedLimit, Question};
use super::rate_limit::RateLimit;
use super::refusal::Refusal;
use crate::decision::Decision;
use crate::error::CheckError;
use crate::key::{KeyName, WrittenKey};
use crate::limit::Mode;
use crate::limiter::settle::{Allowed, Spent};
use crate::limiter::together::part::{Part, Patience};
use crate::limiter::together::{Together, TogetherDenied, ask_all, decide_if_sure};
use crate::limiter::{ActiveLimit, Handle};
use crate::time::Timestamp;

/// Most requests have at most so many limits.
const USUAL: usize = 4;

/// What is known of a request.
#[derive(Default)]
pub(super) struct Evaluation {
    pub(super) refusal: Option<Refusal>,
    /// What the limits said, for the header fields.
    pub(super) decisions: SmallVec<[Decision; 1]>,
    /// What goes back unless the response says that it counts. Dropped, it stays charged.
    charges: Vec<Charge>,
}

/// What a request was charged by a limit whose `charge_if` decides about it.
struct Charge {
    /// The limit's place among the layer's limits.
    limit: usize,
    /// Its decision's place.
    place: usize,
    spent: Spent,
}

/// A question that the store or time has to answer. It borrows nothing, so that it can wait.
pub(super) enum Open {
    One(Box<AskedAlone>),
    Several(Box<Asked>),
}

/// What a limit is asked by itself.
pub(super) struct AskedAlone {
    handle: Handle,
    cost: u32,
    is_unreported: bool,
    pinned: Option<Pinned>,
}

/// The key of a request whose response decides about the charge, pinned before it is asked, so that what goes back goes where
/// it was taken; and when that was.
type Pinned = (Handle, Timestamp);

/// What limits are asked together.
type Asked = SmallVec<[AskedLimit; USUAL]>;

/// What one of them is asked.
pub(super) struct AskedLimit {
    /// Its place among the layer's limits.
    index: usize,
    /// The place of the request's plan among its plans.
    plan: Option<usize>,
    key: KeyName<'static>,
    /// What it was before it was hashed, if that matters.
    plain: Option<Arc<[u8]>>,
    cost: u32,
    is_unreported: bool,
    /// The key, pinned so that what goes back goes where it was taken.
    pinned: Option<Handle>,
}

impl Evaluation {
    /// Whether the response decides about a charge.
    pub(super) fn is_open(&self) -> bool {
        !self.charges.is_empty()
    }

    fn refused(refusal: Refusal) -> Self {
        Self { refusal: Some(refusal), ..Self::default() }
    }
}

impl RateLimit {
    /// Asks the limits, unless the request has to wait.
    pub(super) fn evaluate(&self, head: &Head<'_>) -> Result<Evaluation, Open> {
        if self.skip.as_ref().is_some_and(|skip| skip(head)) {
            return Ok(Evaluation::default());
        }
        if let [limit] = &*self.limits {
            return self.evaluate_one(limit, head);
        }
        let asked = match self.questions(head) {
            Ok(asked) => asked,
            Err(refusal) => return Ok(Evaluation::refused(refusal)),
        };
        let together = decide_if_sure(&self.parts(&asked));
        match together {
            Some(together) => Ok(self.evaluation(asked, together)),
            None => Err(Open::Several(Box::new(asked))),
        }
    }

    /// Waits for the answer.
    pub(super) async fn answer(&self, open: Open) -> Evaluation {
        match open {
            Open::One(asked) => {
                let AskedAlone { handle, cost, is_unreported, pinned } = *asked;
                let decision =
                    if self.waits { handle.wait(cost).await } else { handle.ask_store(cost).await };
                let decision = handle.after_rule(cost, decision);
                self.evaluation_of_one(decision, is_unreported, pinned)
            }
            Open::Several(asked) => {
                let together = ask_all(&self.parts(&asked)).await;
                self.evaluation(*asked, together)
            }
        }
    }

    fn evaluate_one(&self, limit: &KeyedLimit, head: &Head<'_>) -> Result<Evaluation, Open> {
        let (key, cost, is_unreported, plan) = match self.question(limit, head) {
            Question::Uncounted => return Ok(Evaluation::default()),
            Question::Ask { key, cost, is_unreported, plan } => (key, cost, is_unreported, plan),
            Question::Refuse(refusal) => return Ok(Evaluation::refused(refusal)),
        };
        let active = limit.under(plan);
        let pinned = limit.may_return().then(|| (active.handle(&key), active.now()));
        match self.check(active, &key, cost) {
            Ok(Ok(decision)) => Ok(self.evaluation_of_one(decision, is_unreported, pinned)),
            Ok(Err(handle)) => {
                let asked = AskedAlone { handle, cost, is_unreported, pinned };
                Err(Open::One(Box::new(asked)))
            }
            Err(CheckError::CostTooHigh { limit, .. }) => {
                Ok(Evaluation::refused(Refusal::CostTooHigh { limit }))
            }
            // One limit is asked.
            Err(CheckError::NoLimit) => Ok(Evaluation::default()),
        }
    }

    fn check(
        &self,
        limit: &ActiveLimit,
        key: &WrittenKey,
        cost: u32,
    ) -> Result<Result<Decision, Handle>, CheckError> {
        if self.waits || limit.mode() == Mode::Exact {
            limit.check_or_wait(key, cost)
        } else {
            limit.check_n(key, cost).map(Ok)
        }
    }

    /// What the only limit said.
    fn evaluation_of_one(
        &self,
        decision: Decision,
        is_unreported: bool,
        pinned: Option<Pinned>,
    ) -> Evaluation {
        let mut evaluation = Evaluation::default();
        let Some(limit) = self.limits.first() else { return evaluation };
        if decision.is_denied() {
            if is_unreported {
                self.unknown_clients.unreported(&limit.limit);
            }
            evaluation.refusal = Some(limit.denial(&decision, decision.retry_after()));
        } else if let Some((handle, asked)) = pinned {
            let allowed = Allowed { decision, asked };
            let spent = Spent { handle, allowed, tokens: decision.cost() };
            evaluation.charges.push(Charge { limit: 0, place: 0, spent });
        }
        if self.has_headers() {
            evaluation.decisions.push(decision);
        }
        evaluation
    }

    /// What to ask a limit about a request.
    fn question(&self, limit: &KeyedLimit, head: &Head<'_>) -> Question {
        let question = limit.question(head);
        if let Question::Refuse(Refusal::UnknownClient { .. }) = question {
            self.unknown_clients.unknown_peer(&limit.limit);
        }
        question
    }

    /// What to ask the limits that count the request. Nothing is asked if one refuses it whatever it has left.
    fn questions(&self, head: &Head<'_>) -> Result<Asked, Refusal> {
        let mut all = Asked::new();
        for (index, limit) in self.limits.iter().enumerate() {
            match self.question(limit, head) {
                Question::Uncounted => {}
                Question::Refuse(refusal) => return Err(refusal),
                Question::Ask { key, cost, is_unreported, plan } => {
                    if limit.under(plan).validate_cost_of(&key, cost).is_err() {
                        return Err(Refusal::CostTooHigh { limit: limit.limit.name() });
                    }
                    let pinned = limit.may_return().then(|| limit.under(plan).handle(&key));
                    let plain = limit.limit.plain_for_overrides(&key);
                    let key = limit.limit.shared.secret.name(&key).into_owned();
                    all.push(AskedLimit { index, plan, key, plain, cost, is_unreported, pinned });
                }
            }
        }
        Ok(all)
    }

    fn parts<'a>(&'a self, asked: &'a [AskedLimit]) -> SmallVec<[Part<'a>; USUAL]> {
        let patience = if self.waits { Patience::Slot } else { Patience::None };
        let part = |asked: &'a AskedLimit| {
            let limit = self.limits.get(asked.index)?.under(asked.plan);
            let AskedLimit { key, plain, cost, .. } = asked;
            Some(Part { limit, key, plain: plain.as_deref(), cost: *cost, patience })
        };
        asked.iter().filter_map(part).collect()
    }

    /// What the limits said together.
    fn evaluation(&self, asked: Asked, together: Together) -> Evaluation {
        let mut evaluation = Evaluation::default();
        let TogetherDenied { by, decision, looks } = match together {
            Together::Denied(denied) => denied,
            Together::Allowed(all) => {
                for (asked, (place, allowed)) in asked.into_iter().zip(all) {
                    let AskedLimit { index: limit, cost: tokens, pinned, .. } = asked;
                    if let Some(handle) = pinned {
                        let spent = Spent { handle, allowed, tokens };
                        evaluation.charges.push(Charge { limit, place, spent });
                    }
                    if self.has_headers() {
                        evaluation.decisions.push(allowed.decision);
                    }
                }
                return evaluation;
            }
        };
        // Nobody waits for a limit in shadow mode.
        let waits = asked.iter().zip(&looks).filter_map(|(asked, look)| {
            let limit = self.limits.get(asked.index)?;
            let look = look.as_ref().filter(|_| !limit.limit.is_shadow())?;
            Some(look.left_after(look.cost()))
        });
        let wait = waits.fold(decision.retry_after(), Duration::max);
        let denies = asked.get(by);
        if let Some((limit, denies)) =
            denies.and_then(|denies| Some((self.limits.get(denies.index)?, denies)))
        {
            if denies.is_unreported {
                self.unknown_clients.unreported(&limit.limit);
            }
            evaluation.refusal = Some(limit.denial(&decision, wait));
        }
        if self.has_headers() {
            evaluation.decisions.extend(looks.into_iter().flatten());
        }
        evaluation
    }

    /// Gives back what the response says does not count. Returns the response's header fields.
    pub(super) fn settle(
        &self,
        mut evaluation: Evaluation,
        response: &ResponseHead<'_>,
    ) -> HeaderValues {
        for Charge { limit, place, spent } in evaluation.charges {
            if self.limits.get(limit).is_none_or(|limit| limit.charges(response)) {
                continue;
            }
            let look = spent.give_back();
            if let (Some(look), Some(decision)) = (look, evaluation.decisions.get_mut(place)) {
                *decision = look;
            }
        }
        self.header_values(&evaluation.decisions)
    }
}
