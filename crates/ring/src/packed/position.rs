//! A place in the ring and its lap, in one number.
//!
//! The specification gives each side an index into the ring and a wrap counter of one bit that
//! starts at 1 and flips at the end of the ring. Both come from one number here, a [`Position`]
//! that counts descriptors modulo twice the size:
//!
//! ```text
//!   position   0 ....... size - 1 | size ....... 2 size - 1 | 0 ...
//!   index      0 ....... size - 1 | 0 .............. size-1 | 0 ...
//!   wrap               1          |            0            | 1 ...
//! ```
//!
//! Nothing can be out of step then, and distances between positions are plain subtractions modulo
//! twice the size. The size need not be a power of two (section 2.8.10.1).
use paravane_spec::packed::EVENT_WRAP;

/// A place in the ring together with its lap, of two; see the module's text.
///
/// It is less than twice the size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Position(u32);

impl Position {
    /// Where both sides start: index 0, wrap counter 1.
    pub(crate) const START: Self = Self(0);

    /// The position of `index` (less than `size`) in a lap with wrap counter `wrap`.
    #[inline(always)]
    pub(crate) const fn new(index: u16, wrap: bool, size: u16) -> Self {
        Self(index as u32 + if wrap { 0 } else { size as u32 })
    }

    /// Its index in the ring.
    #[inline(always)]
    pub(crate) const fn index(self, size: u16) -> u16 {
        (if self.wrap(size) { self.0 } else { self.0 - size as u32 }) as u16
    }

    /// Its lap's wrap counter.
    #[inline(always)]
    pub(crate) const fn wrap(self, size: u16) -> bool {
        self.0 < size as u32
    }

    /// The position `count` descriptors on; `count` is at most twice the size.
    #[inline(always)]
    pub(crate) const fn advance(self, count: u32, size: u16) -> Self {
        let (next, laps) = (self.0 + count, 2 * size as u32);
        Self(if next < laps { next } else { next - laps })
    }

    /// Descriptors from here on to `to`, modulo twice the size.
    #[inline(always)]
    pub(crate) const fn distance(self, to: Self, size: u16) -> u32 {
        if to.0 >= self.0 { to.0 - self.0 } else { to.0 + 2 * size as u32 - self.0 }
    }

    /// The index, and the wrap counter in bit 15.
    ///
    /// So event suppression and migration have it.
    #[inline(always)]
    pub(crate) const fn to_off_wrap(self, size: u16) -> u16 {
        self.index(size) | if self.wrap(size) { EVENT_WRAP } else { 0 }
    }

    /// Reverses [`Position::to_off_wrap`].
    ///
    /// `None` if the index is outside the ring.
    #[inline(always)]
    pub(crate) const fn from_off_wrap(off_wrap: u16, size: u16) -> Option<Self> {
        let (index, wrap) = (off_wrap & !EVENT_WRAP, off_wrap & EVENT_WRAP != 0);
        if index < size { Some(Self::new(index, wrap, size)) } else { None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "arithmetic without unsafe code; takes the interpreter too long")]
    fn index_and_wrap_counter_go_as_the_specification_counts_them() {
        for size in [1, 2, 3, 7, 256, 1000, 32768] {
            let (mut index, mut wrap) = (0, true);
            let mut position = Position::START;
            for _ in 0..u32::from(size) * 5 {
                assert_eq!((position.index(size), position.wrap(size)), (index, wrap));
                assert_eq!(Position::new(index, wrap, size), position);
                assert_eq!(Position::from_off_wrap(position.to_off_wrap(size), size), Some(position));
                position = position.advance(1, size);
                index += 1;
                if index == size {
                    (index, wrap) = (0, !wrap);
                }
            }
        }
    }

    #[test]
    fn a_distance_is_what_was_advanced() {
        for size in [1, 2, 3, 7, 32] {
            for from in 0..2 * u32::from(size) {
                for count in 0..2 * u32::from(size) {
                    let to = Position(from).advance(count, size);
                    assert!(to.0 < 2 * u32::from(size));
                    assert_eq!(Position(from).distance(to, size), count);
                }
            }
        }
    }
}
