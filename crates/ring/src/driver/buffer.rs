//! Buffers of a driver's queue.

/// Identifier of a buffer that was added and not returned.
///
/// Less than the queue's size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BufferId(pub u16);

/// A buffer that the device has used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Used {
    /// The buffer.
    pub id: BufferId,
    /// Bytes that the device reports as written.
    ///
    /// Clamped to the buffer's writable length. With IN_ORDER, a buffer that the device has skipped
    /// counts as written completely (sections 2.7.9 and 2.8.9).
    pub len: u32,
}

/// The queue has too few free descriptors for this buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the queue has {free} free descriptors and the buffer needs {needed}")]
pub struct Full {
    /// Descriptors that the buffer needs.
    pub needed: usize,
    /// Free descriptors; 0 in a latched queue.
    pub free: usize,
}
