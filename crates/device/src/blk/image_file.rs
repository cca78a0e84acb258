//! The file of an image: opened, checked and locked.
//!
//! Nothing of this changes the file.
use super::direct::Alignment;
use super::{Format, OpenError};
use paravane_spec::blk::SECTOR;
use rustix::fs::OFlags;
use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Largest physical block in bytes that drivers see.
///
/// `st_blksize` is the preferred size of an I/O: on local file systems the block, on network ones
/// megabytes.
const MAX_PHYSICAL: u64 = 4096;

/// Magic numbers of file systems in memory: tmpfs (memfds, too) and ramfs.
const IN_MEMORY: [i64; 2] = [0x0102_1994, 0x8584_58f6];

/// The open file of an image, or of a backing file.
#[derive(Debug)]
pub(super) struct ImageFile {
    /// Holds the lock.
    pub(super) file: File,
    pub(super) path: PathBuf,
    /// Size of the file in bytes.
    pub(super) size: u64,
    pub(super) read_only: bool,
    /// The data is in memory or swap, so that I/O need not wait for a disk.
    pub(super) in_memory: bool,
    /// Physical block in bytes.
    pub(super) physical_block: u64,
    /// Alignment of direct I/O, if that is on.
    pub(super) direct: Option<Alignment>,
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
}

impl ImageFile {
    /// Opens the image at `path`.
    pub(super) fn open(path: &Path, opening: Opening) -> Result<Self, OpenError> {
        let read_only = opening.read_only;
        let os = |source| OpenError::Os { path: path.to_owned(), source };
        // Checked before it is opened: opening a device node or a FIFO can have an effect by
        // itself.
        let expected = std::fs::metadata(path).map_err(os)?;
        check_kind(path, &expected)?;

        // O_NONBLOCK: the file may have become a FIFO since the check, and must not block this
        // process.
        let mut flags = libc::O_NONBLOCK | libc::O_NOCTTY;
        let is_block_device = expected.file_type().is_block_device();
        if is_block_device && !read_only && opening.lock {
            // Without O_CREAT this is defined for block devices only: EBUSY while the host has it
            // mounted.
            flags |= libc::O_EXCL;
        }
        let is_held = |error: &io::Error| is_block_device && error.raw_os_error() == Some(libc::EBUSY);
        let open = || OpenOptions::new().read(true).write(!read_only).custom_flags(flags).open(path);
        let file = patiently(open, is_held).map_err(|source| match is_held(&source) {
            true => OpenError::InUse { path: path.to_owned() },
            false => os(source),
        })?;
        Self::of(file, path, opening)
    }

    /// Uses an open file, and shares the lock of its open file description.
    pub(super) fn of(mut file: File, path: &Path, opening: Opening) -> Result<Self, OpenError> {
        let Opening { format, read_only, direct, .. } = opening;
        let os = |source| OpenError::Os { path: path.to_owned(), source };
        let metadata = file.metadata().map_err(os)?;
        check_kind(path, &metadata)?;
        // io_uring would answer EAGAIN instead of waiting for the disk.
        let flags = rustix::fs::fcntl_getfl(&file).map_err(|error| os(error.into()))? - OFlags::NONBLOCK;
        rustix::fs::fcntl_setfl(&file, flags).map_err(|error| os(error.into()))?;
        // Saves a time stamp for each read. Only the file's owner may set it, hence the ignored
        // error.
        let _ = rustix::fs::fcntl_setfl(&file, flags | OFlags::NOATIME);
        if opening.lock {
            lock(&file, read_only).map_err(|source| match source.raw_os_error() {
                Some(libc::EAGAIN | libc::EACCES) => OpenError::InUse { path: path.to_owned() },
                _ => os(source),
            })?;
        }

        let size = end(&mut file).map_err(os)?;
        if size == 0 {
            return Err(OpenError::Empty { path: path.to_owned() });
        }
        let direct = match direct {
            true => Some(
                Alignment::begin(&file)
                    .map_err(|source| OpenError::Direct { path: path.to_owned(), source })?,
            ),
            false => None,
        };
        let block = direct.map_or(SECTOR, |direct| direct.block);
        if format == Format::Raw && size % block != 0 {
            return Err(OpenError::Size { path: path.to_owned(), size, block });
        }
        let physical = 1 << metadata.blksize().clamp(block, MAX_PHYSICAL).ilog2();
        let file_system = rustix::fs::fstatfs(&file).map_err(|error| os(error.into()))?;
        let in_memory = IN_MEMORY.contains(&file_system.f_type) && metadata.is_file();
        let path = path.to_owned();
        Ok(Self { file, path, size, read_only, in_memory, physical_block: physical, direct })
    }
}

/// Size of a file in bytes, found by seeking: the st_size of a block device is 0.
pub(super) fn end(file: &mut impl Seek) -> io::Result<u64> {
    file.seek(SeekFrom::End(0))
}

fn check_kind(path: &Path, metadata: &Metadata) -> Result<(), OpenError> {
    let kind = metadata.file_type();
    if kind.is_dir() {
        Err(OpenError::Directory { path: path.to_owned() })
    } else if kind.is_file() || kind.is_block_device() {
        Ok(())
    } else {
        Err(OpenError::Kind { path: path.to_owned() })
    }
}

/// Longest wait for a lock whose holder is about to release it.
///
/// The kernel releases the rings of a killed process some time after its end: tens of milliseconds,
/// more on a busy host.
const PATIENCE: Duration = Duration::from_secs(2);

/// Locks the whole file: exclusive, or shared when read-only.
///
/// The lock belongs to the open file description.
///
/// The lock lasts until the last descriptor of the description is closed. Unlike a process's lock,
/// it is not lost when this process opens and closes the same file.
///
/// A child process has a copy of each descriptor between fork and exec, and with it the lock of an
/// image that was closed meanwhile. So a lock that is held elsewhere is retried for [`PATIENCE`].
fn lock(file: &File, read_only: bool) -> io::Result<()> {
    let kind = if read_only { libc::F_RDLCK } else { libc::F_WRLCK };
    // SAFETY: `flock` is plain data, for which all zeroes are valid; l_pid must be 0 for OFD locks.
    let mut whole: libc::flock = unsafe { std::mem::zeroed() };
    whole.l_type = kind as libc::c_short;
    whole.l_whence = libc::SEEK_SET as libc::c_short;
    // l_start and l_len stay 0: the whole file, at any size.
    let lock = || {
        // SAFETY: the descriptor is open, and the kernel only reads the structure, which outlives
        // the call.
        match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const whole) } {
            -1 => Err(io::Error::last_os_error()),
            _ => Ok(()),
        }
    };
    patiently(lock, |error| matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)))
}

/// Retries `attempt` for [`PATIENCE`] while `is_held` is true for its error.
fn patiently<T>(attempt: impl Fn() -> io::Result<T>, is_held: impl Fn(&io::Error) -> bool) -> io::Result<T> {
    let start = Instant::now();
    loop {
        match attempt() {
            Err(error) if is_held(&error) && start.elapsed() < PATIENCE => {
                std::thread::sleep(Duration::from_millis(5));
            }
            result => return result,
        }
    }
}
