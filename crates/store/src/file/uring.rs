//! io_uring: one ring for each queue, one system call for up to four jobs.
//!
//! ```text
//!   push -> submission queue --submit--> kernel -> completion queue -> reap
//!                                                    | listening: eventfd
//! ```
//! The completion queue and the "disabled" flag of the eventfd form a Dekker pattern with the
//! kernel, see `rest`.
use super::fallocate_mode;
use super::registered::Registered;
use crate::{Job, Outcome, Pieces, Rest, StoreQueue, WakeSet, WakeSource, clear, eventfd};
use io_uring::{IoUring, Probe, opcode, squeue, types};
use paravane_dma::Region;
use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, OnceLock};

/// The image is the ring's only registered file.
const IMAGE: types::Fixed = types::Fixed(0);

/// Jobs that the kernel is given at once, at most.
///
/// The kernel prepares all jobs of a call before the disk has the first: it plugs the queue for calls
/// of more than two. `paravane bench blk --filter direct/`, depth 32, 4 KiB, read / write, rate to
/// qemu-storage-daemon: all in one call 0.86 / 0.80, groups of 16 0.94 / 0.86, of 8 0.97 to 1.02 / 0.94
/// to 1.00, of 4 0.96 to 1.01 / 1.00 to 1.04, of 2 1.05 / 1.10. CPU time: 0.81 to 0.87, most with
/// groups of 2. Each size was measured beside groups of 8 in a run of its own; that the plug is the
/// cause fits the order, and was not traced.
const GROUP: usize = 4;

/// Operations that the kernel must support.
const OPCODES: [u8; 6] = [
    opcode::Read::CODE,
    opcode::Write::CODE,
    opcode::Readv::CODE,
    opcode::Writev::CODE,
    opcode::Fsync::CODE,
    opcode::Fallocate::CODE,
];

/// Further operations for registered memory.
const FIXED: [u8; 4] =
    [opcode::ReadFixed::CODE, opcode::WriteFixed::CODE, opcode::ReadvFixed::CODE, opcode::WritevFixed::CODE];

/// Whether this process can use io_uring on this host. Asks the kernel once.
///
/// `true` if registered memory supports transfers of several pieces, too (Linux 6.15).
///
/// # Errors
/// It cannot.
pub fn probe() -> io::Result<bool> {
    static ANSWER: OnceLock<Result<bool, i32>> = OnceLock::new();
    let ask = || -> io::Result<bool> {
        let ring = IoUring::new(2)?;
        let event = eventfd()?;
        ring.submitter().register_eventfd(event.as_raw_fd())?;
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        if !ring.params().is_feature_nodrop() || OPCODES.iter().any(|&code| !probe.is_supported(code)) {
            return Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP));
        }
        Ok(FIXED.iter().all(|&code| probe.is_supported(code)))
    };
    ANSWER
        .get_or_init(|| ask().map_err(|error| error.raw_os_error().unwrap_or(libc::EIO)))
        .map_err(io::Error::from_raw_os_error)
}

/// Explains the error of a ring's creation.
///
/// Some kernels charge rings to RLIMIT_MEMLOCK, and return ENOMEM.
fn no_ring(error: io::Error, entries: u32) -> io::Error {
    match error.raw_os_error() {
        Some(libc::ENOMEM) => {
            let what = format!(
                "io_uring has no memory for {entries} requests: raise RLIMIT_MEMLOCK (ulimit -l, LimitMEMLOCK=), \
                 or use --engine threads"
            );
            io::Error::new(error.kind(), what)
        }
        _ => error,
    }
}

/// The ring of one queue.
pub struct Uring {
    ring: IoUring,
    event: Arc<OwnedFd>,
    /// Registered guest memory, if requested.
    registered: Option<Registered>,
    /// Registered memory supports transfers of several pieces.
    lists: bool,
    wakes: Option<WakeSource>,
}

impl std::fmt::Debug for Uring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Uring").field("event", &self.event).finish_non_exhaustive()
    }
}

impl Uring {
    /// Makes a ring for `jobs` jobs in flight on `file`.
    ///
    /// With `registers`, it registers guest memory; see [`StoreQueue::register_memory`].
    ///
    /// # Errors
    /// The host refuses.
    pub fn new(file: &File, registers: bool, jobs: u16) -> io::Result<Self> {
        // Every job in flight has an entry in either queue (the completion queue is twice as long):
        // neither can overflow.
        let entries = u32::from(jobs).next_power_of_two().max(2);
        let ring = IoUring::new(entries).map_err(|error| no_ring(error, entries))?;
        ring.submitter().register_files(&[file.as_raw_fd()])?;
        let event = eventfd()?;
        ring.submitter().register_eventfd(event.as_raw_fd())?;
        let registered = registers.then(Registered::default);
        Ok(Self { ring, event, registered, lists: probe()?, wakes: None })
    }

    /// Number of the registered buffer that contains a transfer.
    fn index(&self, pieces: &Pieces) -> Option<u16> {
        let registered = self.registered.as_ref()?;
        // SAFETY: the list is valid while the job is (StoreQueue::push).
        registered.index(unsafe { pieces.slices() }).filter(|_| pieces.count == 1 || self.lists)
    }
}

impl StoreQueue for Uring {
    fn register(&mut self, wakes: Option<&WakeSet>) -> io::Result<()> {
        WakeSource::register(&mut self.wakes, &self.event, wakes)
    }

    fn registers(&self) -> bool {
        self.registered.is_some()
    }

    fn register_memory(&mut self, generation: u64, regions: &[Arc<Region>]) {
        if let Some(registered) = &mut self.registered {
            registered.follow(&self.ring, generation, regions);
        }
    }

    fn quiet(&mut self) {
        // Needs no ordering: the kernel only reads the flag. If it sees the flag late, it signals
        // once without need.
        self.ring.completion().disable_eventfd();
    }

    fn rest(&mut self, arm: bool) -> Rest {
        if arm {
            // EAGAIN: it was not readable, which is fine. Its completions are in the completion queue.
            clear(&self.event);
            self.ring.completion().enable_eventfd();
            // Orders our store of the flag before the load of the completion queue's tail below. Pairs
            // with the kernel's barrier between its store of the tail and its load of the flag
            // (io_cqring_wake comes before io_eventfd_signal): either we see the completion, or the
            // kernel sees that we listen.
            fence(Ordering::SeqCst);
        }
        Rest::serve_if(!self.ring.completion().is_empty() || !self.ring.submission().is_empty())
    }

    unsafe fn push(&mut self, head: u16, job: Job) -> io::Result<()> {
        // SAFETY: the list is valid while the job is, as the caller promises.
        let entry = unsafe { self.entry(job) }.user_data(u64::from(head));
        let mut queue = self.ring.submission();
        // SAFETY: what the entry points to stays valid until its outcome is reaped, as the caller
        // promises.
        if unsafe { queue.push(&entry) }.is_ok() {
            let group = queue.len() >= GROUP;
            drop(queue);
            // The job is queued, so an error is not that of this call: `submit` meets it again.
            if group && let Err(error) = self.submit() {
                tracing::debug!(%error, "a group of jobs is submitted later");
            }
            return Ok(());
        }
        drop(queue);
        // Full: the kernel has refused earlier entries.
        self.submit()?;
        // SAFETY: as above.
        unsafe { self.ring.submission().push(&entry) }.map_err(|_| io::Error::from_raw_os_error(libc::EAGAIN))
    }

    fn submit(&mut self) -> io::Result<()> {
        while !self.ring.submission().is_empty() {
            match self.ring.submit() {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // The kernel is short of memory, or wants completions reaped first. The rest stays
                // in the submission queue, and `rest` reports it.
                Err(error) if is_transient(&error) => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn cancel(&mut self) {
        // Only the kernel can give up what is in the submission queue.
        let submitted = self.submit();
        // Does not wait for what it cannot cancel: the completions tell.
        let now = types::Timespec::new();
        let cancelled = self.ring.submitter().register_sync_cancel(Some(now), types::CancelBuilder::any());
        if let Err(error) = submitted.and(cancelled) {
            // ETIME: some are under way. EINVAL: a kernel before 6.0. All are waited for.
            tracing::debug!(%error, "requests of the storage could not all be cancelled");
        }
    }

    fn reap(&mut self, outcomes: &mut VecDeque<Outcome>) {
        // The user data of every entry is a descriptor head.
        outcomes.extend(
            self.ring
                .completion()
                // SAFETY: the kernel completes an entry once, when it is done with its memory.
                .map(|entry| unsafe { Outcome::new(entry.user_data() as u16, entry.result()) }),
        );
    }

    fn wait(&mut self) -> io::Result<()> {
        loop {
            match self.ring.submit_and_wait(1) {
                Ok(_) => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if is_transient(&error) => {
                    if !self.ring.completion().is_empty() {
                        return Ok(());
                    }
                    std::thread::yield_now();
                }
                Err(error) => return Err(error),
            }
        }
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        // The kernel releases a ring some time after its descriptor is closed. The image must not
        // be held until then, or it could not be unmounted or detached from its loop device.
        if let Err(error) = self.ring.submitter().unregister_files() {
            tracing::debug!(%error, "cannot unregister the image; it stays open until the kernel has released the ring");
        }
        if let Some(registered) = &mut self.registered {
            registered.let_go(&self.ring);
        }
    }
}

fn allocate(offset: u64, len: u64, unmap: bool) -> squeue::Entry {
    opcode::Fallocate::new(IMAGE, len).offset(offset).mode(fallocate_mode(unmap)).build()
}

fn is_transient(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EBUSY))
}

impl Uring {
    /// # Safety
    /// The list of pieces is valid.
    unsafe fn entry(&self, job: Job) -> squeue::Entry {
        // SAFETY: the caller's promise.
        let single = |pieces: Pieces| unsafe { pieces.single() };
        match job {
            Job::Read { pieces, offset } => match (single(pieces), self.index(&pieces)) {
                (Some((ptr, len)), Some(index)) => {
                    opcode::ReadFixed::new(IMAGE, ptr, len, index).offset(offset).build()
                }
                (Some((ptr, len)), None) => opcode::Read::new(IMAGE, ptr, len).offset(offset).build(),
                (None, Some(index)) => opcode::ReadvFixed::new(IMAGE, pieces.iovecs(), pieces.count, index)
                    .offset(offset)
                    .build(),
                (None, None) => {
                    opcode::Readv::new(IMAGE, pieces.iovecs(), pieces.count).offset(offset).build()
                }
            },
            Job::Write { pieces, offset, durable } => {
                let flags = if durable { libc::RWF_DSYNC } else { 0 };
                match (single(pieces), self.index(&pieces)) {
                    (Some((ptr, len)), Some(index)) => {
                        opcode::WriteFixed::new(IMAGE, ptr, len, index).offset(offset).rw_flags(flags).build()
                    }
                    (Some((ptr, len)), None) => {
                        opcode::Write::new(IMAGE, ptr, len).offset(offset).rw_flags(flags).build()
                    }
                    (None, Some(index)) => {
                        opcode::WritevFixed::new(IMAGE, pieces.iovecs(), pieces.count, index)
                            .offset(offset)
                            .rw_flags(flags)
                            .build()
                    }
                    (None, None) => opcode::Writev::new(IMAGE, pieces.iovecs(), pieces.count)
                        .offset(offset)
                        .rw_flags(flags)
                        .build(),
                }
            }
            Job::Flush => opcode::Fsync::new(IMAGE).flags(types::FsyncFlags::DATASYNC).build(),
            Job::Discard { offset, len } => allocate(offset, len, true),
            Job::Zeroes { offset, len, unmap } => allocate(offset, len, unmap),
        }
    }
}
