//! Pin table: the mappings of one holder.
//!
//! The holder fills it, any thread may release entries, publishers read it.
//!
//! ```text
//!            add (the holder)               release (the thread that drops the mapping guard)
//!  free -----------------------> pinned: device address, guest address, length ----> returned
//!    ^                                                                                  |
//!    '--------------- the holder takes over all returned entries at once <-------------'
//! ```
//! Entries have numbers and never move. Only the holder takes entries from either list, so that a
//! number cannot come back between a look and an exchange (no ABA); a release writes one word. The
//! table grows by doubling and never shrinks: it allocates only when more is in flight than ever
//! before.
use crate::sync::{AtomicU32, AtomicU64};
use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

/// One mapped run of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    /// Device address.
    pub(crate) addr: u64,
    /// Guest-physical address.
    pub(crate) gpa: u64,
    /// Length in bytes, not 0.
    pub(crate) len: u64,
}

/// Marks the end of a list.
const END: u32 = u32::MAX;
/// Entries of the first chunk; every further chunk doubles the table.
const FIRST: u32 = if cfg!(loom) { 1 } else { 32 };
const CHUNKS: usize = 24;

#[derive(Debug)]
struct Entry {
    addr: AtomicU64,
    gpa: AtomicU64,
    /// 0 while the entry is free.
    len: AtomicU64,
    /// Change number of the domain when the run was looked up.
    change: AtomicU64,
    next: AtomicU32,
}

/// Pin table of one holder.
#[derive(Debug)]
pub(crate) struct PinTable {
    chunks: [OnceLock<Box<[Entry]>>; CHUNKS],
    /// Number of entries. Written by the holder only.
    count: AtomicU32,
    /// The holder's own list. Used by the holder only.
    free: AtomicU32,
    /// Entries that mapping guards released.
    returned: Returned,
}

#[derive(Debug)]
#[repr(align(64))]
struct Returned(AtomicU32);

/// List of entries that belong to one mapping guard.
///
/// Plain data: the guard releases it, once.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PinList {
    head: u32,
}

impl PinList {
    /// Empty list.
    pub(crate) const NONE: Self = Self { head: END };

    pub(crate) fn is_empty(self) -> bool {
        self.head == END
    }
}

impl PinTable {
    pub(crate) fn new() -> Self {
        Self {
            chunks: [const { OnceLock::new() }; CHUNKS],
            count: AtomicU32::new(0),
            free: AtomicU32::new(END),
            returned: Returned(AtomicU32::new(END)),
        }
    }

    /// Chunk of an entry, and its position in the chunk.
    ///
    /// Chunk 0 has FIRST entries, chunk n as many as all before it.
    fn position(number: u32) -> (usize, usize) {
        let chunk = (number / FIRST).checked_ilog2().map_or(0, |log| log + 1);
        let start = if chunk == 0 { 0 } else { FIRST << (chunk - 1) };
        (chunk as usize, (number - start) as usize)
    }

    fn entry(&self, number: u32) -> Option<&Entry> {
        if number == END {
            return None;
        }
        let (chunk, position) = Self::position(number);
        self.chunks.get(chunk)?.get()?.get(position)
    }

    /// Puts `run` before `list`; for the holder only.
    ///
    /// `None` if 2^28 entries are in use.
    pub(crate) fn add(&self, list: PinList, run: Run, change: u64) -> Option<PinList> {
        let (head, entry) = self.pop()?;
        // Release, these: a waiter that reads any of them has seen the entry's former use end (the
        // holder took it over from `release` by an Acquire). Waiters load with Acquire, see
        // `overlapping`.
        entry.change.store(change, Release);
        entry.addr.store(run.addr, Release);
        entry.len.store(run.len, Release);
        // Relaxed, both: read by the thread that releases, to which the mapping guard was handed.
        entry.gpa.store(run.gpa, Relaxed);
        entry.next.store(list.head, Relaxed);
        Some(PinList { head })
    }

    fn pop(&self) -> Option<(u32, &Entry)> {
        // Relaxed, `free` and `count`: only the holder uses them.
        let mut head = self.free.load(Relaxed);
        if head == END {
            // Acquire: pairs with the Release exchange in `release`.
            head = self.returned.0.swap(END, Acquire);
        }
        if head == END {
            head = self.grow()?;
        }
        let entry = self.entry(head)?;
        self.free.store(entry.next.load(Relaxed), Relaxed);
        Some((head, entry))
    }

    /// Makes a chunk; returns the list of its entries.
    #[cold]
    fn grow(&self) -> Option<u32> {
        let first = self.count.load(Relaxed);
        let (chunk, _) = Self::position(first);
        let more = first.max(FIRST);
        let chunk = self.chunks.get(chunk)?;
        chunk.get_or_init(|| {
            let entry = |number| Entry {
                addr: AtomicU64::new(0),
                gpa: AtomicU64::new(0),
                len: AtomicU64::new(0),
                change: AtomicU64::new(0),
                next: AtomicU32::new(if number + 1 == first + more { END } else { number + 1 }),
            };
            (first..first + more).map(entry).collect()
        });
        // Release: pairs with the Acquire load in `overlapping`, which then finds the chunk.
        self.count.store(first + more, Release);
        Some(first)
    }

    /// Runs of a mapping guard.
    pub(crate) fn runs(&self, list: PinList) -> impl Iterator<Item = Run> {
        let mut next = list.head;
        std::iter::from_fn(move || {
            let entry = self.entry(next)?;
            // Relaxed: a thread with the mapping guard was handed it by the holder.
            next = entry.next.load(Relaxed);
            Some(Run {
                addr: entry.addr.load(Relaxed),
                gpa: entry.gpa.load(Relaxed),
                len: entry.len.load(Relaxed),
            })
        })
    }

    /// Releases the entries of a mapping guard. By any thread, once.
    pub(crate) fn release(&self, list: PinList) {
        if list.is_empty() {
            return;
        }
        let Some(mut last) = self.entry(list.head) else { return };
        loop {
            // Release: what was done through the mapping happened before; pairs with `overlapping`.
            last.len.store(0, Release);
            match self.entry(last.next.load(Relaxed)) {
                Some(next) => last = next,
                // The end of the list, which is the number of no entry.
                None => break,
            }
        }
        let mut head = self.returned.0.load(Relaxed);
        loop {
            last.next.store(head, Relaxed);
            // Release: the entries are the holder's again; pairs with the Acquire swap in `pop`.
            match self.returned.0.compare_exchange_weak(head, list.head, Release, Relaxed) {
                Ok(_) => return,
                Err(now) => head = now,
            }
        }
    }

    /// Whether anything is mapped.
    ///
    /// If not, what was done through mappings happened before.
    pub(crate) fn is_any_pinned(&self) -> bool {
        // Relaxed for the count: the holder is gone, which it recorded under the caller's lock.
        // Acquire: pairs with the Release in `release`.
        (0..self.count.load(Relaxed))
            .any(|number| self.entry(number).is_some_and(|entry| entry.len.load(Acquire) != 0))
    }

    /// Finds a run that overlaps `addrs` and was looked up before `change`.
    ///
    /// `change` is a change number of the domain.
    ///
    /// The caller must know that no such run is added any more. The fields of an entry that changes
    /// hands meanwhile may not belong together. A run that is looked for does not change until it
    /// is released, so it is found; a run found wrongly is gone at the next look.
    pub(crate) fn overlapping(&self, addrs: &Range<u128>, change: u64) -> Option<(u64, u64)> {
        // Acquire, all of these: see the stores.
        (0..self.count.load(Acquire)).find_map(|number| {
            let entry = self.entry(number)?;
            let len = entry.len.load(Acquire);
            if len == 0 || entry.change.load(Acquire) >= change {
                return None;
            }
            let addr = entry.addr.load(Acquire);
            let end = u128::from(addr) + u128::from(len);
            (u128::from(addr) < addrs.end && addrs.start < end).then_some((addr, len))
        })
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn run(addr: u64) -> Run {
        Run { addr, gpa: addr + 1, len: 4 }
    }

    #[test]
    fn positions_follow_one_another() {
        let mut expected = (0, 0);
        for number in 0..1000 {
            assert_eq!(PinTable::position(number), expected, "{number}");
            let size = if expected.0 == 0 { FIRST } else { FIRST << (expected.0 - 1) };
            expected.1 += 1;
            if expected.1 == size as usize {
                expected = (expected.0 + 1, 0);
            }
        }
    }

    #[test]
    fn a_run_is_found_until_it_is_released() {
        let pins = PinTable::new();
        let guards: Vec<PinList> = (0..100)
            .map(|n| {
                let one = pins.add(PinList::NONE, run(n * 8), 5).expect("room");
                pins.add(one, run(0x1000 + n * 8), 5).expect("room")
            })
            .collect();
        assert_eq!(pins.runs(guards[3]).collect::<Vec<_>>(), [run(0x1018), run(0x18)]);
        assert_eq!(pins.overlapping(&(0x1b..0x20), 6), Some((0x18, 4)));
        assert_eq!(pins.overlapping(&(0x1c..0x20), 6), None, "it ends there");
        assert_eq!(pins.overlapping(&(0x1b..0x20), 5), None, "it came after the change");
        for guard in guards {
            pins.release(guard);
        }
        assert_eq!(pins.overlapping(&(0..1 << 64), 9), None);
    }

    #[test]
    fn entries_are_used_again() {
        let pins = PinTable::new();
        for n in 0..if cfg!(miri) { 100 } else { 10_000 } {
            let a = pins.add(PinList::NONE, run(n), 0).expect("room");
            let b = pins.add(PinList::NONE, run(n + 1), 0).expect("room");
            pins.release(a);
            pins.release(b);
        }
        assert_eq!(pins.count.load(Relaxed), FIRST);
    }
}
