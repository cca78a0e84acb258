//! Summary of a daemon in one line.
use super::rates::Rates;
use crate::serve::report::Report;
use serde::Serialize;

/// Sums over the selected devices.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(super) struct Summary {
    /// Number of devices; the next fields count those in a state.
    pub(super) devices: usize,
    pub(super) connected: usize,
    /// A thread of the device panicked.
    pub(super) failed: usize,
    pub(super) stopping: usize,
    /// Devices that need attention.
    pub(super) with_problems: usize,
    /// Devices of the file that failed to start.
    pub(super) not_served: usize,
    /// Devices of the file that have not started yet.
    pub(super) waiting: usize,
    /// Sum of the column ERRORS.
    pub(super) errors: u64,
    pub(super) storage_errors: u64,
    /// `None` with `--seconds 0`.
    pub(super) rates: Option<Rates>,
}

impl Summary {
    pub(super) fn new(report: &Report, rates: &[Rates]) -> Self {
        let Report { devices, failed, waiting, .. } = report;
        let count = |is: fn(&crate::serve::report::Device) -> bool| {
            devices.iter().filter(|device| is(device)).count()
        };
        Self {
            devices: devices.len(),
            connected: count(|device| device.connected),
            failed: count(|device| device.failed.is_some()),
            stopping: count(|device| device.stopping.is_some()),
            with_problems: count(|device| device.has_problem()),
            not_served: failed.len(),
            waiting: waiting.len(),
            errors: devices.iter().map(|device| device.errors()).sum(),
            storage_errors: devices.iter().map(|device| device.storage_errors()).sum(),
            rates: (!rates.is_empty()).then(|| rates.iter().fold(Rates::default(), |sum, one| sum.plus(one))),
        }
    }

    /// Adds another daemon's sums.
    pub(super) fn plus(self, other: &Self) -> Self {
        let rates = match (self.rates, other.rates) {
            (Some(one), Some(other)) => Some(one.plus(&other)),
            (one, other) => one.or(other),
        };
        Self {
            devices: self.devices + other.devices,
            connected: self.connected + other.connected,
            failed: self.failed + other.failed,
            stopping: self.stopping + other.stopping,
            with_problems: self.with_problems + other.with_problems,
            not_served: self.not_served + other.not_served,
            waiting: self.waiting + other.waiting,
            errors: self.errors + other.errors,
            storage_errors: self.storage_errors + other.storage_errors,
            rates,
        }
    }

    /// One line. `of`: the number of all devices, if some are filtered out.
    pub(super) fn line(&self, of: Option<usize>) -> String {
        let Self { devices, connected, failed, errors, storage_errors, .. } = self;
        let of = of.map_or(String::new(), |all| format!(" of {all}"));
        let noun = if *devices == 1 && of.is_empty() { "device" } else { "devices" };
        let mut parts = vec![format!("{devices}{of} {noun}"), format!("{connected} connected")];
        for (count, what) in [
            (failed, "failed"),
            (&self.stopping, "stopping"),
            (&self.waiting, "waiting"),
            (&self.not_served, "not served"),
            (&self.with_problems, "with problems"),
        ] {
            if *count > 0 {
                parts.push(format!("{count} {what}"));
            }
        }
        let noun = if *errors == 1 { "error" } else { "errors" };
        parts.push(match storage_errors {
            0 => format!("{errors} {noun}"),
            _ => format!("{errors} {noun} ({storage_errors} storage)"),
        });
        if let Some(rates) = &self.rates {
            parts.push(format!("{:.0} done/s", rates.completed_per_s));
            let megabytes = rates.transmitted_mb_per_s + rates.received_mb_per_s;
            if megabytes > 0.0 {
                parts.push(format!("{megabytes:.1} MB/s"));
            }
        }
        parts.join(", ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::serve::report::{Device, Failed, StorageErrors};

    #[test]
    fn a_summary_counts_devices_errors_and_rates() {
        let fine = Device { connected: true, ..Device::default() };
        let bad = Device {
            protocol_errors: 2,
            storage_errors: Some(StorageErrors { write: 3, ..StorageErrors::default() }),
            ..Device::default()
        };
        let panicked = Device { failed: Some("it panicked".into()), ..Device::default() };
        let report = Report {
            devices: vec![fine, bad, panicked],
            failed: vec![Failed::default()],
            ..Report::default()
        };
        let rates = [1.0, 2.0, 4.0].map(|completed_per_s| Rates { completed_per_s, ..Rates::default() });
        let summary = Summary::new(&report, &rates);
        let line =
            "3 devices, 1 connected, 1 failed, 1 not served, 2 with problems, 5 errors (3 storage), 7 done/s";
        assert_eq!(summary.line(None), line);
        let both = summary.clone().plus(&summary);
        assert_eq!((both.devices, both.errors, both.rates.unwrap().completed_per_s), (6, 10, 14.0));
        let none = Summary::new(&Report::default(), &[]);
        assert_eq!(none.line(Some(1000)), "0 of 1000 devices, 0 connected, 0 errors");
    }
}
