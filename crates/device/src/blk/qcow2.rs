//! qcow2 images: our own reader and writer of the format.
//!
//! ```text
//!   job --its clusters are known and allocated----> guest memory <-> image file, in place
//!    '----else--> worker of the pool -> tables -> image file, and its backing files (read-only)
//!                    '-- guest memory <-> a buffer of the worker
//! ```
//! | file | content |
//! |---|---|
//! | `header`, `recorded` | the header: checked, or described |
//! | `entry` | entries of tables (pure) |
//! | `io` | all reads and writes of the format, and syncs that are shared |
//! | `slices`, `map`, `counts` | cached pieces of tables; L1 and L2 tables; refcounts |
//! | `tables` | what an open image knows, and the order in which clusters change hands |
//! | `allocate`, `write`, `unmap` | the changes |
//! | `layer`, `compressed` | reads, through the layers below |
//! | `refcounts`, `rebuild` | checks when an image is opened for writing |
//! | `create`, `whole` | new images; disks without a guest |
//!
//! **A loss of power costs what was not flushed, and nothing else.** What is written, and in which order,
//! is in [`tables`]. Every cluster that a table names is counted before, durably; a table names data only
//! when the old or the new content is there, durably. So each moment's disk is an image without errors,
//! but for clusters that are counted and not used. The header's dirty mark says that there may be such:
//! the next writer checks them.
//!
//! **Completed requests survive the process.** Tables are written to the file before a request
//! completes, so a killed process loses nothing that its driver has seen completed. Until a flush, the
//! data is in the host's page cache only.
//!
//! **Data in place.** What lies in clusters that are allocated to the disk alone is read and overwritten
//! without a copy: at the offset in the file that [`cluster_map`] has. All else goes through a worker. A
//! cluster of the map stays where it is while [`Qcow2::tables`] is locked, shared or not, or while it is
//! listed as [in use](in_use): whoever frees or zeroes clusters locks the tables exclusively, first takes
//! the clusters off the map, and then leaves alone what is in use.
//!
//! **A name in an image opens nothing.** An image has the names of its backing file and external
//! data file, and a guest that can write to the image can change them (as a guest did in
//! CVE-2026-27211). Only files that the operator names are opened, in the formats that the operator
//! names.
mod allocate;
mod cluster_map;
mod compressed;
mod counts;
mod create;
mod entry;
mod extent;
mod header;
mod in_use;
mod io;
mod layer;
mod map;
mod open;
mod rebuild;
mod recorded;
mod refcount_error;
mod refcounts;
mod slices;
mod tables;
mod unmap;
mod whole;
mod write;

use super::image_file::ImageFile;
use super::{Layer, OpenError};
use cluster_map::ClusterMap;
use entry::{Entry, Place};
use in_use::{InUse, Part};
use layer::Core;
use open::{open, open_core};
use paravane_dma::HostSlice;
use paravane_spec::blk::SECTOR;
use paravane_store::lock;
use paravane_store::pieces::{gather, parts, scatter, total};
use paravane_store::{Job, Pieces, Store};
use std::cell::RefCell;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use unmap::Unmap;

pub(super) use create::create;
pub use create::{BackingName, NewQcow2};
pub use extent::Extent;
pub use header::{Features, HeaderError};
pub(super) use in_use::QueueRanges;
pub(super) use layer::Below as Base;
pub use recorded::{Layout, Recorded};
pub use refcount_error::{ClusterRole, RefcountError};

type Result<T> = std::io::Result<T>;
type Alone<'a> = RwLockWriteGuard<'a, ()>;
type Shared<'a> = RwLockReadGuard<'a, ()>;

/// Most bytes of one step: the size of a worker's buffer.
///
/// The rest of a request follows in further steps.
const AT_ONCE: usize = 1 << 20;

/// Clusters that are looked up at once.
const LOOKED_UP: u64 = 64;

thread_local! {
    static BUFFER: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
    /// Pieces of a part of a request.
    static PART: RefCell<Vec<HostSlice>> = const { RefCell::new(Vec::new()) };
}

/// An open image.
#[derive(Debug)]
pub(super) struct Qcow2 {
    /// Shared with the overlay of a frozen image, which only reads.
    core: Arc<Core>,
    /// Shared: data moves, and clusters are allocated. Exclusive: clusters are unmapped, or those that
    /// were become free.
    tables: RwLock<()>,
    /// Clusters that are accessed in place. `None`: none are.
    clusters: Option<ClusterMap>,
    /// Ranges of the disk that transfers in flight access in place.
    in_use: InUse,
    /// Message of the last error, if it has no number.
    reason: Mutex<Option<String>>,
    /// The image is no file, which grows by writes.
    is_in_store: bool,
    /// The backing files, for their locks.
    _layers: Vec<ImageFile>,
}

impl Qcow2 {
    /// Opens `image` with its backing files, top first.
    pub(super) fn open(image: &ImageFile, layers: &[Layer]) -> std::result::Result<Self, OpenError> {
        let mut files = Vec::new();
        let core = open(image, Some(layers), &mut files)?;
        Ok(Self::new(image, core, files))
    }

    /// Opens `image` without the backing file that it may have.
    ///
    /// What the image itself does not hold reads as zeroes.
    pub(super) fn open_alone(image: &ImageFile) -> std::result::Result<Self, OpenError> {
        Ok(Self::new(image, open(image, None, &mut Vec::new())?, Vec::new()))
    }

    /// Opens `image` as an overlay of an image that is open.
    pub(super) fn over(image: &ImageFile, base: Base) -> std::result::Result<Self, OpenError> {
        let (mut core, _) = open_core(image)?;
        core.below = Some(base);
        core.has_backing = true;
        Ok(Self::new(image, core, Vec::new()))
    }

    fn new(image: &ImageFile, core: Core, layers: Vec<ImageFile>) -> Self {
        Self {
            clusters: has_small_blocks(&image.source)
                .then(|| ClusterMap::new(core.shape.cluster(), core.size()))
                .flatten(),
            in_use: InUse::default(),
            core: Arc::new(core),
            tables: RwLock::default(),
            reason: Mutex::default(),
            is_in_store: image.source.file().is_none(),
            _layers: layers,
        }
    }

    /// The image as a backing file.
    ///
    /// It may be written to until the overlay is used, and not after.
    pub(super) fn base(&self) -> Base {
        Base::Qcow2(self.core.clone())
    }

    /// Sets what is called with a range of the file before it is freed, once.
    pub(super) fn on_free(&self, call: impl Fn(std::ops::Range<u64>) + Send + Sync + 'static) {
        self.core.io.on_free(call);
    }

    /// Ends writing: the image is as if it had been closed.
    pub(super) fn finish(&self) -> Result<()> {
        let _alone = self.alone();
        self.core.close(false)
    }

    /// Sectors of the disk.
    pub(super) fn sectors(&self) -> u64 {
        self.core.size() / SECTOR
    }

    /// Sets the size of the disk in bytes.
    pub(super) fn resize(&self, size: u64) -> Result<()> {
        let _alone = self.remap(0, u64::MAX);
        if self.split(size, u64::MAX - size).iter().any(|part| part.is_used) {
            let what = "requests beyond the new end are in flight; try again";
            return Err(std::io::Error::new(std::io::ErrorKind::ResourceBusy, what));
        }
        self.core.resize(size)
    }

    /// Does a job and answers as io_uring would.
    ///
    /// `file` does jobs of the image file, in the same way; offsets are the file's.
    pub(super) fn perform(&self, job: Job, file: impl Fn(Job) -> i32) -> i32 {
        self.look_up(job);
        let done = match self.in_place(job, file) {
            Some(result) => Ok(result),
            None => self.try_perform(job),
        };
        done.unwrap_or_else(|error| {
            let (number, reason) = match (error.kind(), error.raw_os_error()) {
                (_, Some(number)) => (number, None),
                (std::io::ErrorKind::Unsupported, None) => (libc::EOPNOTSUPP, None),
                (_, None) => (libc::EIO, Some(error.to_string())),
            };
            *lock(&self.reason) = reason;
            -number
        })
    }

    /// Does a job in the clusters that are known, or the first part of it.
    ///
    /// `None`: they are not, or their tables change just now. Waits for nothing but `file`, which is
    /// that of [`Qcow2::perform`], and runs no code of the format.
    pub(super) fn in_place(&self, job: Job, file: impl Fn(Job) -> i32) -> Option<i32> {
        let InPlace { clusters, slices, offset, len, _unchanged } = self.may_be_in_place(job)?;
        let mut done = 0;
        while done < len {
            let Some((host, now)) = clusters.find(offset + done, len - done) else { break };
            let moved = match now == len {
                true => file(moved_to(job, host)),
                false => PART.with_borrow_mut(|part| {
                    part.clear();
                    part.extend(parts(slices, done, now));
                    file(moved_to(with_pieces(job, part), host))
                }),
            };
            match u64::try_from(moved) {
                Ok(moved) if moved == now => done += now,
                // The rest, or the file's end, is seen to in the next step.
                Ok(moved) => {
                    done += moved;
                    break;
                }
                Err(_) if done == 0 => return Some(moved),
                Err(_) => break,
            }
        }
        i32::try_from(done).ok().filter(|done| *done > 0)
    }

    /// A list of what a queue uses, for [`Qcow2::place`].
    pub(super) fn ranges(&self) -> Arc<QueueRanges> {
        self.in_use.queue()
    }

    /// The job of the image file that does a transfer in the clusters that are known, or its first part.
    ///
    /// `None`: they are not known, or their tables change just now. A part is listed in `part`, which
    /// has to stay as it is. The clusters are in use until the head leaves `ranges`. Waits for nothing.
    pub(super) fn place(
        &self,
        job: Job,
        head: u16,
        ranges: &QueueRanges,
        part: &mut Vec<HostSlice>,
    ) -> Option<Job> {
        let InPlace { clusters, slices, offset, len, _unchanged } = self.may_be_in_place(job)?;
        let (host, now) = clusters.find(offset, len)?;
        ranges.enter(head, offset..offset + now);
        if now == len {
            return Some(moved_to(job, host));
        }
        part.clear();
        part.extend(parts(slices, 0, now));
        Some(moved_to(with_pieces(job, part), host))
    }

    /// A transfer that may be done in place, with the tables locked.
    fn may_be_in_place(&self, job: Job) -> Option<InPlace<'_>> {
        let (pieces, offset) = transfer(job)?;
        let clusters = self.clusters.as_ref()?;
        let unchanged = self.tables.try_read().ok()?;
        // SAFETY: the pieces and their memory are valid until the outcome is reaped (StoreQueue::push),
        // and it has not even been posted; callers use the list no longer than their call takes.
        let slices = unsafe { std::slice::from_raw_parts(pieces.first.as_ptr(), pieces.count as usize) };
        Some(InPlace { clusters, slices, offset, len: total(slices), _unchanged: unchanged })
    }

    /// Enters the clusters of a transfer into the map, if they can be accessed in place.
    ///
    /// Never waits for a change. Ignores errors: they may concern a cluster that the job does not touch.
    fn look_up(&self, job: Job) {
        let (Some((pieces, offset)), Some(clusters)) = (transfer(job), &self.clusters) else { return };
        let Ok(_unchanged) = self.tables.try_read() else { return };
        // SAFETY: as in `in_place`.
        let end = offset.saturating_add(total(unsafe { pieces.slices() }));
        // A store fails writes beyond its end; in a file, a cluster begins before the end.
        let Ok(size) = self.core.io.size() else { return };
        let size = if self.is_in_store { size } else { self.core.shape.round_up(size) };
        let mut at = offset;
        while at < end {
            if let Some((_, known)) = clusters.find(at, end - at) {
                at += known;
                continue;
            }
            let from = at & !(clusters.cluster() - 1);
            match self.core.lookup(from, LOOKED_UP * clusters.cluster()) {
                Ok((Entry::Data(Place { host, is_own: true }), len)) => {
                    if host.saturating_add(len) > size {
                        return;
                    }
                    clusters.insert(from, host, len);
                    at = from + len;
                }
                _ => return,
            }
        }
    }

    /// Message of the last failed job, if its error has no number.
    pub(super) fn reason(&self) -> Option<String> {
        lock(&self.reason).clone()
    }

    fn try_perform(&self, job: Job) -> Result<i32> {
        match job {
            Job::Read { pieces, offset } => BUFFER.with_borrow_mut(|buffer| {
                // SAFETY: the pieces and their memory are valid until the outcome is reaped
                // (StoreQueue::push), and it has not even been posted.
                let pieces = unsafe { pieces.slices() };
                let buffer = room(buffer, pieces);
                let _unchanged = self.shared();
                self.core.read(buffer, offset)?;
                // SAFETY: as above; they are mapped for writing, since it is a read.
                unsafe { scatter(pieces, 0, buffer) };
                Ok(buffer.len() as i32)
            }),
            Job::Write { pieces, offset, durable } => BUFFER.with_borrow_mut(|buffer| {
                // SAFETY: as for reading.
                let pieces = unsafe { pieces.slices() };
                let buffer = room(buffer, pieces);
                // SAFETY: as above.
                unsafe { gather(pieces, 0, buffer) };
                self.write_data(buffer, offset)?;
                if durable {
                    self.sync()?;
                }
                Ok(buffer.len() as i32)
            }),
            Job::Flush => self.sync().map(|()| 0),
            Job::Discard { offset, len } => self.discard(offset, len).map(|()| 0),
            Job::Zeroes { offset, len, unmap } => self.zero_range(offset, len, unmap).map(|()| 0),
        }
    }

    fn discard(&self, offset: u64, len: u64) -> Result<()> {
        let _alone = self.remap(offset, len);
        // What is in use stays: a discard is a hint.
        for Part { range, .. } in self.split(offset, len).into_iter().filter(|part| !part.is_used) {
            // The end of the disk is that of its last cluster, too.
            let end = if range.end >= self.core.size() { u64::MAX } else { range.end };
            let end = end.min(self.core.shape.round_up(self.core.size()));
            self.core.unmap(range.start, end.saturating_sub(range.start), Unmap::Discard)?;
        }
        Ok(())
    }

    pub(super) fn zero_range(&self, offset: u64, len: u64, unmap: bool) -> Result<()> {
        let _alone = self.remap(offset, len);
        let entered = |from, host| self.enter(from, host);
        for Part { range, is_used } in self.split(offset, len) {
            let len = range.end - range.start;
            match (is_used, unmap) {
                (true, _) => self.core.write_zeroes(range.start, len, &entered)?,
                (false, true) => self.core.zero(range.start, len, &entered)?,
                (false, false) => self.core.zero_in_place(range.start, len, &entered)?,
            }
        }
        Ok(())
    }

    /// Splits a range that is not on the map by what is in use. `tables` is locked exclusively.
    fn split(&self, offset: u64, len: u64) -> Vec<Part> {
        self.in_use.split(offset..offset.saturating_add(len), self.core.shape.cluster())
    }

    pub(super) fn write_data(&self, data: &[u8], offset: u64) -> Result<()> {
        let shared = self.shared();
        self.core.write(data, offset, &|from, host| self.enter(from, host))?;
        drop(shared);
        let is_long = self.core.tables().pending.is_long();
        if is_long { self.sync() } else { Ok(()) }
    }

    /// Enters a new cluster into the map. `tables` is locked.
    fn enter(&self, from: u64, host: u64) {
        if let Some(clusters) = &self.clusters {
            clusters.insert(from, host, clusters.cluster());
        }
    }

    /// Takes the image for a change that unmaps clusters of `len` bytes at `offset` of the disk.
    fn remap(&self, offset: u64, len: u64) -> Alone<'_> {
        let alone = self.alone();
        if let Some(clusters) = &self.clusters {
            clusters.forget(offset, len);
        }
        alone
    }

    /// Makes all writes durable, and frees clusters whose mappings are removed durably then.
    pub(super) fn sync(&self) -> Result<()> {
        let is_empty = self.core.tables().pending.is_empty();
        if is_empty {
            return self.core.sync();
        }
        let pending = {
            // Whoever has found an old mapping has done with it then.
            let _alone = self.alone();
            std::mem::take(&mut self.core.tables().pending)
        };
        self.core.sync()?;
        self.core.release(pending)
    }

    // Nothing is half done under a poisoned lock: it protects nothing in memory.

    fn shared(&self) -> Shared<'_> {
        self.tables.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn alone(&self) -> Alone<'_> {
        self.tables.write().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Qcow2 {
    fn drop(&mut self) {
        if let Err(error) = self.core.close(true) {
            tracing::error!(%error, "cannot close a qcow2 image; the next start checks its refcounts");
        }
    }
}

/// A transfer that may be done in place.
struct InPlace<'a> {
    clusters: &'a ClusterMap,
    slices: &'a [HostSlice],
    /// Offset on the disk.
    offset: u64,
    len: u64,
    /// Keeps the clusters of the map where they are.
    _unchanged: RwLockReadGuard<'a, ()>,
}

/// Whether the image is read and written in blocks that are no larger than a sector.
///
/// Requests for a qcow2 disk are for sectors. Where the store takes only larger blocks, `io` reads and
/// writes whole ones, which must not be written in place at the same time.
fn has_small_blocks(source: &Arc<dyn Store>) -> bool {
    u64::from(source.limits().block) <= SECTOR
}

/// A transfer at another offset.
fn moved_to(job: Job, offset: u64) -> Job {
    match job {
        Job::Read { pieces, .. } => Job::Read { pieces, offset },
        Job::Write { pieces, durable, .. } => Job::Write { pieces, offset, durable },
        other => other,
    }
}

/// A transfer of other pieces.
fn with_pieces(job: Job, list: &mut [HostSlice]) -> Job {
    let pieces = Pieces { first: NonNull::from(&mut *list).cast(), count: list.len() as u32 };
    match job {
        Job::Read { offset, .. } => Job::Read { pieces, offset },
        Job::Write { offset, durable, .. } => Job::Write { pieces, offset, durable },
        other => other,
    }
}

/// The pieces and the offset of a transfer that may be done in place.
///
/// A write that goes through to the disk takes the tables along, which earlier writes have changed.
fn transfer(job: Job) -> Option<(Pieces, u64)> {
    match job {
        Job::Read { pieces, offset } | Job::Write { pieces, offset, durable: false } => {
            Some((pieces, offset))
        }
        _ => None,
    }
}

/// Buffer for the bytes of the pieces, at most [`AT_ONCE`].
fn room<'a>(buffer: &'a mut Vec<u8>, pieces: &[HostSlice]) -> &'a mut [u8] {
    let len = total(pieces).min(AT_ONCE as u64) as usize;
    if buffer.len() < len {
        buffer.resize(len, 0);
    }
    &mut buffer[..len]
}
