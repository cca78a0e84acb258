//! What can be wrong with a queue.
use thiserror::Error;

/// Why a queue cannot be activated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum ConfigError {
    /// queue size {size} is not a power of two from 1 to {max}
    #[error("queue size {size} is not a power of two from 1 to {max}")]
    Size {
        /// What the driver asked for.
        size: u16,
        /// The device's limit.
        max: u16,
    },
    /// packed queue size {size} is not from 1 to {max}
    #[error("packed queue size {size} is not from 1 to {max}")]
    PackedSize {
        /// What the driver asked for.
        size: u16,
        /// The device's limit.
        max: u16,
    },
    /// the {part} at {addr:#x} is not aligned to {align} bytes
    #[error("the {part} at {addr:#x} is not aligned to {align} bytes")]
    Misaligned {
        /// Which area.
        part: &'static str,
        /// Its address.
        addr: u64,
        /// What it must be a multiple of.
        align: u64,
    },
    /// the {part} at {addr:#x} wraps around the end of the address space
    #[error("the {part} at {addr:#x} wraps around the end of the address space")]
    Wraps {
        /// Which area.
        part: &'static str,
        /// Its address.
        addr: u64,
    },
    /// the {part} was given {given} bytes of memory and needs {needed}
    #[error("the {part} was given {given} bytes of memory and needs {needed}")]
    Short {
        /// Which area.
        part: &'static str,
        /// Bytes needed.
        needed: usize,
        /// Bytes given.
        given: usize,
    },
    /// feature bits {0:#x} are not supported by this queue
    #[error("feature bits {0:#x} are not supported by this queue")]
    Features(u64),
}

/// Why a queue has stopped. The first one latches: every later call returns it again until the queue is
/// reset and activated anew.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum QueueError {
    /// the available index went from {old} to {new}, more than the queue's {size} entries
    #[error("the available index went from {old} to {new}, more than the queue's {size} entries")]
    AvailIndex {
        /// Our position.
        old: u16,
        /// What the driver wrote.
        new: u16,
        /// Queue size.
        size: u16,
    },
    /// the used index went from {old} to {new}, with only {in_flight} buffers in flight
    #[error("the used index went from {old} to {new}, with only {in_flight} buffers in flight")]
    UsedIndex {
        /// Our position.
        old: u16,
        /// What the device wrote.
        new: u16,
        /// Buffers that could have been used.
        in_flight: u16,
    },
    /// descriptor index {index} is outside a table of {size}
    #[error("descriptor index {index} is outside a table of {size}")]
    DescIndex {
        /// The index.
        index: u32,
        /// Entries in the table.
        size: u32,
    },
    /// descriptor {index} has length 0
    #[error("descriptor {index} has length 0")]
    ZeroLength {
        /// The index.
        index: u16,
    },
    /// descriptor {index}: {addr:#x} plus {len} bytes wraps around the address space
    #[error("descriptor {index}: {addr:#x} plus {len} bytes wraps around the address space")]
    AddressWraps {
        /// The index.
        index: u16,
        /// Its address.
        addr: u64,
        /// Its length.
        len: u32,
    },
    /// the chain at descriptor {head} is longer than {limit} descriptors, or loops
    #[error("the chain at descriptor {head} is longer than {limit} descriptors, or loops")]
    ChainTooLong {
        /// Head of the chain.
        head: u16,
        /// The limit.
        limit: u32,
    },
    /// the chain at descriptor {head} has more than 2^32 - 1 bytes
    #[error("the chain at descriptor {head} has more than 2^32 - 1 bytes")]
    ChainTooBig {
        /// Head of the chain.
        head: u16,
    },
    /// the chain at descriptor {head} has a readable descriptor after a writable one
    #[error("the chain at descriptor {head} has a readable descriptor after a writable one")]
    ReadableAfterWritable {
        /// Head of the chain.
        head: u16,
    },
    /// descriptor {index} is indirect, which was not negotiated
    #[error("descriptor {index} is indirect, which was not negotiated")]
    IndirectNotNegotiated {
        /// The index.
        index: u16,
    },
    /// descriptor {index} is indirect and also chained, or inside an indirect table
    #[error("descriptor {index} is indirect and also chained, or inside an indirect table")]
    IndirectNested {
        /// The index.
        index: u16,
    },
    /// the indirect table of descriptor {index} has {len} bytes, which is not 1 to {max} descriptors
    #[error("the indirect table of descriptor {index} has {len} bytes, which is not 1 to {max} descriptors")]
    IndirectLength {
        /// The index.
        index: u16,
        /// Length in bytes.
        len: u32,
        /// Most descriptors in a table.
        max: u32,
    },
    /// address {addr:#x}, {len} bytes, is not memory that the device may use so
    #[error("address {addr:#x}, {len} bytes, is not memory that the device may use so")]
    Address {
        /// First byte.
        addr: u64,
        /// Length in bytes.
        len: u32,
    },
    /// descriptor {head} was made available while it is in flight
    #[error("descriptor {head} was made available while it is in flight")]
    HeadInFlight {
        /// Head of the chain.
        head: u16,
    },
    /// buffer {id} was made available while it is in flight
    #[error("buffer {id} was made available while it is in flight")]
    IdInFlight {
        /// The identifier.
        id: u16,
    },
    /// buffer identifier {id} is not below the queue's size {size}
    #[error("buffer identifier {id} is not below the queue's size {size}")]
    BufferId {
        /// The identifier.
        id: u16,
        /// Queue size.
        size: u16,
    },
    /// descriptor {index} was made available while all {size} are with the device
    #[error("descriptor {index} was made available while all {size} are with the device")]
    Overrun {
        /// Index of the descriptor.
        index: u16,
        /// Queue size.
        size: u16,
    },
    /// buffer {id} was completed but is not in flight
    #[error("buffer {id} was completed but is not in flight")]
    NotInFlight {
        /// The identifier.
        id: u32,
    },
    /// the request at descriptor {head} is malformed: {what}
    #[error("the request at descriptor {head} is malformed: {what}")]
    Request {
        /// Head of the chain.
        head: u16,
        /// What is wrong, in the device's terms.
        what: &'static str,
    },
}
