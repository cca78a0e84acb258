//! The child process of the instruction count by single steps.
use crate::instructions::failed;
use crate::instructions::single_step::{STEP_ENV, per_chain};
use crate::notify::process;
use crate::ring::{Case, QUEUE_SIZE};
use crate::subject::Subject;
use crate::{BenchError, barrier, dma, latencies, poll, ring};
use nix::sys::ptrace;
use nix::sys::signal::{Signal, raise};
use std::hint::black_box;
use std::io::{self, Write};
use std::process::ExitCode;

/// Counts the instructions per operation of one subject by single steps.
///
/// [`crate::run`] falls back to this without a hardware counter. The count includes the script that
/// plays the other side of a queue; the figures of a table do not. The program must call
/// [`child_main`].
///
/// # Errors
/// No such case exists, or stepping the child process failed.
pub fn single_step(case: &str, subject: &str) -> Result<f64, BenchError> {
    let batch = match Case::parse(case) {
        Some(case) => case.batch,
        None if poll::is_single(case) => ring::QUEUE_SIZE,
        None if dma::is_single(case) || barrier::is_single(case) => dma::timing::BATCH,
        None => latencies::batch(case).ok_or_else(|| BenchError::NoCase(case.to_owned()))?,
    };
    per_chain(case, batch, subject).map_err(failed)
}

/// Runs as a child of a measurement, and returns its exit code.
///
/// Call it at the start of `main`, and end with the code that it returns. [`crate::run`] starts the
/// program again as a child: without a hardware counter, it steps through the child's work; of
/// `notify`, a child serves queues. An environment variable or the first argument marks the child.
/// In every other process this function returns `None` at once.
#[must_use]
pub fn child_main() -> Option<ExitCode> {
    let Ok(job) = std::env::var(STEP_ENV) else { return process::child_main() };
    Some(match work(&job) {
        Ok(()) => ExitCode::SUCCESS,
        Err(reason) => {
            let _ = writeln!(io::stderr(), "{STEP_ENV}: {reason}");
            ExitCode::from(2)
        }
    })
}

fn work(job: &str) -> Result<(), String> {
    let words: Vec<&str> = job.split(' ').collect();
    let &[case, subject, first, second] = words.as_slice() else {
        return Err(format!("invalid job {job:?}"));
    };
    let batches = |word: &str| word.parse::<u32>().map_err(|error| format!("{word:?}: {error}"));
    let marks = [batches(first)?, batches(second)?];
    let mut subject = run_subject(case, subject)?;
    // Two laps of the ring, so that nothing in the counted part happens for the first time.
    subject.run(2 * u32::from(QUEUE_SIZE)).map_err(|error| error.to_string())?;
    ptrace::traceme().map_err(|error| error.to_string())?;
    raise(Signal::SIGSTOP).map_err(|error| error.to_string())?;
    for batches in marks {
        subject.ready().map_err(|error| error.to_string())?;
        raise(Signal::SIGSTOP).map_err(|error| error.to_string())?;
        black_box(subject.run(black_box(batches)).map_err(|error| error.to_string())?);
        raise(Signal::SIGSTOP).map_err(|error| error.to_string())?;
    }
    Ok(())
}

/// Makes the subject that the child process was started for.
fn run_subject(case: &str, subject: &str) -> Result<Box<dyn Subject>, String> {
    if poll::is_single(case) {
        return poll::make(case, subject).map_err(|error| error.to_string());
    }
    if dma::is_single(case) {
        return dma::make(case, subject).map_err(|error| error.to_string());
    }
    if barrier::is_single(case) {
        return barrier::make(case, subject).map_err(|error| error.to_string());
    }
    if latencies::batch(case).is_some() {
        return latencies::make(case, subject).map_err(|error| error.to_string());
    }
    let case = Case::parse(case).ok_or_else(|| format!("no case {case:?}"))?;
    ring::make(case, subject)
        .map_err(|error| error.to_string())?
        .ok_or_else(|| format!("no subject {subject:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::instructions::single_step::PROBE;

    #[test]
    fn the_probe_is_a_case() {
        let (case, batch, subject) = PROBE;
        assert_eq!(Case::parse(case).map(|case| case.batch), Some(batch));
        assert!(run_subject(case, subject).is_ok());
    }
}
