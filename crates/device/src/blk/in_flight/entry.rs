//! The storage of one request, and its steps.
use crate::blk::direct::{Bounce, Page};
use crate::blk::errors::{Cause, Missed};
use crate::blk::measured::Measured;
use crate::blk::operation;
use crate::blk::request::ByteRange;
use paravane_dma::{HostSlice, Mapping, MappingGuard};
use paravane_store::{Job, Pieces};
use std::ptr::NonNull;
use zerocopy::IntoBytes;

/// Zeroes to write where the file system cannot allocate them.
static ZEROES: [Page; 16] = [Page::ZEROES; 16];

/// Most pieces in one system call (IOV_MAX); the rest goes into the next.
const MAX_PIECES: usize = 1024;

/// Retries of a step that the host interrupts or has no resources for.
const RETRIES: u8 = 16;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Step {
    /// No request.
    #[default]
    Idle,
    Read,
    Write,
    Sync,
    Allocate,
    Zero,
}

impl Step {
    pub(super) fn changes_data(self) -> bool {
        matches!(self, Self::Write | Self::Allocate | Self::Zero)
    }
}

/// See [`Next`](super::Next).
pub(super) enum Advance {
    Again,
    Done(u32),
    Failed(Cause, u32),
}

/// Storage and state of one request.
#[derive(Debug, Default)]
pub(super) struct Entry {
    pub(super) step: Step,
    /// Address of the status byte.
    pub(super) status: u64,
    /// Behind an IOMMU: the same, kept mapped.
    pub(super) status_mapping: Option<Mapping>,
    /// Memory of the data that is left, from `first` on.
    pub(super) pieces: Vec<HostSlice>,
    first: usize,
    /// Keeps the pieces mapped.
    pub(super) mapping: Option<MappingGuard>,
    /// Transferred in place of the pieces, if the file does not take those.
    pub(super) bounce: Option<Box<Bounce>>,
    /// Where on the disk the data that is left begins, and its length, in bytes.
    pub(super) offset: u64,
    pub(super) left: u64,
    /// Bytes of data put into guest memory.
    read: u32,
    /// Ranges to discard or zero, the present one at `range`.
    pub(super) ranges: Vec<ByteRange>,
    range: usize,
    pub(super) discard: bool,
    /// Writes go through to the disk: the driver cannot flush.
    durable: bool,
    retries: u8,
    /// The engine does not have the step: it waits for room.
    pub(super) waits: bool,
    /// It has waited for room.
    pub(super) has_waited: bool,
    pub(super) measured: Measured,
}

impl Entry {
    pub(super) fn empty_pieces(&mut self) -> &mut Vec<HostSlice> {
        self.pieces.clear();
        &mut self.pieces
    }

    pub(super) fn release_data(&mut self) {
        self.mapping = None;
        self.bounce = None;
    }

    pub(super) fn begin(&mut self, step: Step, durable: bool) {
        self.step = step;
        self.durable = durable;
        self.first = 0;
        self.read = 0;
        self.range = 0;
        self.retries = 0;
        self.has_waited = false;
    }

    /// Continues after the last step.
    ///
    /// `result` is that of the system call, or a negative error number.
    pub(super) fn advance(&mut self, result: i32) -> Advance {
        if result < 0 {
            let error = -result;
            if matches!(error, libc::EINTR | libc::EAGAIN) && self.retries < RETRIES {
                self.retries += 1;
                return Advance::Again;
            }
            if self.step == Step::Allocate && not_supported(error) {
                // A discard is a hint (section 5.2.6.2: the device may do nothing); zeroes are not.
                return if self.discard { self.next_range() } else { self.zero_by_writes() };
            }
            return Advance::Failed(Cause::Os(error), self.read);
        }
        self.retries = 0;
        match self.step {
            Step::Idle => Advance::Failed(Cause::Os(libc::EINVAL), 0),
            Step::Sync => Advance::Done(0),
            Step::Allocate => self.next_range(),
            Step::Read | Step::Write | Step::Zero => {
                // 0: the file has become shorter than the disk. More than was asked for is
                // impossible.
                let moved = result.unsigned_abs();
                if moved == 0 || u64::from(moved) > self.left {
                    let cause = if moved == 0 { Cause::End } else { Cause::Os(libc::EIO) };
                    return Advance::Failed(cause, self.read);
                }
                self.offset += u64::from(moved);
                self.left -= u64::from(moved);
                if self.step == Step::Read {
                    self.read += moved;
                    if let Some(bounce) = &mut self.bounce {
                        // SAFETY: `mapping` keeps the pieces mapped, for writing, since it is a
                        // read.
                        unsafe { bounce.copy_out(moved as usize, &self.pieces[self.first..]) };
                    }
                }
                match (self.left, self.step) {
                    (0, Step::Zero) => self.next_range(),
                    (0, _) => Advance::Done(self.read),
                    (_, Step::Zero) => {
                        self.point_at_zeroes();
                        Advance::Again
                    }
                    _ => {
                        self.consume(moved as usize);
                        Advance::Again
                    }
                }
            }
        }
    }

    /// Data that the present step leaves undone if it fails.
    pub(super) fn missed(&self) -> Missed {
        match self.step {
            Step::Read => Missed::at(operation::READ, self.offset, self.left),
            Step::Write => Missed::at(operation::WRITE, self.offset, self.left),
            Step::Zero => Missed::at(operation::WRITE_ZEROES, self.offset, self.left),
            Step::Allocate if self.discard => Missed::range(operation::DISCARD, self.ranges.get(self.range)),
            Step::Allocate => Missed::range(operation::WRITE_ZEROES, self.ranges.get(self.range)),
            // After ranges of zeroes that go through to the disk, or a flush; a flush has no
            // ranges.
            Step::Sync if !self.ranges.is_empty() => {
                Missed::range(operation::WRITE_ZEROES, self.ranges.last())
            }
            Step::Sync | Step::Idle => Missed::range(operation::FLUSH, None),
        }
    }

    /// The job of the present step.
    pub(super) fn job(&mut self) -> Job {
        match self.step {
            Step::Read => Job::Read { pieces: self.rest(), offset: self.offset },
            Step::Write | Step::Zero => {
                if let Some(bounce) = &mut self.bounce {
                    // SAFETY: `mapping` keeps the pieces mapped.
                    unsafe { bounce.copy_in(&self.pieces[self.first..], self.left) };
                }
                Job::Write { pieces: self.rest(), offset: self.offset, durable: self.durable }
            }
            Step::Idle | Step::Sync => Job::Flush,
            Step::Allocate => {
                let ByteRange { offset, len, unmap } = self.ranges[self.range];
                match self.discard {
                    true => Job::Discard { offset, len },
                    false => Job::Zeroes { offset, len, unmap },
                }
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

    fn next_range(&mut self) -> Advance {
        self.range += 1;
        self.step = match (self.range < self.ranges.len(), self.durable) {
            (true, _) => Step::Allocate,
            (false, true) => Step::Sync,
            (false, false) => return Advance::Done(0),
        };
        Advance::Again
    }

    fn zero_by_writes(&mut self) -> Advance {
        let ByteRange { offset, len, .. } = self.ranges[self.range];
        (self.step, self.offset, self.left) = (Step::Zero, offset, len);
        self.point_at_zeroes();
        Advance::Again
    }

    /// Makes the pieces the zeroes that are left to write, up to one system call.
    fn point_at_zeroes(&mut self) {
        self.pieces.clear();
        self.first = 0;
        let mut left = self.left;
        while left > 0 && self.pieces.len() < MAX_PIECES {
            let zeroes = ZEROES.as_bytes();
            let len = left.min(zeroes.len() as u64);
            // Only read from, see `Entry::job`.
            self.pieces.push(HostSlice { ptr: zeroes.as_ptr().cast_mut(), len: len as usize });
            left -= len;
        }
    }
}

/// Whether fallocate cannot do this here.
///
/// EINVAL: a block device whose blocks are larger than our sectors.
fn not_supported(error: i32) -> bool {
    matches!(error, libc::EOPNOTSUPP | libc::ENOSYS | libc::ENODEV | libc::EINVAL)
}
