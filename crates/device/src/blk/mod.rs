//! Block device (virtio specification, section 5.2).
use crate::{Device, QueueHandler};
use std::path::{Path, PathBuf};
use thiserror::Error;

/// Which engine does the host I/O.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EngineChoice {
    /// io_uring if the host lets us, else threads.
    #[default]
    Auto,
    /// io_uring or an error.
    IoUring,
    /// A pool of threads with preadv and pwritev.
    Threads,
}

/// How a disk is to be opened.
#[derive(Clone, Debug)]
pub struct BlkConfig {
    /// The raw image.
    pub path: PathBuf,
    /// Open and offer it read-only.
    pub read_only: bool,
    /// Number of queues.
    pub queues: u16,
    /// Largest size of each.
    pub queue_size: u16,
    /// Host I/O.
    pub engine: EngineChoice,
    /// What GET_ID answers, at most 20 bytes; from the path if `None`.
    pub serial: Option<String>,
}

impl BlkConfig {
    /// One queue of 256, read-write, engine chosen by the host's abilities.
    #[must_use]
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            read_only: false,
            queues: 1,
            queue_size: 256,
            engine: EngineChoice::Auto,
            serial: None,
        }
    }
}

/// Why an image cannot be used. Nothing was touched.
#[derive(Debug, Error)]
pub enum OpenError {
    /// {path}: {source}
    #[error("{}: {source}", path.display())]
    Os {
        /// The image.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// {path}: is a directory, not a disk image
    #[error("{}: is a directory, not a disk image", path.display())]
    Directory {
        /// The image.
        path: PathBuf,
    },
    /// {path}: is neither a regular file nor a block device
    #[error("{}: is neither a regular file nor a block device", path.display())]
    Kind {
        /// The image.
        path: PathBuf,
    },
    /// {path}: its size of {size} bytes is not a multiple of 512
    #[error("{}: its size of {size} bytes is not a multiple of 512", path.display())]
    Size {
        /// The image.
        path: PathBuf,
        /// Its size in bytes.
        size: u64,
    },
    /// {path}: is empty
    #[error("{}: is empty", path.display())]
    Empty {
        /// The image.
        path: PathBuf,
    },
    /// {path}: in use by another process
    #[error("{}: in use by another process (it holds a lock on the image)", path.display())]
    InUse {
        /// The image.
        path: PathBuf,
    },
    /// io_uring was asked for, and this host refuses it: {source}
    #[error("io_uring was asked for, and this host refuses it: {source}")]
    Engine {
        /// Why not.
        source: std::io::Error,
    },
}

/// A disk: an open, locked raw image.
#[derive(Debug)]
pub struct Blk {
    _private: (),
}

impl Blk {
    /// Opens and locks the image (an open-file-description lock: exclusive, shared when read-only).
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn open(config: BlkConfig) -> Result<Self, OpenError> {
        let _ = config;
        todo!()
    }

    /// Size in bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        todo!()
    }

    /// The image's path.
    #[must_use]
    pub fn path(&self) -> &Path {
        todo!()
    }

    /// Whether it is read-only.
    #[must_use]
    pub fn read_only(&self) -> bool {
        todo!()
    }

    /// The engine that was chosen, and why if it was not the first choice: "io_uring", "threads (io_uring: ...)".
    #[must_use]
    pub fn engine(&self) -> String {
        todo!()
    }

    /// A second descriptor of the open image, for the host's own reading (verification); same lock.
    ///
    /// # Errors
    /// The process has no file descriptors left.
    pub fn image(&self) -> std::io::Result<std::fs::File> {
        todo!()
    }
}

impl Device for Blk {
    fn device_id(&self) -> u32 {
        paravane_spec::device_id::BLK
    }
    fn features(&self) -> u64 {
        todo!()
    }
    fn queue_sizes(&self) -> &[u16] {
        todo!()
    }
    fn read_config(&self, offset: u32, out: &mut [u8]) {
        let _ = (offset, out);
        todo!()
    }
    fn start_queue(&mut self, index: u16, features: u64) -> std::io::Result<Box<dyn QueueHandler>> {
        let _ = (index, features);
        todo!()
    }
}
