//! Errors.
use std::fmt::Display;

/// Why a benchmark did not run.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// there is no benchmark called {0}
    #[error("there is no benchmark called {0:?}; `paravane bench list` names them")]
    Unknown(String),
    /// no case matches {0:?}
    #[error("no case matches {0:?}")]
    NoCase(String),
    /// {subject} does not work: {reason}
    #[error("{subject} does not work: {reason}")]
    Subject {
        /// Who was to be measured.
        subject: &'static str,
        /// What went wrong.
        reason: String,
    },
    /// cannot {what}: {source}
    #[error("cannot {what}: {source}")]
    Os {
        /// What was tried.
        what: &'static str,
        /// Why not.
        source: std::io::Error,
    },
}

/// The error of a subject that does not work.
#[cold]
pub(crate) fn broken(subject: &'static str, reason: impl Display) -> BenchError {
    BenchError::Subject { subject, reason: reason.to_string() }
}

/// The error of a subject that moved `seen` chains of `wanted`.
#[cold]
pub(crate) fn miscounted(subject: &'static str, seen: usize, wanted: u16) -> BenchError {
    broken(subject, format_args!("it moved {seen} chains of {wanted}"))
}
