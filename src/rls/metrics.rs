//! Metrics of descriptors by the names that users of envoyproxy/ratelimit graph.

use std::collections::HashSet;
use std::net::Ipv4Addr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::messages::{Code, Descriptor as Asked, Shadow, Status};
use crate::config::{Domain, MetricKey};

/// The most different labels with values of requests, and their longest, in bytes: others are counted as [`OTHERS`].
const LABELS_MAX: usize = 10_000;
const LABEL_BYTES_MAX: usize = 256;
/// Values that are too many.
const OTHERS: &str = "others";

/// Counts what descriptors are answered.
#[derive(Debug)]
pub(crate) struct DescriptorMetrics {
    /// Hits beyond this part of a limit are near it.
    near_limit_ratio: f64,
    /// The labels with values of requests.
    known: Mutex<HashSet<Arc<[String]>>>,
}

/// What a descriptor was charged, or would have been.
pub(super) struct Counted<'a> {
    pub(super) asked: &'a Asked<'a>,
    pub(super) status: &'a Status,
}

impl DescriptorMetrics {
    pub(crate) fn new(near_limit_ratio: f64) -> Self {
        Self { near_limit_ratio, known: Mutex::default() }
    }

    /// A request, whatever it is answered, and how long that took.
    pub(super) fn request(took: Duration) {
        let method = [("grpc_method", "ShouldRateLimit")];
        metrics::counter!("ratelimit_service_total_requests", &method).increment(1);
        let times = metrics::histogram!("ratelimit_service_response_time_seconds", &method);
        times.record(took.as_secs_f64());
    }

    /// A request that would be denied, if domains were not in shadow mode.
    pub(super) fn shadowed() {
        metrics::counter!("ratelimit_service_global_shadow_mode").increment(1);
    }

    /// A request that is not decided.
    pub(super) fn refused() {
        let kind = [("err_type", "service_error")];
        metrics::counter!("ratelimit_service_should_rate_limit_error", &kind).increment(1);
    }

    /// Counts a descriptor that has a limit.
    pub(super) fn count(&self, domain: &Domain, counted: &Counted<'_>) {
        let Counted { asked, status } = *counted;
        let hits = asked.hits;
        let Some(labels) = self.labels(domain, asked) else { return };
        let add = |name: &'static str, hits: u32| {
            if hits > 0 {
                metrics::counter!(name, &labels).increment(hits.into());
            }
        };
        let is_over = status.code == Code::OverLimit || status.shadow == Shadow::Denied;
        let near = if is_over || !status.is_charged { 0 } else { self.near(status, hits) };
        add("ratelimit_service_rate_limit_total_hits", hits);
        add("ratelimit_service_rate_limit_over_limit", if is_over { hits } else { 0 });
        add("ratelimit_service_rate_limit_within_limit", if is_over { 0 } else { hits });
        add("ratelimit_service_rate_limit_near_limit", near);
        let shadow = if status.shadow == Shadow::Denied { hits } else { 0 };
        add("ratelimit_service_rate_limit_shadow_mode", shadow);
    }

    /// How many of the last hits were near the limit.
    fn near(&self, status: &Status, hits: u32) -> u32 {
        let most = status.burst;
        let used = most.saturating_sub(status.limit_remaining);
        let far = (f64::from(most) * self.near_limit_ratio).floor() as u32;
        used.saturating_sub(far).min(hits)
    }

    /// The domain and the first two entries: those below add up.
    fn labels(&self, domain: &Domain, asked: &Asked<'_>) -> Option<Vec<(&'static str, String)>> {
        let entries = asked.entries.iter().map(|entry| (&*entry.key, &*entry.value));
        let keys = match asked.limit {
            Some(_) => {
                entries.map(|(key, value)| MetricKey { key, value, is_of_request: true }).collect()
            }
            None => domain.level.metric_keys(entries)?,
        };
        let keys = &keys[..keys.len().min(2)];
        let mut values = vec![sanitized(&domain.name)];
        values.extend(keys.iter().map(named));
        let is_of_request = keys.iter().any(|key| key.is_of_request);
        if is_of_request && !self.is_known(&values) {
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
        let is_short = values.iter().all(|value| value.len() <= LABEL_BYTES_MAX);
        let has_room = is_short && known.len() < LABELS_MAX;
        if has_room {
            known.insert(values.into());
        }
        has_room
    }
}

fn named(MetricKey { key, value, .. }: &MetricKey<'_>) -> String {
    sanitized(&if value.is_empty() { (*key).to_owned() } else { format!("{key}_{value}") })
}

/// Without colons and bars, and without the dots of IPv4 addresses.
fn sanitized(text: &str) -> String {
    let mut clean = String::with_capacity(text.len());
    let is_of_address = |char: char| char.is_ascii_digit() || char == '.';
    for part in text.split_inclusive(|char| !is_of_address(char)) {
        let digits = part.trim_end_matches(|char| !is_of_address(char));
        let rest = &part[digits.len()..];
        if digits.parse::<Ipv4Addr>().is_ok() {
            clean.push_str(&digits.replace('.', "_"));
        } else {
            clean.push_str(digits);
        }
        clean.push_str(&rest.replace([':', '|'], "_"));
    }
    clean
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hits_near_a_limit_are_those_beyond_its_part() {
        let metrics = DescriptorMetrics::new(0.8);
        let near = |remaining, hits| {
            let status = Status { burst: 10, limit_remaining: remaining, ..Status::default() };
            metrics.near(&status, hits)
        };
        assert_eq!([near(9, 1), near(2, 8), near(1, 1), near(0, 10), near(1, 5)], [0, 0, 1, 2, 1]);
    }

    #[test]
    fn dots_of_addresses_colons_and_bars_are_underscores() {
        for (text, expected) in [
            ("remote_address_10.0.0.1", "remote_address_10_0_0_1"),
            ("10.0.0.1", "10_0_0_1"),
            ("masked_remote_address_10.0.0.0/24", "masked_remote_address_10_0_0_0/24"),
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
        assert!(!DescriptorMetrics::new(0.8).is_known(&["x".repeat(LABEL_BYTES_MAX + 1)]));
        assert!(metrics.is_known(&["7".to_owned()]));
    }
}
