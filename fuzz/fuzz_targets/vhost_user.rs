//! `cargo +nightly fuzz run vhost_user --features libfuzzer --fuzz-dir fuzz`
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| paravane_fuzz::vhost_user(data));
