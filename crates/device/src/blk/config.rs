//! What a disk is made of.
use super::format::Format;
use super::full::OnFull;
use super::geometry::Geometry;
use super::image_file::{ImageFile, Opening, open_device};
use super::layer_source::Layer;
use super::open_error::{OpenError, OpenReason};
use crate::Limiter;
use paravane_store::Store;
use std::path::PathBuf;
use std::sync::Arc;

/// The engine that does the host I/O.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EngineChoice {
    /// `Immediate` for a raw image in memory; else `IoUring`, or `Threads` without it.
    ///
    /// `Threads` for a qcow2 image in memory, whose known clusters are mapped and copied at once.
    #[default]
    Auto,
    /// io_uring, or an error. Of a qcow2 image, clusters that are allocated and known; threads do the
    /// rest.
    IoUring,
    /// A pool of threads, with preadv and pwritev.
    Threads,
    /// The queue's own thread, which blocks meanwhile.
    ///
    /// An image in memory is mapped, and copied without system calls.
    Immediate,
}

/// Configuration of a disk.
///
/// Start from [`BlkConfig::new`], and change fields by struct update.
#[derive(Clone, Debug)]
pub struct BlkConfig {
    /// Name in the log [the path].
    pub name: Option<String>,
    /// Path of the image.
    pub path: PathBuf,
    /// Format of the image \[raw\]. It is not probed, whatever the guest writes there.
    pub format: Format,
    /// Backing files, top first \[none\]. Required if and only if the images have one.
    ///
    /// Names stored in images open nothing. They are compared with these; see `force_layers`.
    pub backing: Vec<Layer>,
    /// Accepts backing files whose name or format the images contradict [`false`].
    pub force_layers: bool,
    /// Opens the image, and offers the disk, read-only [`false`].
    pub read_only: bool,
    /// Locks the image [`true`].
    ///
    /// Without a lock, other processes may write to the image at the same time. That is safe only
    /// while one of them has a running driver at most, as in a live migration. A queue starts when
    /// no dead process has requests in flight: that takes up to 2 s, then the start fails. A qcow2
    /// image is always locked, since its tables are read when it is opened.
    pub lock: bool,
    /// Bypasses the host's page cache (O_DIRECT) [`false`]. For raw images.
    pub direct: bool,
    /// Block in bytes that drivers are told: a power of two from 512 to 4096.
    ///
    /// \[512; with `direct` what the file accepts for reads; in a store, what its server accepts\].
    /// A guest finds nothing on a disk whose block size has changed: keep it with the disk.
    pub block_size: Option<u32>,
    /// Registers guest memory with io_uring, which saves page look-ups [`false`].
    ///
    /// Useful with `direct`. **Pins all guest memory**, once for each queue (RLIMIT_MEMLOCK). The
    /// pages must not be replaced while the disk is in use: no balloon, no virtio-mem, no postcopy.
    /// Where the host refuses, a warning is logged and transfers go unregistered.
    pub registered_buffers: bool,
    /// Number of queues, at least 1 \[1\].
    pub queues: u16,
    /// Largest queue size in descriptors \[256\].
    ///
    /// Rounded down to a power of two, from 4 to 32768.
    ///
    /// Below 128, requests have fewer segments.
    pub queue_size: u16,
    /// Engine for host I/O \[auto\].
    pub engine: EngineChoice,
    /// Answer to GET_ID, cut to 20 bytes [from the name of the image].
    ///
    /// A name of up to 20 printable ASCII characters as it is, else 11 of them, a dash and 8 digits
    /// of a hash.
    pub serial: Option<String>,
    /// Rate limit of the disk, for all its queues together [none, and none can be set later].
    pub limiter: Option<Arc<Limiter>>,
    /// What becomes of a write for which the host has no room \[error\].
    pub on_full: OnFull,
}

impl BlkConfig {
    /// The defaults, for the image at `path`.
    #[must_use]
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            name: None,
            path: path.into(),
            format: Format::Raw,
            backing: Vec::new(),
            force_layers: false,
            read_only: false,
            lock: true,
            direct: false,
            block_size: None,
            registered_buffers: false,
            queues: 1,
            queue_size: 256,
            engine: EngineChoice::Auto,
            serial: None,
            limiter: None,
            on_full: OnFull::Error,
        }
    }

    /// What drivers would be told of the disk on a block device, which another process may have.
    ///
    /// # Errors
    /// The device cannot be such a disk.
    pub fn geometry_of_device(&self) -> Result<Geometry, OpenError> {
        let opening = self.opening()?;
        Geometry::of_file(&open_device(&self.path)?, &self.path, opening)
    }

    /// What drivers would be told of the disk in a store.
    ///
    /// # Errors
    /// The store cannot be such a disk.
    pub fn geometry_of_store(&self, store: &Arc<dyn Store>) -> Result<Geometry, OpenError> {
        let file = ImageFile::over(store.clone(), self.opening()?)?;
        Geometry::of(&file.source, file.size, file.block, &file.path, self.format)
    }

    pub(super) fn opening(&self) -> Result<Opening, OpenError> {
        let Self { format, read_only, direct, .. } = *self;
        if direct && format == Format::Qcow2 {
            return Err(OpenReason::DirectOfFormat.at(&self.path));
        }
        let lock = self.lock || format == Format::Qcow2;
        let block = self.block_size.map(u64::from);
        Ok(Opening { format, read_only, lock, direct, frozen: false, block })
    }
}
