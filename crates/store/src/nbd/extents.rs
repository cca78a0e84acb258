//! What a server says of holes and zeroes in a range.
use crate::StoreExtent;

/// `NBD_STATE_HOLE` of `base:allocation`.
const HOLE: u32 = 1 << 0;
/// `NBD_STATE_ZERO` of `base:allocation`.
const ZERO: u32 = 1 << 1;

/// The list of a range of `len` bytes at `offset`, from lengths and flags as the server sent them.
///
/// Parts of one kind that follow one another are joined. The last one may go beyond the range, where
/// it is cut. What the server does not reach is left out.
pub(super) fn joined(offset: u64, len: u64, parts: &[(u64, u32)]) -> Vec<StoreExtent> {
    let (mut at, mut left) = (offset, len);
    let mut found: Vec<StoreExtent> = Vec::new();
    for &(part, flags) in parts {
        let len = part.min(left);
        if len == 0 {
            break;
        }
        let new = StoreExtent { offset: at, len, hole: flags & HOLE != 0, zeroes: flags & ZERO != 0 };
        match found.last_mut() {
            Some(last) if (last.hole, last.zeroes) == (new.hole, new.zeroes) => last.len += len,
            _ => found.push(new),
        }
        (at, left) = (at + len, left - len);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_joined_and_cut() {
        let hole = StoreExtent::hole(512, 1024);
        let data = StoreExtent::data(1536, 512);
        let zeroes = StoreExtent { hole: false, ..StoreExtent::hole(2048, 512) };
        let found = joined(512, 2048, &[(512, 3), (512, 3), (512, 0), (1 << 40, 2), (512, 0)]);
        assert_eq!(found, [hole, data, zeroes]);
        // Contexts that are added to the flags some day change nothing.
        assert_eq!(joined(512, 1024, &[(1024, 4 | 3)]), [hole]);
        assert_eq!(joined(512, 4096, &[(1024, 3)]), [hole], "the rest is asked for again");
        assert_eq!(joined(0, u64::MAX, &[(u64::MAX, 0), (u64::MAX, 3)]), [StoreExtent::data(0, u64::MAX)]);
        assert_eq!(joined(0, 0, &[(512, 3)]), []);
    }
}
