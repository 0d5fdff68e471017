//! What each decision tells of its limit.

use std::collections::HashSet;
use std::sync::{Mutex, PoisonError};

use super::Terms;
use crate::algorithm::{Calendar, KeyRule, Rule};
use crate::quota::{Curve, Scale};

/// A limit's name and rule, where every decision can point to it.
#[derive(Debug, PartialEq, Eq, Hash)]
pub(crate) struct LimitInfo {
    pub(crate) name: Box<str>,
    /// The units that leases of it are counted in.
    pub(crate) scale: Scale,
    /// As it was configured.
    pub(crate) rule: Rule,
    /// In the units that states of keys are kept in, unless the limit is leased.
    pub(crate) key_rule: Option<KeyRule>,
    /// This node's part, if the store decides.
    pub(crate) share: Option<KeyRule>,
    /// Whose windows they are, if leased windows are a calendar's.
    pub(crate) calendar: Option<&'static Calendar>,
    /// Added to the node's time, in microseconds, so that leased windows begin at multiples of their length, or
    /// that it is the time since 1970 where they are a calendar's; 0 for others.
    pub(crate) window_offset_us: u64,
}

/// All that a process ever made. Each is kept for as long as the process lives, so that a decision is a small
/// value without an owner: about 100 bytes for each name with each of its rules.
static INFOS: Mutex<Option<HashSet<&'static LimitInfo>>> = Mutex::new(None);

impl LimitInfo {
    /// The only one of this name and rule.
    ///
    /// `origin_us` is when the node's clock began, in microseconds since 1970.
    #[allow(
        clippy::mutable_key_type,
        reason = "a calendar is told by its name, not by what it remembers"
    )]
    pub(crate) fn intern(name: &str, terms: &Terms, rule: Rule, origin_us: u64) -> &'static Self {
        let &Terms { scale, key_rule, share, calendar, .. } = terms;
        // To the millisecond: a limiter that is built anew has mostly the same.
        let origin_us = origin_us - origin_us % 1000;
        let window_offset_us = match scale.curve {
            Curve::FixedWindow => origin_us % scale.window_us() as u64,
            Curve::CalendarWindow => origin_us,
            _ => 0,
        };
        let name = name.into();
        let wanted = Self { name, scale, rule, key_rule, share, calendar, window_offset_us };
        let mut infos = INFOS.lock().unwrap_or_else(PoisonError::into_inner);
        let infos = infos.get_or_insert_default();
        if let Some(known) = infos.get(&wanted) {
            return known;
        }
        let info: &'static Self = Box::leak(Box::new(wanted));
        infos.insert(info);
        info
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
            std::ptr::from_ref(LimitInfo::intern(name, &limit.validate().unwrap(), quota.into(), 0))
        };
        let [ten, twenty, six_hundred] =
            [Quota::per_second(10), Quota::per_second(20), Quota::per_minute(600).burst(10)];
        assert_eq!(info("api", ten), info("api", ten));
        assert_ne!(info("api", ten), info("api", twenty));
        assert_ne!(info("api", ten), info("api", six_hundred), "the same rate, said otherwise");
        assert_ne!(info("api", ten), info("web", ten));
    }
}
