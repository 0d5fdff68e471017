//! The control plane: what a node reports to the store, what it asks for, and what it does with the
//! answer.

mod account;
mod backoff;
mod context;
mod demand;
pub(crate) mod engine;
pub(crate) mod event;
mod exact_outage;
mod excess;
mod flood;
mod lane;
pub(crate) mod message;
mod nodes;
mod notices;
mod permits;
mod plausibility;
mod rng;
mod shrink;
mod slots;

pub(crate) use account::{ResetOutcome, ResetWaiter, Settlement, Touch, Waiter};
pub(crate) use context::{LimitConfig, Output};
pub(crate) use engine::{Config, Engine, Input};
pub use event::Event;
pub(crate) use exact_outage::{ExactOutage, OutageChange};
#[cfg(feature = "server")]
pub(crate) use permits::HANDED_OVER_MAX;
pub(crate) use permits::{
    CALL_MAX_US, MESSAGE_NUMBERS, PermitAsk, PermitCounts, PermitId, PermitKey, PermitMessage,
    PermitOutput, PermitReply, Permits, REPLY_NUMBERS, TimedPermit,
};
pub(crate) use slots::{HeldSlots, SlotAnswer, SlotAsk, SlotGrant};
