//! CPU time and instructions of another process.
use crate::BenchError;
use nix::time::{ClockId, clock_getcpuclockid, clock_gettime};
use nix::unistd::Pid;
use perf_event::events::Hardware;
use perf_event::{Builder, Counter};
use std::io;
use std::time::Duration;

/// The windows of a sample of another process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SampleLength {
    /// Before anything is measured: touches memory and lets adaptive polling settle.
    pub(crate) warm_up: Duration,
    /// For the clocks.
    pub(crate) timed: Duration,
    /// For the hardware counter.
    pub(crate) counted: Duration,
}

/// The CPU clock of a process: all threads, user and kernel time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CpuClock(ClockId);

impl CpuClock {
    pub(crate) fn of(pid: Pid) -> Result<Self, BenchError> {
        clock_getcpuclockid(pid).map(Self).map_err(failed)
    }

    pub(crate) fn read(self) -> Result<Duration, BenchError> {
        clock_gettime(self.0).map(Duration::from).map_err(failed)
    }
}

fn failed(error: nix::Error) -> BenchError {
    BenchError::Os { what: "read the CPU time of a process", source: error.into() }
}

/// Counts the instructions of all threads of a process, also of later ones.
///
/// Counting slows context switches, so nothing else is measured at the same time.
pub(crate) struct Instructions {
    counters: Vec<Counter>,
    /// Method, as in [`crate::Row::method`].
    pub(crate) method: &'static str,
}

impl Instructions {
    /// Starts to count, with the kernel's instructions if permitted.
    ///
    /// # Errors
    /// The system refuses, or has no counters.
    pub(crate) fn start(pid: Pid) -> io::Result<Self> {
        Self::open(pid, true).or_else(|_| Self::open(pid, false))
    }

    fn open(pid: Pid, kernel: bool) -> io::Result<Self> {
        let mut counters = Vec::new();
        for thread in std::fs::read_dir(format!("/proc/{pid}/task"))? {
            let name = thread?.file_name();
            let thread =
                name.to_str().and_then(|name| name.parse().ok()).ok_or(io::ErrorKind::InvalidData)?;
            let counter = Builder::new(Hardware::INSTRUCTIONS)
                .observe_pid(thread)
                .any_cpu()
                .exclude_kernel(!kernel)
                .exclude_hv(true)
                .inherit(true)
                .build();
            match counter {
                Ok(mut counter) => {
                    counter.enable()?;
                    counters.push(counter);
                }
                // The thread has ended.
                Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {}
                Err(error) => return Err(error),
            }
        }
        let method = if kernel { "perf_event, kernel too" } else { "perf_event" };
        Ok(Self { counters, method })
    }

    /// Instructions since the start; `None` if a counter was multiplexed or stays at 0.
    pub(crate) fn stop(mut self) -> io::Result<Option<u64>> {
        let mut sum = 0;
        for counter in &mut self.counters {
            counter.disable()?;
            let seen = counter.read_count_and_time()?;
            if seen.time_running != seen.time_enabled {
                return Ok(None);
            }
            sum += seen.count;
        }
        Ok((sum > 0).then_some(sum))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cpu_time_of_a_process_is_what_it_spends() {
        let clock = CpuClock::of(Pid::this()).unwrap();
        let before = clock.read().unwrap();
        let mut spent = Duration::ZERO;
        while spent < Duration::from_millis(5) {
            std::hint::black_box(0_u64);
            spent = clock.read().unwrap() - before;
        }
        assert!(spent >= Duration::from_millis(5));
    }
}
