//! The device side of a ring, of either layout.
use crate::{Order, QueueError, packed, split};

/// The ring of a queue.
#[derive(Debug)]
pub(crate) enum Layout<O> {
    Split(split::device::Ring<O>),
    Packed(packed::device::Ring<O>),
}

impl<O: Order> Layout<O> {
    /// See [`crate::device::Queue::publish`].
    pub(crate) fn publish(&mut self) -> Result<bool, QueueError> {
        match self {
            Self::Split(ring) => ring.publish(),
            Self::Packed(ring) => ring.publish(),
        }
    }

    /// See [`crate::device_ring::DeviceRing::paths`].
    pub(crate) fn close_fast_paths(&mut self) {
        match self {
            Self::Split(ring) => ring.close_fast_paths(),
            Self::Packed(ring) => ring.close_fast_paths(),
        }
    }
}

impl<O> Layout<O> {
    /// Its name in errors.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Split(_) => "split",
            Self::Packed(_) => "packed",
        }
    }
}
