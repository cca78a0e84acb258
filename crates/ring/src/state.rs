//! Position of a queue's device side, to resume it elsewhere.
//!
//! In another process or on another host.
//!
//! ```text
//!   Queue --state--> State --vring_base--> (vhost-user GET_VRING_BASE ... SET_VRING_BASE)
//!                                              |
//!   Queue <--resume-- QueueConfig, State <-----+ from_vring_base
//! ```
//! A state is as hostile as the driver: it arrives over a socket or from a file.
use crate::{ConfigError, QueueError};
use paravane_spec::feature;

/// The position of a queue's device side with nothing in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Of a split queue. The used index is in the used ring.
    Split {
        /// The next entry of the available ring, modulo 2^16.
        avail: u16,
    },
    /// Of a packed queue. Index in the ring, and the wrap counter in bit 15.
    Packed {
        /// The next descriptor to take.
        avail: u16,
        /// The next descriptor to write as used.
        used: u16,
    },
}

impl State {
    /// The position in vhost-user's form (GET_VRING_BASE).
    ///
    /// A split queue's available index; a packed queue's next descriptor to take in the low half,
    /// to write as used in the high half.
    #[must_use]
    pub fn vring_base(self) -> u32 {
        match self {
            Self::Split { avail } => avail.into(),
            Self::Packed { avail, used } => u32::from(avail) | u32::from(used) << 16,
        }
    }

    /// The reverse of [`State::vring_base`] (SET_VRING_BASE).
    ///
    /// `features` are those negotiated for the queue.
    ///
    /// # Errors
    /// A split queue's index does not fit in 16 bits.
    pub fn from_vring_base(base: u32, features: u64) -> Result<Self, StateError> {
        if features & feature::RING_PACKED != 0 {
            return Ok(Self::Packed { avail: base as u16, used: (base >> 16) as u16 });
        }
        let avail = u16::try_from(base).map_err(|_| StateError::Base(base))?;
        Ok(Self::Split { avail })
    }

    pub(crate) fn layout(self) -> &'static str {
        match self {
            Self::Split { .. } => "split",
            Self::Packed { .. } => "packed",
        }
    }
}

/// Reason why a queue's state cannot be read, or resumed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StateError {
    /// The queue cannot be activated.
    #[error("{0}")]
    Config(#[from] ConfigError),
    /// A latched queue has no state.
    #[error("the queue has latched: {0}")]
    Latched(QueueError),
    /// Only a queue with nothing in flight has a state.
    #[error("{0} chains are in flight")]
    InFlight(u16),
    /// Completions are staged: call [`Queue::publish`](crate::device::Queue::publish) first.
    #[error("completions are staged but not published")]
    Unpublished,
    /// A vhost-user base that no split queue can have.
    #[error("the base {0:#x} of a split queue has more than 16 bits")]
    Base(u32),
    /// The state and the queue have different layouts.
    #[error("the state of a {state} queue does not fit a {queue} one")]
    Layout {
        /// Layout of the state.
        state: &'static str,
        /// Layout of the queue.
        queue: &'static str,
    },
    /// A packed position out of range.
    #[error("position {index} is outside a ring of {size}")]
    Index {
        /// The index.
        index: u16,
        /// Queue size.
        size: u16,
    },
    /// Two positions contradict the number of chains between them.
    #[error(
        "used position {used:#x} and available position {avail:#x} do not fit {in_flight} chains in flight"
    )]
    Distance {
        /// The used position.
        used: u16,
        /// The available position.
        avail: u16,
        /// Entries or descriptors between them, if all is well.
        in_flight: u16,
    },
    /// A split state contradicts the available ring.
    #[error("the driver's available index {idx} is not within {size} entries after {avail}")]
    Available {
        /// What the driver wrote.
        idx: u16,
        /// What was taken.
        avail: u16,
        /// Queue size.
        size: u16,
    },
    /// Tracking was asked for in a queue with IN_ORDER.
    #[error("IN_ORDER queues need no tracking: what is in flight follows the used position")]
    InOrder,
    /// A tracking region fails a check.
    #[error("the tracking region is corrupt: {what} is {value:#x}")]
    Region {
        /// The field.
        what: &'static str,
        /// Its value.
        value: u64,
    },
}
