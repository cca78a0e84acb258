//! Which heads are in flight: one bit for each descriptor of the queue.
use alloc::boxed::Box;
use alloc::vec;

/// The set of heads that were handed out and have not come back.
#[derive(Debug)]
pub(crate) struct InFlight {
    words: Box<[u64]>,
}

impl InFlight {
    /// Nothing in flight, room for heads below `size`.
    pub(crate) fn new(size: u16) -> Self {
        Self { words: vec![0; usize::from(size).div_ceil(64)].into_boxed_slice() }
    }

    /// Whether `head` is in flight; what lies outside the queue never is.
    #[inline]
    pub(crate) fn contains(&self, head: u16) -> bool {
        self.words.get(usize::from(head) / 64).is_some_and(|word| word >> (head % 64) & 1 != 0)
    }

    /// Takes `head` in; `false` if it was in flight already, or lies outside the queue's words.
    #[inline]
    pub(crate) fn insert(&mut self, head: u16) -> bool {
        let bit = 1 << (head % 64);
        match self.words.get_mut(usize::from(head) / 64) {
            Some(word) if *word & bit == 0 => {
                *word |= bit;
                true
            }
            _ => false,
        }
    }

    /// Takes `head` out; `false` if it was not in flight.
    #[inline]
    pub(crate) fn remove(&mut self, head: u16) -> bool {
        let bit = 1 << (head % 64);
        match self.words.get_mut(usize::from(head) / 64) {
            Some(word) if *word & bit != 0 => {
                *word &= !bit;
                true
            }
            _ => false,
        }
    }

    /// Forgets all: after a queue has latched, nothing can be completed.
    pub(crate) fn clear(&mut self) {
        self.words.fill(0);
    }

    /// The words, for the fast path. Bit `head % 64` of word `head / 64` stands for `head`; there is a word
    /// for each head below the size.
    #[inline]
    pub(crate) fn as_mut_ptr(&mut self) -> *mut u64 {
        self.words.as_mut_ptr()
    }
}

#[cfg(test)]
mod tests {
    use super::InFlight;

    #[test]
    fn a_head_is_in_at_most_once() {
        for size in [1, 2, 64, 128, 32768] {
            let mut set = InFlight::new(size);
            for head in [0, size / 2, size - 1] {
                assert!(!set.contains(head));
                assert!(!set.remove(head));
                assert!(set.insert(head));
                assert!(!set.insert(head));
                assert!(set.contains(head));
                assert!(set.remove(head));
                assert!(!set.remove(head));
            }
        }
    }

    #[test]
    fn heads_outside_are_never_in() {
        let mut set = InFlight::new(128);
        assert!(!set.insert(128));
        assert!(!set.contains(u16::MAX));
        assert!(!set.remove(u16::MAX));
    }

    #[test]
    fn clear_forgets_all() {
        let mut set = InFlight::new(256);
        assert!(set.insert(3) && set.insert(255));
        set.clear();
        assert!(!set.contains(3) && !set.contains(255));
    }
}
