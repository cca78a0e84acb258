//! The driver's side of a queue, whatever its layout.
use crate::split::driver::{Offsets, Ring};
use crate::{ConfigError, DmaArea, QueueAddresses, QueueError, Segment};
use paravane_spec::feature;
use paravane_spec::queue::MAX_SIZE;

/// How big a queue is and which features it uses; says how much memory it needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    size: u16,
    indirect: u16,
    event_idx: bool,
}

impl Layout {
    /// Feature bits that change a queue's layout or rules and are not implemented. ORDER_PLATFORM is among
    /// them: it asks for barriers that order accesses against hardware, and ours order CPUs.
    const REFUSED: u64 = feature::RING_PACKED | feature::IN_ORDER | feature::ORDER_PLATFORM;

    /// A queue of `size` descriptors. With INDIRECT_DESC among the negotiated `features` and `indirect` > 1,
    /// chains of 2 to `indirect` segments go into a table (one table a chain is set aside). No chain may be
    /// longer than the queue (section 2.7.5.3.1), so an `indirect` above `size` counts as `size`.
    ///
    /// # Errors
    /// The size is not a power of two from 1 to 32768, or a ring feature is not implemented.
    pub fn new(size: u16, indirect: u16, features: u64) -> Result<Self, ConfigError> {
        if !size.is_power_of_two() {
            return Err(ConfigError::Size { size, max: MAX_SIZE });
        }
        if features & Self::REFUSED != 0 {
            return Err(ConfigError::Features(features & Self::REFUSED));
        }
        let indirect = if features & feature::INDIRECT_DESC == 0 { 0 } else { indirect.min(size) };
        let indirect = if indirect > 1 { indirect } else { 0 };
        Ok(Self { size, indirect, event_idx: features & feature::EVENT_IDX != 0 })
    }

    /// Bytes of shared memory that the queue needs, to be aligned to 4096 or more.
    #[must_use]
    pub fn memory(&self) -> usize {
        Offsets::new(self.size, self.indirect).end
    }
}

/// Names one buffer (chain) that was added and not yet returned. It is less than the queue's size.
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
    /// Descriptors that are free; none in a queue that has latched.
    pub free: usize,
}

/// A position in the used ring, for [`Queue::poll`]. It counts buffers in 64 bits, so it does not repeat.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PollToken(pub(crate) u64);

/// A queue, driver side. The device is hostile: descriptors have a private shadow, identifiers are
/// checked, used lengths are clamped.
#[derive(Debug)]
pub struct Queue {
    ring: Ring,
}

impl Queue {
    /// Lays out the queue in `memory` (zeroed here) and returns it with what to tell the transport. The
    /// memory must stay the queue's until the device has been reset.
    ///
    /// # Errors
    /// `memory` is shorter than [`Layout::memory`], misaligned, or wraps around the device's address space.
    pub fn new(layout: Layout, memory: DmaArea) -> Result<(Self, QueueAddresses), ConfigError> {
        Self::new_at(layout, memory, 0)
    }

    /// As [`Queue::new`], with both rings at position `start`.
    pub(crate) fn new_at(
        layout: Layout,
        memory: DmaArea,
        start: u16,
    ) -> Result<(Self, QueueAddresses), ConfigError> {
        let (ring, addresses) = Ring::new(layout.size, layout.indirect, layout.event_idx, memory, start)?;
        Ok((Self { ring }, addresses))
    }

    /// Adds one buffer: segments that the device reads, then segments that it writes. The device sees it
    /// after [`Queue::publish`].
    ///
    /// # Errors
    /// Too few free descriptors, or the queue has latched; nothing was added.
    ///
    /// # Panics
    /// There is no segment, one has length 0, or they have more than 2^32 - 1 bytes together: the
    /// specification has no such buffers.
    #[inline]
    pub fn add(&mut self, readable: &[Segment], writable: &[Segment]) -> Result<BufferId, Full> {
        self.ring.add(readable, writable)
    }

    /// Publishes what was added with one store and says whether the device wants a kick. Without anything
    /// new, or in a queue that has latched, it does nothing and says no.
    #[inline]
    pub fn publish(&mut self) -> bool {
        self.ring.publish()
    }

    /// The next buffer that the device has used.
    ///
    /// # Errors
    /// The device named a buffer that is not in flight, or its index is impossible; the queue has latched.
    #[inline]
    pub fn pop_used(&mut self) -> Result<Option<Used>, QueueError> {
        self.ring.pop_used()
    }

    /// Asks the device for an interrupt at the next used buffer and returns the present position.
    /// The caller must [`Queue::poll`] (or pop) once more before it sleeps.
    #[inline]
    pub fn enable_notifications(&mut self) -> PollToken {
        self.ring.enable_notifications()
    }

    /// Asks the device for no interrupts. A hint.
    #[inline]
    pub fn disable_notifications(&mut self) {
        self.ring.disable_notifications();
    }

    /// Whether the device has used anything since `token`.
    #[must_use]
    #[inline]
    pub fn poll(&self, token: PollToken) -> bool {
        self.ring.poll(token)
    }

    /// The latched error.
    #[must_use]
    pub fn error(&self) -> Option<QueueError> {
        self.ring.error()
    }

    /// Number of descriptors.
    #[must_use]
    pub fn size(&self) -> u16 {
        self.ring.size()
    }

    /// Buffers added and not yet returned.
    #[must_use]
    pub fn in_flight(&self) -> u16 {
        self.ring.in_flight()
    }

    /// The longest chain that [`Queue::add`] would take now.
    #[must_use]
    pub fn room(&self) -> usize {
        self.ring.room()
    }
}
