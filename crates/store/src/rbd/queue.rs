//! Jobs of one virtqueue, as requests of librbd.
//!
//! ```text
//!   push -> pending -> submit: fill the buffer, start -> librbd -> reap: empty the buffer -> outcome
//!                        ^                                           |
//!                        '--------- the next part of a long job -----'
//! ```
//! A job that is long is done part by part, so that the memory of a queue has a bound whatever a
//! guest asks for. librbd acknowledges a write when it is durable: its cache is off. With a journal
//! a durable write is followed by a flush.
use super::ended::EndedRequests;
use super::flight::{Flight, RbdRequest};
use super::session::RbdSession;
use crate::pieces::{gather, scatter, total};
use crate::{Job, Outcome, Rest, StoreQueue, WakeSet, WakeSource};
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

/// Longest transfer of one request.
const MAX_TRANSFER: u64 = 1 << 20;
/// Longest range that is discarded or zeroed by one request: librbd has a request for each object
/// in it, usually 256.
const MAX_RANGE: u64 = 1 << 30;
/// Most bytes of a queue in buffers, except that one request is always in flight.
const MAX_BYTES: usize = 32 << 20;
/// Longest buffer that is kept for the next request.
const KEEP: usize = 128 << 10;

/// A job that has a slot.
#[derive(Clone, Copy, Debug)]
struct RbdTask {
    head: u16,
    job: Job,
    /// Bytes to do.
    total: u64,
    /// Bytes done.
    done: u64,
    /// What librbd has now.
    request: RbdRequest,
    /// The flush after a durable write is still to come.
    flush: bool,
}

/// [`StoreQueue`] of an image.
#[derive(Debug)]
pub(super) struct RbdQueue {
    session: Arc<RbdSession>,
    ended: Arc<EndedRequests<Flight>>,
    /// By slot.
    tasks: Vec<Option<RbdTask>>,
    /// Slots without a task.
    free: Vec<usize>,
    /// Slots whose task has not been started.
    pending: VecDeque<usize>,
    /// Slots whose task has its result.
    finished: VecDeque<(usize, i32)>,
    /// Jobs have been pushed since the last submission.
    pushed: bool,
    /// Requests that librbd has.
    in_flight: usize,
    /// Bytes in their buffers.
    bytes: usize,
    spare: Vec<Flight>,
    /// Empty between calls.
    taken: Vec<Flight>,
    wakes: Option<WakeSource>,
}

impl RbdQueue {
    pub(super) fn new(session: Arc<RbdSession>, jobs: u16) -> io::Result<Self> {
        let slots = usize::from(jobs.max(1));
        let ended = Arc::new(EndedRequests::new(slots)?);
        session.add(&ended);
        let library = session.image().library();
        Ok(Self {
            session,
            ended,
            tasks: vec![None; slots],
            free: (0..slots).rev().collect(),
            pending: VecDeque::with_capacity(slots),
            finished: VecDeque::with_capacity(slots),
            pushed: false,
            in_flight: 0,
            bytes: 0,
            spare: (0..slots).map(|_| Flight::new(library)).collect(),
            taken: Vec::with_capacity(slots),
            wakes: None,
        })
    }

    /// The next request of a task, and its length in a buffer. `None` if nothing is left to do.
    fn next(task: &RbdTask) -> Option<(RbdRequest, usize)> {
        let left = task.total - task.done;
        Some(match task.job {
            Job::Read { offset, .. } if left > 0 => {
                let len = left.min(MAX_TRANSFER) as usize;
                (RbdRequest::Read { offset: offset + task.done, len }, len)
            }
            Job::Write { offset, .. } if left > 0 => {
                let len = left.min(MAX_TRANSFER) as usize;
                (RbdRequest::Write { offset: offset + task.done, len }, len)
            }
            Job::Discard { offset, .. } if left > 0 => {
                (RbdRequest::Discard { offset: offset + task.done, len: left.min(MAX_RANGE) }, 0)
            }
            Job::Zeroes { offset, unmap, .. } if left > 0 => {
                (RbdRequest::Zeroes { offset: offset + task.done, len: left.min(MAX_RANGE), unmap }, 0)
            }
            _ if task.flush => (RbdRequest::Flush, 0),
            _ => return None,
        })
    }

    /// Number of bytes that a job may do, or its error.
    ///
    /// # Safety
    /// The pieces of the job are valid.
    unsafe fn admit(&self, job: &Job) -> Result<u64, i32> {
        let (offset, len, writes) = match *job {
            // SAFETY: the caller's promise.
            Job::Read { pieces, offset } => (offset, total(unsafe { pieces.slices() }), false),
            // SAFETY: the caller's promise.
            Job::Write { pieces, offset, .. } => (offset, total(unsafe { pieces.slices() }), true),
            Job::Flush => return Ok(0),
            Job::Discard { offset, len } | Job::Zeroes { offset, len, .. } => (offset, len, true),
        };
        let end = offset.checked_add(len).ok_or(-libc::EINVAL)?;
        if writes && self.session.image().read_only {
            return Err(-libc::EROFS);
        }
        let size = self.session.size();
        match job {
            // As at the end of a file.
            Job::Read { .. } => Ok(len.min(size.saturating_sub(offset)).min(i32::MAX as u64)),
            // librbd would cut it short without a word.
            _ if end > size => Err(-libc::ENOSPC),
            Job::Write { .. } => Ok(len.min(i32::MAX as u64)),
            _ => Ok(len),
        }
    }

    /// Starts the next part of a slot's task with `flight`, or finishes it.
    fn start(&mut self, slot: usize, mut flight: Flight) {
        let Some(task) = self.tasks[slot].as_mut() else { return self.keep(flight) };
        let Some((request, len)) = Self::next(task) else {
            let result = match task.job {
                Job::Read { .. } | Job::Write { .. } => task.done as i32,
                _ => 0,
            };
            self.keep(flight);
            return self.finish(slot, result);
        };
        task.request = request;
        flight.0.slot = slot;
        flight.make_room(len);
        if let Job::Write { pieces, .. } = task.job
            && let RbdRequest::Write { .. } = request
        {
            // SAFETY: the job is in flight, so that its pieces are valid.
            let lost = unsafe {
                let pieces = pieces.slices();
                gather(pieces, task.done, &mut flight.0.buffer[..len]);
                paravane_dma::is_lost(pieces)
            };
            if lost {
                self.keep(flight);
                return self.finish(slot, -libc::EFAULT);
            }
        }
        self.ended.note(slot, self.session.second());
        self.in_flight += 1;
        self.bytes += len;
        if let Err(flight) = flight.start(self.session.image(), &self.ended, request) {
            self.land(flight);
        }
    }

    /// Takes the result of a request that has ended.
    fn land(&mut self, flight: Flight) {
        let slot = flight.0.slot;
        self.in_flight -= 1;
        let Some(task) = self.tasks[slot].as_mut() else { return self.keep(flight) };
        if let RbdRequest::Read { len, .. } | RbdRequest::Write { len, .. } = task.request {
            self.bytes -= len;
        }
        if flight.0.result < 0 {
            let result = flight.0.result;
            self.session.note_error(&io::Error::from_raw_os_error(-result));
            self.keep(flight);
            return self.finish(slot, result);
        }
        match (task.request, task.job) {
            (RbdRequest::Read { len, .. }, Job::Read { pieces, .. }) => {
                let got = len.min(flight.0.result as usize);
                // SAFETY: the job is in flight, so that its pieces are valid.
                unsafe { scatter(pieces.slices(), task.done, &flight.0.buffer[..got]) };
                task.done += got as u64;
                if got < len {
                    task.total = task.done;
                }
            }
            (RbdRequest::Write { len, .. }, _) => task.done += len as u64,
            (RbdRequest::Discard { len, .. } | RbdRequest::Zeroes { len, .. }, _) => task.done += len,
            _ => task.flush = false,
        }
        self.start(slot, flight);
    }

    fn finish(&mut self, slot: usize, result: i32) {
        self.ended.note(slot, 0);
        self.finished.push_back((slot, result));
    }

    fn keep(&mut self, mut flight: Flight) {
        if flight.0.buffer.len() > KEEP {
            flight.0.buffer = Vec::new();
        }
        self.spare.push(flight);
    }

    /// Starts what waits, as far as the bound of memory allows.
    fn start_pending(&mut self) {
        while let Some(&slot) = self.pending.front() {
            let len = self.tasks[slot].as_ref().and_then(Self::next).map_or(0, |(_, len)| len);
            if self.in_flight > 0 && self.bytes + len > MAX_BYTES {
                return;
            }
            let Some(flight) = self.spare.pop() else { return };
            self.pending.pop_front();
            self.start(slot, flight);
        }
    }

    /// Lets all jobs fail. Requests in librbd end by themselves, and nobody takes them.
    #[cold]
    fn give_up(&mut self) {
        self.ended.posted.abandon();
        self.pending.clear();
        (self.in_flight, self.bytes) = (0, 0);
        let finished: Vec<_> = self.finished.iter().map(|&(slot, _)| slot).collect();
        for slot in 0..self.tasks.len() {
            if self.tasks[slot].is_some() && !finished.contains(&slot) {
                self.finish(slot, -libc::EIO);
            }
        }
    }

    /// Takes what librbd has ended.
    fn land_all(&mut self) {
        if self.session.is_closed() {
            return self.give_up();
        }
        let mut taken = std::mem::take(&mut self.taken);
        self.ended.posted.take(&mut taken);
        taken.drain(..).for_each(|flight| self.land(flight));
        self.taken = taken;
        self.start_pending();
    }

    /// Whether there is something to reap or submit that librbd does not know of.
    fn has_own_news(&self) -> bool {
        let jobs = self.free.len() < self.tasks.len();
        self.pushed || !self.finished.is_empty() || (jobs && self.session.is_closed())
    }

    /// Sleeps until librbd has ended a request.
    fn sleep(&mut self) -> io::Result<()> {
        if self.rest(true) == Rest::Serve {
            return Ok(());
        }
        self.ended.posted.sleep()
    }
}

impl StoreQueue for RbdQueue {
    fn register(&mut self, wakes: Option<&WakeSet>) -> io::Result<()> {
        WakeSource::register(&mut self.wakes, &self.ended.posted.event, wakes)
    }

    fn rest(&mut self, arm: bool) -> Rest {
        let has_some = if arm { self.ended.posted.listen() } else { self.ended.posted.has_some() };
        Rest::serve_if(has_some || self.has_own_news())
    }

    unsafe fn push(&mut self, head: u16, job: Job) -> io::Result<()> {
        let slot = self.free.pop().ok_or(io::ErrorKind::WouldBlock)?;
        // SAFETY: the caller's promise.
        let admitted = unsafe { self.admit(&job) };
        let flush = match job {
            Job::Flush => true,
            Job::Write { durable, .. } => durable && self.session.image().has_journal(),
            _ => false,
        };
        let total = admitted.unwrap_or(0);
        self.tasks[slot] = Some(RbdTask { head, job, total, done: 0, request: RbdRequest::Flush, flush });
        match admitted {
            Ok(_) => self.pending.push_back(slot),
            Err(error) => self.finish(slot, error),
        }
        self.pushed = true;
        Ok(())
    }

    fn submit(&mut self) -> io::Result<()> {
        self.pushed = false;
        if self.session.is_closed() {
            self.give_up();
        } else {
            self.start_pending();
        }
        Ok(())
    }

    fn reap(&mut self, outcomes: &mut VecDeque<Outcome>) {
        self.land_all();
        while let Some((slot, result)) = self.finished.pop_front() {
            if let Some(task) = self.tasks[slot].take() {
                self.free.push(slot);
                // SAFETY: librbd knows none of its memory, and the queue has forgotten it.
                outcomes.push_back(unsafe { Outcome::new(task.head, result) });
            }
        }
    }

    fn wait(&mut self) -> io::Result<()> {
        self.submit()?;
        loop {
            self.land_all();
            if !self.finished.is_empty() || self.free.len() == self.tasks.len() {
                return Ok(());
            }
            self.sleep()?;
        }
    }

    fn cancel(&mut self) {
        self.pushed = false;
        while let Some(slot) = self.pending.pop_front() {
            self.finish(slot, -libc::ECANCELED);
        }
    }
}

impl Drop for RbdQueue {
    /// Waits for requests in flight, so that a write of this queue is not behind one that the next
    /// owner makes; not after [`Store::close`](crate::Store::close).
    fn drop(&mut self) {
        self.cancel();
        self.finished.clear();
        self.pushed = false;
        while self.in_flight > 0 && !self.session.is_closed() && self.sleep().is_ok() {
            let mut taken = std::mem::take(&mut self.taken);
            self.ended.posted.take(&mut taken);
            self.in_flight -= taken.len();
            taken.clear();
            self.taken = taken;
        }
        self.ended.posted.abandon();
        self.session.remove(&self.ended);
    }
}
