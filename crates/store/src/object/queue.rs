//! Jobs of one virtqueue.
use super::pending::PendingJob;
use super::shared::ObjectShared;
use crate::cache::{Batch, Found, Layout, Read};
use crate::lock::lock;
use crate::posted::Posted;
use crate::{Job, Outcome, Pieces, Rest, StoreQueue, WakeSet, WakeSource};
use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// What an object and others see of a queue.
#[derive(Debug)]
pub(super) struct Lane {
    completions: Arc<Posted<Outcome>>,
    /// Jobs that wait for chunks, by their heads.
    jobs: Mutex<HashMap<u16, Arc<PendingJob>>>,
    /// Bytes that were here. Only the owner of the queue adds to it.
    pub(super) hit_bytes: AtomicU64,
    closed: Arc<AtomicBool>,
}

impl Lane {
    /// Ends all jobs that wait, with a negative error number.
    pub(super) fn fail(&self, result: i32) {
        lock(&self.jobs).values().for_each(|job| job.fail(result));
    }
}

/// Jobs of one virtqueue. What is here is read in the queue's thread.
///
/// ```text
///   push -> batch --submit--> ready: it was here
///      \            '-------> pushed: it is fetched
///       '- not in the folder: in memory, or fetched
/// ```
#[derive(Debug)]
pub(super) struct ObjectQueue {
    shared: Arc<ObjectShared>,
    /// Reads of what is in the folder, by the latest that is known.
    batch: Batch,
    pub(super) begun: BegunJobs,
    wakes: Option<WakeSource>,
}

/// Jobs that have ended, or wait for chunks.
#[derive(Debug)]
pub(super) struct BegunJobs {
    pub(super) lane: Arc<Lane>,
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
    pub(super) fn new(shared: Arc<ObjectShared>, jobs: u16, closed: Arc<AtomicBool>) -> io::Result<Self> {
        let lane = Lane {
            completions: Arc::new(Posted::new(jobs.into())?),
            jobs: Mutex::new(HashMap::with_capacity(jobs.into())),
            hit_bytes: AtomicU64::new(0),
            closed,
        };
        let begun = BegunJobs {
            lane: Arc::new(lane),
            ready: VecDeque::with_capacity(jobs.into()),
            pushed: Vec::with_capacity(jobs.into()),
        };
        Ok(Self { shared, batch: Batch::default(), begun, wakes: None })
    }

    /// Collects a read, does it at once, or makes a job of it that waits.
    ///
    /// # Safety
    /// As [`StoreQueue::push`].
    unsafe fn read(&mut self, head: u16, pieces: Pieces, offset: u64) {
        let source = &self.shared.source;
        if source.is_unusable() {
            return self.begun.answer(head, -libc::EIO);
        }
        // SAFETY: the caller's promise.
        let len = unsafe { source.readable(pieces, offset) };
        if len == 0 {
            return self.begun.answer(head, 0);
        }
        let read = Read { head, pieces, offset, len };
        // SAFETY: the caller's promise: its outcome is made when the batch has it no more.
        if unsafe { source.collect(&mut self.batch, read) } {
            if self.batch.is_full() {
                self.perform();
            }
            return;
        }
        // SAFETY: the caller's promise.
        let found = unsafe { source.read(pieces, offset, len, true) };
        // SAFETY: the caller's promise; the copy is over.
        unsafe { self.begun.end(source.layout, read, found) };
    }

    /// Does the reads that were collected.
    fn perform(&mut self) {
        let source = &self.shared.source;
        for (read, found) in source.perform(&mut self.batch) {
            // SAFETY: the promise of `push`; the copy is over.
            unsafe { self.begun.end(source.layout, read, found) };
        }
    }

    /// Whether there is something to reap or submit, apart from what others have done.
    fn has_own_news(&self) -> bool {
        !(self.begun.ready.is_empty() && self.begun.pushed.is_empty() && self.batch.is_empty())
    }
}

impl BegunJobs {
    /// Answers a read, or makes a job of it that waits.
    ///
    /// # Safety
    /// As [`StoreQueue::push`]; nothing accesses the memory of the read.
    unsafe fn end(&mut self, layout: Layout, read: Read, found: Found) {
        let Read { head, pieces, offset, len } = read;
        match found {
            Found::Copied { .. } => {
                let hits = &self.lane.hit_bytes;
                hits.store(hits.load(Ordering::Relaxed) + len, Ordering::Relaxed);
                self.answer(head, len as i32);
            }
            Found::Failed(error) => self.answer(head, -error),
            Found::Absent | Found::Later => {
                let (first, last) = layout.chunks(offset, len);
                let to = self.lane.completions.clone();
                // SAFETY: the caller's promise; `drop` ends what has not ended.
                let job = unsafe { PendingJob::new(pieces, offset, len, last - first + 1, (head, to)) };
                lock(&self.lane.jobs).insert(head, job.clone());
                self.pushed.push(job);
            }
        }
    }

    fn answer(&mut self, head: u16, result: i32) {
        // SAFETY: nothing accesses the job's memory: the copy is over, or there was none.
        self.ready.push_back(unsafe { Outcome::new(head, result) });
    }
}

impl StoreQueue for ObjectQueue {
    fn register(&mut self, wakes: Option<&WakeSet>) -> io::Result<()> {
        WakeSource::register(&mut self.wakes, &self.begun.lane.completions.event, wakes)
    }

    fn rest(&mut self, arm: bool) -> Rest {
        let completions = &self.begun.lane.completions;
        let has_some = if arm { completions.listen() } else { completions.has_some() };
        Rest::serve_if(has_some || self.has_own_news())
    }

    unsafe fn push(&mut self, head: u16, job: Job) -> io::Result<()> {
        match job {
            // SAFETY: the caller's promise.
            Job::Read { pieces, offset } => unsafe { self.read(head, pieces, offset) },
            Job::Flush => self.begun.answer(head, 0),
            Job::Write { .. } | Job::Discard { .. } | Job::Zeroes { .. } => {
                self.begun.answer(head, -libc::EROFS)
            }
        }
        Ok(())
    }

    fn submit(&mut self) -> io::Result<()> {
        self.perform();
        if self.begun.pushed.is_empty() {
            return Ok(());
        }
        self.shared.source.want(&self.begun.pushed);
        self.begun.pushed.clear();
        if self.begun.lane.closed.load(Ordering::SeqCst) {
            self.begun.lane.fail(-libc::EIO);
        }
        Ok(())
    }

    fn reap(&mut self, outcomes: &mut VecDeque<Outcome>) {
        outcomes.append(&mut self.begun.ready);
        if self.begun.lane.completions.has_some() {
            let before = outcomes.len();
            self.begun.lane.completions.take(outcomes);
            let mut jobs = lock(&self.begun.lane.jobs);
            outcomes.range(before..).for_each(|outcome| {
                jobs.remove(&outcome.head());
            });
        }
    }

    fn wait(&mut self) -> io::Result<()> {
        self.submit()?;
        while self.rest(true) != Rest::Serve {
            self.begun.lane.completions.sleep()?;
        }
        Ok(())
    }

    fn cancel(&mut self) {
        for read in self.batch.give_up() {
            self.begun.answer(read.head, -libc::ECANCELED);
        }
        self.begun.pushed.clear();
        // A job whose chunks are on their way can be given up as well: they are kept all the same.
        self.begun.lane.fail(-libc::ECANCELED);
    }
}

impl Drop for ObjectQueue {
    fn drop(&mut self) {
        // From here on nobody accesses the memory of the jobs.
        self.begun.lane.fail(-libc::ECANCELED);
    }
}
