//! Translations from IOVAs, sent by a client with an IOMMU.
//!
//! ```text
//!   IOTLB_MSG update -----> pieces: IOVA -> user address --regions--> guest-physical --map--> dma::Domain
//!   IOTLB_MSG invalidate -> cut pieces | lock out batches, unmap | wait for what is in flight | acknowledge
//! ```
//! This is a cache: a missing translation is requested again. The pieces are what the client sent.
//! The domain has them in guest-physical addresses, which depend on the client's memory table
//! ([`Translations::survives`]).
use crate::memory::ClientRegions;
use paravane_device::InvalidationLock;
use paravane_dma::{Access, Busy, Domain, DomainError, Handle, Memory, Miss, headroom};
use paravane_spec::vhost_user::{Iotlb, iotlb};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

const PAGE: u64 = 4096;
/// Most pieces; adjacent pages that agree form one piece.
const MAX_PIECES: usize = 1 << 16;
/// Insertions between two checks of the memory that is left to the process.
const CHECK_INTERVAL: u32 = 64;
/// Memory in bytes that must be left; the domain's tables take most of it.
const HEADROOM: usize = 32 << 20;
/// Interval between calls of the `waiting` closure.
const WAIT_INTERVAL: Duration = Duration::from_millis(100);

/// Range of IOVAs that maps to a range of user addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    /// First and last IOVA; whole pages.
    pub(crate) first: u64,
    pub(crate) last: u64,
    /// User address of the first IOVA.
    pub(crate) user: u64,
    pub(crate) access: Access,
}

impl Piece {
    /// Reads an update; `None` if it is invalid.
    pub(crate) fn new(msg: &Iotlb) -> Option<Self> {
        let &Iotlb { iova: first, size, user, perm, .. } = msg;
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

    /// Writes the update that makes this piece; `None` if it covers all 2^64 addresses.
    fn update(self) -> Option<Iotlb> {
        let size = (self.last - self.first).checked_add(1)?;
        let (iova, user, perm, kind) = (self.first, self.user, perm(self.access), iotlb::UPDATE);
        Some(Iotlb { iova, size, user, perm, kind, ..Iotlb::default() })
    }

    /// The part in `first..=last`, which must overlap the piece.
    fn part(self, first: u64, last: u64) -> Self {
        let from = self.first.max(first);
        Self { first: from, last: self.last.min(last), user: self.user + (from - self.first), ..self }
    }

    /// Whether both map each common IOVA to the same address with the same access.
    fn agrees(self, other: Self) -> bool {
        let offset = |piece: Self| piece.user.wrapping_sub(piece.first);
        self.access == other.access && offset(self) == offset(other)
    }
}

/// Permission of a message for an access.
pub(crate) fn perm(access: Access) -> u8 {
    let directions = [(Access::READ, iotlb::READ), (Access::WRITE, iotlb::WRITE)];
    directions
        .iter()
        .filter(|(direction, _)| access.contains(*direction))
        .fold(0, |perm, (_, bit)| perm | bit)
}

/// Pages that an invalidation touches, as first and last IOVA.
pub(crate) fn touched_pages(msg: &Iotlb) -> (u64, u64) {
    // Size 0 means the whole space of 2^64 bytes to some clients: QEMU computes it in 64 bits.
    match msg.size.checked_sub(1) {
        None => (0, u64::MAX),
        Some(more) => (msg.iova & !(PAGE - 1), msg.iova.saturating_add(more) | (PAGE - 1)),
    }
}

/// Reason to refuse a translation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    /// It maps to no memory of the client, or not to whole pages.
    NoMemory,
    /// The table is full, or the host has no memory for more.
    Full,
}

/// Translations of one client.
#[derive(Debug)]
pub(crate) struct Translations {
    domain: Domain,
    invalidation_lock: InvalidationLock,
    /// By first IOVA; they do not overlap.
    pieces: BTreeMap<u64, Piece>,
    /// Number of insertions so far.
    inserted: u32,
}

impl Translations {
    /// Makes an empty set of translations in front of `memory`.
    ///
    /// The tables may take `max_tables` bytes. `on_miss` is called for accesses without a
    /// translation.
    pub(crate) fn new(
        memory: &Memory,
        max_tables: u64,
        on_miss: impl Fn(Miss) + Send + Sync + 'static,
    ) -> Self {
        let domain = Domain::with_limit(memory, max_tables);
        domain.on_miss(on_miss);
        Self { domain, invalidation_lock: InvalidationLock::default(), pieces: BTreeMap::new(), inserted: 0 }
    }

    /// Handle for a queue.
    pub(crate) fn handle(&self) -> Handle {
        self.domain.handle()
    }

    /// Lock that the batches of a queue take for reading.
    pub(crate) fn invalidation_lock(&self) -> InvalidationLock {
        self.invalidation_lock.clone()
    }

    fn overlapping(&self, first: u64, last: u64) -> impl Iterator<Item = Piece> {
        let before = self.pieces.range(..first).next_back().map(|(_, piece)| *piece);
        let inside = self.pieces.range(first..=last).map(|(_, piece)| *piece);
        before.filter(|piece| piece.last >= first).into_iter().chain(inside)
    }

    /// Updates that make all translations again.
    pub(crate) fn updates(&self) -> impl Iterator<Item = Iotlb> {
        self.pieces.values().filter_map(|piece| piece.update())
    }

    /// Whether `new` contradicts a known translation, which must be removed first.
    pub(crate) fn contradicts(&self, new: Piece) -> bool {
        self.overlapping(new.first, new.last).any(|old| !old.agrees(new))
    }

    /// Inserts a translation that contradicts no other.
    ///
    /// # Errors
    /// Nothing was inserted. After [`Refused::Full`] the insertion succeeds if all others are
    /// removed.
    pub(crate) fn insert(&mut self, new: Piece, regions: &ClientRegions) -> Result<(), Refused> {
        let runs = runs(new, regions).ok_or(Refused::NoMemory)?;
        // Pieces are small, and their allocation cannot report failure.
        let is_short = self.inserted.is_multiple_of(CHECK_INTERVAL) && headroom(HEADROOM).is_err();
        if self.pieces.len() >= MAX_PIECES || is_short {
            return Err(Refused::Full);
        }
        self.inserted = self.inserted.wrapping_add(1);
        let known: Vec<Piece> = self.overlapping(new.first, new.last).collect();
        let mut mapped: Vec<(u64, u64)> = Vec::new();
        for (run, gpa) in runs {
            for (first, last) in gaps(run, &known) {
                let result = self.domain.map(first, gpa + (first - run.first), last - first + 1, new.access);
                if result.is_err() {
                    // No queue has seen the part that was mapped; remove it.
                    for (first, last) in mapped {
                        self.unmap(first, last, &mut |_| ());
                    }
                    return Err(Refused::Full);
                }
                mapped.push((first, last));
            }
        }
        // Merge with the adjacent pieces that agree.
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

    /// Removes `first..=last`, whole pages. On return no access uses them any more.
    ///
    /// Calls `waiting` periodically until then. Returns `false` if the tables have no room to split
    /// larger entries: nothing was removed, and the caller must drop all translations.
    ///
    /// No live ring may be in the range: the wait would never end.
    #[must_use]
    pub(crate) fn remove(&mut self, first: u64, last: u64, waiting: &mut dyn FnMut(&Busy)) -> bool {
        let old: Vec<Piece> = self.overlapping(first, last).collect();
        // Clients mostly invalidate ranges that were never requested.
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
        // A size of 2^64 does not fit in a u64.
        let ranges = match (last - first).checked_add(1) {
            Some(size) => [Some((first, size)), None],
            None => [Some((0, u64::MAX - (PAGE - 1))), Some((u64::MAX - (PAGE - 1), PAGE))],
        };
        let ranges = ranges.into_iter().flatten();
        {
            // No batch that could have looked them up is running.
            let _exclusive = self.invalidation_lock.lock();
            for (addr, size) in ranges.clone() {
                match self.domain.unmap(addr, size, Duration::ZERO) {
                    Ok(_) | Err(DomainError::Busy(_)) => {}
                    Err(_) => return false,
                }
            }
        }
        // Chains in flight hold their memory until a batch completes them.
        for (addr, size) in ranges {
            while let Err(DomainError::Busy(busy)) = self.domain.unmap(addr, size, WAIT_INTERVAL) {
                waiting(&busy);
            }
        }
        true
    }

    /// Whether all translations survive a change of memory from `old` to `new`.
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

/// Splits a piece into runs of guest-physical memory, each with its address.
///
/// `None` if a part maps to no region, or not to whole pages.
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

/// Parts of a run that no piece covers. `known` is sorted.
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
