//! Options of a run, and how they select cases.
#[cfg(feature = "peers")]
use crate::error::BenchError;

/// The fewest rounds of a run.
pub(crate) const MIN_ROUNDS: u32 = 5;

/// Options of a run.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Interleaved rounds, at least 5.
    pub rounds: u32,
    /// Selects the cases whose path contains this text.
    pub filter: Option<String>,
    /// Takes fewer cases and shorter samples, in benchmarks that support it.
    pub quick: bool,
    /// How the client of `blk` waits for completions.
    pub client: Client,
    /// Keeps every CPU busy with another thread, in `blk`.
    pub contended: bool,
}

/// How a client waits for completions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Client {
    /// By an interrupt, which is an eventfd.
    #[default]
    Event,
    /// By polling the ring.
    Poll,
}

impl Client {
    /// Name in results and on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Event => "event",
            Self::Poll => "poll",
        }
    }
}

/// Selects the cases whose path contains `filter`.
///
/// # Errors
/// No case matches.
#[cfg(feature = "peers")]
pub(crate) fn select<C: std::fmt::Display>(mut cases: Vec<C>, filter: &str) -> Result<Vec<C>, BenchError> {
    cases.retain(|case| case.to_string().contains(filter));
    if cases.is_empty() { Err(BenchError::NoCase(filter.to_owned())) } else { Ok(cases) }
}
