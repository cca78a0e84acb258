//! Windows that a handle has found lately: the first and mostly the only look-up of an access.
use crate::snapshot::Window;
use crate::table::PAGE_SHIFT;
use std::cell::Cell;

/// As many as a word has bits.
pub(crate) const PLACES: usize = 64;

/// A window for each of 64 classes of pages, or one for all where there is only one to be found. What is not there is
/// not remembered, so that what is mapped later is found.
#[derive(Debug)]
pub(crate) struct Cache {
    places: Box<[Place; PLACES]>,
    /// Number of places in use, less 1: a power of two less 1.
    mask: usize,
    /// A bit for each place that is not empty.
    used: Cell<u64>,
}

/// Spreads page numbers over 64 places. Buffers lie at regular distances, mostly powers of two, and would meet in a few
/// places if low bits named those. The factor was searched for: with it 16 pages in a row do not meet at any of the
/// distances that the test below has, which neither folded bits nor the golden ratio can say.
#[inline(always)]
fn spread(page: u64) -> usize {
    (page.wrapping_mul(0x4770_a087_16e6_fec3) >> 58) as usize
}

/// One place; a cache line.
#[derive(Debug)]
#[repr(align(64))]
struct Place(Cell<Window>);

impl Cache {
    pub(crate) fn new() -> Self {
        Self {
            places: Box::new([const { Place(Cell::new(Window::EMPTY)) }; PLACES]),
            mask: PLACES - 1,
            used: Cell::new(0),
        }
    }

    /// Number of the place where the window around `addr` is, if it is there.
    #[inline(always)]
    pub(crate) fn number(&self, addr: u64) -> usize {
        spread(addr >> PAGE_SHIFT) & self.mask
    }

    /// What is in a place.
    #[inline(always)]
    pub(crate) fn window(&self, number: usize) -> Window {
        // Numbers are below that of the places, so the remainder changes nothing, and needs no check.
        self.places[number % PLACES].0.get()
    }

    /// Remembers a window in the place for its addresses.
    #[inline(always)]
    pub(crate) fn put(&self, number: usize, window: Window) {
        self.places[number % PLACES].0.set(window);
        self.used.set(self.used.get() | 1 << (number % PLACES));
    }

    /// Forgets everything.
    pub(crate) fn clear(&mut self) {
        let mut used = self.used.replace(0);
        while used != 0 {
            self.places[used.trailing_zeros() as usize].0.set(Window::EMPTY);
            used &= used - 1;
        }
        self.mask = PLACES - 1;
    }

    /// Forgets everything but `window`, which is found for every address. There is no other.
    pub(crate) fn put_only(&mut self, window: Window) {
        self.clear();
        self.mask = 0;
        self.put(0, window);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_pages_do_not_meet() {
        let odd = [3, 5, 6, 7, 9, 10, 12, 15, 17, 20, 24, 33, 48, 63, 65, 96, 100, 127, 257, 1000, 9973];
        for distance in (0..24).map(|power| 1_u64 << power).chain(odd) {
            let places: std::collections::BTreeSet<_> = (0..16).map(|n| spread(n * distance)).collect();
            assert_eq!(places.len(), 16, "{distance}: {places:?}");
        }
    }
}
