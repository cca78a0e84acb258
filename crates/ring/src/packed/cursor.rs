//! A place in the descriptor ring as the device's loops want it.
//!
//! ```text
//!   bits 63 ... 32   turns of the ring since the start, modulo 2^32; even: wrap counter 1
//!   bits 31 ... 0    bytes to the ring's end, negative: -128 ... -16 in a ring of 8
//! ```
//! It says the same as a [`Position`] and counts further, so that a whole ring differs from none.
//! Additions move it on, and the carry from the low half is the turn: no loop divides or compares
//! with the size. It is one word, to be loaded and stored whole: a copy in other parts than were
//! just stored would wait for the stores.
use super::{Position, used_flags};
use paravane_spec::packed::{DESC_F_USED, DESC_SIZE};

/// A place in the ring, with its lap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Cursor(u64);

impl Cursor {
    /// The place that `position` names.
    pub(super) fn new(position: Position, size: u16) -> Self {
        let start = Self((1 << 32) - bytes(size));
        let turn = if position.wrap(size) { 0 } else { 1 << 32 };
        Self(start.0 + bytes(position.index(size)) + turn)
    }

    /// All of it, never 0.
    #[inline(always)]
    pub(super) fn word(self) -> u64 {
        self.0
    }

    /// Reverses [`Cursor::word`].
    #[inline(always)]
    pub(super) fn from_word(word: u64) -> Self {
        Self(word)
    }

    /// What this place is called outside.
    #[inline(always)]
    pub(super) fn position(self, size: u16) -> Position {
        Position::new(size - self.to_end() as u16, self.wrap(), size)
    }

    /// Bytes from the ring's end, below 0.
    #[inline(always)]
    pub(super) fn at(self) -> isize {
        self.0 as i32 as isize
    }

    /// Descriptors from here to the ring's end.
    #[inline(always)]
    pub(super) fn to_end(self) -> usize {
        self.at().unsigned_abs() / DESC_SIZE
    }

    /// The wrap counter here.
    #[inline(always)]
    fn wrap(self) -> bool {
        self.0 & 1 << 32 == 0
    }

    /// The flags that mark a descriptor used here.
    #[inline(always)]
    pub(super) fn used(self) -> u16 {
        used_flags(self.wrap())
    }

    /// The flags that make a descriptor available here.
    #[inline(always)]
    pub(super) fn available(self) -> u16 {
        // Those of a used descriptor are equal, and one of them differs while it is available.
        self.used() ^ DESC_F_USED
    }

    /// The place `count` descriptors on, a whole ring of `size` at most.
    #[inline(always)]
    pub(super) fn advance(self, count: u16, size: u16) -> Self {
        self.advance_bytes(bytes(count), size)
    }

    /// Moves on by `bytes` of descriptors, a whole ring of `size` at most.
    ///
    /// Returns whether another lap has begun.
    #[inline(always)]
    pub(super) fn move_on(&mut self, bytes_on: usize, size: u16) -> bool {
        let next = Self(self.0.wrapping_add(bytes_on as u64));
        let laps = next.0 as i32 >= 0;
        *self = if laps { next.at_front(size) } else { next };
        laps
    }

    /// The place in this lap that lies `at` from the ring's end.
    #[inline(always)]
    pub(super) fn in_lap(self, at: isize) -> Self {
        Self(self.0 >> 32 << 32 | u64::from(at as u32))
    }

    /// The ring's front in the next lap.
    #[inline(always)]
    pub(super) fn next_lap(self, size: u16) -> Self {
        // The end of this lap.
        Self((self.0 | u64::from(u32::MAX)).wrapping_add(1)).at_front(size)
    }

    /// The place in this lap that lies `at` from the ring's end, not before this one.
    #[inline(always)]
    pub(super) fn advance_to(self, at: isize, size: u16) -> Self {
        self.advance_bytes((at - self.at()) as u64, size)
    }

    #[inline(always)]
    fn advance_bytes(self, bytes_on: u64, size: u16) -> Self {
        let next = Self(self.0.wrapping_add(bytes_on));
        if next.0 as i32 >= 0 { next.at_front(size) } else { next }
    }

    /// A place at or beyond the ring's end, where it lies in the next lap.
    #[inline(always)]
    fn at_front(self, size: u16) -> Self {
        // The turn is counted by the carry; what is left is to begin at the front again.
        Self(self.0.wrapping_sub(bytes(size)).wrapping_add(1 << 32))
    }

    /// Descriptors from here on to `to`, which is not before this place.
    #[inline(always)]
    pub(super) fn distance(self, to: Self, size: u16) -> u32 {
        let turns = (to.0 >> 32) as u32;
        let turns = turns.wrapping_sub((self.0 >> 32) as u32);
        let bytes = (to.at() - self.at()) / DESC_SIZE as isize;
        turns.wrapping_mul(size.into()).wrapping_add_signed(bytes as i32)
    }
}

/// Bytes of `count` descriptors.
#[inline(always)]
const fn bytes(count: u16) -> u64 {
    count as u64 * DESC_SIZE as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packed::available_flags;

    #[test]
    #[cfg_attr(miri, ignore = "arithmetic without unsafe code; takes the interpreter too long")]
    fn it_goes_where_a_position_goes() {
        for size in [1, 2, 3, 7, 256, 32_768] {
            for step in [1, 2, size / 2, size].into_iter().filter(|&step| (1..=size).contains(&step)) {
                let (mut position, mut cursor) = (Position::START, Cursor::new(Position::START, size));
                let start = cursor;
                for steps in 0..5 * u32::from(size).min(300) {
                    assert_eq!(cursor.position(size), position);
                    assert_eq!(Cursor::new(position, size).position(size), position);
                    let to_end = size - position.index(size);
                    assert_eq!(cursor.to_end(), usize::from(to_end));
                    assert_eq!(cursor.at(), -(bytes(to_end) as isize));
                    let wrap = position.wrap(size);
                    assert_eq!(
                        (cursor.available(), cursor.used()),
                        (available_flags(wrap), used_flags(wrap))
                    );
                    assert_eq!(start.distance(cursor, size), steps * u32::from(step));
                    position = position.advance(step.into(), size);
                    cursor = cursor.advance(step, size);
                }
            }
        }
    }

    #[test]
    fn a_whole_ring_is_not_none() {
        for size in [1, 2, 3, 8] {
            let mut from = Cursor::new(Position::START.advance(1, size), size);
            for _ in 0..4 * size {
                let to = from.advance(size, size);
                assert_ne!(from, to);
                assert_eq!((from.distance(to, size), from.distance(from, size)), (size.into(), 0));
                from = from.advance(1, size);
            }
        }
    }

    #[test]
    fn the_turns_wrap() {
        let last = Cursor(u64::MAX - 15);
        let next = last.advance(1, 4);
        assert_eq!((next.0, last.distance(next, 4)), (0xffff_ffc0, 1));
        assert_eq!((last.wrap(), next.wrap()), (false, true));
    }
}
