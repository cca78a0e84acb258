//! What a guard has written and not marked yet.
//!
//! ```text
//!  a write of at most a page:  its window is one page?  yes: its address, in a list, once a turn
//!                                                       no:  its address, in the list
//!  the list is full, or the guard is shut:               one fence, all are marked and forgotten: the next turn
//! ```
//! So a page that is found in the cache is looked up in the log once a batch however often it is written, and the fence
//! is shared. See [`log`](crate::log) for why there is one.
use crate::DirtyLog;
use crate::sync::fence;
use std::cell::Cell;
use std::sync::atomic::Ordering;

/// Addresses in the list.
const MOST: usize = 32;

/// Addresses, and a number for the time between two markings.
#[derive(Debug)]
pub(crate) struct PendingMarks {
    turn: Cell<u64>,
    count: Cell<usize>,
    /// Guest-physical, each for its page.
    list: [Cell<u64>; MOST],
}

impl PendingMarks {
    pub(crate) fn new() -> Self {
        // Not 0: what was noted in no turn is not noted in this one.
        Self { turn: Cell::new(1), count: Cell::new(0), list: [const { Cell::new(0) }; MOST] }
    }

    /// Number of the present turn: what was noted in it is in the list. (2^64 of them do not pass.)
    #[inline(always)]
    pub(crate) fn turn(&self) -> u64 {
        self.turn.get()
    }

    /// The page around an address is written. `false`: the list is full.
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

    /// Marks it all and forgets it. The data were written before.
    #[inline(never)]
    pub(crate) fn mark(&self, log: &DirtyLog) {
        // Pairs with the fence in `DirtyLog::harvest`.
        fence(Ordering::SeqCst);
        // What is written from here on is not marked by what follows.
        self.turn.set(self.turn.get() + 1);
        let count = self.count.replace(0).min(MOST);
        let pages = &self.list[..count];
        // Mostly all of them are marked already, and a loop that only looks is short.
        if !pages.iter().all(|gpa| log.is_marked(gpa.get())) {
            mark_each(pages, log);
        }
    }
}

/// Marks the pages around some addresses; the caller has made the fence.
#[cold]
#[inline(never)]
fn mark_each(pages: &[Cell<u64>], log: &DirtyLog) {
    for gpa in pages {
        log.mark_page_of(gpa.get());
    }
}
