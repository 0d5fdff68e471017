//! What holds for some keys of a limit instead of its rule, and whether the limit is enforced.
//!
//! The store keeps each as a record: a name and a value, both text that other programs can write too.
//!
//! | name | value | holds for |
//! |---|---|---|
//! | `k:<limit>:<key>` | `allow`, `block`, `plan:<plan>` or `quota:<quota>` | this key |
//! | `p:<limit>:<prefix>` | the same | keys that begin so |
//! | `n:<limit>:<network>` | the same | keys that are addresses or networks in this one |
//! | `s:<limit>` | `on`, `shadow` or `off` | the whole limit |
//!
//! A quota is written as `Quota`'s `Display` writes it: `quota:250000/h burst 1000`.

use std::borrow::Cow;
use std::fmt;
use std::time::{Duration, SystemTime};

use crate::error::{ConfigError, StoreError};
use crate::key::{KEY_BYTES_MAX, Key, KeySecret};
#[cfg(feature = "http")]
use crate::network::Network;
use crate::quota::Quota;

/// The most overrides of a namespace, over all its limits.
pub const OVERRIDES_MAX: usize = 100_000;

/// Whether a limit is enforced.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "kebab-case"))]
#[non_exhaustive]
pub enum Switch {
    /// Requests are denied as the limit says.
    #[default]
    On,
    /// The limit decides and counts, and denies nothing: [`Decision::is_shadow_denied`](crate::Decision::is_shadow_denied)
    /// tells what it would have denied.
    Shadow,
    /// Everything is allowed, and nothing is counted.
    Off,
}

impl Switch {
    pub(crate) const ALL: [Self; 3] = [Self::On, Self::Shadow, Self::Off];

    /// As records and metrics have it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::On => "on",
            Self::Shadow => "shadow",
            Self::Off => "off",
        }
    }
}

/// What holds for some keys of a limit instead of its rule: they are always allowed, or never, or under one of its plans, or
/// have a quota of their own.
///
/// Of several overrides that fit a key, that of the key itself wins, then that of the smallest network, then that of the
/// longest prefix.
///
/// ```
/// # let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
/// # runtime.block_on(async {
/// use std::time::Duration;
/// use tidegate::{Limit, Limiter, Override, Quota};
///
/// let limiter = Limiter::builder().limit(Limit::new("api", Quota::per_second(10))).build()?;
/// let (api, overrides) = (limiter.limit("api")?, limiter.overrides());
///
/// overrides.set("api", Override::key("mallory").block().lasting(Duration::from_secs(3600))).await?;
/// overrides.set("api", Override::prefix("internal-").allow()).await?;
/// assert!(api.check("mallory").is_denied());
/// assert!(api.check("internal-7").is_override());
///
/// overrides.remove("api", Override::key("mallory")).await?;
/// assert!(api.check("mallory").is_allowed());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// # })?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use = "an override holds once it is set"]
pub struct Override<'a> {
    keys: Keys<'a>,
    ruling: Option<Ruling>,
    end: End,
}

/// The keys that an override is for.
enum Keys<'a> {
    Key(Box<dyn Key + Send + Sync + 'a>),
    Prefix(Vec<u8>),
    #[cfg(feature = "http")]
    Network(Network),
}

/// What an override says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Ruling {
    Allow,
    Block,
    /// The keys are under this plan, whatever plan callers name.
    Plan(Box<str>),
    /// The keys have this quota, whatever plan callers name.
    Quota(Quota),
}

/// Before the name of a plan in a record.
const PLAN: &str = "plan:";
/// Before a quota in a record.
const QUOTA: &str = "quota:";

impl Ruling {
    /// As records have it.
    pub(crate) fn text(&self) -> Cow<'_, str> {
        match self {
            Self::Allow => "allow".into(),
            Self::Block => "block".into(),
            Self::Plan(name) => format!("{PLAN}{name}").into(),
            Self::Quota(quota) => format!("{QUOTA}{quota}").into(),
        }
    }

    fn read(text: &[u8]) -> Option<Self> {
        match text {
            b"allow" => Some(Self::Allow),
            b"block" => Some(Self::Block),
            _ => {
                let text = str::from_utf8(text).ok()?;
                match text.strip_prefix(QUOTA) {
                    Some(quota) => quota.parse().ok().map(Self::Quota),
                    None => Some(Self::Plan(text.strip_prefix(PLAN)?.into())),
                }
            }
        }
    }
}

/// How long an override holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum End {
    #[default]
    Never,
    /// In milliseconds since 1970, by the store's clock.
    At(u64),
    /// Milliseconds after the store takes it.
    After(u64),
}

/// Without the key, which may be secret.
impl fmt::Debug for Override<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Override").field("ruling", &self.ruling).finish_non_exhaustive()
    }
}

impl<'a> Override<'a> {
    fn new(keys: Keys<'a>) -> Self {
        Self { keys, ruling: None, end: End::Never }
    }

    /// For one key. It also holds for the same key [hashed](crate::Hashed).
    pub fn key(key: impl Key + Send + Sync + 'a) -> Self {
        Self::new(Keys::Key(Box::new(key)))
    }

    /// For all keys whose bytes begin with `prefix`, before they are hashed. Of a key of several parts only whole keys are
    /// looked at as if they were not hashed, not hashed parts.
    pub fn prefix(prefix: impl AsRef<[u8]>) -> Self {
        Self::new(Keys::Prefix(prefix.as_ref().to_vec()))
    }

    /// For all keys that are the text of an address or a network within `network`, before they are hashed. Needs the feature
    /// `http`.
    #[cfg(feature = "http")]
    pub fn network(network: Network) -> Self {
        Self::new(Keys::Network(network))
    }

    /// Requests are allowed, and nothing is charged.
    pub fn allow(mut self) -> Self {
        self.ruling = Some(Ruling::Allow);
        self
    }

    /// Requests are denied, whatever they cost.
    pub fn block(mut self) -> Self {
        self.ruling = Some(Ruling::Block);
        self
    }

    /// Requests are limited by this [plan](crate::Limit::plan) of the limit, whatever plan callers name.
    pub fn plan(mut self, name: impl AsRef<str>) -> Self {
        self.ruling = Some(Ruling::Plan(name.as_ref().into()));
        self
    }

    /// Each of the keys has this quota, whatever plan callers name. All else is the limit's: its algorithm above all.
    ///
    /// A token bucket takes any quota. Where nodes share it: rates down to some millionth of the limit's, and bursts up to 64 times
    /// that of the limit or its largest plan; docs/OVERRIDES.md has how to get more. Of windows and logs it has the limit's [period](crate::Rule::quota)
    /// and no burst. Of a [`LeakyBucket`](crate::LeakyBucket) it is another pace with the limit's queue, and has no burst;
    /// where nodes share a hybrid one, none can be given. What cannot be kept is refused when it is set
    /// ([`OverrideError::Quota`]).
    ///
    /// A key keeps what it has when its quota changes, by this, by another one, or when it ends: see
    /// [`ActiveLimit::plan`](crate::ActiveLimit::plan).
    ///
    /// Cost: as of a plan, and some 2 kB for each different quota of a limit, for as long as the process lives, at most
    /// [`OVERRIDE_QUOTAS_MAX`](crate::OVERRIDE_QUOTAS_MAX).
    ///
    /// ```
    /// # let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    /// # runtime.block_on(async {
    /// use tidegate::{Limit, Limiter, Override, Quota};
    ///
    /// let limiter = Limiter::builder().limit(Limit::new("api", Quota::per_second(10))).build()?;
    /// let (api, overrides) = (limiter.limit("api")?, limiter.overrides());
    ///
    /// let quota = Quota::per_hour(250_000).burst(500);
    /// overrides.set("api", Override::key("acme").quota(quota)).await?;
    /// let decision = api.check("acme");
    /// assert_eq!((decision.quota(), decision.remaining()), (quota, 499));
    /// assert_eq!((decision.plan_name(), decision.is_override()), (None, false));
    /// assert_eq!(api.check("other").burst(), 10);
    ///
    /// let error = overrides.set("api", Override::key("acme").quota(Quota::per_hour(0))).await;
    /// let text = error.unwrap_err().to_string();
    /// assert_eq!(text, "override of limit \"api\": quota.tokens = 0: must be 1 to 1000000000");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// # })?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn quota(mut self, quota: Quota) -> Self {
        self.ruling = Some(Ruling::Quota(quota));
        self
    }

    /// It ends at `time`, by the store's clock, to the millisecond.
    pub fn until(mut self, time: SystemTime) -> Self {
        let since_1970 = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        self.end = End::At(millis(since_1970).max(1));
        self
    }

    /// It ends so long after it was set, to the millisecond.
    pub fn lasting(mut self, time: Duration) -> Self {
        self.end = End::After(millis(time).max(1));
        self
    }

    pub(crate) fn ruling(&self) -> Option<&Ruling> {
        self.ruling.as_ref()
    }

    pub(crate) fn end(&self) -> End {
        self.end
    }

    /// The record's name.
    pub(crate) fn record(&self, limit: &str, secret: &KeySecret) -> Result<Vec<u8>, OverrideError> {
        let subject = match &self.keys {
            Keys::Key(key) => Subject::Key(secret.name(&**key).to_vec()),
            Keys::Prefix(prefix) if prefix.len() > KEY_BYTES_MAX => {
                return Err(OverrideError::PrefixTooLong { bytes: prefix.len() });
            }
            Keys::Prefix(prefix) => Subject::Prefix(prefix.clone()),
            #[cfg(feature = "http")]
            Keys::Network(network) => Subject::Network(*network),
        };
        Ok(subject.record(limit))
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX).min(MILLIS_MAX)
}

/// Times in records are whole numbers that a double holds.
const MILLIS_MAX: u64 = 1 << 52;

/// What a record is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Subject {
    /// A key, by what the limiter knows it by.
    Key(Vec<u8>),
    Prefix(Vec<u8>),
    #[cfg(feature = "http")]
    Network(Network),
    /// The whole limit.
    Limit,
}

/// What a record says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Setting {
    Keys(Ruling),
    Limit(Switch),
    /// Nothing any more.
    Removed,
}

impl Subject {
    /// The record's name.
    pub(crate) fn record(&self, limit: &str) -> Vec<u8> {
        let (kind, rest) = match self {
            Self::Key(name) => ('k', Some(name.clone())),
            Self::Prefix(prefix) => ('p', Some(prefix.clone())),
            #[cfg(feature = "http")]
            Self::Network(network) => ('n', Some(network.to_string().into_bytes())),
            Self::Limit => ('s', None),
        };
        let mut record = format!("{kind}:{limit}").into_bytes();
        if let Some(rest) = rest {
            record.push(b':');
            record.extend(rest);
        }
        record
    }
}

/// Reads a record: the limit's name, what it is about, and what it says. `None` if it is of no kind that is known here.
pub(crate) fn read_record<'r>(name: &'r [u8], value: &[u8]) -> Option<(&'r str, Subject, Setting)> {
    let (kind, rest) = name.split_at_checked(2)?;
    let end = rest.iter().position(|byte| *byte == b':');
    let (limit, keys) = match end {
        Some(end) => (&rest[..end], Some(&rest[end + 1..])),
        None => (rest, None),
    };
    let subject = match (kind, keys) {
        (b"k:", Some(name)) => Subject::Key(name.to_vec()),
        (b"p:", Some(prefix)) => Subject::Prefix(prefix.to_vec()),
        #[cfg(feature = "http")]
        (b"n:", Some(network)) => Subject::Network(str::from_utf8(network).ok()?.parse().ok()?),
        (b"s:", None) => Subject::Limit,
        _ => return None,
    };
    let setting = match subject {
        _ if value.is_empty() => Setting::Removed,
        Subject::Limit => Setting::Limit(
            Switch::ALL.into_iter().find(|switch| switch.name().as_bytes() == value)?,
        ),
        _ => Setting::Keys(Ruling::read(value)?),
    };
    Some((str::from_utf8(limit).ok()?, subject, setting))
}

/// Why an override was not set or removed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OverrideError {
    /// The limiter has no such limit.
    #[error("override of limit {name:?}: the limit is not known; known are: {known}")]
    UnknownLimit {
        /// The name given.
        name: String,
        /// The names there are.
        known: String,
    },
    /// The limit has no such plan.
    #[error("override of limit {limit:?}: it has no plan {name:?}; its plans are: {known}")]
    UnknownPlan {
        /// The limit's name.
        limit: String,
        /// The name given.
        name: String,
        /// The names there are.
        known: String,
    },
    /// The limit cannot keep this quota for some keys. A [`ConfigError::Limit`] names the limit, the field and the value.
    #[error("override of {0}")]
    Quota(ConfigError),
    /// It is not said what holds for the keys.
    #[error(
        "override of limit {limit:?}: nothing is set: call allow(), block(), plan() or quota()"
    )]
    NothingSet {
        /// The limit's name.
        limit: String,
    },
    /// No key is so long: longer ones are hashed.
    #[error("override: prefix = {bytes} bytes: must be 0 to {KEY_BYTES_MAX}")]
    PrefixTooLong {
        /// Its length.
        bytes: usize,
    },
    /// The namespace has as many as it may have.
    #[error("override: there are {OVERRIDES_MAX} already: remove some")]
    TooMany,
    /// The store did not take it; after a timeout it may have.
    #[error("override: {0}")]
    Store(#[from] StoreError),
    /// The limiter's task has ended.
    #[error("override: the limiter's task has ended with its runtime")]
    Ended,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::quota::TOKENS_MAX;

    #[test]
    fn record_that_was_written_is_read_as_it_was() {
        let subjects = [
            Subject::Key(b"a:b:c".to_vec()),
            Subject::Key(Vec::new()),
            Subject::Key(vec![0, 255, b':']),
            Subject::Prefix(b"bot-".to_vec()),
            Subject::Prefix(Vec::new()),
            #[cfg(feature = "http")]
            Subject::Network("10.0.0.0/8".parse().unwrap()),
            #[cfg(feature = "http")]
            Subject::Network("2001:db8::/32".parse().unwrap()),
        ];
        for subject in subjects {
            let quota = Ruling::Quota(Quota::per_hour(250_000).burst(7));
            for ruling in [Ruling::Allow, Ruling::Block, Ruling::Plan("pro".into()), quota] {
                let record = subject.record("a/b.c");
                let text = ruling.text().into_owned();
                let read = read_record(&record, text.as_bytes()).unwrap();
                assert_eq!(read, ("a/b.c", subject.clone(), Setting::Keys(ruling)));
                assert_eq!(read_record(&record, b"").unwrap().2, Setting::Removed);
            }
        }
        for switch in Switch::ALL {
            let record = Subject::Limit.record("api");
            let read = read_record(&record, switch.name().as_bytes()).unwrap();
            assert_eq!(read, ("api", Subject::Limit, Setting::Limit(switch)));
        }
    }

    #[test]
    fn record_of_an_unknown_kind_or_value_is_none() {
        for (name, value) in [
            ("", "allow"),
            ("k", "allow"),
            ("k:api", "allow"),
            ("x:api:key", "allow"),
            ("k:api:key", "on"),
            ("k:api:key", "Allow"),
            ("k:api:key", "quota:"),
            ("k:api:key", "quota:0/s"),
            ("k:api:key", "quota:1/s burst 0"),
            ("k:api:key", "quota:-1/s"),
            ("k:api:key", "100/s"),
            ("s:api", "quota:100/s"),
            ("n:api:10.0.0.1/8", "block"),
            ("n:api:\u{ff}", "block"),
            ("s:api", "allow"),
            ("s:api:", "on"),
        ] {
            assert_eq!(read_record(name.as_bytes(), value.as_bytes()), None, "{name} = {value}");
        }
    }

    proptest! {
        #[test]
        fn quota_that_was_written_is_read_as_it_was(
            tokens in 1..=TOKENS_MAX, period_us in 1..=31_622_400_000_000_u64, burst in 1..=TOKENS_MAX,
        ) {
            let quota = Quota::new(tokens, Duration::from_micros(period_us)).burst(burst);
            let ruling = Ruling::Quota(quota);
            let expected = quota.validate("x").is_ok().then_some(ruling.clone());
            prop_assert_eq!(Ruling::read(ruling.text().as_bytes()), expected);
        }

        #[test]
        fn record_of_any_bytes_is_read_or_refused(
            name in prop::collection::vec(any::<u8>(), 0..40),
            value in "(quota:|plan:)?[0-9/a-z -]{0,20}",
        ) {
            if let Some((limit, subject, Setting::Keys(ruling))) = read_record(&name, value.as_bytes()) {
                let again = (subject.record(limit), ruling.text().into_owned());
                prop_assert_eq!(read_record(&again.0, again.1.as_bytes()), Some((limit, subject, Setting::Keys(ruling))));
            }
        }
    }

    #[test]
    fn longest_end_stays_a_number_that_a_double_holds() {
        assert_eq!(Override::prefix("").lasting(Duration::MAX).end(), End::After(MILLIS_MAX));
        assert_eq!(Override::prefix("").lasting(Duration::ZERO).end(), End::After(1));
        let before_1970 = SystemTime::UNIX_EPOCH - Duration::from_secs(1);
        assert_eq!(Override::prefix("").until(before_1970).end(), End::At(1));
    }
}
