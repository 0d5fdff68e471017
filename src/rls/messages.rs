//! What is asked and what is answered, as values, as JSON and as protobuf.

use std::fmt;
use std::time::Duration;

use envoy_types::pb::envoy::config::core::v3::HeaderValue;
pub(crate) use envoy_types::pb::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::Entry;
use envoy_types::pb::envoy::service::ratelimit::v3 as pb;
use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_response as pb_response;
use envoy_types::pb::google::protobuf::Duration as PbDuration;
use serde::de::{Error, IntoDeserializer, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::json::{objects, or_default, some_object, some_whole, whole};

/// The most descriptors in one request.
pub(super) const DESCRIPTORS_MAX: usize = 1000;
/// Remaining requests of what is unlimited.
const UNLIMITED: u32 = u32::MAX;

/// Requests that fit all limits of their descriptors, or none.
#[derive(Debug)]
pub(crate) struct RateLimitRequest<'a> {
    pub(crate) domain: &'a str,
    pub(crate) descriptors: Vec<Descriptor<'a>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Descriptor<'a> {
    pub(crate) entries: &'a [Entry],
    /// A limit of the request's own.
    pub(crate) limit: Option<OwnLimit>,
    /// 0 looks, and charges nothing.
    pub(crate) hits: u32,
    /// The hits go back.
    pub(crate) is_negative_hits: bool,
}

/// The same as JSON.
#[derive(Debug, Default, Deserialize)]
#[serde(
    default,
    deny_unknown_fields,
    rename_all = "camelCase",
    expecting = "an object of domain and descriptors"
)]
pub(crate) struct JsonRequest {
    #[serde(deserialize_with = "or_default")]
    domain: String,
    #[serde(deserialize_with = "objects")]
    descriptors: Vec<JsonDescriptor>,
    /// Requests; 0 is one.
    #[serde(alias = "hits_addend", deserialize_with = "whole")]
    hits_addend: u64,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase", expecting = "an object of entries")]
struct JsonDescriptor {
    #[serde(deserialize_with = "entries")]
    entries: Vec<Entry>,
    #[serde(deserialize_with = "some_object")]
    limit: Option<OwnLimit>,
    /// Instead of those of the whole; 0 looks without counting.
    #[serde(alias = "hits_addend", deserialize_with = "some_whole")]
    hits_addend: Option<u64>,
    #[serde(alias = "is_negative_hits", deserialize_with = "or_default")]
    is_negative_hits: bool,
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields, expecting = "an object of key and value")]
struct JsonEntry {
    #[serde(deserialize_with = "or_default")]
    key: String,
    #[serde(deserialize_with = "or_default")]
    value: String,
}

fn entries<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<Entry>, D::Error> {
    let entries = objects(deserializer)?;
    Ok(entries.into_iter().map(|JsonEntry { key, value }| Entry { key, value }).collect())
}

/// A limit that a request brings with it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
pub(crate) struct OwnLimit {
    #[serde(alias = "requests_per_unit", deserialize_with = "whole")]
    pub(crate) requests_per_unit: u64,
    /// None: it is not known.
    #[serde(deserialize_with = "unit")]
    pub(crate) unit: Option<Unit>,
}

/// What is answered.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Answer {
    pub(crate) overall_code: Code,
    /// One for each descriptor, in order.
    pub(crate) statuses: Vec<Status>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) response_headers_to_add: Vec<Header>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub(crate) enum Code {
    #[default]
    Ok,
    OverLimit,
}

/// Why a request is not decided.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Refusal {
    #[error("domain: is empty: name one")]
    NoDomain,
    #[error("descriptors: there is none: a request needs one")]
    NoDescriptor,
    #[error("descriptors: there are {0}: at most {DESCRIPTORS_MAX}")]
    TooManyDescriptors(usize),
    #[error("descriptors[{index}].limit: {reason}")]
    OwnLimit { index: usize, reason: String },
    #[error(
        "descriptors[{index}].is_negative_hits: {limit} keeps when each token was spent: commit a reservation"
    )]
    NegativeHits { index: usize, limit: &'static str },
}

/// How one descriptor stands. The default is that of one without a limit, or that is not decided yet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Status {
    pub(crate) code: Code,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) current_limit: Option<CurrentLimit>,
    #[serde(skip_serializing_if = "is_zero")]
    pub(crate) limit_remaining: u32,
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "seconds")]
    pub(crate) duration_until_reset: Option<Duration>,
    /// The most that its key can have left.
    #[serde(skip)]
    pub(crate) burst: u32,
    #[serde(skip)]
    pub(crate) shadow: Shadow,
    /// It was charged.
    #[serde(skip)]
    pub(crate) is_charged: bool,
    /// Metrics count it: it has a limit, or is always denied.
    #[serde(skip)]
    pub(crate) is_counted: bool,
}

/// Whether the limit is in shadow mode, and would have denied the request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Shadow {
    #[default]
    Off,
    Allowed,
    Denied,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct CurrentLimit {
    pub(crate) requests_per_unit: u32,
    /// Left out if the period is none of these.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) unit: Option<Unit>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub(crate) enum Unit {
    Second,
    Minute,
    Hour,
    Day,
    Week,
    Month,
    Year,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Header {
    pub(crate) key: &'static str,
    pub(crate) value: String,
}

impl Unit {
    const ALL: [(Self, u64, pb_response::rate_limit::Unit); 7] = [
        (Self::Second, 1, pb_response::rate_limit::Unit::Second),
        (Self::Minute, 60, pb_response::rate_limit::Unit::Minute),
        (Self::Hour, 3600, pb_response::rate_limit::Unit::Hour),
        (Self::Day, 86_400, pb_response::rate_limit::Unit::Day),
        (Self::Week, 7 * 86_400, pb_response::rate_limit::Unit::Week),
        (Self::Month, 30 * 86_400, pb_response::rate_limit::Unit::Month),
        (Self::Year, 365 * 86_400, pb_response::rate_limit::Unit::Year),
    ];

    /// The unit that is so long, if there is one.
    pub(crate) fn of(period: Duration) -> Option<Self> {
        let is_it = |(_, seconds, _): &&(Self, u64, _)| period == Duration::from_secs(*seconds);
        Self::ALL.iter().find(is_it).map(|(unit, ..)| *unit)
    }

    pub(crate) fn period(self) -> Duration {
        let of_unit = Self::ALL.iter().find(|(unit, ..)| *unit == self);
        Duration::from_secs(of_unit.map_or(1, |(_, seconds, _)| *seconds))
    }

    /// That of a request's own limit, as protobuf numbers them: there are no weeks. None for 0, which is no unit.
    fn of_request(number: u64) -> Option<Self> {
        let units = [Self::Second, Self::Minute, Self::Hour, Self::Day, Self::Month, Self::Year];
        units.get(usize::try_from(number).ok()?.checked_sub(1)?).copied()
    }

    fn in_protobuf(self) -> pb_response::rate_limit::Unit {
        let of_unit = Self::ALL.iter().find(|(unit, ..)| *unit == self);
        of_unit.map_or(pb_response::rate_limit::Unit::Unknown, |(.., unit)| *unit)
    }
}

impl Status {
    /// That of a descriptor that is always denied.
    pub(crate) fn denied() -> Self {
        Self { code: Code::OverLimit, is_counted: true, ..Self::default() }
    }

    /// That of a descriptor that is never denied.
    pub(crate) fn unlimited() -> Self {
        Self { limit_remaining: UNLIMITED, ..Self::default() }
    }
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde passes references")]
fn is_zero(number: &u32) -> bool {
    *number == 0
}

#[allow(clippy::ref_option, reason = "serde passes references")]
fn seconds<S: Serializer>(time: &Option<Duration>, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&format_args!("{}s", time.unwrap_or_default().as_secs()))
}

fn unit<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Unit>, D::Error> {
    deserializer.deserialize_any(UnitVisitor)
}

/// The name of a unit, or its number, or null.
struct UnitVisitor;

impl Visitor<'_> for UnitVisitor {
    type Value = Option<Unit>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SECOND, MINUTE, HOUR, DAY, WEEK, MONTH or YEAR")
    }

    fn visit_u64<E>(self, number: u64) -> Result<Option<Unit>, E> {
        Ok(Unit::of_request(number))
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Option<Unit>, E> {
        match text {
            "UNKNOWN" => Ok(None),
            name => Unit::deserialize(name.into_deserializer()).map(Some),
        }
    }

    fn visit_unit<E>(self) -> Result<Option<Unit>, E> {
        Ok(None)
    }
}

/// The hits of a descriptor: its own, or else those of the request, of which 0 is one.
fn hits(own: Option<u64>, of_all: u64) -> u32 {
    // More than any limit admits at once.
    own.unwrap_or(of_all.max(1)).try_into().unwrap_or(u32::MAX)
}

impl<'a> From<&'a pb::RateLimitRequest> for RateLimitRequest<'a> {
    fn from(request: &'a pb::RateLimitRequest) -> Self {
        let descriptors = request.descriptors.iter().map(|descriptor| Descriptor {
            entries: &descriptor.entries,
            limit: descriptor.limit.map(|limit| OwnLimit {
                requests_per_unit: limit.requests_per_unit.into(),
                unit: limit.unit.try_into().ok().and_then(Unit::of_request),
            }),
            hits: hits(descriptor.hits_addend.map(|hits| hits.value), request.hits_addend.into()),
            is_negative_hits: descriptor.is_negative_hits,
        });
        Self { domain: &request.domain, descriptors: descriptors.collect() }
    }
}

impl<'a> From<&'a JsonRequest> for RateLimitRequest<'a> {
    fn from(request: &'a JsonRequest) -> Self {
        let descriptors = request.descriptors.iter().map(|descriptor| Descriptor {
            entries: &descriptor.entries,
            limit: descriptor.limit,
            hits: hits(descriptor.hits_addend, request.hits_addend),
            is_negative_hits: descriptor.is_negative_hits,
        });
        Self { domain: &request.domain, descriptors: descriptors.collect() }
    }
}

impl From<Code> for i32 {
    fn from(code: Code) -> Self {
        match code {
            Code::Ok => pb_response::Code::Ok.into(),
            Code::OverLimit => pb_response::Code::OverLimit.into(),
        }
    }
}

impl From<Status> for pb_response::DescriptorStatus {
    /// Inlined, so that it is built in its place in the list.
    #[inline(always)]
    fn from(status: Status) -> Self {
        let current_limit = status.current_limit.map(|limit| pb_response::RateLimit {
            name: String::new(),
            requests_per_unit: limit.requests_per_unit,
            unit: limit.unit.map_or(0, |unit| unit.in_protobuf().into()),
        });
        let reset = status.duration_until_reset.map(|time| PbDuration {
            seconds: time.as_secs().try_into().unwrap_or(i64::MAX),
            nanos: 0,
        });
        Self {
            code: status.code.into(),
            current_limit,
            limit_remaining: status.limit_remaining,
            duration_until_reset: reset,
            quota: None,
        }
    }
}

impl From<Answer> for pb::RateLimitResponse {
    fn from(answer: Answer) -> Self {
        let header = |Header { key, value }| HeaderValue {
            key: key.to_owned(),
            value,
            raw_value: Vec::new(),
        };
        Self {
            overall_code: answer.overall_code.into(),
            statuses: answer
                .statuses
                .into_iter()
                .map(pb_response::DescriptorStatus::from)
                .collect(),
            response_headers_to_add: answer
                .response_headers_to_add
                .into_iter()
                .map(header)
                .collect(),
            ..Self::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rls::json::Object;

    #[test]
    fn json_is_that_of_protobuf_in_both_spellings() -> Result<(), serde_json::Error> {
        let camel = r#"{"domain":"d","descriptors":[{"entries":[{"key":"k","value":"v"}],
            "hitsAddend":"7","isNegativeHits":true}],"hitsAddend":3}"#;
        let snake = r#"{"domain":"d","descriptors":[{"entries":[{"key":"k","value":"v"}],
            "hits_addend":7,"is_negative_hits":true}],"hits_addend":"3"}"#;
        let entries = [Entry { key: "k".to_owned(), value: "v".to_owned() }];
        let expected =
            Descriptor { entries: &entries, limit: None, hits: 7, is_negative_hits: true };
        for text in [camel, snake] {
            let Object::<JsonRequest>(json) = serde_json::from_str(text)?;
            let request = RateLimitRequest::from(&json);
            assert_eq!((request.domain, &*request.descriptors), ("d", &[expected][..]));
        }
        assert!(serde_json::from_str::<JsonRequest>(r#"{"domains":"d"}"#).is_err());
        Ok(())
    }

    #[test]
    fn answer_is_written_as_protobuf_writes_it() -> Result<(), serde_json::Error> {
        let answer = Answer {
            overall_code: Code::OverLimit,
            statuses: vec![
                Status::default(),
                Status {
                    code: Code::OverLimit,
                    current_limit: Some(CurrentLimit {
                        requests_per_unit: 10,
                        unit: Some(Unit::Second),
                    }),
                    limit_remaining: 0,
                    duration_until_reset: Some(Duration::from_secs(20)),
                    burst: 10,
                    shadow: Shadow::Off,
                    is_charged: false,
                    is_counted: true,
                },
            ],
            response_headers_to_add: Vec::new(),
        };
        assert_eq!(
            serde_json::to_value(&answer)?,
            serde_json::json!({"overallCode": "OVER_LIMIT", "statuses": [
                {"code": "OK"},
                {"code": "OVER_LIMIT", "currentLimit": {"requestsPerUnit": 10, "unit": "SECOND"},
                 "durationUntilReset": "20s"}
            ]})
        );
        Ok(())
    }
}
