//! Set of cache lines.
use std::cell::Cell;

/// Number of lines: often enough for the pages of a queue's buffers.
///
/// They take 16 KiB, of which only the part in use matters.
pub(crate) const LINES: usize = 256;
const WORDS: usize = LINES / u64::BITS as usize;

/// Set of numbers below [`LINES`], one bit each.
#[derive(Debug)]
pub(crate) struct LineSet([Cell<u64>; WORDS]);

impl LineSet {
    pub(crate) fn new() -> Self {
        Self([const { Cell::new(0) }; WORDS])
    }

    /// Adds a number.
    #[cold]
    pub(crate) fn insert(&self, number: usize) {
        let word = &self.0[number / u64::BITS as usize];
        word.set(word.get() | 1 << (number % u64::BITS as usize));
    }

    /// Removes all numbers, and yields each.
    pub(crate) fn drain(&self, mut each: impl FnMut(usize)) {
        for (index, word) in self.0.iter().enumerate() {
            let mut left = word.replace(0);
            while left != 0 {
                each(index * u64::BITS as usize + left.trailing_zeros() as usize);
                left &= left - 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_put_in_comes_out_once() {
        let lines = LineSet::new();
        let numbers = [0, 1, 63, 64, 200, LINES - 1];
        for number in numbers.into_iter().chain(numbers) {
            lines.insert(number);
        }
        let mut out = Vec::new();
        lines.drain(|number| out.push(number));
        assert_eq!(out, numbers);
        lines.drain(|number| panic!("{number} came out twice"));
    }
}
