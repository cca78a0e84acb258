//! Jobs on a disk, and their requests.
use super::{Buffers, Hash, WriteTest};
use crate::report::{DiskPage, Failure};

/// One request, in a job's terms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Work {
    /// Read a block.
    Read {
        /// Number of the block.
        block: u64,
        /// First sector.
        sector: u64,
        /// Bytes.
        len: usize,
    },
    /// Write a block.
    Write {
        /// Number of the block.
        block: u64,
        /// First sector.
        sector: u64,
        /// Bytes.
        len: usize,
        /// The pass that it will hold.
        pass: u32,
    },
    /// Flush the disk's cache.
    Flush,
}

impl Work {
    /// Bytes that it moves.
    pub(crate) fn len(&self) -> usize {
        match *self {
            Self::Read { len, .. } | Self::Write { len, .. } => len,
            Self::Flush => 0,
        }
    }

    /// First sector, 0 for a flush.
    pub(crate) fn sector(&self) -> u64 {
        match *self {
            Self::Read { sector, .. } | Self::Write { sector, .. } => sector,
            Self::Flush => 0,
        }
    }
}

/// The requests of one disk that are in flight, by slot.
pub(crate) type Flights = [Option<Flight>];

/// One request in flight.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Flight {
    pub(crate) work: Work,
    /// When it was published, in nanoseconds.
    pub(crate) since: u64,
    /// Whether it belongs to the measured phase.
    pub(crate) measured: bool,
}

/// A job on a disk.
pub(crate) enum Job {
    Hash(Hash),
    WriteTest(WriteTest),
}

impl Job {
    /// The next request and its slot, data in place; `None` while there is nothing to be sent.
    pub(crate) fn next(&mut self, now: u64, flights: &Flights, buffers: &Buffers) -> Option<(usize, Work)> {
        match self {
            Self::Hash(hash) => hash.next(),
            Self::WriteTest(test) => test.next(now, flights, buffers),
        }
    }

    /// Takes the result of a request that went well.
    pub(crate) fn done(
        &mut self,
        slot: usize,
        work: Work,
        buffers: &Buffers,
        page: &DiskPage,
    ) -> Result<(), Failure> {
        match self {
            Self::Hash(hash) => hash.done(slot, work, buffers, page),
            Self::WriteTest(test) => test.done(slot, work, buffers, page),
        }
    }

    /// One of the `state` codes.
    pub(crate) fn state(&self) -> u32 {
        match self {
            Self::Hash(hash) => hash.state(),
            Self::WriteTest(test) => test.state(),
        }
    }

    /// Whether what is sent now belongs to the measured phase.
    pub(crate) fn is_measured(&self) -> bool {
        match self {
            Self::Hash(_) => true,
            Self::WriteTest(test) => test.is_mixing(),
        }
    }

    /// Bytes that the job will move, as far as it knows.
    pub(crate) fn total(&self) -> u64 {
        match self {
            Self::Hash(hash) => hash.total(),
            Self::WriteTest(test) => test.total(),
        }
    }
}
