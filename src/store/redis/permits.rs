//! Permits of concurrency limits.

use std::sync::LazyLock;

use super::exact::named;
#[cfg(any(test, feature = "testing"))]
use super::exact::{KEEP_BY_GIVEN_TIME_US, by_given_time};
use super::{Code, RedisStore};
use crate::error::StoreError;
use crate::store::exact::KEEP_US;
use crate::store::permits::PermitRequest;
use crate::sync::PermitReply;

const TEXT: &str = include_str!("../../../lua/permits.lua");

static CODE: LazyLock<Code> = LazyLock::new(|| Code::new(TEXT.to_owned()));

/// The same, with the time as `ARGV[2]`.
#[cfg(any(test, feature = "testing"))]
static CODE_BY_GIVEN_TIME: LazyLock<Code> = LazyLock::new(|| Code::new(by_given_time(TEXT)));

/// The script, with the time as `ARGV[2]`.
#[cfg(test)]
pub(crate) fn script_by_given_time() -> redis::Script {
    redis::Script::new(&by_given_time(TEXT))
}

pub(super) async fn receive(
    store: &RedisStore,
    request: &PermitRequest,
) -> Result<PermitReply, StoreError> {
    let keys = [key(store, request)];
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

/// `tg2:{<namespace>/cc:<limit>:<key>}`: Redis Cluster spreads these keys over all slots.
fn key(store: &RedisStore, request: &PermitRequest) -> Vec<u8> {
    let mut whole = format!("tg2:{{{}/cc:{}:", store.namespace, request.limit).into_bytes();
    whole.extend_from_slice(&request.key);
    whole.push(b'}');
    whole
}
