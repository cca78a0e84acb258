//! The event-index rule (section 2.7.10), in one place.

/// Whether moving an index from `old` to `new` (both modulo 2^16) passes `event`, so that the other side
/// asked to be notified of it.
#[must_use]
pub fn need_event(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}
