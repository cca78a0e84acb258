//! Cache of windows that a handle found recently.
//!
//! It is the first and mostly the only look-up of an access.
use crate::line_set::{LINES, LineSet};
use crate::table::PAGE_SHIFT;
use crate::window::Window;
use std::cell::Cell;

/// One window for each of 256 classes of pages, or a single one for all.
///
/// The single one is for a map of one region without a domain.
///
/// Misses are not cached, so later mappings are found.
#[derive(Debug)]
pub(crate) struct Cache {
    lines: Box<[CacheLine; LINES]>,
    /// Number of lines in use, less 1: a power of two less 1.
    mask: usize,
    /// Lines that are not empty.
    used: LineSet,
}

/// Spreads page numbers over the lines.
///
/// Buffers lie near one another, or at regular distances, mostly powers of two, and would collide
/// in a few lines if low bits selected those. The factor was searched for: with it no two pages
/// collide at any of the distances in the test below, unlike with folded bits or the golden ratio.
#[inline(always)]
fn spread(page: u64) -> usize {
    (page.wrapping_mul(0xa232_cf20_c135_0971) >> (64 - LINES.trailing_zeros())) as usize
}

/// One line of the cache; one cache line of the processor.
#[derive(Debug)]
#[repr(align(64))]
pub(crate) struct CacheLine {
    window: Cell<Window>,
    /// Turn of `PendingMarks` that last noted its page.
    noted: Cell<u64>,
}

impl CacheLine {
    /// Window in this line.
    #[inline(always)]
    pub(crate) fn window(&self) -> Window {
        self.window.get()
    }

    /// Whether its page needs no note before the turn after `turn`.
    #[inline(always)]
    pub(crate) fn is_noted(&self, turn: u64) -> bool {
        self.noted.get() >= turn
    }

    /// Records that all of its window is noted in `turn`.
    #[inline(always)]
    pub(crate) fn note(&self, turn: u64) {
        self.noted.set(turn);
    }
}

impl Cache {
    pub(crate) fn new() -> Self {
        Self {
            lines: Box::new(
                [const { CacheLine { window: Cell::new(Window::EMPTY), noted: Cell::new(0) } }; LINES],
            ),
            mask: LINES - 1,
            used: LineSet::new(),
        }
    }

    /// Number of the line for `addr`.
    #[inline(always)]
    fn number(&self, addr: u64) -> usize {
        spread(addr >> PAGE_SHIFT) & self.mask
    }

    /// Line for `addr`, which holds its window if that is cached.
    #[inline(always)]
    pub(crate) fn line(&self, addr: u64) -> &CacheLine {
        // Numbers are below the number of lines, so the remainder changes nothing, and needs no
        // check.
        &self.lines[self.number(addr) % LINES]
    }

    /// Stores the window around `addr` in `line`, as if noted in turn `noted`.
    ///
    /// `line` is the line for `addr`.
    #[inline(always)]
    pub(crate) fn put(&self, line: &CacheLine, addr: u64, window: Window, noted: u64) {
        if line.window().is_empty() {
            self.used.insert(self.number(addr));
        }
        self.replace(line, window, noted);
    }

    /// [`Cache::put`] into a line that holds a window.
    #[inline(always)]
    pub(crate) fn replace(&self, line: &CacheLine, window: Window, noted: u64) {
        line.window.set(window);
        line.noted.set(noted);
    }

    /// Empties the cache.
    pub(crate) fn clear(&mut self) {
        self.used.drain(|number| self.lines[number].window.set(Window::EMPTY));
        self.mask = LINES - 1;
    }

    /// Empties the cache and stores `window` for every address.
    ///
    /// There must be no other window to find.
    pub(crate) fn put_only(&mut self, window: Window, noted: u64) {
        self.clear();
        self.mask = 0;
        self.put(&self.lines[0], 0, window, noted);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// No two of 131 consecutive pages collide.
    ///
    /// Nor do any two of 16 pages at a likely distance.
    #[test]
    fn pages_at_likely_distances_do_not_meet() {
        let odd = [3, 5, 6, 7, 9, 10, 12, 15, 17, 20, 24, 33, 48, 63, 65, 96, 100, 127, 257, 1000, 9973];
        let rows = (0..36)
            .map(|power| 1_u64 << power)
            .chain(odd)
            .flat_map(|distance| (1..16).map(move |n| n * distance));
        for distance in rows.chain(1..=130) {
            for first in [0, 1, 77, (1 << 20) + 12_345, (1 << 51) + 999_999_999] {
                assert_ne!(spread(first), spread(first + distance), "{first} {distance}");
            }
        }
    }
}
