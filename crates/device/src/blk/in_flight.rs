//! Requests in flight: a small state machine for each, one system call a step.
//!
//! ```text
//! RequestTable --free(head)--> Free --begin--> Parsed --read_into, write_from--> WithData
//!      |                                         |                                  | begin
//!      |                                         '--flush, allocate--> Ready <------'
//!      |                                                               ^   |
//!      '--reaped(outcome)--> Reaped --advance--> Next --again----------'   '--push--> the engine
//!                                                  '--done, failed--> Ended
//!
//!   Parsed, Ready --end--> Ended --write_status--> answered
//! ```
//! Each arrow consumes the value at its tail, so no other order compiles. The values borrow one
//! entry of the table; dropping one frees its entry. The steps of a request:
//!
//! ```text
//!   Read     --short--> Read             --all--> done
//!   Write    --short--> Write            --all--> done
//!   Sync                                 -------> done
//!   Allocate --next range--> Allocate    --all--> done, or Sync first where writes go through
//!      \--not supported--> Zero --short--> Zero --all--> next range
//! ```
//! An entry belongs to a descriptor head, so there are as many as the queue has descriptors. Their
//! storage is reused (`entry`).
mod entry;

use super::direct::{Alignment, Bounce};
use super::errors::{Cause, Missed};
use super::measured::Measured;
use super::request::{self, ByteRange, Request};
use crate::latency::{Operation, Taken};
use entry::{Advance, Entry, Step};
use paravane_dma::{Access, AccessGuard, DmaError, Mapping, MappingGuard};
use paravane_ring::Segment;
use paravane_store::{Outcome, StoreQueue};
use std::collections::TryReserveError;
use std::io;

/// The requests of one queue, by descriptor head.
///
/// Between [`Ready::push`] and [`RequestTable::reaped`] the kernel accesses the memory of a
/// request. A table that is dropped meanwhile leaks its entries.
///
/// Entries are made when a request needs them, and stay where they are: most drivers use few heads,
/// most of the time none.
#[derive(Debug)]
pub(super) struct RequestTable {
    /// For [`CHUNK`] heads each.
    chunks: Vec<Option<Chunk>>,
    /// Number of heads.
    pub(super) size: u16,
    /// Requests that the engine has.
    pub(super) in_flight: usize,
}

type Chunk = Box<[Entry; CHUNK]>;

/// Entries that are made together.
const CHUNK: usize = 32;

impl RequestTable {
    /// For a queue of `size` descriptors.
    pub(super) fn new(size: u16) -> Self {
        let chunks = usize::from(size).div_ceil(CHUNK);
        Self { chunks: std::iter::repeat_with(|| None).take(chunks).collect(), size, in_flight: 0 }
    }

    /// The entry of `head`, if there ever was a request.
    fn entry(&mut self, head: u16) -> Option<(&mut Entry, &mut usize)> {
        let chunk = self.chunks.get_mut(usize::from(head) / CHUNK)?.as_mut()?;
        Some((&mut chunk[usize::from(head) % CHUNK], &mut self.in_flight))
    }

    /// Leaks all entries, so that their memory stays mapped.
    ///
    /// The table has no entries afterwards.
    pub(super) fn leak(&mut self) {
        std::mem::forget(std::mem::take(&mut self.chunks));
        self.in_flight = 0;
    }

    /// Whether [`RequestTable::leak`] was called.
    pub(super) fn is_leaked(&self) -> bool {
        self.chunks.is_empty()
    }

    /// The entry of `head`.
    ///
    /// `None` if its request is in flight, or the queue has no such head.
    pub(super) fn free(&mut self, head: u16) -> Option<Free<'_>> {
        let Self { chunks, size, in_flight } = self;
        if head >= *size {
            return None;
        }
        let chunk = chunks.get_mut(usize::from(head) / CHUNK)?;
        let chunk = chunk.get_or_insert_with(|| Box::new(std::array::from_fn(|_| Entry::default())));
        let entry = &mut chunk[usize::from(head) % CHUNK];
        // A claim that is dropped would end the request.
        (entry.step == Step::Idle).then(|| Free(Claim { entry, in_flight, head }))
    }

    /// What is measured of the last request of `head`, which has ended.
    #[cold]
    pub(super) fn measured(&mut self, head: u16) -> Measured {
        self.entry(head).map_or_else(Measured::default, |(entry, _)| entry.measured)
    }

    /// Takes a request back from the engine. `None` if none is in flight there.
    pub(super) fn reaped(&mut self, outcome: Outcome) -> Option<Reaped<'_>> {
        let head = outcome.head();
        let (entry, in_flight) =
            self.entry(head).filter(|(entry, _)| entry.step != Step::Idle && !entry.waits)?;
        *in_flight -= 1;
        Some(Reaped { claim: Claim { entry, in_flight, head }, result: outcome.result() })
    }

    /// The request of `head` that waits for room ([`Ready::wait`]); `None`: it does not.
    ///
    /// The engine must not have it.
    #[cold]
    pub(super) fn waiting(&mut self, head: u16) -> Option<Ready<'_>> {
        let (entry, in_flight) = self.entry(head).filter(|(entry, _)| entry.waits)?;
        entry.waits = false;
        Some(Ready(Claim { entry, in_flight, head }))
    }
}

impl Drop for RequestTable {
    fn drop(&mut self) {
        if self.in_flight > 0 {
            self.leak();
        }
    }
}

/// An entry that the engine does not have.
///
/// Dropping it ends the request and lets go of its memory.
#[derive(Debug)]
struct Claim<'a> {
    entry: &'a mut Entry,
    in_flight: &'a mut usize,
    head: u16,
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        self.entry.step = Step::Idle;
        self.entry.waits = false;
        self.entry.release_data();
        self.entry.status_mapping = None;
    }
}

/// An entry without a request.
#[derive(Debug)]
pub(super) struct Free<'a>(Claim<'a>);

impl<'a> Free<'a> {
    /// For a parsed request, with its ranges, which are taken.
    pub(super) fn begin(self, request: Request, ranges: &mut Vec<ByteRange>, taken: Taken) -> Parsed<'a> {
        let entry = &mut *self.0.entry;
        entry.ranges.clear();
        std::mem::swap(&mut entry.ranges, ranges);
        entry.status = request.status;
        entry.measured = Measured::new(request.command, &entry.ranges, taken);
        Parsed(self.0)
    }
}

/// A request whose frame is known: where its status goes, and its ranges.
#[derive(Debug)]
pub(super) struct Parsed<'a>(Claim<'a>);

impl<'a> Parsed<'a> {
    /// Maps the memory that `len` bytes at `offset` of the disk are read into.
    ///
    /// # Errors
    /// It is not guest memory.
    pub(super) fn read_into(
        self,
        memory: &AccessGuard<'_>,
        writable: &[Segment],
        offset: u64,
        len: u32,
    ) -> Result<WithData<'a>, DmaError> {
        let pieces = self.0.entry.empty_pieces();
        let mapping = memory.map_segments(writable, 0, len.into(), Access::WRITE, pieces)?;
        Ok(WithData { claim: self.0, step: Step::Read, mapping, offset, len })
    }

    /// Maps the memory that `len` bytes at `offset` of the disk are written from.
    ///
    /// # Errors
    /// It is not guest memory.
    pub(super) fn write_from(
        self,
        memory: &AccessGuard<'_>,
        readable: &[Segment],
        offset: u64,
        len: u32,
    ) -> Result<WithData<'a>, DmaError> {
        let pieces = self.0.entry.empty_pieces();
        let mapping =
            memory.map_segments(readable, request::HEADER.into(), len.into(), Access::READ, pieces)?;
        Ok(WithData { claim: self.0, step: Step::Write, mapping, offset, len })
    }

    /// A flush.
    pub(super) fn flush(self) -> Ready<'a> {
        self.0.entry.begin(Step::Sync, false);
        Ready(self.0)
    }

    /// Discards or zeroes the ranges.
    ///
    /// # Errors
    /// There are none, and nothing to do.
    pub(super) fn allocate(self, discard: bool, durable: bool) -> Result<Ready<'a>, Ended<'a>> {
        if self.0.entry.ranges.is_empty() {
            return Err(Ended(self.0));
        }
        self.0.entry.begin(Step::Allocate, durable);
        self.0.entry.discard = discard;
        Ok(Ready(self.0))
    }

    /// Nothing more is to be done.
    pub(super) fn end(self) -> Ended<'a> {
        Ended(self.0)
    }
}

/// A read or write with its guest memory mapped.
#[derive(Debug)]
pub(super) struct WithData<'a> {
    claim: Claim<'a>,
    step: Step,
    mapping: MappingGuard,
    offset: u64,
    len: u32,
}

impl<'a> WithData<'a> {
    /// Prepares the first step, by a bounce buffer where `alignment` demands one.
    ///
    /// A write is `durable` when it is done.
    ///
    /// # Errors
    /// The host has no memory for the buffer, or the owner of the memory has taken away what is to be
    /// written: the zeroes that lie there are not the driver's data.
    pub(super) fn begin(self, alignment: Option<Alignment>, durable: bool) -> Result<Ready<'a>, Ended<'a>> {
        let Self { claim, step, mapping, offset, len } = self;
        let entry = &mut *claim.entry;
        if step == Step::Write && paravane_dma::is_lost(&entry.pieces) {
            return Err(Ended(claim));
        }
        let bounce: Result<_, TryReserveError> = Bounce::for_pieces(&entry.pieces, len, alignment);
        let Ok(bounce) = bounce else { return Err(Ended(claim)) };
        entry.begin(step, durable);
        (entry.bounce, entry.mapping) = (bounce, Some(mapping));
        (entry.offset, entry.left) = (offset, len.into());
        Ok(Ready(claim))
    }
}

/// A request with a step for the engine.
#[derive(Debug)]
pub(super) struct Ready<'a>(Claim<'a>);

impl<'a> Ready<'a> {
    /// Keeps the memory of the status byte mapped, where its translation may go away.
    ///
    /// The invalidation waits for the mapping.
    ///
    /// # Errors
    /// It is not guest memory.
    pub(super) fn map_status(&mut self, memory: &AccessGuard<'_>) -> Result<(), DmaError> {
        self.0.entry.status_mapping = Some(memory.map(self.0.entry.status, 1, Access::WRITE)?);
        Ok(())
    }

    /// What is measured of the request.
    pub(super) fn measured(&self) -> Measured {
        self.0.entry.measured
    }

    /// Gives the step to the engine.
    ///
    /// # Errors
    /// The host refuses work; the request has ended.
    pub(super) fn push(self, engine: &mut dyn StoreQueue) -> io::Result<()> {
        let Self(claim) = self;
        let job = claim.entry.job();
        // SAFETY: the pieces lie in the entry, whose `mapping` keeps mapped what they name (or they
        // name a static). Neither changes until the outcome has been reaped: no entry is handed out
        // while its step is not `Idle`, except by `RequestTable::reaped`, which takes an outcome,
        // and only an engine makes those. Entries of a table that is dropped before are leaked.
        // This is the only job of `head`, since the claim is exclusive.
        unsafe { engine.push(claim.head, job) }?;
        *claim.in_flight += 1;
        // The engine has it: it is not to be ended.
        std::mem::forget(claim);
        Ok(())
    }

    /// Ends the request before the step.
    pub(super) fn end(self) -> Ended<'a> {
        Ended(self.0)
    }

    /// Whether the step changes data of the image.
    pub(super) fn changes_data(&self) -> bool {
        self.0.entry.step.changes_data()
    }

    /// Keeps the request until [`RequestTable::waiting`] takes it up. Returns its head.
    #[cold]
    pub(super) fn wait(self) -> u16 {
        let Self(claim) = self;
        (claim.entry.waits, claim.entry.has_waited) = (true, true);
        let head = claim.head;
        std::mem::forget(claim);
        head
    }

    /// Whether [`Ready::wait`] was called for the request.
    pub(super) fn has_waited(&self) -> bool {
        self.0.entry.has_waited
    }
}

/// A request whose step the engine has done.
#[derive(Debug)]
pub(super) struct Reaped<'a> {
    claim: Claim<'a>,
    /// The system call's result, or a negative error number.
    result: i32,
}

impl<'a> Reaped<'a> {
    /// Gives the request up.
    pub(super) fn forget(self) -> Ended<'a> {
        Ended(self.claim)
    }

    /// Goes on by the result of the step.
    pub(super) fn advance(self) -> Next<'a> {
        let Self { claim, result } = self;
        match claim.entry.advance(result) {
            Advance::Again => Next::Again(Ready(claim)),
            Advance::Done(read) => Next::Done(Ended(claim), read),
            Advance::Failed(cause, read) => {
                let missed = claim.entry.missed();
                let is_full = matches!(cause, Cause::Os(libc::ENOSPC | libc::EDQUOT));
                let failure = Failure { missed, cause, read };
                match is_full && claim.entry.step.changes_data() {
                    true => Next::Full(Ready(claim), failure),
                    false => Next::Failed(Ended(claim), failure),
                }
            }
        }
    }
}

/// What follows a step.
#[derive(Debug)]
pub(super) enum Next<'a> {
    /// Another step.
    Again(Ready<'a>),
    /// The request is done; bytes of data put into guest memory.
    Done(Ended<'a>, u32),
    /// The host has no room for the rest of the request. The step can be repeated.
    Full(Ready<'a>, Failure),
    /// The host failed the request.
    Failed(Ended<'a>, Failure),
}

/// How the host failed a request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Failure {
    /// Data that was not transferred.
    pub(super) missed: Missed,
    pub(super) cause: Cause,
    /// Bytes of data put into guest memory before.
    pub(super) read: u32,
}

impl Failure {
    /// Error number of the host, if it has one.
    pub(super) fn number(&self) -> Option<i32> {
        match self.cause {
            Cause::Os(number) => Some(number),
            Cause::End => None,
        }
    }

    /// Whether the engine gave the job back ([`StoreQueue::cancel`]).
    ///
    /// The job is undone or interrupted.
    pub(super) fn is_cancelled(&self) -> bool {
        matches!(self.cause, Cause::Os(libc::ECANCELED | libc::EINTR))
    }
}

/// A request that only lacks its answer.
#[derive(Debug)]
pub(super) struct Ended<'a>(Claim<'a>);

impl Ended<'_> {
    /// Whether the request has waited for room.
    pub(super) fn has_waited(&self) -> bool {
        self.0.entry.has_waited
    }

    /// What is measured of the request.
    pub(super) fn measured(&self) -> Measured {
        self.0.entry.measured
    }

    /// Operation, and when it was taken.
    pub(super) fn taken(&self) -> (&'static Operation, Taken) {
        let Measured { operation, taken, .. } = self.0.entry.measured;
        (operation, taken)
    }

    /// Writes the status, ordered after the data, and frees the entry.
    ///
    /// # Errors
    /// The status byte is not in guest memory.
    pub(super) fn write_status(self, memory: &AccessGuard<'_>, status: u8) -> Result<(), DmaError> {
        let entry = &mut *self.0.entry;
        // First: it is what orders the data.
        entry.release_data();
        match entry.status_mapping.take() {
            None => memory.write(entry.status, &[status], Access::WRITE),
            Some(mapping) => {
                write_mapped(mapping, status);
                Ok(())
            }
        }
    }
}

#[cold]
fn write_mapped(mapping: Mapping, status: u8) {
    // It is one byte, mapped for writing.
    let written = mapping.write(&[status]);
    debug_assert!(written);
}
