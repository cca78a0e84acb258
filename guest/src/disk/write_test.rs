//! Fills a disk with the pattern, mixes reads and writes, reads everything back.
//!
//! ```text
//! Fill -> Mix -> Flush -> ReadBack -> LastFlush -> Done
//!           (each begins when nothing of the one before is in flight;
//!            a disk without a flush command skips the flushes)
//! ```
//! The pass map says for each block which pass its last acknowledged write had. No two requests are
//! ever in flight on one block if one of them is a write, so at every read it is known what must
//! come.
use super::buffers::Buffers;
use super::work::{Flights, Work};
use crate::chance::Chance;
use crate::pattern;
use crate::report::{DiskPage, Failure};
use paravane_driver::{Area, DmaArea};
use paravane_spec::blk::SECTOR;
use paravane_spec::builtin::{error, state};

/// Blocks drawn in place of a busy one before the job waits for a completion.
const DRAWS: usize = 8;
/// Bytes of a sector.
const SECTOR_LEN: usize = SECTOR as usize;

/// Settings of the test.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WriteTestParams {
    /// The first block to work on.
    pub(crate) first: u64,
    /// Whole blocks to work on; not 0. Their numbers here begin at 0.
    pub(crate) blocks: u64,
    /// Bytes a block, whole sectors.
    pub(crate) block: usize,
    /// Length of the mixed phase.
    pub(crate) duration_ns: u64,
    /// Percentage of reads in it.
    pub(crate) read_percent: u32,
    /// Whether it goes through the blocks one after the other.
    pub(crate) sequential: bool,
    /// Seed of the pattern.
    pub(crate) seed: u64,
    /// Whether the disk knows the flush command.
    pub(crate) flush: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Fill { next: u64 },
    Mix { end: u64 },
    Flush { sent: bool },
    ReadBack { next: u64 },
    LastFlush { sent: bool },
    Done,
}

/// The state of the job.
pub(crate) struct WriteTest {
    terms: WriteTestParams,
    phase: Phase,
    chance: Chance,
    /// The next block, in order.
    turn: u64,
    /// One u32 a block.
    map: DmaArea,
    verified: u64,
    mixed: u64,
    /// The mixed phase goes on.
    is_held: bool,
}

impl WriteTest {
    /// `map` has four zero bytes for each block.
    pub(crate) fn new(terms: WriteTestParams, chance: Chance, map: DmaArea) -> Self {
        Self {
            terms,
            phase: Phase::Fill { next: 0 },
            chance,
            turn: 0,
            map,
            verified: 0,
            mixed: 0,
            is_held: false,
        }
    }

    pub(crate) fn state(&self) -> u32 {
        match self.phase {
            Phase::Fill { .. } => state::FILL,
            Phase::Mix { .. } => state::MIX,
            Phase::Flush { .. } | Phase::LastFlush { .. } => state::FLUSH,
            Phase::ReadBack { .. } => state::READ_BACK,
            Phase::Done => state::DONE,
        }
    }

    /// Does not end the mixed phase while `holds`.
    pub(crate) fn hold(&mut self, holds: bool) {
        self.is_held = holds;
    }

    pub(crate) fn is_mixing(&self) -> bool {
        matches!(self.phase, Phase::Mix { .. })
    }

    /// Bytes of fill, read-back, and the mixed phase so far, whose end is a time.
    pub(crate) fn total(&self) -> u64 {
        2 * self.terms.blocks * self.terms.block as u64 + self.mixed
    }

    /// The next request and its slot.
    pub(crate) fn next(&mut self, now: u64, flights: &Flights, buffers: &Buffers) -> Option<(usize, Work)> {
        let slot = flights.iter().position(Option::is_none)?;
        let idle = flights.iter().all(Option::is_none);
        let blocks = self.terms.blocks;
        loop {
            // Either something is sent, or the phase waits for what is in flight, or it gives way
            // to the next.
            self.phase = match self.phase {
                Phase::Fill { next } if next < blocks => {
                    self.phase = Phase::Fill { next: next + 1 };
                    return Some((slot, self.write(next, 1, slot, buffers)));
                }
                Phase::Mix { end } if now < end || self.is_held => return self.mix(slot, flights, buffers),
                Phase::ReadBack { next } if next < blocks => {
                    self.phase = Phase::ReadBack { next: next + 1 };
                    return Some((slot, self.read(next)));
                }
                Phase::Done => return None,
                _ if !idle => return None,
                Phase::Flush { sent: false } if self.terms.flush => {
                    self.phase = Phase::Flush { sent: true };
                    return Some((slot, Work::Flush));
                }
                Phase::LastFlush { sent: false } if self.terms.flush => {
                    self.phase = Phase::LastFlush { sent: true };
                    return Some((slot, Work::Flush));
                }
                Phase::Fill { .. } => Phase::Mix { end: now.saturating_add(self.terms.duration_ns) },
                Phase::Mix { .. } => Phase::Flush { sent: false },
                Phase::Flush { .. } => Phase::ReadBack { next: 0 },
                Phase::ReadBack { .. } => Phase::LastFlush { sent: false },
                Phase::LastFlush { .. } => Phase::Done,
            };
        }
    }

    /// A request of the mixed phase, on a block that it may touch now.
    fn mix(&mut self, slot: usize, flights: &Flights, buffers: &Buffers) -> Option<(usize, Work)> {
        let reads = self.chance.below(100) < u64::from(self.terms.read_percent);
        for _ in 0..DRAWS {
            let block = if self.terms.sequential {
                let turn = self.turn;
                self.turn = (turn + 1) % self.terms.blocks;
                turn
            } else {
                self.chance.below(self.terms.blocks)
            };
            let busy = flights.iter().flatten().any(|flight| match flight.work {
                Work::Read { block: other, .. } => other == block && !reads,
                Work::Write { block: other, .. } => other == block,
                Work::Flush => false,
            });
            if busy {
                continue;
            }
            let work = if reads {
                self.read(block)
            } else {
                let pass = self.pass(block).wrapping_add(1);
                self.write(block, pass, slot, buffers)
            };
            return Some((slot, work));
        }
        None
    }

    fn read(&self, block: u64) -> Work {
        Work::Read { block, sector: self.sector(block), len: self.terms.block }
    }

    /// Puts the pattern into the slot's buffer.
    fn write(&self, block: u64, pass: u32, slot: usize, buffers: &Buffers) -> Work {
        let (sector, len) = (self.sector(block), self.terms.block);
        if let Some(buffer) = buffers.slot(slot, len) {
            let mut content = [0; SECTOR_LEN];
            for (n, at) in (0..len).step_by(SECTOR_LEN).enumerate() {
                pattern::fill(&mut content, self.terms.seed, sector + n as u64, pass);
                let fits = buffer.area.write(at, &content);
                debug_assert!(fits, "a block has whole sectors");
            }
        }
        Work::Write { block, sector, len, pass }
    }

    /// Takes the result of a request: checks what was read, notes what was written.
    pub(crate) fn done(
        &mut self,
        slot: usize,
        work: Work,
        buffers: &Buffers,
        page: &DiskPage,
    ) -> Result<(), Failure> {
        if self.is_mixing() {
            self.mixed += work.len() as u64;
        }
        match work {
            Work::Write { block, pass, .. } => self.set_pass(block, pass),
            Work::Read { block, sector, len } => {
                let pass = self.pass(block);
                let buffer = buffers.slot(slot, len).map(|buffer| buffer.area);
                if let Some(wrong) = self.first_wrong(buffer, sector, len, pass) {
                    return Err(Failure {
                        error: error::MISMATCH,
                        detail: u64::from(pass),
                        sector: wrong,
                        reason: "the data read differ from the data written",
                    });
                }
                self.verified += len as u64;
                page.verified(self.verified);
            }
            Work::Flush => {}
        }
        Ok(())
    }

    /// The first sector that does not hold the pattern.
    fn first_wrong(&self, buffer: Option<Area>, first: u64, len: usize, pass: u32) -> Option<u64> {
        let mut content = [0; SECTOR_LEN];
        (0..len).step_by(SECTOR_LEN).zip(first..).find_map(|(at, sector)| {
            let there = buffer.is_some_and(|buffer| buffer.read(at, &mut content));
            let right = there && pattern::check(&content, self.terms.seed, sector, pass);
            if right { None } else { Some(sector) }
        })
    }

    fn sector(&self, block: u64) -> u64 {
        (self.terms.first + block) * (self.terms.block as u64 / SECTOR)
    }

    fn pass(&self, block: u64) -> u32 {
        let mut pass = [0; 4];
        // The map has an entry for each block; nobody but this program writes there.
        let inside = self.map.area.read(block as usize * 4, &mut pass);
        debug_assert!(inside, "the pass map covers all blocks");
        u32::from_le_bytes(pass)
    }

    fn set_pass(&self, block: u64, pass: u32) {
        let inside = self.map.area.write(block as usize * 4, &pass.to_le_bytes());
        debug_assert!(inside, "the pass map covers all blocks");
    }
}
