//! Which part of zeroing may leave a hole: whole units of [`HOLE`] only.
//!
//! A server that frees blocks has to get this right beside writes to the rest of a block.
//! QEMU 7.2 does not in qcow2 images: see [`nbd`](crate::nbd).

/// Largest cluster of a qcow2 image in bytes, and what holes consist of.
pub(super) const HOLE: u64 = 2 << 20;

/// The first request for a range: its length, and whether it may leave a hole.
pub(super) fn first(offset: u64, len: u64) -> (u64, bool) {
    let head = offset.wrapping_neg() % HOLE;
    match len.checked_sub(head) {
        Some(rest) if rest >= HOLE && head == 0 => (len - len % HOLE, true),
        Some(rest) if rest >= HOLE => (head, false),
        _ => (len, false),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn ends_are_zeroes_and_the_middle_is_a_hole() {
        assert_eq!(first(0, HOLE), (HOLE, true));
        assert_eq!(first(HOLE, 3 * HOLE + 512), (3 * HOLE, true));
        assert_eq!(first(512, HOLE), (HOLE, false));
        assert_eq!(first(512, 2 * HOLE), (HOLE - 512, false));
        assert_eq!(first(HOLE - 512, 512), (512, false));
        assert_eq!(first(0, HOLE - 512), (HOLE - 512, false));
    }

    proptest! {
        #[test]
        fn requests_are_the_range_and_at_most_three(offset in 0..5 * HOLE, len in 1..5 * HOLE) {
            let (mut at, mut count, mut holes) = (offset, 0, 0);
            while at < offset + len {
                let (part, is_hole) = first(at, offset + len - at);
                prop_assert!(part > 0 && part <= offset + len - at);
                if is_hole {
                    prop_assert!(at % HOLE == 0 && part % HOLE == 0);
                    holes += part / HOLE;
                }
                (at, count) = (at + part, count + 1);
            }
            prop_assert!(count <= 3);
            let whole = ((offset + len) / HOLE).saturating_sub(offset.div_ceil(HOLE));
            prop_assert_eq!(holes, whole);
        }
    }
}
