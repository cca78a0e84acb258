//! The device side of a ring, of either layout.
use crate::{packed, split};

/// The ring of a queue.
#[derive(Debug)]
pub(crate) enum Layout<O> {
    Split(split::device::Ring<O>),
    Packed(packed::device::Ring<O>),
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
