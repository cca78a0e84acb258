//! Jobs of one virtqueue.
use super::pending::{Completions, End, PendingJob};
use super::shared::Shared;
use crate::cache::Found;
use crate::{Job, Outcome, Pieces, StoreQueue};
use rustix::event::{PollFd, PollFlags, poll};
use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Most bytes of one read; a longer one is short.
pub(super) const MOST_BYTES: u64 = 1 << 30;

/// What an object and others see of a queue.
#[derive(Debug)]
pub(super) struct Lane {
    completions: Arc<Completions>,
    /// Jobs that wait for chunks, by their heads.
    jobs: Mutex<HashMap<u16, Arc<PendingJob>>>,
    /// Bytes that were here. Only the owner of the queue adds to it.
    pub(super) hit_bytes: AtomicU64,
    closed: Arc<AtomicBool>,
}

impl Lane {
    fn jobs(&self) -> MutexGuard<'_, HashMap<u16, Arc<PendingJob>>> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends all jobs that wait, with a negative error number.
    pub(super) fn fail(&self, result: i32) {
        self.jobs().values().for_each(|job| job.fail(result));
    }
}

/// Jobs of one virtqueue. What is here is read in the queue's thread.
#[derive(Debug)]
pub(super) struct ObjectQueue {
    shared: Arc<Shared>,
    lane: Arc<Lane>,
    /// Outcomes of jobs that waited for nothing.
    ready: VecDeque<Outcome>,
    /// Jobs for the thread that fetches.
    pushed: Vec<Arc<PendingJob>>,
}

impl ObjectQueue {
    /// A queue with room for `jobs` jobs. `closed`: the object is closed.
    ///
    /// # Errors
    /// The host refuses a descriptor.
    pub(super) fn new(shared: Arc<Shared>, jobs: u16, closed: Arc<AtomicBool>) -> io::Result<Self> {
        let lane = Lane {
            completions: Arc::new(Completions::new()?),
            jobs: Mutex::new(HashMap::with_capacity(jobs.into())),
            hit_bytes: AtomicU64::new(0),
            closed,
        };
        Ok(Self {
            shared,
            lane: Arc::new(lane),
            ready: VecDeque::with_capacity(jobs.into()),
            pushed: Vec::with_capacity(jobs.into()),
        })
    }

    /// What others see of it.
    pub(super) fn lane(&self) -> &Arc<Lane> {
        &self.lane
    }

    /// Reads at once, or makes a job of it that waits.
    ///
    /// # Safety
    /// As [`StoreQueue::push`].
    unsafe fn read(&mut self, head: u16, pieces: Pieces, offset: u64) -> Option<i32> {
        let source = &self.shared.source;
        if source.is_unusable() {
            return Some(-libc::EIO);
        }
        // SAFETY: the caller's promise.
        let len = unsafe { pieces.bytes() }.min(MOST_BYTES);
        let len = len.min(source.layout.size().saturating_sub(offset));
        if len == 0 {
            return Some(0);
        }
        // SAFETY: the caller's promise.
        match unsafe { source.read(pieces, offset, len, true) } {
            Found::Copied { .. } => {
                let hits = &self.lane.hit_bytes;
                hits.store(hits.load(Ordering::Relaxed) + len, Ordering::Relaxed);
                Some(len as i32)
            }
            Found::Failed(error) => Some(-error),
            Found::Absent | Found::Later => {
                let (first, last) = source.layout.chunks(offset, len);
                let end = End::Queue { head, to: self.lane.completions.clone() };
                // SAFETY: the caller's promise; `drop` ends what has not ended.
                let job = unsafe { PendingJob::new(pieces, offset, len, last - first + 1, end) };
                self.lane.jobs().insert(head, job.clone());
                self.pushed.push(job);
                None
            }
        }
    }
}

impl StoreQueue for ObjectQueue {
    fn fd(&self) -> BorrowedFd<'_> {
        self.lane.completions.fd()
    }

    fn listen(&mut self) -> bool {
        self.lane.completions.listen() || !self.ready.is_empty() || !self.pushed.is_empty()
    }

    fn has_news(&mut self) -> Option<bool> {
        Some(!self.ready.is_empty() || !self.pushed.is_empty() || self.lane.completions.has_some())
    }

    unsafe fn push(&mut self, head: u16, job: Job) -> io::Result<()> {
        let result = match job {
            // SAFETY: the caller's promise.
            Job::Read { pieces, offset } => unsafe { self.read(head, pieces, offset) },
            Job::Flush => Some(0),
            Job::Write { .. } | Job::Discard { .. } | Job::Zeroes { .. } => Some(-libc::EROFS),
        };
        if let Some(result) = result {
            // SAFETY: nothing accesses the job's memory: the copy is over, or there was none.
            self.ready.push_back(unsafe { Outcome::new(head, result) });
        }
        Ok(())
    }

    fn submit(&mut self) -> io::Result<()> {
        if self.pushed.is_empty() {
            return Ok(());
        }
        self.shared.source.want(&self.pushed);
        self.pushed.clear();
        if self.lane.closed.load(Ordering::SeqCst) {
            self.lane.fail(-libc::EIO);
        }
        Ok(())
    }

    fn reap(&mut self, outcomes: &mut VecDeque<Outcome>) {
        outcomes.append(&mut self.ready);
        if self.lane.completions.has_some() {
            let before = outcomes.len();
            self.lane.completions.take(outcomes);
            let mut jobs = self.lane.jobs();
            outcomes.range(before..).for_each(|outcome| {
                jobs.remove(&outcome.head());
            });
        }
    }

    fn wait(&mut self) -> io::Result<()> {
        self.submit()?;
        while !self.listen() {
            match poll(&mut [PollFd::from_borrowed_fd(self.fd(), PollFlags::IN)], None) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    fn cancel(&mut self) {
        self.pushed.clear();
        // A job whose chunks are on their way can be given up as well: they are kept all the same.
        self.lane.fail(-libc::ECANCELED);
    }
}

impl Drop for ObjectQueue {
    fn drop(&mut self) {
        // From here on nobody accesses the memory of the jobs.
        self.lane.fail(-libc::ECANCELED);
    }
}
