//! Counts of lines that were not written.
use std::sync::atomic::{AtomicU64, Ordering};

/// Number of lines that stderr did not take. Relaxed: it orders nothing.
pub(super) static LOST: AtomicU64 = AtomicU64::new(0);
/// Number of lines that the limiter suppressed. Relaxed: it orders nothing.
pub(super) static SUPPRESSED: AtomicU64 = AtomicU64::new(0);

/// Counts of lines since the program started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Counts {
    /// stderr did not take them.
    pub(crate) lost: u64,
    /// The limit of their device suppressed them.
    pub(crate) suppressed: u64,
}

/// Counts of lines that were not written.
pub(crate) fn counts() -> Counts {
    Counts { lost: LOST.load(Ordering::Relaxed), suppressed: SUPPRESSED.load(Ordering::Relaxed) }
}
