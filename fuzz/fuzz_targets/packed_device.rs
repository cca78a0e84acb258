//! `cargo +nightly fuzz run packed_device --features libfuzzer --fuzz-dir fuzz`
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| paravane_fuzz::packed_device(data));
