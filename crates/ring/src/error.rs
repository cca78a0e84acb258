//! Errors of a queue.
use thiserror::Error;

/// Reason why a queue cannot be activated or laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// A split queue, or a driver, has a size that is not a power of two, or too large.
    #[error("queue size {size} is not a power of two from 1 to {max}")]
    Size {
        /// Requested size.
        size: u16,
        /// The device's limit.
        max: u16,
    },
    /// A packed queue has size 0, or is too large.
    #[error("packed queue size {size} is not from 1 to {max}")]
    PackedSize {
        /// Requested size.
        size: u16,
        /// The device's limit.
        max: u16,
    },
    /// An area is misaligned, for the device or in host memory.
    #[error("the {part} at {addr:#x} is not aligned to {align} bytes")]
    Misaligned {
        /// The area.
        part: &'static str,
        /// Its address.
        addr: u64,
        /// Required alignment in bytes.
        align: u64,
    },
    /// An area ends beyond the address space.
    #[error("the {part} at {addr:#x} wraps around the end of the address space")]
    Wraps {
        /// The area.
        part: &'static str,
        /// Its address.
        addr: u64,
    },
    /// The memory for an area is too short.
    #[error("the {part} needs {needed} bytes of memory; {given} were given")]
    Short {
        /// The area.
        part: &'static str,
        /// Bytes needed.
        needed: usize,
        /// Bytes given.
        given: usize,
    },
    /// A negotiated feature needs another type of queue (section 6.4).
    #[error("feature bits {0:#x} are not supported by this queue")]
    Features(u64),
}

/// Reason why a queue has stopped.
///
/// The first error latches: every later call returns it again until the queue is reset and
/// activated anew.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum QueueError {
    /// Device side: the driver moved the available index too far (section 2.7.6).
    #[error("the available index went from {old} to {new}, more than the queue's {size} entries")]
    AvailIndex {
        /// Our position.
        old: u16,
        /// Value that the driver wrote.
        new: u16,
        /// Queue size.
        size: u16,
    },
    /// Driver side: the device moved the used index too far (section 2.7.8).
    #[error("the used index went from {old} to {new}, with only {in_flight} buffers in flight")]
    UsedIndex {
        /// Our position.
        old: u16,
        /// Value that the device wrote.
        new: u16,
        /// Buffers that could have been used.
        in_flight: u16,
    },
    /// An index or identifier is outside its table.
    #[error("descriptor index {index} is outside a table of {size}")]
    DescIndex {
        /// The index.
        index: u32,
        /// Entries in the table.
        size: u32,
    },
    /// A descriptor describes no bytes.
    #[error("descriptor {index} has length 0")]
    ZeroLength {
        /// The index.
        index: u16,
    },
    /// A descriptor ends beyond the address space.
    #[error("descriptor {index}: {addr:#x} plus {len} bytes wraps around the address space")]
    AddressWraps {
        /// The index.
        index: u16,
        /// Its address.
        addr: u64,
        /// Its length.
        len: u32,
    },
    /// A chain exceeds the queue, its table, or [`MAX_CHAIN`](crate::device::MAX_CHAIN).
    #[error("the chain at descriptor {head} is longer than {limit} descriptors, or loops")]
    ChainTooLong {
        /// Head of the chain.
        head: u16,
        /// The limit.
        limit: u32,
    },
    /// The bytes of a chain do not fit in 32 bits.
    #[error("the chain at descriptor {head} has more than 2^32 - 1 bytes")]
    ChainTooBig {
        /// Head of the chain.
        head: u16,
    },
    /// The segments of a chain are out of order (section 2.7.4.2).
    #[error("the chain at descriptor {head} has a readable descriptor after a writable one")]
    ReadableAfterWritable {
        /// Head of the chain.
        head: u16,
    },
    /// An indirect descriptor without INDIRECT_DESC.
    #[error("descriptor {index} is indirect, which was not negotiated")]
    IndirectNotNegotiated {
        /// The index.
        index: u16,
    },
    /// An indirect descriptor with NEXT, or inside a table (section 2.7.5.3.1).
    #[error("descriptor {index} is indirect and also chained, or inside an indirect table")]
    IndirectNested {
        /// The index.
        index: u16,
    },
    /// An indirect table is empty, too long, or has a partial descriptor.
    #[error("the indirect table of descriptor {index} has {len} bytes, which is not 1 to {max} descriptors")]
    IndirectLength {
        /// The index.
        index: u16,
        /// Length in bytes.
        len: u32,
        /// Most descriptors in a table.
        max: u32,
    },
    /// The device cannot access memory that a chain names.
    #[error("the device cannot access the {len} bytes at address {addr:#x}")]
    Address {
        /// First byte.
        addr: u64,
        /// Length in bytes.
        len: u32,
    },
    /// Split: the driver reused a head before the device had returned it.
    #[error("descriptor {head} was made available while it is in flight")]
    HeadInFlight {
        /// Head of the chain.
        head: u16,
    },
    /// Packed: the driver reused an identifier before the device had returned it.
    #[error("buffer {id} was made available while it is in flight")]
    IdInFlight {
        /// The identifier.
        id: u16,
    },
    /// Packed: an identifier is out of range.
    #[error("buffer identifier {id} is not below the queue's size {size}")]
    BufferId {
        /// The identifier.
        id: u16,
        /// Queue size.
        size: u16,
    },
    /// Packed: the driver made more descriptors available than the ring has.
    #[error("descriptor {index} was made available while all {size} are with the device")]
    Overrun {
        /// Index of the descriptor.
        index: u16,
        /// Queue size.
        size: u16,
    },
    /// A chain was completed, or a buffer used, twice or without having been available.
    #[error("buffer {id} was completed but is not in flight")]
    NotInFlight {
        /// The identifier.
        id: u32,
    },
    /// The device rejects what the chain contains; see [`Queue::fail`](crate::device::Queue::fail).
    #[error("the request at descriptor {head} is malformed: {what}")]
    Request {
        /// Head of the chain.
        head: u16,
        /// The rule that the request breaks.
        what: &'static str,
    },
}
