//! What can go wrong with guest memory.
use crate::Access;
use std::time::Duration;
use thiserror::Error;

/// An access that failed. Bytes before the failing one may have been transferred; `done` says how many.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
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
    /// {addr:#x}: the device's domain maps nothing there ({len} bytes wanted, {done} done)
    #[error("{addr:#x}: the device's domain maps nothing there ({len} bytes wanted, {done} done)")]
    Untranslated {
        /// First byte that is not mapped.
        addr: u64,
        /// Length of the whole access.
        len: usize,
        /// Bytes transferred before.
        done: usize,
    },
    /// {addr:#x}: {len} bytes in too many pieces to be kept mapped
    #[error("{addr:#x}: {len} bytes in too many pieces to be kept mapped")]
    TooMany {
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

impl DmaError {
    /// The address at fault.
    #[must_use]
    pub fn addr(&self) -> u64 {
        match *self {
            Self::Unmapped { addr, .. }
            | Self::Denied { addr, .. }
            | Self::Wraps { addr, .. }
            | Self::Untranslated { addr, .. }
            | Self::TooMany { addr, .. }
            | Self::NotContiguous { addr, .. } => addr,
        }
    }

    /// Length of the whole access.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "the length of the access, not of the error")]
    pub fn len(&self) -> usize {
        match *self {
            Self::Unmapped { len, .. }
            | Self::Denied { len, .. }
            | Self::Wraps { len, .. }
            | Self::Untranslated { len, .. }
            | Self::TooMany { len, .. }
            | Self::NotContiguous { len, .. } => len,
        }
    }

    /// Bytes transferred before the fault.
    #[must_use]
    pub fn done(&self) -> usize {
        match *self {
            Self::Unmapped { done, .. }
            | Self::Denied { done, .. }
            | Self::Wraps { done, .. }
            | Self::Untranslated { done, .. } => done,
            Self::TooMany { .. } | Self::NotContiguous { .. } => 0,
        }
    }

    /// The same error, of an access of `whole` bytes of which this one came after `before` bytes.
    pub(crate) fn within(mut self, whole: usize, before: usize) -> Self {
        match &mut self {
            Self::Unmapped { len, done, .. }
            | Self::Denied { len, done, .. }
            | Self::Wraps { len, done, .. }
            | Self::Untranslated { len, done, .. } => {
                *len = whole;
                *done += before;
            }
            Self::TooMany { len, .. } | Self::NotContiguous { len, .. } => *len = whole,
        }
        self
    }
}

/// Why no more can be mapped for a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum QuotaError {
    /// One client has too much.
    #[error(
        "{} more for this client, which has {} mapped, limit {}: raise max-client-memory",
        Bytes(*wanted), Bytes(*mapped), Bytes(*limit)
    )]
    ClientMemory {
        /// Bytes to be mapped.
        wanted: u64,
        /// Bytes that this client has mapped.
        mapped: u64,
        /// Bytes that it may have.
        limit: u64,
    },
    /// All clients together have too much.
    #[error(
        "{} more for this client, which has {} mapped, do not fit beside what the others have or are guaranteed, \
         limit for all {}: raise max-memory",
        Bytes(*wanted), Bytes(*mapped), Bytes(*limit)
    )]
    Memory {
        /// Bytes to be mapped.
        wanted: u64,
        /// Bytes that this client has mapped.
        mapped: u64,
        /// Bytes that all clients may have.
        limit: u64,
    },
    /// One client has too many mappings.
    #[error("this client has {limit} mappings, the most that one client may have")]
    ClientMappings {
        /// Mappings.
        limit: u64,
    },
    /// All clients together have too many mappings.
    #[error(
        "one more mapping for this client, which has {mapped}, does not fit beside what the others have or are \
         guaranteed, limit for all {limit}: raise max-mappings"
    )]
    Mappings {
        /// Mappings that this client has.
        mapped: u64,
        /// Mappings that all clients may have.
        limit: u64,
    },
}

/// A number of bytes for people: the largest binary unit that has one decimal.
struct Bytes(u64);

impl std::fmt::Display for Bytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let unit = (self.0.max(1).ilog2() / 10) as usize;
        let name = ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"][unit];
        let tenths = (u128::from(self.0) * 10) >> (10 * unit);
        match tenths % 10 {
            0 => write!(f, "{} {name}", tenths / 10),
            tenth => write!(f, "{}.{tenth} {name}", tenths / 10),
        }
    }
}

/// Why guest memory could not be made or arranged.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// The limits on what clients may have mapped.
    #[error("cannot map {0}")]
    Quota(#[from] QuotaError),
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
    /// a region ends at {end:#x}, and the dirty log that is on ends at {log:#x}
    #[error("a region ends at {end:#x}, and the dirty log that is on ends at {log:#x}")]
    BeyondLog {
        /// End of the region.
        end: u64,
        /// End of the log.
        log: u64,
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

/// What a holder is at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum BusyWith {
    /// A batch: its guard is open.
    Batch,
    /// It has these bytes mapped, as the device addresses them.
    Mapping {
        /// First byte.
        addr: u64,
        /// Bytes.
        len: u64,
    },
}

impl std::fmt::Display for BusyWith {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Batch => f.write_str("in a batch"),
            Self::Mapping { addr, len } => write!(f, "using {len} bytes at {addr:#x}"),
        }
    }
}

/// {holder} was still {with} after {timeout:?}
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{holder} was still {with} after {timeout:?}")]
pub struct Busy {
    /// Name of the handle, see [`Handle::named`](crate::Handle::named).
    pub holder: String,
    /// What it did not let go of.
    pub with: BusyWith,
    /// How long it was given.
    pub timeout: Duration,
}

/// Why a domain was not changed, or not yet.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum DomainError {
    /// {size} bytes at {addr:#x}: address and size must be multiples of 4096, and the size not 0
    #[error("{size} bytes at {addr:#x}: address and size must be multiples of 4096, and the size not 0")]
    Unaligned {
        /// The address, the device's or the guest's.
        addr: u64,
        /// Bytes.
        size: u64,
    },
    /// {size} bytes at {addr:#x} wrap around the end of the address space
    #[error("{size} bytes at {addr:#x} wrap around the end of the address space")]
    Wraps {
        /// The address, the device's or the guest's.
        addr: u64,
        /// Bytes.
        size: u64,
    },
    /// {addr:#x} is mapped already
    #[error("{addr:#x} is mapped already")]
    Overlap {
        /// First page that is.
        addr: u64,
    },
    /// the domain's tables have reached their limit of {limit} bytes
    #[error("the domain's tables have reached their limit of {limit} bytes")]
    Full {
        /// Bytes.
        limit: u64,
    },
    /// Nothing was changed.
    #[error("the host has no memory for the domain's tables")]
    NoMemory,
    /// unmapped for all who come, but {0}
    #[error("unmapped for all who come, but {0}")]
    Busy(#[from] Busy),
}

/// Why a dirty log cannot be made or used so.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum LogError {
    /// The limits on what clients may have mapped.
    #[error("cannot map {0}")]
    Quota(#[from] QuotaError),
    /// pages of {0} bytes: a power of two from 4096 on is needed
    #[error("pages of {0} bytes: a power of two from 4096 on is needed")]
    PageSize(u64),
    /// addresses up to {end:#x} are to be logged, and {most:#x} is the most
    #[error("addresses up to {end:#x} are to be logged, and {most:#x} is the most")]
    Addresses {
        /// End of what is to be logged.
        end: u64,
        /// The limit.
        most: u64,
    },
    /// {len} bytes at {gpa:#x} are no range of pages of {page_size} bytes
    #[error("{len} bytes at {gpa:#x} are no range of pages of {page_size} bytes")]
    Range {
        /// First byte.
        gpa: u64,
        /// Bytes.
        len: u64,
        /// Bytes a page.
        page_size: u64,
    },
    /// a bitmap of {words} words for a range that needs {needed}
    #[error("a bitmap of {words} words for a range that needs {needed}")]
    Bitmap {
        /// Words of 64 bits that were given.
        words: u64,
        /// Words of 64 bits that are needed.
        needed: u64,
    },
    /// the log's file may shrink: it must be sealed against that
    #[error("the log's file may shrink: it must be sealed against that")]
    MayShrink,
    /// {words} words at offset {offset} are not in the log's file of {size} bytes
    #[error("{words} words at offset {offset} are not in the log's file of {size} bytes")]
    Extent {
        /// Bytes from the start of the file; a multiple of 8.
        offset: u64,
        /// Words of 64 bits.
        words: u64,
        /// Bytes of the file.
        size: u64,
    },
    /// memory is lent to {0} who would not mark what they write
    #[error("memory is lent to {0} who would not mark what they write")]
    Lent(u64),
    /// a log is on, and who borrows memory would not mark in it
    #[error("a log is on, and who borrows memory would not mark in it")]
    On,
    /// memory ends at {memory:#x}, and the log at {log:#x}
    #[error("memory ends at {memory:#x}, and the log at {log:#x}")]
    TooShort {
        /// End of the highest region.
        memory: u64,
        /// End of the log.
        log: u64,
    },
    /// cannot {what} the memory of a dirty log: {source}
    #[error("cannot {what} the memory of a dirty log: {source}")]
    Os {
        /// What was tried.
        what: &'static str,
        /// Why not.
        source: std::io::Error,
    },
    /// the log is changed for all who come, but {0}
    #[error("the log is changed for all who come, but {0}")]
    Busy(#[from] Busy),
}
