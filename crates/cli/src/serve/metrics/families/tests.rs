use super::*;
use crate::serve::metrics::exposition::Format;
use crate::serve::report::{
    Full, Net, OperationLatency, Queue, Reload, StageLatency, StorageError, StorageErrors,
};

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
        full: Some(Full { requests: 5, ..Full::default() }),
        full_times: Some(2),
        snapshots: 3,
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
    let text = exposition(&report).text(Format::OpenMetrics);
    let text = std::str::from_utf8(&text).unwrap();
    for line in [
        &format!(
            "paravane_build_info{{version=\"1\",commit=\"{}\",features=\"{FEATURES}\"}} 1",
            COMMIT.unwrap_or("")
        ),
        "paravane_devices_failed 0",
        "paravane_last_reload_successful 0",
        "paravane_max_fds 1024",
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
        "paravane_blk_full{device=\"vm0\",kind=\"blk\"} 1",
        "paravane_blk_full_requests{device=\"vm0\",kind=\"blk\"} 5",
        "paravane_blk_full_times_total{device=\"vm0\",kind=\"blk\"} 2",
        "paravane_blk_snapshots_total{device=\"vm0\",kind=\"blk\"} 3",
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

/// A disk with values in every bucket of these operations and all stages.
fn busy_disk(name: String, operations: &[&str]) -> Device {
    let latency = Distribution {
        count: 200,
        sum: 1 << 40,
        buckets: (0..200).map(|bucket| (1000 << (bucket / 8), 1)).collect(),
        ..Distribution::default()
    };
    let operation =
        |operation: &&str| OperationLatency { operation: (*operation).to_owned(), latency: latency.clone() };
    let stage = |stage: &str| StageLatency { stage: stage.to_owned(), latency: latency.clone() };
    let queue = Queue {
        operations: operations.iter().map(operation).collect(),
        stages: ["ring", "throttled", "host", "interrupt"].map(stage).to_vec(),
        ..Queue::default()
    };
    Device {
        name,
        kind: "blk".into(),
        size: Some(1),
        storage_errors: Some(StorageErrors::default()),
        rejected_requests: Some(0),
        threads: vec![Thread { name: "io0".into(), ..Thread::default() }],
        queues: vec![queue],
        ..Device::default()
    }
}

fn samples(report: &Report) -> usize {
    let text = exposition(report).text(Format::Prometheus);
    std::str::from_utf8(&text).unwrap().lines().filter(|line| !line.starts_with('#')).count()
}

#[test]
fn series_of_a_device_are_as_many_as_the_reference_says() {
    let count = |operations: &[&str]| {
        let none = samples(&Report::default());
        let devices = vec![busy_disk("vm0".into(), operations)];
        samples(&Report { devices, ..Report::default() }) - none
    };
    assert_eq!(count(&["read", "write", "flush"]), SERIES_OF_A_DISK);
    assert_eq!(count(&["read"]) + 2 * SERIES_OF_AN_OPERATION, SERIES_OF_A_DISK);
}

/// Cost of a scrape, in CPU time.
///
/// `cargo test --release -p paravane-cli --bin paravane scrape_cost -- --nocapture`
#[test]
fn scrape_cost_of_1000_devices() {
    use rustix::time::{ClockId, clock_gettime};
    // Of this thread: other work of the machine does not count.
    let cpu_ms = || {
        let time = clock_gettime(ClockId::ThreadCPUTime);
        time.tv_sec as f64 * 1e3 + time.tv_nsec as f64 * 1e-6
    };
    let disk = |number| busy_disk(format!("vm{number}-disk"), &["read", "write", "flush"]);
    let report = Report { devices: (0..1000).map(disk).collect(), ..Report::default() };
    let mut cost = (f64::MAX, 0);
    for _ in 0..if cfg!(debug_assertions) { 1 } else { 11 } {
        let start = cpu_ms();
        let bytes = exposition(&report).text(Format::OpenMetrics).len();
        cost = (cost.0.min(cpu_ms() - start), bytes);
    }
    let (ms, bytes) = cost;
    let series = samples(&report) - samples(&Report::default());
    println!("{series} series, {:.1} MB, {ms:.0} ms of CPU time", bytes as f64 * 1e-6);
    assert_eq!(series, 1000 * SERIES_OF_A_DISK);
    assert!(COST.contains(&format!("{:.1} MB a scrape", bytes as f64 * 1e-6)), "{bytes} bytes");
}
