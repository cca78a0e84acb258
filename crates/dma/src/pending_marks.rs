//! Pending dirty marks: writes of an access guard that are not marked yet.
//!
//! ```text
//!  a write of at most a page, its window is one page:  note its address in the list, once per turn
//!                             its window is larger:    note its address in the list
//!  the list is full, or the guard is dropped:          one fence, mark all, empty the list:
//!                                                      the next turn begins
//! ```
//! So a page that is found in the cache is looked up in the log once per batch, however often it is
//! written, and all share the fence. See [`DirtyLog`] for why there is one.
use crate::DirtyLog;
use crate::sync::fence;
use std::cell::Cell;
use std::sync::atomic::Ordering;

/// Addresses in the list.
const CAPACITY: usize = 32;

/// Noted addresses, and a number for the time between two markings (a turn).
#[derive(Debug)]
pub(crate) struct PendingMarks {
    turn: Cell<u64>,
    count: Cell<usize>,
    /// Guest-physical addresses, each for its page.
    list: [Cell<u64>; CAPACITY],
}

impl PendingMarks {
    pub(crate) fn new() -> Self {
        // Not 0: a page that was noted in no turn must not count as noted in this one.
        Self { turn: Cell::new(1), count: Cell::new(0), list: [const { Cell::new(0) }; CAPACITY] }
    }

    /// Number of the current turn. Pages noted in it are in the list.
    ///
    /// (It does not wrap: 2^64 turns do not pass.)
    #[inline(always)]
    pub(crate) fn turn(&self) -> u64 {
        self.turn.get()
    }

    /// Notes a write to the page around an address. `false` if the list is full.
    #[inline(always)]
    pub(crate) fn add(&self, gpa: u64) -> bool {
        let count = self.count.get();
        let Some(last) = self.list.get(count) else { return false };
        last.set(gpa);
        self.count.set(count + 1);
        true
    }

    #[inline(always)]
    pub(crate) fn is_empty(&self) -> bool {
        self.count.get() == 0
    }

    /// Marks everything noted and empties the list. The data were written before.
    #[inline(never)]
    pub(crate) fn mark(&self, log: &DirtyLog) {
        // Pairs with the fence in `DirtyLog::harvest`.
        fence(Ordering::SeqCst);
        // Later writes are not covered by the marks below.
        self.turn.set(self.turn.get() + 1);
        let count = self.count.replace(0).min(CAPACITY);
        let pages = &self.list[..count];
        // Mostly all of them are marked already, and a loop that only looks is short.
        if !pages.iter().all(|gpa| log.is_marked(gpa.get())) {
            mark_each(pages, log);
        }
    }
}

/// Marks the pages around some addresses. The caller has made the fence.
#[cold]
#[inline(never)]
fn mark_each(pages: &[Cell<u64>], log: &DirtyLog) {
    for gpa in pages {
        log.mark_page_of(gpa.get());
    }
}
