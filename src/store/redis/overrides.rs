//! Overrides: a script that takes them in and tells what has changed.

use std::sync::LazyLock;

use super::{Code, RedisStore};
use crate::error::StoreError;
use crate::store::overrides::{OverridesReply, OverridesRequest};

pub(crate) const TEXT: &str = include_str!("../../../lua/overrides.lua");

static CODE: LazyLock<Code> = LazyLock::new(|| Code::new(TEXT.to_owned()));

pub(super) async fn call(
    store: &RedisStore,
    request: &OverridesRequest,
) -> Result<OverridesReply, StoreError> {
    let arguments = request.arguments();
    let arguments: Vec<&[u8]> = arguments.iter().map(Vec::as_slice).collect();
    let reply = store.call(&CODE, &keys(&store.namespace), &arguments).await;
    OverridesReply::decode(&reply.map_err(|error| named(error, &store.namespace))?)
}

/// `tg2:{<namespace>/overrides}:data`, `:order` and `:ends`, in one slot of a cluster.
pub(crate) fn keys(namespace: &str) -> [Vec<u8>; 3] {
    let name = |part| format!("tg2:{{{namespace}/overrides}}:{part}").into_bytes();
    ["data", "order", "ends"].map(name)
}

/// The error with the name of the key, if that holds another program's value.
fn named(error: StoreError, namespace: &str) -> StoreError {
    match error {
        StoreError::ForeignKey { found, .. } => {
            StoreError::ForeignKey { key: format!("tg2:{{{namespace}/overrides}}"), found }
        }
        error => error,
    }
}
