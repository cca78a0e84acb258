//! The file of an image: opened, checked and locked. Or another store, which was opened before.
//!
//! Nothing of this changes the file.
mod block_device;
mod lock;

use super::direct::Alignment;
use super::file_id::FileId;
use super::magic;
use super::mark;
use super::{Format, OpenError, OpenReason};
use lock::{INTERVAL, PATIENCE, Refusal, Slot};
use paravane_spec::blk::SECTOR;
use paravane_store::Store;
use paravane_store::file::FileStore;
use paravane_store::file::PresentPages;
use rustix::fs::OFlags;
use std::cell::Cell;
use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

/// Largest physical block in bytes that drivers see.
///
/// `st_blksize` is the preferred size of an I/O: on local file systems the block, on network ones
/// megabytes.
const MAX_PHYSICAL: u64 = 4096;

/// Magic numbers of file systems in memory: tmpfs (memfds, too) and ramfs.
const IN_MEMORY: [i64; 2] = [0x0102_1994, 0x8584_58f6];

/// The open file or store of an image, or of a backing file.
#[derive(Debug)]
pub(super) struct ImageFile {
    /// Holds the lock.
    pub(super) source: Arc<dyn Store>,
    pub(super) guards: FileGuards,
    pub(super) path: PathBuf,
    /// Size of the file in bytes.
    pub(super) size: u64,
    pub(super) read_only: bool,
    /// The data is in memory or swap, so that I/O need not wait for a disk.
    pub(super) in_memory: bool,
    /// Physical block in bytes.
    pub(super) physical_block: u64,
    /// Bytes below which a discard frees nothing.
    pub(super) discard_block: u64,
    /// Alignment of direct I/O, if that is on.
    pub(super) direct: Option<Alignment>,
    /// Block in bytes that drivers are told: a power of two from 512 to 4096.
    pub(super) block: u64,
}

/// Descriptors that stay open with an image, and that no request uses.
///
/// Dropped after the image.
#[derive(Debug, Default)]
pub(super) struct FileGuards {
    /// Says that this process is alive.
    slot: Option<Slot>,
    /// The exclusive use of a block device, if the image's descriptor does not have it.
    _claim: Option<File>,
    /// The image is not locked: other processes may have it open, too.
    pub(super) is_shared: bool,
}

impl FileGuards {
    /// The image to map, where `file` is that of its requests.
    ///
    /// To unmap a large image takes milliseconds, for which its lock would be held on.
    pub(super) fn file_to_map<'a>(&'a self, file: &'a File) -> &'a File {
        self.slot.as_ref().map_or(file, Slot::file)
    }

    /// The description that says that this process is alive.
    pub(super) fn process(&self) -> Option<&File> {
        self.slot.as_ref().map(Slot::file)
    }

    /// Checks before a queue starts that no dead process has requests in flight for `file`.
    ///
    /// Waits for [`PATIENCE`]. A locked image has no such requests.
    ///
    /// # Errors
    /// It still has.
    pub(super) fn check(&self, file: &File) -> io::Result<()> {
        if !self.is_shared || lock::patiently(|| Ok(!lock::requests_in_flight(file)))? {
            return Ok(());
        }
        let what = "requests of a process that is gone are in flight for the image, which is not locked; \
                    connect again when its storage has done them";
        Err(io::Error::new(io::ErrorKind::ResourceBusy, what))
    }
}

/// An open image that is not locked yet, as a dead process may have requests in flight for it.
#[derive(Debug)]
pub(super) struct UnlockedFile {
    pub(super) file: File,
    slot: Option<Slot>,
    path: PathBuf,
    pub(super) opening: Opening,
    /// The descriptor has the exclusive use of a block device, or need not have it.
    claimed: bool,
}

impl UnlockedFile {
    /// Opens the image at `path`.
    pub(super) fn open(path: &Path, opening: Opening) -> Result<Self, OpenError> {
        let read_only = opening.read_only;
        let os = |source| OpenReason::Os { source }.at(path);
        // Checked before it is opened: opening a device node or a FIFO can have an effect by
        // itself.
        let expected = std::fs::metadata(path).map_err(os)?;
        check_kind(path, &expected)?;

        // O_NONBLOCK: the file may have become a FIFO since the check, and must not block this
        // process.
        let flags = libc::O_NONBLOCK | libc::O_NOCTTY;
        let open =
            |more| OpenOptions::new().read(true).write(!read_only).custom_flags(flags | more).open(path);
        let is_claimed = |error: &io::Error| error.raw_os_error() == Some(libc::EBUSY);
        let exclusive = expected.file_type().is_block_device() && !read_only && opening.lock;
        let (file, claimed) = if exclusive {
            let mut in_flight = false;
            // Without O_CREAT, O_EXCL is defined for block devices only: EBUSY while the host has
            // it mounted, or another process claims it.
            let claim = || match open(libc::O_EXCL) {
                Err(error) if is_claimed(&error) => {
                    let file = open(0)?;
                    in_flight = lock::requests_in_flight(&file);
                    Ok(in_flight.then_some((file, false)))
                }
                file => file.map(|file| Some((file, true))),
            };
            lock::patiently_some(claim).map_err(os)?.ok_or(OpenReason::InUse.at(path))?
        } else {
            (open(0).map_err(os)?, true)
        };
        check_kind(path, &file.metadata().map_err(os)?)?;
        check_mark(&file, path, opening)?;
        // Held from here on: another process that finds the image locked knows that this one lives.
        let slot = Slot::take(&file, open(0).ok(), read_only);
        Ok(Self { file, slot, path: path.to_owned(), opening, claimed })
    }

    /// Another handle of its bytes.
    pub(super) fn source(&self) -> Option<Arc<dyn Store>> {
        self.file.try_clone().ok().map(FileStore::of)
    }

    /// The file.
    pub(super) fn file_id(&self) -> Option<FileId> {
        FileId::of_file(&self.file).ok()
    }

    /// Whether the file would have a mark if it were frozen.
    pub(super) fn has_marks(&self) -> bool {
        super::mark::is_possible(&self.file)
    }

    /// Names the block that drivers are told.
    pub(super) fn set_block(&mut self, block: u64) {
        self.opening.block = Some(block);
    }

    /// The pages of an image in memory that have data; `None` for others, and if they are not known.
    pub(super) fn present_pages(&self) -> Option<PresentPages> {
        let metadata = self.file.metadata().ok()?;
        let in_memory = is_in_memory(&self.file, &metadata).ok()?;
        in_memory.then(|| PresentPages::find(&self.file, metadata.len()).ok()).flatten()
    }

    /// Locks the image.
    ///
    /// `Err` of the inner result: a dead process has requests in flight for it; try again later.
    ///
    /// # Errors
    /// [`OpenReason::InUse`]: a live process has it locked. Or the file cannot be used.
    pub(super) fn lock(self) -> Result<Result<ImageFile, Self>, OpenError> {
        let (path, opening) = (self.path.clone(), self.opening);
        Ok(match self.hold()? {
            Ok(HeldFile { file, guards }) => Ok(ImageFile::locked(file, &path, opening, guards)?),
            Err(unlocked) => Err(unlocked),
        })
    }

    /// As [`UnlockedFile::lock`], whatever is in the file.
    fn hold(self) -> Result<Result<HeldFile, Self>, OpenError> {
        let Self { file, slot, path, opening, claimed } = self;
        let os = |source| OpenReason::Os { source }.at(&path);
        let lock = || match opening.lock {
            true => lock::whole(&file, opening.read_only),
            false => Ok(None),
        };
        let refusal = Cell::new(Refusal::Locked);
        // The holder may have ended meanwhile, be about to release the lock, or seem to live because a
        // child process that is about to start a program has a copy of its descriptors. A dead process
        // may have the image open without a lock.
        let attempt = || {
            let refused = lock()?;
            refused.inspect(|why| refusal.set(*why));
            Ok(if lock::requests_in_flight(&file) { Some(false) } else { refused.is_none().then_some(true) })
        };
        match lock::patiently_some(attempt).map_err(os)? {
            Some(true) => {}
            Some(false) => return Ok(Err(Self { file, slot, path, opening, claimed })),
            None => return Err(refusal.get().reason().at(path)),
        }
        check_place(&file, &path)?;
        let claim = match claimed {
            true => None,
            false => claim(&path)?,
        };
        let guards = FileGuards { slot, _claim: claim, is_shared: !opening.lock };
        Ok(Ok(HeldFile { file, guards }))
    }
}

/// A file that is locked as an image, whatever is in it.
#[derive(Debug)]
pub(super) struct HeldFile {
    file: File,
    guards: FileGuards,
}

impl HeldFile {
    /// Opens and locks the file at `path`.
    pub(super) fn open(path: &Path, opening: Opening) -> Result<Self, OpenError> {
        let mut unlocked = UnlockedFile::open(path, opening)?;
        let start = Instant::now();
        loop {
            match unlocked.hold()? {
                Ok(held) => break check_mark(&held.file, path, opening).map(|()| held),
                Err(_) if start.elapsed() >= PATIENCE => {
                    return Err(OpenReason::RequestsInFlight.at(path));
                }
                Err(still) => unlocked = still,
            }
            std::thread::sleep(INTERVAL[1]);
        }
    }

    /// Checks that the file is still at `path`.
    pub(super) fn check(&self, path: &Path) -> Result<(), OpenError> {
        check_place(&self.file, path)
    }
}

/// Claims a block device whose lock this process has: it cannot be mounted while claimed.
fn claim(path: &Path) -> Result<Option<File>, OpenError> {
    let open = || match OpenOptions::new().read(true).custom_flags(libc::O_EXCL).open(path) {
        // The kernel ends the claim of a dead process soon after its lock.
        Err(error) if error.raw_os_error() == Some(libc::EBUSY) => Ok(None),
        // The process may have dropped the right to open it.
        Err(error) => {
            tracing::warn!(path = %path.display(), %error, "block device not claimed: the host can mount it");
            Ok(Some(None))
        }
        Ok(file) => Ok(Some(Some(file))),
    };
    let claim = lock::patiently_some(open).map_err(|source| OpenReason::Os { source }.at(path))?;
    claim.ok_or(OpenReason::InUse.at(path))
}

/// Options for opening an image.
#[derive(Clone, Copy, Debug)]
pub(super) struct Opening {
    /// Format of the image.
    ///
    /// The size of a raw image must be a multiple of the block.
    pub(super) format: Format,
    pub(super) read_only: bool,
    pub(super) lock: bool,
    /// Direct I/O.
    pub(super) direct: bool,
    /// Open the image for writing although it has the mark of an overlay, which is to be merged.
    pub(super) frozen: bool,
    /// Block in bytes that drivers are told; `None`: the least that the file or store takes.
    pub(super) block: Option<u64>,
}

impl Opening {
    /// A locked image, without direct I/O and with the block of its format.
    pub(super) const fn cached(format: Format, read_only: bool) -> Self {
        Self { format, read_only, lock: true, direct: false, frozen: false, block: None }
    }

    /// The block that drivers are told: the named one, or `default`. At least `least`.
    fn block(&self, path: &Path, least: u64, default: u64) -> Result<u64, OpenError> {
        match self.block {
            Some(block) if !block.is_power_of_two() || !BLOCKS.contains(&block) || block < least => {
                Err(OpenReason::Block { block, least }.at(path))
            }
            named => Ok(named.unwrap_or(default)),
        }
    }
}

/// Blocks in bytes that drivers know.
const BLOCKS: std::ops::RangeInclusive<u64> = SECTOR..=4096;

impl ImageFile {
    /// Opens the image at `path`, and locks it.
    pub(super) fn open(path: &Path, opening: Opening) -> Result<Self, OpenError> {
        let HeldFile { file, guards } = HeldFile::open(path, opening)?;
        Self::locked(file, path, opening, guards)
    }

    /// Uses an open file, and shares the lock of its open file description.
    pub(super) fn of(file: File, path: &Path, opening: Opening) -> Result<Self, OpenError> {
        check_kind(path, &file.metadata().map_err(|source| OpenReason::Os { source }.at(path))?)?;
        let refusal = Cell::new(Refusal::Locked);
        let lock = || {
            let refused = lock::whole(&file, opening.read_only)?;
            refused.inspect(|why| refusal.set(*why));
            Ok(refused.is_none())
        };
        if opening.lock && !lock::patiently(lock).map_err(|source| OpenReason::Os { source }.at(path))? {
            return Err(refusal.get().reason().at(path));
        }
        Self::locked(file, path, opening, FileGuards::default())
    }

    /// Takes the descriptors of an image over that another process has opened and locked.
    ///
    /// `process`: see [`FileGuards::process`].
    pub(super) fn adopt(
        file: File,
        process: Option<File>,
        path: &Path,
        opening: Opening,
    ) -> Result<Self, OpenError> {
        let slot = process.and_then(|process| Slot::adopt(&file, process));
        Ok(Self { guards: FileGuards { slot, ..FileGuards::default() }, ..Self::of(file, path, opening)? })
    }

    /// Uses a store, which sees to it that nothing else writes to it.
    pub(super) fn over(store: Arc<dyn Store>, opening: Opening) -> Result<Self, OpenError> {
        let path = PathBuf::from(store.status().location);
        let (size, limits) = (store.size(), store.limits());
        if size == 0 {
            return Err(OpenReason::Empty.at(path));
        }
        if opening.direct {
            let source = io::Error::new(io::ErrorKind::Unsupported, "the image is not a file");
            return Err(OpenReason::Direct { source }.at(path));
        }
        if limits.read_only && !opening.read_only {
            return Err(OpenReason::ReadOnly.at(path));
        }
        let resembles = || magic::resembles(opening.format, |into, at| store.read_at(into, at));
        // A format reads and writes whole blocks of the store, whatever its disk has.
        let least = match opening.format {
            Format::Raw => u64::from(limits.block).max(SECTOR),
            Format::Qcow2 => SECTOR,
        };
        let block = opening.block(&path, least, least)?;
        if opening.format == Format::Raw && !size.is_multiple_of(block) {
            return Err(match resembles() {
                Some(like) => OpenReason::OtherFormat { size, like }.at(path),
                None => OpenReason::StoreSize { size, block }.at(path),
            });
        }
        let physical_block =
            u64::from(limits.physical_block).clamp(block.max(limits.block.into()), MAX_PHYSICAL);
        // Servers of images that nobody writes to may take long to answer.
        if !opening.read_only
            && let Some(like) = resembles()
        {
            magic::warn(&path, like);
        }
        Ok(Self {
            source: store,
            guards: FileGuards::default(),
            path,
            size,
            read_only: opening.read_only,
            in_memory: false,
            physical_block,
            discard_block: u64::from(limits.discard_block).max(physical_block),
            direct: None,
            block,
        })
    }

    /// Uses an open file whose lock is held, if it is to be locked.
    fn locked(file: File, path: &Path, opening: Opening, guards: FileGuards) -> Result<Self, OpenError> {
        let read_only = opening.read_only;
        // Its last owner may have taken a snapshot after the first look.
        check_mark(&file, path, opening)?;
        let os = |source| OpenReason::Os { source }.at(path);
        let metadata = file.metadata().map_err(os)?;
        // io_uring would answer EAGAIN instead of waiting for the disk.
        let flags = rustix::fs::fcntl_getfl(&file).map_err(|error| os(error.into()))? - OFlags::NONBLOCK;
        rustix::fs::fcntl_setfl(&file, flags).map_err(|error| os(error.into()))?;
        // Saves a time stamp for each read. Only the file's owner may set it, hence the ignored
        // error.
        let _ = rustix::fs::fcntl_setfl(&file, flags | OFlags::NOATIME);

        let Sizes { size, direct, block, like } = Sizes::of(&file, path, opening)?;
        if let Some(like) = like {
            magic::warn(path, like);
        }
        let least = direct.map_or(block, |direct| direct.block.max(block));
        let physical_block = 1 << metadata.blksize().clamp(least, MAX_PHYSICAL).ilog2();
        let in_memory = is_in_memory(&file, &metadata).map_err(os)?;
        let path = path.to_owned();
        let source = FileStore::of(file);
        let discard_block = physical_block;
        Ok(Self {
            source,
            guards,
            path,
            size,
            read_only,
            in_memory,
            physical_block,
            discard_block,
            direct,
            block,
        })
    }
}

/// Opens a block device that another process may have claimed, to look at it.
pub(super) fn open_device(path: &Path) -> Result<File, OpenError> {
    let os = |source| OpenReason::Os { source }.at(path);
    let flags = libc::O_NONBLOCK | libc::O_NOCTTY;
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path).map_err(os)?;
    check_kind(path, &file.metadata().map_err(os)?)?;
    Ok(file)
}

/// What the size and the blocks of a file allow.
pub(super) struct Sizes {
    /// Bytes of the file.
    pub(super) size: u64,
    direct: Option<Alignment>,
    /// Block in bytes that drivers are told.
    pub(super) block: u64,
    /// What a raw image resembles.
    like: Option<&'static str>,
}

impl Sizes {
    /// Checks a file. Turns direct I/O on, if it is wanted.
    ///
    /// # Errors
    /// The image cannot be a disk, or not one that is written to.
    pub(super) fn of(file: &File, path: &Path, opening: Opening) -> Result<Self, OpenError> {
        let os = |source| OpenReason::Os { source }.at(path);
        let size = paravane_store::file::size(file).map_err(os)?;
        if size == 0 {
            return Err(OpenReason::Empty.at(path));
        }
        if !opening.read_only && block_device::is_read_only(file).map_err(os)? {
            return Err(OpenReason::ReadOnly.at(path));
        }
        // Before direct I/O, which has to be aligned.
        let like = magic::resembles(opening.format, |into, at| file.read_at(into, at));
        let direct = match opening.direct {
            true => Some(Alignment::begin(file).map_err(|source| OpenReason::Direct { source }.at(path))?),
            false => None,
        };
        // What the file takes for writes may change with a copy of it that shares its blocks.
        let of_file = direct.map_or(SECTOR, |direct| direct.read_block);
        let block = opening.block(path, SECTOR, of_file)?;
        let whole = block.max(of_file);
        if opening.format == Format::Raw && size % whole != 0 {
            return Err(match like {
                Some(like) => OpenReason::OtherFormat { size, like }.at(path),
                None => OpenReason::Size { size, block: whole }.at(path),
            });
        }
        Ok(Self { size, direct, block, like })
    }
}

/// Lets other processes read an image that this one has locked, and goes on to keep writers out.
pub(super) fn share(file: &File) -> io::Result<()> {
    match lock::downgrade(file)? {
        true => Ok(()),
        false => Err(io::Error::new(io::ErrorKind::ResourceBusy, "another process has locked a part of it")),
    }
}

/// Whether the data of a file is in memory or swap.
fn is_in_memory(file: &File, metadata: &Metadata) -> io::Result<bool> {
    Ok(metadata.is_file() && IN_MEMORY.contains(&rustix::fs::fstatfs(file)?.f_type))
}

impl Refusal {
    fn reason(self) -> OpenReason {
        match self {
            Self::Locked => OpenReason::InUse,
            Self::Written => OpenReason::Written,
        }
    }
}

/// Refuses to write to an image that is the backing file of an overlay.
fn check_mark(file: &File, path: &Path, opening: Opening) -> Result<(), OpenError> {
    match mark::overlay(file) {
        Some(overlay) if !opening.read_only && !opening.frozen => {
            Err(OpenReason::Frozen { overlay }.at(path))
        }
        _ => Ok(()),
    }
}

/// Refuses a file that is no longer at its path: the wait for its lock may have been long.
fn check_place(file: &File, path: &Path) -> Result<(), OpenError> {
    let locked = FileId::of_file(file).map_err(|source| OpenReason::Os { source }.at(path))?;
    match FileId::at(path) {
        Ok(there) if there != locked => Err(OpenReason::Replaced.at(path)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Err(OpenReason::Deleted.at(path)),
        // The process may have dropped the right to look.
        _ => Ok(()),
    }
}

fn check_kind(path: &Path, metadata: &Metadata) -> Result<(), OpenError> {
    let kind = metadata.file_type();
    if kind.is_dir() {
        Err(OpenReason::Directory.at(path))
    } else if kind.is_file() || kind.is_block_device() {
        Ok(())
    } else {
        Err(OpenReason::Kind.at(path))
    }
}
