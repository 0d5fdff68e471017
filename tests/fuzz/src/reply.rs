//! A store that answers anything.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tidegate::fuzz::reply(bytes));
