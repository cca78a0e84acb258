//! What is measured of a request.
use super::operation;
use super::request::{ByteRange, Command};
use crate::latency::{self, Operation, Taken};
use paravane_spec::blk::SECTOR;

/// What is measured of a request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Measured {
    pub(super) operation: &'static Operation,
    pub(super) taken: Taken,
    /// First sector, if it has one.
    pub(super) sector: Option<u64>,
    /// Bytes of data, or the length of its ranges.
    pub(super) bytes: u64,
}

impl Default for Measured {
    fn default() -> Self {
        Self { operation: operation::OTHER, taken: Taken::default(), sector: None, bytes: 0 }
    }
}

impl Measured {
    pub(super) fn new(command: Command, ranges: &[ByteRange], taken: Taken) -> Self {
        use operation::{DISCARD, FLUSH, OTHER, READ, WRITE, WRITE_ZEROES};
        let first = || ranges.first().map(|range| range.offset);
        let sum = || ranges.iter().fold(0_u64, |sum, range| sum.saturating_add(range.len));
        let (operation, offset, bytes) = match command {
            Command::Read { offset, len } => (READ, Some(offset), len.into()),
            Command::Write { offset, len } => (WRITE, Some(offset), len.into()),
            Command::Flush => (FLUSH, None, 0),
            Command::Discard => (DISCARD, first(), sum()),
            Command::WriteZeroes => (WRITE_ZEROES, first(), sum()),
            Command::GetId | Command::Answer(_) => (OTHER, None, 0),
        };
        Self { operation, taken, sector: offset.map(|offset| offset / SECTOR), bytes }
    }

    /// The request, for an observer.
    pub(super) fn observed(self, head: u16, status: u8) -> latency::Request {
        let Self { sector, bytes, .. } = self;
        latency::Request { head, sector, bytes, status }
    }

    /// The request without a status yet, for probes.
    pub(super) fn probed(self, head: u16) -> (&'static Operation, latency::Request) {
        (self.operation, self.observed(head, 0))
    }
}
