//! Permits of concurrency limits.

use std::sync::LazyLock;

use super::exact::named;
#[cfg(any(test, feature = "testing"))]
use super::exact::{KEEP_BY_GIVEN_TIME_US, by_given_time};
use super::{Code, RedisStore};
use crate::error::StoreError;
use crate::store::exact::KEEP_US;
use crate::store::permits::PermitRequest;
#[cfg(feature = "server")]
use crate::store::timed_permits::TimedPermitRelease;
use crate::sync::PermitReply;

const TEXT: &str = include_str!("../../../lua/permits.lua");
#[cfg(feature = "server")]
const TIMED_TEXT: &str = include_str!("../../../lua/timed-permits.lua");

static CODE: LazyLock<Code> = LazyLock::new(|| Code::new(TEXT.to_owned()));
#[cfg(feature = "server")]
static TIMED_CODE: LazyLock<Code> = LazyLock::new(|| Code::new(TIMED_TEXT.to_owned()));

/// The same, with the time as `ARGV[2]`.
#[cfg(any(test, feature = "testing"))]
static CODE_BY_GIVEN_TIME: LazyLock<Code> = LazyLock::new(|| Code::new(by_given_time(TEXT)));
#[cfg(all(feature = "server", any(test, feature = "testing")))]
static TIMED_CODE_BY_GIVEN_TIME: LazyLock<Code> =
    LazyLock::new(|| Code::new(by_given_time(TIMED_TEXT)));

/// The script, with the time as `ARGV[2]`.
#[cfg(test)]
pub(crate) fn script_by_given_time() -> redis::Script {
    redis::Script::new(&by_given_time(TEXT))
}

/// That which releases timed permits, with the time as `ARGV[2]`.
#[cfg(all(test, feature = "server"))]
pub(crate) fn timed_script_by_given_time() -> redis::Script {
    redis::Script::new(&by_given_time(TIMED_TEXT))
}

pub(super) async fn receive(
    store: &RedisStore,
    request: &PermitRequest,
) -> Result<PermitReply, StoreError> {
    let keys = keys(&store.namespace, &request.limit, &request.key);
    #[cfg(any(test, feature = "testing"))]
    if let Some(clock) = &store.clock {
        let now = clock.now().as_micros().to_string();
        let arguments = [&*request.bytes(KEEP_BY_GIVEN_TIME_US), now.as_bytes()];
        let reply = store.call(&CODE_BY_GIVEN_TIME, &keys, &arguments).await;
        return PermitRequest::decode(&reply.map_err(|error| named(error, &keys[0]))?);
    }
    let reply = store.call(&CODE, &keys, &[&request.bytes(KEEP_US)]).await;
    PermitRequest::decode(&reply.map_err(|error| named(error, &keys[0]))?)
}

/// Releases timed permits.
#[cfg(feature = "server")]
pub(super) async fn release(
    store: &RedisStore,
    request: &TimedPermitRelease,
) -> Result<u32, StoreError> {
    let [_, timed] = keys(&store.namespace, &request.limit, &request.key);
    #[cfg(any(test, feature = "testing"))]
    if let Some(clock) = &store.clock {
        let now = clock.now().as_micros().to_string();
        let arguments = [&request.id[..], now.as_bytes()];
        let reply =
            store.call(&TIMED_CODE_BY_GIVEN_TIME, std::slice::from_ref(&timed), &arguments).await;
        return TimedPermitRelease::decode(&reply.map_err(|error| named(error, &timed))?);
    }
    let reply = store.call(&TIMED_CODE, std::slice::from_ref(&timed), &[&request.id]).await;
    TimedPermitRelease::decode(&reply.map_err(|error| named(error, &timed))?)
}

/// The record of nodes, `tg2:{<namespace>/cc:<limit>:<key>}`, and the set of timed permits, which has the same
/// name and `:timed` behind it. Redis Cluster spreads keys over all slots.
fn keys(namespace: &str, limit: &str, key: &[u8]) -> [Vec<u8>; 2] {
    let mut nodes = format!("tg2:{{{namespace}/cc:{limit}:").into_bytes();
    nodes.extend_from_slice(key);
    nodes.push(b'}');
    let timed = [&*nodes, b":timed"].concat();
    [nodes, timed]
}
