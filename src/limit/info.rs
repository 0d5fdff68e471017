//! What each decision tells of its limit.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Mutex, PoisonError};

use super::Terms;
use crate::algorithm::{Calendar, KeyRule, Rule};
use crate::quota::{Curve, Scale};

/// What a limit or one of its plans allows, where every decision can point to it.
#[derive(PartialEq)]
pub(crate) struct LimitInfo {
    /// Which of all that the process ever made, 1 at least. Buckets have it of the plan that their key is under.
    pub(crate) number: u32,
    /// Of the limit.
    pub(crate) name: Box<str>,
    /// Of the plan, unless it is the limit's own quota.
    pub(crate) plan: Option<Box<str>>,
    /// It came with an update of the limit.
    pub(crate) is_update: bool,
    /// As it was configured.
    pub(crate) rule: Rule,
    pub(crate) terms: Terms,
    /// The units that leases of it are counted in.
    pub(crate) scale: Scale,
    /// In the units that states of keys are kept in, unless the limit is leased.
    pub(crate) key_rule: Option<KeyRule>,
    /// The rule of the states that this node keeps: its share, if the store decides.
    pub(crate) here: Option<KeyRule>,
    /// Whose windows they are, if leased windows are a calendar's.
    pub(crate) calendar: Option<&'static Calendar>,
    /// Added to the node's time, in microseconds, so that leased windows begin at multiples of their length, or
    /// that it is the time since 1970 where they are a calendar's; 0 for others.
    pub(crate) window_offset_us: u64,
}

/// As it was configured.
impl fmt::Debug for LimitInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, plan, rule, .. } = self;
        let info = &mut f.debug_struct("LimitInfo");
        info.field("name", name).field("plan", plan).field("rule", rule).finish_non_exhaustive()
    }
}

/// All that a process ever made, by number and by all that it says. Each is kept for as long as the process lives, so
/// that a decision is a small value without an owner: about 1 kB for each limit and plan with each of its rules.
#[derive(Default)]
struct Interned {
    all: Vec<&'static LimitInfo>,
    by_text: HashMap<String, &'static LimitInfo>,
}

static INFOS: Mutex<Option<Interned>> = Mutex::new(None);

impl LimitInfo {
    /// The only one of this name, plan and rule.
    ///
    /// `origin_us` is when the node's clock began, in microseconds since 1970.
    pub(crate) fn intern(
        name: &str,
        (plan, is_update): (Option<&str>, bool),
        terms: &Terms,
        rule: Rule,
        origin_us: u64,
    ) -> &'static Self {
        let &Terms { scale, key_rule, share, calendar, .. } = terms;
        // To the millisecond: a limiter that is built anew has mostly the same.
        let origin_us = origin_us - origin_us % 1000;
        let window_offset_us = match scale.curve {
            Curve::FixedWindow => origin_us % terms.stored_scale.window_us() as u64,
            Curve::CalendarWindow => origin_us,
            _ => 0,
        };
        let text = format!("{name:?} {plan:?} {is_update} {rule:?} {terms:?} {window_offset_us}");
        let mut infos = INFOS.lock().unwrap_or_else(PoisonError::into_inner);
        let Interned { all, by_text } = infos.get_or_insert_default();
        by_text.entry(text).or_insert_with(|| {
            let info: &'static Self = Box::leak(Box::new(Self {
                number: all.len() as u32 + 1,
                name: name.into(),
                plan: plan.map(Into::into),
                is_update,
                rule,
                terms: *terms,
                scale,
                key_rule,
                here: share.or(key_rule),
                calendar,
                window_offset_us,
            }));
            all.push(info);
            info
        })
    }

    /// That of this number.
    pub(crate) fn of(number: u32) -> Option<&'static Self> {
        let infos = INFOS.lock().unwrap_or_else(PoisonError::into_inner);
        infos.as_ref()?.all.get((number as usize).checked_sub(1)?).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limit::Limit;
    use crate::quota::Quota;

    #[test]
    fn one_name_with_one_quota_is_kept_once() {
        let info = |name, quota: Quota| {
            let limit = Limit::new(name, quota);
            std::ptr::from_ref(LimitInfo::intern(
                name,
                (None, false),
                &limit.validate().unwrap(),
                quota.into(),
                0,
            ))
        };
        let [ten, twenty, six_hundred] =
            [Quota::per_second(10), Quota::per_second(20), Quota::per_minute(600).burst(10)];
        assert_eq!(info("api", ten), info("api", ten));
        assert_ne!(info("api", ten), info("api", twenty));
        assert_ne!(info("api", ten), info("api", six_hundred), "the same rate, said otherwise");
        assert_ne!(info("api", ten), info("web", ten));
    }
}
