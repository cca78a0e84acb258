//! `cargo +nightly fuzz run nbd_reply --features libfuzzer --fuzz-dir fuzz`
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| paravane_fuzz::nbd_reply(data));
