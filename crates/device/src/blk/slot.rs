//! One request on its way through the host: a small state machine, one system call a step.
//!
//! ```text
//!   Idle --begin--> Read  --short--> Read            --all--> done
//!               \-> Write --short--> Write           --all--> done
//!               \-> Sync                             -------> done
//!               \-> Allocate --next range--> Allocate --all--> done, or Sync first when writes go through
//!                      \--not supported--> Zero --short--> Zero --all--> next range
//! ```
//! A slot belongs to a descriptor head, so there are as many as the queue has descriptors; their storage is
//! made once and used again.
use super::direct::{Alignment, Bounce, Page};
use super::engine::{Job, Pieces};
use super::errors::{Cause, Missed, Operation};
use super::request::ByteRange;
use paravane_dma::{HostSlice, Mapping, MappingGuard};
use std::collections::TryReserveError;
use std::ptr::NonNull;
use zerocopy::IntoBytes;

/// Zeroes to be written where the file system cannot make them.
static ZEROES: [Page; 16] = [Page::ZEROES; 16];

/// Most pieces in one system call (IOV_MAX); the rest goes into the next.
const MAX_PIECES: usize = 1024;

/// How often one step is tried again when the host says that it was interrupted or short of something.
const RETRIES: u8 = 16;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    #[default]
    Idle,
    Read,
    Write,
    Sync,
    Allocate,
    Zero,
}

/// What comes after a step.
#[derive(Debug)]
pub(super) enum Next {
    /// Another step.
    Again(Job),
    /// All done; the number of data bytes that were put into guest memory.
    Done(u32),
    /// The host failed it, after this many data bytes.
    Failed(Cause, u32),
}

/// A request in flight.
#[derive(Debug, Default)]
pub(super) struct Slot {
    state: State,
    /// Where the status byte goes.
    status: u64,
    /// Behind an IOMMU: the same, kept mapped.
    room: Option<Mapping>,
    /// What is left of the data, from `first` on.
    pieces: Vec<HostSlice>,
    first: usize,
    /// Keeps the pieces mapped.
    mapping: Option<MappingGuard>,
    /// What is moved in their place, where the file does not take them as they are.
    bounce: Option<Box<Bounce>>,
    /// Where on the disk what is left begins, and its length, in bytes.
    offset: u64,
    left: u64,
    /// Data bytes put into guest memory.
    done: u32,
    /// Ranges to discard or zero, the present one at `range`.
    ranges: Vec<ByteRange>,
    range: usize,
    discard: bool,
    /// Writes go through to the disk: the driver has no way to flush.
    durable: bool,
    retries: u8,
}

impl Slot {
    pub(super) fn is_idle(&self) -> bool {
        self.state == State::Idle
    }

    /// Storage for the ranges of the next request.
    pub(super) fn ranges(&mut self) -> &mut Vec<ByteRange> {
        &mut self.ranges
    }

    /// Storage for the pieces of the next request, emptied.
    pub(super) fn pieces(&mut self) -> &mut Vec<HostSlice> {
        self.pieces.clear();
        &mut self.pieces
    }

    /// The pieces of the next request, as they are.
    pub(super) fn next_pieces(&self) -> &[HostSlice] {
        &self.pieces
    }

    /// Keeps the place of the status byte mapped.
    pub(super) fn keep(&mut self, room: Mapping) {
        self.room = Some(room);
    }

    /// What was kept, of a request that is about to end.
    pub(super) fn room(&mut self) -> Option<Mapping> {
        self.room.take()
    }

    fn begin(&mut self, state: State, status: u64, durable: bool) {
        self.state = state;
        self.status = status;
        self.durable = durable;
        self.first = 0;
        self.done = 0;
        self.range = 0;
        self.retries = 0;
    }

    /// Begins to read `len` bytes at `offset` into the pieces.
    ///
    /// # Errors
    /// The host has no memory for a buffer; nothing has begun.
    pub(super) fn begin_read(
        &mut self,
        status: u64,
        (offset, len): (u64, u32),
        mapping: MappingGuard,
        alignment: Option<Alignment>,
    ) -> Result<Job, TryReserveError> {
        self.bounce = Bounce::for_pieces(&self.pieces, len, alignment)?;
        self.begin(State::Read, status, false);
        (self.offset, self.left, self.mapping) = (offset, len.into(), Some(mapping));
        Ok(self.job())
    }

    /// Begins to write the pieces at `offset`.
    ///
    /// # Errors
    /// The host has no memory for a buffer; nothing has begun.
    pub(super) fn begin_write(
        &mut self,
        status: u64,
        (offset, len): (u64, u32),
        mapping: MappingGuard,
        alignment: Option<Alignment>,
        durable: bool,
    ) -> Result<Job, TryReserveError> {
        self.bounce = Bounce::for_pieces(&self.pieces, len, alignment)?;
        self.begin(State::Write, status, durable);
        (self.offset, self.left, self.mapping) = (offset, len.into(), Some(mapping));
        Ok(self.job())
    }

    /// Begins to flush.
    pub(super) fn begin_flush(&mut self, status: u64) -> Job {
        self.begin(State::Sync, status, false);
        self.job()
    }

    /// Begins to discard or zero the ranges. `None` if there is none.
    pub(super) fn begin_ranges(&mut self, status: u64, discard: bool, durable: bool) -> Option<Job> {
        if self.ranges.is_empty() {
            return None;
        }
        self.begin(State::Allocate, status, durable);
        self.discard = discard;
        Some(self.job())
    }

    /// The next step, given the result of the last: the system call's, or a negative error number.
    pub(super) fn next(&mut self, result: i32) -> Next {
        if result < 0 {
            let error = -result;
            if matches!(error, libc::EINTR | libc::EAGAIN) && self.retries < RETRIES {
                self.retries += 1;
                return Next::Again(self.job());
            }
            if self.state == State::Allocate && not_supported(error) {
                // A discard is a hint (section 5.2.6.2: the device may do nothing); zeroes are not.
                return if self.discard { self.next_range() } else { self.zero_by_hand() };
            }
            return Next::Failed(Cause::Os(error), self.done);
        }
        self.retries = 0;
        match self.state {
            State::Idle => Next::Failed(Cause::Os(libc::EINVAL), 0),
            State::Sync => Next::Done(0),
            State::Allocate => self.next_range(),
            State::Read | State::Write | State::Zero => {
                // 0: the file has become shorter than the disk. More than was asked for cannot be.
                let moved = result.unsigned_abs();
                if moved == 0 || u64::from(moved) > self.left {
                    let cause = if moved == 0 { Cause::End } else { Cause::Os(libc::EIO) };
                    return Next::Failed(cause, self.done);
                }
                self.offset += u64::from(moved);
                self.left -= u64::from(moved);
                if self.state == State::Read {
                    self.done += moved;
                    if let Some(bounce) = &mut self.bounce {
                        // SAFETY: `mapping` keeps the pieces mapped, for writing, since it is a read.
                        unsafe { bounce.hand_on(moved as usize, &self.pieces[self.first..]) };
                    }
                }
                match (self.left, self.state) {
                    (0, State::Zero) => self.next_range(),
                    (0, _) => Next::Done(self.done),
                    (_, State::Zero) => {
                        self.point_at_zeroes();
                        Next::Again(self.job())
                    }
                    _ => {
                        self.consume(moved as usize);
                        Next::Again(self.job())
                    }
                }
            }
        }
    }

    /// What the present step leaves undone if it fails.
    pub(super) fn missed(&self) -> Missed {
        match self.state {
            State::Read => Missed::at(Operation::Read, self.offset, self.left),
            State::Write => Missed::at(Operation::Write, self.offset, self.left),
            State::Zero => Missed::at(Operation::WriteZeroes, self.offset, self.left),
            State::Allocate if self.discard => Missed::range(Operation::Discard, self.ranges.get(self.range)),
            State::Allocate => Missed::range(Operation::WriteZeroes, self.ranges.get(self.range)),
            // After ranges of zeroes that go through to the disk, or a flush; a flush has no ranges.
            State::Sync if !self.ranges.is_empty() => {
                Missed::range(Operation::WriteZeroes, self.ranges.last())
            }
            State::Sync | State::Idle => Missed::range(Operation::Flush, None),
        }
    }

    /// Ends the request, lets go of its memory, and says where its status goes.
    pub(super) fn end(&mut self) -> u64 {
        self.state = State::Idle;
        self.mapping = None;
        self.bounce = None;
        self.room = None;
        self.status
    }

    /// The system call that the present state stands for.
    fn job(&mut self) -> Job {
        match self.state {
            State::Read => Job::Read { pieces: self.rest(), offset: self.offset },
            State::Write | State::Zero => {
                if let Some(bounce) = &mut self.bounce {
                    // SAFETY: `mapping` keeps the pieces mapped.
                    unsafe { bounce.fill(&self.pieces[self.first..], self.left) };
                }
                Job::Write { pieces: self.rest(), offset: self.offset, durable: self.durable }
            }
            State::Idle | State::Sync => Job::Sync,
            State::Allocate => {
                let ByteRange { offset, len, unmap } = self.ranges[self.range];
                // A hole reads as zeroes, and is the only way to unmap; the two modes exclude each other.
                let how = match self.discard || unmap {
                    true => libc::FALLOC_FL_PUNCH_HOLE,
                    false => libc::FALLOC_FL_ZERO_RANGE,
                };
                let mode = how | libc::FALLOC_FL_KEEP_SIZE;
                Job::Allocate { mode, offset, len, discard: self.discard }
            }
        }
    }

    fn rest(&mut self) -> Pieces {
        if let Some(bounce) = &mut self.bounce {
            return Pieces { first: NonNull::from(bounce.part(self.left)), count: 1 };
        }
        let rest = &mut self.pieces[self.first..];
        let count = rest.len().min(MAX_PIECES) as u32;
        // A slice's pointer is never null.
        let first = NonNull::new(rest.as_mut_ptr()).unwrap_or(NonNull::dangling());
        Pieces { first, count }
    }

    /// Takes `moved` bytes off the pieces.
    fn consume(&mut self, mut moved: usize) {
        while let Some(piece) = self.pieces.get_mut(self.first) {
            if moved < piece.len {
                // The piece stays inside the memory that is mapped.
                piece.ptr = piece.ptr.wrapping_add(moved);
                piece.len -= moved;
                return;
            }
            moved -= piece.len;
            self.first += 1;
        }
    }

    fn next_range(&mut self) -> Next {
        self.range += 1;
        self.state = match (self.range < self.ranges.len(), self.durable) {
            (true, _) => State::Allocate,
            (false, true) => State::Sync,
            (false, false) => return Next::Done(0),
        };
        Next::Again(self.job())
    }

    fn zero_by_hand(&mut self) -> Next {
        let ByteRange { offset, len, .. } = self.ranges[self.range];
        (self.state, self.offset, self.left) = (State::Zero, offset, len);
        self.point_at_zeroes();
        Next::Again(self.job())
    }

    /// Makes the pieces so many zeroes as are left, or as one system call takes.
    fn point_at_zeroes(&mut self) {
        self.pieces.clear();
        self.first = 0;
        let mut left = self.left;
        while left > 0 && self.pieces.len() < MAX_PIECES {
            let zeroes = ZEROES.as_bytes();
            let len = left.min(zeroes.len() as u64);
            // Only ever written from, see `Slot::job`.
            self.pieces.push(HostSlice { ptr: zeroes.as_ptr().cast_mut(), len: len as usize });
            left -= len;
        }
    }
}

/// Whether fallocate cannot do this here. EINVAL: a block device whose blocks are larger than our sectors.
fn not_supported(error: i32) -> bool {
    matches!(error, libc::EOPNOTSUPP | libc::ENOSYS | libc::ENODEV | libc::EINVAL)
}
