//! Jobs on a disk.
use super::buffers::Buffers;
use super::hash::Hash;
use super::work::{Flights, Work};
use super::write_test::WriteTest;
use crate::report::{DiskPage, Failure};

/// A job on a disk.
pub(crate) enum Job {
    Hash(Hash),
    WriteTest(WriteTest),
}

impl Job {
    /// Next request and its slot, with its data in place; `None`: none for now.
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

    /// Keeps the job in its measured phase while `holds`, if the length of that is free.
    pub(crate) fn hold(&mut self, holds: bool) {
        if let Self::WriteTest(test) = self {
            test.hold(holds);
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
