//! The name of a queue among those of a thread.

/// Identifies a queue on its thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct QueueKey {
    /// Device number, unique among the devices of a thread.
    pub device: usize,
    /// Queue index.
    pub queue: u16,
}
