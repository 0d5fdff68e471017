//! A descriptor that has a limit, and how it stands.

use std::borrow::Cow;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::messages::{Code, CurrentLimit, Descriptor as Asked, OwnLimit, Shadow, Status, Unit};
use crate::config::ChargeRule;
use crate::decision::Decision;
use crate::key::{Key, KeyWriter};
use crate::limiter::AsyncLimit;
use crate::limiter::together::part::{Part, Patience};

/// The limit of a descriptor: of the file, or one that the request has brought.
pub(super) enum LimitOf<'a> {
    File(&'a AsyncLimit),
    Request(Arc<AsyncLimit>),
}

impl Deref for LimitOf<'_> {
    type Target = AsyncLimit;

    fn deref(&self) -> &AsyncLimit {
        match self {
            Self::File(limit) => limit,
            Self::Request(limit) => limit,
        }
    }
}

/// The values of a key: as a tuple of them.
pub(super) struct Values<'s, 'a> {
    pub(super) values: &'s [&'a str],
    /// A limit of the request's own. The key begins with it, so that each such limit counts for itself.
    pub(super) own: Option<OwnLimit>,
}

impl<'a> Values<'_, 'a> {
    /// The one that is the key as it is.
    fn only(&self) -> Option<&'a str> {
        match (self.values, self.own) {
            ([value], None) => Some(value),
            _ => None,
        }
    }
}

impl Key for Values<'_, '_> {
    fn held_bytes(&self) -> Option<&[u8]> {
        self.only().and_then(Key::held_bytes)
    }

    fn write(&self, writer: &mut KeyWriter<'_>) {
        if let Some(held) = self.held_bytes() {
            return writer.push(held);
        }
        if let Some(own) = self.own {
            let OwnLimit { requests_per_unit, unit } = own;
            requests_per_unit.write(writer);
            writer.push(b"/");
            unit.map_or(0, |unit| unit.period().as_secs()).write(writer);
        }
        for (index, value) in self.values.iter().enumerate() {
            if index > 0 || self.own.is_some() {
                writer.push(b":");
            }
            writer.push_part_of(|part| value.write(part));
        }
    }
}

/// A descriptor that has a limit.
pub(super) struct Limited<'a> {
    /// Which of the descriptors of the request it is.
    pub(super) index: usize,
    pub(super) limit: LimitOf<'a>,
    /// What the limiter knows its values by.
    pub(super) key: Cow<'a, [u8]>,
    /// The key before it is hashed, if overrides look for that.
    pub(super) plain: Option<Arc<[u8]>>,
    /// 0 looks, and charges nothing.
    pub(super) hits: u32,
    /// They go back.
    pub(super) is_negative: bool,
    pub(super) charge_rule: ChargeRule,
}

impl<'a> Limited<'a> {
    /// Inlined, so that it is built in its place in the list: a processor stalls when it copies what it has just written. The other
    /// values that are built for each descriptor are inlined for the same reason.
    #[inline(always)]
    pub(super) fn new(
        limit: LimitOf<'a>,
        values: &Values<'_, 'a>,
        charge_rule: ChargeRule,
        (index, asked): (usize, &Asked<'_>),
    ) -> Self {
        let secret = &limit.0.shared.secret;
        let held = values.only().and_then(|value| secret.held_name(value));
        Self {
            index,
            key: match held {
                Some(held) => Cow::Borrowed(held),
                None => Cow::Owned(secret.name(values).to_vec()),
            },
            plain: limit.0.plain_for_overrides(values),
            limit,
            hits: asked.hits,
            is_negative: asked.is_negative_hits,
            charge_rule,
        }
    }

    /// What the limit is asked for.
    pub(super) fn part(&self, cost: u32, patience: Patience) -> Part<'_> {
        let plain = self.plain.as_deref();
        Part { limit: &self.limit.0, key: &self.key, plain, cost, patience }
    }

    /// How a descriptor stands that charges nothing. A look is over the limit if the key is blocked, or if costs are owed and it
    /// has no token.
    pub(super) async fn status(&self, deadline: Option<Instant>) -> Status {
        let is_owed = self.charge_rule == ChargeRule::InFull;
        // Where nothing is owed, a look only tells: it takes none of the time that the charges have.
        let decision = if is_owed {
            self.part(0, patience(deadline)).look_by_store().await
        } else {
            self.part(0, Patience::None).ask().await
        };
        let is_over =
            !self.is_negative && decision.is_denied() && (is_owed || decision.is_override());
        status(&self.limit, Outcome { is_over, is_charged: false, decision: Some(&decision) })
    }

    pub(super) fn has_hits_to_charge(&self) -> bool {
        self.hits > 0 && !self.is_negative
    }
}

/// What became of a descriptor.
#[derive(Clone, Copy)]
pub(super) struct Outcome<'d> {
    pub(super) is_over: bool,
    pub(super) is_charged: bool,
    pub(super) decision: Option<&'d Decision>,
}

impl<'d> Outcome<'d> {
    pub(super) fn allowed(decision: &'d Decision) -> Self {
        Self { is_over: false, is_charged: true, decision: Some(decision) }
    }
}

#[inline(always)]
pub(super) fn status(
    limit: &AsyncLimit,
    Outcome { is_over, is_charged, decision }: Outcome<'_>,
) -> Status {
    let is_shadow = limit.0.is_shadow();
    let is_shadow_denied = is_over && is_shadow || decision.is_some_and(Decision::is_shadow_denied);
    let is_over = is_over && !is_shadow_denied;
    let shadow = match (is_shadow, is_shadow_denied) {
        (_, true) => Shadow::Denied,
        (true, false) => Shadow::Allowed,
        (false, false) => Shadow::Off,
    };
    let Some(decision) = decision else {
        let code = if is_over { Code::OverLimit } else { Code::Ok };
        return Status { code, shadow, is_counted: true, ..Status::default() };
    };
    let (quota, burst) = (decision.quota(), decision.burst());
    let reset = decision.reset_after();
    Status {
        is_counted: true,
        is_charged,
        code: if is_over { Code::OverLimit } else { Code::Ok },
        current_limit: Some(CurrentLimit {
            requests_per_unit: u32::try_from(quota.tokens()).unwrap_or(u32::MAX),
            unit: Unit::of(quota.period()),
        }),
        limit_remaining: if is_over {
            0
        } else {
            decision.remaining().try_into().unwrap_or(u32::MAX)
        },
        // Rounded up, as who reads it cuts the rest off.
        duration_until_reset: Some(Duration::from_secs(
            reset.as_secs() + u64::from(reset.subsec_nanos() > 0),
        )),
        shadow,
        burst: u32::try_from(burst).unwrap_or(u32::MAX),
    }
}

/// For the store until the deadline at most.
pub(super) fn patience(deadline: Option<Instant>) -> Patience {
    deadline.map_or(Patience::Store, Patience::StoreUntil)
}
