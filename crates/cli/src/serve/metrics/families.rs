//! The metrics, and their values from a report.
use super::buckets::{self, Bounds};
use super::exposition::{Exposition, Kind, labels};
use super::of_kind::DeviceMetric;
use crate::kinds::KINDS;
use crate::serve::report::{Device, Distribution, Report, Thread};

/// A metric of the daemon: name without suffix, kind, help, value.
type DaemonMetric = (&'static str, Kind, &'static str, fn(&Report) -> Option<f64>);

/// Names of the process are those of the client libraries of Prometheus.
const DAEMON: [DaemonMetric; 16] = [
    ("paravane_devices", Kind::Gauge, "Number of served devices", |report| Some(report.devices.len() as f64)),
    (
        "paravane_devices_failed",
        Kind::Gauge,
        "Number of devices of the file that failed to start",
        |report| Some(report.failed.len() as f64),
    ),
    (
        "paravane_devices_waiting",
        Kind::Gauge,
        "Number of devices of the file that have not started yet",
        |report| Some(report.waiting.len() as f64),
    ),
    ("paravane_uptime_seconds", Kind::Gauge, "Time since startup completed", |report| Some(report.uptime_s)),
    (
        "paravane_last_reload_successful",
        Kind::Gauge,
        "Whether the last reload succeeded for all devices (0 or 1)",
        |report| Some(f64::from(u8::from(report.reload.as_ref()?.ok))),
    ),
    (
        "paravane_last_reload_timestamp_seconds",
        Kind::Gauge,
        "Unix time of the end of the last reload",
        |report| Some(report.reload.as_ref()?.unix_time_s),
    ),
    ("paravane_log_lines_lost", Kind::Counter, "Log lines that stderr did not take", |report| {
        Some(report.log.lost_lines as f64)
    }),
    ("paravane_log_lines_suppressed", Kind::Counter, "Log lines suppressed by --log-rate", |report| {
        Some(report.log.suppressed_lines as f64)
    }),
    ("paravane_open_fds", Kind::Gauge, "Number of open file descriptors", |report| {
        Some(report.open_files? as f64)
    }),
    ("paravane_max_fds", Kind::Gauge, "Maximum number of open file descriptors (RLIMIT_NOFILE)", |report| {
        Some(report.max_open_files? as f64)
    }),
    ("process_cpu_seconds", Kind::Counter, "CPU time of the process, user and system", |report| {
        Some(report.process.cpu_s)
    }),
    (
        "process_resident_memory_bytes",
        Kind::Gauge,
        "Resident memory, including what VMMs share and the daemon has touched",
        |report| Some(report.process.resident_bytes? as f64),
    ),
    ("process_virtual_memory_bytes", Kind::Gauge, "Address space", |report| {
        Some(report.process.virtual_bytes? as f64)
    }),
    ("process_open_fds", Kind::Gauge, "Number of open file descriptors", |report| {
        Some(report.open_files? as f64)
    }),
    ("process_max_fds", Kind::Gauge, "Maximum number of open file descriptors", |report| {
        Some(report.max_open_files? as f64)
    }),
    ("process_start_time_seconds", Kind::Gauge, "Unix time of the start of the process", |report| {
        report.process.started_unix_s
    }),
];

/// Metrics of devices of all kinds.
const DEVICE: &[DeviceMetric] = &[
    (
        "paravane_device_kept",
        "Whether the next daemon can resume the session if this one dies (0 or 1)",
        Kind::Gauge,
        |device| Some(device.kept.into()),
    ),
    ("paravane_device_connected", "Whether a VMM is connected (0 or 1)", Kind::Gauge, |device| {
        Some(device.connected.into())
    }),
    (
        "paravane_device_failed",
        "Whether the device failed by an internal error (0 or 1)",
        Kind::Gauge,
        |device| Some(device.failed.is_some().into()),
    ),
    (
        "paravane_device_stopping",
        "Whether the device is stopping and waits for requests in flight (0 or 1)",
        Kind::Gauge,
        |device| Some(device.stopping.is_some().into()),
    ),
    ("paravane_device_sessions", "Connections by VMMs", Kind::Counter, |device| Some(device.sessions)),
    (
        "paravane_device_refused_connections",
        "Connections by VMMs that could not be accepted",
        Kind::Counter,
        |device| Some(device.refused_connections),
    ),
    (
        "paravane_device_protocol_errors",
        "Connections ended by a protocol error of the VMM",
        Kind::Counter,
        |device| Some(device.protocol_errors),
    ),
    (
        "paravane_device_translations_refused",
        "IOMMU translations of the VMM that were refused",
        Kind::Counter,
        |device| Some(device.refused_translations),
    ),
    ("paravane_device_throttles", "Delays of a queue by a rate limit", Kind::Counter, |device| {
        Some(device.throttled)
    }),
    ("paravane_device_queues_enabled", "Number of queues enabled by the driver", Kind::Gauge, |device| {
        Some(device.queues.iter().filter(|queue| queue.enabled).count() as u64)
    }),
    (
        "paravane_device_queues_failed",
        "Number of queues stopped by an error until their reset",
        Kind::Gauge,
        |device| Some(device.latched() as u64),
    ),
    ("paravane_device_memory_bytes", "Memory mapped for the VMM", Kind::Gauge, |device| Some(device.memory)),
    ("paravane_device_memory_limit_bytes", "Maximum memory mapped for the VMM", Kind::Gauge, |device| {
        Some(device.max_memory)
    }),
    ("paravane_device_kicks", "Available buffer notifications from the driver", Kind::Counter, |device| {
        Some(device.totals()[0])
    }),
    ("paravane_device_buffers_taken", "Available buffers taken from the driver", Kind::Counter, |device| {
        Some(device.totals()[1])
    }),
    ("paravane_device_buffers_completed", "Used buffers returned to the driver", Kind::Counter, |device| {
        Some(device.totals()[2])
    }),
    ("paravane_device_interrupts", "Used buffer notifications to the driver", Kind::Counter, |device| {
        Some(device.totals()[3])
    }),
    ("paravane_device_buffers_in_flight", "Buffers taken and not yet returned", Kind::Gauge, |device| {
        Some(device.queues.iter().map(|queue| queue.in_flight).sum())
    }),
];

/// Counter of an I/O thread: name without suffix, help, value.
type ThreadMetric = (&'static str, &'static str, fn(&Thread) -> f64);

/// Threads that devices share have no labels of a device.
const THREADS: [ThreadMetric; 2] = [
    ("paravane_io_thread_cpu_seconds", "CPU time of an I/O thread, user and system", |thread| thread.cpu_s),
    (
        "paravane_io_thread_run_delay_seconds",
        "Time in which an I/O thread could run and no CPU ran it",
        |thread| thread.run_delay_s,
    ),
];

/// Distributions of a device by the values of a further label, one for each queue.
type Distributions = fn(&Device) -> Vec<(&str, &Distribution)>;

/// Histograms: name, help, label, bounds, values.
const HISTOGRAMS: [(&str, &str, &str, Bounds, Distributions); 2] = [
    (
        "paravane_device_latency_seconds",
        "Time from the arrival of a request to its used buffer",
        "operation",
        buckets::FINE,
        |device| {
            let all = device.queues.iter().flat_map(|queue| &queue.operations);
            all.map(|one| (one.operation.as_str(), &one.latency)).collect()
        },
    ),
    (
        "paravane_device_stage_seconds",
        "Time that requests spent in one stage",
        "stage",
        buckets::COARSE,
        |device| {
            let all = device.queues.iter().flat_map(|queue| &queue.stages);
            all.map(|one| (one.stage.as_str(), &one.latency)).collect()
        },
    ),
];

/// Commit of the build, if its environment named it.
const COMMIT: Option<&str> = option_env!("PARAVANE_COMMIT");
/// Features of the build.
const FEATURES: &str = match (cfg!(feature = "run"), cfg!(feature = "bench")) {
    (true, true) => "run,bench",
    (true, false) => "run",
    (false, true) => "bench",
    (false, false) => "",
};

/// Series of a disk with reads, writes, flushes and one I/O thread of its own.
pub(crate) const SERIES_OF_A_DISK: usize = 135;
/// Series of one operation of one device.
pub(crate) const SERIES_OF_AN_OPERATION: usize = buckets::FINE.len() + 3;
/// Series of one stage of one device.
pub(crate) const SERIES_OF_A_STAGE: usize = buckets::COARSE.len() + 3;
/// Cost of a scrape, as the command below it measures.
pub(crate) const COST: &str = "1000 such disks are 135 000 series and 12.6 MB a scrape. To write them takes 46 ms of CPU time on an EPYC \
    in an optimized build. A scrape of 1000 disks without clients (28 000 series, 2.0 MB) takes 19 ms of \
    CPU time of the daemon (release build), all included. Measure it on your machine:";

/// Labels of all metrics of devices.
const OF_DEVICE: [&str; 2] = ["device", "kind"];

/// The metrics of a report.
pub(crate) fn exposition(report: &Report) -> Exposition {
    let mut all = Exposition::default();
    let build = [
        ("version", report.version.as_str()),
        ("commit", COMMIT.unwrap_or_default()),
        ("features", FEATURES),
    ];
    let help = "Version, commit and features of the daemon; empty: unknown";
    all.begin("paravane_build", Kind::Info, help, &build.map(|(name, _)| name)).add(&labels(&build), 1.0);
    for (name, kind, help, value) in DAEMON {
        let mut family = all.begin(name, kind, help, &[]);
        value(report).into_iter().for_each(|value| family.add("", value));
    }
    let label = |device: &Device| labels(&[("device", &device.name), ("kind", &device.kind)]);
    let devices: Vec<_> = report.devices.iter().map(|device| (device, label(device))).collect();
    let and = |more: &'static str| [&OF_DEVICE[..], &[more]].concat();
    for &(name, help, kind, value) in DEVICE.iter().chain(KINDS.iter().flat_map(|kind| kind.metrics.plain)) {
        let mut family = all.begin(name, kind, help, &OF_DEVICE);
        for (device, labels) in &devices {
            value(device).into_iter().for_each(|value| family.add(labels, value as f64));
        }
    }
    for &(name, help, label, values) in KINDS.iter().flat_map(|kind| kind.metrics.labelled) {
        let mut family = all.begin(name, Kind::Counter, help, &and(label));
        for (device, prefix) in &devices {
            for (value, count) in values(device) {
                family.add(&format!("{prefix},{}", labels(&[(label, value)])), count);
            }
        }
    }
    for (name, help, value) in THREADS {
        let mut family = all.begin(name, Kind::Counter, help, &and("thread"));
        let thread = |thread: &Thread| labels(&[("thread", &thread.name)]);
        report.io_threads.iter().for_each(|one| family.add(&thread(one), value(one)));
        for (device, prefix) in &devices {
            for one in &device.threads {
                family.add(&format!("{prefix},{}", thread(one)), value(one));
            }
        }
    }
    let help = "Time for which shared I/O threads served the device";
    let mut family = all.begin("paravane_device_busy_seconds", Kind::Counter, help, &OF_DEVICE);
    for (device, labels) in devices.iter().filter(|(device, _)| device.threads.is_empty()) {
        family.add(labels, device.queues.iter().map(|queue| queue.busy_s).sum());
    }
    let help = "Figure of its kind; names that end in `_bytes` count bytes";
    let mut family = all.begin("paravane_device_figure", Kind::Gauge, help, &and("figure"));
    for (device, prefix) in &devices {
        for (name, value) in &device.figures {
            family.add(&format!("{prefix},{}", labels(&[("figure", name)])), *value as f64);
        }
    }
    let help = "Unix time of the last request that storage failed";
    let mut family = all.begin("paravane_blk_last_error_timestamp_seconds", Kind::Gauge, help, &OF_DEVICE);
    for (device, labels) in &devices {
        let last = device.storage_errors.as_ref().and_then(|errors| errors.last.as_ref());
        last.into_iter().for_each(|last| family.add(labels, last.unix_time_s));
    }
    histograms(&mut all, &devices);
    all
}

fn histograms(all: &mut Exposition, devices: &[(&Device, String)]) {
    for (name, help, label, bounds, values) in HISTOGRAMS {
        let mut family = all.begin(name, Kind::Histogram, help, &[&OF_DEVICE[..], &[label]].concat());
        for (device, prefix) in devices {
            for (value, distributions) in by_label(values(device)) {
                let labels = format!("{prefix},{}", labels(&[(label, value)]));
                let sum: u64 = distributions.iter().map(|one| one.sum).sum();
                let count = distributions.iter().map(|one| one.count).sum();
                let buckets = buckets::cumulative(distributions.into_iter(), bounds);
                family.histogram(&labels, buckets, (sum as f64 * 1e-9, count));
            }
        }
    }
}

/// Distributions of all queues by label.
///
/// Those without values are left out: most devices never use most operations.
pub(crate) fn by_label<'a>(
    all: impl IntoIterator<Item = (&'a str, &'a Distribution)>,
) -> Vec<(&'a str, Vec<&'a Distribution>)> {
    let mut labels: Vec<(&str, Vec<&Distribution>)> = Vec::new();
    for (label, one) in all.into_iter().filter(|(_, one)| one.count > 0) {
        match labels.iter_mut().find(|(known, _)| *known == label) {
            Some((_, others)) => others.push(one),
            None => labels.push((label, vec![one])),
        }
    }
    labels
}

#[cfg(test)]
mod tests;
