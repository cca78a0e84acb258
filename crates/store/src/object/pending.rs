//! Jobs that wait for chunks.
//!
//! Whoever ends a job holds its lock, and so does whoever copies into its memory: when its outcome
//! is made, nobody accesses its memory any more.
use crate::lock::lock;
use crate::pieces::scatter;
use crate::{Outcome, Pieces};
use rustix::event::EventfdFlags;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// A read that waits for chunks.
#[derive(Debug)]
pub(super) struct PendingJob {
    pieces: Pieces,
    offset: u64,
    len: u64,
    /// Chunks that are still missing; `None`: it has ended.
    missing: Mutex<Option<u64>>,
    end: End,
}

// SAFETY: the memory of the pieces is accessed under the lock, and only until the job has ended
// (the contract of `PendingJob::new`).
unsafe impl Sync for PendingJob {}

/// Who is told of the end.
#[derive(Debug)]
pub(super) enum End {
    /// A queue: it was pushed with `head`.
    Queue {
        /// Number of the job.
        head: u16,
        /// The queue's outcomes.
        to: Arc<Completions>,
    },
    /// A thread.
    Thread(Arc<Waiter>),
}

/// A thread that waits for one job.
#[derive(Debug, Default)]
pub(super) struct Waiter {
    result: Mutex<Option<i32>>,
    done: Condvar,
}

impl Waiter {
    /// Waits. Returns what [`Outcome::result`] would be.
    pub(super) fn wait(&self) -> i32 {
        let mut result = lock(&self.result);
        loop {
            match *result {
                Some(result) => return result,
                None => result = self.done.wait(result).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }
}

/// Outcomes for one queue, from other threads.
#[derive(Debug)]
pub(super) struct Completions {
    outcomes: Mutex<Vec<Outcome>>,
    /// Length of the list.
    count: AtomicUsize,
    /// The owner sleeps, or is about to: it wants a signal.
    sleeps: AtomicBool,
    event: Arc<OwnedFd>,
}

impl Completions {
    /// Without outcomes.
    ///
    /// # Errors
    /// The host refuses a descriptor.
    pub(super) fn new() -> io::Result<Self> {
        let event = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self {
            outcomes: Mutex::default(),
            count: AtomicUsize::new(0),
            sleeps: AtomicBool::new(false),
            event: Arc::new(event),
        })
    }

    /// Readable when the owner sleeps and there is an outcome.
    pub(super) fn event(&self) -> &Arc<OwnedFd> {
        &self.event
    }

    /// Whether there are outcomes.
    pub(super) fn has_some(&self) -> bool {
        // Acquire or not: the list has a lock.
        self.count.load(Ordering::Relaxed) != 0
    }

    /// Asks for a signal. `true` if there is an outcome already.
    pub(super) fn listen(&self) -> bool {
        // A signal of the last sleep.
        let _ = rustix::io::read(&self.event, &mut [0; 8]);
        // SeqCst with the one in `push`: this side sees the outcome, or that side sees the sleeper.
        self.sleeps.store(true, Ordering::SeqCst);
        self.count.load(Ordering::SeqCst) != 0
    }

    /// Takes the outcomes.
    pub(super) fn take(&self, into: &mut impl Extend<Outcome>) {
        let mut outcomes = self.lock();
        self.count.store(0, Ordering::Relaxed);
        into.extend(outcomes.drain(..));
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Outcome>> {
        lock(&self.outcomes)
    }

    fn push(&self, outcome: Outcome) {
        {
            let mut outcomes = self.lock();
            outcomes.push(outcome);
            // SeqCst: see `listen`.
            self.count.store(outcomes.len(), Ordering::SeqCst);
        }
        if self.sleeps.swap(false, Ordering::SeqCst) {
            // It cannot be full: each sleep adds one.
            let _ = rustix::io::write(&self.event, &1_u64.to_ne_bytes());
        }
    }
}

impl PendingJob {
    /// A read of `len` bytes that waits for `missing` chunks, of which there is one.
    ///
    /// # Safety
    /// The pieces, the array that lists them and the memory that they name are valid until the job
    /// has ended, and have at least `len` bytes.
    pub(super) unsafe fn new(pieces: Pieces, offset: u64, len: u64, missing: u64, end: End) -> Arc<Self> {
        Arc::new(Self { pieces, offset, len, missing: Mutex::new(Some(missing)), end })
    }

    /// Where it reads, and how many bytes.
    pub(super) fn range(&self) -> (u64, u64) {
        (self.offset, self.len)
    }

    fn lock(&self) -> MutexGuard<'_, Option<u64>> {
        lock(&self.missing)
    }

    /// Whether it has ended.
    pub(super) fn is_over(&self) -> bool {
        self.lock().is_none()
    }

    /// Takes its part of a missing chunk, which begins at `start`. The last one ends the job.
    pub(super) fn fill(&self, start: u64, data: &[u8]) {
        let mut missing = self.lock();
        let Some(left) = missing.as_mut() else { return };
        let from = self.offset.max(start);
        let to = (self.offset + self.len).min(start + data.len() as u64);
        if from < to {
            let data = &data[(from - start) as usize..(to - start) as usize];
            // SAFETY: the job has not ended, and its lock is held (the contract of `new`).
            unsafe { scatter(self.pieces.slices(), from - self.offset, data) };
        }
        *left -= 1;
        if *left == 0 {
            // The device takes 32 bits; a job has less.
            let result = i32::try_from(self.len).unwrap_or(i32::MAX);
            self.end(&mut missing, result);
        }
    }

    /// Ends it with a negative error number, if it has not ended.
    pub(super) fn fail(&self, result: i32) {
        let mut missing = self.lock();
        if missing.is_some() {
            self.end(&mut missing, result);
        }
    }

    fn end(&self, missing: &mut Option<u64>, result: i32) {
        *missing = None;
        match &self.end {
            // SAFETY: the job ends here, once, under its lock: nobody accesses its memory any more.
            End::Queue { head, to } => to.push(unsafe { Outcome::new(*head, result) }),
            End::Thread(waiter) => {
                *lock(&waiter.result) = Some(result);
                waiter.done.notify_all();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use paravane_dma::HostSlice;
    use std::ptr::NonNull;

    #[test]
    fn chunks_fill_the_pieces_in_any_order_and_a_failed_job_is_left_alone() {
        let mut memory = [0_u8; 12];
        let base = memory.as_mut_ptr();
        let piece = |at: usize, len| HostSlice { ptr: base.wrapping_add(at), len };
        let mut list = [piece(0, 3), piece(3, 0), piece(4, 7)];
        let pieces = Pieces { first: NonNull::new(list.as_mut_ptr()).unwrap(), count: 3 };
        let completions = Arc::new(Completions::new().unwrap());
        let end = |head| End::Queue { head, to: completions.clone() };
        let mut outcomes = Vec::new();

        // Bytes 6 to 15 of chunks of 8 bytes.
        // SAFETY: the list and its memory outlive the job.
        let job = unsafe { PendingJob::new(pieces, 6, 10, 2, end(1)) };
        job.fill(8, &[8, 9, 10, 11, 12, 13, 14, 15]);
        assert!(!completions.has_some());
        job.fill(0, &[0, 1, 2, 3, 4, 5, 6, 7]);
        completions.take(&mut outcomes);
        assert_eq!(memory, [6, 7, 8, 0, 9, 10, 11, 12, 13, 14, 15, 0]);
        assert_eq!((outcomes[0].head(), outcomes[0].result(), outcomes.len()), (1, 10, 1));

        // SAFETY: as above.
        let job = unsafe { PendingJob::new(pieces, 0, 8, 1, end(2)) };
        assert!(!completions.listen());
        job.fail(-5);
        job.fail(-6);
        job.fill(0, &[99; 8]);
        assert!(completions.listen());
        completions.take(&mut outcomes);
        assert!(!memory.contains(&99));
        assert_eq!((outcomes[1].head(), outcomes[1].result(), outcomes.len()), (2, -5, 2));
    }
}
