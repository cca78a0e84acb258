//! Serves one queue: requests in, jobs to the engine, statuses back.
//!
//! ```text
//!   serve:  reap -> pop -> parse and start each -> submit -> reap -> publish
//!                                   '-- an image in memory: copy, complete (at_once) --^
//!   drain:  wait and reap until nothing is in flight; when cut short, without further steps of requests,
//!           and, with in-flight tracking, without jobs that the host has not begun
//! ```
//! When the disk's image is replaced, the queue takes nothing new until all queues have nothing in
//! flight ([`current`](super::current)). A write for which the host has no room may wait
//! ([`full`](super::full)), with the later writes of its queue.
//!
//! With a rate limit, chains are popped one at a time, while the limit allows. A queue that the
//! limit holds wants no kicks; it sleeps on the engine and a timer.
//!
//! While a request is in flight the kernel reads or writes guest memory. Its entry keeps that
//! memory mapped, and a handler that is dropped first waits for its requests.
mod at_once;
mod chain_parts;
mod drain;

use super::current::{Attached, Follower, Replacement};
use super::errors::{Cause, Missed, StorageErrors};
use super::image::Image;
use super::in_flight::{Ended, Next, RequestTable};
use super::measured::Measured;
use super::request::{self, ByteRange, Command, Limits};
use crate::latency::{LatencyRecorder, Taken};
use crate::rate::{self, Brake};
use crate::{
    Limiter, MappedQueue, QueueBatch, QueueGuard, QueueHandler, Rest, ServeError, Served, WakeSet, WakeSource,
};
use chain_parts::ChainParts;
use paravane_dma::{Access, AccessGuard};
use paravane_ring::QueueError;
use paravane_ring::device::{Batch, Queue};
use paravane_spec::blk;
use paravane_store::file::Mapped;
use paravane_store::{Outcome, StoreQueue};
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

pub(super) struct Handler {
    /// The image in use, as far as this queue knows.
    image: Arc<Image>,
    follower: Follower,
    /// The set of its thread, with the follower's event, and a limit's timer.
    wakes: Option<(WakeSet, WakeSource, Option<WakeSource>)>,
    /// Heads of requests that wait for room, in order.
    waiting: VecDeque<u16>,
    /// A write without room does not wait.
    hurries: bool,
    id: [u8; blk::ID_LEN],
    limits: Limits,
    /// FLUSH was not negotiated: every write goes through (section 5.2.5.2).
    write_through: bool,
    engine: Box<dyn StoreQueue>,
    /// The image, if it is mapped and has the disk's layout.
    mapped: Option<Arc<Mapped>>,
    /// Jobs are done in the queue's thread.
    copies: bool,
    /// The engine keeps guest memory beyond that of jobs.
    registers: bool,
    /// `None`: no limit, so no clock is read.
    limit: Option<Limited>,
    /// Where a limit can be set.
    limiter: Option<Arc<Limiter>>,
    requests: RequestTable,
    /// Ranges of the request that is parsed.
    ranges: Vec<ByteRange>,
    /// Outcomes that were reaped and not yet handled.
    outcomes: VecDeque<Outcome>,
    /// Counters of the disk.
    errors: Arc<StorageErrors>,
    /// Index of the queue.
    queue: u16,
}

/// A queue of a disk that starts.
pub(super) struct DiskQueue {
    pub(super) index: u16,
    /// Descriptors of the queue.
    pub(super) size: u16,
    /// As negotiated.
    pub(super) features: u64,
    pub(super) follower: Follower,
    pub(super) attached: Attached,
    pub(super) engine: Box<dyn StoreQueue>,
    /// What GET_ID answers.
    pub(super) id: [u8; blk::ID_LEN],
    pub(super) limiter: Option<Arc<Limiter>>,
    pub(super) errors: Arc<StorageErrors>,
}

/// State of a rate-limited queue.
pub(super) struct Limited {
    brake: Brake,
    /// Storage for one chain.
    one: Batch,
}

/// Most chains that a rate-limited queue pops in one serve, as many as others.
const BATCH: u32 = 64;

/// Bytes that one serve copies, about, where the queues of other devices may wait for the thread.
///
/// A copy of 256 KiB takes some 20 µs. It is 64 requests of 4 KiB.
const AT_ONCE: u64 = 256 << 10;

impl Limited {
    pub(super) fn new(brake: Brake) -> Self {
        Self { brake, one: Batch::new(1) }
    }
}

impl Handler {
    /// Creates the handler of a queue.
    pub(super) fn new(queue: DiskQueue) -> io::Result<Self> {
        let DiskQueue { index, size, features, follower, attached, engine, id, limiter, errors } = queue;
        let (mapped, copies) = (attached.mapped_disk(), attached.engine.copies);
        let (image, registers) = (attached.image, engine.registers());
        let limits = Limits {
            capacity: image.sectors(),
            block: image.file.block / blk::SECTOR,
            read_only: image.file.read_only,
            discard: features & blk::F_DISCARD != 0,
            write_zeroes: features & blk::F_WRITE_ZEROES != 0,
        };
        let mut handler = Self {
            image,
            follower,
            wakes: None,
            waiting: VecDeque::new(),
            hurries: false,
            id,
            limits,
            write_through: features & blk::F_FLUSH == 0,
            engine,
            mapped,
            copies,
            registers,
            limit: None,
            limiter,
            requests: RequestTable::new(size),
            ranges: Vec::new(),
            outcomes: VecDeque::new(),
            errors,
            queue: index,
        };
        handler.look_at_limit()?;
        Ok(handler)
    }

    /// Sees whether there is a limit. Called while the descriptors are in no set.
    fn look_at_limit(&mut self) -> io::Result<()> {
        match (self.limiter.as_ref().filter(|limiter| limiter.is_on()), &mut self.limit) {
            (None, limit) => *limit = None,
            (Some(_), Some(limited)) => limited.brake.release(),
            (Some(limiter), limit) => {
                *limit = Some(Limited::new(Brake::new(limiter.clone())?));
            }
        }
        Ok(())
    }

    /// Parses a chain.
    ///
    /// # Errors
    /// The frame is broken; latch the queue.
    #[inline(always)]
    fn parse(
        &mut self,
        memory: &AccessGuard<'_>,
        chain: ChainParts<'_>,
        (latency, taken): (&LatencyRecorder, Taken),
    ) -> Result<request::Request, QueueError> {
        let request = request::parse(memory, chain, &self.limits, &mut self.ranges)?;
        let measured = || Measured::new(request.command, &self.ranges, taken);
        latency.request_taken(|| measured().probed(chain.0.head));
        Ok(request)
    }

    /// Starts a request that was parsed, or answers it. Returns its bytes of data.
    fn start(
        &mut self,
        queue: &mut Queue,
        memory: &AccessGuard<'_>,
        ((chain, readable, writable), request): (ChainParts<'_>, request::Request),
        served: &mut Served,
        (latency, taken): (&mut LatencyRecorder, Taken),
    ) -> Result<u64, ServeError> {
        // The owner limits the queue to the size that this handler was made for, and the ring pops
        // no head twice. Both are checked all the same.
        let Some(free) = self.requests.free(chain.head) else {
            return Err(io::Error::other("the queue is not the one that this handler serves").into());
        };
        let command = request.command;
        let request = free.begin(request, &mut self.ranges, taken);
        // The data is lost, or the host has no memory for a buffer.
        let failed = |ended| (ended, blk::S_IOERR, 0);
        let mut bytes = 0;
        let ready = match command {
            Command::Read { offset, len } => {
                bytes = len.into();
                let data = request.read_into(memory, writable, offset, len)?;
                data.begin(self.image.file.direct, false).map_err(failed)
            }
            Command::Write { offset, len } => {
                bytes = len.into();
                let data = request.write_from(memory, readable, offset, len)?;
                data.begin(self.image.file.direct, self.write_through).map_err(failed)
            }
            Command::Flush => Ok(request.flush()),
            Command::Discard | Command::WriteZeroes => {
                let discard = command == Command::Discard;
                let ready = request.allocate(discard, self.write_through && !discard);
                ready.map_err(|ended| (ended, blk::S_OK, 0))
            }
            Command::GetId => {
                memory.write_segments(writable, 0, &self.id, Access::WRITE)?;
                Err((request.end(), blk::S_OK, blk::ID_LEN as u32))
            }
            Command::Answer(code) => {
                if code != blk::S_OK {
                    self.errors.reject();
                }
                Err((request.end(), code, 0))
            }
        };
        let mut ready = match ready {
            Ok(ready) => ready,
            // Without a job for the engine: its latency has no host stage.
            Err((ended, status, written)) => {
                let measured = ended.measured();
                finish(queue, memory, ended, (chain.head, status, written), served)?;
                let request = || measured.observed(chain.head, status);
                latency.answer_request(measured.operation, measured.taken, request);
                return Ok(0);
            }
        };
        if memory.is_translated() {
            ready.map_status(memory)?;
        }
        latency.request_started(|| ready.measured().probed(chain.head));
        // After a write that waits for room, in order.
        if !self.waiting.is_empty() && ready.changes_data() && self.follower.current.full.hold(libc::ENOSPC) {
            self.waiting.push_back(ready.wait());
            return Ok(bytes);
        }
        ready.push(&mut *self.engine)?;
        Ok(bytes)
    }

    /// Pops and starts the requests that the limit allows.
    fn take_limited(
        &mut self,
        limited: &mut Limited,
        queue: &mut Queue,
        memory: &QueueGuard<'_>,
        served: &mut Served,
        latency: &mut LatencyRecorder,
    ) -> Result<(), ServeError> {
        let Limited { brake, one } = limited;
        let now = rate::now();
        // When the first one was taken: one time for all.
        let mut first = None;
        while served.taken < BATCH {
            if !brake.lets_go(now) {
                latency.hold();
                break;
            }
            if memory.pop(queue, one)? == 0 {
                latency.empty();
                break;
            }
            served.taken += 1;
            let taken = *first.get_or_insert_with(|| latency.take());
            for chain in one.iter() {
                let request = self.parse(memory, chain, (&*latency, taken))?;
                let bytes = self.start(queue, memory, (chain, request), served, (&mut *latency, taken))?;
                brake.charge(now, bytes);
            }
        }
        latency.batch(served.taken as usize, queue.in_flight().into());
        Ok(())
    }

    /// Reaps finished jobs, and completes or continues their requests.
    fn reap(
        &mut self,
        queue: &mut Queue,
        memory: &AccessGuard<'_>,
        served: &mut Served,
        latency: &mut LatencyRecorder,
    ) -> Result<(), ServeError> {
        self.engine.reap(&mut self.outcomes);
        if !self.outcomes.is_empty() {
            latency.reap();
        }
        while let Some(outcome) = self.outcomes.pop_front() {
            self.step(outcome, queue, memory, served, (&mut *latency, false))?;
        }
        Ok(())
    }

    /// Completes or continues a request whose job is done.
    ///
    /// With `last`, a request that needs another step, or whose job was cancelled, ends: it stays in
    /// flight with in-flight tracking, and fails without.
    fn step(
        &mut self,
        outcome: Outcome,
        queue: &mut Queue,
        memory: &AccessGuard<'_>,
        served: &mut Served,
        (latency, last): (&mut LatencyRecorder, bool),
    ) -> Result<(), ServeError> {
        let head = outcome.head();
        let Some(reaped) = self.requests.reaped(outcome) else {
            return Err(io::Error::other("the engine reports a request that is not in flight").into());
        };
        let (ended, code, written) = match reaped.advance() {
            Next::Again(ready) if !last => return Ok(ready.push(&mut *self.engine)?),
            // What is left of it stays in flight for a successor.
            Next::Again(ready) if queue.is_tracked() => return leave(&ready.end(), &self.follower),
            Next::Again(ready) => (ready.end(), blk::S_IOERR, 0),
            Next::Done(ended, read) => (ended, blk::S_OK, read),
            Next::Full(ready, _) if (last || self.hurries) && queue.is_tracked() => {
                return leave(&ready.end(), &self.follower);
            }
            Next::Full(ready, failure) => {
                let full = &self.follower.current.full;
                let is_outside = is_outside(&self.image, failure.missed);
                let may_wait = full.waits() && !self.hurries && !last && !is_outside;
                let number = failure.number().unwrap_or(libc::ENOSPC);
                if may_wait && (ready.has_waited() || full.hold(number)) {
                    self.waiting.push_back(ready.wait());
                    return Ok(());
                }
                let reason = match is_outside {
                    true => Some("the image has shrunk and ends before the request".to_owned()),
                    false => reason(&self.image, failure.cause),
                };
                self.errors.add(self.queue, failure.missed, failure.cause, reason);
                (ready.end(), blk::S_IOERR, failure.read)
            }
            Next::Failed(ended, failure) if last && queue.is_tracked() && failure.is_cancelled() => {
                return leave(&ended, &self.follower);
            }
            Next::Failed(ended, failure) => {
                let reason = reason(&self.image, failure.cause);
                self.errors.add(self.queue, failure.missed, failure.cause, reason);
                (ended, blk::S_IOERR, failure.read)
            }
        };
        if ended.has_waited() {
            self.follower.current.full.release();
        }
        let (operation, taken) = ended.taken();
        finish(queue, memory, ended, (head, code, written), served)?;
        latency.complete_request(operation, taken, || self.requests.measured(head).observed(head, code));
        Ok(())
    }

    /// Sees why the gate has changed: goes on with another image, or tries again what waits for room.
    #[cold]
    fn follow(&mut self) -> Result<(), ServeError> {
        if let Some(Replacement { attached, engine }) = self.follower.look() {
            let jobs = self.requests.size;
            let mut engine = match engine {
                Some(engine) => engine,
                None => attached.engine.queue(jobs)?,
            };
            if let Some((wakes, ..)) = &self.wakes {
                self.engine.register(None)?;
                engine.register(Some(wakes))?;
            }
            self.registers = engine.registers();
            self.follower.retire(std::mem::replace(&mut self.engine, engine));
            (self.mapped, self.copies) = (attached.mapped_disk(), attached.engine.copies);
            self.image = attached.image;
        }
        if !self.follower.held {
            self.push_waiting()?;
        }
        Ok(())
    }

    /// Gives all requests that wait for room to the engine.
    fn push_waiting(&mut self) -> io::Result<()> {
        // Each may come back.
        for head in std::mem::take(&mut self.waiting) {
            if let Some(ready) = self.requests.waiting(head) {
                ready.push(&mut *self.engine)?;
            }
        }
        Ok(())
    }
}

/// Ends a request here that is not answered.
fn leave(ended: &Ended<'_>, follower: &Follower) -> Result<(), ServeError> {
    if ended.has_waited() {
        follower.current.full.release();
    }
    Ok(())
}

/// Whether a request that found no room will find none: the image has shrunk.
///
/// A block device or server answers writes beyond its end as a full file system does.
#[cold]
fn is_outside(image: &Image, missed: Missed) -> bool {
    let end = missed.sector.map(|sector| (sector * blk::SECTOR).saturating_add(missed.bytes));
    match &image.qcow2 {
        None => end.is_some_and(|end| image.is_shorter(end)),
        // Where it writes is not known.
        Some(_) => image.has_shrunk(),
    }
}

/// Message of a qcow2 image for an error without a number.
#[cold]
fn reason(image: &Image, cause: Cause) -> Option<String> {
    match cause {
        Cause::Os(libc::EIO) => image.qcow2.as_ref()?.reason(),
        _ => None,
    }
}

/// Writes the status of a request; completes its chain with `written` bytes.
///
/// The caller records the latency: with a host stage if the engine did a job, else without.
fn finish(
    queue: &mut Queue,
    memory: &AccessGuard<'_>,
    ended: Ended<'_>,
    (head, status, written): (u16, u8, u32),
    served: &mut Served,
) -> Result<(), ServeError> {
    ended.write_status(memory, status)?;
    // The status byte counts; it is the last of the writable part.
    queue.complete(head, written.saturating_add(1))?;
    served.completed += 1;
    Ok(())
}

impl QueueHandler for Handler {
    fn serve(&mut self, queue: &mut MappedQueue) -> Result<Served, ServeError> {
        if self.requests.is_leaked() {
            return Err(io::Error::other("the host has lost requests of this queue; reset the device").into());
        }
        if self.follower.has_changed() {
            self.follow()?;
        }
        // All requests of a batch are checked against one size.
        self.limits.capacity = self.image.sectors();
        if self.registers {
            let (generation, regions) = queue.regions();
            self.engine.register_memory(generation, regions);
        }
        let (shares, copies) = (queue.shares_thread(), self.copies);
        let QueueBatch { queue, memory, chains, latency } = queue.begin_batch();
        let mut served = Served::default();
        let mut serve = || -> Result<(), ServeError> {
            self.engine.quiet();
            self.reap(queue, &memory, &mut served, latency)?;
            if self.follower.held {
                // Takes nothing.
            } else if self.limit.is_none() {
                let taken = memory.pop(queue, chains)?;
                served.taken = taken as u32;
                let taken = latency.take_batch(taken, queue.in_flight().into());
                let bytes = self.take_batch(queue, (&memory, chains), &mut served, (latency, taken))?;
                if copies && served.taken > 0 {
                    // The next requests are likely as large as these.
                    let fits = AT_ONCE * u64::from(served.taken) / bytes.max(1);
                    chains.limit(if shares { fits as usize } else { usize::MAX });
                }
            } else if let Some(mut limited) = self.limit.take() {
                let taken = self.take_limited(&mut limited, queue, &memory, &mut served, latency);
                self.limit = Some(limited);
                taken?;
            }
            self.engine.submit()?;
            self.reap(queue, &memory, &mut served, latency)?;
            self.engine.submit()?;
            served.interrupt = queue.publish()?;
            Ok(())
        };
        match serve() {
            Ok(()) => {
                // Published by now.
                if self.follower.held && self.requests.in_flight == 0 {
                    self.follower.idle();
                }
                Ok(served)
            }
            Err(ServeError::Queue(error)) => Err(queue.fail(error).into()),
            Err(host) => Err(host),
        }
    }

    fn register(&mut self, wakes: Option<&WakeSet>) -> io::Result<()> {
        self.wakes = None;
        if let Some(wakes) = wakes {
            let event = wakes.add(&self.follower.event)?;
            let timer = self.limit.as_ref().map(|limited| wakes.add(&limited.brake.timer)).transpose()?;
            self.wakes = Some((wakes.clone(), event, timer));
        }
        self.engine.register(wakes)
    }

    fn renew(&mut self) -> io::Result<()> {
        self.look_at_limit()
    }

    fn rest(&mut self, arm: bool) -> Rest {
        let mut rest = self.engine.rest(arm);
        // Available requests wait for the limit, or for another image, not for a kick.
        let mut kicks = !self.follower.held;
        if let Some(Limited { brake, .. }) = &mut self.limit
            && rest != Rest::Serve
        {
            rest = rest.max(brake.rest(arm));
            kicks &= !brake.holds();
        }
        // After the event was cleared: a change from here on signals it.
        if self.follower.has_changed() { Rest::Serve } else { rest.with_kicks(kicks) }
    }

    fn keeps_memory(&self) -> bool {
        self.registers
    }

    fn drain(&mut self, queue: &mut MappedQueue, complete: bool) -> Served {
        self.empty(queue, complete, None)
    }

    fn drain_until(&mut self, queue: &mut MappedQueue, complete: bool, cut: &AtomicBool) -> Served {
        self.empty(queue, complete, Some(cut))
    }
}
