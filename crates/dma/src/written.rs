//! The pages that a door has written and not marked yet.
//!
//! A few of them, by the low bits of their number, into which the next ones are folded. A write finds its page there (it was written a moment ago: nothing
//! to do), or an empty place, or somebody else's: then all are marked, behind one fence. So a page costs one mark
//! a batch however often it is written, and the fence is shared; see [`log`](crate::log) for why there is one.
use crate::DirtyLog;
use crate::sync::fence;
use std::cell::Cell;
use std::sync::atomic::Ordering;

const PLACES: usize = 64;
/// No page has this number: it would end beyond 2^64.
const NONE: u64 = u64::MAX;

/// The pages.
#[derive(Debug)]
pub(crate) struct Written {
    pages: [Cell<u64>; PLACES],
    /// A bit for each place in use.
    used: Cell<u64>,
}

impl Written {
    pub(crate) fn new() -> Self {
        Self { pages: [const { Cell::new(NONE) }; PLACES], used: Cell::new(0) }
    }

    fn place(page: u64) -> usize {
        (page ^ (page >> 6) ^ (page >> 12)) as usize % PLACES
    }

    /// Whether the page is there already.
    #[inline(always)]
    pub(crate) fn has(&self, page: u64) -> bool {
        self.pages[Self::place(page)].get() == page
    }

    /// Remembers a page.
    #[inline]
    pub(crate) fn add(&self, page: u64, log: &DirtyLog) {
        let place = Self::place(page);
        let found = self.pages[place].get();
        if found == page {
            return;
        }
        if found != NONE {
            self.mark(log);
        }
        self.pages[place].set(page);
        self.used.set(self.used.get() | 1 << place);
    }

    #[inline(always)]
    pub(crate) fn is_empty(&self) -> bool {
        self.used.get() == 0
    }

    /// Marks them all and forgets them. The data were written before.
    #[cold]
    #[inline(never)]
    pub(crate) fn mark(&self, log: &DirtyLog) {
        // Pairs with the fence in `DirtyLog::harvest`.
        fence(Ordering::SeqCst);
        let mut used = self.used.replace(0);
        while used != 0 {
            let page = self.pages[used.trailing_zeros() as usize].replace(NONE);
            log.mark_pages(page, page);
            used &= used - 1;
        }
    }
}
