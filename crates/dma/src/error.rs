//! Errors of guest memory.
use crate::Access;
use std::fmt;
use std::time::Duration;
use thiserror::Error;

/// Failed access.
///
/// Bytes before the failing one may have been moved; `done` says how many.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub struct DmaError {
    /// Address at fault.
    pub addr: u64,
    /// Length of the whole access in bytes.
    pub len: usize,
    /// Bytes moved before the fault.
    pub done: usize,
    /// What is wrong there.
    pub fault: DmaFault,
}

/// Reason why an access ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DmaFault {
    /// No memory.
    Unmapped,
    /// Directions that the region or the domain forbids.
    Denied(Access),
    /// Access beyond the end of the address space. The address is that of the piece that wraps.
    Wraps,
    /// No translation in the device's domain.
    Untranslated,
    /// Mapping that does not fit in the holder's pin table.
    TooMany,
    /// Mapping of one piece that consists of several.
    NotContiguous,
}

impl DmaError {
    /// Same error, for an access of `whole` bytes of which this part came later.
    ///
    /// `before` bytes were moved before this part.
    pub(crate) fn within(self, whole: usize, before: usize) -> Self {
        let moves = !matches!(self.fault, DmaFault::TooMany | DmaFault::NotContiguous);
        Self { len: whole, done: if moves { self.done + before } else { 0 }, ..self }
    }
}

impl fmt::Display for DmaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { addr, len, done, fault } = self;
        write!(f, "{addr:#x}")?;
        match fault {
            DmaFault::Unmapped => write!(f, ": no memory there ({len} bytes wanted, {done} done)"),
            DmaFault::Denied(access) => {
                write!(f, ": access denied: {access:?} ({len} bytes wanted, {done} done)")
            }
            DmaFault::Wraps => {
                write!(f, ": {len} bytes wrap around the end of the address space ({done} done)")
            }
            DmaFault::Untranslated => {
                write!(f, ": no translation in the device's domain ({len} bytes wanted, {done} done)")
            }
            DmaFault::TooMany => write!(f, ": {len} bytes are in too many pieces to map"),
            DmaFault::NotContiguous => {
                write!(f, ", {len} bytes: not contiguous in host memory; map it as segments")
            }
        }
    }
}

/// Mapping beyond a client's quota.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum QuotaError {
    /// Memory limit of one client.
    #[error(
        "{} more for this client, which has {} mapped, limit {}: raise max-client-memory",
        Bytes(*wanted), Bytes(*mapped), Bytes(*limit)
    )]
    ClientMemory {
        /// Bytes to be mapped.
        wanted: u64,
        /// Bytes that this client has mapped.
        mapped: u64,
        /// Bytes that one client may have mapped.
        limit: u64,
    },
    /// Memory limit of all clients.
    #[error(
        "{} more for this client, which has {} mapped: the limit of {} for all clients leaves no room beside what \
         the others have or are guaranteed: raise max-memory",
        Bytes(*wanted), Bytes(*mapped), Bytes(*limit)
    )]
    Memory {
        /// Bytes to be mapped.
        wanted: u64,
        /// Bytes that this client has mapped.
        mapped: u64,
        /// Bytes that all clients may have mapped.
        limit: u64,
    },
    /// Mapping limit of one client.
    #[error("one more region for this client, which has {limit}, the maximum")]
    ClientMappings {
        /// Most mappings of one client.
        limit: u64,
    },
    /// Mapping limit of all clients.
    #[error(
        "one more region for this client, which has {mapped}: the limit of {limit} for all clients leaves no room \
         beside what the others have or are guaranteed: raise max-mappings"
    )]
    Mappings {
        /// Mappings that this client has.
        mapped: u64,
        /// Mappings that all clients may have.
        limit: u64,
    },
}

/// Displays a number of bytes in the largest binary unit, with at most one decimal.
struct Bytes(u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let unit = (self.0.max(1).ilog2() / 10) as usize;
        let name = ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"][unit];
        let tenths = (u128::from(self.0) * 10) >> (10 * unit);
        match tenths % 10 {
            0 => write!(f, "{} {name}", tenths / 10),
            tenth => write!(f, "{}.{tenth} {name}", tenths / 10),
        }
    }
}

/// Guest memory that cannot be made or arranged.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// Mapping beyond the client's quota.
    #[error("cannot map {0}")]
    Quota(#[from] QuotaError),
    /// Misaligned or empty region.
    #[error(
        "region of {size} bytes at {gpa:#x}: address and size must be multiples of {align}, and the size not 0"
    )]
    Unaligned {
        /// Guest-physical address.
        gpa: u64,
        /// Size in bytes.
        size: u64,
        /// Page size of its backing in bytes.
        align: u64,
    },
    /// Two regions that overlap.
    #[error("regions at {first:#x} and {second:#x} overlap")]
    Overlap {
        /// Start of the lower region.
        first: u64,
        /// Start of the upper region.
        second: u64,
    },
    /// Region beyond the end of the active dirty log.
    #[error("region ends at {end:#x}, beyond the end of the active dirty log at {log:#x}")]
    BeyondLog {
        /// End of the region.
        end: u64,
        /// End of the log.
        log: u64,
    },
    /// Region that wraps around the end of the address space.
    #[error("region of {size} bytes at {gpa:#x} wraps around the end of the address space")]
    Wraps {
        /// Guest-physical address.
        gpa: u64,
        /// Size in bytes.
        size: u64,
    },
    /// Failed system call.
    #[error("cannot {what} {size} bytes of guest memory: {source}")]
    Os {
        /// Attempted operation.
        what: &'static str,
        /// Size in bytes.
        size: u64,
        /// Cause.
        source: std::io::Error,
    },
    /// Too few free huge pages.
    #[error(
        "the host has too few free 2 MiB pages for {size} bytes of guest memory ({source}): \
         run sysctl vm.nr_hugepages={pages}"
    )]
    HugePages {
        /// Size in bytes.
        size: u64,
        /// Necessary size of the pool in pages: those in use, and these.
        pages: u64,
        /// Cause.
        source: std::io::Error,
    },
}

/// Reason why a holder is busy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum BusyWith {
    /// A batch: its access guard is live.
    Batch,
    /// A mapping, by device address.
    Mapping {
        /// First byte.
        addr: u64,
        /// Length in bytes.
        len: u64,
    },
}

impl fmt::Display for BusyWith {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Batch => f.write_str("in a batch"),
            Self::Mapping { addr, len } => write!(f, "using {len} bytes at {addr:#x}"),
        }
    }
}

/// A holder that did not finish in time.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{holder} was still {with} after {timeout:?}")]
pub struct Busy {
    /// Name of the handle, see [`Handle::named`](crate::Handle::named).
    pub holder: String,
    /// Batch or mapping that it did not end.
    pub with: BusyWith,
    /// How long the caller waited.
    pub timeout: Duration,
}

/// Domain that was not changed, or is still in use.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum DomainError {
    /// Misaligned or empty range.
    #[error("{size} bytes at {addr:#x}: address and size must be multiples of 4096, and the size not 0")]
    Unaligned {
        /// Device or guest-physical address.
        addr: u64,
        /// Size in bytes.
        size: u64,
    },
    /// Range that wraps around the end of the address space.
    #[error("{size} bytes at {addr:#x} wrap around the end of the address space")]
    Wraps {
        /// Device or guest-physical address.
        addr: u64,
        /// Size in bytes.
        size: u64,
    },
    /// Page with a translation.
    #[error("{addr:#x} is mapped already")]
    Overlap {
        /// First page that is mapped already.
        addr: u64,
    },
    /// Tables at their limit.
    #[error("the domain's tables have reached their limit of {limit} bytes")]
    Full {
        /// Limit in bytes.
        limit: u64,
    },
    /// Nothing was changed.
    #[error("the host has no memory for the domain's tables")]
    NoMemory,
    /// The translation is removed, but a holder may still use it.
    #[error("unmapped, but {0}")]
    Busy(#[from] Busy),
}

/// Dirty log that cannot be made or used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum LogError {
    /// Mapping beyond the client's quota.
    #[error("cannot map {0}")]
    Quota(#[from] QuotaError),
    /// Invalid page size.
    #[error("invalid page size of {0} bytes: need a power of two, at least 4096")]
    PageSize(u64),
    /// Log that is too large.
    #[error("cannot log addresses up to {end:#x}: the maximum is {most:#x}")]
    Addresses {
        /// Requested end of the log.
        end: u64,
        /// Highest end of a log.
        most: u64,
    },
    /// Invalid range.
    #[error("{len} bytes at {gpa:#x} are not aligned to pages of {page_size} bytes, or wrap around")]
    Range {
        /// First byte.
        gpa: u64,
        /// Length in bytes.
        len: u64,
        /// Page size in bytes.
        page_size: u64,
    },
    /// Bitmap that is too short.
    #[error("bitmap of {words} words is too short: need {needed}")]
    Bitmap {
        /// Number of 64-bit words given.
        words: u64,
        /// Number of 64-bit words needed.
        needed: u64,
    },
    /// File without the seal F_SEAL_SHRINK.
    #[error("the log's file may shrink: seal it (F_SEAL_SHRINK)")]
    MayShrink,
    /// Log beyond the end of its file.
    #[error("the log's file of {size} bytes has no {words} words at offset {offset}")]
    Extent {
        /// Offset in the file in bytes; a multiple of 8.
        offset: u64,
        /// Number of 64-bit words.
        words: u64,
        /// Size of the file in bytes.
        size: u64,
    },
    /// Log while memory is lent; the number of loans.
    #[error("cannot log: memory is lent to {0} accessors that do not mark their writes")]
    Lent(u64),
    /// Loan while a log is on.
    #[error("cannot lend memory: a dirty log is on, and the borrower would not mark its writes")]
    On,
    /// Log that does not cover all memory.
    #[error("dirty log ends at {log:#x}, below the end of memory at {memory:#x}")]
    TooShort {
        /// End of the highest region.
        memory: u64,
        /// End of the log.
        log: u64,
    },
    /// Failed system call.
    #[error("cannot {what} the memory of a dirty log: {source}")]
    Os {
        /// Attempted operation.
        what: &'static str,
        /// Cause.
        source: std::io::Error,
    },
    /// The change is published, but a batch may still use the old log.
    #[error("dirty log changed, but {0}")]
    Busy(#[from] Busy),
}

impl From<MemoryError> for LogError {
    fn from(error: MemoryError) -> Self {
        match error {
            MemoryError::Quota(error) => Self::Quota(error),
            MemoryError::Os { what, source, .. } => Self::Os { what, source },
            other => Self::Os { what: "map", source: std::io::Error::other(other) },
        }
    }
}
