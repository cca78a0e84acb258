//! What a run measures.
#[cfg(feature = "peers")]
use crate::error::BenchError;

/// The fewest rounds that make a result.
pub(crate) const MIN_ROUNDS: u32 = 5;

/// What to run.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Interleaved rounds; fewer than 5 are taken as 5.
    pub rounds: u32,
    /// Only cases whose path contains this.
    pub filter: Option<String>,
    /// Fewer cases and shorter samples, where a benchmark has a short form.
    pub quick: bool,
    /// How the client of `blk` learns of completions.
    pub client: Client,
}

/// How a client learns that its device is done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Client {
    /// The device interrupts: it signals an eventfd.
    #[default]
    Event,
    /// It looks at the ring all the time.
    Poll,
}

impl Client {
    /// What it is called in results and on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Event => "event",
            Self::Poll => "poll",
        }
    }
}

/// Those of `cases` whose path contains `filter`.
///
/// # Errors
/// There is none.
#[cfg(feature = "peers")]
pub(crate) fn select<C: std::fmt::Display>(mut cases: Vec<C>, filter: &str) -> Result<Vec<C>, BenchError> {
    cases.retain(|case| case.to_string().contains(filter));
    if cases.is_empty() { Err(BenchError::NoCase(filter.to_owned())) } else { Ok(cases) }
}
