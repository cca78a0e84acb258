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
//!
//! The image's lock is compatible with QEMU's protocol. QEMU takes a shared lock on byte 100 + N for
//! what it does with an image, and on byte 200 + N for what it lets nobody else do: N is 0 for
//! consistent reads, 1 for writes, 3 for resizing (`block/file-posix.c`). Then it looks for the
//! opposite bytes of others.
//!
//! | image is locked | bytes | refused if another program has |
//! |---|---|---|
//! | to write | all below [`WHOLE`], exclusively | any of them |
//! | to read | [`READS`], [`KEEPS_OUT`], shared | [`CONFLICTS`] |
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

/// QEMU's byte of who reads consistent data.
const READS: i64 = 100;

/// QEMU's bytes of who lets nobody write and nobody resize.
const KEEPS_OUT: [i64; 2] = [201, 203];

/// QEMU's bytes of who writes, resizes, and lets nobody read.
const CONFLICTS: [i64; 3] = [101, 103, 200];

/// Why an image cannot be locked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// Another process has it locked.
    Locked,
    /// QEMU, or a program with its locks, writes to it, or allows no readers.
    Written,
}

/// Locks the image: exclusively, or for reading if `read_only`. `Some`: that is refused now.
pub(super) fn whole(file: &File, read_only: bool) -> io::Result<Option<Refusal>> {
    if !read_only {
        return Ok((!set(file, false, 0, WHOLE)?).then_some(Refusal::Locked));
    }
    // First locked, then looked for, as by QEMU: of two programs that begin at once, one sees the other.
    for byte in [READS].into_iter().chain(KEEPS_OUT) {
        if !set(file, true, byte, 1)? {
            release_readers(file);
            return Ok(Some(Refusal::Locked));
        }
    }
    let refusal = CONFLICTS.into_iter().find_map(|byte| conflict(file, byte));
    if refusal.is_some() {
        release_readers(file);
    }
    Ok(refusal)
}

/// Makes the lock of a writer that of a reader, without a moment in which another can write.
pub(super) fn downgrade(file: &File) -> io::Result<bool> {
    let mut end = 0;
    for byte in [READS].into_iter().chain(KEEPS_OUT) {
        if !set(file, true, byte, 1)? {
            return Ok(false);
        }
        unlock(file, end, byte - end);
        end = byte + 1;
    }
    unlock(file, end, WHOLE - end);
    Ok(true)
}

/// What another program that has locked `byte`, one of [`CONFLICTS`], does.
fn conflict(file: &File, byte: i64) -> Option<Refusal> {
    let held = held(file, byte)?;
    if i32::from(held.l_type) == libc::F_WRLCK {
        return Some(Refusal::Locked);
    }
    // A shared lock of the whole file is that of a reader: QEMU's bytes have gaps.
    let end = if held.l_len == 0 { i64::MAX } else { held.l_start.saturating_add(held.l_len) };
    let is_whole = held.l_start <= READS && end > CONFLICTS[2];
    (!is_whole).then_some(Refusal::Written)
}

fn release_readers(file: &File) {
    for byte in [READS].into_iter().chain(KEEPS_OUT) {
        unlock(file, byte, 1);
    }
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
            unlock(&process, byte, 1);
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

fn unlock(file: &File, start: i64, len: i64) {
    let range = range(libc::F_UNLCK, start, len);
    // SAFETY: as above. It fails only if the file system has no locks.
    unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const range) };
}

/// Whether another description has a lock on the byte.
fn is_held(file: &File, byte: i64) -> bool {
    held(file, byte).is_some()
}

/// A lock of another description that covers the byte.
fn held(file: &File, byte: i64) -> Option<libc::flock> {
    let mut range = range(libc::F_WRLCK, byte, 1);
    // SAFETY: the descriptor is open, and the structure outlives the call, which writes to it.
    let found = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut range) };
    (found == 0 && i32::from(range.l_type) != libc::F_UNLCK).then_some(range)
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
        assert_eq!(whole(&late.requests, false).unwrap(), Some(Refusal::Locked));
        assert!(!requests_in_flight(&late.requests));
    }

    #[test]
    fn the_locks_of_a_process_leave_room_for_other_processes_alone() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let (writer, other) = (process(file.path(), false), process(file.path(), false));
        assert_eq!(whole(&writer.requests, false).unwrap(), None);
        for read_only in [false, true] {
            assert_eq!(whole(&other.requests, read_only).unwrap(), Some(Refusal::Locked));
        }
        // Bytes of QEMU's locks.
        assert!(!set(&other.requests, true, 100, 1).unwrap());
        assert!(!set(&other.requests, true, 201, 1).unwrap());
        drop(writer);
        assert_eq!(whole(&other.requests, false).unwrap(), None);
    }

    /// Takes the shared locks that QEMU has for these bits, and looks for those that contradict them.
    fn qemu(file: &File, uses: &[i64], keeps_out: &[i64]) -> bool {
        let (uses, keeps_out) = (uses.iter(), keeps_out.iter());
        let bytes = uses.clone().map(|bit| 100 + bit).chain(keeps_out.clone().map(|bit| 200 + bit));
        assert!(bytes.into_iter().all(|byte| set(file, true, byte, 1).unwrap()));
        !uses.map(|bit| 200 + bit).chain(keeps_out.map(|bit| 100 + bit)).any(|byte| is_held(file, byte))
    }

    #[test]
    fn readers_and_programs_with_the_locks_of_qemu_share_an_image() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let open = || File::options().read(true).write(true).open(file.path()).unwrap();
        // Reads; reads while others may write; writes; writes and grows; lets nobody read.
        let programs: [(&[i64], &[i64], bool); 5] = [
            (&[0], &[1, 3], true),
            (&[0], &[], true),
            (&[0, 1], &[1, 3], false),
            (&[0, 1, 3], &[1, 3], false),
            (&[], &[0], false),
        ];
        for (uses, keeps_out, shares) in programs {
            // QEMU first.
            let (other, reader) = (open(), open());
            assert!(qemu(&other, uses, keeps_out));
            let refusal = (!shares).then_some(Refusal::Written);
            assert_eq!(whole(&reader, true).unwrap(), refusal, "{uses:?} {keeps_out:?}");
            // A refusal leaves nothing behind.
            assert!([100, 201, 203].iter().all(|byte| is_held(&other, *byte) == shares));
            assert_eq!(whole(&open(), false).unwrap(), Some(Refusal::Locked));
            drop((other, reader));
            // Ours first, also one that was a writer's.
            let (other, reader) = (open(), open());
            assert_eq!(whole(&reader, false).unwrap(), None);
            assert!(downgrade(&reader).unwrap());
            assert_eq!(qemu(&other, uses, keeps_out), shares, "{uses:?} {keeps_out:?}");
        }
    }

    #[test]
    fn readers_share_an_image_with_readers_that_lock_all_of_it() {
        let file = tempfile::NamedTempFile::new().unwrap();
        // An earlier version, and a program that knows nothing of this.
        for len in [WHOLE, 0] {
            let (earlier, reader) = (file.reopen().unwrap(), file.reopen().unwrap());
            assert!(set(&earlier, true, 0, len).unwrap());
            assert_eq!(whole(&reader, true).unwrap(), None);
            let writer = file.reopen().unwrap();
            assert_eq!(whole(&writer, false).unwrap(), Some(Refusal::Locked));
            drop(earlier);
            assert_eq!(whole(&writer, false).unwrap(), Some(Refusal::Locked));
            drop(reader);
            assert_eq!(whole(&writer, false).unwrap(), None);
        }
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
