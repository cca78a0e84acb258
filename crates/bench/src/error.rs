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
    #[error("{reason} (subject {subject})")]
    Subject {
        /// Name of the subject.
        subject: &'static str,
        /// Description of the failure.
        reason: String,
    },
    /// A file of results cannot be read.
    #[error("{path}: {source}")]
    ReadResults {
        /// The file.
        path: String,
        /// Error of the system.
        source: std::io::Error,
    },
    /// A file is too large for a file of results.
    #[error("{0}: larger than 64 MiB; pass the results.json of an earlier --report")]
    LargeResults(String),
    /// A file has no results.
    #[error("{path}: no results of paravane bench: {source}; pass the results.json of an earlier --report")]
    NoResults {
        /// The file.
        path: String,
        /// Where the text is not as expected.
        source: serde_json::Error,
    },
    /// A file of results has another format.
    #[error("{path}: results have format {format}, this program reads 1; measure the baseline again")]
    ForeignResults {
        /// The file.
        path: String,
        /// Its format; 0 if missing.
        format: u32,
    },
    /// Two runs have no figure in common.
    #[error("{0}: no figure in common with this run; use the same NAME, --filter, --quick and --client")]
    NothingInCommon(String),
    /// No other build was measured.
    #[error("no other build was measured; set PARAVANE_BENCH_OTHER and run blk or net")]
    NoOtherBuild,
    /// There is no program to measure.
    #[error(
        "no program paravane beside this one or in PATH; install the package paravane, or build it with cargo build --release"
    )]
    NoProgram,
    /// A report cannot be written.
    #[error("cannot write {path}: {source}")]
    WriteReport {
        /// The file or folder.
        path: String,
        /// Error of the system.
        source: std::io::Error,
    },
    /// So many devices need more descriptors than this process may have.
    #[error(
        "RLIMIT_NOFILE is {hard}; {count} devices need {needed}: raise it (ulimit -Hn), or measure fewer (--filter)"
    )]
    Descriptors {
        /// Number of devices.
        count: usize,
        /// Descriptors that they need.
        needed: u64,
        /// The hard limit.
        hard: u64,
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
