//! Reservations that any process settles.

use std::sync::LazyLock;

use super::exact::named;
use super::{Code, RedisStore};
use crate::error::StoreError;
use crate::store::reservations::{ReservationRequest, TakenRecord};

const TEXT: &str = include_str!("../../../lua/reservation.lua");

static CODE: LazyLock<Code> = LazyLock::new(|| Code::new(TEXT.to_owned()));

pub(super) async fn call(
    store: &RedisStore,
    request: &ReservationRequest,
) -> Result<Option<TakenRecord>, StoreError> {
    // Redis Cluster spreads these keys over all slots.
    let keys = [format!("tg2:{{{}/rs:{}}}", store.namespace, request.id()).into_bytes()];
    let arguments = request.arguments();
    let reply = store.call(&CODE, &keys, &arguments.each_ref().map(Vec::as_slice)).await;
    ReservationRequest::decode(&reply.map_err(|error| named(error, &keys[0]))?)
}
