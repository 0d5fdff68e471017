//! A seeded discrete-event world around the unchanged buckets, engine and store model: only clock,
//! transport and random source come from outside. The same seed gives the same run.

mod tests;
mod world;
