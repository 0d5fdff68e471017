//! What each decision tells of its limit.

use std::collections::HashSet;
use std::sync::{Mutex, PoisonError};

use crate::quota::Scale;

/// A limit's name and quota, where every decision can point to it.
#[derive(Debug, PartialEq, Eq, Hash)]
pub(crate) struct LimitInfo {
    pub(crate) name: Box<str>,
    pub(crate) scale: Scale,
}

/// All that a process ever made. Each is kept for as long as the process lives, so that a decision is a small
/// value without an owner: about 100 bytes for each name with each of its quotas.
static INFOS: Mutex<Option<HashSet<&'static LimitInfo>>> = Mutex::new(None);

impl LimitInfo {
    /// The only one of this name and quota.
    pub(crate) fn intern(name: &str, scale: Scale) -> &'static Self {
        let wanted = Self { name: name.into(), scale };
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
    use crate::quota::Quota;

    #[test]
    fn one_name_with_one_quota_is_kept_once() {
        let scale = |rate| Quota::per_second(rate).scale("x").unwrap();
        let info = |name, rate| std::ptr::from_ref(LimitInfo::intern(name, scale(rate)));
        assert_eq!(info("api", 10), info("api", 10));
        assert_ne!(info("api", 10), info("api", 20));
        assert_ne!(info("api", 10), info("web", 10));
    }
}
