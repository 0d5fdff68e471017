//! A seeded discrete-event world around the unchanged buckets, engine and store model: only clock,
//! transport and random source come from outside. The same seed gives the same run.

mod algorithm;
mod arrival;
mod clock;
mod cold;
pub mod faults;
pub mod figures;
pub mod judge;
mod outcome;
#[cfg(all(test, feature = "redis"))]
mod replay_on_redis;
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
mod worst_case;
pub mod write_behind;

pub use algorithm::Algorithm;
pub use outcome::Outcome;
pub use run::{play, run};
pub use setup::{Form, LATE_MAX_US, Network, Policy, ServiceTime, Setup, Traffic};
pub use worst_case::Worst;
