//! What observers see of all devices.
use super::super::spec::DeviceSpec;
use super::group::{Group, Leaving, State};
use super::lock_wait::WAITS_FOR;
use super::served::ServedDevice;
use super::state::{Exports, Inner};
use crate::serve::report::{self, Report};

/// Whether the devices of the start are served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Startup {
    Complete,
    /// A device waits for its image.
    Waiting,
    /// A device cannot be served. Settled: no other one waits.
    Failed {
        why: String,
        is_settled: bool,
    },
}

impl Exports {
    fn report_of(&self, member: &ServedDevice) -> report::Device {
        let shelf = self.0.context.shelf.as_ref();
        let not_kept = shelf.and_then(|shelf| shelf.refusal(&member.spec.name));
        report::Device { not_kept, ..member.report() }
    }

    /// State and counters of all devices.
    pub(crate) fn report(&self) -> Report {
        let inner = self.inner();
        Report {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            uptime_s: self.0.started.elapsed().as_secs_f64(),
            last_reload: inner.last_reload.clone(),
            reload: inner.outcome.clone(),
            io_threads: self.0.context.threads.report(),
            devices: inner.served().chain(inner.stopping()).map(|member| self.report_of(member)).collect(),
            failed: inner.failed().collect(),
            waiting: inner.groups.iter().flat_map(|group| inner.waiting(group)).collect(),
            ..Report::default()
        }
    }

    /// What keeps the devices of the start from being served.
    pub(crate) fn startup(&self) -> Startup {
        let inner = self.inner();
        let is_waiting = |group: &Group| !group.has_failed() && !matches!(group.state, State::Served(_));
        match inner.not_served() {
            Some(why) => Startup::Failed { why, is_settled: !inner.groups.iter().any(is_waiting) },
            None if inner.groups.iter().any(is_waiting) => Startup::Waiting,
            None => Startup::Complete,
        }
    }

    /// Which devices are not served, and why.
    pub(crate) fn not_served(&self) -> Option<String> {
        self.inner().not_served()
    }

    /// Number of devices that are served, and of all.
    pub(crate) fn count(&self) -> (usize, usize) {
        let inner = self.inner();
        (inner.served().count(), inner.groups.iter().map(|group| group.specs.len()).sum())
    }

    /// Whether a device is served, or a session waits for one.
    pub(crate) fn is_of_use(&self) -> bool {
        let inner = self.inner();
        !inner.kept.is_empty() || inner.served().next().is_some()
    }
}

impl Inner {
    /// Which devices are not served, and why.
    fn not_served(&self) -> Option<String> {
        let failed = self.failed().map(|failed| format!("device {}: {}", failed.name, failed.why));
        Some(failed.collect::<Vec<_>>().join("; ")).filter(|failed| !failed.is_empty())
    }

    /// What the devices of a group wait for, if they wait.
    pub(super) fn waiting(&self, group: &Group) -> Vec<report::Waiting> {
        if group.has_failed() {
            return Vec::new();
        }
        let why = match group.state {
            State::Waiting => {
                let holder = self
                    .leaving
                    .iter()
                    .find_map(|leaving| leaving.holds_up(&group.specs).map(|device| (device, leaving)));
                match holder {
                    Some((device, Leaving { members: Some(members), since, .. })) => {
                        let in_flight: u64 = members.iter().map(ServedDevice::in_flight).sum();
                        let seconds = since.elapsed().as_secs();
                        format!(
                            "device {} to stop ({in_flight} requests in flight, stopping for {seconds} s)",
                            device.name
                        )
                    }
                    Some((device, _)) => format!("device {} to open and stop", device.name),
                    None => "its turn to open".to_owned(),
                }
            }
            State::Opening(ref wait) if wait.waits() => WAITS_FOR.to_owned(),
            State::Opening(_) => "the host to open its files".to_owned(),
            State::Served(_) | State::Failed(_) => return Vec::new(),
        };
        let seconds = group.since.elapsed().as_secs_f64();
        let waiting =
            |spec: &DeviceSpec| report::Waiting { name: spec.name.clone(), why: why.clone(), seconds };
        group.specs.iter().map(waiting).collect()
    }
}
