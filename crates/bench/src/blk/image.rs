//! The images.
//!
//! Every block begins with its number, so that the client can check data.
use super::case::{SPAN, Storage};
use super::ceph::CephImage;
use super::http::HttpServer;
use super::nbd;
use crate::BenchError;
use crate::daemon::{Daemon, is_installed};
use crate::disk_connection::BLOCK;
use nix::sys::statfs::{TMPFS_MAGIC, statfs};
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

/// A temporary folder with images and sockets, removed when dropped.
pub(super) struct Image {
    /// NBD servers, one for each image; they end first.
    _nbd: Vec<Daemon>,
    /// The HTTP server of all images.
    http: Option<HttpServer>,
    /// Images in a Ceph cluster.
    _ceph: Vec<CephImage>,
    folder: TempDir,
}

impl Image {
    /// Makes an image for each name.
    ///
    /// # Errors
    /// The host refuses.
    pub(super) fn new(storage: Storage, names: &[&str]) -> Result<Self, BenchError> {
        Self::make(storage, names).map_err(|source| BenchError::Os { what: "make a disk image", source })
    }

    /// Starts the servers of images on the network, on `cpu`.
    ///
    /// # Errors
    /// A server does not start.
    pub(super) fn start_servers(
        &mut self,
        storage: Storage,
        names: &[&str],
        cpu: Option<usize>,
    ) -> Result<(), BenchError> {
        if storage.is_remote() {
            for name in names {
                let daemon = nbd::start(&self.path(name), &self.socket(name), storage, cpu)?;
                self._nbd.push(daemon);
            }
        }
        if storage == Storage::HttpCached {
            self.http = Some(HttpServer::start(self.folder(), cpu)?);
        }
        Ok(())
    }

    /// Socket of an image's NBD server.
    pub(super) fn socket(&self, name: &str) -> PathBuf {
        self.path(name).with_extension("nbd")
    }

    /// URL of an image at the HTTP server; empty without one.
    pub(super) fn url(&self, name: &str) -> PathBuf {
        self.http.as_ref().map(|http| http.url(name)).unwrap_or_default()
    }

    /// Makes the folder that keeps chunks for the server with this socket, on the disk of the images.
    ///
    /// # Errors
    /// The host refuses.
    pub(super) fn cache(socket: &Path) -> io::Result<PathBuf> {
        let folder = socket.with_extension("cache");
        std::fs::create_dir(&folder)?;
        Ok(folder)
    }

    fn make(storage: Storage, names: &[&str]) -> io::Result<Self> {
        let place = match storage {
            storage if storage.in_memory() => PathBuf::from("/dev/shm"),
            _ => std::env::current_dir()?,
        };
        let in_memory = statfs(&place)?.filesystem_type() == TMPFS_MAGIC;
        if in_memory != storage.in_memory() {
            let what =
                if in_memory { "is a tmpfs; run this in a folder on a disk" } else { "is not a tmpfs" };
            return Err(io::Error::other(format!("{} {what}", place.display())));
        }
        let folder = tempfile::Builder::new().prefix("paravane-bench-").tempdir_in(place)?;
        let mut image = Self { _nbd: Vec::new(), http: None, _ceph: Vec::new(), folder };
        let paths: Vec<_> = names.iter().map(|name| image.path(name)).collect();
        write(&paths)?;
        for (name, path) in names.iter().zip(paths) {
            if storage.is_qcow2() {
                convert(&path)?;
            }
            if storage == Storage::Rbd {
                image._ceph.push(CephImage::import(&path, name)?);
                std::fs::remove_file(&path)?;
            }
        }
        Ok(image)
    }

    /// Path of an image.
    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The folder.
    pub(super) fn folder(&self) -> &Path {
        self.folder.path()
    }
}

/// QEMU's program for image formats.
const CONVERTER: &str = "qemu-img";

/// Whether qcow2 images can be made.
pub(super) fn can_convert() -> bool {
    is_installed(CONVERTER)
}

/// Converts a raw image to qcow2, in place.
fn convert(path: &Path) -> io::Result<()> {
    let made = path.with_extension("made");
    let status = Command::new(CONVERTER)
        .args(["convert", "-f", "raw", "-O", "qcow2"])
        .arg(path)
        .arg(&made)
        .status()?;
    if !status.success() {
        return Err(io::Error::other(format!("{CONVERTER} failed: {status}")));
    }
    std::fs::rename(&made, path)
}

/// Writes the images, a piece of each in turn: so they get the same kind of memory, or place on the disk.
///
/// Written one after another, the first had 0.93 of the rate of the second with large requests.
fn write(paths: &[PathBuf]) -> io::Result<()> {
    let mut files = paths.iter().map(File::create).collect::<io::Result<Vec<_>>>()?;
    let mut piece = vec![0_u8; 1 << 20];
    for start in (0..SPAN).step_by(piece.len()) {
        for (number, block) in piece.chunks_exact_mut(BLOCK as usize).enumerate() {
            block.fill(number as u8);
            block[..8].copy_from_slice(&(start / BLOCK + number as u64).to_le_bytes());
        }
        files.iter_mut().try_for_each(|file| file.write_all(&piece))?;
    }
    files.iter().try_for_each(File::sync_all)
}
