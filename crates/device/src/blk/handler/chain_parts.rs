//! Parts of a chain.
use paravane_ring::Segment;
use paravane_ring::device::Chain;

/// A chain with its readable and its writable segments.
pub(super) type ChainParts<'a> = (&'a Chain, &'a [Segment], &'a [Segment]);
