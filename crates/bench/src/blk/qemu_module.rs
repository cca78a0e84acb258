//! Modules of QEMU: drivers that Debian has in packages of their own.
use std::path::Path;

/// Whether QEMU has a module, below a folder of libraries.
pub(super) fn is_there(name: &str) -> bool {
    let Ok(folders) = std::fs::read_dir("/usr/lib") else { return false };
    let has = |folder: &Path| folder.join("qemu").join(name).exists();
    has(Path::new("/usr/lib")) || folders.flatten().any(|folder| has(&folder.path()))
}
