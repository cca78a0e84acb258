//! What a door has written and not marked yet.
//!
//! ```text
//!  a write of at most a page:  its window is one page?  yes: the bit of its place in the cache
//!                                                       no:  its address, in a list
//!  the place is needed:        its bit becomes an address
//!  the list is full, or the door is shut:               one fence, all are marked and forgotten
//! ```
//! So a page that is found in the cache costs a bit however often it is written, and one mark a batch; and the fence is
//! shared. See [`log`](crate::log) for why there is one.
use crate::DirtyLog;
use crate::cache::Cache;
use crate::places::Places;
use crate::sync::fence;
use std::cell::Cell;
use std::sync::atomic::Ordering;

/// Addresses in the list.
const MOST: usize = 32;

/// Pages and addresses.
#[derive(Debug)]
pub(crate) struct Written {
    /// Places of the cache whose window is in one page, and written.
    places: Places,
    count: Cell<usize>,
    /// Guest-physical, each for its page.
    list: [Cell<u64>; MOST],
}

impl Written {
    pub(crate) fn new() -> Self {
        Self { places: Places::new(), count: Cell::new(0), list: [const { Cell::new(0) }; MOST] }
    }

    /// The page behind a place of the cache is written.
    #[inline(always)]
    pub(crate) fn add_place(&self, number: usize) {
        self.places.insert(number);
    }

    /// Takes the bit of a place back, and says whether it was there: the place is to have another window.
    #[inline(always)]
    pub(crate) fn take_place(&self, number: usize) -> bool {
        self.places.remove(number)
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
        self.places.is_empty() && self.count.get() == 0
    }

    /// Marks it all and forgets it. The data were written before.
    #[inline(never)]
    pub(crate) fn mark(&self, cache: &Cache, log: &DirtyLog) {
        // Pairs with the fence in `DirtyLog::harvest`.
        fence(Ordering::SeqCst);
        self.places.drain(|place| log.mark_page_of(cache.window(place).gpa(0)));
        for gpa in self.list.iter().take(self.count.replace(0)) {
            log.mark_page_of(gpa.get());
        }
    }
}
