//! Decisions of exact limits: a script for each kind of state.

use std::sync::LazyLock;

use super::{Code, RedisStore};
use crate::algorithm::LocalRule;
use crate::error::StoreError;
use crate::store::exact::{Answer, KEEP_US, Question};

/// The scripts, in the order of [`LocalRule`]'s kinds.
pub(crate) const TEXTS: [&str; 3] = [
    include_str!("../../../lua/exact-turn.lua"),
    include_str!("../../../lua/exact-window.lua"),
    include_str!("../../../lua/exact-log.lua"),
];

static CODES: LazyLock<[Code; 3]> = LazyLock::new(|| TEXTS.map(|text| Code::new(text.to_owned())));

/// The same, told the time in place of the server's clock.
#[cfg(any(test, feature = "testing"))]
static CODES_BY_GIVEN_TIME: LazyLock<[Code; 3]> = LazyLock::new(|| {
    TEXTS.map(|text| {
        let asks_time = "call('TIME')";
        assert_eq!(text.matches(asks_time).count(), 1, "a script asks for the time once");
        Code::new(text.replace(asks_time, "{ 0, ARGV[2] }"))
    })
});

/// While a test stands still, the server's clock goes on: no record is forgotten meanwhile.
#[cfg(any(test, feature = "testing"))]
const KEEP_BY_GIVEN_TIME_US: u64 = 3_600_000_000;

pub(super) async fn decide(store: &RedisStore, question: &Question) -> Result<Answer, StoreError> {
    let kind = match question.rule {
        LocalRule::Turn(_) => 0,
        LocalRule::Window(_) => 1,
        LocalRule::Log(_) => 2,
    };
    let keys = [key(store, question)];
    #[cfg(any(test, feature = "testing"))]
    if let Some(clock) = &store.clock {
        let now = clock.now().as_micros().to_string();
        let arguments = [&*bytes(question, KEEP_BY_GIVEN_TIME_US), now.as_bytes()];
        let reply = store.call(&CODES_BY_GIVEN_TIME[kind], &keys, &arguments).await?;
        return question.answer(&reply);
    }
    let reply = store.call(&CODES[kind], &keys, &[&bytes(question, KEEP_US)]).await?;
    question.answer(&reply)
}

/// `tg2:{<namespace>/<algorithm>:<limit>:<key>}`: in a Redis Cluster each key has its own slot.
fn key(store: &RedisStore, question: &Question) -> Vec<u8> {
    let Question { limit, key, .. } = question;
    let (algorithm, name) = (limit.rule.algorithm(), &limit.name);
    let mut whole = format!("tg2:{{{}/{algorithm}:{name}:", store.namespace).into_bytes();
    whole.extend_from_slice(key);
    whole.push(b'}');
    whole
}

fn bytes(question: &Question, keep_us: u64) -> Vec<u8> {
    question.numbers(keep_us).iter().flat_map(|number| number.to_le_bytes()).collect()
}
