//! The requests of jobs, and those in flight.

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
