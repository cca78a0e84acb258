//! Translations that a handle has found lately.
use crate::snapshot::Window;
use crate::table::PAGE_SHIFT;
use std::cell::Cell;

const PLACES: usize = 64;

/// One window for each low page number. No window at all is not remembered, so that what is mapped later is found.
#[derive(Debug)]
pub(crate) struct Cache {
    windows: [Cell<Window>; PLACES],
    /// A bit for each place in use.
    used: Cell<u64>,
}

impl Cache {
    pub(crate) fn new() -> Self {
        Self { windows: [const { Cell::new(Window::EMPTY) }; PLACES], used: Cell::new(0) }
    }

    fn place(addr: u64) -> usize {
        (addr >> PAGE_SHIFT) as usize % PLACES
    }

    /// The window around `addr`.
    #[inline(always)]
    pub(crate) fn find(&self, addr: u64) -> Option<Window> {
        let window = self.windows[Self::place(addr)].get();
        window.offset(addr).is_some().then_some(window)
    }

    /// Remembers the window around `addr`.
    #[inline(always)]
    pub(crate) fn put(&self, addr: u64, window: Window) {
        let place = Self::place(addr);
        self.windows[place].set(window);
        self.used.set(self.used.get() | 1 << place);
    }

    /// Forgets everything.
    pub(crate) fn clear(&self) {
        let mut used = self.used.replace(0);
        while used != 0 {
            self.windows[used.trailing_zeros() as usize].set(Window::EMPTY);
            used &= used - 1;
        }
    }
}
