//! Windows that a handle has found lately: the first and mostly the only look-up of an access.
use crate::line_set::{LINES, LineSet};
use crate::snapshot::Window;
use crate::table::PAGE_SHIFT;
use std::cell::Cell;

/// A window for each of 256 classes of pages, or one for all where there is only one to be found. What is not there is
/// not remembered, so that what is mapped later is found.
#[derive(Debug)]
pub(crate) struct Cache {
    lines: Box<[CacheLine; LINES]>,
    /// Number of lines in use, less 1: a power of two less 1.
    mask: usize,
    /// LineSet that are not empty.
    used: LineSet,
}

/// Spreads page numbers over the lines. Buffers lie near one another, or at regular distances, mostly powers of two, and
/// would meet in a few lines if low bits named those. The factor was searched for: with it no two pages meet at any of the
/// distances that the test below has, which neither folded bits nor the golden ratio can say.
#[inline(always)]
fn spread(page: u64) -> usize {
    (page.wrapping_mul(0xa232_cf20_c135_0971) >> (64 - LINES.trailing_zeros())) as usize
}

/// One line; a cache line.
#[derive(Debug)]
#[repr(align(64))]
pub(crate) struct CacheLine {
    window: Cell<Window>,
    /// The turn in which its page was last noted as written ([`PendingMarks`](crate::pending_marks::PendingMarks)).
    noted: Cell<u64>,
}

impl CacheLine {
    /// What is in it.
    #[inline(always)]
    pub(crate) fn window(&self) -> Window {
        self.window.get()
    }

    /// Whether there is nothing to be noted before the turn after `turn`.
    #[inline(always)]
    pub(crate) fn is_noted(&self, turn: u64) -> bool {
        self.noted.get() >= turn
    }

    /// All of its window is noted in `turn`.
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

    /// The line where the window around `addr` is, if it is there.
    #[inline(always)]
    pub(crate) fn line(&self, addr: u64) -> &CacheLine {
        // Numbers are below that of the lines, so the remainder changes nothing, and needs no check.
        &self.lines[self.number(addr) % LINES]
    }

    /// Remembers the window around `addr` in `line`, which is the line for it. `noted`: as if in this turn.
    #[inline(always)]
    pub(crate) fn put(&self, line: &CacheLine, addr: u64, window: Window, noted: u64) {
        if line.window().is_empty() {
            self.used.insert(self.number(addr));
        }
        self.replace(line, window, noted);
    }

    /// [`Cache::put`], where a window is already.
    #[inline(always)]
    pub(crate) fn replace(&self, line: &CacheLine, window: Window, noted: u64) {
        line.window.set(window);
        line.noted.set(noted);
    }

    /// Forgets everything.
    pub(crate) fn clear(&mut self) {
        self.used.drain(|number| self.lines[number].window.set(Window::EMPTY));
        self.mask = LINES - 1;
    }

    /// Forgets everything but `window`, which is found for every address. There is no other.
    pub(crate) fn put_only(&mut self, window: Window, noted: u64) {
        self.clear();
        self.mask = 0;
        self.put(&self.lines[0], 0, window, noted);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Neither any two of 131 pages in a row, nor any two of sixteen pages at a distance that is likely.
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
