//! Console device (section 5.3), with one port.
//!
//! Features are in section 5.3.3, the configuration space in 5.3.4.
use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Feature: `cols` and `rows` are the size of the console.
pub const F_SIZE: u64 = 1 << 0;

/// Queue that the device fills: input of port 0.
pub const RECEIVE: u16 = 0;
/// Queue that the device empties: output of port 0.
pub const TRANSMIT: u16 = 1;

/// Configuration space (section 5.3.4).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Config {
    /// Columns, with `F_SIZE`.
    pub cols: U16,
    /// Rows, with `F_SIZE`.
    pub rows: U16,
    /// Number of ports, with several.
    pub max_nr_ports: U32,
    /// A character that is written at once, with emergency writes.
    pub emerg_wr: U32,
}
