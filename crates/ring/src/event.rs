//! The event-index rule (sections 2.7.10 and 2.8.14), in one place.
use crate::packed::position::Position;

/// Whether moving an index from `old` to `new` passes `event`.
///
/// Both are modulo 2^16. If it does, the other side asked to be notified.
///
/// `event` asks for a notification when the entry of that number is filled, which moves the index
/// from `event` to `event + 1`. So the question is whether `event` is one of `old, old + 1, ...,
/// new - 1`, and that is: whether it lies less far behind `new - 1` than `old` is long. All
/// differences are modulo 2^16, and a move is never longer than the queue, so nothing is ambiguous.
#[must_use]
#[inline]
pub fn need_event(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

/// Whether moving from `old` to `new` passes `event` in a packed ring.
///
/// Positions of a packed ring count descriptors modulo twice its size (see [`Position`]), and a
/// move is never longer than the ring: no more can be made available, or used, than there is. So no
/// two descriptors of one move have the same position, and `event` is one of `old, old + 1, ...,
/// new - 1` if, and only if, it lies less far beyond `old` than `new` does, modulo twice the size:
///
/// ```text
///   distance(old, event) < distance(old, new)        distance(a, b) = (b - a) mod 2 size
/// ```
///
/// The split rule counts the same two distances backwards from `new - 1`, modulo 2^16. Backwards or
/// forwards is the same, as the positions of the move are the same; the modulus is not: a packed
/// event repeats after two laps, so one that was left behind is passed again after twice the size.
#[must_use]
#[inline]
pub(crate) fn need_event_packed(event: Position, new: Position, old: Position, size: u16) -> bool {
    old.distance(event, size) < old.distance(new, size)
}

#[cfg(test)]
mod tests {
    use super::{need_event, need_event_packed};
    use crate::packed::position::Position;

    /// The definition: is `event` one of the entries that were filled?
    fn passes(event: u16, old: u16, count: u16) -> bool {
        (0..count).any(|i| old.wrapping_add(i) == event)
    }

    #[test]
    #[cfg_attr(miri, ignore = "exhaustive: too long for the interpreter")]
    fn it_is_right_at_every_position_around_the_event() {
        for event in 0..=u16::MAX {
            for count in [1, 2, 3, 255] {
                for before in [0, 1, count - 1, count, count + 1] {
                    let old = event.wrapping_sub(before);
                    assert_eq!(
                        need_event(event, old.wrapping_add(count), old),
                        passes(event, old, count),
                        "event {event}, {old} + {count}"
                    );
                }
            }
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "exhaustive: too long for the interpreter")]
    fn it_is_right_for_every_event_around_the_wrap() {
        for old in (0..4).chain(65_532..=65_535).chain([32_767, 32_768]) {
            for count in [0, 1, 2, 3, 255, 32_768] {
                for event in 0..=u16::MAX {
                    let expected = event.wrapping_sub(old) < count;
                    assert_eq!(need_event(event, old.wrapping_add(count), old), expected);
                }
            }
        }
    }

    #[test]
    fn one_beside_the_wrap() {
        assert!(need_event(65_535, 0, 65_535));
        assert!(!need_event(0, 0, 65_535));
        assert!(need_event(0, 1, 65_535));
        assert!(!need_event(65_534, 1, 65_535));
        assert!(!need_event(1, 1, 65_535));
    }

    #[test]
    #[cfg_attr(miri, ignore = "exhaustive: too long for the interpreter")]
    fn packed_it_is_right_at_every_position() {
        for size in [1u16, 2, 3, 4, 7, 16, 255, 256] {
            let laps = 2 * u32::from(size);
            for old in 0..laps {
                let old = Position::START.advance(old, size);
                for count in [0, 1, 2, 3, u32::from(size) - 1, size.into()] {
                    if count > size.into() {
                        continue;
                    }
                    let new = old.advance(count, size);
                    for event in 0..laps {
                        let event = Position::START.advance(event, size);
                        let passes = (0..count).any(|i| old.advance(i, size) == event);
                        assert_eq!(need_event_packed(event, new, old, size), passes);
                    }
                }
            }
        }
    }

    /// All 2^16 positions of the largest ring, at the batches of the split rule's test.
    #[test]
    #[cfg_attr(miri, ignore = "exhaustive: too long for the interpreter")]
    fn packed_it_is_right_around_the_event_in_the_largest_ring() {
        let size = 32_768;
        for event in 0..=u32::from(u16::MAX) {
            let at = Position::START.advance(event, size);
            for count in [1, 2, 3, 255] {
                for before in [0, 1, count - 1, count, count + 1] {
                    let old = at.advance(2 * u32::from(size) - before, size);
                    let new = old.advance(count, size);
                    assert_eq!(need_event_packed(at, new, old, size), before < count);
                }
            }
        }
    }
}
