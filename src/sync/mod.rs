//! The control plane: what a node tells the store, what it asks for, and what it does with the
//! answer.

mod account;
mod backoff;
mod demand;
pub(crate) mod engine;
pub(crate) mod event;
mod excess;
mod lane;
pub(crate) mod message;
mod nodes;
mod notices;
mod rng;
mod shrink;

pub(crate) use account::Waiter;
pub(crate) use engine::{Config, Engine, Input, Output, Told};
pub use event::Event;
