//! Counting instructions, by a hardware counter or by single steps.
use crate::BenchError;
use std::io;

mod hardware;
pub(crate) mod single_step;

/// A way to count the instructions of a subject in user mode.
pub(crate) enum Counter {
    /// A hardware counter (`perf_event_open`).
    Hardware(hardware::Counter),
    /// A child process that runs the subject one instruction at a time (`ptrace`).
    SingleStep,
    /// Neither is available.
    Impossible,
}

impl Counter {
    /// Chooses the best way that works; calls `report` with what does not work.
    pub(crate) fn choose(report: &mut dyn FnMut(&str)) -> Self {
        match hardware::Counter::new() {
            Ok(counter) => return Self::Hardware(counter),
            Err(error) => report(&format!("no hardware counter ({error}); counting by single steps")),
        }
        match single_step::probe() {
            Ok(()) => Self::SingleStep,
            Err(error) => {
                report(&format!("no single steps either ({error}); instructions are not counted"));
                Self::Impossible
            }
        }
    }

    /// Whether a hardware counter is used.
    pub(crate) fn is_hardware(&self) -> bool {
        matches!(self, Self::Hardware(_))
    }

    /// Method in results.
    pub(crate) fn method(&self) -> &'static str {
        match self {
            Self::Hardware(_) => "perf_event",
            Self::SingleStep => "single-step",
            Self::Impossible => "none",
        }
    }

    /// Does `work` and counts its instructions; `None` without a hardware counter.
    ///
    /// # Errors
    /// The counter or `work` failed.
    pub(crate) fn around<T>(
        &mut self,
        work: impl FnOnce() -> Result<T, BenchError>,
    ) -> Result<(T, Option<u64>), BenchError> {
        match self {
            Self::Hardware(counter) => {
                counter.start().map_err(failed)?;
                let result = work()?;
                let count = counter.stop().map_err(failed)?;
                Ok((result, count))
            }
            Self::SingleStep | Self::Impossible => Ok((work()?, None)),
        }
    }

    /// Counts instructions per operation by single steps; `None`: not used.
    ///
    /// # Errors
    /// The child process failed.
    pub(crate) fn stepped(&self, case: &str, batch: u16, subject: &str) -> Result<Option<f64>, BenchError> {
        match self {
            Self::SingleStep => single_step::per_chain(case, batch, subject).map(Some).map_err(failed),
            Self::Hardware(_) | Self::Impossible => Ok(None),
        }
    }
}

pub(crate) fn failed(source: io::Error) -> BenchError {
    BenchError::Os { what: "count instructions", source }
}
