//! Locks of an image: open-file-description locks on ranges far beyond and within the file.
//!
//! ```text
//!   0 ............ WHOLE | WHOLE + slot         | WHOLE + SLOTS + slot
//!   the image's lock     | requests of a slot   | process of a slot
//!   '-- description of the requests --'         '-- a second description, which no request uses
//! ```
//! A lock lasts until its description is closed. io_uring requests outlive a killed process and
//! keep their description open, and so the image's lock and the byte of their slot. No request uses
//! the second description: its byte is free as soon as the process is gone. So in a slot
//!
//! - requests held, process held: a live process has the image open;
//! - requests held, process free: **a dead process has requests in flight**;
//! - both free: nobody.
//!
//! A process that has been killed lives on here while one of its threads is in a system call, as
//! with the engine `threads`, or with io_uring where the kernel uses threads (buffered writes to
//! some file systems). No such process can be reaped before its requests have ended.
//!
//! Unlike a process's locks, these are not lost when the process opens and closes the file again.
//! Programs that lock the whole file hold all bytes, and count as alive.
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant};

/// Longest wait for a lock whose holder is about to release it.
///
/// A child process has a copy of each descriptor between fork and exec, and with it the lock of an
/// image that was closed meanwhile.
pub(super) const PATIENCE: Duration = Duration::from_secs(2);

/// Time between two attempts: the first, and the longest.
pub(super) const INTERVAL: [Duration; 2] = [Duration::from_micros(100), Duration::from_micros(500)];

/// Length of the range that locks the image, beyond any file.
const WHOLE: i64 = 1 << 62;

/// Number of slots: processes that can have an image open and be told from dead ones.
const SLOTS: i64 = 64;

/// Locks the image: exclusively, or shared if `read_only`. `false`: the lock is held elsewhere.
pub(super) fn whole(file: &File, read_only: bool) -> io::Result<bool> {
    set(file, read_only, 0, WHOLE)
}

/// Whether a dead process has requests in flight for the image.
///
/// `false` if the file system has no locks.
pub(super) fn requests_in_flight(file: &File) -> bool {
    (0..SLOTS).any(|slot| is_held(file, WHOLE + slot) && !is_held(file, WHOLE + SLOTS + slot))
}

/// Says as long as it lives that this process does.
#[derive(Debug)]
pub(super) struct Slot {
    /// Never used for requests.
    process: File,
}

impl Slot {
    /// A description of the image that holds no lock which a successor waits for.
    pub(super) fn file(&self) -> &File {
        &self.process
    }

    /// Uses the slot that another process has taken by its descriptor `process`.
    ///
    /// `None`: that is of another file.
    pub(super) fn adopt(file: &File, process: File) -> Option<Self> {
        same(file, &process).ok()?.then_some(Self { process })
    }

    /// Takes a free slot; `again` is a second open file description of the image.
    ///
    /// `None`: all are taken, or the file system has no locks. Then a successor of this process
    /// cannot tell that it is dead.
    pub(super) fn take(file: &File, again: Option<File>, read_only: bool) -> Option<Self> {
        let process = again?;
        // The path may name another file by now.
        if !same(file, &process).ok()? {
            return None;
        }
        for slot in 0..SLOTS {
            // Never the process's byte of a dead one: it would seem to live. So the requests' byte
            // is looked at first, and taken last.
            let (requests, byte) = (WHOLE + slot, WHOLE + SLOTS + slot);
            if is_held(file, requests) || !set(&process, read_only, byte, 1).ok()? {
                continue;
            }
            if set(file, read_only, requests, 1).ok()? {
                return Some(Self { process });
            }
            unlock(&process, byte);
        }
        None
    }
}

/// Whether both are of one file.
fn same(one: &File, other: &File) -> io::Result<bool> {
    let (one, other) = (one.metadata()?, other.metadata()?);
    Ok((one.dev(), one.ino()) == (other.dev(), other.ino()))
}

/// Retries `attempt` for [`PATIENCE`] while it returns `false`.
pub(super) fn patiently(attempt: impl Fn() -> io::Result<bool>) -> io::Result<bool> {
    Ok(patiently_some(|| Ok(attempt()?.then_some(())))?.is_some())
}

/// Retries `attempt` for [`PATIENCE`] while it returns `None`.
pub(super) fn patiently_some<T>(mut attempt: impl FnMut() -> io::Result<Option<T>>) -> io::Result<Option<T>> {
    let start = Instant::now();
    let mut interval = INTERVAL[0];
    loop {
        match attempt()? {
            None if start.elapsed() < PATIENCE => std::thread::sleep(interval),
            result => return Ok(result),
        }
        interval = (interval * 2).min(INTERVAL[1]);
    }
}

fn range(kind: i32, start: i64, len: i64) -> libc::flock {
    // SAFETY: `flock` is plain data, for which all zeroes are valid; l_pid must be 0 for OFD locks.
    let mut range: libc::flock = unsafe { std::mem::zeroed() };
    range.l_type = kind as libc::c_short;
    range.l_whence = libc::SEEK_SET as libc::c_short;
    range.l_start = start;
    range.l_len = len;
    range
}

/// Locks a range. `false`: a lock of another description conflicts.
fn set(file: &File, read_only: bool, start: i64, len: i64) -> io::Result<bool> {
    let range = range(if read_only { libc::F_RDLCK } else { libc::F_WRLCK }, start, len);
    // SAFETY: the descriptor is open, and the kernel only reads the structure, which outlives the
    // call.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const range) } {
        -1 => match io::Error::last_os_error() {
            error if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => Ok(false),
            error => Err(error),
        },
        _ => Ok(true),
    }
}

fn unlock(file: &File, byte: i64) {
    let range = range(libc::F_UNLCK, byte, 1);
    // SAFETY: as above. It fails only if the file system has no locks.
    unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const range) };
}

/// Whether another description has a lock on the byte.
fn is_held(file: &File, byte: i64) -> bool {
    let mut range = range(libc::F_WRLCK, byte, 1);
    // SAFETY: the descriptor is open, and the structure outlives the call, which writes to it.
    let found = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut range) };
    found == 0 && i32::from(range.l_type) != libc::F_UNLCK
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Process {
        requests: File,
        slot: Option<Slot>,
    }

    fn process(path: &std::path::Path, read_only: bool) -> Process {
        let open = || File::options().read(true).write(!read_only).open(path).unwrap();
        let requests = open();
        let slot = Slot::take(&requests, Some(open()), read_only);
        Process { requests, slot }
    }

    #[test]
    fn a_process_that_is_gone_is_told_from_a_live_one() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let observer = File::open(file.path()).unwrap();
        for read_only in [false, true] {
            let (mut dies, lives) = (process(file.path(), read_only), process(file.path(), read_only));
            assert!(dies.slot.is_some() && lives.slot.is_some());
            assert!(!requests_in_flight(&observer));
            // The kernel closes its other descriptors; requests keep this one open.
            dies.slot = None;
            assert!(requests_in_flight(&observer) && requests_in_flight(&lives.requests));
            // The slot of the dead is not free.
            let third = process(file.path(), read_only);
            assert!(third.slot.is_some() && requests_in_flight(&third.requests));
            drop(dies);
            assert!(!requests_in_flight(&observer));
        }
    }

    #[test]
    fn a_lock_of_the_whole_file_counts_as_alive() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let other = file.reopen().unwrap();
        // To the end of the file, at any size.
        assert!(set(&other, false, 0, 0).unwrap());
        let late = process(file.path(), false);
        assert!(late.slot.is_none());
        assert!(!whole(&late.requests, false).unwrap() && !requests_in_flight(&late.requests));
    }

    #[test]
    fn the_locks_of_a_process_leave_room_for_other_processes_alone() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let (writer, other) = (process(file.path(), false), process(file.path(), false));
        assert!(whole(&writer.requests, false).unwrap());
        assert!(!whole(&other.requests, false).unwrap());
        // Bytes of QEMU's locks.
        assert!(!set(&other.requests, false, 100, 1).unwrap());
        drop(writer);
        assert!(whole(&other.requests, false).unwrap());
    }

    #[test]
    fn a_process_beyond_the_slots_goes_without() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let all: Vec<Process> = (0..SLOTS).map(|_| process(file.path(), false)).collect();
        assert!(all.iter().all(|process| process.slot.is_some()));
        assert!(process(file.path(), false).slot.is_none());
        assert!(!requests_in_flight(&all[0].requests));
    }
}
