//! The image: every block begins with its own number, so that a driver can tell whose data it got.
use super::case::{BLOCK, SPAN, Storage};
use crate::BenchError;
use nix::sys::statfs::{TMPFS_MAGIC, statfs};
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use tempfile::TempDir;

/// A folder with the image, and room for sockets. It goes when this does.
pub(super) struct Image {
    folder: TempDir,
}

impl Image {
    /// Makes the image in memory or on disk; of each of these names, a copy.
    ///
    /// # Errors
    /// The host refuses.
    pub(super) fn new(storage: Storage, names: &[&str]) -> Result<Self, BenchError> {
        Self::make(storage, names).map_err(|source| BenchError::Os { what: "make an image", source })
    }

    fn make(storage: Storage, names: &[&str]) -> io::Result<Self> {
        let place = match storage {
            Storage::Tmpfs | Storage::Qcow2 => PathBuf::from("/dev/shm"),
            Storage::Disk | Storage::Direct => std::env::current_dir()?,
        };
        let in_memory = statfs(&place)?.filesystem_type() == TMPFS_MAGIC;
        if in_memory != matches!(storage, Storage::Tmpfs | Storage::Qcow2) {
            let what = if in_memory { "is in memory, not on a disk" } else { "is no tmpfs" };
            return Err(io::Error::other(format!("{} {what}", place.display())));
        }
        let folder = tempfile::Builder::new().prefix("paravane-bench-").tempdir_in(place)?;
        let image = Self { folder };
        for name in names {
            let path = image.path(name);
            write(&path)?;
            if storage == Storage::Qcow2 {
                convert(&path)?;
            }
        }
        Ok(image)
    }

    /// That of the copy of this name.
    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The folder that it lies in.
    pub(super) fn folder(&self) -> &Path {
        self.folder.path()
    }
}

/// QEMU's program that knows other formats.
const CONVERTER: &str = "qemu-img";

/// Whether images of other formats can be made.
pub(super) fn can_convert() -> bool {
    Command::new(CONVERTER).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok()
}

/// Makes a raw image a qcow2 one.
fn convert(path: &Path) -> io::Result<()> {
    let made = path.with_extension("made");
    let status = Command::new(CONVERTER)
        .args(["convert", "-f", "raw", "-O", "qcow2"])
        .arg(path)
        .arg(&made)
        .status()?;
    if !status.success() {
        return Err(io::Error::other(format!("{CONVERTER} ended: {status}")));
    }
    std::fs::rename(&made, path)
}

fn write(path: &Path) -> io::Result<()> {
    let mut file = File::create(path)?;
    let mut piece = vec![0_u8; 1 << 20];
    for start in (0..SPAN).step_by(piece.len()) {
        for (number, block) in piece.chunks_exact_mut(BLOCK as usize).enumerate() {
            block.fill(number as u8);
            block[..8].copy_from_slice(&(start / BLOCK + number as u64).to_le_bytes());
        }
        file.write_all(&piece)?;
    }
    file.sync_all()
}
