//! Windows that a handle has found lately: the first and mostly the only look-up of an access.
use crate::snapshot::Window;
use crate::table::PAGE_SHIFT;
use std::cell::Cell;

const PLACES: usize = 64;

/// A window for each low page number (the next bits are folded in: buffers often lie 64 KiB or 2 MiB apart, and would
/// drive each other out), or one for all where there is only one to be found. What is not there is not
/// remembered, so that what is mapped later is found.
#[derive(Debug)]
pub(crate) struct Cache {
    places: Box<[Place; PLACES]>,
    /// Number of places in use, less 1: a power of two less 1.
    mask: usize,
    /// A bit for each place that is not empty.
    used: Cell<u64>,
}

/// One place; a cache line.
#[derive(Debug)]
#[repr(align(64))]
pub(crate) struct Place(Cell<Window>);

impl Place {
    #[inline(always)]
    pub(crate) fn window(&self) -> Window {
        self.0.get()
    }
}

impl Cache {
    pub(crate) fn new() -> Self {
        Self {
            places: Box::new([const { Place(Cell::new(Window::EMPTY)) }; PLACES]),
            mask: PLACES - 1,
            used: Cell::new(0),
        }
    }

    #[inline(always)]
    fn number(&self, addr: u64) -> usize {
        let page = addr >> PAGE_SHIFT;
        (page ^ (page >> 6) ^ (page >> 12)) as usize & self.mask
    }

    /// Where the window around `addr` is, if it is there.
    #[inline(always)]
    pub(crate) fn place(&self, addr: u64) -> &Place {
        // The mask is below the number of places, so the remainder changes nothing, and needs no check.
        &self.places[self.number(addr) % PLACES]
    }

    /// Remembers the window around `addr`.
    #[inline(always)]
    pub(crate) fn put(&self, addr: u64, window: Window) {
        let number = self.number(addr) % PLACES;
        self.places[number].0.set(window);
        self.used.set(self.used.get() | 1 << number);
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
