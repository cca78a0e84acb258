//! The driver's side of a queue, whatever its layout.
use crate::{ConfigError, DmaArea, QueueAddresses, QueueError, Segment};

/// How big a queue is and which features it uses; says how much memory it needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    size: u16,
    indirect: u16,
    features: u64,
}

impl Layout {
    /// A queue of `size` descriptors. With INDIRECT_DESC among the negotiated `features` and `indirect` > 1,
    /// chains of 2 to `indirect` segments go into a table (one table a chain is set aside).
    ///
    /// # Errors
    /// The size is not a power of two from 1 to 32768, or a ring feature is not implemented.
    pub fn new(size: u16, indirect: u16, features: u64) -> Result<Self, ConfigError> {
        Ok(Self { size, indirect, features })
    }

    /// Bytes of shared memory that the queue needs, to be aligned to 4096 or more.
    #[must_use]
    pub fn memory(&self) -> usize {
        let _ = (self.size, self.indirect, self.features);
        todo!()
    }
}

/// Names one buffer (chain) that was added and not yet returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BufferId(pub u16);

/// A buffer that the device has used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Used {
    /// Which buffer.
    pub id: BufferId,
    /// Bytes that the device says it has written, clamped to the buffer's writable length.
    pub len: u32,
}

/// The queue has too few free descriptors for this buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the queue has {free} free descriptors and the buffer needs {needed}")]
pub struct Full {
    /// Descriptors that the buffer needs.
    pub needed: usize,
    /// Descriptors that are free.
    pub free: usize,
}

/// A position in the used ring, for [`Queue::poll`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PollToken(u64);

/// A queue, driver side. The device is hostile: descriptors have a private shadow, identifiers are
/// checked, used lengths are clamped.
#[derive(Debug)]
pub struct Queue {}

impl Queue {
    /// Lays out the queue in `memory` (zeroed here) and returns it with what to tell the transport.
    ///
    /// # Errors
    /// `memory` is shorter than [`Layout::memory`] or misaligned.
    pub fn new(layout: Layout, memory: DmaArea) -> Result<(Self, QueueAddresses), ConfigError> {
        let _ = (layout, memory);
        todo!()
    }

    /// Adds one buffer: segments that the device reads, then segments that it writes. The device sees it
    /// after [`Queue::publish`].
    ///
    /// # Errors
    /// Too few free descriptors; nothing was added.
    pub fn add(&mut self, readable: &[Segment], writable: &[Segment]) -> Result<BufferId, Full> {
        let _ = (readable, writable);
        todo!()
    }

    /// Publishes what was added with one store and says whether the device wants a kick.
    pub fn publish(&mut self) -> bool {
        todo!()
    }

    /// The next buffer that the device has used.
    ///
    /// # Errors
    /// The device named a buffer that is not in flight, or its index is impossible; the queue has latched.
    pub fn pop_used(&mut self) -> Result<Option<Used>, QueueError> {
        todo!()
    }

    /// Asks the device for an interrupt at the next used buffer and returns the present position.
    /// The caller must [`Queue::poll`] (or pop) once more before it sleeps.
    pub fn enable_notifications(&mut self) -> PollToken {
        todo!()
    }

    /// Asks the device for no interrupts. A hint.
    pub fn disable_notifications(&mut self) {
        todo!()
    }

    /// Whether the device has used anything since `token`.
    #[must_use]
    pub fn poll(&self, token: PollToken) -> bool {
        let _ = token;
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

    /// Buffers added and not yet returned.
    #[must_use]
    pub fn in_flight(&self) -> u16 {
        todo!()
    }

    /// The longest chain that [`Queue::add`] would take now.
    #[must_use]
    pub fn room(&self) -> usize {
        todo!()
    }
}
