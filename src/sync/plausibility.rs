//! What a node refuses to believe of a reply.

use super::message::{BatchVerdict, Given, Grant, Reply, Request, WIRE_VERSION};
use crate::error::StoreError;

/// The longest lease that a reply may grant.
pub(crate) const LIFE_MAX_US: i64 = 64_000_000;
/// The most nodes that a reply may count.
const NODES_MAX: i64 = 1_000_000;

/// Refuses replies that no store of this protocol would give to `request`.
pub(crate) fn check(reply: Reply, request: &Request) -> Result<Reply, StoreError> {
    at_most("nodes", reply.nodes, NODES_MAX)?;
    for &nodes in &reply.limit_nodes {
        at_most("limit_nodes", nodes, NODES_MAX)?;
    }
    match &reply.verdict {
        BatchVerdict::Lanes(stored) => {
            Err(StoreError::Lanes { configured: request.lanes, stored: *stored })
        }
        BatchVerdict::Wire(stored) => {
            Err(StoreError::Wire { spoken: WIRE_VERSION, stored: *stored })
        }
        BatchVerdict::Applied(grants) if grants.len() != request.entries.len() => {
            Err(StoreError::Reply { field: "grants", value: grants.len().to_string() })
        }
        BatchVerdict::Applied(_) if reply.limit_nodes.len() != request.limits.len() => {
            Err(StoreError::Reply {
                field: "limit_nodes",
                value: reply.limit_nodes.len().to_string(),
            })
        }
        BatchVerdict::Applied(grants) => {
            for (grant, entry) in grants.iter().zip(&request.entries) {
                if let Grant::Given(given) = grant {
                    let burst = entry.scale.burst / entry.scale.token;
                    let most = (entry.needed + entry.want).min(burst);
                    plausible(given, most, entry.scale.rate, burst)?;
                }
            }
            Ok(reply)
        }
        BatchVerdict::Reborn | BatchVerdict::Stale | BatchVerdict::Cloned => Ok(reply),
    }
}

fn plausible(given: &Given, want: i64, rate: i64, burst: i64) -> Result<(), StoreError> {
    at_most("grant.tokens", given.tokens, want)?;
    at_most("grant.rate", given.rate, rate)?;
    at_most("grant.depth", given.depth, burst)?;
    at_most("grant.life_us", given.life_us, LIFE_MAX_US)
}

fn at_most(field: &'static str, value: i64, most: i64) -> Result<(), StoreError> {
    if value <= most { Ok(()) } else { Err(StoreError::Reply { field, value: value.to_string() }) }
}
