//! Block device (virtio specification, section 5.2): an image, its format said and never guessed.
//!
//! ```text
//! BlkConfig --open--> Blk (image: opened, checked, locked)      image.rs, qcow2/
//!    | start_queue
//!    v
//! Handler, one a queue                                          handler.rs
//!    parse a chain into a Request                               request.rs
//!    a RequestTable takes it through its system calls            in_flight.rs
//!    an Engine does those: io_uring, threads, or at once        engine/
//!       past the page cache: what the file asks for             direct.rs
//!       registered buffers: the map of guest memory             engine/registered.rs
//!
//! StorageErrors: failed requests, for people                    errors.rs
//! Resizer: the disk's size while it is served                   resizer.rs
//! ```
mod direct;
mod engine;
mod errors;
mod handler;
mod image;
mod in_flight;
mod pieces;
mod qcow2;
mod request;
mod resizer;
#[cfg(test)]
mod tests;

use crate::rate::Brake;
use crate::{Device, Limiter, QueueHandler};
use engine::{Engine, EngineKind, Mapped, Pool};
use handler::{Handler, Limited};
use image::{Image, Opening};
use paravane_ring::device::QueueConfig;
use paravane_spec::blk::{self, Config};
use paravane_spec::feature;
use qcow2::Qcow2;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use thiserror::Error;
use zerocopy::IntoBytes;

pub use errors::{ErrorTotals, Operation, StorageError, StorageErrors};
pub use qcow2::{ClusterRole, Features, HeaderError, RefcountError};
pub use resizer::Resizer;

/// Descriptors of a request beside its data.
const HEADER_AND_STATUS: u16 = 2;

/// Most descriptors of a request that drivers are told of, in queues of any size.
///
/// A driver that does without INDIRECT_DESC never submits a request that is longer than its queue, and waits for ever. It reads
/// `seg_max` before it makes a queue, and QEMU reads it for the driver before features are accepted, so the value has to fit
/// the queues that drivers make: of 128 descriptors by default in QEMU and Cloud Hypervisor, and never of less by Linux's own choice,
/// whose rings shrink to a page where memory is scarce. QEMU's own disks, qemu-storage-daemon and SPDK say 126 segments, too.
const LONGEST_CHAIN: u16 = 128;

/// Which engine does the host I/O.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EngineChoice {
    /// At once, and without system calls as far as that goes, if the image lies in memory; else io_uring if the host lets us, else threads.
    #[default]
    Auto,
    /// io_uring or an error.
    IoUring,
    /// A pool of threads with preadv and pwritev.
    Threads,
    /// The same system calls, at once, by the thread that serves the queue; nothing else is served meanwhile.
    Immediate,
}

/// What is in the file of an image.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Format {
    /// The disk's bytes.
    #[default]
    Raw,
    /// QEMU's format, versions 2 and 3, without encryption and without a data file of its own.
    Qcow2,
}

/// An image that another one is based on. It is only read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layer {
    /// The image.
    pub path: PathBuf,
    /// Its format.
    pub format: Format,
}

/// How a disk is to be opened.
#[derive(Clone, Debug)]
pub struct BlkConfig {
    /// Name in the log; the path if `None`.
    pub name: Option<String>,
    /// The image.
    pub path: PathBuf,
    /// Its format. A raw image is never taken for anything else, whatever its driver writes there.
    pub format: Format,
    /// What a qcow2 image is based on, and what that is based on, and so on. Must be named if and only if the images say that
    /// they are based on something; by what name they call it does not matter, and is not looked at.
    pub backing: Vec<Layer>,
    /// Open and offer it read-only.
    pub read_only: bool,
    /// Lock the image. Without a lock any process may write to it at the same time, which is right only where at most one of
    /// them has a driver at work: a machine that moves between two of them. A qcow2 image is always locked, since who opens it
    /// goes on with what its tables say then.
    pub lock: bool,
    /// Past the host's page cache (O_DIRECT): what the host has not read is read from the disk each time, and what is written is
    /// on its way to the disk when it is answered. The block that drivers are told is then what the file asks for. Raw images only.
    pub direct: bool,
    /// Register guest memory with io_uring (its registered buffers), which spares the kernel looking up its pages for every
    /// transfer; of use with `direct`. **All guest memory is then held in place**, once a queue (RLIMIT_MEMLOCK), and
    /// must not be exchanged while the disk is in use: no balloon, no virtio-mem, no postcopy. Where the host refuses, it is
    /// logged, and transfers go by addresses.
    pub registered_buffers: bool,
    /// Number of queues, at least 1.
    pub queues: u16,
    /// Largest size of each; rounded down to a power of two, from 4 to 32768. With less than 128, requests have fewer segments.
    pub queue_size: u16,
    /// Host I/O.
    pub engine: EngineChoice,
    /// What GET_ID answers, at most 20 bytes; from the path if `None`.
    pub serial: Option<String>,
    /// What the disk may use, all its queues together.
    pub limiter: Option<Arc<Limiter>>,
}

impl BlkConfig {
    /// A raw image, read-write, locked, one queue of 256, engine chosen by the host's abilities.
    #[must_use]
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            name: None,
            path: path.into(),
            format: Format::Raw,
            backing: Vec::new(),
            read_only: false,
            lock: true,
            direct: false,
            registered_buffers: false,
            queues: 1,
            queue_size: 256,
            engine: EngineChoice::Auto,
            serial: None,
            limiter: None,
        }
    }

    fn opening(&self) -> Result<Opening, OpenError> {
        let Self { format, read_only, direct, .. } = *self;
        if direct && format == Format::Qcow2 {
            return Err(OpenError::DirectOfFormat);
        }
        Ok(Opening { format, read_only, lock: self.lock || format == Format::Qcow2, direct })
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
    /// {path}: its size of {size} bytes is not a multiple of {block}
    #[error("{}: its size of {size} bytes is not a multiple of {block}", path.display())]
    Size {
        /// The image.
        path: PathBuf,
        /// Its size in bytes.
        size: u64,
        /// Bytes of a block: 512, or what transfers past the page cache are aligned to.
        block: u64,
    },
    /// {path}: cannot be used past the page cache: {source}
    #[error("{}: cannot be used past the page cache (O_DIRECT): {source}", path.display())]
    Direct {
        /// The image.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// images in the format qcow2 cannot be used past the page cache
    #[error("images in the format qcow2 cannot be used past the page cache (O_DIRECT)")]
    DirectOfFormat,
    /// guest memory can be registered with io_uring only, and the image is served otherwise: {engine}
    #[error("guest memory can be registered with io_uring only, and the image is served otherwise: {engine}")]
    BuffersOfEngine {
        /// How.
        engine: String,
    },
    /// {path}: is empty
    #[error("{}: is empty", path.display())]
    Empty {
        /// The image.
        path: PathBuf,
    },
    /// {path}: in use by another process, or named twice
    #[error("{}: in use by another process, or named twice (the image is locked)", path.display())]
    InUse {
        /// The image.
        path: PathBuf,
    },
    /// {path}: cannot be used as a qcow2 image: {source}
    #[error("{}: cannot be used as a qcow2 image: {source}", path.display())]
    Qcow2 {
        /// The image.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// The header of a qcow2 image asks for something that is not supported.
    #[error("{}: {source}", path.display())]
    Header {
        /// The image, or one that it is based on.
        path: PathBuf,
        /// What it asks for.
        source: Box<HeaderError>,
    },
    /// {path}: cannot be written to: {source}
    #[error("{}: cannot be written to: {source}", path.display())]
    Refcounts {
        /// The image.
        path: PathBuf,
        /// Why not.
        source: RefcountError,
    },
    /// {path}: is based on an image that it calls {name:?}; which one that is must be said
    #[error("{}: is based on an image that it calls {name:?}; which one that is must be said", path.display())]
    Backing {
        /// The image.
        path: PathBuf,
        /// The name that is in it. Anybody may have put it there.
        name: String,
    },
    /// {path}: is not based on another image, and one was named
    #[error("{}: is not based on another image, and one was named", path.display())]
    NoBacking {
        /// The image.
        path: PathBuf,
    },
    /// {path}: has its data in another file, which is not supported
    #[error("{}: has its data in another file, which is not supported", path.display())]
    DataFile {
        /// The image.
        path: PathBuf,
    },
    /// io_uring was asked for, and images in the format qcow2 are served by threads
    #[error("io_uring was asked for, and images in the format qcow2 are served by threads")]
    EngineOfFormat,
    /// io_uring was asked for, and this host refuses it: {source}
    #[error("io_uring was asked for, and this host refuses it: {source}")]
    Engine {
        /// Why not.
        source: std::io::Error,
    },
}

/// A disk: an open, locked image.
#[derive(Debug)]
pub struct Blk {
    image: Arc<Image>,
    engine: EngineKind,
    id: [u8; blk::ID_LEN],
    queue_sizes: Vec<u16>,
    limiter: Option<Arc<Limiter>>,
    errors: Arc<StorageErrors>,
}

/// Whether this process can use io_uring on this host.
///
/// # Errors
/// Why not: the kernel has none (ENOSYS), it is forbidden (EPERM, EACCES), or it lacks what we use (EOPNOTSUPP).
pub fn io_uring_available() -> io::Result<()> {
    engine::probe()
}

/// An image that lies in memory is mapped, if that can be.
fn immediate(image: &Image) -> EngineKind {
    if !image.in_memory || image.qcow2.is_some() || image.direct.is_some() {
        return EngineKind::Immediate { mapped: None };
    }
    let mapped = Mapped::new(image).map(Arc::new);
    let say = |error: &io::Error| tracing::debug!(path = %image.path.display(), %error, "not mapped");
    EngineKind::Immediate { mapped: mapped.inspect_err(say).ok() }
}

impl Blk {
    /// Opens the image and locks it, unless told otherwise (an open-file-description lock: exclusive, shared when read-only).
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn open(config: BlkConfig) -> Result<Self, OpenError> {
        Self::on(Image::open(&config.path, config.opening()?)?, config)
    }

    /// As [`Blk::open`], of an image that is open already, perhaps by another process, whose lock is shared then. The
    /// path of `config` is only a name.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn of(image: File, config: BlkConfig) -> Result<Self, OpenError> {
        Self::on(Image::of(image, &config.path, config.opening()?)?, config)
    }

    fn on(image: Image, config: BlkConfig) -> Result<Self, OpenError> {
        let image = Arc::new(match config.format {
            Format::Qcow2 => {
                let qcow2 = Qcow2::open(&image, &config.backing)?;
                image.through(qcow2)?
            }
            Format::Raw if config.backing.is_empty() => image,
            Format::Raw => return Err(OpenError::NoBacking { path: config.path }),
        });
        let threads = |why| EngineKind::Threads { pool: Arc::new(Pool::new(&image)), why };
        let engine = match (config.engine, engine::probe()) {
            (EngineChoice::Threads, _) => threads(None),
            (EngineChoice::Immediate, _) => immediate(&image),
            (EngineChoice::IoUring, _) if image.qcow2.is_some() => return Err(OpenError::EngineOfFormat),
            (EngineChoice::Auto, _) if image.qcow2.is_some() => threads(None),
            (EngineChoice::Auto, _) if image.in_memory => immediate(&image),
            (_, Ok(())) => EngineKind::Uring { registers: config.registered_buffers },
            (EngineChoice::IoUring, Err(source)) => return Err(OpenError::Engine { source }),
            (EngineChoice::Auto, Err(error)) => threads(Some(error.to_string())),
        };
        let id = image.id(config.serial.as_deref());
        // A read or write takes three descriptors at least.
        let size = 1 << config.queue_size.clamp(4, paravane_spec::queue::MAX_SIZE).ilog2();
        let queue_sizes = vec![size; config.queues.max(1).into()];
        let name = config.name.unwrap_or_else(|| image.path.display().to_string());
        let errors = Arc::new(StorageErrors::new(name, queue_sizes.len()));
        let disk = Self { image, engine, id, queue_sizes, limiter: config.limiter, errors };
        if config.registered_buffers && !matches!(disk.engine, EngineKind::Uring { .. }) {
            return Err(OpenError::BuffersOfEngine { engine: disk.engine() });
        }
        Ok(disk)
    }

    /// Size in bytes. It changes when a [`Resizer`] finds it changed.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.image.sectors() * blk::SECTOR
    }

    /// Changes the size while the disk is served.
    #[must_use]
    pub fn resizer(&self) -> Resizer {
        Resizer::new(self.image.clone())
    }

    /// Counts of failed requests.
    #[must_use]
    pub fn errors(&self) -> Arc<StorageErrors> {
        self.errors.clone()
    }

    /// The image's path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.image.path
    }

    /// Whether it is read-only.
    #[must_use]
    pub fn read_only(&self) -> bool {
        self.image.read_only
    }

    /// The engine that was chosen, and why if it was not the first choice: "io_uring", "io_uring, direct", "immediate, mapped",
    /// "threads (io_uring: ...)".
    #[must_use]
    pub fn engine(&self) -> String {
        let engine = match &self.engine {
            EngineKind::Uring { registers: false } => "io_uring".into(),
            EngineKind::Uring { registers: true } => "io_uring with registered buffers".into(),
            EngineKind::Immediate { mapped: None } => "immediate".into(),
            EngineKind::Immediate { mapped: Some(_) } => "immediate, mapped".into(),
            EngineKind::Threads { why: None, .. } => "threads".into(),
            EngineKind::Threads { why: Some(why), .. } => format!("threads (io_uring: {why})"),
        };
        if self.image.direct.is_some() { engine + ", direct" } else { engine }
    }

    /// A second descriptor of the open image's file, for the host's own reading (verification); same lock, and same
    /// file offset, so read at explicit offsets; and past the page cache, if the disk does.
    ///
    /// # Errors
    /// The process has no file descriptors left.
    pub fn image(&self) -> io::Result<std::fs::File> {
        self.image.file.try_clone()
    }

    fn config(&self) -> Config {
        let (block, physical) = (self.image.block(), self.image.physical_block);
        let physical_sectors = (physical / blk::SECTOR) as u32;
        let mut config = Config {
            capacity: self.image.sectors().to_le(),
            seg_max: u32::from(self.longest_chain() - HEADER_AND_STATUS).to_le(),
            blk_size: (block as u32).to_le(),
            physical_block_exp: (physical / block).ilog2() as u8,
            min_io_size: ((physical / block) as u16).to_le(),
            num_queues: (self.queue_sizes.len() as u16).to_le(),
            ..Config::default()
        };
        if !self.image.read_only {
            config.max_discard_sectors = request::MAX_DISCARD_SECTORS.to_le();
            config.max_discard_seg = request::MAX_RANGES.to_le();
            config.discard_sector_alignment = physical_sectors.to_le();
            config.max_write_zeroes_sectors = request::MAX_WRITE_ZEROES_SECTORS.to_le();
            config.max_write_zeroes_seg = request::MAX_RANGES.to_le();
            config.write_zeroes_may_unmap = 1;
        }
        config
    }
}

impl Device for Blk {
    fn device_id(&self) -> u32 {
        paravane_spec::device_id::BLK
    }

    fn features(&self) -> u64 {
        let mut features = feature::VERSION_1
            | feature::RING_RESET
            | QueueConfig::SPLIT_FEATURES
            | blk::F_SEG_MAX
            | blk::F_BLK_SIZE
            | blk::F_FLUSH
            | blk::F_TOPOLOGY;
        if self.queue_sizes.len() > 1 {
            features |= blk::F_MQ;
        }
        features
            | match self.image.read_only {
                true => blk::F_RO,
                false => blk::F_DISCARD | blk::F_WRITE_ZEROES,
            }
    }

    fn queue_sizes(&self) -> &[u16] {
        &self.queue_sizes
    }

    fn longest_chain(&self) -> u16 {
        self.queue_sizes[0].min(LONGEST_CHAIN)
    }

    fn read_config(&self, offset: u32, out: &mut [u8]) {
        crate::read_config(self.config().as_bytes(), offset, out);
    }

    fn refresh(&mut self) -> io::Result<bool> {
        let before = self.image.sectors();
        Ok(self.image.look()? != before)
    }

    fn start_queue(&mut self, index: u16, features: u64) -> io::Result<Box<dyn QueueHandler>> {
        let Some(&size) = self.queue_sizes.get(usize::from(index)) else {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("the disk has no queue {index}"),
            ));
        };
        let engine = Engine::new(&self.engine, &self.image, size)?;
        let limit = match &self.limiter {
            Some(limiter) => Some(Limited::new(Brake::new(limiter.clone(), engine.fd())?)),
            None => None,
        };
        let errors = (index, self.errors.clone());
        Ok(Box::new(Handler::new(self.image.clone(), self.id, engine, limit, (size, features), errors)))
    }
}
