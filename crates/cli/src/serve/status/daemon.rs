//! The report of a daemon with its rates.
use super::rates::Rates;
use super::summary::Summary;
use crate::serve::report::Report;
use serde::Serialize;
use std::path::PathBuf;

/// A daemon's report and rates.
#[derive(Debug, Default, Serialize)]
pub(super) struct Daemon {
    pub(super) control: PathBuf,
    pub(super) summary: Summary,
    #[serde(flatten)]
    pub(super) report: Report,
    /// Rates of each device of the report, in its order; empty with `--seconds 0`.
    pub(super) rates: Vec<Rates>,
    /// Number of devices before filtering.
    #[serde(skip)]
    pub(super) all: usize,
}

impl Daemon {
    pub(super) fn names(&self) -> impl Iterator<Item = &str> + Clone {
        let devices = self.report.devices.iter().map(|device| device.name.as_str());
        let waiting = self.report.waiting.iter().map(|waiting| waiting.name.as_str());
        devices.chain(self.report.failed.iter().map(|failed| failed.name.as_str())).chain(waiting)
    }

    pub(super) fn truncate(&mut self, limit: Option<usize>) {
        let limit = limit.unwrap_or(usize::MAX);
        self.report.devices.truncate(limit);
        self.rates.truncate(limit);
    }
}
