//! Replays the corpora as ordinary tests.
use paravane_fuzz::TARGETS;
use std::fs;
use std::path::Path;

/// Files from which on a corpus should be minimized (`cargo fuzz cmin`).
const MOST_FILES: usize = 200;
const MOST_BYTES: u64 = 200 * 1024;

fn replay(name: &str) {
    let (_, target) = TARGETS.iter().find(|(target, _)| *target == name).expect("a target of that name");
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(name);
    let entries = fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let mut files: Vec<_> = entries.map(|entry| entry.expect("a directory entry").path()).collect();
    files.sort();
    assert!(!files.is_empty(), "{} is empty", folder.display());
    assert!(files.len() < MOST_FILES, "{} has {} files", folder.display(), files.len());
    let mut bytes = 0;
    for file in &files {
        let input = fs::read(file).expect("a corpus file");
        bytes += input.len() as u64;
        // Printed before it runs: the output of a panic ends with its input.
        println!("{}", file.display());
        target(&input);
    }
    assert!(bytes < MOST_BYTES, "{} has {bytes} bytes", folder.display());
}

#[test]
fn split_device() {
    replay("split_device");
}

#[test]
fn split_driver() {
    replay("split_driver");
}

#[test]
fn packed_device() {
    replay("packed_device");
}

#[test]
fn packed_driver() {
    replay("packed_driver");
}

#[test]
fn mmio() {
    replay("mmio");
}

#[test]
fn mmio_msi() {
    replay("mmio_msi");
}

#[test]
fn pci() {
    replay("pci");
}

#[test]
fn blk_request() {
    replay("blk_request");
}

#[test]
fn net_request() {
    replay("net_request");
}

#[test]
fn nbd_reply() {
    replay("nbd_reply");
}

#[test]
fn dma() {
    replay("dma");
}

#[test]
fn vhost_user() {
    replay("vhost_user");
}

/// Runs random inputs: a shallow, quick check without a fuzzer.
#[test]
fn random_bytes() {
    let mut state = 1_u64;
    let mut byte = || {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        (state >> 56) as u8
    };
    for (name, target) in TARGETS.iter().filter(|(name, _)| {
        name.starts_with("packed")
            || matches!(*name, "dma" | "mmio_msi" | "nbd_reply" | "net_request" | "pci" | "vhost_user")
    }) {
        // The model of `dma` checks each byte, that of `pci` each vector, in each step.
        let inputs = match *name {
            "dma" | "pci" => 300,
            // Each input wakes threads and maps files.
            "vhost_user" => 100,
            _ => 3000,
        };
        for number in 0..inputs {
            let input: Vec<_> = (0..200 + number % 800).map(|_| byte()).collect();
            println!("{name} {number}");
            target(&input);
        }
    }
}

#[test]
fn every_target_is_replayed_and_has_a_program() {
    let manifest = include_str!("../Cargo.toml");
    let tests = include_str!("replay.rs");
    for (name, _) in TARGETS {
        assert!(manifest.contains(&format!("path = \"fuzz_targets/{name}.rs\"")), "{name}");
        assert!(tests.contains(&format!("replay(\"{name}\")")), "{name}");
    }
}
