//! Metrics that a kind of device brings.
pub(crate) use super::exposition::Kind;
use crate::serve::report::Device;

/// A metric of each device: name without suffix, help, kind, value.
pub(crate) type DeviceMetric = (&'static str, &'static str, Kind, fn(&Device) -> Option<u64>);

/// Counter with a further label: name without suffix, help, label, and the values by label.
pub(crate) type LabelledMetric = (&'static str, &'static str, &'static str, fn(&Device) -> Vec<(&str, f64)>);

/// The metrics of a kind.
#[derive(Default)]
pub(crate) struct Metrics {
    pub(crate) plain: &'static [DeviceMetric],
    pub(crate) labelled: &'static [LabelledMetric],
}
