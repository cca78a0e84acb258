//! Transmission flags: what a server can do with an export.

pub(super) const READ_ONLY: u16 = 1 << 1;
pub(super) const FLUSH: u16 = 1 << 2;
pub(super) const FUA: u16 = 1 << 3;
pub(super) const TRIM: u16 = 1 << 5;
pub(super) const WRITE_ZEROES: u16 = 1 << 6;
pub(super) const CAN_MULTI_CONN: u16 = 1 << 8;
pub(super) const CACHE: u16 = 1 << 10;
