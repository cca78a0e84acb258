//! `cargo +nightly fuzz run blk_request --features libfuzzer --fuzz-dir fuzz`
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| paravane_fuzz::blk_request(data));
