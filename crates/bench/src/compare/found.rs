//! What a comparison finds.
use serde::Serialize;

/// What became of a figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// Worse beyond the noise.
    Worse,
    /// Better beyond the noise.
    Better,
    /// No change beyond the noise.
    Same,
}

/// A figure before and after.
#[derive(Clone, Debug, Serialize)]
pub struct Change {
    /// Name of the benchmark.
    pub bench: String,
    /// Path of the case.
    pub case: String,
    /// Name of the subject.
    pub subject: String,
    /// Name of the metric.
    pub metric: String,
    /// Unit of the medians.
    pub unit: String,
    /// Median before.
    pub before: f64,
    /// Median after.
    pub after: f64,
    /// Relative change: 0.1 is 10 % more.
    pub shift: f64,
    /// Interval of 95 % of the change.
    pub interval: [f64; 2],
    /// Two-sided p of "nothing changed", also relative to the controls.
    pub p: f64,
    /// The relative change that counts as noise.
    pub floor: f64,
    /// What became of it.
    pub verdict: Verdict,
}

/// The comparison of a run with a baseline.
#[derive(Clone, Debug, Serialize)]
pub struct Comparison {
    /// What the run was compared with.
    pub baseline: String,
    /// Name of the test.
    pub test: &'static str,
    /// The least relative change that counts.
    pub threshold: f64,
    /// All figures that were compared, the largest change first.
    pub changes: Vec<Change>,
    /// Figures of one side only, or measured by another method.
    pub unmatched: usize,
    /// Number of controls.
    pub controls: usize,
    /// Largest relative change of a control.
    pub largest_control: f64,
    /// Peers whose versions differ, which are no controls.
    pub changed_peers: Vec<String>,
    /// Fewest figures that must change alike to be seen with this number of rounds.
    pub fewest_visible: usize,
    /// Rounds with which one changed figure is seen.
    pub rounds_for_one: usize,
}
