//! Clocks of the measuring thread.
use crate::error::BenchError;
use nix::time::{ClockId, clock_gettime};
use std::time::Duration;

/// CPU time of the calling thread.
///
/// # Errors
/// The system has no such clock.
pub(crate) fn thread_clock() -> Result<Duration, BenchError> {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID)
        .map(Duration::from)
        .map_err(|error| BenchError::Os { what: "read the CPU clock of a thread", source: error.into() })
}
