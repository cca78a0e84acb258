//! The processor's counter, through `perf_event_open`.
use perf_event::events::Hardware;
use perf_event::{Builder, ReadFormat};
use std::hint::black_box;
use std::io;

/// Counts instructions that this thread retires in user mode.
pub(crate) struct Counter(perf_event::Counter);

impl Counter {
    /// Opens the counter and checks that it counts.
    ///
    /// In many virtual machines it stays at 0.
    pub(crate) fn new() -> io::Result<Self> {
        let counter = Builder::new(Hardware::INSTRUCTIONS)
            .exclude_kernel(true)
            .exclude_hv(true)
            .read_format(ReadFormat::TOTAL_TIME_ENABLED | ReadFormat::TOTAL_TIME_RUNNING)
            .build()?;
        let mut counter = Self(counter);
        counter.start()?;
        for number in 0..1000 {
            black_box(number);
        }
        match counter.stop()? {
            Some(count) if count >= 1000 => Ok(counter),
            _ => Err(io::Error::other("the counter stays at 0")),
        }
    }

    /// Starts counting from 0.
    pub(crate) fn start(&mut self) -> io::Result<()> {
        self.0.reset()?;
        self.0.enable()
    }

    /// Stops and reads; `None` if the counter was multiplexed and missed instructions.
    pub(crate) fn stop(&mut self) -> io::Result<Option<u64>> {
        self.0.disable()?;
        let seen = self.0.read_count_and_time()?;
        Ok((seen.time_running == seen.time_enabled).then_some(seen.count))
    }
}
