//! Errors of benchmarks.
use std::fmt::Display;

/// Why a benchmark failed.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// No benchmark has this name.
    #[error("no benchmark {0:?}; run `paravane bench list`")]
    Unknown(String),
    /// The filter selects no case.
    #[error("no case contains {0:?}; see docs/bench.md for the names of cases")]
    NoCase(String),
    /// A subject cannot be set up, or fails.
    #[error("{subject}: {reason}")]
    Subject {
        /// Name of the subject.
        subject: &'static str,
        /// Description of the failure.
        reason: String,
    },
    /// A system call fails.
    #[error("cannot {what}: {source}")]
    Os {
        /// The operation, as in "cannot {what}".
        what: &'static str,
        /// Error of the system.
        source: std::io::Error,
    },
}

/// A subject fails.
#[cold]
pub(crate) fn broken(subject: &'static str, reason: impl Display) -> BenchError {
    BenchError::Subject { subject, reason: reason.to_string() }
}

/// A subject moved `seen` chains instead of `wanted`.
#[cold]
pub(crate) fn miscounted(subject: &'static str, seen: usize, wanted: u16) -> BenchError {
    broken(subject, format_args!("moved {seen} chains instead of {wanted}"))
}
