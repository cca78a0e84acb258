//! The processor's own counter, through `perf_event_open`.
use perf_event::events::Hardware;
use perf_event::{Builder, ReadFormat};
use std::hint::black_box;
use std::io;

/// Instructions that this thread retires in user mode.
pub(crate) struct Counter(perf_event::Counter);

impl Counter {
    /// Opens the counter and makes sure that it counts: virtual machines often have one that stays at 0.
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
            _ => Err(io::Error::other("the counter does not count")),
        }
    }

    /// Starts from 0.
    pub(crate) fn start(&mut self) -> io::Result<()> {
        self.0.reset()?;
        self.0.enable()
    }

    /// Stops and reads. `None` if the counter was shared with someone else's in the meantime, so that it
    /// has not seen everything.
    pub(crate) fn stop(&mut self) -> io::Result<Option<u64>> {
        self.0.disable()?;
        let seen = self.0.read_count_and_time()?;
        Ok((seen.time_running == seen.time_enabled).then_some(seen.count))
    }
}
