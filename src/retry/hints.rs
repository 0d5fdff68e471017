//! The limits that the header fields of a response state.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use http::{HeaderMap, HeaderName, HeaderValue, header};
use sfv::{BareItem, Dictionary, Item, List, ListEntry, Parameters, Parser};

/// When a request may be sent again, and how often, as a response states it. Text that cannot be read is ignored.
///
/// ```
/// use std::time::{Duration, SystemTime};
/// use tidegate::retry::RateLimitHints;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let mut headers = http::HeaderMap::new();
/// headers.insert("retry-after", "7".parse()?);
/// headers.insert("ratelimit-policy", r#""api";q=50;w=5"#.parse()?);
/// headers.insert("ratelimit", r#""api";r=0;t=1"#.parse()?);
/// let hints = RateLimitHints::read(&headers, SystemTime::now());
/// assert_eq!(hints.retry_after, Some(Duration::from_secs(7)));
/// let allowance = hints.allowance.ok_or("nothing was said")?;
/// assert_eq!((allowance.remaining, allowance.next_after), (0, Some(Duration::from_secs(1))));
/// assert_eq!(allowance.step, Some(Duration::from_millis(100)));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct RateLimitHints {
    /// `Retry-After`, in seconds or as a date. A date is compared with the response's own `Date`, if it has one, so
    /// that the clocks need not agree.
    pub retry_after: Option<Duration>,
    /// Of the limits that the response names, the one that allows least.
    pub allowance: Option<Allowance>,
}

/// How many requests a limit allows, and when it allows more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Allowance {
    /// Requests that it allows at once.
    pub remaining: u64,
    /// How long until it allows more, if the response says so.
    pub next_after: Option<Duration>,
    /// The time between two requests that it allows from then on. Without it, the limit allows its whole quota
    /// then.
    pub step: Option<Duration>,
    /// Requests that it allows in a window, if the response says so.
    pub quota: Option<u64>,
    /// Requests that it ever allows at once, if the response says so: tidegate's
    /// `HeaderStyle::draft_with_burst` does, where this is not the quota.
    pub burst: Option<u64>,
}

const STATE: HeaderName = HeaderName::from_static("ratelimit");
const POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");
/// A quota, what is left of it, and when it is whole again.
const TRIOS: [[HeaderName; 3]; 2] = [
    [
        HeaderName::from_static("ratelimit-limit"),
        HeaderName::from_static("ratelimit-remaining"),
        HeaderName::from_static("ratelimit-reset"),
    ],
    [
        HeaderName::from_static("x-ratelimit-limit"),
        HeaderName::from_static("x-ratelimit-remaining"),
        HeaderName::from_static("x-ratelimit-reset"),
    ],
];

/// A number of seconds from here on is a time since 1970: as a wait it would take thirty years.
const TIMESTAMP_MIN_S: u64 = 1_000_000_000;
/// A number from here on is such a time in milliseconds.
const TIMESTAMP_MIN_MS: u64 = 1_000_000_000_000;

impl RateLimitHints {
    /// Reads, in this order, `RateLimit` with `RateLimit-Policy` (the drafts from 08 on, or one field as draft
    /// 07 has it), the trio of draft 03, and the same as `X-RateLimit-*`, of which `Reset`
    /// may be seconds or a time. Of a response that a cache has kept (`Age` above 0) these are not read. `now` is for dates and times.
    pub fn read(headers: &HeaderMap, now: SystemTime) -> Self {
        let now = response_date(headers).unwrap_or(now);
        // What a cache kept tells of a time that is over.
        let is_cached = text(headers, &header::AGE).and_then(whole).is_some_and(|age| age > 0);
        if is_cached {
            return Self { retry_after: retry_after(headers, now), allowance: None };
        }
        let allowance = of_list(headers)
            .or_else(|| of_dictionary(headers))
            .or_else(|| TRIOS.iter().find_map(|trio| of_trio(headers, trio, now)));
        Self { retry_after: retry_after(headers, now), allowance }
    }
}

fn response_date(headers: &HeaderMap) -> Option<SystemTime> {
    httpdate::parse_http_date(text(headers, &header::DATE)?).ok()
}

fn retry_after(headers: &HeaderMap, now: SystemTime) -> Option<Duration> {
    let text = text(headers, &header::RETRY_AFTER)?;
    if let Some(seconds) = whole(text) {
        return Some(Duration::from_secs(seconds));
    }
    let date = httpdate::parse_http_date(text).ok()?;
    Some(date.duration_since(now).unwrap_or_default())
}

/// The value of a field that is there once.
fn text<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a str> {
    let mut values = headers.get_all(name).iter();
    let (value, None) = (values.next()?, values.next()) else { return None };
    value.to_str().ok().map(str::trim)
}

/// All lines of a field as one list.
fn joined(headers: &HeaderMap, name: &HeaderName) -> Option<Vec<u8>> {
    let lines: Vec<&[u8]> = headers.get_all(name).iter().map(HeaderValue::as_bytes).collect();
    (!lines.is_empty()).then(|| lines.join(&b", "[..]))
}

/// A number without a sign; one that is too large is the largest.
fn whole(digits: &str) -> Option<u64> {
    let is_number = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    is_number.then(|| digits.parse().unwrap_or(u64::MAX))
}

/// Of several limits, the one that allows least.
fn tightest(allowances: impl Iterator<Item = Allowance>) -> Option<Allowance> {
    allowances.min_by_key(|allowance| {
        (allowance.remaining, u64::MAX - allowance.next_after.map_or(0, millis))
    })
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// The form of the drafts from 08 on: a list of named limits.
fn of_list(headers: &HeaderMap) -> Option<Allowance> {
    let states: List = Parser::new(&joined(headers, &STATE)?).parse().ok()?;
    let policies = joined(headers, &POLICY).unwrap_or_default();
    let policies: List = Parser::new(&policies).parse().unwrap_or_default();
    tightest(items(&states).filter_map(|state| {
        let remaining = parameter(&state.params, "r")?;
        let policy = items(&policies).find(|policy| policy.bare_item == state.bare_item);
        // Bytes, or requests at a time, are not what is counted here.
        let unit = policy.and_then(|policy| policy.params.get("qu")?.as_string());
        if unit.is_some_and(|unit| !unit.as_str().starts_with("request")) {
            return None;
        }
        let of_policy = |name| policy.and_then(|policy| parameter(&policy.params, name));
        let (quota, window_s) = (of_policy("q"), of_policy("w"));
        let step = quota.zip(window_s).and_then(|(quota, window_s)| {
            let quota = u32::try_from(quota).ok().filter(|&quota| quota > 0)?;
            Some(Duration::from_secs(window_s) / quota)
        });
        let next_after = parameter(&state.params, "t").or(window_s).map(Duration::from_secs);
        // Without a window it is not known how much of the quota comes at once.
        let quota = quota.filter(|_| step.is_some());
        Some(Allowance { remaining, next_after, step, quota, burst: burst_of(&policies, state) })
    }))
}

/// The quota of the policy `"api:burst"` for the state of `"api"`, as this crate writes it.
fn burst_of(policies: &List, state: &Item) -> Option<u64> {
    let name = state.bare_item.as_string()?.as_str();
    let is_burst = |policy: &&Item| {
        let policy = policy.bare_item.as_string().map(sfv::StringRef::as_str);
        policy.and_then(|policy| policy.strip_suffix(":burst")) == Some(name)
    };
    parameter(&items(policies).find(is_burst)?.params, "q")
}

/// The items of a list, with their parameters.
fn items(list: &List) -> impl Iterator<Item = &Item> {
    list.iter().filter_map(|entry| match entry {
        ListEntry::Item(item) => Some(item),
        ListEntry::InnerList(_) => None,
    })
}

fn parameter(parameters: &Parameters, name: &str) -> Option<u64> {
    number(parameters.get(name)?)
}

fn number(item: &BareItem) -> Option<u64> {
    item.as_integer().and_then(|number| u64::try_from(i64::from(number)).ok())
}

/// As draft 07 has it: `limit=100, remaining=50, reset=30`.
fn of_dictionary(headers: &HeaderMap) -> Option<Allowance> {
    let said: Dictionary = Parser::new(&joined(headers, &STATE)?).parse().ok()?;
    let value = |name: &str| match said.get(name)? {
        ListEntry::Item(item) => number(&item.bare_item),
        ListEntry::InnerList(_) => None,
    };
    let (remaining, reset_s) = (value("remaining")?, value("reset")?);
    let next_after = Some(Duration::from_secs(reset_s));
    Some(Allowance { remaining, next_after, step: None, quota: value("limit"), burst: None })
}

fn of_trio(headers: &HeaderMap, trio: &[HeaderName; 3], now: SystemTime) -> Option<Allowance> {
    let [limit, remaining, reset] = trio;
    // What comes after the first number tells of windows, or of other limits.
    let first = |name| whole(text(headers, name)?.split([',', ';']).next()?.trim());
    let next_after = match first(reset)? {
        at_ms @ TIMESTAMP_MIN_MS.. => until(Duration::from_millis(at_ms), now),
        at_s @ TIMESTAMP_MIN_S.. => until(Duration::from_secs(at_s), now),
        seconds => Duration::from_secs(seconds),
    };
    let (remaining, quota) = (first(remaining)?, first(limit));
    Some(Allowance { remaining, next_after: Some(next_after), step: None, quota, burst: None })
}

/// The time from `now` to this moment after the beginning of 1970.
fn until(since_1970: Duration, now: SystemTime) -> Duration {
    since_1970.saturating_sub(now.duration_since(UNIX_EPOCH).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW_S: u64 = 784_111_777;

    fn read(fields: &[(&'static str, &str)]) -> RateLimitHints {
        let mut headers = HeaderMap::new();
        for (name, value) in fields {
            headers.append(*name, value.parse().unwrap());
        }
        RateLimitHints::read(&headers, UNIX_EPOCH + Duration::from_secs(NOW_S))
    }

    fn allowance(fields: &[(&'static str, &str)]) -> Option<(u64, u64, Option<u64>, Option<u64>)> {
        read(fields).allowance.map(|allowance| {
            let Allowance { remaining, next_after, step, quota, .. } = allowance;
            (remaining, next_after.map_or(0, millis), step.map(millis), quota)
        })
    }

    #[test]
    fn retry_after_is_seconds_or_a_date_of_any_form_by_the_servers_clock() {
        let after = |value| read(&[("retry-after", value)]).retry_after;
        let seconds = |seconds| Some(Duration::from_secs(seconds));
        assert_eq!(after("0"), seconds(0));
        assert_eq!(after(" 120 "), seconds(120));
        assert_eq!(after("99999999999999999999999"), seconds(u64::MAX));
        // The three forms of RFC 9110.
        assert_eq!(after("Sun, 06 Nov 1994 08:49:47 GMT"), seconds(10));
        assert_eq!(after("Sunday, 06-Nov-94 08:49:47 GMT"), seconds(10));
        assert_eq!(after("Sun Nov  6 08:49:47 1994"), seconds(10));
        assert_eq!(after("Sun, 06 Nov 1994 08:49:00 GMT"), seconds(0), "it is past");
        let date = ("date", "Sun, 06 Nov 1994 09:49:40 GMT");
        let later = ("retry-after", "Sun, 06 Nov 1994 09:49:47 GMT");
        assert_eq!(read(&[date, later]).retry_after, seconds(7), "an hour ahead of this clock");
        for none in ["", "-1", "+1", "1.5", "1s", "soon", "Sun, 06 Nov 1994", "1, 2"] {
            assert_eq!(after(none), None, "{none}");
        }
        assert_eq!(read(&[("retry-after", "1"), ("retry-after", "2")]).retry_after, None);
    }

    /// Each answer of a cache closed the pacer for a minute more, though the server had denied nothing.
    #[test]
    fn rate_limit_fields_of_a_response_with_an_age_are_not_read() {
        let draft = ("ratelimit", r#""api";r=0;t=60"#);
        for age in ["1", "300"] {
            let hints = read(&[("age", age), draft, ("retry-after", "5")]);
            assert!(hints.allowance.is_none() && hints.retry_after == Some(Duration::from_secs(5)));
        }
        for fresh in [&[draft][..], &[("age", "0"), draft], &[("age", "soon"), draft]] {
            assert!(read(fresh).allowance.is_some());
        }
    }

    #[test]
    fn draft_is_read_and_the_tightest_limit_counts() {
        let policy = ("ratelimit-policy", r#""day";q=1000;w=86400, "api";q=50;w=5"#);
        let of = |state| allowance(&[policy, ("ratelimit", state)]);
        assert_eq!(of(r#""api";r=49;t=1"#), Some((49, 1000, Some(100), Some(50))));
        assert_eq!(
            of(r#""day";r=9;t=60, "api";r=49;t=1"#),
            Some((9, 60_000, Some(86_400), Some(1000)))
        );
        assert_eq!(
            of(r#""day";r=0;t=60, "api";r=0;t=1"#),
            Some((0, 60_000, Some(86_400), Some(1000)))
        );
        assert_eq!(of(r#""api";r=3"#), Some((3, 5000, Some(100), Some(50))), "the window tells");
        assert_eq!(of(r#""other";r=3;t=2"#), Some((3, 2000, None, None)));
        let bytes = (
            "ratelimit-policy",
            r#""b";q=9000;w=60;qu="content-bytes", "a";q=9;w=9;qu="requests""#,
        );
        let both = ("ratelimit", r#""b";r=3;t=1, "a";r=7;t=1"#);
        assert_eq!(allowance(&[bytes, both]), Some((7, 1000, Some(1000), Some(9))), "of requests");
        let lines = [("ratelimit", r#""a";r=5;t=1"#), ("ratelimit", r#""b";r=2;t=1"#)];
        assert_eq!(allowance(&lines), Some((2, 1000, None, None)));
        assert_eq!(
            of(r#""burst";r=50;t=1, "other";r=0"#),
            Some((0, 0, None, None)),
            "no time is said"
        );
        let no_window = ("ratelimit-policy", r#""api";q=100"#);
        let state = ("ratelimit", r#""api";r=0;t=1"#);
        assert_eq!(allowance(&[no_window, state]), Some((0, 1000, None, None)));
        for none in
            [r#""api""#, r#""api";t=1"#, r#""api";r=-1;t=1"#, r#""api";r=1.5;t=1"#, "\"", ""]
        {
            assert_eq!(allowance(&[("ratelimit", none)]), None, "{none}");
        }
    }

    #[test]
    fn burst_of_a_second_policy_is_read() {
        let policy = ("ratelimit-policy", r#""api:burst";q=200, "api";q=1000;w=1, "web";q=5;w=1"#);
        let burst = |state| read(&[policy, ("ratelimit", state)]).allowance.unwrap().burst;
        assert_eq!(burst(r#""api";r=9;t=1"#), Some(200));
        assert_eq!(burst(r#""web";r=9;t=1"#), None);
    }

    #[test]
    fn older_forms_are_read_and_times_differ_from_seconds() {
        let dictionary = ("ratelimit", "limit=100, remaining=50, reset=30");
        assert_eq!(allowance(&[dictionary]), Some((50, 30_000, None, Some(100))));
        let draft_03 = [
            ("ratelimit-limit", "100, 100;w=60"),
            ("ratelimit-remaining", "7"),
            ("ratelimit-reset", "12"),
        ];
        assert_eq!(allowance(&draft_03), Some((7, 12_000, None, Some(100))));
        let x = |reset| allowance(&[("x-ratelimit-remaining", "7"), ("x-ratelimit-reset", reset)]);
        assert_eq!(x("12"), Some((7, 12_000, None, None)));
        let now = ("date", "Mon, 01 Jan 2024 00:00:00 GMT");
        for reset in ["1704067230", "1704067230000"] {
            let fields = [now, ("x-ratelimit-remaining", "7"), ("x-ratelimit-reset", reset)];
            assert_eq!(allowance(&fields), Some((7, 30_000, None, None)), "{reset}");
        }
        assert_eq!(x("soon"), None);
        assert_eq!(allowance(&[("x-ratelimit-remaining", "7")]), None);
        assert_eq!(read(&[]), RateLimitHints::default());
    }
}
