//! What can go wrong with guest memory.
use crate::Access;
use thiserror::Error;

/// An access that failed. Bytes before the failing one may have been transferred; `done` says how many.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum DmaError {
    /// {addr:#x}: no memory there ({len} bytes wanted, {done} done)
    #[error("{addr:#x}: no memory there ({len} bytes wanted, {done} done)")]
    Unmapped {
        /// First byte that is not there.
        addr: u64,
        /// Length of the whole access.
        len: usize,
        /// Bytes transferred before.
        done: usize,
    },
    /// {addr:#x}: the device may not {access:?} there ({len} bytes wanted, {done} done)
    #[error("{addr:#x}: the device may not {access:?} there ({len} bytes wanted, {done} done)")]
    Denied {
        /// First byte that is forbidden.
        addr: u64,
        /// What was tried.
        access: Access,
        /// Length of the whole access.
        len: usize,
        /// Bytes transferred before.
        done: usize,
    },
    /// {addr:#x} plus {len} bytes wraps around the end of the address space
    #[error("{addr:#x} plus {len} bytes wraps around the end of the address space")]
    Wraps {
        /// First byte.
        addr: u64,
        /// Length.
        len: usize,
    },
    /// {addr:#x}, {len} bytes: not contiguous in host memory, and one piece was asked for
    #[error("{addr:#x}, {len} bytes: not contiguous in host memory, and one piece was asked for")]
    NotContiguous {
        /// First byte.
        addr: u64,
        /// Length.
        len: usize,
    },
}

/// Why guest memory could not be made or arranged.
#[derive(Debug, Error)]
pub enum MemoryError {
    /// a region of {size} bytes at {gpa:#x}: size and address must be multiples of 4096, and the size not 0
    #[error("a region of {size} bytes at {gpa:#x}: size and address must be multiples of 4096, and the size not 0")]
    Unaligned {
        /// Guest-physical address.
        gpa: u64,
        /// Size in bytes.
        size: u64,
    },
    /// the regions at {first:#x} and {second:#x} overlap
    #[error("the regions at {first:#x} and {second:#x} overlap")]
    Overlap {
        /// Start of the lower one.
        first: u64,
        /// Start of the upper one.
        second: u64,
    },
    /// a region of {size} bytes at {gpa:#x} wraps around the end of the address space
    #[error("a region of {size} bytes at {gpa:#x} wraps around the end of the address space")]
    Wraps {
        /// Guest-physical address.
        gpa: u64,
        /// Size in bytes.
        size: u64,
    },
    /// cannot {what} {size} bytes of guest memory: {source}
    #[error("cannot {what} {size} bytes of guest memory: {source}")]
    Os {
        /// What was tried.
        what: &'static str,
        /// Size in bytes.
        size: u64,
        /// Why not.
        source: std::io::Error,
    },
}
