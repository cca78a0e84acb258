//! `cargo +nightly fuzz run packed_driver --features libfuzzer --fuzz-dir fuzz`
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| paravane_fuzz::packed_driver(data));
