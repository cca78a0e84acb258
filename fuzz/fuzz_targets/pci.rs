//! `cargo +nightly fuzz run pci --features libfuzzer --fuzz-dir fuzz`
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| paravane_fuzz::pci(data));
