//! qcow2 images, through the crate imago, which no other module names.
//!
//! ```text
//!   job -> worker of the pool -> imago -> image file, and its backing files (read-only)
//!             '-- guest memory <-> a buffer of the worker
//! ```
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
mod header;
mod refcounts;
mod storage;

use super::engine::Job;
use super::image_file::{ImageFile, Opening};
use super::pieces::{gather, scatter};
use super::{Format, Layer, OpenError};
use header::Header;
use imago::format::PreallocateMode;
use imago::raw::Raw;
use imago::{FormatAccess, Mapping, StorageOpenOptions};
use paravane_dma::HostSlice;
use paravane_spec::blk::SECTOR;
use std::cell::RefCell;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use storage::Storage;

pub use header::{Features, HeaderError};
pub use refcounts::{ClusterRole, RefcountError};

type Access = FormatAccess<Storage>;
type Driver = imago::qcow2::Qcow2<Storage>;

/// Most bytes of one step: the size of a worker's buffer.
///
/// The rest of a request follows in further steps.
const AT_ONCE: usize = 1 << 20;

thread_local! {
    static BUFFER: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// An open image.
#[derive(Debug)]
pub(super) struct Qcow2 {
    /// Locked exclusively while clusters are freed, which nothing may use then.
    ///
    /// `Some` until it is dropped.
    access: Option<RwLock<Access>>,
    /// Shared: data is written to allocated clusters. Exclusive: tables change.
    ///
    /// imago writes refcounts before the tables that they count. But if other requests change both
    /// in between, a killed process leaves clusters that are in use and counted as free.
    tables: RwLock<()>,
    /// imago has panicked.
    broken: AtomicBool,
    /// Message of the last error, if it has no number.
    reason: Mutex<Option<String>>,
    /// The backing files, for their locks.
    _layers: Vec<ImageFile>,
}

impl Qcow2 {
    /// Opens `image` with its backing files, top first.
    pub(super) fn open(image: &ImageFile, layers: &[Layer]) -> Result<Self, OpenError> {
        let mut files = Vec::with_capacity(layers.len());
        let opened = catch_unwind(AssertUnwindSafe(|| open(image, layers, &mut files).map(Access::new)));
        let access = opened.unwrap_or_else(|_| Err(unusable(&image.path, panicked())))?;
        Ok(Self {
            access: Some(RwLock::new(access)),
            tables: RwLock::default(),
            broken: AtomicBool::new(false),
            reason: Mutex::default(),
            _layers: files,
        })
    }

    /// Sectors of the disk.
    pub(super) fn sectors(&self) -> u64 {
        self.read().map_or(0, |access| access.size() / SECTOR)
    }

    /// Sets the size of the disk in bytes.
    pub(super) fn resize(&self, size: u64) -> io::Result<()> {
        self.guarded(|| {
            let mut access = self.write()?;
            access.resize(size, PreallocateMode::None)?;
            access.flush()?;
            access.sync()
        })
    }

    /// Does a job and answers as io_uring would.
    pub(super) fn perform(&self, job: Job) -> i32 {
        let done = self.guarded(|| self.try_perform(job));
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
            Job::Sync => self.sync(),
            Job::Allocate { mode, offset, len, discard } => {
                if discard {
                    let mut access = self.write()?;
                    access.discard_to_any(offset, len)?;
                    access.flush()?;
                } else if mode & libc::FALLOC_FL_PUNCH_HOLE != 0 {
                    let mut access = self.write()?;
                    access.discard_to_zero(offset, len)?;
                    access.flush()?;
                } else {
                    self.change_tables(|access| access.write_zeroes(offset, len))?;
                }
                Ok(0)
            }
        }
    }

    fn write_data(&self, data: &[u8], offset: u64) -> io::Result<()> {
        let access = self.read()?;
        let unchanged = self.tables.read().unwrap_or_else(PoisonError::into_inner);
        if is_allocated(&access, offset, data.len() as u64)? {
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
        run(&access)?;
        access.flush()
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

    fn read(&self) -> io::Result<RwLockReadGuard<'_, Access>> {
        let access = self.access.as_ref().ok_or_else(panicked)?;
        Ok(access.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn write(&self) -> io::Result<RwLockWriteGuard<'_, Access>> {
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

/// Buffer for the bytes of the pieces, at most [`AT_ONCE`].
fn room<'a>(buffer: &'a mut Vec<u8>, pieces: &[HostSlice]) -> &'a mut [u8] {
    let len = pieces.iter().fold(0_usize, |sum, piece| sum.saturating_add(piece.len)).min(AT_ONCE);
    if buffer.len() < len {
        buffer.resize(len, 0);
    }
    &mut buffer[..len]
}

/// Opens an image and its backing files.
fn open(image: &ImageFile, layers: &[Layer], files: &mut Vec<ImageFile>) -> Result<Driver, OpenError> {
    let (path, writable) = (&image.path, !image.read_only);
    let failed = |source| unusable(path, source);
    let header = Header::read(&image.file)
        .map_err(|source| OpenError::Header { path: path.clone(), source: Box::new(source) })?;
    if header.data_file {
        return Err(OpenError::DataFile { path: path.to_owned() });
    }
    if writable {
        refcounts::check_and_repair(&image.file, image.size / SECTOR * SECTOR, &header)
            .map_err(|source| OpenError::Refcounts { path: path.clone(), source })?;
    }
    let sealed = Arc::new(AtomicBool::new(false));
    let storage = storage(image, header.cluster(), sealed.clone()).map_err(failed)?;
    let mut driver = Driver::open_image(storage, writable).map_err(failed)?;
    if writable && header.autoclear != 0 {
        // Opening the image has cleared them. That must be on disk before the first write.
        image.file.sync_data().map_err(failed)?;
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
    match (driver.implicit_backing_file(), layers.split_first()) {
        (None, None) => driver.set_backing(None),
        (Some(_), Some((layer, rest))) => {
            let access = open_backing(layer, rest, files)?;
            driver.set_backing(Some(access));
        }
        (Some(name), None) => {
            return Err(OpenError::Backing { path: path.to_owned(), name: name.clone() });
        }
        (None, Some(_)) => return Err(OpenError::NoBacking { path: path.to_owned() }),
    }
    Ok(driver)
}

/// Opens a backing file.
fn open_backing(layer: &Layer, rest: &[Layer], files: &mut Vec<ImageFile>) -> Result<Access, OpenError> {
    let opening = Opening { format: layer.format, read_only: true, lock: true, direct: false };
    let image = ImageFile::open(&layer.path, opening)?;
    let access = match layer.format {
        Format::Qcow2 => Access::new(open(&image, rest, files)?),
        Format::Raw if rest.is_empty() => {
            let failed = |source| unusable(&layer.path, source);
            let storage = storage(&image, 0, Arc::default()).map_err(failed)?;
            Access::new(Raw::open_image(storage, false).map_err(failed)?)
        }
        Format::Raw => return Err(OpenError::NoBacking { path: layer.path.clone() }),
    };
    files.push(image);
    Ok(access)
}

fn storage(image: &ImageFile, first: u64, sealed: Arc<AtomicBool>) -> io::Result<Storage> {
    let options = StorageOpenOptions::new().write(!image.read_only).filename(&image.path);
    let file = imago::file::File::from_open_file(image.file.try_clone()?, options)?;
    Ok(Storage::new(file, first, sealed))
}

fn unusable(path: &Path, source: io::Error) -> OpenError {
    OpenError::Qcow2 { path: path.to_owned(), source }
}

fn panicked() -> io::Error {
    io::Error::other(
        "the image is disabled: the qcow2 code has panicked on it; run `qemu-img check` on the image",
    )
}
