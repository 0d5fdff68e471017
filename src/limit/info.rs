//! What each decision tells of its limit.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Mutex, PoisonError};

use super::Terms;
use crate::algorithm::{Calendar, KeyRule, Rule};
use crate::quota::{Curve, Scale};

/// The most different quotas that overrides give keys in a process, over all its limiters and their limits, for as long as it
/// lives. Each takes some 2 kB. One more is refused, and has no effect if another node set it.
pub const OVERRIDE_QUOTAS_MAX: usize = 100_000;

/// What a limit or one of its plans allows, where every decision can point to it.
#[derive(PartialEq)]
pub(crate) struct LimitInfo {
    /// Which of all that the process ever made, 1 at least. Buckets have it of the plan that their key is under; a quota by
    /// override counts as one.
    pub(crate) number: u32,
    /// Of the limit.
    pub(crate) name: Box<str>,
    pub(crate) of: QuotaOf,
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

/// Whose quota it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum QuotaOf {
    /// The limit's own.
    Limit,
    /// Of the plan of this name.
    Plan(Box<str>),
    /// Of keys to which overrides give it.
    Override,
}

/// As it was configured.
impl fmt::Debug for LimitInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, of, rule, .. } = self;
        let info = &mut f.debug_struct("LimitInfo");
        info.field("name", name).field("of", of).field("rule", rule).finish_non_exhaustive()
    }
}

/// All that a process ever made, by number and by all that it says. Each is kept for as long as the process lives, so
/// that a decision is a small value without an owner: about 1 kB for each limit and plan with each of its rules.
#[derive(Default)]
struct Interned {
    all: Vec<&'static LimitInfo>,
    by_text: HashMap<String, &'static LimitInfo>,
    /// How many of them are quotas of overrides.
    of_overrides: usize,
}

impl Interned {
    /// The one of this text, or else one that is made of `info`.
    fn put(&mut self, (text, info): (String, LimitInfo)) -> &'static LimitInfo {
        let Self { all, by_text, .. } = self;
        by_text.entry(text).or_insert_with(|| {
            let number = all.len() as u32 + 1;
            let info: &'static LimitInfo = Box::leak(Box::new(LimitInfo { number, ..info }));
            all.push(info);
            info
        })
    }

    /// The same of a quota of overrides. `None` if it is new, and there are [`OVERRIDE_QUOTAS_MAX`].
    fn put_of_overrides(&mut self, new: (String, LimitInfo)) -> Option<&'static LimitInfo> {
        let is_known = self.by_text.contains_key(&new.0);
        if !is_known && self.of_overrides >= OVERRIDE_QUOTAS_MAX {
            return None;
        }
        self.of_overrides += usize::from(!is_known);
        Some(self.put(new))
    }
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
        let of = plan.map_or(QuotaOf::Limit, |plan| QuotaOf::Plan(plan.into()));
        let new = Self::new(name, (of, is_update), terms, rule, origin_us);
        let mut infos = INFOS.lock().unwrap_or_else(PoisonError::into_inner);
        infos.get_or_insert_default().put(new)
    }

    /// The only one of overrides of the limit of this name, with this rule. `None` if it is a new one, and the process has
    /// [`OVERRIDE_QUOTAS_MAX`].
    pub(crate) fn intern_of_overrides(
        name: &str,
        terms: &Terms,
        rule: Rule,
        origin_us: u64,
    ) -> Option<&'static Self> {
        let new = Self::new(name, (QuotaOf::Override, false), terms, rule, origin_us);
        let mut infos = INFOS.lock().unwrap_or_else(PoisonError::into_inner);
        infos.get_or_insert_default().put_of_overrides(new)
    }

    /// One without a number, and all that it says.
    fn new(
        name: &str,
        (of, is_update): (QuotaOf, bool),
        terms: &Terms,
        rule: Rule,
        origin_us: u64,
    ) -> (String, Self) {
        let &Terms { scale, key_rule, share, calendar, .. } = terms;
        // To the millisecond: a limiter that is built anew has mostly the same.
        let origin_us = origin_us - origin_us % 1000;
        let window_offset_us = match scale.curve {
            Curve::FixedWindow => origin_us % terms.stored_scale.window_us() as u64,
            Curve::CalendarWindow => origin_us,
            _ => 0,
        };
        let text = format!("{name:?} {of:?} {is_update} {rule:?} {terms:?} {window_offset_us}");
        let (name, here, terms) = (name.into(), share.or(key_rule), *terms);
        let info = Self {
            number: 0,
            name,
            of,
            is_update,
            rule,
            terms,
            scale,
            key_rule,
            here,
            calendar,
            window_offset_us,
        };
        (text, info)
    }

    /// The name of the plan whose quota it is.
    pub(crate) fn plan_name(&self) -> Option<&str> {
        if let QuotaOf::Plan(name) = &self.of { Some(name) } else { None }
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

    #[test]
    fn quotas_of_overrides_are_at_most_so_many_and_those_that_are_there_stay() {
        let new = |tokens| {
            let quota = Quota::per_second(tokens);
            let terms = Limit::new("api", quota).validate().unwrap();
            LimitInfo::new("api", (QuotaOf::Override, false), &terms, quota.into(), 0)
        };
        let mut interned =
            Interned { of_overrides: OVERRIDE_QUOTAS_MAX - 1, ..Interned::default() };
        let last = interned.put_of_overrides(new(1)).unwrap();
        assert_eq!(interned.put_of_overrides(new(2)), None);
        assert!(std::ptr::eq(interned.put_of_overrides(new(1)).unwrap(), last));
        let bytes = size_of::<LimitInfo>() + new(1).0.len();
        assert!(bytes < 1500, "{bytes} bytes, and maps");
    }
}
