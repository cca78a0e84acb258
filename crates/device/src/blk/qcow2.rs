//! qcow2 images, through the crate imago, which no other module names.
//!
//! ```text
//!   job --its clusters are known and allocated----> guest memory <-> image file, in place
//!    '----else--> worker of the pool -> imago -> image file, and its backing files (read-only)
//!                    '-- guest memory <-> a buffer of the worker
//! ```
//! **Data in place.** What lies in clusters that are allocated to the disk alone is read and
//! overwritten without imago, which would need a copy: at the offset in the file that
//! [`cluster_map`] has. All else goes through imago: new clusters, copies on write, zeroes,
//! compressed clusters, backing files, writes that go through to the disk, and all tables. A
//! cluster of the map stays where it is while [`Qcow2::tables`] is locked, shared or not, or while it is
//! listed as [in use](in_use): whoever frees or zeroes clusters locks the tables exclusively, first takes
//! the clusters off the map, and then leaves alone what is in use. Writing data in place changes no
//! table, so there is nothing that a kill could leave half done.
//!
//! **A name in an image opens nothing.** An image has the names of its backing file and external
//! data file, and a guest that can write to the image can change them (as a guest did in
//! CVE-2026-27211). Only files that the operator names are opened, in the formats that the operator
//! names.
//!
//! **Completed requests survive the process.** Tables that a request has changed are written before
//! it completes, so a killed process loses nothing that its driver has seen completed. Until a
//! flush, the data is in the host's page cache only.
//!
//! The format's code runs on bytes that a hostile guest may have written. If it panics, the image
//! is disabled: every request fails. A stack overflow cannot be caught; [`refcounts`] and
//! [`storage`](mod@storage) explain how imago 0.2.6 can be led to one, and how that is prevented.
mod bytes;
mod cluster_map;
mod create;
mod header;
mod in_use;
mod recorded;
mod refcounts;
mod storage;
mod whole;

use super::image_file::{ImageFile, Opening};
use super::pieces::{cut, gather, scatter};
use super::source::Source;
use super::{Format, Layer, LayerSource, OpenError};
use bytes::Bytes;
use cluster_map::ClusterMap;
use header::Header;
use imago::format::PreallocateMode;
use imago::raw::Raw;
use imago::{FormatAccess, Mapping, StorageOpenOptions};
use in_use::{InUse, Part};
use paravane_dma::HostSlice;
use paravane_spec::blk::SECTOR;
use paravane_store::{Job, Pieces, Store};
use std::cell::RefCell;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use storage::Storage;

pub(super) use create::create;
pub use create::{BackingName, NewQcow2};
pub use header::{Features, HeaderError};
pub(super) use in_use::QueueRanges;
pub use recorded::{Layout, Recorded};
pub use refcounts::{ClusterRole, RefcountError};
pub use whole::Extent;

type Access = FormatAccess<Storage>;
type Alone<'a> = RwLockWriteGuard<'a, ()>;
type Driver = imago::qcow2::Qcow2<Storage, Arc<Access>>;

/// Most bytes of one step: the size of a worker's buffer.
///
/// The rest of a request follows in further steps.
const AT_ONCE: usize = 1 << 20;

/// Bytes of zeroes that are written at once.
const ZEROES: u64 = 64 << 10;

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
    /// Locked exclusively while clusters are freed, which nothing may use then.
    ///
    /// `Some` until it is dropped.
    ///
    /// Shared with the overlay of a frozen image, which only reads.
    access: Option<RwLock<Arc<Access>>>,
    /// Shared: data is in place, or written to allocated clusters. Exclusive: tables change.
    ///
    /// Locked after `access`.
    ///
    /// imago writes refcounts before the tables that they count. But if other requests change both
    /// in between, a killed process leaves clusters that are in use and counted as free.
    tables: RwLock<()>,
    /// Bytes of a cluster.
    cluster: u64,
    /// Clusters that are accessed in place. `None`: none are.
    clusters: Option<ClusterMap>,
    /// Ranges of the disk that transfers in flight access in place.
    in_use: InUse,
    /// Tables that a request has changed may not be in the file: writing them has failed.
    ///
    /// The next change writes them, and until then no write is done without one.
    unwritten: AtomicBool,
    /// imago has panicked.
    broken: AtomicBool,
    /// Message of the last error, if it has no number.
    reason: Mutex<Option<String>>,
    /// The store of the image, unless it is a file, which grows by writes.
    store: Option<Arc<dyn Store>>,
    /// The backing files, for their locks.
    _layers: Vec<ImageFile>,
}

impl Qcow2 {
    /// Opens `image` with its backing files, top first.
    pub(super) fn open(image: &ImageFile, layers: &[Layer]) -> Result<Self, OpenError> {
        Self::open_with(image, Some(layers))
    }

    /// Opens `image` without the backing file that it may have.
    ///
    /// What the image itself does not hold reads as zeroes.
    pub(super) fn open_alone(image: &ImageFile) -> Result<Self, OpenError> {
        Self::open_with(image, None)
    }

    fn open_with(image: &ImageFile, layers: Option<&[Layer]>) -> Result<Self, OpenError> {
        let mut files = Vec::new();
        let opened = catch_unwind(AssertUnwindSafe(|| {
            open(image, layers, &mut files).map(|(driver, cluster)| (Access::new(driver), cluster))
        }));
        let (access, cluster) = opened.unwrap_or_else(|_| Err(unusable(&image.path, panicked())))?;
        Ok(Self::new(image, access, cluster, files))
    }

    /// Opens `image` as an overlay of an image that is open.
    pub(super) fn over(image: &ImageFile, base: Base) -> Result<Self, OpenError> {
        let opened = catch_unwind(AssertUnwindSafe(|| {
            let (mut driver, cluster) = open_driver(image)?;
            driver.set_backing(Some(base.0));
            Ok((Access::new(driver), cluster))
        }));
        let (access, cluster) = opened.unwrap_or_else(|_| Err(unusable(&image.path, panicked())))?;
        Ok(Self::new(image, access, cluster, Vec::new()))
    }

    fn new(image: &ImageFile, access: Access, cluster: u64, layers: Vec<ImageFile>) -> Self {
        Self {
            cluster,
            clusters: has_small_blocks(&image.source)
                .then(|| ClusterMap::new(cluster, access.size()))
                .flatten(),
            in_use: InUse::default(),
            access: Some(RwLock::new(Arc::new(access))),
            tables: RwLock::default(),
            unwritten: AtomicBool::new(false),
            broken: AtomicBool::new(false),
            reason: Mutex::default(),
            store: image.source.store().cloned(),
            _layers: layers,
        }
    }

    /// The image as a backing file.
    ///
    /// It may be written to until the overlay is used, and not after.
    pub(super) fn base(&self) -> io::Result<Base> {
        Ok(Base(self.read()?.clone()))
    }

    /// Sectors of the disk.
    pub(super) fn sectors(&self) -> u64 {
        self.read().map_or(0, |access| access.size() / SECTOR)
    }

    /// Sets the size of the disk in bytes.
    pub(super) fn resize(&self, size: u64) -> io::Result<()> {
        self.guarded(|| {
            let (mut access, _alone) = self.remap(0, u64::MAX)?;
            let busy = |what| io::Error::new(io::ErrorKind::ResourceBusy, what);
            if self.split(size, u64::MAX - size).iter().any(|part| part.is_used) {
                return Err(busy("requests beyond the new end are in flight; try again"));
            }
            let access =
                Arc::get_mut(&mut access).ok_or_else(|| busy("a snapshot is being made; try again"))?;
            access.resize(size, PreallocateMode::None)?;
            access.flush()?;
            access.sync()
        })
    }

    /// Does a job and answers as io_uring would.
    ///
    /// `file` does jobs of the image file, in the same way; offsets are the file's.
    pub(super) fn perform(&self, job: Job, file: impl Fn(Job) -> i32) -> i32 {
        let done = self.guarded(|| {
            self.look_up(job);
            match self.in_place(job, file) {
                Some(result) => Ok(result),
                None => self.try_perform(job),
            }
        });
        done.unwrap_or_else(|error| {
            let (number, reason) = match (error.kind(), error.raw_os_error()) {
                (_, Some(number)) => (number, None),
                (io::ErrorKind::Unsupported, None) => (libc::EOPNOTSUPP, None),
                (_, None) => (libc::EIO, Some(error.to_string())),
            };
            *self.reason.lock().unwrap_or_else(PoisonError::into_inner) = reason;
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
                    cut(slices, done, now, part);
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
        (head, ranges): (u16, &QueueRanges),
        part: &mut Vec<HostSlice>,
    ) -> Option<Job> {
        let InPlace { clusters, slices, offset, len, _unchanged } = self.may_be_in_place(job)?;
        let (host, now) = clusters.find(offset, len)?;
        ranges.enter(head, offset..offset + now);
        if now == len {
            return Some(moved_to(job, host));
        }
        cut(slices, 0, now, part);
        Some(moved_to(with_pieces(job, part), host))
    }

    /// A transfer that may be done in place, with the tables locked.
    fn may_be_in_place(&self, job: Job) -> Option<InPlace<'_>> {
        let (pieces, offset) = transfer(job)?;
        // Relaxed: see `guarded`. A write that misses `unwritten` runs at the time of the failure.
        let writes = matches!(job, Job::Write { .. });
        if self.broken.load(Ordering::Relaxed) || writes && self.unwritten.load(Ordering::Relaxed) {
            return None;
        }
        let clusters = self.clusters.as_ref()?;
        let unchanged = self.tables.try_read().ok()?;
        // SAFETY: the pieces and their memory are valid until the outcome is reaped (Engine::push),
        // and it has not even been posted; callers use the list no longer than their call takes.
        let slices = unsafe { std::slice::from_raw_parts(pieces.first.as_ptr(), pieces.count as usize) };
        Some(InPlace { clusters, slices, offset, len: total(slices), _unchanged: unchanged })
    }

    /// Enters the clusters of a transfer into the map, if they can be accessed in place.
    ///
    /// It is not worth a wait. An error may be that of a neighbour, which the job does not concern.
    fn look_up(&self, job: Job) {
        let (Some((pieces, offset)), Some(clusters)) = (transfer(job), &self.clusters) else { return };
        let Ok(access) = self.read() else { return };
        let Ok(_unchanged) = self.tables.try_read() else { return };
        // SAFETY: as in `in_place`.
        let end = offset.saturating_add(total(unsafe { pieces.slices() }));
        let mut at = offset;
        while at < end {
            if let Some((_, known)) = clusters.find(at, end - at) {
                at += known;
                continue;
            }
            let from = at & !(clusters.cluster() - 1);
            match access.get_mapping(from, LOOKED_UP * clusters.cluster()) {
                Ok((Mapping::Raw { writable: true, offset: host, .. }, len @ 1..)) => {
                    // The end of the disk may lie within a cluster.
                    let whole = len.next_multiple_of(clusters.cluster());
                    // A store fails writes beyond its end, where imago grows it first.
                    if self.store.as_ref().is_some_and(|store| host.saturating_add(whole) > store.size()) {
                        return;
                    }
                    clusters.insert(from, host, whole);
                    at = from + whole;
                }
                _ => return,
            }
        }
    }

    /// Message of the last failed job, if its error has no number.
    pub(super) fn reason(&self) -> Option<String> {
        self.reason.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn try_perform(&self, job: Job) -> io::Result<i32> {
        match job {
            Job::Read { pieces, offset } => BUFFER.with_borrow_mut(|buffer| {
                // SAFETY: the pieces and their memory are valid until the outcome is reaped
                // (Engine::push), and it has not even been posted.
                let pieces = unsafe { pieces.slices() };
                let buffer = room(buffer, pieces);
                self.read()?.read(&mut *buffer, offset)?;
                // SAFETY: as above; they are mapped for writing, since it is a read.
                unsafe { scatter(buffer, pieces) };
                Ok(buffer.len() as i32)
            }),
            Job::Write { pieces, offset, durable } => BUFFER.with_borrow_mut(|buffer| {
                // SAFETY: as for reading.
                let pieces = unsafe { pieces.slices() };
                let buffer = room(buffer, pieces);
                // SAFETY: as above.
                unsafe { gather(pieces, buffer) };
                self.write_data(buffer, offset)?;
                if durable {
                    self.sync()?;
                }
                Ok(buffer.len() as i32)
            }),
            Job::Flush => self.sync(),
            Job::Discard { offset, len } => {
                let (access, _alone) = self.remap(offset, len)?;
                // What is in use stays: a discard is a hint.
                for Part { range, .. } in self.split(offset, len).into_iter().filter(|part| !part.is_used) {
                    // SAFETY: no mapping exists: requests hold the locks that `remap` has or use
                    // other clusters, and an overlay that is being prepared reads nothing.
                    unsafe { access.discard_to_any_unsafe(range.start, range.end - range.start) }?;
                }
                self.write_tables(&access)?;
                Ok(0)
            }
            Job::Zeroes { offset, len, unmap: true } => {
                let (access, _alone) = self.remap(offset, len)?;
                // SAFETY: as above.
                let discard = |offset, len| unsafe { access.discard_to_zero_unsafe(offset, len) };
                self.zero_with(&access, (offset, len), discard)?;
                self.write_tables(&access)?;
                Ok(0)
            }
            Job::Zeroes { offset, len, unmap: false } => {
                self.change_tables(|access| {
                    self.forget(offset, len);
                    self.zero_with(access, (offset, len), |offset, len| access.write_zeroes(offset, len))
                })?;
                Ok(0)
            }
        }
    }

    /// Zeroes a range that is not on the map: by `zero`, and by writes where clusters are in use.
    ///
    /// `tables` is locked exclusively.
    fn zero_with(
        &self,
        access: &Access,
        (offset, len): (u64, u64),
        zero: impl Fn(u64, u64) -> io::Result<()>,
    ) -> io::Result<()> {
        for Part { range, is_used } in self.split(offset, len) {
            if !is_used {
                zero(range.start, range.end - range.start)?;
                continue;
            }
            let zeroes = vec![0; (range.end - range.start).min(ZEROES) as usize];
            let mut at = range.start;
            while at < range.end {
                let now = (range.end - at).min(ZEROES);
                access.write(&zeroes[..now as usize], at)?;
                at += now;
            }
        }
        Ok(())
    }

    /// Splits a range that is not on the map by what is in use. `tables` is locked exclusively.
    fn split(&self, offset: u64, len: u64) -> Vec<Part> {
        self.in_use.split(offset..offset.saturating_add(len), self.cluster)
    }

    fn write_data(&self, data: &[u8], offset: u64) -> io::Result<()> {
        let access = self.read()?;
        let unchanged = self.tables.read().unwrap_or_else(PoisonError::into_inner);
        // Relaxed: the lock orders.
        let written = !self.unwritten.load(Ordering::Relaxed);
        if written && is_allocated(&access, offset, data.len() as u64)? {
            return access.write(data, offset);
        }
        drop((unchanged, access));
        self.change_tables(|access| access.write(data, offset))
    }

    /// Runs an operation that changes tables, and writes them to the file.
    ///
    /// It does not wait for the disk.
    ///
    /// imago keeps tables in memory until a flush. If the process is killed before, completed
    /// writes would be lost.
    fn change_tables(&self, run: impl FnOnce(&Access) -> io::Result<()>) -> io::Result<()> {
        let access = self.read()?;
        let _alone = self.tables.write().unwrap_or_else(PoisonError::into_inner);
        let done = run(&access);
        // Also after an error: what is done of the change must not wait for the next one.
        let written = self.write_tables(&access);
        done.and(written)
    }

    /// Writes changed tables to the file.
    fn write_tables(&self, access: &Access) -> io::Result<()> {
        // Relaxed: `tables` is locked exclusively.
        self.unwritten.store(true, Ordering::Relaxed);
        access.flush()?;
        self.unwritten.store(false, Ordering::Relaxed);
        Ok(())
    }

    /// Takes the image for a change that frees clusters of `len` bytes at `offset` of the disk.
    fn remap(&self, offset: u64, len: u64) -> io::Result<(RwLockWriteGuard<'_, Arc<Access>>, Alone<'_>)> {
        let access = self.write()?;
        let alone = self.tables.write().unwrap_or_else(PoisonError::into_inner);
        self.forget(offset, len);
        Ok((access, alone))
    }

    /// Takes clusters off the map. `tables` is locked exclusively.
    fn forget(&self, offset: u64, len: u64) {
        if let Some(clusters) = &self.clusters {
            clusters.forget(offset, len);
        }
    }

    fn sync(&self) -> io::Result<i32> {
        self.change_tables(|_| Ok(()))?;
        self.read()?.sync()?;
        Ok(0)
    }

    /// Runs the format's code.
    fn guarded<T>(&self, run: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        // Relaxed: a thread that does not see it yet at most panics, too.
        if self.broken.load(Ordering::Relaxed) {
            return Err(panicked());
        }
        catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|_| {
            self.broken.store(true, Ordering::Relaxed);
            Err(panicked())
        })
    }

    // A poisoned lock belongs to an image that is disabled.

    fn read(&self) -> io::Result<RwLockReadGuard<'_, Arc<Access>>> {
        let access = self.access.as_ref().ok_or_else(panicked)?;
        Ok(access.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn write(&self) -> io::Result<RwLockWriteGuard<'_, Arc<Access>>> {
        let access = self.access.as_ref().ok_or_else(panicked)?;
        Ok(access.write().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Drop for Qcow2 {
    fn drop(&mut self) {
        let access = self.access.take();
        if *self.broken.get_mut() {
            // Dropping it would write its remaining state, which may be inconsistent.
            std::mem::forget(access);
        } else if catch_unwind(AssertUnwindSafe(|| drop(access))).is_err() {
            tracing::error!(
                "cannot write the tables of a qcow2 image while closing it; run `qemu-img check`"
            );
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
/// Requests for a qcow2 disk are for sectors. Where the store takes only larger blocks, imago reads and
/// writes whole ones, which must not be written in place at the same time.
fn has_small_blocks(source: &Source) -> bool {
    source.store().is_none_or(|store| u64::from(store.limits().block) <= SECTOR)
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

/// Whether the whole range can be written without changing a table.
fn is_allocated(access: &Access, mut offset: u64, mut len: u64) -> io::Result<bool> {
    while len > 0 {
        match access.get_mapping(offset, len)? {
            (Mapping::Raw { writable: true, .. }, found @ 1..) => {
                offset += found;
                len = len.saturating_sub(found);
            }
            _ => return Ok(false),
        }
    }
    Ok(true)
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

/// Bytes of the pieces.
fn total(pieces: &[HostSlice]) -> u64 {
    pieces.iter().fold(0, |sum: u64, piece| sum.saturating_add(piece.len as u64))
}

/// Buffer for the bytes of the pieces, at most [`AT_ONCE`].
fn room<'a>(buffer: &'a mut Vec<u8>, pieces: &[HostSlice]) -> &'a mut [u8] {
    let len = total(pieces).min(AT_ONCE as u64) as usize;
    if buffer.len() < len {
        buffer.resize(len, 0);
    }
    &mut buffer[..len]
}

/// An image as the backing file of an overlay.
#[derive(Debug)]
pub(super) struct Base(Arc<Access>);

impl Base {
    /// The bytes of a file, through the page cache, or of a store.
    pub(super) fn raw(source: &Source, path: &Path) -> io::Result<Self> {
        let storage = Storage::new(bytes(source, path, false)?, 0, Arc::default());
        Ok(Self(Arc::new(Access::new(Raw::open_image(storage, false)?))))
    }

    /// Size of the disk in bytes.
    pub(super) fn size(&self) -> u64 {
        self.0.size()
    }
}

/// Opens an image and its backing files. Returns the size of its clusters, too.
///
/// Without `layers`, the image is opened without the backing file that it may have.
fn open(
    image: &ImageFile,
    layers: Option<&[Layer]>,
    files: &mut Vec<ImageFile>,
) -> Result<(Driver, u64), OpenError> {
    let path = &image.path;
    let (mut driver, cluster) = open_driver(image)?;
    let Some(layers) = layers else {
        driver.set_backing(None);
        return Ok((driver, cluster));
    };
    match (driver.implicit_backing_file(), layers.split_first()) {
        (None, None) => driver.set_backing(None),
        (Some(_), Some((layer, rest))) => {
            let access = open_backing(layer, rest, files)?;
            driver.set_backing(Some(Arc::new(access)));
        }
        (Some(name), None) => {
            return Err(OpenError::Backing { path: path.to_owned(), name: name.clone() });
        }
        (None, Some(_)) => return Err(OpenError::NoBacking { path: path.to_owned() }),
    }
    Ok((driver, cluster))
}

/// Opens an image without its backing files.
fn open_driver(image: &ImageFile) -> Result<(Driver, u64), OpenError> {
    let (path, writable) = (&image.path, !image.read_only);
    let failed = |source| unusable(path, source);
    let header = Header::read(&image.source)
        .map_err(|source| OpenError::Header { path: path.clone(), source: Box::new(source) })?;
    if header.data_file {
        return Err(OpenError::DataFile { path: path.to_owned() });
    }
    if writable {
        refcounts::check_and_repair(&image.source, image.size / SECTOR * SECTOR, &header)
            .map_err(|source| OpenError::Refcounts { path: path.clone(), source })?;
    }
    let sealed = Arc::new(AtomicBool::new(false));
    let storage = storage(image, header.cluster(), sealed.clone()).map_err(failed)?;
    let mut driver = Driver::open_image(storage, writable).map_err(failed)?;
    if writable && header.autoclear != 0 {
        // Opening the image has cleared them. That must be on disk before the first write.
        image.source.sync().map_err(failed)?;
        if header.has_bitmaps() {
            tracing::warn!(
                path = %path.display(),
                "the image has dirty bitmaps, which are not updated; QEMU will report them as inconsistent"
            );
        }
    }
    // Relaxed: no other thread has the image yet.
    sealed.store(true, Ordering::Relaxed);
    driver.set_data_file(None);
    Ok((driver, header.cluster()))
}

/// Opens a backing file.
fn open_backing(layer: &Layer, rest: &[Layer], files: &mut Vec<ImageFile>) -> Result<Access, OpenError> {
    let opening = Opening { format: layer.format, read_only: true, lock: true, direct: false, frozen: false };
    let image = match &layer.source {
        LayerSource::Path(path) => ImageFile::open(path, opening)?,
        LayerSource::Store(store) => ImageFile::over(store.clone(), opening)?,
    };
    let access = match layer.format {
        Format::Qcow2 => Access::new(open(&image, Some(rest), files)?.0),
        Format::Raw if rest.is_empty() => {
            let failed = |source| unusable(&image.path, source);
            let storage = storage(&image, 0, Arc::default()).map_err(failed)?;
            Access::new(Raw::open_image(storage, false).map_err(failed)?)
        }
        Format::Raw => return Err(OpenError::NoBacking { path: image.path }),
    };
    files.push(image);
    Ok(access)
}

fn storage(image: &ImageFile, first: u64, sealed: Arc<AtomicBool>) -> io::Result<Storage> {
    let bytes = bytes(&image.source, &image.path, !image.read_only)?;
    Ok(Storage::new(bytes, first, sealed))
}

fn bytes(source: &Source, path: &Path, writable: bool) -> io::Result<Bytes> {
    Ok(match source.try_clone()? {
        Source::File(file) => {
            let options = StorageOpenOptions::new().write(writable).filename(path);
            Bytes::File(imago::file::File::from_open_file(file, options)?)
        }
        Source::Store(store) => Bytes::Store(store.into()),
    })
}

fn unusable(path: &Path, source: io::Error) -> OpenError {
    OpenError::Qcow2 { path: path.to_owned(), source }
}

fn panicked() -> io::Error {
    io::Error::other(
        "the image is disabled: the qcow2 code has panicked on it; run `qemu-img check` on the image",
    )
}
