//! Requests: parsed once, and checked against the disk before anything is done.
//!
//! ```text
//!   readable: header (16 bytes) | data to write, or ranges        writable: data to read | status (last byte)
//! ```
//! The framing is the driver's choice (section 2.7.4): the header may span descriptors, and the
//! status byte may share one with data. A broken frame latches the queue; an invalid request in a
//! valid frame is answered with a status.
use crate::address_error;
use paravane_dma::{Access, AccessGuard};
use paravane_ring::device::Chain;
use paravane_ring::{QueueError, Segment};
use paravane_spec::blk::{self, DiscardRange, RequestHeader};

/// Length of the header in bytes.
pub(super) const HEADER: u32 = size_of::<RequestHeader>() as u32;
/// Length of one range in bytes.
const RANGE: u32 = size_of::<DiscardRange>() as u32;
/// Most ranges in one discard or write-zeroes request.
pub(super) const MAX_RANGES: u32 = 16;
/// Largest discard range in sectors: 2 GiB.
pub(super) const MAX_DISCARD_SECTORS: u32 = 1 << 22;
/// Largest write-zeroes range in sectors: 32 MiB.
///
/// Zeroes may have to be written one by one.
pub(super) const MAX_WRITE_ZEROES_SECTORS: u32 = 1 << 16;

/// Limits that requests are checked against.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Size of the disk in sectors, for the present batch.
    pub(super) capacity: u64,
    /// Sectors in a block of the disk, a power of two.
    ///
    /// Requests for part of a block fail.
    pub(super) block: u64,
    /// The disk is read-only.
    pub(super) read_only: bool,
    /// DISCARD was negotiated.
    pub(super) discard: bool,
    /// WRITE_ZEROES was negotiated.
    pub(super) write_zeroes: bool,
}

/// A range inside the disk, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ByteRange {
    pub(super) offset: u64,
    pub(super) len: u64,
    /// Zeroes may be written by unmapping.
    pub(super) unmap: bool,
}

/// Action of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Command {
    /// Read `len` bytes (not 0) at `offset` into the start of the writable part.
    Read { offset: u64, len: u32 },
    /// Write the `len` bytes (not 0) that follow the header at `offset`.
    Write { offset: u64, len: u32 },
    /// Flush.
    Flush,
    /// Return the identifier.
    GetId,
    /// Discard the parsed ranges.
    Discard,
    /// Write zeroes to the parsed ranges.
    WriteZeroes,
    /// Answer with this status, without any I/O.
    Answer(u8),
}

/// A parsed request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) command: Command,
    /// Address of the status byte.
    pub(super) status: u64,
}

/// Reads a header that lies in several pieces.
#[cold]
fn several(memory: &AccessGuard<'_>, readable: &[Segment]) -> Result<RequestHeader, QueueError> {
    let mut header = [0; HEADER as usize];
    memory.read_segments(readable, 0, &mut header, Access::READ).map_err(address_error)?;
    Ok(zerocopy::transmute!(header))
}

/// Parses a chain.
///
/// `ranges` is cleared, and filled for [`Command::Discard`] and [`Command::WriteZeroes`].
///
/// # Errors
/// The frame is broken; latch the queue.
#[inline(always)]
pub(super) fn parse(
    memory: &AccessGuard<'_>,
    (chain, readable, writable): (&Chain, &[Segment], &[Segment]),
    limits: &Limits,
    ranges: &mut Vec<ByteRange>,
) -> Result<Request, QueueError> {
    let malformed = |what| QueueError::Request { head: chain.head, what };
    ranges.clear();
    if chain.readable_len() < HEADER {
        return Err(malformed("the readable part is shorter than a header"));
    }
    let status = last_byte(writable).ok_or(malformed("there is no writable byte for the status"))?;
    let header: RequestHeader = match memory.read_span_of(readable, 0, HEADER as usize) {
        Some(span) => span.read_obj(0),
        None => several(memory, readable)?,
    };
    let (kind, sector) = (u32::from_le(header.kind), u64::from_le(header.sector));

    let payload = chain.readable_len() - HEADER;
    let room = chain.writable_len() - 1;
    let command = match kind {
        blk::T_IN => match extent(sector, room, limits) {
            Some(offset) if room > 0 => Command::Read { offset, len: room },
            Some(_) => Command::Answer(blk::S_OK),
            None => Command::Answer(blk::S_IOERR),
        },
        blk::T_OUT | blk::T_DISCARD | blk::T_WRITE_ZEROES if limits.read_only => {
            Command::Answer(blk::S_IOERR)
        }
        blk::T_OUT => match extent(sector, payload, limits) {
            Some(offset) if payload > 0 => Command::Write { offset, len: payload },
            Some(_) => Command::Answer(blk::S_OK),
            None => Command::Answer(blk::S_IOERR),
        },
        blk::T_FLUSH => Command::Flush,
        blk::T_GET_ID if room as usize >= blk::ID_LEN => Command::GetId,
        blk::T_GET_ID => Command::Answer(blk::S_IOERR),
        blk::T_DISCARD if limits.discard => {
            match parse_ranges(memory, readable, payload, false, limits, ranges)? {
                Ok(()) => Command::Discard,
                Err(status) => Command::Answer(status),
            }
        }
        blk::T_WRITE_ZEROES if limits.write_zeroes => {
            match parse_ranges(memory, readable, payload, true, limits, ranges)? {
                Ok(()) => Command::WriteZeroes,
                Err(status) => Command::Answer(status),
            }
        }
        _ => Command::Answer(blk::S_UNSUPP),
    };
    Ok(Request { command, status })
}

/// Address of the last byte of a buffer.
fn last_byte(segments: &[Segment]) -> Option<u64> {
    let last = segments.iter().rev().find(|segment| segment.len > 0)?;
    last.addr.checked_add(u64::from(last.len) - 1)
}

/// Offset in bytes of `len` bytes at `sector`; whole blocks inside the disk only.
fn extent(sector: u64, len: u32, limits: &Limits) -> Option<u64> {
    let len = u64::from(len);
    if !len.is_multiple_of(blk::SECTOR) {
        return None;
    }
    inside(sector, len / blk::SECTOR, limits)
}

/// Offset of the sectors in bytes, if they are whole blocks inside the disk.
fn inside(sector: u64, sectors: u64, limits: &Limits) -> Option<u64> {
    let end = sector.checked_add(sectors)?;
    // The capacity in bytes fits in an i64, being the size of a file; so does every sector before
    // it.
    (end <= limits.capacity && (sector | sectors) & (limits.block - 1) == 0).then(|| sector * blk::SECTOR)
}

/// Reads and checks the ranges behind the header (section 5.2.6.2).
///
/// The inner error is the status to answer with.
#[inline(never)]
fn parse_ranges(
    memory: &AccessGuard<'_>,
    readable: &[Segment],
    payload: u32,
    zeroes: bool,
    limits: &Limits,
    ranges: &mut Vec<ByteRange>,
) -> Result<Result<(), u8>, QueueError> {
    let count = payload / RANGE;
    if !payload.is_multiple_of(RANGE) || count == 0 || count > MAX_RANGES {
        return Ok(Err(blk::S_IOERR));
    }
    let (max_sectors, allowed) = match zeroes {
        true => (MAX_WRITE_ZEROES_SECTORS, blk::WRITE_ZEROES_F_UNMAP),
        false => (MAX_DISCARD_SECTORS, 0),
    };
    for index in 0..count {
        let mut range = [0; RANGE as usize];
        let at = u64::from(HEADER + index * RANGE);
        memory.read_segments(readable, at, &mut range, Access::READ).map_err(address_error)?;
        let range: DiscardRange = zerocopy::transmute!(range);
        let flags = u32::from_le(range.flags);
        let sectors = u32::from_le(range.num_sectors);
        if flags & !allowed != 0 {
            return Ok(Err(blk::S_UNSUPP));
        }
        let Some(offset) =
            inside(u64::from_le(range.sector), u64::from(sectors), limits).filter(|_| sectors <= max_sectors)
        else {
            return Ok(Err(blk::S_IOERR));
        };
        // A range without sectors is skipped: fallocate would refuse it.
        if sectors > 0 {
            let len = u64::from(sectors) * blk::SECTOR;
            ranges.push(ByteRange { offset, len, unmap: flags & blk::WRITE_ZEROES_F_UNMAP != 0 });
        }
    }
    Ok(Ok(()))
}
