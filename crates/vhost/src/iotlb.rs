//! What a device's addresses (IOVAs) mean, as a client that has an IOMMU tells it.
//!
//! ```text
//!   IOTLB_MSG update ----> pieces: IOVA -> user address --regions--> guest-physical --map--> dma::Domain
//!   IOTLB_MSG invalidate -> pieces cut | locked, unmapped, unlocked | waited for what is in flight | acknowledged
//! ```
//! It is a cache: whatever is left out, is asked for again. The pieces are what the client has said; the domain has them in
//! guest-physical terms, for which the client's memory must stay as it is ([`Translations::survives`]).
use crate::memory::ClientRegions;
use paravane_device::InvalidationLock;
use paravane_dma::{Access, Busy, Domain, DomainError, Handle, Memory, Miss, headroom};
use paravane_spec::vhost_user::{Iotlb, iotlb};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

const PAGE: u64 = 4096;
/// Most pieces, of pages that do not adjoin.
const MOST: usize = 1 << 16;
/// Insertions from one look at what memory the process can still have to the next.
const LOOK: u32 = 64;
/// What they may take, in bytes: tables above all.
const HEADROOM: usize = 32 << 20;
/// How often somebody looks after those who are waited for.
const PATIENCE: Duration = Duration::from_millis(100);

/// A run of IOVAs that means a run of user addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    /// The first and the last IOVA: whole pages.
    pub(crate) first: u64,
    pub(crate) last: u64,
    /// What the first one means.
    pub(crate) user: u64,
    pub(crate) access: Access,
}

impl Piece {
    /// What an update says; `None` if that means nothing.
    pub(crate) fn new(said: &Iotlb) -> Option<Self> {
        let &Iotlb { iova: first, size, user, perm, .. } = said;
        let access = match perm {
            iotlb::READ => Access::READ,
            iotlb::WRITE => Access::WRITE,
            both if both == iotlb::READ | iotlb::WRITE => Access::READ | Access::WRITE,
            _ => return None,
        };
        let last = first.checked_add(size.checked_sub(1)?)?;
        user.checked_add(size - 1)?;
        let whole = first.is_multiple_of(PAGE) && size.is_multiple_of(PAGE);
        whole.then_some(Self { first, last, user, access })
    }

    /// The part of it in `first..=last`, which overlap.
    fn part(self, first: u64, last: u64) -> Self {
        let from = self.first.max(first);
        Self { first: from, last: self.last.min(last), user: self.user + (from - self.first), ..self }
    }

    /// Whether it says the same where the two overlap.
    fn agrees(self, other: Self) -> bool {
        let offset = |piece: Self| piece.user.wrapping_sub(piece.first);
        self.access == other.access && offset(self) == offset(other)
    }
}

/// What an invalidation is of: whole pages, all that it touches.
pub(crate) fn touched(said: &Iotlb) -> (u64, u64) {
    // No bytes at all are the whole space of 2^64 to some clients (QEMU counts in 64 bits).
    match said.size.checked_sub(1) {
        None => (0, u64::MAX),
        Some(more) => (said.iova & !(PAGE - 1), said.iova.saturating_add(more) | (PAGE - 1)),
    }
}

/// Why a translation is not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    /// The client's memory is not there, or not in whole pages.
    NoMemory,
    /// There are too many, or the host has no memory for more.
    Full,
}

/// One client's translations.
#[derive(Debug)]
pub(crate) struct Translations {
    domain: Domain,
    gate: InvalidationLock,
    /// By their first IOVA. They do not overlap.
    pieces: BTreeMap<u64, Piece>,
    /// Insertions so far.
    inserted: u32,
}

impl Translations {
    /// None yet, in front of `memory`; the tables may take `max_tables` bytes. `on_miss` hears of accesses without a translation.
    pub(crate) fn new(
        memory: &Memory,
        max_tables: u64,
        on_miss: impl Fn(Miss) + Send + Sync + 'static,
    ) -> Self {
        let domain = Domain::with_limit(memory, max_tables);
        domain.on_miss(on_miss);
        Self { domain, gate: InvalidationLock::default(), pieces: BTreeMap::new(), inserted: 0 }
    }

    /// For a queue.
    pub(crate) fn handle(&self) -> Handle {
        self.domain.handle()
    }

    /// What its batches go through.
    pub(crate) fn gate(&self) -> InvalidationLock {
        self.gate.clone()
    }

    fn overlapping(&self, first: u64, last: u64) -> impl Iterator<Item = Piece> {
        let before = self.pieces.range(..first).next_back().map(|(_, piece)| *piece);
        let inside = self.pieces.range(first..=last).map(|(_, piece)| *piece);
        before.filter(|piece| piece.last >= first).into_iter().chain(inside)
    }

    /// Whether it contradicts what is known: that is to go first.
    pub(crate) fn contradicts(&self, new: Piece) -> bool {
        self.overlapping(new.first, new.last).any(|old| !old.agrees(new))
    }

    /// Takes what contradicts nothing.
    ///
    /// # Errors
    /// Nothing was taken. [`Refused::Full`]: it would be, if nothing else were known.
    pub(crate) fn insert(&mut self, new: Piece, regions: &ClientRegions) -> Result<(), Refused> {
        let runs = runs(new, regions).ok_or(Refused::NoMemory)?;
        // Pieces take little each, and cannot fail singly.
        let is_short = self.inserted.is_multiple_of(LOOK) && headroom(HEADROOM).is_err();
        if self.pieces.len() >= MOST || is_short {
            return Err(Refused::Full);
        }
        self.inserted = self.inserted.wrapping_add(1);
        let known: Vec<Piece> = self.overlapping(new.first, new.last).collect();
        let mut mapped: Vec<(u64, u64)> = Vec::new();
        for (run, gpa) in runs {
            for (first, last) in gaps(run, &known) {
                let result = self.domain.map(first, gpa + (first - run.first), last - first + 1, new.access);
                if result.is_err() {
                    // What was mapped of it is unknown to all, and goes again.
                    for (first, last) in mapped {
                        self.unmap(first, last, &mut |_| ());
                    }
                    return Err(Refused::Full);
                }
                mapped.push((first, last));
            }
        }
        // One piece of all that adjoins and agrees.
        let mut whole = new;
        let (before, after) = (new.first.checked_sub(1), new.last.checked_add(1));
        let near = self.overlapping(before.unwrap_or(0), after.unwrap_or(u64::MAX));
        let near: Vec<Piece> = near.filter(|piece| piece.agrees(new)).collect();
        for piece in near {
            self.pieces.remove(&piece.first);
            if piece.first < whole.first {
                (whole.first, whole.user) = (piece.first, piece.user);
            }
            whole.last = whole.last.max(piece.last);
        }
        self.pieces.insert(whole.first, whole);
        Ok(())
    }

    /// Forgets `first..=last`, whole pages. When it returns nobody goes by it any more; `waiting` is called from time to time
    /// until then. `false`: the tables have no room to cut larger ones, and nothing was done; all must be given up instead.
    ///
    /// No live ring may lie there: it would be waited for, for ever.
    #[must_use]
    pub(crate) fn remove(&mut self, first: u64, last: u64, waiting: &mut dyn FnMut(&Busy)) -> bool {
        let old: Vec<Piece> = self.overlapping(first, last).collect();
        // Most of what clients invalidate was never asked for.
        if old.is_empty() {
            return true;
        }
        if !self.unmap(first, last, waiting) {
            return false;
        }
        for piece in old {
            self.pieces.remove(&piece.first);
            if piece.first < first {
                let left = piece.part(piece.first, first - 1);
                self.pieces.insert(left.first, left);
            }
            if piece.last > last {
                let left = piece.part(last + 1, piece.last);
                self.pieces.insert(left.first, left);
            }
        }
        true
    }

    fn unmap(&self, first: u64, last: u64, waiting: &mut dyn FnMut(&Busy)) -> bool {
        // A size of 2^64 has no number.
        let ranges = match (last - first).checked_add(1) {
            Some(size) => [Some((first, size)), None],
            None => [Some((0, u64::MAX - (PAGE - 1))), Some((u64::MAX - (PAGE - 1), PAGE))],
        };
        let ranges = ranges.into_iter().flatten();
        {
            // No batch is under way that may have asked for them.
            let _shut = self.gate.lock();
            for (addr, size) in ranges.clone() {
                match self.domain.unmap(addr, size, Duration::ZERO) {
                    Ok(_) | Err(DomainError::Busy(_)) => {}
                    Err(_) => return false,
                }
            }
        }
        // What is in flight holds its memory, and ends in batches.
        for (addr, size) in ranges {
            while let Err(DomainError::Busy(busy)) = self.domain.unmap(addr, size, PATIENCE) {
                waiting(&busy);
            }
        }
        true
    }

    /// Whether all that is known means the same when the client's memory has become `new`.
    pub(crate) fn survives(&self, old: &ClientRegions, new: &ClientRegions) -> bool {
        self.pieces.values().all(|piece| {
            let meaning = |regions| {
                let runs = runs(*piece, regions)?;
                let region = |user| regions.find(user).map(|(_, region)| Arc::as_ptr(region).addr());
                let regions: Vec<_> = runs.iter().map(|(run, _)| region(run.user)).collect();
                Some((runs, regions))
            };
            meaning(old) == meaning(new)
        })
    }
}

/// Cuts a piece into runs of guest-physical memory, and says where each begins. `None`: some of it is nowhere, or does not
/// lie in whole pages.
fn runs(piece: Piece, regions: &ClientRegions) -> Option<Vec<(Piece, u64)>> {
    let mut runs = Vec::new();
    let mut at = piece.first;
    loop {
        let rest = piece.part(at, piece.last);
        let (gpa, left) = regions.rest(rest.user)?;
        if !gpa.is_multiple_of(PAGE) {
            return None;
        }
        if left > rest.last - rest.first {
            runs.push((rest, gpa));
            return Some(runs);
        }
        if !left.is_multiple_of(PAGE) {
            return None;
        }
        runs.push((rest.part(rest.first, rest.first + (left - 1)), gpa));
        at = rest.first + left;
    }
}

/// What of a run is in none of the pieces, which are in order.
fn gaps(run: Piece, known: &[Piece]) -> Vec<(u64, u64)> {
    let mut gaps = Vec::new();
    let mut next = Some(run.first);
    for piece in known.iter().filter(|piece| piece.last >= run.first && piece.first <= run.last) {
        if let Some(first) = next.filter(|first| *first < piece.first) {
            gaps.push((first, piece.first - 1));
        }
        next = piece.last.checked_add(1);
    }
    if let Some(first) = next.filter(|first| *first <= run.last) {
        gaps.push((first, run.last));
    }
    gaps
}

#[cfg(test)]
mod tests;
