//! Counts of lines that were not written.
use std::sync::atomic::AtomicU64;

/// Number of lines that stderr did not take. Relaxed: it orders nothing.
pub(crate) static LOST: AtomicU64 = AtomicU64::new(0);
/// Number of lines that the limiter suppressed. Relaxed: it orders nothing.
pub(crate) static SUPPRESSED: AtomicU64 = AtomicU64::new(0);
