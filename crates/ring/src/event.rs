//! The event-index rule (section 2.7.10), in one place.

/// Whether moving an index from `old` to `new` (both modulo 2^16) passes `event`, so that the other side
/// asked to be notified of it.
///
/// `event` asks for a notification when the entry of that number is filled, which moves the index from
/// `event` to `event + 1`. So the question is whether `event` is one of `old, old + 1, ..., new - 1`, and
/// that is: whether it lies less far behind `new - 1` than `old` is long. All differences are modulo 2^16,
/// and a move is never longer than the queue, so nothing is ambiguous.
#[must_use]
#[inline]
pub fn need_event(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

#[cfg(test)]
mod tests {
    use super::need_event;

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
}
