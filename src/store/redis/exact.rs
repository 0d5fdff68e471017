//! Decisions of exact limits: a script for each kind of state.

use std::sync::LazyLock;

use super::{Code, RedisStore};
use crate::algorithm::{KeyRule, Rule};
use crate::error::StoreError;
use crate::store::exact::{ExactReply, ExactRequest, KEEP_US};

/// The scripts, in the order of [`place`].
const TEXTS: [&str; 3] = [
    include_str!("../../../lua/exact-turn.lua"),
    include_str!("../../../lua/exact-window.lua"),
    include_str!("../../../lua/exact-log.lua"),
];

static CODES: LazyLock<[Code; 3]> = LazyLock::new(|| TEXTS.map(|text| Code::new(text.to_owned())));

/// The same, with the time as `ARGV[2]`.
#[cfg(any(test, feature = "testing"))]
static CODES_BY_GIVEN_TIME: LazyLock<[Code; 3]> =
    LazyLock::new(|| TEXTS.map(|text| Code::new(by_given_time(text))));

/// While a test stands still, the server's clock goes on: no record is forgotten meanwhile.
#[cfg(any(test, feature = "testing"))]
pub(crate) const KEEP_BY_GIVEN_TIME_US: u64 = 3_600_000_000;

fn place(rule: &KeyRule) -> usize {
    match rule {
        KeyRule::Turn(_) => 0,
        KeyRule::Window(_) => 1,
        KeyRule::Log(_) => 2,
    }
}

/// A script that takes `ARGV[2]` for the server's time, in microseconds since 1970.
#[cfg(any(test, feature = "testing"))]
pub(super) fn by_given_time(text: &str) -> String {
    let asks_time = "call('TIME')";
    assert_eq!(text.matches(asks_time).count(), 1, "a script asks for the time once");
    text.replace(asks_time, "{ 0, ARGV[2] }")
}

/// The script of a rule, with the time as `ARGV[2]`.
#[cfg(test)]
pub(crate) fn script_by_given_time(rule: &KeyRule) -> redis::Script {
    redis::Script::new(&by_given_time(TEXTS[place(rule)]))
}

pub(super) async fn decide(
    store: &RedisStore,
    request: &ExactRequest,
) -> Result<ExactReply, StoreError> {
    let (place, keys) = (place(request.rule), [key(store, request)]);
    #[cfg(any(test, feature = "testing"))]
    if let Some(clock) = &store.clock {
        let now = clock.now().as_micros().to_string();
        let arguments = [&*request.bytes(KEEP_BY_GIVEN_TIME_US), now.as_bytes()];
        let reply = store.call(&CODES_BY_GIVEN_TIME[place], &keys, &arguments).await;
        return request.decode(&reply.map_err(|error| named(error, &keys[0]))?);
    }
    let reply = store.call(&CODES[place], &keys, &[&request.bytes(KEEP_US)]).await;
    request.decode(&reply.map_err(|error| named(error, &keys[0]))?)
}

/// `tg2:{<namespace>/<algorithm>:<limit>:<key>}`, with the initials of the algorithm's name: names are in memory too. Redis
/// Cluster spreads these keys over all slots.
fn key(store: &RedisStore, request: &ExactRequest) -> Vec<u8> {
    let ExactRequest { limit, key, .. } = request;
    let name = &limit.name;
    let algorithm = match limit.rule {
        Rule::TokenBucket(_) => "tb",
        Rule::LeakyBucket(_) => "lb",
        Rule::FixedWindow(_) => "fw",
        Rule::SlidingWindow(_) => "sw",
        Rule::SlidingLog(_) => "sl",
    };
    let mut whole = format!("tg2:{{{}/{algorithm}:{name}:", store.namespace).into_bytes();
    whole.extend_from_slice(key);
    whole.push(b'}');
    whole
}

/// The error with the name of the key, if that holds another program's value.
pub(super) fn named(error: StoreError, key: &[u8]) -> StoreError {
    match error {
        StoreError::ForeignKey { .. } => StoreError::ForeignKey {
            key: String::from_utf8_lossy(key).into_owned(),
            found: "value".to_owned(),
        },
        error => error,
    }
}
