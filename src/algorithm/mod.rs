//! The algorithms of the field: what a key's state is, when it allows a request, and how it changes.
//!
//! Each file has the type by which users choose the algorithm, and its rule: plain arithmetic on a state, without a
//! clock, a thread or a store. `bucket` keeps the states of local limits.

mod calendar;
mod fixed_window;
mod leaky_bucket;
mod rule;
mod sliding_log;
mod sliding_window;
mod turn;
mod window;

pub(crate) use calendar::{Calendar, Windows};
pub use fixed_window::FixedWindow;
pub use leaky_bucket::LeakyBucket;
pub use rule::Rule;
pub(crate) use rule::{KeyRule, Standing, StateRule};
pub use sliding_log::{LOG_TOKENS_MAX, SlidingLog};
pub(crate) use sliding_log::{Log, LogRule, LogStanding};
pub use sliding_window::SlidingWindow;
pub(crate) use turn::{STATE_MAX, Taken, Turn, TurnRule};
pub use window::WINDOW_MIN;
pub(crate) use window::{Counts, WindowRule};
