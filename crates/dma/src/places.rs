//! A set of places of the cache.
use std::cell::Cell;

/// How many there are: as many as the pages of a queue's buffers, often enough. 16 KiB, of which what is in use matters.
pub(crate) const PLACES: usize = 256;
const WORDS: usize = PLACES / u64::BITS as usize;

/// Numbers below [`PLACES`], a bit each.
#[derive(Debug)]
pub(crate) struct Places([Cell<u64>; WORDS]);

impl Places {
    pub(crate) fn new() -> Self {
        Self([const { Cell::new(0) }; WORDS])
    }

    #[inline(always)]
    fn word(&self, number: usize) -> (&Cell<u64>, u64) {
        // Numbers are below that of the places, so the remainder changes nothing, and needs no check.
        (&self.0[number % PLACES / u64::BITS as usize], 1 << (number % u64::BITS as usize))
    }

    /// Puts a number in.
    #[inline(always)]
    pub(crate) fn insert(&self, number: usize) {
        let (word, bit) = self.word(number);
        let old = word.get();
        // Not stored again: the next one to look would wait for the store.
        if old & bit == 0 {
            word.set(old | bit);
        }
    }

    /// Takes a number out, and says whether it was there.
    #[inline(always)]
    pub(crate) fn remove(&self, number: usize) -> bool {
        let (word, bit) = self.word(number);
        let old = word.get();
        word.set(old & !bit);
        old & bit != 0
    }

    #[inline(always)]
    pub(crate) fn is_empty(&self) -> bool {
        self.0.iter().fold(0, |all, word| all | word.get()) == 0
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
        let places = Places::new();
        assert!(places.is_empty());
        let numbers = [0, 1, 63, 64, 200, PLACES - 1];
        for number in numbers.into_iter().chain(numbers) {
            places.insert(number);
        }
        assert!(places.remove(63) && !places.remove(63) && !places.remove(2) && !places.is_empty());
        let mut out = Vec::new();
        places.drain(|number| out.push(number));
        assert_eq!(out, [0, 1, 64, 200, PLACES - 1]);
        assert!(places.is_empty());
    }
}
