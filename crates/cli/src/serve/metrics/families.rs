//! What metrics there are, and how a report becomes them.
use crate::serve::report::{Device, Report};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use std::fmt;

/// Makes a report.
type Source = Box<dyn Fn() -> Report + Send + Sync>;

/// All devices, as they are when somebody asks.
pub(super) struct Devices(pub(super) Source);

impl fmt::Debug for Devices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Devices")
    }
}

/// Of the daemon: name, help, value.
type DaemonFigure = (&'static str, &'static str, fn(&Report) -> Option<f64>);

const DAEMON: [DaemonFigure; 7] = [
    ("devices", "Devices that are served", |report| Some(report.devices.len() as f64)),
    ("devices_failed", "Devices of the file that could not be started", |report| {
        Some(report.failed.len() as f64)
    }),
    ("uptime_seconds", "Time since the daemon was ready", |report| Some(report.uptime_s)),
    ("last_reload_successful", "Whether the last SIGHUP left no mistake and no failed device", |report| {
        Some(report.reload.as_ref()?.ok.into())
    }),
    ("last_reload_timestamp_seconds", "When the last SIGHUP was done with, since 1970", |report| {
        Some(report.reload.as_ref()?.unix_time_s)
    }),
    ("open_fds", "Open file descriptors", |report| report.open_files.map(|count| count as f64)),
    ("max_fds", "Limit of open file descriptors (RLIMIT_NOFILE)", |report| {
        report.max_open_files.map(|count| count as f64)
    }),
];

/// Of a device: name, help, whether it only grows, value.
type Figure = (&'static str, &'static str, bool, fn(&Device) -> Option<u64>);

const FIGURES: [Figure; 25] = [
    ("device_connected", "Whether a VMM is connected", false, |device| Some(device.connected.into())),
    ("device_failed", "Whether the device has failed by a mistake of the daemon's", false, |device| {
        Some(device.failed.is_some().into())
    }),
    (
        "device_stopping",
        "Whether it has been told to stop, and waits for requests in flight",
        false,
        |device| Some(device.stopping.is_some().into()),
    ),
    ("device_sessions", "Connections of VMMs", true, |device| Some(device.sessions)),
    ("device_refused_connections", "Connections that could not be accepted", true, |device| {
        Some(device.refused_connections)
    }),
    ("device_protocol_errors", "Connections that ended with an error", true, |device| {
        Some(device.protocol_errors)
    }),
    ("device_translations_refused", "Translations of a VMM's IOMMU that were not taken", true, |device| {
        Some(device.refused_translations)
    }),
    ("device_throttles", "Times that a rate limit has held a queue", true, |device| Some(device.throttled)),
    ("device_queues_enabled", "Queues that the driver uses", false, |device| {
        Some(device.queues.iter().filter(|queue| queue.enabled).count() as u64)
    }),
    ("device_queues_failed", "Queues that have stopped for good", false, |device| {
        Some(device.latched() as u64)
    }),
    ("device_memory_bytes", "Bytes mapped for the VMM", false, |device| Some(device.memory)),
    ("device_memory_limit_bytes", "Most bytes that may be mapped for the VMM", false, |device| {
        Some(device.max_memory)
    }),
    ("device_kicks", "Notifications from the driver", true, |device| Some(device.totals()[0])),
    ("device_buffers_taken", "Buffers taken from the driver", true, |device| Some(device.totals()[1])),
    ("device_buffers_completed", "Buffers given back to the driver", true, |device| Some(device.totals()[2])),
    ("device_interrupts", "Interrupts to the driver", true, |device| Some(device.totals()[3])),
    ("blk_size_bytes", "Size of the disk", false, |device| device.size),
    ("blk_rejected_requests", "Requests that ask for what the disk has not", true, |device| {
        device.rejected_requests
    }),
    ("blk_size_unknown", "Whether the last look at the image's size failed", false, |device| {
        device.size.map(|_| device.size_error.is_some().into())
    }),
    ("blk_image_deleted", "Whether the image has no name any more", false, |device| {
        device.size.map(|_| device.image_deleted.into())
    }),
    ("net_transmitted_frames", "Frames from the driver", true, |device| {
        Some(device.net.as_ref()?.transmitted_frames)
    }),
    ("net_transmitted_bytes", "Bytes in frames from the driver", true, |device| {
        Some(device.net.as_ref()?.transmitted_bytes)
    }),
    ("net_received_frames", "Frames to the driver", true, |device| {
        Some(device.net.as_ref()?.received_frames)
    }),
    ("net_received_bytes", "Bytes in frames to the driver", true, |device| {
        Some(device.net.as_ref()?.received_bytes)
    }),
    ("net_unusable_buffers", "Buffers of the driver that are too short for any frame", true, |device| {
        Some(device.net.as_ref()?.unusable_buffers)
    }),
];

/// Counts of a device by the values of one more label: none if the device has no such counts.
type Labelled = fn(&Device) -> Option<Vec<(&'static str, u64)>>;

/// Counters: name, help, label, values.
const LABELLED: [(&str, &str, &str, Labelled); 2] = [
    ("blk_errors", "Requests that the storage failed", "operation", |device| {
        Some(device.storage_errors.as_ref()?.operations().to_vec())
    }),
    ("net_dropped_frames", "Frames that were dropped", "reason", |device| {
        let net = device.net.as_ref()?;
        Some(vec![
            ("malformed", net.malformed_frames),
            ("refused", net.refused_frames),
            ("no_room", net.no_room_frames),
        ])
    }),
];

impl Collector for Devices {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let report = (self.0)();
        let mut build = encoder.encode_descriptor("build", "The program", None, MetricType::Info)?;
        build.encode_info(&[("version", report.version.as_str())])?;
        for (name, help, value) in DAEMON {
            let Some(value) = value(&report) else { continue };
            encoder.encode_descriptor(name, help, None, MetricType::Gauge)?.encode_gauge(&value)?;
        }
        for (name, help, grows, value) in FIGURES {
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
        let help = "When the storage failed a request the last time, since 1970";
        let mut family =
            encoder.encode_descriptor("blk_last_error_timestamp_seconds", help, None, MetricType::Gauge)?;
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
        registry.register_collector(Box::new(Devices(Box::new(move || report.clone()))));
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
        assert!(!text.contains("paravane_open_fds"), "what is not known is not there: {text}");
    }
}
