//! Counting instructions: by the processor where the kernel lets us, else by stepping through each one.
use crate::ring::Case;
use crate::{BenchError, barrier, dma, poll, ring};
use std::io;

mod hardware;
pub(crate) mod single_step;

/// A way to count the instructions of a subject, in user mode only.
pub(crate) enum Counter {
    /// The processor counts (`perf_event_open`).
    Hardware(hardware::Counter),
    /// A child process runs the subject one instruction at a time (`ptrace`).
    SingleStep,
    /// There is no way here.
    Impossible,
}

impl Counter {
    /// The best way that works here. `report` is told what does not, and why.
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

    /// Whether the processor counts, in no time.
    pub(crate) fn is_hardware(&self) -> bool {
        matches!(self, Self::Hardware(_))
    }

    /// What the way is called in results.
    pub(crate) fn method(&self) -> &'static str {
        match self {
            Self::Hardware(_) => "perf_event",
            Self::SingleStep => "single-step",
            Self::Impossible => "none",
        }
    }

    /// Counts a hardware round: what `work` does, in instructions, or `None` if another way is used.
    ///
    /// # Errors
    /// The counter stopped working, or `work` failed.
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

    /// Counts a single-step round of `subject`: instructions a chain, or `None` if another way is used.
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

/// Instructions a chain of one subject of a case, by single steps: what [`crate::run`] falls back to. The
/// scripted other side, which a table's figures leave out, is included. The program must have the hook
/// ([`crate::child_main`]).
///
/// # Errors
/// There is no such case, or the child process could not be stepped through it.
pub fn single_step(case: &str, subject: &str) -> Result<f64, BenchError> {
    let batch = match Case::parse(case) {
        Some(case) => case.batch,
        None if poll::is_single(case) => ring::QUEUE_SIZE,
        None if dma::is_single(case) || barrier::is_single(case) => dma::timing::BATCH,
        None => return Err(BenchError::NoCase(case.to_owned())),
    };
    single_step::per_chain(case, batch, subject).map_err(failed)
}

fn failed(source: io::Error) -> BenchError {
    BenchError::Os { what: "count instructions", source }
}

/// Runs the subject that the child process was started for.
fn run_subject(case: &str, subject: &str) -> Result<Box<dyn ring::Subject>, String> {
    if poll::is_single(case) {
        return poll::make(case, subject).map_err(|error| error.to_string());
    }
    if dma::is_single(case) {
        return dma::make(case, subject).map_err(|error| error.to_string());
    }
    if barrier::is_single(case) {
        return barrier::make(case, subject).map_err(|error| error.to_string());
    }
    let case = Case::parse(case).ok_or_else(|| format!("no case {case:?}"))?;
    ring::make(case, subject)
        .map_err(|error| error.to_string())?
        .ok_or_else(|| format!("no subject {subject:?}"))
}
