//! The measuring instrument behind `paravane bench`.
use serde::Serialize;

/// One row of a result: what was measured, on whom, and how it spread over the rounds.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// Benchmark: "ring".
    pub bench: String,
    /// Path of the case: "split/device/1desc/batch32".
    pub case: String,
    /// "paravane", or the peer's name.
    pub subject: String,
    /// "time", "instructions", "rate" or "cpu".
    pub metric: String,
    /// Unit of the values: "ns/chain".
    pub unit: String,
    /// Median of the rounds.
    pub median: f64,
    /// Smallest.
    pub min: f64,
    /// Largest.
    pub max: f64,
    /// Number of rounds.
    pub rounds: u32,
}

/// A benchmark that can be run by name.
#[derive(Clone, Copy, Debug)]
pub struct Benchmark {
    /// Its name on the command line.
    pub name: &'static str,
    /// One line.
    pub summary: &'static str,
}

/// All benchmarks.
#[must_use]
pub fn list() -> &'static [Benchmark] {
    &[Benchmark { name: "ring", summary: "cost of a virtqueue, device and driver side, beside the published crates" }]
}

/// What to run.
#[derive(Clone, Debug)]
pub struct Options {
    /// Interleaved rounds, at least 5.
    pub rounds: u32,
    /// Only cases whose path contains this.
    pub filter: Option<String>,
}

/// Why a benchmark did not run.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// there is no benchmark called {0}
    #[error("there is no benchmark called {0:?}; `paravane bench list` names them")]
    Unknown(String),
    /// no case matches {0:?}
    #[error("no case matches {0:?}")]
    NoCase(String),
    /// cannot {what}: {source}
    #[error("cannot {what}: {source}")]
    Os {
        /// What was tried.
        what: &'static str,
        /// Why not.
        source: std::io::Error,
    },
}

/// Runs the benchmark called `name`. `progress` is called with what is being measured.
///
/// # Errors
/// See [`BenchError`].
pub fn run(name: &str, options: &Options, progress: &mut dyn FnMut(&str)) -> Result<Vec<Row>, BenchError> {
    let _ = (name, options, progress);
    todo!()
}

/// The rows as a table for people, ours beside each peer with the ratio.
#[must_use]
pub fn table(rows: &[Row]) -> String {
    let _ = rows;
    todo!()
}
