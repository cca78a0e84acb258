//! The image of a disk: a file or another store, and the format in it.
//!
//! ```text
//!   file, or another store
//!     '--> ImageFile ------------------ raw --> Image
//!             '-----> Qcow2::open --- qcow2 -----^
//! ```
use super::image_file::ImageFile;
use super::qcow2::{Base, Qcow2};
use super::whole_blocks;
use super::{Format, Layer, OpenError, OpenReason};
use paravane_spec::blk::SECTOR;
use paravane_store::Job;
use paravane_store::file::FileStore;
use paravane_store::lock;
use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// An open image.
#[derive(Debug)]
pub(super) struct Image {
    /// Dropped before the source, which holds the lock.
    pub(super) qcow2: Option<Qcow2>,
    pub(super) file: ImageFile,
    /// Size of the disk in sectors, which requests are checked against.
    ///
    /// Updated by [`Image::look`]; until then, a file that has shrunk shows as I/O errors.
    sectors: AtomicU64,
    /// Error of the last look.
    look_error: Mutex<Option<String>>,
    /// Locked while a part of a block of the file is written.
    part_of_block: Mutex<()>,
    /// The frozen image below an overlay that was made while the disk was served.
    base: Option<Frozen>,
}

/// An image that is the backing file of another one from now on.
#[derive(Debug)]
struct Frozen {
    /// Keeps its file, and the lock.
    image: Arc<Image>,
    /// Its last writes may not be on the disk.
    unsynced: Mutex<bool>,
}

impl Image {
    /// Serves the disk that `qcow2` finds in the file.
    pub(super) fn through(file: ImageFile, qcow2: Qcow2) -> Result<Self, OpenError> {
        let (sectors, block) = (qcow2.sectors(), file.block);
        let size = sectors * SECTOR;
        match sectors {
            0 => Err(OpenReason::Empty.at(file.path)),
            _ if !size.is_multiple_of(block) => Err(OpenReason::DiskSize { size, block }.at(file.path)),
            sectors => Ok(Self::new(file, Some(qcow2), sectors)),
        }
    }

    /// Serves the disk in an image of this format.
    pub(super) fn open(file: ImageFile, format: Format, backing: &[Layer]) -> Result<Self, OpenError> {
        match format {
            Format::Qcow2 => {
                let qcow2 = Qcow2::open(&file, backing)?;
                Self::through(file, qcow2)
            }
            Format::Raw if backing.is_empty() => {
                let sectors = file.size / SECTOR;
                Ok(Self::new(file, None, sectors))
            }
            Format::Raw => Err(OpenReason::NoBacking.at(file.path)),
        }
    }

    fn new(mut file: ImageFile, qcow2: Option<Qcow2>, sectors: u64) -> Self {
        // A format frees whole clusters.
        file.discard_block = qcow2.as_ref().map_or(0, Qcow2::cluster).max(file.discard_block);
        Self {
            qcow2,
            file,
            sectors: AtomicU64::new(sectors),
            look_error: Mutex::new(None),
            part_of_block: Mutex::default(),
            base: None,
        }
    }

    /// Serves the disk of `base`, with changes in an overlay that is open.
    pub(super) fn overlay(file: ImageFile, qcow2: Qcow2, base: Arc<Self>) -> Result<Self, OpenError> {
        let mut image = Self::through(file, qcow2)?;
        image.file.block = base.file.block;
        image.file.physical_block = base.file.physical_block;
        image.file.discard_block = base.file.discard_block;
        image.base = Some(Frozen { image: base, unsynced: Mutex::new(true) });
        Ok(image)
    }

    /// The image as a backing file.
    pub(super) fn as_base(&self) -> io::Result<Base> {
        match &self.qcow2 {
            Some(qcow2) => Ok(qcow2.base()),
            None if self.file.direct.is_none() => Base::raw(self.file.source.clone()),
            // Reads of an overlay have any alignment. The other description is not one for direct I/O.
            // A thread that reads by it keeps the process, and so does not betray that it is gone.
            None => match self.file.guards.process() {
                Some(file) => Base::raw(FileStore::of(file.try_clone()?)),
                None => Err(io::Error::new(
                    io::ErrorKind::Unsupported,
                    "direct I/O on a file system without locks has no snapshots",
                )),
            },
        }
    }

    /// Does a job and waits for it. Returns its result as io_uring would.
    ///
    /// # Safety
    /// As [`paravane_store::Store::perform`].
    pub(super) unsafe fn perform(&self, job: Job) -> i32 {
        if let (Job::Flush, Err(error)) = (job, self.sync_base()) {
            return -error.raw_os_error().unwrap_or(libc::EIO);
        }
        // SAFETY: the caller promises what is asked for.
        let on_source = |job| unsafe { self.perform_on_source(job) };
        match &self.qcow2 {
            Some(qcow2) => qcow2.perform(job, on_source),
            None => on_source(job),
        }
    }

    /// # Safety
    /// As [`paravane_store::Store::perform`].
    unsafe fn perform_on_source(&self, job: Job) -> i32 {
        // SAFETY: the caller promises what is asked for.
        let result = unsafe { self.file.source.perform(job) };
        let is_transfer = matches!(job, Job::Read { .. } | Job::Write { .. });
        let Some(block) = self.larger_block().filter(|_| result == -libc::EINVAL && is_transfer) else {
            return result;
        };
        // SAFETY: the same.
        match unsafe { whole_blocks::perform(&*self.file.source, block, &self.part_of_block, job) } {
            Ok(moved) => i32::try_from(moved).unwrap_or(i32::MAX),
            Err(error) => -error.raw_os_error().unwrap_or(libc::EIO),
        }
    }

    /// Block in bytes that direct I/O on the file takes, if the disk has smaller ones.
    pub(super) fn larger_block(&self) -> Option<u64> {
        self.file.direct.map(|direct| direct.block).filter(|block| *block > self.file.block)
    }

    /// Makes all completed writes durable.
    pub(super) fn sync(&self) -> io::Result<()> {
        // SAFETY: the job has no memory.
        match unsafe { self.perform(Job::Flush) } {
            0.. => Ok(()),
            error => Err(io::Error::from_raw_os_error(-error)),
        }
    }

    /// Makes the last writes to the image below durable, once.
    ///
    /// A driver's flush covers what it wrote before the overlay was there.
    pub(super) fn sync_base(&self) -> io::Result<()> {
        let Some(Frozen { image, unsynced }) = &self.base else { return Ok(()) };
        let mut unsynced = lock(unsynced);
        if *unsynced {
            image.sync()?;
            *unsynced = false;
            if let Some(Err(error)) = image.qcow2.as_ref().map(Qcow2::finish) {
                tracing::warn!(path = %image.file.path.display(), %error, "the image below keeps its dirty mark");
            }
        }
        Ok(())
    }

    /// The file.
    ///
    /// # Errors
    /// The image lies in another store.
    pub(super) fn file(&self) -> io::Result<&File> {
        self.file
            .source
            .file()
            .ok_or_else(|| io::Error::new(io::ErrorKind::Unsupported, "the image is not a file"))
    }

    /// Bytes of the file to map: of a raw image, those of the disk.
    pub(super) fn mapped_len(&self) -> io::Result<u64> {
        match self.qcow2 {
            None => Ok(self.sectors() * SECTOR),
            Some(_) => Ok(self.file.source.try_size()? / SECTOR * SECTOR),
        }
    }

    /// Whether the image is a block device or a store that ends before `end`.
    ///
    /// A file becomes longer by writes.
    pub(super) fn is_shorter(&self, end: u64) -> bool {
        self.file.source.end() < end
    }

    /// Whether the image is shorter than when it was opened, as far as is known.
    pub(super) fn has_shrunk(&self) -> bool {
        self.is_shorter(self.file.size)
    }

    /// Asks the server of a store for its size. May block. Returns [`Image::has_shrunk`].
    pub(super) fn ask_size(&self) -> bool {
        if let Err(error) = self.file.source.refresh() {
            tracing::debug!(path = %self.file.path.display(), %error, "the size of the image is unknown");
        }
        self.has_shrunk()
    }
    /// Size in sectors.
    pub(super) fn sectors(&self) -> u64 {
        // Relaxed: it orders nothing. A request that was checked against the old size gets an error
        // from the file.
        self.sectors.load(Ordering::Relaxed)
    }

    /// Updates the size of the disk from the file's, and returns it in sectors.
    ///
    /// A partial block at the end is left out.
    pub(super) fn look(&self) -> io::Result<u64> {
        let found = match &self.qcow2 {
            Some(qcow2) => Ok(qcow2.sectors() * SECTOR),
            None => self.file.source.try_size(),
        };
        let found = found.map(|end| end / self.file.block * (self.file.block / SECTOR));
        *lock(&self.look_error) = found.as_ref().err().map(ToString::to_string);
        let sectors = found?;
        // Relaxed: as above.
        self.sectors.store(sectors, Ordering::Relaxed);
        Ok(sectors)
    }

    /// Why the last look failed.
    pub(super) fn look_error(&self) -> Option<String> {
        lock(&self.look_error).clone()
    }

    /// Sets the size of the disk in bytes.
    pub(super) fn resize(&self, size: u64) -> io::Result<()> {
        match &self.qcow2 {
            Some(qcow2) => qcow2.resize(size),
            None => self.file.source.set_size(size),
        }
    }
}
