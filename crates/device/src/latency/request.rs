//! What observers and probes are told of one request.
use super::operation::Operation;
use super::stage::Stage;

/// What one request of a disk was, for a [`RequestObserver`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Index of its descriptor chain.
    pub head: u16,
    /// First sector (512 bytes), if it has one.
    pub sector: Option<u64>,
    /// Bytes of data asked for, or the length of its ranges.
    pub bytes: u64,
    /// Status byte.
    pub status: u8,
}

/// One request that has ended, with its stages in nanoseconds.
///
/// Their sum is its whole latency; it ends when the observer is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestRecord {
    /// Operation.
    pub operation: &'static Operation,
    /// The request.
    pub request: Request,
    /// Nanoseconds of the stages, in the order of [`Stage::ALL`].
    pub stages: [u64; Stage::ALL.len()],
}

impl RequestRecord {
    /// Whole latency in nanoseconds; does not wrap around.
    #[must_use]
    pub fn total(&self) -> u64 {
        total(self.stages)
    }
}

/// Whole latency of these stages.
pub(super) fn total(stages: [u64; Stage::ALL.len()]) -> u64 {
    stages.into_iter().fold(0, u64::saturating_add)
}

/// Is told of each request of a queue; see [`QueueLatency::observe`](super::QueueLatency::observe).
pub trait RequestObserver: Send + Sync {
    /// A request has ended just now. Called by the I/O thread; must not block.
    fn ended(&self, record: &RequestRecord);
}
