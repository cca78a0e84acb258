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
    /// {addr:#x}: {len} bytes wrap around the end of the address space there ({done} done)
    #[error("{addr:#x}: {len} bytes wrap around the end of the address space there ({done} done)")]
    Wraps {
        /// First byte of the piece that wraps.
        addr: u64,
        /// Length of the whole access.
        len: usize,
        /// Bytes transferred before (pieces of a buffer that came earlier).
        done: usize,
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

impl DmaError {
    /// The address at fault.
    #[must_use]
    pub fn addr(&self) -> u64 {
        match *self {
            Self::Unmapped { addr, .. }
            | Self::Denied { addr, .. }
            | Self::Wraps { addr, .. }
            | Self::NotContiguous { addr, .. } => addr,
        }
    }

    /// Bytes transferred before the fault.
    #[must_use]
    pub fn done(&self) -> usize {
        match *self {
            Self::Unmapped { done, .. } | Self::Denied { done, .. } | Self::Wraps { done, .. } => done,
            Self::NotContiguous { .. } => 0,
        }
    }

    /// The same error, of an access of `whole` bytes of which this one came after `before` bytes.
    pub(crate) fn within(mut self, whole: usize, before: usize) -> Self {
        match &mut self {
            Self::Unmapped { len, done, .. }
            | Self::Denied { len, done, .. }
            | Self::Wraps { len, done, .. } => {
                *len = whole;
                *done += before;
            }
            Self::NotContiguous { len, .. } => *len = whole,
        }
        self
    }
}

/// Why guest memory could not be made or arranged.
#[derive(Debug, Error)]
pub enum MemoryError {
    /// a region of {size} bytes at {gpa:#x}: size and address must be multiples of {align}, and the size not 0
    #[error(
        "a region of {size} bytes at {gpa:#x}: size and address must be multiples of {align}, and the size not 0"
    )]
    Unaligned {
        /// Guest-physical address.
        gpa: u64,
        /// Size in bytes.
        size: u64,
        /// Page size of its backing.
        align: u64,
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
    /// the host has not enough free 2 MiB pages for {size} bytes of guest memory ({source}); `sysctl vm.nr_hugepages={pages}` makes them
    #[error(
        "the host has not enough free 2 MiB pages for {size} bytes of guest memory ({source}); \
         `sysctl vm.nr_hugepages={pages}` makes them"
    )]
    HugePages {
        /// Size in bytes.
        size: u64,
        /// How large the pool must be: the pages that are taken, and these.
        pages: u64,
        /// Why not.
        source: std::io::Error,
    },
}
