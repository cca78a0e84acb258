//! `cargo +nightly fuzz run mmio_msi --features libfuzzer --fuzz-dir fuzz`
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| paravane_fuzz::mmio_msi(data));
