//! Images in the format qcow2, by way of the crate imago: the only place that names it.
//!
//! ```text
//!   job -> worker of the pool -> imago -> image file, and the images that it is based on (read-only)
//!             '-- guest memory <-> a buffer of the worker's
//! ```
//! **A name in an image opens nothing.** An image says on what others it is based, and where its data are; whoever writes to
//! the image can write anything there (CVE-2026-27211 is about a guest that did). What is opened is what the operator has named, in
//! the format that the operator has named.
//!
//! **What is complete outlives the process.** The tables that a request has changed are written before it completes, so that a
//! process that is killed loses nothing of what its driver has seen done. Until a flush only the host's memory has it.
//!
//! The format's code runs on bytes that a hostile guest has helped to write. If it panics, the image is not used any more: every
//! request fails. One thing cannot be caught, a stack that is used up; how imago 0.2.6 can be brought to that, and how an image is
//! kept from it, is told in [`refcounts`] and [`storage`](mod@storage).
mod header;
mod refcounts;
mod storage;

use super::engine::Job;
use super::image::{Image, Opening};
use super::pieces::{gather, scatter};
use super::{Format, Layer, OpenError};
use header::Header;
use imago::format::PreallocateMode;
use imago::raw::Raw;
use imago::{FormatAccess, Mapping, StorageOpenOptions};
use paravane_dma::HostSlice;
use paravane_spec::blk::SECTOR;
use std::cell::RefCell;
use std::fs::File;
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

/// Most bytes that are moved at once: a worker's buffer. The rest of a request is moved after that.
const AT_ONCE: usize = 1 << 20;

thread_local! {
    static BUFFER: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// An open image.
#[derive(Debug)]
pub(super) struct Qcow2 {
    /// Written when clusters are given up: nobody may be using them. There until it is dropped.
    access: Option<RwLock<Access>>,
    /// Held to read while data are written to where the tables say, and to write while tables are changed and written to the
    /// file. imago writes refcounts before what they count; but if other requests change both in between, a process that is
    /// killed leaves clusters that are in use and counted as free.
    tables: RwLock<()>,
    /// imago has panicked.
    broken: AtomicBool,
    /// Words of the last error, if it has no number.
    reason: Mutex<Option<String>>,
    /// The images that it is based on, for their locks.
    _layers: Vec<File>,
}

impl Qcow2 {
    /// Opens what is in `image`, based on `layers`, the next one first.
    pub(super) fn open(image: &Image, layers: &[Layer]) -> Result<Self, OpenError> {
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

    /// Makes the disk so many bytes large.
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

    /// What the last failed job said, if its error has no number.
    pub(super) fn reason(&self) -> Option<String> {
        self.reason.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn try_perform(&self, job: Job) -> io::Result<i32> {
        match job {
            Job::Read { pieces, offset } => BUFFER.with_borrow_mut(|buffer| {
                // SAFETY: the pieces and their memory are valid until the outcome is reaped (Engine::push), and it has
                // not even been posted.
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

    /// Runs what changes tables, and writes them to the file, without waiting for the disk. imago keeps them in memory until a
    /// flush; if the process is killed before that, a write that the driver has seen complete would be lost.
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
        // Relaxed: who does not see it yet may break it once more.
        if self.broken.load(Ordering::Relaxed) {
            return Err(panicked());
        }
        catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|_| {
            self.broken.store(true, Ordering::Relaxed);
            Err(panicked())
        })
    }

    // A lock that is poisoned belongs to an image that is not used any more.

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
            // Dropping it would write what it still has to write, out of order as it is.
            std::mem::forget(access);
        } else if catch_unwind(AssertUnwindSafe(|| drop(access))).is_err() {
            tracing::error!("a qcow2 image could not be written to its end");
        }
    }
}

/// Whether data can be written to the whole range without changing a table.
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

/// Room for the bytes of the pieces, or for the first of them.
fn room<'a>(buffer: &'a mut Vec<u8>, pieces: &[HostSlice]) -> &'a mut [u8] {
    let len = pieces.iter().fold(0_usize, |sum, piece| sum.saturating_add(piece.len)).min(AT_ONCE);
    if buffer.len() < len {
        buffer.resize(len, 0);
    }
    &mut buffer[..len]
}

/// Opens one image, and those that it is based on.
fn open(image: &Image, layers: &[Layer], files: &mut Vec<File>) -> Result<Driver, OpenError> {
    let (path, writable) = (&image.path, !image.read_only);
    let failed = |source| unusable(path, source);
    let header = Header::read(&image.file)
        .map_err(|source| OpenError::Header { path: path.clone(), source: Box::new(source) })?;
    if header.data_file {
        return Err(OpenError::DataFile { path: path.to_owned() });
    }
    if writable {
        refcounts::settle(&image.file, image.sectors() * SECTOR, &header)
            .map_err(|source| OpenError::Refcounts { path: path.clone(), source })?;
    }
    let sealed = Arc::new(AtomicBool::new(false));
    let storage = storage(image, header.cluster(), sealed.clone()).map_err(failed)?;
    let mut driver = Driver::open_image(storage, writable).map_err(failed)?;
    if writable && header.autoclear != 0 {
        // Opening it has cleared them. That must be on disk before the first write is.
        image.file.sync_data().map_err(failed)?;
        if header.has_bitmaps() {
            tracing::warn!(
                path = %path.display(),
                "the image has dirty bitmaps, which are not kept up to date; QEMU will call them inconsistent"
            );
        }
    }
    // Relaxed: nobody else has the image yet.
    sealed.store(true, Ordering::Relaxed);
    driver.set_data_file(None);
    match (driver.implicit_backing_file(), layers.split_first()) {
        (None, None) => driver.set_backing(None),
        (Some(_), Some((layer, rest))) => {
            let access = based_on(layer, rest, files)?;
            driver.set_backing(Some(access));
        }
        (Some(name), None) => {
            return Err(OpenError::Backing { path: path.to_owned(), name: name.clone() });
        }
        (None, Some(_)) => return Err(OpenError::NoBacking { path: path.to_owned() }),
    }
    Ok(driver)
}

/// Opens an image that another one is based on.
fn based_on(layer: &Layer, rest: &[Layer], files: &mut Vec<File>) -> Result<Access, OpenError> {
    let opening = Opening { format: layer.format, read_only: true, lock: true, direct: false };
    let image = Image::open(&layer.path, opening)?;
    let access = match layer.format {
        Format::Qcow2 => Access::new(open(&image, rest, files)?),
        Format::Raw if rest.is_empty() => {
            let failed = |source| unusable(&layer.path, source);
            let storage = storage(&image, 0, Arc::default()).map_err(failed)?;
            Access::new(Raw::open_image(storage, false).map_err(failed)?)
        }
        Format::Raw => return Err(OpenError::NoBacking { path: layer.path.clone() }),
    };
    files.push(image.file);
    Ok(access)
}

fn storage(image: &Image, first: u64, sealed: Arc<AtomicBool>) -> io::Result<Storage> {
    let options = StorageOpenOptions::new().write(!image.read_only).filename(&image.path);
    let file = imago::file::File::from_open_file(image.file.try_clone()?, options)?;
    Ok(Storage::new(file, first, sealed))
}

fn unusable(path: &Path, source: io::Error) -> OpenError {
    OpenError::Qcow2 { path: path.to_owned(), source }
}

fn panicked() -> io::Error {
    io::Error::other("the image is not used any more: it has driven its format's code out of order")
}
