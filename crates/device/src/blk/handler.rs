//! Serves one queue: requests in, jobs to the engine, statuses back.
//!
//! ```text
//!   serve:  reap -> pop -> start each -> submit -> reap -> publish
//!   drain:  wait and reap until nothing is in flight; when cut short, without another job for what is not done
//! ```
//! With a rate limit, `pop` takes one chain at a time, for as long as the limit lets one begin. A queue that it holds wants
//! no kicks; it sleeps on the engine and a timer.
//!
//! While a request is in flight the kernel reads or writes guest memory. The slot keeps that memory mapped,
//! and a handler that is dropped first waits for its requests.
use super::engine::{Engine, Job, Outcome};
use super::errors::{Cause, StorageErrors};
use super::image::Image;
use super::request::{self, Command, Limits};
use super::slot::{Next, Slot};
use crate::rate::{self, Brake};
use crate::{MappedQueue, QueueBatch, QueueGuard, QueueHandler, ServeError, Served, address_error};
use paravane_dma::{Access, AccessGuard, Mapping};
use paravane_ring::Segment;
use paravane_ring::device::{Batch, Chain, Queue};
use paravane_spec::blk;
use std::collections::VecDeque;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

pub(super) struct Handler {
    image: Arc<Image>,
    id: [u8; blk::ID_LEN],
    limits: Limits,
    /// FLUSH was not negotiated: every write goes through (section 5.2.5.2).
    write_through: bool,
    engine: Engine,
    limit: Option<Limited>,
    /// One a descriptor head.
    slots: Vec<Slot>,
    /// Jobs in the engine, which is slots that are not idle.
    in_flight: usize,
    /// Reaped and not yet looked at.
    outcomes: VecDeque<Outcome>,
    /// Those of the disk.
    errors: Arc<StorageErrors>,
    /// Index of the queue.
    queue: u16,
}

/// What a limited queue has besides.
pub(super) struct Limited {
    brake: Brake,
    /// Room for one chain.
    one: Batch,
}

/// Most chains that a limited queue takes in one serve, as others do.
const BATCH: u32 = 64;

impl Limited {
    pub(super) fn new(brake: Brake) -> Self {
        Self { brake, one: Batch::new(1) }
    }
}

impl Handler {
    /// For queue `queue` of so many descriptors, with these features.
    pub(super) fn new(
        image: Arc<Image>,
        id: [u8; blk::ID_LEN],
        engine: Engine,
        limit: Option<Limited>,
        (slots, features): (u16, u64),
        (queue, errors): (u16, Arc<StorageErrors>),
    ) -> Self {
        let limits = Limits {
            capacity: image.sectors(),
            block: image.block() / blk::SECTOR,
            read_only: image.read_only,
            discard: features & blk::F_DISCARD != 0,
            write_zeroes: features & blk::F_WRITE_ZEROES != 0,
        };
        let slots = usize::from(slots);
        Self {
            image,
            id,
            limits,
            write_through: features & blk::F_FLUSH == 0,
            engine,
            limit,
            slots: std::iter::repeat_with(Slot::default).take(slots).collect(),
            in_flight: 0,
            outcomes: VecDeque::with_capacity(slots),
            errors,
            queue,
        }
    }

    /// Parses a chain and starts it, or answers it at once. Says how many bytes of data it moves.
    fn start(
        &mut self,
        queue: &mut Queue,
        memory: &AccessGuard<'_>,
        (chain, readable, writable): (&Chain, &[Segment], &[Segment]),
        served: &mut Served,
    ) -> Result<u64, ServeError> {
        // The owner limits the queue to the size that this handler was made for, and the ring hands out no
        // head twice. Both are checked all the same: a slot in use must not be touched.
        let Some(slot) = self.slots.get_mut(usize::from(chain.head)).filter(|slot| slot.is_idle()) else {
            return Err(io::Error::other("the queue is not the one that this handler serves").into());
        };
        let request = request::parse(memory, (chain, readable, writable), &self.limits, slot.ranges())?;
        let status = request.status;
        let mut bytes = 0;
        let job = match request.command {
            Command::Read { offset, len } => {
                let mapping = memory
                    .map_segments(writable, 0, len.into(), Access::WRITE, slot.pieces())
                    .map_err(address_error)?;
                bytes = len.into();
                slot.begin_read(status, (offset, len), mapping, self.image.direct)
            }
            Command::Write { offset, len } => {
                let skip = request::HEADER.into();
                let mapping = memory
                    .map_segments(readable, skip, len.into(), Access::READ, slot.pieces())
                    .map_err(address_error)?;
                // Zeroes are in the place of what its owner has taken away: they are not what the driver has written.
                if paravane_dma::is_lost(slot.next_pieces()) {
                    answer(queue, memory, chain.head, status, blk::S_IOERR, 0, served)?;
                    return Ok(0);
                }
                bytes = len.into();
                slot.begin_write(status, (offset, len), mapping, self.image.direct, self.write_through)
            }
            Command::Flush => Ok(slot.begin_flush(status)),
            Command::Discard | Command::WriteZeroes => {
                let discard = request.command == Command::Discard;
                match slot.begin_ranges(status, discard, self.write_through && !discard) {
                    Some(job) => Ok(job),
                    None => {
                        answer(queue, memory, chain.head, status, blk::S_OK, 0, served)?;
                        return Ok(0);
                    }
                }
            }
            Command::GetId => {
                memory.write_segments(writable, 0, &self.id, Access::WRITE).map_err(address_error)?;
                let written = blk::ID_LEN as u32;
                answer(queue, memory, chain.head, status, blk::S_OK, written, served)?;
                return Ok(0);
            }
            Command::Answer(code) => {
                if code != blk::S_OK {
                    self.errors.reject();
                }
                answer(queue, memory, chain.head, status, code, 0, served)?;
                return Ok(0);
            }
        };
        // There is no memory for a buffer.
        let Ok(job) = job else {
            answer(queue, memory, chain.head, status, blk::S_IOERR, 0, served)?;
            return Ok(0);
        };
        if memory.is_translated() {
            // Its translation may be gone by the time that the status is known; who takes it away waits for this.
            let room = memory.map(status, 1, Access::WRITE);
            match room {
                Ok(room) => slot.keep(room),
                Err(error) => {
                    slot.end();
                    return Err(address_error(error).into());
                }
            }
        }
        self.push(chain.head, job)?;
        Ok(bytes)
    }

    /// Takes and starts what the limit lets begin.
    fn take_limited(
        &mut self,
        limited: &mut Limited,
        queue: &mut Queue,
        memory: &QueueGuard<'_>,
        served: &mut Served,
    ) -> Result<(), ServeError> {
        let Limited { brake, one } = limited;
        let now = rate::now();
        while served.taken < BATCH && brake.lets_go(now) {
            if memory.pop(queue, one)? == 0 {
                break;
            }
            served.taken += 1;
            for chain in one.iter() {
                let bytes = self.start(queue, memory, chain, served)?;
                brake.charge(now, bytes);
            }
        }
        Ok(())
    }

    fn push(&mut self, head: u16, job: Job) -> Result<(), ServeError> {
        // SAFETY: the pieces lie in the slot, whose `mapping` keeps what they name mapped (or they name a
        // static). Neither changes until the outcome has been reaped: a slot that is not idle is given to no
        // other request, and `drain` and `Drop` wait before slots go away (or leak them).
        let pushed = unsafe { self.engine.push(head, job) };
        match pushed {
            Ok(()) => {
                self.in_flight += 1;
                Ok(())
            }
            Err(error) => {
                self.slots[usize::from(head)].end();
                Err(error.into())
            }
        }
    }

    /// Takes what the engine has done, and completes it or goes on with it.
    fn reap(
        &mut self,
        queue: &mut Queue,
        memory: &AccessGuard<'_>,
        served: &mut Served,
    ) -> Result<(), ServeError> {
        self.engine.reap(&mut self.outcomes);
        while let Some(outcome) = self.outcomes.pop_front() {
            self.in_flight -= 1;
            self.step(outcome, queue, memory, served, false)?;
        }
        Ok(())
    }

    /// Goes on with a request whose job is done. With `last`, one that is not done goes no further: it stays in flight where a
    /// successor is told of it, and fails elsewhere.
    fn step(
        &mut self,
        outcome: Outcome,
        queue: &mut Queue,
        memory: &AccessGuard<'_>,
        served: &mut Served,
        last: bool,
    ) -> Result<(), ServeError> {
        let Outcome { slot: head, result } = outcome;
        let slot = &mut self.slots[usize::from(head)];
        let (code, written) = match slot.next(result) {
            Next::Again(job) if !last => return self.push(head, job),
            Next::Again(_) if queue.is_tracked() => {
                slot.end();
                return Ok(());
            }
            Next::Again(_) => (blk::S_IOERR, 0),
            Next::Done(written) => (blk::S_OK, written),
            Next::Failed(cause, written) => {
                self.errors.add(self.queue, slot.missed(), cause, reason(&self.image, cause));
                (blk::S_IOERR, written)
            }
        };
        self.finish(queue, memory, (head, code, written), served)
    }

    /// Answers a request whose job is done, and frees its slot.
    fn finish(
        &mut self,
        queue: &mut Queue,
        memory: &AccessGuard<'_>,
        (head, code, written): (u16, u8, u32),
        served: &mut Served,
    ) -> Result<(), ServeError> {
        let slot = &mut self.slots[usize::from(head)];
        let room = slot.room();
        let status = slot.end();
        match room {
            None => answer(queue, memory, head, status, code, written, served),
            Some(room) => answer_mapped(queue, room, head, code, written, served),
        }
    }

    /// Waits for everything in flight. Unless `finish` completes it, it is forgotten. With `cut`, from the moment that it is set, no
    /// request goes on with another job.
    fn settle(&mut self, mut finish: Option<(&mut MappedQueue, &mut Served)>, cut: Option<&AtomicBool>) {
        loop {
            // An earlier error may have left some that were reaped already.
            while let Some(outcome) = self.outcomes.pop_front() {
                self.in_flight -= 1;
                let stepped = match &mut finish {
                    Some((queue, served)) => {
                        // Shut again before the next wait, which may be long.
                        let QueueBatch { queue, memory, .. } = queue.begin_batch();
                        // Relaxed: a request that does not see it yet goes one job further.
                        let last = cut.is_some_and(|cut| cut.load(Ordering::Relaxed));
                        self.step(outcome, queue, &memory, served, last)
                    }
                    None => {
                        self.slots[usize::from(outcome.slot)].end();
                        Ok(())
                    }
                };
                if let Err(error) = stepped {
                    // The queue has latched: what is left can only be forgotten.
                    tracing::debug!(%error, "a request was forgotten while the queue was drained");
                    finish = None;
                }
            }
            if self.in_flight == 0 {
                return;
            }
            if let Err(error) = self.engine.wait() {
                // The kernel may still use the slots' memory: it stays mapped for ever, and the handler is
                // useless from here on.
                tracing::error!(%error, "cannot wait for block requests in flight");
                std::mem::forget(std::mem::take(&mut self.slots));
                self.in_flight = 0;
                return;
            }
            self.engine.reap(&mut self.outcomes);
        }
    }
}

/// What a qcow2 image said of an error that has no number.
#[cold]
fn reason(image: &Image, cause: Cause) -> Option<String> {
    match cause {
        Cause::Os(libc::EIO) => image.qcow2.as_ref()?.reason(),
        _ => None,
    }
}

/// As [`answer`], where the room for the status was kept.
#[cold]
fn answer_mapped(
    queue: &mut Queue,
    room: Mapping,
    head: u16,
    code: u8,
    written: u32,
    served: &mut Served,
) -> Result<(), ServeError> {
    // It was mapped for this.
    let _ = room.write(&[code]);
    drop(room);
    complete(queue, head, written, served)
}

/// Writes the status, ordered after the data, and stages the completion.
fn answer(
    queue: &mut Queue,
    memory: &AccessGuard<'_>,
    head: u16,
    status: u64,
    code: u8,
    written: u32,
    served: &mut Served,
) -> Result<(), ServeError> {
    memory.write(status, &[code], Access::WRITE).map_err(address_error)?;
    complete(queue, head, written, served)
}

/// Stages the completion of a request whose status has been written.
fn complete(queue: &mut Queue, head: u16, written: u32, served: &mut Served) -> Result<(), ServeError> {
    // The status byte counts; it is the last of the writable part.
    queue.complete(head, written.saturating_add(1))?;
    served.completed += 1;
    Ok(())
}

impl QueueHandler for Handler {
    fn serve(&mut self, queue: &mut MappedQueue) -> Result<Served, ServeError> {
        if self.slots.is_empty() {
            return Err(io::Error::other("requests were lost in the host").into());
        }
        // Those of one batch are checked against one size.
        self.limits.capacity = self.image.sectors();
        self.engine.follow(queue);
        let QueueBatch { queue, memory, chains } = queue.begin_batch();
        let mut served = Served::default();
        let mut serve = || -> Result<(), ServeError> {
            self.engine.quiet();
            self.reap(queue, &memory, &mut served)?;
            if self.limit.is_none() {
                let taken = memory.pop(queue, chains)?;
                served.taken = taken as u32;
                for chain in chains.iter() {
                    self.start(queue, &memory, chain, &mut served)?;
                }
            } else if let Some(mut limited) = self.limit.take() {
                let taken = self.take_limited(&mut limited, queue, &memory, &mut served);
                self.limit = Some(limited);
                taken?;
            }
            self.engine.submit()?;
            self.reap(queue, &memory, &mut served)?;
            self.engine.submit()?;
            served.interrupt = queue.publish()?;
            Ok(())
        };
        match serve() {
            Ok(()) => Ok(served),
            Err(ServeError::Queue(error)) => Err(queue.fail(error).into()),
            Err(host) => Err(host),
        }
    }

    fn completion_fd(&self) -> Option<BorrowedFd<'_>> {
        match &self.limit {
            None => self.engine.fd(),
            Some(limited) => Some(limited.brake.fd()),
        }
    }

    fn listen(&mut self) -> bool {
        self.engine.listen() || self.limit.as_mut().is_some_and(|limited| limited.brake.listen())
    }

    fn wants_kicks(&self) -> bool {
        // What is available waits for the limit, not for a kick.
        !self.limit.as_ref().is_some_and(|limited| limited.brake.holds())
    }

    fn keeps_memory(&self) -> bool {
        self.engine.registers()
    }

    fn has_news(&mut self) -> Option<bool> {
        let over = self.limit.as_ref().is_some_and(|Limited { brake, .. }| brake.holds() && brake.is_over());
        self.engine.has_news().map(|news| news || over)
    }

    fn drain(&mut self, queue: &mut MappedQueue, complete: bool) -> Served {
        self.empty(queue, complete, None)
    }

    fn drain_until(&mut self, queue: &mut MappedQueue, complete: bool, cut: &AtomicBool) -> Served {
        self.empty(queue, complete, Some(cut))
    }
}

impl Handler {
    /// See [`QueueHandler::drain_until`].
    fn empty(&mut self, queue: &mut MappedQueue, complete: bool, cut: Option<&AtomicBool>) -> Served {
        let mut served = Served::default();
        self.settle(complete.then_some((&mut *queue, &mut served)), cut);
        if complete {
            // A queue that has latched has nothing more to say.
            served.interrupt = queue.begin_batch().queue.publish().unwrap_or(false);
        }
        served
    }
}

impl Drop for Handler {
    fn drop(&mut self) {
        self.settle(None, None);
    }
}
