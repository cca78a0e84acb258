//! Reads a disk, or a part of it, in order and hashes it. Never writes.
//!
//! ```text
//!   sent:    0 1 2 3 4 5        chunk n goes to slot n modulo depth
//!   arrived:   1   3            in any order
//!   hashed:  0 (next)           strictly in order; only then is the slot free again
//! ```
use super::buffers::Buffers;
use super::work::Work;
use crate::report::{DiskPage, Failure};
use alloc::vec::Vec;
use core::ops::Range;
use paravane_spec::blk::SECTOR;
use paravane_spec::builtin::{error, part, state};
use sha2::{Digest, Sha256};

/// The state of the job.
pub(crate) struct Hash {
    /// Where it begins, in bytes.
    start: u64,
    /// Bytes to hash.
    bytes: u64,
    /// Bytes a request.
    chunk: usize,
    /// Chunks asked for so far.
    sent: u64,
    /// Chunks hashed so far.
    hashed: u64,
    /// Bytes that have arrived in each slot and are not hashed yet.
    arrived: Vec<Option<usize>>,
    sha256: Sha256,
    finished: bool,
}

impl Hash {
    /// A job on part `number` of `parts` of a disk of `sectors` sectors; `None`: its size exceeds 64 bits.
    ///
    /// `depth` requests of `chunk` bytes (whole sectors) are in flight.
    pub(crate) fn new(sectors: u64, [number, parts]: [u32; 2], chunk: usize, depth: usize) -> Option<Self> {
        let bytes = sectors.checked_mul(SECTOR)?;
        let each = chunk as u64;
        let Range { start, end } = part(bytes.div_ceil(each), parts, number);
        let start = start.saturating_mul(each).min(bytes);
        Some(Self {
            start,
            bytes: end.saturating_mul(each).min(bytes) - start,
            chunk,
            sent: 0,
            hashed: 0,
            arrived: alloc::vec![None; depth],
            sha256: Sha256::new(),
            finished: false,
        })
    }

    pub(crate) fn total(&self) -> u64 {
        self.bytes
    }

    pub(crate) fn state(&self) -> u32 {
        if self.finished { state::DONE } else { state::HASH }
    }

    fn slot(&self, number: u64) -> usize {
        (number % self.arrived.len() as u64) as usize
    }

    /// The next chunk, if its slot is free.
    pub(crate) fn next(&mut self) -> Option<(usize, Work)> {
        // The chunk before in this slot must have been hashed.
        if self.sent - self.hashed >= self.arrived.len() as u64 {
            return None;
        }
        let offset = self.sent.checked_mul(self.chunk as u64)?;
        let left = self.bytes.checked_sub(offset).filter(|&left| left > 0)?;
        let slot = self.slot(self.sent);
        let len = left.min(self.chunk as u64) as usize;
        let work = Work::Read { block: self.sent, sector: (self.start + offset) / SECTOR, len };
        self.sent += 1;
        Some((slot, work))
    }

    /// A chunk has arrived: hashes it and all that waited for it.
    pub(crate) fn done(
        &mut self,
        slot: usize,
        work: Work,
        buffers: &Buffers,
        page: &DiskPage,
    ) -> Result<(), Failure> {
        let lost = Failure {
            error: error::RING,
            detail: 0,
            sector: work.sector(),
            reason: "a chunk arrived where none was expected",
        };
        *self.arrived.get_mut(slot).ok_or(lost)? = Some(work.len());
        loop {
            let slot = self.slot(self.hashed);
            let Some(len) = self.arrived[slot].take() else { break };
            self.hash(buffers.slot(slot, len).ok_or(lost)?.area);
            self.hashed += 1;
        }
        self.finish_if_all(page);
        Ok(())
    }

    /// Puts the digest into the report once everything is hashed.
    ///
    /// An empty part is so from the start.
    pub(crate) fn finish_if_all(&mut self, page: &DiskPage) {
        if self.hashed == self.bytes.div_ceil(self.chunk as u64) && !self.finished {
            self.finished = true;
            page.sha256(&self.sha256.finalize_reset().into());
        }
    }

    fn hash(&mut self, area: paravane_driver::Area) {
        // The device could still change the buffer, so what is hashed is a private copy.
        let mut copy = [0; 4096];
        let mut at = 0;
        while at < area.len() {
            let part = &mut copy[..(area.len() - at).min(4096)];
            if !area.read(at, part) {
                break;
            }
            self.sha256.update(&*part);
            at += part.len();
        }
    }
}
