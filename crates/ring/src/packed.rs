//! The packed layout (section 2.8), shared by both sides.
//!
//! Sizes, descriptors, positions and event suppression.
pub(crate) mod chain;
mod cursor;
pub(crate) mod device;
pub(crate) mod driver;
pub(crate) mod position;

use crate::event::need_event_packed;
use paravane_spec::packed::{
    DESC_F_AVAIL, DESC_F_USED, DESC_SIZE, EVENT_F_DESC, EVENT_F_DISABLE, EVENT_F_ENABLE,
};
pub(crate) use position::Position;

/// Bytes of the descriptor ring.
pub(crate) const fn desc_bytes(size: u16) -> usize {
    DESC_SIZE * size as usize
}

/// The flags that say that a descriptor is available, or used.
const STATE: u16 = DESC_F_AVAIL | DESC_F_USED;

/// Flags of an available descriptor, in a lap with wrap counter `wrap`.
///
/// XORed with [`SWAP`] they are those of the other laps.
#[inline(always)]
pub(crate) const fn available_flags(wrap: bool) -> u16 {
    if wrap { DESC_F_AVAIL } else { DESC_F_USED }
}

/// Flags of a used descriptor, in a lap with wrap counter `wrap`.
///
/// XORed with [`SWAP`] they are those of the other laps.
#[inline(always)]
pub(crate) const fn used_flags(wrap: bool) -> u16 {
    if wrap { STATE } else { 0 }
}

/// What changes in [`available_flags`] and [`used_flags`] at the end of the ring.
pub(crate) const SWAP: u16 = STATE;

/// A descriptor as two little-endian words (section 2.8.13).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Descriptor {
    /// The address.
    pub(crate) addr: u64,
    /// Length in the low half, then buffer identifier, then flags.
    ///
    /// One store of this word with release makes a descriptor available or used whole; one load
    /// with acquire takes it whole.
    pub(crate) meta: u64,
}

impl Descriptor {
    /// Puts one together.
    #[inline(always)]
    pub(crate) fn new(addr: u64, len: u32, id: u16, flags: u16) -> Self {
        Self { addr, meta: meta(len, id, flags) }
    }

    /// Buffer identifier.
    #[inline(always)]
    pub(crate) fn id(self) -> u16 {
        (self.meta >> 32) as u16
    }
}

impl crate::chain::Descriptor for Descriptor {
    #[inline(always)]
    fn addr(self) -> u64 {
        self.addr
    }

    #[inline(always)]
    fn len(self) -> u32 {
        self.meta as u32
    }

    #[inline(always)]
    fn flags(self) -> u16 {
        flags(self.meta)
    }

    #[inline(always)]
    fn has(self, flags: u16) -> bool {
        let flags = meta(0, 0, flags);
        self.meta & flags == flags
    }
}

/// The second word of a descriptor.
#[inline(always)]
pub(crate) const fn meta(len: u32, id: u16, flags: u16) -> u64 {
    len as u64 | (id as u64) << 32 | (flags as u64) << 48
}

/// The flags in the second word of a descriptor.
#[inline(always)]
pub(crate) const fn flags(meta: u64) -> u16 {
    (meta >> 48) as u16
}

/// Whether a descriptor's `flags` hand it to the side that expects `expected`.
///
/// They make it available to a device whose lap makes available with `expected` (see
/// [`available_flags`]), or mark it used for a driver whose lap has [`used_flags`] `expected`.
#[inline(always)]
pub(crate) const fn matches(flags: u16, expected: u16) -> bool {
    flags & STATE == expected
}

/// What an event suppression structure (section 2.8.14) asks for.
///
/// It is stored and loaded as one word of 32 bits, so its two fields cannot be seen apart. That
/// fulfils the order that is asked of two accesses: the writer's offset before its flags, the
/// reader's flags before the offset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// A notification for everything.
    Enable,
    /// No notifications.
    Disable,
    /// A notification when the descriptor at this position is made available, or used.
    At(Position),
}

impl Event {
    /// Of a queue of `size`, with or without EVENT_IDX.
    ///
    /// What has no meaning asks for notifications: one too many does no harm.
    #[inline(always)]
    pub(crate) fn decode(word: u32, event_idx: bool, size: u16) -> Self {
        match (word >> 16) as u16 & (EVENT_F_DISABLE | EVENT_F_DESC) {
            EVENT_F_DISABLE => Self::Disable,
            EVENT_F_DESC if event_idx => {
                Position::from_off_wrap(word as u16, size).map_or(Self::Enable, Self::At)
            }
            _ => Self::Enable,
        }
    }

    /// The word to store. [`Event::At`] needs EVENT_IDX.
    #[inline(always)]
    pub(crate) fn encode(self, size: u16) -> u32 {
        match self {
            Self::Enable => u32::from(EVENT_F_ENABLE) << 16,
            Self::Disable => u32::from(EVENT_F_DISABLE) << 16,
            Self::At(position) => u32::from(EVENT_F_DESC) << 16 | u32::from(position.to_off_wrap(size)),
        }
    }

    /// Whether it asks for a notification of the move from `old` to `new`.
    ///
    /// The move is of a whole ring at most.
    #[inline(always)]
    pub(crate) fn wants(self, new: Position, old: Position, size: u16) -> bool {
        match self {
            Self::Enable => true,
            Self::Disable => false,
            Self::At(event) => need_event_packed(event, new, old, size),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chain::Descriptor as _;

    #[test]
    fn flags_tell_available_used_and_the_other_lap() {
        for wrap in [false, true] {
            assert_eq!(available_flags(!wrap), available_flags(wrap) ^ SWAP);
            assert_eq!(used_flags(!wrap), used_flags(wrap) ^ SWAP);
            let states = [available_flags(wrap), used_flags(wrap), available_flags(!wrap), used_flags(!wrap)];
            for (i, flags) in states.into_iter().enumerate() {
                assert_eq!(matches(flags | 7, available_flags(wrap)), i == 0);
                assert_eq!(matches(flags | 7, used_flags(wrap)), i == 1);
            }
        }
        // Zeroed memory is neither available nor used in the first lap.
        assert!(!matches(0, available_flags(true)) && !matches(0, used_flags(true)));
    }

    #[test]
    fn a_descriptor_comes_apart_as_it_was_put_together() {
        let desc = Descriptor::new(0x1122_3344_5566_7788, 0xaabb_ccdd, 0x1234, 0x8086);
        assert_eq!(desc.meta.to_le_bytes(), [0xdd, 0xcc, 0xbb, 0xaa, 0x34, 0x12, 0x86, 0x80]);
        assert_eq!((desc.len(), desc.id(), desc.flags()), (0xaabb_ccdd, 0x1234, 0x8086));
        assert!(desc.has(0x8080) && !desc.has(0x8081));
    }

    #[test]
    fn events_keep_their_meaning_and_nonsense_asks_for_notifications() {
        let size = 5;
        let at = |count| Position::START.advance(count, size);
        for event in [Event::Enable, Event::Disable, Event::At(at(4)), Event::At(at(7))] {
            assert_eq!(Event::decode(event.encode(size), true, size), event);
        }
        assert_eq!(Event::At(at(4)).encode(size).to_le_bytes(), [4, 0x80, 2, 0]);
        assert_eq!(Event::At(at(7)).encode(size).to_le_bytes(), [2, 0, 2, 0]);
        for nonsense in [0x0003_0000, 0x0002_0005, 0x0002_ffff, 0x0003_8002] {
            assert_eq!(Event::decode(nonsense, true, size), Event::Enable);
        }
        // Without EVENT_IDX a position cannot be asked for.
        assert_eq!(Event::decode(0x0002_8001, false, size), Event::Enable);
    }
}
