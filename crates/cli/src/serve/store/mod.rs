//! Messages of a descriptor store: see [`text`].
pub(crate) mod datagram;
pub(crate) mod text;
