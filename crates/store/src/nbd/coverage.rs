//! Which bytes of a read have arrived: each one exactly once.

/// Most separate pieces of one read that are kept apart.
///
/// Servers send chunks in order, or a few at a time.
const PIECES: usize = 1024;

/// Ranges that have arrived, of one read.
#[derive(Clone, Debug, Default)]
pub(super) struct Coverage {
    /// End of the range that begins at 0.
    front: u64,
    /// Ranges behind it as (start, end): sorted, apart.
    apart: Vec<(u64, u64)>,
}

impl Coverage {
    /// Nothing has arrived.
    pub(super) fn clear(&mut self) {
        self.front = 0;
        self.apart.clear();
    }

    /// Adds a range that lies in the read and is not empty.
    ///
    /// `false` if a byte of it was there before, or if there are too many pieces.
    pub(super) fn add(&mut self, start: u64, end: u64) -> bool {
        debug_assert!(start < end);
        if start < self.front {
            return false;
        }
        let place = self.apart.partition_point(|&(other, _)| other < start);
        let overlaps_last = place > 0 && self.apart[place - 1].1 > start;
        let overlaps_next = self.apart.get(place).is_some_and(|&(other, _)| other < end);
        if overlaps_last || overlaps_next {
            return false;
        }
        if start == self.front {
            self.front = end;
            let joined = self.apart.first().filter(|&&(other, _)| other == end).map(|&(_, end)| end);
            if let Some(end) = joined {
                self.front = end;
                self.apart.remove(0);
            }
            return true;
        }
        let joins_last = place > 0 && self.apart[place - 1].1 == start;
        let joins_next = self.apart.get(place).is_some_and(|&(other, _)| other == end);
        match (joins_last, joins_next) {
            (true, true) => {
                self.apart[place - 1].1 = self.apart[place].1;
                self.apart.remove(place);
            }
            (true, false) => self.apart[place - 1].1 = end,
            (false, true) => self.apart[place].0 = start,
            (false, false) if self.apart.len() == PIECES => return false,
            (false, false) => self.apart.insert(place, (start, end)),
        }
        true
    }

    /// Whether the first `len` bytes have arrived, which is the whole read.
    pub(super) fn is_whole(&self, len: u64) -> bool {
        self.front == len && self.apart.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn it_is_a_set_of_bytes(ranges in prop::collection::vec((0_u64..64, 1_u64..20), 0..40)) {
            let mut coverage = Coverage::default();
            let mut bytes = [false; 84];
            for (start, len) in ranges {
                let range = start as usize..(start + len) as usize;
                let is_new = bytes[range.clone()].iter().all(|there| !there);
                prop_assert_eq!(coverage.add(start, start + len), is_new);
                if is_new {
                    bytes[range].fill(true);
                }
                let front = bytes.iter().position(|there| !there).unwrap_or(bytes.len());
                prop_assert_eq!(coverage.front, front as u64);
                let behind = bytes[front..].iter().any(|there| *there);
                prop_assert_eq!(coverage.is_whole(front as u64), !behind);
            }
        }
    }

    #[test]
    fn pieces_are_bounded() {
        let mut coverage = Coverage::default();
        for piece in 1..=PIECES as u64 {
            assert!(coverage.add(2 * piece, 2 * piece + 1));
        }
        assert!(!coverage.add(1 << 40, (1 << 40) + 1));
        assert!(coverage.add(0, 1) && coverage.add(1, 2));
    }
}
