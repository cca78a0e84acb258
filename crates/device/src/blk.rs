//! Block device (virtio specification, section 5.2): a disk image of the host.
//!
//! ```text
//! BlkConfig --open--> Blk (image: opened, checked, locked)      image_file.rs, image.rs, qcow2/
//!    '-- prepare --> UnlockedBlk --lock--> Blk                  when a dead process's requests have ended
//!    | start_queue
//!    v
//! Handler, one for each queue                                   handler.rs
//!    parses a chain into a Request                              request.rs
//!    takes it through its system calls by a RequestTable        in_flight.rs
//!    makes them by a StoreQueue: io_uring, threads, or at once; engine/
//!       an image that is no file has a store with its queues
//!       direct I/O: alignment and bounce buffers                direct.rs, whole_blocks.rs
//!
//! StorageErrors: counts of failed requests, the last one        errors.rs
//! Resizer: the disk's size while it is served                   resizer.rs
//! Snapshots: a new image on top of the old one, meanwhile        snapshot.rs, current.rs, overlay.rs, mark.rs
//! Serial: what GET_ID answers                                   serial.rs
//! Full: writes that wait for room                               full.rs
//! layers compared with headers, formats that raw images show    layers.rs, magic.rs
//! images: disks without a guest: made, read, copied, merged     images.rs
//!    skip what a file or store calls zeroes                     block_status.rs
//! ```
//! The format of an image is never guessed: a guest can write any header into a raw image.
//!
//! ```no_run
//! use paravane_device::Device;
//! use paravane_device::blk::{Blk, BlkConfig};
//!
//! let disk = Blk::open(BlkConfig { read_only: true, queues: 2, ..BlkConfig::new("disk.img") })?;
//! println!("{} bytes, served by {}", disk.size(), disk.engine());
//! assert_eq!(disk.queue_sizes(), [256, 256]);
//! # Ok::<(), paravane_device::blk::OpenError>(())
//! ```
mod block_status;
mod config;
mod current;
mod direct;
mod engine;
mod errors;
mod file_id;
mod format;
mod full;
mod geometry;
mod handler;
mod image;
mod image_file;
pub mod images;
mod in_flight;
mod layer_source;
mod layers;
mod magic;
mod mark;
mod measured;
mod open_error;
pub mod operation;
mod overlay;
mod qcow2;
mod request;
mod resizer;
mod serial;
mod snapshot;
#[cfg(test)]
mod tests;
mod whole_blocks;

use crate::{Device, Limiter, QueueHandler};
use current::{Attached, Current};
use engine::Engine;
use handler::{DiskQueue, Handler};
use image::Image;
use image_file::{ImageFile, UnlockedFile};
use paravane_ring::device::QueueConfig;
use paravane_spec::blk::{self, Config};
use paravane_spec::feature;
use paravane_store::Store;
use paravane_store::file::{self, PresentPages};
use serial::Serial;
use std::any::Any;
use std::fs::File;
use std::io;
use std::sync::Arc;
use zerocopy::IntoBytes;

pub use config::{BlkConfig, EngineChoice};
pub use errors::{ErrorTotals, StorageError, StorageErrors};
pub use file_id::{FileId, ImageId};
pub use format::Format;
pub use full::{Full, FullStatus, OnFull};
pub use geometry::Geometry;
pub use layer_source::{Layer, LayerSource};
pub use mark::{OVERLAY_MARK, clear_overlay_mark};
pub use open_error::{OpenError, OpenReason};
pub use overlay::{Overlay, OverlayBase};
pub use qcow2::{ClusterRole, Features, HeaderError, RefcountError};
pub use resizer::Resizer;
pub use snapshot::{Snapshot, SnapshotError, Snapshots};

/// Descriptors of a request beside its data.
const HEADER_AND_STATUS: u16 = 2;

/// Most descriptors of a request (`seg_max`), in queues of any size.
///
/// A driver without INDIRECT_DESC cannot submit a request that is longer than its queue, and waits
/// forever. It reads `seg_max` before it sets up a queue, and QEMU reads it for the driver before
/// features are accepted. So the value has to fit the queues that drivers set up: 128 descriptors
/// by default in QEMU and Cloud Hypervisor, and at least 128 in Linux, whose rings shrink to a page
/// where memory is scarce. QEMU's own disks, qemu-storage-daemon and SPDK report 126 segments, too.
const LONGEST_CHAIN: u16 = 128;

/// Most segments of a request (`seg_max`) on a disk with queues of `queue_size` descriptors.
#[must_use]
pub fn most_segments(queue_size: u16) -> u16 {
    queue_size.clamp(4, LONGEST_CHAIN) - HEADER_AND_STATUS
}

/// A disk: an open, locked image.
#[derive(Debug)]
pub struct Blk {
    current: Arc<Current>,
    choice: EngineChoice,
    serial: Arc<Serial>,
    queue_sizes: Vec<u16>,
    limiter: Option<Arc<Limiter>>,
    errors: Arc<StorageErrors>,
}

/// An open image that is not locked.
#[derive(Debug)]
pub struct UnlockedBlk {
    file: UnlockedFile,
    config: BlkConfig,
    /// Of an image in memory that is likely to be mapped.
    present: Option<PresentPages>,
}

impl UnlockedBlk {
    /// Sets [`BlkConfig::backing`] and [`BlkConfig::force_layers`].
    pub fn set_backing(&mut self, backing: Vec<Layer>, force_layers: bool) {
        (self.config.backing, self.config.force_layers) = (backing, force_layers);
    }

    /// The file of the image.
    #[must_use]
    pub fn file_id(&self) -> Option<FileId> {
        self.file.file_id()
    }

    /// Whether the image would have a [mark](OVERLAY_MARK) if a snapshot had frozen it.
    #[must_use]
    pub fn has_marks(&self) -> bool {
        self.file.has_marks()
    }

    /// What drivers would be told of the disk.
    ///
    /// # Errors
    /// The image cannot be such a disk.
    pub fn geometry(&self) -> Result<Geometry, OpenError> {
        Geometry::of_file(&self.file.file, &self.config.path, self.file.opening)
    }

    /// Names the block that drivers are told, unless [`BlkConfig::block_size`] does.
    pub fn keep_block(&mut self, block: u32) {
        if self.config.block_size.is_none() {
            self.config.block_size = Some(block);
            self.file.set_block(block.into());
        }
    }

    /// Locks the image.
    ///
    /// `Err` of the inner result: a dead process has requests in flight for the image, and holds
    /// its lock. Try again later: nothing ends them but their storage. Returns at once then.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn lock(self) -> Result<Result<Blk, Self>, OpenError> {
        let Self { file, config, present } = self;
        Ok(match file.lock()? {
            Ok(file) => Ok(Blk::on(file, config, present)?),
            Err(file) => Err(Self { file, config, present }),
        })
    }
}

/// Whether this process can use io_uring on this host.
///
/// # Errors
/// The kernel has no io_uring (ENOSYS), it is forbidden (EPERM, EACCES), or it lacks an operation
/// (EOPNOTSUPP).
pub fn io_uring_available() -> io::Result<()> {
    file::probe().map(drop)
}

/// Whether registered memory serves requests of several pieces, too (Linux 6.15).
///
/// # Errors
/// As [`io_uring_available`].
pub fn io_uring_registers_vectors() -> io::Result<bool> {
    file::probe()
}

impl Blk {
    /// Opens the image.
    ///
    /// The lock is an open-file-description lock on the whole file: exclusive, or shared when
    /// read-only.
    ///
    /// io_uring requests outlive a killed process, and may write after a newer write of the next
    /// one. So an image is opened, locked or not, when no dead process has requests in flight for
    /// it. This call waits for that for 2 s; [`Blk::prepare`] leaves the wait to the caller.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn open(config: BlkConfig) -> Result<Self, OpenError> {
        Self::on(ImageFile::open(&config.path, config.opening()?)?, config, None)
    }

    /// Opens the image without locking it; [`UnlockedBlk::lock`] makes a disk of it.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn prepare(config: BlkConfig) -> Result<UnlockedBlk, OpenError> {
        let file = UnlockedFile::open(&config.path, config.opening()?)?;
        // Before the daemon that serves it has gone.
        if let Some(source) = file.source().filter(|_| !config.force_layers) {
            layers::check(&source, &config.path, config.format, &config.backing)?;
        }
        let may_map = matches!(config.engine, EngineChoice::Auto | EngineChoice::Immediate)
            && config.format == Format::Raw
            && !config.direct;
        let present = if may_map { file.present_pages() } else { None };
        Ok(UnlockedBlk { file, config, present })
    }

    /// As [`Blk::open`], for an image that is open already.
    ///
    /// The path of `config` is only a name.
    ///
    /// A lock of the descriptor's open file description is shared with its other holders.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn of(image: File, config: BlkConfig) -> Result<Self, OpenError> {
        Self::on(ImageFile::of(image, &config.path, config.opening()?)?, config, None)
    }

    /// A disk over a store that is open.
    ///
    /// The path of `config` is not used: the disk's name is the store's location, unless the
    /// configuration has one. Nothing is locked here: a store that can be shared sees to its writers.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn over(store: Arc<dyn Store>, config: BlkConfig) -> Result<Self, OpenError> {
        if config.engine != EngineChoice::Auto {
            return Err(OpenReason::EngineOfStore.at(store.status().location));
        }
        Self::on(ImageFile::over(store, config.opening()?)?, config, None)
    }

    fn on(file: ImageFile, config: BlkConfig, present: Option<PresentPages>) -> Result<Self, OpenError> {
        if !config.force_layers {
            layers::check(&file.source, &file.path, config.format, &config.backing)?;
        }
        let image = Arc::new(Image::open(file, config.format, &config.backing)?);
        let engine = Engine::choose(&image, &config, present)?;
        let serial = Arc::new(Serial::new(&image, config.serial.as_deref()));
        // A read or write takes at least three descriptors.
        let size = 1 << config.queue_size.clamp(4, paravane_spec::queue::MAX_SIZE).ilog2();
        let queue_sizes = vec![size; config.queues.max(1).into()];
        let name = config.name.unwrap_or_else(|| image.file.path.display().to_string());
        let errors = Arc::new(StorageErrors::new(name.clone(), queue_sizes.len()));
        let is_ring = engine.is_ring;
        let full = Full::new(name, config.on_full);
        let current = Current::new(Attached { image, engine }, full.clone());
        let disk = Arc::downgrade(&current);
        full.retried_by(move || disk.upgrade().map(|disk| disk.retry()).is_some());
        if current.image().file.source.file().is_none() {
            let disk = Arc::downgrade(&current);
            full.asked_by(move || disk.upgrade().is_some_and(|disk| disk.image().ask_size()));
        }
        let (choice, limiter) = (config.engine, config.limiter);
        let disk = Self { current, choice, serial, queue_sizes, limiter, errors };
        if config.registered_buffers && !is_ring {
            return Err(OpenReason::BuffersOfEngine { engine: disk.engine() }.at(config.path));
        }
        Ok(disk)
    }

    /// Size of the disk in bytes.
    ///
    /// Changes when a [`Resizer`] or [`Device::refresh`] finds a new size.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.current.image().sectors() * blk::SECTOR
    }

    /// A handle that changes the size while the disk is served.
    #[must_use]
    pub fn resizer(&self) -> Resizer {
        Resizer::new(self.current.clone())
    }

    /// A handle that takes snapshots while the disk is served.
    #[must_use]
    pub fn snapshots(&self) -> Snapshots {
        Snapshots::new(self.current.clone(), self.choice, self.serial.clone())
    }

    /// Counters of failed requests.
    #[must_use]
    pub fn errors(&self) -> Arc<StorageErrors> {
        self.errors.clone()
    }

    /// Whether the disk is read-only.
    #[must_use]
    pub fn read_only(&self) -> bool {
        self.current.image().file.read_only
    }

    /// Requests that wait for room.
    #[must_use]
    pub fn full(&self) -> Arc<Full> {
        self.current.full.clone()
    }

    /// Name of the engine, with the reason if it is not the first choice.
    ///
    /// For example `io_uring`, `io_uring, direct`, `immediate, mapped`, `threads (io_uring:
    /// REASON)`; `io_uring, threads` for a qcow2 image, `threads, mapped` for one in memory.
    #[must_use]
    pub fn engine(&self) -> String {
        self.current.attached().engine.name
    }

    /// A duplicate descriptor of the image's file, for verification by the host.
    ///
    /// It shares the lock, the file offset (read at explicit offsets) and O_DIRECT with the disk.
    /// Close it before the disk is dropped: other processes take what is left of the lock for
    /// requests of a dead process, and wait.
    ///
    /// # Errors
    /// The process has no file descriptors left, or the image is not a file.
    pub fn image(&self) -> io::Result<std::fs::File> {
        self.current.image().file()?.try_clone()
    }

    fn config(&self) -> Config {
        let image = self.current.image();
        let (block, physical) = (image.file.block, image.file.physical_block);
        let mut config = Config {
            capacity: image.sectors().to_le(),
            seg_max: u32::from(most_segments(self.queue_sizes[0])).to_le(),
            blk_size: (block as u32).to_le(),
            physical_block_exp: (physical / block).ilog2() as u8,
            min_io_size: ((physical / block) as u16).to_le(),
            num_queues: (self.queue_sizes.len() as u16).to_le(),
            ..Config::default()
        };
        if !image.file.read_only {
            config.max_discard_sectors = request::MAX_DISCARD_SECTORS.to_le();
            config.max_discard_seg = request::MAX_RANGES.to_le();
            // Linux drops what is smaller, and splits at multiples of it.
            config.discard_sector_alignment = ((image.file.discard_block / blk::SECTOR) as u32).to_le();
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
            | match self.read_only() {
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

    /// Jobs of the immediate engine are done in `serve`: they wait for the disk if the image, or a
    /// backing file that a qcow2 image may have, is not in memory.
    fn may_block(&self) -> bool {
        self.current.attached().engine.blocks
    }

    fn read_config(&self, offset: u32, out: &mut [u8]) {
        crate::read_config(self.config().as_bytes(), offset, out);
    }

    fn identity(&self) -> Vec<u8> {
        self.serial.get().to_vec()
    }

    fn keep_identity(&mut self, told: Option<&[u8]>) {
        self.serial.keep(told);
    }

    fn refresh(&mut self) -> io::Result<bool> {
        let before = self.current.image().sectors();
        Ok(self.current.look()? != before)
    }

    fn start_queue(&mut self, index: u16, features: u64) -> io::Result<Box<dyn QueueHandler>> {
        let Some(&size) = self.queue_sizes.get(usize::from(index)) else {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("the disk has no queue {index}; it has {}", self.queue_sizes.len()),
            ));
        };
        let (follower, attached) = self.current.join(size)?;
        if let Some(file) = attached.image.file.source.file() {
            attached.image.file.guards.check(file)?;
        }
        Ok(Box::new(Handler::new(DiskQueue {
            index,
            size,
            features,
            engine: attached.engine.queue(size)?,
            follower,
            attached,
            id: self.serial.get(),
            limiter: self.limiter.clone(),
            errors: self.errors.clone(),
        })?))
    }

    /// To unmap a large image takes milliseconds. A mapping that holds the lock is dropped all the same.
    fn retire(self: Box<Self>) -> Option<Box<dyn Any + Send>> {
        let Attached { image, engine } = self.current.attached();
        let mapped = engine.mapped.filter(|_| image.file.guards.process().is_some())?;
        Some(Box::new(mapped))
    }
}
