//! Rates between two reports.
use super::latency::{DeviceValues, Percentiles};
use crate::serve::report::{Device, Report};
use serde::Serialize;
use std::time::Duration;

/// Per second, over all queues of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Rates {
    /// Buffers returned to the driver.
    pub(crate) completed_per_s: f64,
    pub(crate) kicks_per_s: f64,
    pub(crate) interrupts_per_s: f64,
    /// From the guest; network cards only.
    pub(crate) transmitted_mb_per_s: f64,
    pub(crate) received_mb_per_s: f64,
    /// Latency of the requests in this time. `None`: there were none, or this is a sum.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) latency: Option<Percentiles>,
    /// Mean number of requests in flight whenever some were taken. `None`: as above.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) depth: Option<f64>,
}

impl Rates {
    pub(crate) fn plus(&self, other: &Self) -> Self {
        Self {
            completed_per_s: self.completed_per_s + other.completed_per_s,
            kicks_per_s: self.kicks_per_s + other.kicks_per_s,
            interrupts_per_s: self.interrupts_per_s + other.interrupts_per_s,
            transmitted_mb_per_s: self.transmitted_mb_per_s + other.transmitted_mb_per_s,
            received_mb_per_s: self.received_mb_per_s + other.received_mb_per_s,
            latency: None,
            depth: None,
        }
    }
}

/// Latency and depth of a device. Without rates, of all requests so far.
pub(super) fn latency(device: &Device, rates: Option<&Rates>) -> (Option<Percentiles>, Option<f64>) {
    rates.map_or_else(
        || {
            let values = DeviceValues::new(device);
            (values.percentiles(), values.depth.mean())
        },
        |rates| (rates.latency, rates.depth),
    )
}

/// Rates of each device of `after`, in its order.
pub(crate) fn rates(before: &Report, after: &Report, elapsed: Duration) -> Vec<Rates> {
    let of = |device: &Device| {
        let Some(earlier) = before.devices.iter().find(|earlier| earlier.name == device.name) else {
            return Rates::default();
        };
        // The counters of a device that was restarted begin at 0.
        let per_s = |now: u64, then: u64| now.saturating_sub(then) as f64 / elapsed.as_secs_f64();
        let ([kicks, _, completed, interrupts], [kicks0, _, completed0, interrupts0]) =
            (device.totals(), earlier.totals());
        let (net, net0) = (device.net.clone().unwrap_or_default(), earlier.net.clone().unwrap_or_default());
        let values = DeviceValues::between(earlier, device);
        Rates {
            completed_per_s: per_s(completed, completed0),
            kicks_per_s: per_s(kicks, kicks0),
            interrupts_per_s: per_s(interrupts, interrupts0),
            transmitted_mb_per_s: per_s(net.transmitted_bytes, net0.transmitted_bytes) * 1e-6,
            received_mb_per_s: per_s(net.received_bytes, net0.received_bytes) * 1e-6,
            latency: values.percentiles(),
            depth: values.depth.mean(),
        }
    };
    after.devices.iter().map(of).collect()
}
