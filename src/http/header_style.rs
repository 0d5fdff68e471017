//! The header fields of a response: what clients may know of the limits on their requests.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use http::{HeaderMap, HeaderName, HeaderValue};
use smallvec::SmallVec;

use super::retry_after::seconds;
use crate::decision::Decision;
use crate::quota::{Quota, gcd};
use crate::time::micros;

/// Which header fields a response has. Values are whole tokens, and seconds rounded up.
///
/// ```
/// use tidegate::http::{HeaderStyle, LimitReport, Reset};
/// use tidegate::{Limit, Limiter, Quota};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let limit = Limit::new("api", Quota::per_second(10).burst(50));
/// let api = Limiter::builder().limit(limit).build()?.limit("api")?;
/// let reports = [LimitReport::from(api.check("user:42"))];
/// let mut headers = http::HeaderMap::new();
/// HeaderStyle::draft().and(HeaderStyle::x_ratelimit(Reset::Seconds)).write(&reports, &mut headers);
/// assert_eq!(headers["ratelimit-policy"], r#""api";q=10;w=1"#);
/// assert_eq!(headers["ratelimit"], r#""api";r=49;t=1"#);
/// assert_eq!(headers["x-ratelimit-remaining"], "49");
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeaderStyle {
    draft: Option<Draft>,
    draft_03: bool,
    x: Option<Reset>,
}

/// What `RateLimit-Policy` says of a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Draft {
    Rate,
    RateAndBurst,
}

/// The form of `X-RateLimit-Reset`, which says when the bucket is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Reset {
    /// Seconds until then.
    Seconds,
    /// That time, in seconds since the beginning of 1970 on this machine's clock.
    Timestamp,
}

/// The decision of one of a request's limits, and the name that clients know the limit by.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct LimitReport<'a> {
    /// The limit's name: letters, digits and `_ . - /` ([`Limit::new`](crate::Limit::new)). Other characters are
    /// left out.
    pub limit: &'a str,
    /// Its decision.
    pub decision: Decision,
}

impl<'a> LimitReport<'a> {
    /// A report under another name than the limit's own.
    pub fn new(limit: &'a str, decision: Decision) -> Self {
        Self { limit, decision }
    }
}

impl From<Decision> for LimitReport<'static> {
    fn from(decision: Decision) -> Self {
        Self { limit: decision.limit_name(), decision }
    }
}

/// Names in lower case, as HTTP/2 has them.
const POLICIES: HeaderName = HeaderName::from_static("ratelimit-policy");
const STATES: HeaderName = HeaderName::from_static("ratelimit");
/// The limit, what is left of it, and when it is whole again.
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

/// The largest integer of a structured field.
const INTEGER_MAX: u64 = 999_999_999_999_999;
/// Most lists of limits are shorter than this, in bytes.
const LIST_BYTES: usize = 256;
type ListText = SmallVec<[u8; LIST_BYTES]>;

impl Default for HeaderStyle {
    fn default() -> Self {
        Self::draft()
    }
}

impl HeaderStyle {
    /// No fields.
    pub fn none() -> Self {
        Self { draft: None, draft_03: false, x: None }
    }

    /// `RateLimit-Policy` and `RateLimit`, as in the current draft of the standard (10 and 11), for all limits: the
    /// quota's tokens as `q` and their period in seconds as `w`; the tokens that are left as `r`, and the seconds
    /// to the next token as `t`. This is the default.
    ///
    /// A period that is not a whole number of seconds is multiplied until it is: 5 tokens each 100 ms are
    /// `q=50;w=1`.
    pub fn draft() -> Self {
        Self { draft: Some(Draft::Rate), ..Self::none() }
    }

    /// The same as [`draft`](Self::draft), and for each limit whose burst differs from `q` a second policy with the
    /// burst: `"api";q=1000;w=1, "api:burst";q=200`. The second one has no window, because the burst does not come
    /// back at once. No limit has a name with a colon.
    pub fn draft_with_burst() -> Self {
        Self { draft: Some(Draft::RateAndBurst), ..Self::none() }
    }

    /// `RateLimit-Limit`, `RateLimit-Remaining` and `RateLimit-Reset`, as in the standard's draft 03, for the limit
    /// that will deny first: the burst, the tokens that are left, and the seconds until the bucket is full.
    pub fn draft_03() -> Self {
        Self { draft_03: true, ..Self::none() }
    }

    /// The same as [`draft_03`](Self::draft_03), as `X-RateLimit-Limit`, `X-RateLimit-Remaining` and
    /// `X-RateLimit-Reset`.
    pub fn x_ratelimit(reset: Reset) -> Self {
        Self { x: Some(reset), ..Self::none() }
    }

    /// The fields of both styles.
    #[must_use]
    pub fn and(self, more: Self) -> Self {
        Self {
            draft: more.draft.or(self.draft),
            draft_03: self.draft_03 || more.draft_03,
            x: more.x.or(self.x),
        }
    }

    /// Writes the fields. Fields of the same names are replaced. Without a report nothing is written.
    ///
    /// Cost: one allocation for each field, besides what the map needs.
    pub fn write(self, reports: &[LimitReport<'_>], headers: &mut HeaderMap) {
        self.values(reports, None).write(headers);
    }

    /// The values of the fields; `policies` is that of `RateLimit-Policy`, if it is known.
    #[allow(clippy::disallowed_methods, reason = "clients read a time of this machine's clock")]
    pub(super) fn values(
        self,
        reports: &[LimitReport<'_>],
        policies: Option<HeaderValue>,
    ) -> HeaderValues {
        let now = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        self.values_at(reports, policies, now)
    }

    fn values_at(
        self,
        reports: &[LimitReport<'_>],
        policies: Option<HeaderValue>,
        now: impl Fn() -> Duration,
    ) -> HeaderValues {
        let mut values = HeaderValues::default();
        if self.draft.is_some() && !reports.is_empty() {
            let policies = policies.unwrap_or_else(|| self.policies(reports));
            values.lists = Some([policies, states(reports)]);
        }
        if (self.draft_03 || self.x.is_some())
            && let Some(tightest) = tightest(reports)
        {
            let trio = |reset: Duration| [tightest.burst(), tightest.remaining(), seconds(reset)];
            let reset = tightest.reset_after();
            values.draft_03 = self.draft_03.then(|| trio(reset));
            values.x = self.x.map(|form| match form {
                Reset::Seconds => trio(reset),
                Reset::Timestamp => trio(now() + reset),
            });
        }
        values
    }

    /// The value of `RateLimit-Policy`.
    pub(super) fn policies(self, reports: &[LimitReport<'_>]) -> HeaderValue {
        let mut text = ListText::new();
        for LimitReport { limit, decision } in reports {
            let (tokens, window_s) = rate(decision.quota());
            push_item(&mut text, limit, "", &[(b'q', tokens), (b'w', window_s)]);
            if self.draft == Some(Draft::RateAndBurst) && decision.burst() != tokens {
                push_item(&mut text, limit, ":burst", &[(b'q', decision.burst())]);
            }
        }
        value(&text)
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
    /// Writes the fields. Fields of the same names are replaced.
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

/// Writes a field. A map that is full of other fields stays as it is.
fn insert(headers: &mut HeaderMap, name: HeaderName, value: HeaderValue) {
    let _ = headers.try_insert(name, value);
}

/// The limit that will deny first: of those that denied, the one that denies longest; or else the one with the fewest such
/// requests left, and of several the one that is full again last.
fn tightest<'a>(reports: &'a [LimitReport<'_>]) -> Option<&'a Decision> {
    let left = |decision: &Decision| decision.remaining() / u64::from(decision.cost().max(1));
    reports.iter().map(|report| &report.decision).min_by(|a, b| {
        let later_first = b.retry_after().cmp(&a.retry_after());
        let fewer_first = later_first.then_with(|| left(a).cmp(&left(b)));
        fewer_first.then_with(|| b.reset_after().cmp(&a.reset_after()))
    })
}

/// The quota's tokens in the fewest whole seconds that are a multiple of its period.
fn rate(quota: Quota) -> (u64, u64) {
    const SECOND_US: u64 = 1_000_000;
    let period_us = micros(quota.period()).max(1);
    let part = gcd(period_us, SECOND_US);
    (quota.tokens().saturating_mul(SECOND_US / part).min(INTEGER_MAX), period_us / part)
}

/// As `HeaderValue::from`, with one allocation instead of two.
fn number(number: u64) -> HeaderValue {
    let mut digits = itoa::Buffer::new();
    HeaderValue::from_str(digits.format(number)).unwrap_or_else(|_| number.into())
}

/// Appends an item of a structured list: a quoted name and parameters with numbers.
fn push_item(text: &mut ListText, name: &str, suffix: &str, parameters: &[(u8, u64)]) {
    if !text.is_empty() {
        text.extend_from_slice(b", ");
    }
    text.push(b'"');
    let is_plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"_.-/".contains(byte);
    text.extend(name.bytes().filter(is_plain));
    text.extend_from_slice(suffix.as_bytes());
    text.push(b'"');
    for (parameter, number) in parameters {
        text.extend_from_slice(&[b';', *parameter, b'=']);
        text.extend_from_slice(itoa::Buffer::new().format(*number).as_bytes());
    }
}

fn value(text: &[u8]) -> HeaderValue {
    HeaderValue::from_bytes(text).unwrap_or_else(|_| HeaderValue::from_static(""))
}

/// The value of `RateLimit`.
fn states(reports: &[LimitReport<'_>]) -> HeaderValue {
    let mut text = ListText::new();
    for LimitReport { limit, decision } in reports {
        let (remaining, next) = decision.remaining_and_next();
        push_item(&mut text, limit, "", &[(b'r', remaining), (b't', seconds(next))]);
    }
    value(&text)
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

    fn written(style: HeaderStyle) -> Vec<(String, String)> {
        let [wide, narrow] = decisions();
        let reports = [LimitReport::from(wide), LimitReport::new("nar\"row\n", narrow)];
        let mut headers = HeaderMap::new();
        let now = || Duration::from_millis(1_700_000_000_500);
        style.values_at(&reports, None, now).write(&mut headers);
        let text = |value: &HeaderValue| value.to_str().unwrap().to_owned();
        headers.iter().map(|(name, value)| (name.to_string(), text(value))).collect()
    }

    fn pairs(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn draft_names_all_limits() {
        let expected = [
            ("ratelimit-policy", r#""wide";q=7;w=1, "narrow";q=3;w=60"#),
            ("ratelimit", r#""wide";r=99;t=1, "narrow";r=1;t=20"#),
        ];
        assert_eq!(written(HeaderStyle::draft()), pairs(&expected));
    }

    #[test]
    fn draft_with_burst_adds_a_policy_where_the_burst_differs() {
        let expected = [
            ("ratelimit-policy", r#""wide";q=7;w=1, "wide:burst";q=100, "narrow";q=3;w=60"#),
            ("ratelimit", r#""wide";r=99;t=1, "narrow";r=1;t=20"#),
        ];
        assert_eq!(written(HeaderStyle::draft_with_burst()), pairs(&expected));
    }

    /// It once failed: `per_second(1000).burst(200)` said `q=200;w=1`, a fifth of its rate.
    #[test]
    fn d7_policy_states_the_rate_and_its_period() {
        for (quota, expected) in [
            (Quota::per_second(1000).burst(200), (1000, 1)),
            (Quota::per_minute(7).burst(100), (7, 60)),
            (Quota::per_day(1), (1, 86_400)),
            (Quota::new(5, Duration::from_millis(100)), (50, 1)),
            (Quota::new(1, Duration::from_millis(1500)), (2, 3)),
            (Quota::new(3, Duration::from_micros(1)), (3_000_000, 1)),
        ] {
            assert_eq!(rate(quota), expected, "{quota:?}");
        }
    }

    #[test]
    fn older_styles_name_the_limit_that_denied() {
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

    /// The part of the burst that is left told of the day's limit, of which 399 were left.
    #[test]
    fn older_styles_name_the_limit_with_the_fewest_requests_left() {
        let limiter = Limiter::builder()
            .limit(Limit::new("second", Quota::per_second(10)))
            .limit(Limit::new("day", Quota::per_day(1000)))
            .build()
            .unwrap();
        let [second, day] = ["second", "day"].map(|name| limiter.limit(name).unwrap());
        let spent = day.check_n("a", 600).unwrap();
        assert!(spent.is_allowed());
        let reports = [second.check("a"), day.check("a")].map(LimitReport::from);
        let mut headers = HeaderMap::new();
        HeaderStyle::x_ratelimit(Reset::Seconds).write(&reports, &mut headers);
        let told = ["x-ratelimit-limit", "x-ratelimit-remaining"].map(|name| &headers[name]);
        assert_eq!(told, ["10", "9"]);
    }

    #[test]
    fn fields_are_replaced_and_none_are_written_without_a_report() {
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
        all.write(&[LimitReport::from(wide)], &mut headers);
        assert_eq!((headers.len(), headers.get_all(&STATES).iter().count()), (8, 1));
    }
}
