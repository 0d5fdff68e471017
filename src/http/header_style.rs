//! The header fields of a response: what clients may know of the limits that they are under.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use http::{HeaderMap, HeaderName, HeaderValue};

use crate::decision::Decision;

/// Which header fields a response has. Values are whole tokens, and seconds rounded up.
///
/// ```
/// use tidegate::http::{HeaderStyle, Reset, LimitReport};
/// use tidegate::{Limit, Limiter, Quota};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let limit = Limit::new("api", Quota::per_second(10).burst(50));
/// let api = Limiter::builder().limit(limit).build()?.limit("api")?;
/// let said = [LimitReport { policy: api.name(), decision: api.check("user:42") }];
/// let mut headers = http::HeaderMap::new();
/// HeaderStyle::draft().and(HeaderStyle::x_ratelimit(Reset::Seconds)).write(&said, &mut headers);
/// assert_eq!(headers["ratelimit-policy"], r#""api";q=50;w=5"#);
/// assert_eq!(headers["ratelimit"], r#""api";r=49;t=1"#);
/// assert_eq!(headers["x-ratelimit-remaining"], "49");
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HeaderStyle {
    draft: bool,
    draft_03: bool,
    x: Option<Reset>,
}

/// As what `X-RateLimit-Reset` says when the bucket will be full.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Reset {
    /// In so many seconds.
    Seconds,
    /// So many seconds after the beginning of 1970, by this machine's clock.
    Timestamp,
}

/// What one of a request's limits said.
#[derive(Clone, Copy, Debug)]
pub struct LimitReport<'a> {
    /// The limit's name: letters, digits and `_ . - /` ([`Limit::new`](crate::Limit::new)); whatever
    /// else there is in it is left out.
    pub policy: &'a str,
    /// What it said.
    pub decision: Decision,
}

/// Lower case, as HTTP/2 has them.
const POLICIES: HeaderName = HeaderName::from_static("ratelimit-policy");
const STATES: HeaderName = HeaderName::from_static("ratelimit");
/// A limit, what is left of it, and when it is whole again.
const DRAFT_03: [HeaderName; 3] = [
    HeaderName::from_static("ratelimit-limit"),
    HeaderName::from_static("ratelimit-remaining"),
    HeaderName::from_static("ratelimit-reset"),
];
const X: [HeaderName; 3] = [
    HeaderName::from_static("x-ratelimit-limit"),
    HeaderName::from_static("x-ratelimit-remaining"),
    HeaderName::from_static("x-ratelimit-reset"),
];

impl HeaderStyle {
    /// No fields.
    pub fn none() -> Self {
        Self::default()
    }

    /// `RateLimit-Policy` and `RateLimit`, as in the current draft of the standard (10 and 11), with all
    /// limits: the burst as `q`, the seconds in which an empty bucket fills as `w`, what is left as `r`,
    /// and the seconds to the next token as `t`.
    pub fn draft() -> Self {
        Self { draft: true, ..Self::default() }
    }

    /// `RateLimit-Limit`, `RateLimit-Remaining` and `RateLimit-Reset`, as in its third draft, of the
    /// limit that is next to deny: the burst, what is left, and the seconds until the bucket is full.
    pub fn draft_03() -> Self {
        Self { draft_03: true, ..Self::default() }
    }

    /// The same as `X-RateLimit-Limit`, `X-RateLimit-Remaining` and `X-RateLimit-Reset`.
    pub fn x_ratelimit(reset: Reset) -> Self {
        Self { x: Some(reset), ..Self::default() }
    }

    /// These fields and those.
    #[must_use]
    pub fn and(self, more: Self) -> Self {
        Self {
            draft: self.draft || more.draft,
            draft_03: self.draft_03 || more.draft_03,
            x: more.x.or(self.x),
        }
    }

    /// Writes the fields; what there was of them is replaced. Without a limit nothing is written.
    ///
    /// Cost: an allocation a field, besides what the map takes.
    pub fn write(self, said: &[LimitReport<'_>], headers: &mut HeaderMap) {
        let mut worded = HeaderValues::default();
        self.word(said.iter(), list_of_policies, &mut worded);
        worded.write(headers);
    }

    /// Words what will be written; `policies` is for `RateLimit-Policy`.
    #[allow(clippy::disallowed_methods, reason = "clients are told a time of the machine's clock")]
    pub(super) fn word<'a, I: Iterator<Item = &'a LimitReport<'a>> + Clone>(
        self,
        said: I,
        policies: impl Fn(I) -> HeaderValue,
        worded: &mut HeaderValues,
    ) {
        let now = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        self.word_at(said, policies, now, worded);
    }

    fn word_at<'a, I: Iterator<Item = &'a LimitReport<'a>> + Clone>(
        self,
        said: I,
        policies: impl Fn(I) -> HeaderValue,
        now: impl Fn() -> Duration,
        worded: &mut HeaderValues,
    ) {
        if self.draft && said.clone().next().is_some() {
            worded.lists = Some([policies(said.clone()), list_of_states(said.clone())]);
        }
        if (self.draft_03 || self.x.is_some())
            && let Some(tightest) = tightest(said)
        {
            let trio = |reset: Duration| [tightest.burst(), tightest.remaining(), seconds(reset)];
            let reset = tightest.reset_after();
            worded.draft_03 = self.draft_03.then(|| trio(reset));
            worded.x = self.x.map(|form| match form {
                Reset::Seconds => trio(reset),
                Reset::Timestamp => trio(now() + reset),
            });
        }
    }
}

/// The values of a response's fields.
#[derive(Default)]
pub(super) struct HeaderValues {
    lists: Option<[HeaderValue; 2]>,
    draft_03: Option<[u64; 3]>,
    x: Option<[u64; 3]>,
}

impl HeaderValues {
    /// Writes them, once; what there was of these fields is replaced.
    pub(super) fn write(&mut self, headers: &mut HeaderMap) {
        if let Some([policies, states]) = self.lists.take() {
            insert(headers, POLICIES, policies);
            insert(headers, STATES, states);
        }
        if let Some(trio) = self.draft_03.take() {
            insert_trio(headers, DRAFT_03, trio);
        }
        if let Some(trio) = self.x.take() {
            insert_trio(headers, X, trio);
        }
    }
}

fn insert_trio(headers: &mut HeaderMap, names: [HeaderName; 3], trio: [u64; 3]) {
    for (name, value) in names.into_iter().zip(trio) {
        insert(headers, name, number(value));
    }
}

/// Writes a field; a map that is full of others' fields stays as it is.
fn insert(headers: &mut HeaderMap, name: HeaderName, value: HeaderValue) {
    let _ = headers.try_insert(name, value);
}

/// The limit that is next to deny: one that did, and longest; or else the one with the least part left.
fn tightest<'a>(said: impl Iterator<Item = &'a LimitReport<'a>>) -> Option<&'a Decision> {
    let left = |decision: &Decision| decision.remaining() as f64 / decision.burst().max(1) as f64;
    said.map(|said| &said.decision).min_by(|a, b| {
        let later_first = b.retry_after().cmp(&a.retry_after());
        later_first.then_with(|| left(a).total_cmp(&left(b)))
    })
}

/// As `HeaderValue::from` does, with one allocation of two.
fn number(number: u64) -> HeaderValue {
    let mut digits = itoa::Buffer::new();
    HeaderValue::from_str(digits.format(number)).unwrap_or_else(|_| number.into())
}

/// A list of the limits, each a quoted name with two parameters: a letter and a number each.
fn list<'a>(
    said: impl Iterator<Item = &'a LimitReport<'a>>,
    parameters: fn(&Decision) -> [(u8, u64); 2],
) -> HeaderValue {
    let mut text = Vec::new();
    for LimitReport { policy, decision } in said {
        let [(name, value), (more_name, more_value)] = parameters(decision);
        let (mut digits, mut more_digits) = (itoa::Buffer::new(), itoa::Buffer::new());
        let (digits, more_digits) = (digits.format(value), more_digits.format(more_value));
        let length = "\"\";_=;_=".len() + policy.len() + digits.len() + more_digits.len();
        // Text with no byte to spare becomes a value as it is.
        if text.is_empty() {
            text = Vec::with_capacity(length);
        } else {
            text.reserve_exact(", ".len() + length);
            text.extend_from_slice(b", ");
        }
        text.push(b'"');
        let named = |byte: &u8| byte.is_ascii_alphanumeric() || b"_.-/".contains(byte);
        if policy.as_bytes().iter().all(named) {
            text.extend_from_slice(policy.as_bytes());
        } else {
            text.extend(policy.bytes().filter(named));
        }
        text.extend_from_slice(&[b'"', b';', name, b'=']);
        text.extend_from_slice(digits.as_bytes());
        text.extend_from_slice(&[b';', more_name, b'=']);
        text.extend_from_slice(more_digits.as_bytes());
    }
    HeaderValue::try_from(text).unwrap_or_else(|_| HeaderValue::from_static(""))
}

/// What `RateLimit-Policy` says.
pub(super) fn list_of_policies<'a>(said: impl Iterator<Item = &'a LimitReport<'a>>) -> HeaderValue {
    list(said, |decision| [(b'q', decision.burst()), (b'w', seconds(decision.fill_time()))])
}

/// What `RateLimit` says.
fn list_of_states<'a>(said: impl Iterator<Item = &'a LimitReport<'a>>) -> HeaderValue {
    list(said, |decision| {
        let (remaining, next) = decision.remaining_and_next();
        [(b'r', remaining), (b't', seconds(next))]
    })
}

/// Whole seconds, rounded up.
pub(super) fn seconds(duration: Duration) -> u64 {
    duration.as_secs() + u64::from(duration.subsec_nanos() > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    use crate::limit::Limit;
    use crate::limiter::Limiter;
    use crate::quota::Quota;

    fn decisions() -> [Decision; 2] {
        let limiter = Limiter::builder()
            .limit(Limit::new("wide", Quota::per_second(7).burst(100)))
            .limit(Limit::new("narrow", Quota::per_minute(3)))
            .build()
            .unwrap();
        let [wide, narrow] = ["wide", "narrow"].map(|name| limiter.limit(name).unwrap());
        assert!(narrow.check_n("a", 2).unwrap().is_allowed());
        [wide.check("a"), narrow.check_n("a", 2).unwrap()]
    }

    fn written(fields: HeaderStyle) -> Vec<(String, String)> {
        let [wide, narrow] = decisions();
        let said = [
            LimitReport { policy: "wide", decision: wide },
            LimitReport { policy: "nar\"row\n", decision: narrow },
        ];
        let (mut worded, mut headers) = (HeaderValues::default(), HeaderMap::new());
        let now = || Duration::from_millis(1_700_000_000_500);
        fields.word_at(said.iter(), list_of_policies, now, &mut worded);
        worded.write(&mut headers);
        let text = |value: &HeaderValue| value.to_str().unwrap().to_owned();
        headers.iter().map(|(name, value)| (name.to_string(), text(value))).collect()
    }

    fn pairs(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn the_current_draft_tells_of_all_limits() {
        let expected = [
            ("ratelimit-policy", r#""wide";q=100;w=15, "narrow";q=3;w=60"#),
            ("ratelimit", r#""wide";r=99;t=1, "narrow";r=1;t=20"#),
        ];
        assert_eq!(written(HeaderStyle::draft()), pairs(&expected));
    }

    #[test]
    fn the_older_ones_tell_of_the_limit_that_denied() {
        let values = ["3", "1", "40"];
        let trio = |prefix: &str, reset: &str| {
            let names = ["limit", "remaining", "reset"].map(|name| format!("{prefix}{name}"));
            let values = [values[0], values[1], reset].map(str::to_owned);
            names.into_iter().zip(values).collect::<Vec<_>>()
        };
        assert_eq!(written(HeaderStyle::draft_03()), trio("ratelimit-", "40"));
        assert_eq!(written(HeaderStyle::x_ratelimit(Reset::Seconds)), trio("x-ratelimit-", "40"));
        let later = trio("x-ratelimit-", "1700000041");
        assert_eq!(written(HeaderStyle::x_ratelimit(Reset::Timestamp)), later);
    }

    #[test]
    fn fields_that_are_there_already_are_replaced_and_none_are_written_without_a_limit() {
        let all = HeaderStyle::draft()
            .and(HeaderStyle::draft_03())
            .and(HeaderStyle::x_ratelimit(Reset::Seconds));
        assert_eq!(written(all).len(), 8);
        assert_eq!(written(HeaderStyle::none()), []);
        let mut headers = HeaderMap::new();
        headers.append(STATES, HeaderValue::from_static("a"));
        all.write(&[], &mut headers);
        assert_eq!(headers.len(), 1);
        let [wide, _] = decisions();
        all.write(&[LimitReport { policy: "wide", decision: wide }], &mut headers);
        assert_eq!((headers.len(), headers.get_all(&STATES).iter().count()), (8, 1));
    }
}
