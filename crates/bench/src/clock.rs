//! Clocks of the measuring thread.
use crate::error::BenchError;
use nix::time::{ClockId, clock_gettime};
use std::time::Duration;

/// CPU time of this thread.
pub(crate) fn thread_clock() -> Result<Duration, BenchError> {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID)
        .map(Duration::from)
        .map_err(|error| BenchError::Os { what: "read the thread's CPU clock", source: error.into() })
}
