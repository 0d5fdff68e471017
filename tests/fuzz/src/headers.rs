//! Header fields that strangers write.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tidegate::fuzz::headers(bytes));
