//! A seeded discrete-event world around the unchanged buckets, engine and store model: only clock,
//! transport and random source come from outside. The same seed gives the same run.

pub mod baseline;
mod clock;
mod cold;
pub mod faults;
pub mod figures;
#[cfg(all(test, feature = "redis"))]
mod on_redis;
mod run;
mod scenario;
#[cfg(test)]
mod search;
mod setup;
mod store;
pub mod sweep;
#[cfg(test)]
mod tests;
pub mod workload;
mod world;
mod worst;

pub use run::{Outcome, play, run};
pub use setup::{Form, LATE_MAX_US, Network, Policy, ServiceTime, Setup, Traffic};
pub use worst::Worst;
