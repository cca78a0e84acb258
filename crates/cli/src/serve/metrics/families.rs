//! The metrics, and their values from a report.
use crate::serve::report::{Device, Report};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use std::fmt;

/// Makes a report.
type Source = Box<dyn Fn() -> Report + Send + Sync>;

/// Metrics made from a new report for each request.
pub(super) struct DeviceMetrics(pub(super) Source);

impl fmt::Debug for DeviceMetrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("DeviceMetrics")
    }
}

/// A gauge of the daemon: name, help, value.
type DaemonGauge = (&'static str, &'static str, fn(&Report) -> Option<f64>);

const DAEMON: [DaemonGauge; 7] = [
    ("devices", "Number of served devices", |report| Some(report.devices.len() as f64)),
    ("devices_failed", "Number of devices of the file that failed to start", |report| {
        Some(report.failed.len() as f64)
    }),
    ("uptime_seconds", "Time since startup completed", |report| Some(report.uptime_s)),
    ("last_reload_successful", "Whether the last reload succeeded for all devices (0 or 1)", |report| {
        Some(report.reload.as_ref()?.ok.into())
    }),
    ("last_reload_timestamp_seconds", "Unix time of the end of the last reload", |report| {
        Some(report.reload.as_ref()?.unix_time_s)
    }),
    ("open_fds", "Number of open file descriptors", |report| report.open_files.map(|count| count as f64)),
    ("max_fds", "Maximum number of open file descriptors (RLIMIT_NOFILE)", |report| {
        report.max_open_files.map(|count| count as f64)
    }),
];

/// A metric of each device: name, help, whether it is a counter, value.
type DeviceMetric = (&'static str, &'static str, bool, fn(&Device) -> Option<u64>);

const DEVICE: [DeviceMetric; 25] = [
    ("device_connected", "Whether a VMM is connected (0 or 1)", false, |device| {
        Some(device.connected.into())
    }),
    ("device_failed", "Whether the device failed by an internal error (0 or 1)", false, |device| {
        Some(device.failed.is_some().into())
    }),
    (
        "device_stopping",
        "Whether the device is stopping and waits for requests in flight (0 or 1)",
        false,
        |device| Some(device.stopping.is_some().into()),
    ),
    ("device_sessions", "Connections by VMMs", true, |device| Some(device.sessions)),
    ("device_refused_connections", "Connections by VMMs that could not be accepted", true, |device| {
        Some(device.refused_connections)
    }),
    ("device_protocol_errors", "Connections ended by a protocol error of the VMM", true, |device| {
        Some(device.protocol_errors)
    }),
    ("device_translations_refused", "IOMMU translations of the VMM that were refused", true, |device| {
        Some(device.refused_translations)
    }),
    ("device_throttles", "Delays of a queue by a rate limit", true, |device| Some(device.throttled)),
    ("device_queues_enabled", "Number of queues enabled by the driver", false, |device| {
        Some(device.queues.iter().filter(|queue| queue.enabled).count() as u64)
    }),
    ("device_queues_failed", "Number of queues stopped by an error until their reset", false, |device| {
        Some(device.latched() as u64)
    }),
    ("device_memory_bytes", "Memory mapped for the VMM", false, |device| Some(device.memory)),
    ("device_memory_limit_bytes", "Maximum memory mapped for the VMM", false, |device| {
        Some(device.max_memory)
    }),
    ("device_kicks", "Available buffer notifications from the driver", true, |device| {
        Some(device.totals()[0])
    }),
    ("device_buffers_taken", "Available buffers taken from the driver", true, |device| {
        Some(device.totals()[1])
    }),
    ("device_buffers_completed", "Used buffers returned to the driver", true, |device| {
        Some(device.totals()[2])
    }),
    ("device_interrupts", "Used buffer notifications to the driver", true, |device| Some(device.totals()[3])),
    ("blk_size_bytes", "Size of the disk as last checked", false, |device| device.size),
    ("blk_rejected_requests", "Invalid requests, for example beyond the end of the disk", true, |device| {
        device.rejected_requests
    }),
    ("blk_size_unknown", "Whether the last check of the image size failed (0 or 1)", false, |device| {
        device.size.map(|_| device.size_error.is_some().into())
    }),
    ("blk_image_deleted", "Whether the image was deleted while in use (0 or 1)", false, |device| {
        device.size.map(|_| device.image_deleted.into())
    }),
    ("net_transmitted_frames", "Frames from the guest", true, |device| {
        Some(device.net.as_ref()?.transmitted_frames)
    }),
    ("net_transmitted_bytes", "Bytes in frames from the guest", true, |device| {
        Some(device.net.as_ref()?.transmitted_bytes)
    }),
    ("net_received_frames", "Frames to the guest", true, |device| Some(device.net.as_ref()?.received_frames)),
    ("net_received_bytes", "Bytes in frames to the guest", true, |device| {
        Some(device.net.as_ref()?.received_bytes)
    }),
    ("net_unusable_buffers", "Receive buffers of the guest too short for any frame", true, |device| {
        Some(device.net.as_ref()?.unusable_buffers)
    }),
];

/// Counts of a device by the values of a further label; `None`: it has none.
type Labelled = fn(&Device) -> Option<Vec<(&'static str, u64)>>;

/// Counters with a further label: name, help, label, values.
const LABELLED: [(&str, &str, &str, Labelled); 2] = [
    ("blk_errors", "Requests that storage failed", "operation", |device| {
        Some(device.storage_errors.as_ref()?.operations().to_vec())
    }),
    ("net_dropped_frames", "Frames dropped", "reason", |device| {
        let net = device.net.as_ref()?;
        Some(vec![
            ("malformed", net.malformed_frames),
            ("refused", net.refused_frames),
            ("no_room", net.no_room_frames),
        ])
    }),
];

/// A metric as the reference lists it.
pub(crate) struct MetricText {
    /// Without prefix and suffix.
    pub(crate) name: &'static str,
    /// "counter", "gauge" or "info".
    pub(crate) kind: &'static str,
    pub(crate) labels: Vec<&'static str>,
    pub(crate) help: &'static str,
}

impl MetricText {
    /// Suffix of the name in the text format.
    pub(crate) fn suffix(&self) -> &'static str {
        match self.kind {
            "counter" => "_total",
            "info" => "_info",
            _ => "",
        }
    }

    pub(crate) fn unit(&self) -> &'static str {
        match self.name {
            name if name.ends_with("_bytes") => "bytes",
            name if name.ends_with("_seconds") => "seconds",
            _ if self.help.ends_with("(0 or 1)") => "0 or 1",
            _ if self.kind == "info" => "",
            _ => "count",
        }
    }
}

/// All metrics, in the order in which they are served.
pub(crate) fn all() -> Vec<MetricText> {
    let device = || vec!["device", "kind"];
    let mut all = vec![MetricText { name: BUILD.0, kind: "info", labels: vec!["version"], help: BUILD.1 }];
    all.extend(DAEMON.map(|(name, help, _)| MetricText { name, kind: "gauge", labels: Vec::new(), help }));
    all.extend(DEVICE.map(|(name, help, grows, _)| MetricText {
        name,
        kind: if grows { "counter" } else { "gauge" },
        labels: device(),
        help,
    }));
    all.extend(LABELLED.map(|(name, help, label, _)| MetricText {
        name,
        kind: "counter",
        labels: [device(), vec![label]].concat(),
        help,
    }));
    all.push(MetricText { name: LAST_ERROR.0, kind: "gauge", labels: device(), help: LAST_ERROR.1 });
    all
}

/// The info metric of the daemon.
const BUILD: (&str, &str) = ("build", "Version of the daemon");
/// A gauge of each disk.
const LAST_ERROR: (&str, &str) =
    ("blk_last_error_timestamp_seconds", "Unix time of the last request that storage failed");

impl Collector for DeviceMetrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let report = (self.0)();
        let mut build = encoder.encode_descriptor(BUILD.0, BUILD.1, None, MetricType::Info)?;
        build.encode_info(&[("version", report.version.as_str())])?;
        for (name, help, value) in DAEMON {
            let Some(value) = value(&report) else { continue };
            encoder.encode_descriptor(name, help, None, MetricType::Gauge)?.encode_gauge(&value)?;
        }
        for (name, help, grows, value) in DEVICE {
            let kind = if grows { MetricType::Counter } else { MetricType::Gauge };
            let mut family = encoder.encode_descriptor(name, help, None, kind)?;
            for device in &report.devices {
                let Some(value) = value(device) else { continue };
                let labels = [("device", device.name.as_str()), ("kind", device.kind.as_str())];
                let mut metric = family.encode_family(&labels)?;
                if grows {
                    metric.encode_counter::<NoLabelSet, _, u64>(&value, None)?;
                } else {
                    metric.encode_gauge(&value)?;
                }
            }
        }
        for (name, help, label, values) in LABELLED {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
            for device in &report.devices {
                for (value, count) in values(device).into_iter().flatten() {
                    let labels =
                        [("device", device.name.as_str()), ("kind", device.kind.as_str()), (label, value)];
                    family.encode_family(&labels)?.encode_counter::<NoLabelSet, _, u64>(&count, None)?;
                }
            }
        }
        let help = LAST_ERROR.1;
        let mut family = encoder.encode_descriptor(LAST_ERROR.0, help, None, MetricType::Gauge)?;
        for device in &report.devices {
            let Some(last) = device.storage_errors.as_ref().and_then(|errors| errors.last.as_ref()) else {
                continue;
            };
            let labels = [("device", device.name.as_str()), ("kind", device.kind.as_str())];
            family.encode_family(&labels)?.encode_gauge(&last.unix_time_s)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::serve::report::{Net, Queue, Reload, StorageError, StorageErrors};
    use prometheus_client::encoding::text;
    use prometheus_client::registry::Registry;

    #[test]
    fn a_report_becomes_open_metrics() {
        let queue = |kicks| Queue { kicks, enabled: true, ..Queue::default() };
        let last = Some(StorageError { unix_time_s: 1.5, ..StorageError::default() });
        let disk = Device {
            name: "vm0".into(),
            kind: "blk".into(),
            connected: true,
            size: Some(4096),
            storage_errors: Some(StorageErrors { write: 3, last, ..StorageErrors::default() }),
            rejected_requests: Some(2),
            queues: vec![queue(1), queue(2)],
            ..Device::default()
        };
        let net = Some(Net { received_bytes: 7, no_room_frames: 5, ..Net::default() });
        let failed = Some("it panicked".into());
        let card = Device { name: "n".into(), kind: "net".into(), net, failed, ..Device::default() };
        let report = Report {
            version: "1".into(),
            devices: vec![disk, card],
            reload: Some(Reload { ok: false, ..Reload::default() }),
            max_open_files: Some(1024),
            ..Report::default()
        };
        let mut registry = Registry::with_prefix("paravane");
        registry.register_collector(Box::new(DeviceMetrics(Box::new(move || report.clone()))));
        let mut text = String::new();
        text::encode(&mut text, &registry).unwrap();
        for line in [
            "paravane_build_info{version=\"1\"} 1",
            "paravane_devices_failed 0.0",
            "paravane_last_reload_successful 0.0",
            "paravane_max_fds 1024.0",
            "# TYPE paravane_device_kicks counter",
            "paravane_device_kicks_total{device=\"vm0\",kind=\"blk\"} 3",
            "paravane_device_connected{device=\"n\",kind=\"net\"} 0",
            "paravane_device_failed{device=\"vm0\",kind=\"blk\"} 0",
            "paravane_device_failed{device=\"n\",kind=\"net\"} 1",
            "paravane_device_queues_enabled{device=\"vm0\",kind=\"blk\"} 2",
            "# TYPE paravane_blk_errors counter",
            "paravane_blk_errors_total{device=\"vm0\",kind=\"blk\",operation=\"write\"} 3",
            "paravane_blk_errors_total{device=\"vm0\",kind=\"blk\",operation=\"write_zeroes\"} 0",
            "paravane_blk_last_error_timestamp_seconds{device=\"vm0\",kind=\"blk\"} 1.5",
            "paravane_blk_rejected_requests_total{device=\"vm0\",kind=\"blk\"} 2",
            "paravane_blk_size_bytes{device=\"vm0\",kind=\"blk\"} 4096",
            "paravane_net_received_bytes_total{device=\"n\",kind=\"net\"} 7",
            "paravane_net_dropped_frames_total{device=\"n\",kind=\"net\",reason=\"no_room\"} 5",
            "# EOF",
        ] {
            assert!(text.lines().any(|there| there == line), "{line:?} is not in\n{text}");
        }
        assert!(!text.contains("paravane_net_received_bytes_total{device=\"vm0\""), "{text}");
        assert!(!text.contains("paravane_open_fds"), "unknown values are left out: {text}");
    }
}
