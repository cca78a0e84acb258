//! A set of lines of the cache.
use std::cell::Cell;

/// How many there are: as many as the pages of a queue's buffers, often enough. 16 KiB, of which what is in use matters.
pub(crate) const LINES: usize = 256;
const WORDS: usize = LINES / u64::BITS as usize;

/// Numbers below [`LINES`], a bit each.
#[derive(Debug)]
pub(crate) struct LineSet([Cell<u64>; WORDS]);

impl LineSet {
    pub(crate) fn new() -> Self {
        Self([const { Cell::new(0) }; WORDS])
    }

    /// Puts a number in.
    #[cold]
    pub(crate) fn insert(&self, number: usize) {
        let word = &self.0[number / u64::BITS as usize];
        word.set(word.get() | 1 << (number % u64::BITS as usize));
    }

    /// Takes all out.
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
