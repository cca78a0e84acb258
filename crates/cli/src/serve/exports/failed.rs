//! Devices that cannot be served.
use super::super::report;
use super::super::spec::DeviceSpec;
use crate::failure::one_line;

/// The failures of all devices of a group, since one of them failed.
pub(super) fn failed_by(
    specs: &[DeviceSpec],
    culprit: &DeviceSpec,
    error: &anyhow::Error,
) -> Vec<report::Failed> {
    all_failed(specs, |other| match other.name == culprit.name {
        true => one_line(error),
        false => "the other card of its link failed".to_owned(),
    })
}

pub(super) fn log_failed(failed: &[report::Failed]) {
    for report::Failed { name, why, .. } in failed {
        tracing::error!(device = name, "cannot serve device: {why}");
    }
}

pub(super) fn all_failed(specs: &[DeviceSpec], why: impl Fn(&DeviceSpec) -> String) -> Vec<report::Failed> {
    let failed =
        |spec: &DeviceSpec| report::Failed { name: spec.name.clone(), why: why(spec), ..Default::default() };
    specs.iter().map(failed).collect()
}
