//! Metrics of descriptors by the names that users of envoyproxy/ratelimit graph.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};

use super::messages::{Code, Descriptor as Asked, Status};
use crate::config::{Domain, MetricKey};

/// The most different labels: those of further ones are counted as [`OTHERS`].
const LABELS_MAX: usize = 10_000;
/// Values that are too many.
const OTHERS: &str = "others";

/// Counts what descriptors are answered.
#[derive(Debug)]
pub(crate) struct DescriptorMetrics {
    /// Hits beyond this part of a limit are near it.
    near_limit_ratio: f64,
    /// The labels that there are.
    known: Mutex<HashSet<Arc<[String]>>>,
}

/// What a descriptor was charged, or would have been.
pub(super) struct Counted<'a> {
    pub(super) asked: &'a Asked,
    pub(super) hits: u32,
    pub(super) status: &'a Status,
}

impl DescriptorMetrics {
    pub(crate) fn new(near_limit_ratio: f64) -> Self {
        Self { near_limit_ratio, known: Mutex::default() }
    }

    /// A request, whatever it is answered.
    pub(super) fn request() {
        let method = [("grpc_method", "ShouldRateLimit")];
        metrics::counter!("ratelimit_service_total_requests", &method).increment(1);
    }

    /// A request that is not decided.
    pub(super) fn refused() {
        let kind = [("err_type", "service_error")];
        metrics::counter!("ratelimit_service_should_rate_limit_error", &kind).increment(1);
    }

    /// Counts a descriptor that has a limit.
    pub(super) fn count(&self, domain: &Domain, counted: &Counted<'_>) {
        let Counted { asked, hits, status } = *counted;
        let Some(labels) = self.labels(domain, asked) else { return };
        let add = |name: &'static str, hits: u32| {
            if hits > 0 {
                metrics::counter!(name, &labels).increment(hits.into());
            }
        };
        let is_over = status.code == Code::OverLimit || status.is_shadow_denied;
        let near = if is_over { 0 } else { self.near(status, hits) };
        add("ratelimit_service_rate_limit_total_hits", hits);
        add("ratelimit_service_rate_limit_over_limit", if is_over { hits } else { 0 });
        add("ratelimit_service_rate_limit_within_limit", if is_over { 0 } else { hits });
        add("ratelimit_service_rate_limit_near_limit", near);
        let shadow = if status.is_shadow_denied { hits } else { 0 };
        add("ratelimit_service_rate_limit_shadow_mode", shadow);
    }

    /// How many of the last hits were near the limit.
    fn near(&self, status: &Status, hits: u32) -> u32 {
        let Some(limit) = &status.current_limit else { return 0 };
        let most = limit.requests_per_unit;
        let used = most.saturating_sub(status.limit_remaining);
        let far = (f64::from(most) * self.near_limit_ratio).floor() as u32;
        used.saturating_sub(far).min(hits)
    }

    /// The domain, the first key, and all others as one.
    fn labels(&self, domain: &Domain, asked: &Asked) -> Option<Vec<(&'static str, String)>> {
        let entries = asked.entries.iter().map(|entry| (&*entry.key, &*entry.value));
        let keys = match asked.limit {
            Some(_) => entries.map(|(key, value)| named(key, value)).collect(),
            None => domain.level.metric_keys(entries)?.iter().map(MetricKey::name).collect(),
        };
        let keys: Vec<String> = keys;
        let (first, others) = keys.split_first()?;
        let mut values = vec![sanitized(&domain.name), sanitized(first)];
        if !others.is_empty() {
            values.push(others.iter().map(|key| sanitized(key)).collect::<Vec<_>>().join("."));
        }
        if !self.is_known(&values) {
            values[1..].fill(OTHERS.to_owned());
        }
        Some(["domain", "key1", "key2"].into_iter().zip(values).collect())
    }

    /// Whether there are such labels, or room for them.
    fn is_known(&self, values: &[String]) -> bool {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if known.contains(values) {
            return true;
        }
        let has_room = known.len() < LABELS_MAX;
        if has_room {
            known.insert(values.into());
        }
        has_room
    }
}

impl MetricKey<'_> {
    fn name(&self) -> String {
        match self {
            Self::Key(key) => (*key).to_owned(),
            Self::Value(key, value) => named(key, value),
        }
    }
}

fn named(key: &str, value: &str) -> String {
    if value.is_empty() { key.to_owned() } else { format!("{key}_{value}") }
}

/// Without colons and bars, and without the dots of an IPv4 address.
fn sanitized(text: &str) -> String {
    let is_address = |part: &str| part.parse::<std::net::Ipv4Addr>().is_ok();
    let text = text.replace([':', '|'], "_");
    match text.rsplit_once('_') {
        Some((key, value)) if is_address(value) => format!("{key}_{}", value.replace('.', "_")),
        _ if is_address(&text) => text.replace('.', "_"),
        _ => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rls::messages::CurrentLimit;

    #[test]
    fn hits_near_a_limit_are_those_beyond_its_part() {
        let metrics = DescriptorMetrics::new(0.8);
        let near = |remaining, hits| {
            let limit = CurrentLimit { requests_per_unit: 10, unit: None };
            let status = Status {
                current_limit: Some(limit),
                limit_remaining: remaining,
                ..Status::default()
            };
            metrics.near(&status, hits)
        };
        assert_eq!([near(9, 1), near(2, 8), near(1, 1), near(0, 10), near(1, 5)], [0, 0, 1, 2, 1]);
    }

    #[test]
    fn dots_of_addresses_colons_and_bars_are_underscores() {
        for (text, expected) in [
            ("remote_address_10.0.0.1", "remote_address_10_0_0_1"),
            ("10.0.0.1", "10_0_0_1"),
            ("path_a.b", "path_a.b"),
            ("a:b|c", "a_b_c"),
        ] {
            assert_eq!(sanitized(text), expected);
        }
    }

    #[test]
    fn labels_beyond_the_most_are_one() {
        let metrics = DescriptorMetrics::new(0.8);
        for number in 0..LABELS_MAX {
            assert!(metrics.is_known(&[number.to_string()]));
        }
        assert!(!metrics.is_known(&["one more".to_owned()]));
        assert!(metrics.is_known(&["7".to_owned()]));
    }
}
