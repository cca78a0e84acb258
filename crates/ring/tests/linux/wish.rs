//! Notifications that a side has asked for, by the definition.
//!
//! Read from memory as it stands, and decided one position after the other. No modular arithmetic
//! is shared with the rings.
use crate::peer::Peer;
use paravane_ring::QueueAddresses;
use paravane_spec::feature::{EVENT_IDX, RING_PACKED};
use paravane_spec::packed::{
    EVENT_F_DESC, EVENT_F_DISABLE, EVENT_F_ENABLE, EVENT_FLAGS, EVENT_OFF_WRAP, EVENT_WRAP,
};

/// What stands in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wish {
    Always,
    Never,
    /// When the entry of this number (modulo 2^16) of a split ring is filled.
    Entry(u16),
    /// When the descriptor at this offset is filled in the lap of this wrap counter.
    Descriptor {
        offset: u16,
        wrap: bool,
        size: u16,
    },
}

impl Wish {
    /// The driver's, for interrupts.
    pub(crate) fn of_driver(peer: &Peer, at: &QueueAddresses, features: u64) -> Self {
        let event = at.driver + 4 + 2 * u64::from(at.size);
        Self::read(peer, at.driver, event, at.size, features)
    }

    /// The device's, for kicks.
    pub(crate) fn of_device(peer: &Peer, at: &QueueAddresses, features: u64) -> Self {
        let event = at.device + 4 + 8 * u64::from(at.size);
        Self::read(peer, at.device, event, at.size, features)
    }

    fn read(peer: &Peer, area: u64, event: u64, size: u16, features: u64) -> Self {
        let event_idx = features & EVENT_IDX != 0;
        if features & RING_PACKED != 0 {
            let off_wrap = peer.u16_at(area + EVENT_OFF_WRAP as u64);
            return match peer.u16_at(area + EVENT_FLAGS as u64) {
                EVENT_F_ENABLE => Self::Always,
                EVENT_F_DISABLE => Self::Never,
                EVENT_F_DESC if event_idx => Self::Descriptor {
                    offset: off_wrap & !EVENT_WRAP,
                    wrap: off_wrap & EVENT_WRAP != 0,
                    size,
                },
                flags => panic!("event flags {flags}"),
            };
        }
        match peer.u16_at(area) {
            _ if event_idx => Self::Entry(peer.u16_at(event)),
            0 => Self::Always,
            1 => Self::Never,
            flags => panic!("flags {flags}"),
        }
    }

    /// Linux's answer.
    ///
    /// Without an event index it looks at the flag, whether anything is new or not.
    pub(crate) fn as_linux_has_it(self, old: u64, new: u64) -> Option<bool> {
        if self == Self::Always { Some(true) } else { self.covers(old, new) }
    }

    /// Whether filling positions `old` up to but not including `new` notifies.
    ///
    /// Positions count from 0, in 64 bits. `None` where that is open: an offset and a wrap counter
    /// name a position only within two laps of a packed ring, and a driver that did not ask for
    /// longer than a lap cannot tell which one is meant.
    pub(crate) fn covers(self, old: u64, new: u64) -> Option<bool> {
        match self {
            Self::Always => Some(new > old),
            Self::Never => Some(false),
            Self::Entry(entry) => Some((old..new).any(|position| position as u16 == entry)),
            Self::Descriptor { size, .. } if new - old > size.into() => None,
            Self::Descriptor { offset, wrap, size } => Some((old..new).any(|position| {
                let size = u64::from(size);
                position % size == u64::from(offset) && (position / size).is_multiple_of(2) == wrap
            })),
        }
    }
}
