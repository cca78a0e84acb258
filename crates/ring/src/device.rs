//! The device's side of a queue, whatever its layout.
use crate::{Area, ConfigError, QueueAddresses, QueueError, Segment};
use alloc::vec::Vec;

/// Most descriptors in one chain, indirect ones included. The specification's limit is the queue size;
/// Linux exceeds it with indirect tables, so this is a fixed bound instead.
pub const MAX_CHAIN: usize = 1024;

/// One of the three areas of a queue, with what its memory must be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AreaRequest {
    /// What it is called in errors.
    pub part: &'static str,
    /// First byte, in the device's address space.
    pub addr: u64,
    /// Bytes.
    pub len: usize,
    /// Whether the device writes to it.
    pub writable: bool,
}

/// A queue's checked and frozen configuration; the only way to a [`Queue`].
#[derive(Clone, Copy, Debug)]
pub struct QueueConfig {
    addresses: QueueAddresses,
    features: u64,
}

impl QueueConfig {
    /// Feature bits that queues implement; a device offers these and its own.
    pub const FEATURES: u64 = paravane_spec::feature::INDIRECT_DESC | paravane_spec::feature::EVENT_IDX;

    /// Checks what a driver asked for. `features` are the negotiated ones, device-specific bits are ignored.
    ///
    /// # Errors
    /// The size is not a power of two from 1 to `max_size`, an area is misaligned or wraps around, or a
    /// negotiated ring feature is not implemented.
    pub fn new(addresses: QueueAddresses, max_size: u16, features: u64) -> Result<Self, ConfigError> {
        let _ = max_size;
        Ok(Self { addresses, features })
    }

    /// The memory that [`QueueConfig::activate`] needs: descriptor, driver and device area.
    #[must_use]
    pub fn areas(&self) -> [AreaRequest; 3] {
        todo!()
    }

    /// Takes the queue into use. From here on nothing of the configuration can change.
    ///
    /// # Errors
    /// An area is shorter than [`QueueConfig::areas`] asked for, or misaligned in host memory.
    ///
    /// # Safety
    /// Each area must be the memory that [`QueueConfig::areas`] asked for and stay mapped until the queue
    /// has been dropped.
    pub unsafe fn activate(self, desc: Area, driver: Area, device: Area) -> Result<Queue, ConfigError> {
        let _ = (desc, driver, device, self.addresses, self.features);
        todo!()
    }
}

/// One descriptor chain, as it was when it was popped. Its segments lie in the [`Batch`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chain {
    /// Identifies the chain until it is completed.
    pub head: u16,
    first: u32,
    readable: u16,
    writable: u16,
    readable_len: u32,
    writable_len: u32,
}

impl Chain {
    /// Bytes that the device may read.
    #[must_use]
    pub fn readable_len(&self) -> u32 {
        self.readable_len
    }

    /// Bytes that the device may write.
    #[must_use]
    pub fn writable_len(&self) -> u32 {
        self.writable_len
    }
}

/// Caller-owned storage that chains are popped into; made once, used again and again.
#[derive(Debug)]
pub struct Batch {
    chains: Vec<Chain>,
    segments: Vec<Segment>,
}

impl Batch {
    /// Room for `chains` chains; segments for at least one chain of any length, and 4 a chain.
    #[must_use]
    pub fn new(chains: usize) -> Self {
        Self { chains: Vec::with_capacity(chains), segments: Vec::with_capacity(MAX_CHAIN + 4 * chains) }
    }

    /// The chains that the last [`Queue::pop`] found.
    #[must_use]
    pub fn chains(&self) -> &[Chain] {
        &self.chains
    }

    /// The segments of `chain` that the device reads, in order.
    #[must_use]
    pub fn readable(&self, chain: &Chain) -> &[Segment] {
        let first = chain.first as usize;
        &self.segments[first..first + usize::from(chain.readable)]
    }

    /// The segments of `chain` that the device writes, in order.
    #[must_use]
    pub fn writable(&self, chain: &Chain) -> &[Segment] {
        let first = chain.first as usize + usize::from(chain.readable);
        &self.segments[first..first + usize::from(chain.writable)]
    }
}

/// A live queue, device side.
#[derive(Debug)]
pub struct Queue {}

impl Queue {
    /// Clears `batch`, then takes as many available chains as it has room for (or as there are) and
    /// returns their number. `fetch` copies an indirect table out of the device's address space: address
    /// and destination, `false` if that memory cannot be read.
    ///
    /// # Errors
    /// The first malformed chain or index latches the queue. Chains before it in the same call are lost
    /// with the queue.
    pub fn pop(
        &mut self,
        batch: &mut Batch,
        fetch: impl FnMut(u64, &mut [u8]) -> bool,
    ) -> Result<usize, QueueError> {
        let _ = (batch, fetch);
        todo!()
    }

    /// Stages the completion of a chain; the driver sees it after [`Queue::publish`]. `written` is the
    /// number of bytes that the device has written to the chain's writable part.
    ///
    /// # Errors
    /// `head` is not in flight, or the queue has latched.
    pub fn complete(&mut self, head: u16, written: u32) -> Result<(), QueueError> {
        let _ = (head, written);
        todo!()
    }

    /// Publishes all staged completions with one store and says whether the driver wants an interrupt.
    /// Without staged completions it does nothing and says no.
    ///
    /// # Errors
    /// The queue has latched.
    pub fn publish(&mut self) -> Result<bool, QueueError> {
        todo!()
    }

    /// Asks the driver not to kick while the device is at work. A hint; kicks may still come.
    pub fn disable_kicks(&mut self) {
        todo!()
    }

    /// Asks the driver to kick at the next available buffer, then looks once more.
    /// `true`: more is available, do not sleep (kicks stay armed). `false`: the next buffer brings a kick.
    ///
    /// # Errors
    /// The available index is impossible, or the queue has latched.
    pub fn arm_kicks(&mut self) -> Result<bool, QueueError> {
        todo!()
    }

    /// Latches an error that the device found in a chain. Returns the error that the queue now has (the first).
    pub fn fail(&mut self, error: QueueError) -> QueueError {
        let _ = error;
        todo!()
    }

    /// The latched error.
    #[must_use]
    pub fn error(&self) -> Option<QueueError> {
        todo!()
    }

    /// Number of descriptors.
    #[must_use]
    pub fn size(&self) -> u16 {
        todo!()
    }

    /// Chains popped and not yet completed.
    #[must_use]
    pub fn in_flight(&self) -> u16 {
        todo!()
    }
}
