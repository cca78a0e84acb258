//! The pages that a door has written and not marked yet.
//!
//! A few of them, each in the place that its number names, or in one beside it. A write finds its page there (it was
//! written a moment ago: nothing to do), or an empty place, or others': when those beside are taken as well, all are
//! marked, behind one fence. So a page costs one mark a batch however often it is written, and the fence is shared; see
//! [`log`](crate::log) for why there is one.
use crate::DirtyLog;
use crate::cache::spread;
use crate::sync::fence;
use std::cell::Cell;
use std::sync::atomic::Ordering;

const PLACES: usize = 64;
/// Places that are tried for a page, neighbours in one cache line.
const TRIES: usize = 4;
/// No page has this number: it would end beyond 2^64.
const NONE: u64 = u64::MAX;

/// The pages.
#[derive(Debug)]
#[repr(align(64))]
pub(crate) struct Written {
    pages: [Cell<u64>; PLACES],
    /// A bit for each place in use.
    used: Cell<u64>,
}

impl Written {
    pub(crate) fn new() -> Self {
        Self { pages: [const { Cell::new(NONE) }; PLACES], used: Cell::new(0) }
    }

    #[inline(always)]
    fn place(page: u64) -> usize {
        spread(page) % PLACES
    }

    #[inline(always)]
    fn put(&self, place: usize, page: u64) {
        self.pages[place].set(page);
        self.used.set(self.used.get() | 1 << place);
    }

    /// Remembers a page, if that takes but a look. `false`: not done.
    #[inline(always)]
    pub(crate) fn add_quickly(&self, page: u64) -> bool {
        let place = Self::place(page);
        let found = self.pages[place].get();
        if found == NONE {
            self.put(place, page);
        }
        found == page || found == NONE
    }

    /// Remembers a page, if need be by marking all others.
    pub(crate) fn add(&self, page: u64, log: &DirtyLog) {
        let place = Self::place(page);
        for beside in 0..TRIES {
            let found = self.pages[place ^ beside].get();
            if found == page {
                return;
            }
            if found == NONE {
                return self.put(place ^ beside, page);
            }
        }
        self.mark(log);
        self.put(place, page);
    }

    #[inline(always)]
    pub(crate) fn is_empty(&self) -> bool {
        self.used.get() == 0
    }

    /// Marks them all and forgets them. The data were written before.
    #[inline(never)]
    pub(crate) fn mark(&self, log: &DirtyLog) {
        // Pairs with the fence in `DirtyLog::harvest`.
        fence(Ordering::SeqCst);
        let mut used = self.used.replace(0);
        while used != 0 {
            log.mark_page(self.pages[used.trailing_zeros() as usize].replace(NONE));
            used &= used - 1;
        }
    }
}
