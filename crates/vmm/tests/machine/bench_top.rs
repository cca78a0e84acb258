//! Images to work on, configurations to start from, and the loud skip.
use crate::devices::{Disk, Machine};
use paravane_vmm::{AccelChoice, DiskWork, Progress, Report, RunConfig, RunError};
use sha2::{Digest, Sha256};
use std::io::Write;
use std::path::Path;
use std::sync::OnceLock;
use std::time::Duration;
use tempfile::NamedTempFile;

/// Why KVM is not usable here, if it is not.
fn no_kvm() -> Option<&'static str> {
    static WHY: OnceLock<Option<String>> = OnceLock::new();
    WHY.get_or_init(|| match config(AccelChoice::Kvm).run(&Progress::default()) {
        Err(RunError::NoKvm(why)) => Some(why),
        _ => None,
    })
    .as_deref()
}

/// Whether KVM is usable here; if not, says that `test` was skipped.
pub(crate) fn kvm(test: &str) -> bool {
    let Some(why) = no_kvm() else { return true };
    skipped(test, why);
    false
}

pub(crate) use paravane_test_support::skip as skipped;

/// A short run with an entropy device and no disk.
pub(crate) fn config(accel: AccelChoice) -> Machine {
    let config = RunConfig {
        accel,
        memory: 32 << 20,
        duration: Duration::from_millis(100),
        hang_timeout: paravane_test_support::patience(),
        ..RunConfig::default()
    };
    Machine { config, entropy: 256, ..Machine::default() }
}

/// The same with one disk.
pub(crate) fn with_disk(accel: AccelChoice, image: &Path, work: DiskWork) -> Machine {
    let disk = Disk { path: image.to_owned(), read_only: false, queues: 1, work };
    Machine { disks: vec![disk], ..config(accel) }
}

/// An image of `sectors` sectors with content that differs everywhere.
pub(crate) fn image(sectors: u64) -> NamedTempFile {
    let mut file = NamedTempFile::new().unwrap();
    let mut state = 0x1234_5678_9abc_def1_u64;
    for _ in 0..sectors {
        let mut sector = [0; 512];
        for bytes in sector.chunks_exact_mut(8) {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            bytes.copy_from_slice(&state.to_le_bytes());
        }
        file.write_all(&sector).unwrap();
    }
    file.flush().unwrap();
    file
}

/// The file's digest in hex.
pub(crate) fn digest(path: &Path) -> String {
    let digest: [u8; 32] = Sha256::digest(std::fs::read(path).unwrap()).into();
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A run that must take place.
pub(crate) fn go(machine: Machine) -> Report {
    machine.run(&Progress::default()).unwrap()
}
