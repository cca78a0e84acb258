//! The daemon's report: JSON of the control socket and `paravane status --json`.
//!
//! Names are stable; fields may be added.
pub(crate) mod stores;

use crate::log::{LOST, SUPPRESSED};
use paravane_device::RateLimit;
use paravane_device::blk::operation::OPERATIONS;
use paravane_device::blk::{self, ErrorTotals, FullStatus};
use paravane_device::latency::{self, LatencySnapshot};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::time::SystemTime;
use stores::Store;

/// One daemon.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Report {
    pub(crate) version: String,
    pub(crate) pid: u32,
    /// Seconds since startup completed.
    pub(crate) uptime_s: f64,
    /// Outcome of the last reload; empty if there was none.
    pub(crate) last_reload: String,
    /// Time and success of the last reload.
    #[serde(default)]
    pub(crate) reload: Option<Reload>,
    /// How many daemons have handed these devices over, one to the next (`--take-over`).
    #[serde(default)]
    pub(crate) take_overs: u64,
    /// Number of open file descriptors, if the kernel counts them (Linux 6.2).
    #[serde(default)]
    pub(crate) open_files: Option<u64>,
    /// RLIMIT_NOFILE; `None`: unlimited.
    #[serde(default)]
    pub(crate) max_open_files: Option<u64>,
    #[serde(default)]
    pub(crate) process: Process,
    #[serde(default)]
    pub(crate) log: Log,
    /// I/O threads that devices share.
    #[serde(default)]
    pub(crate) io_threads: Vec<Thread>,
    pub(crate) devices: Vec<Device>,
    /// Devices of the file that failed to start in the last reload.
    pub(crate) failed: Vec<Failed>,
    /// Devices of the file that have not started yet.
    #[serde(default)]
    pub(crate) waiting: Vec<Waiting>,
}

/// Figures of the process. `None`: /proc is not mounted.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Process {
    /// CPU time of all threads in seconds, user and system.
    pub(crate) cpu_s: f64,
    /// Memory in use in bytes, memory shared with VMMs included.
    pub(crate) resident_bytes: Option<u64>,
    /// Address space in bytes.
    pub(crate) virtual_bytes: Option<u64>,
    /// Start in seconds since 1970.
    pub(crate) started_unix_s: Option<f64>,
}

/// Lines that the log has not written since the daemon started.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Log {
    /// stderr did not take them.
    pub(crate) lost_lines: u64,
    /// `--log-rate` suppressed them.
    pub(crate) suppressed_lines: u64,
}

impl Log {
    pub(crate) fn now() -> Self {
        let [lost_lines, suppressed_lines] = [&LOST, &SUPPRESSED].map(|count| count.load(Ordering::Relaxed));
        Self { lost_lines, suppressed_lines }
    }
}

/// The outcome of a reload.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Reload {
    /// RFC 3339, UTC.
    pub(crate) time: String,
    /// Seconds since 1970.
    pub(crate) unix_time_s: f64,
    /// The file is valid, no device failed, and no change was refused. Devices may still be `waiting`.
    pub(crate) ok: bool,
}

impl Reload {
    /// A reload that ends now.
    pub(crate) fn now(ok: bool) -> Self {
        let now = SystemTime::now();
        Self { time: rfc3339(now), unix_time_s: seconds(now), ok }
    }
}

/// One served device. Counters start at 0 when the device starts.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Device {
    pub(crate) name: String,
    /// Name of its subcommand: "blk", for example.
    pub(crate) kind: String,
    /// "listen PATH", "connect PATH" or "activated".
    pub(crate) endpoint: String,
    pub(crate) back_end: String,
    /// Size of a disk in bytes, as last checked.
    pub(crate) size: Option<u64>,
    /// Disks: serial number that guests are told.
    pub(crate) serial: Option<String>,
    /// Number of I/O threads of its own; 0: it shares those of the daemon.
    pub(crate) workers: u16,
    /// I/O threads of its own, without those that have ended.
    pub(crate) threads: Vec<Thread>,
    /// A VMM is connected.
    pub(crate) connected: bool,
    /// The next daemon can resume the session if this one dies (`--holder`).
    pub(crate) kept: bool,
    /// Why the session cannot be resumed, though it shall be (`--holder`).
    pub(crate) not_kept: Option<String>,
    /// Number of connections.
    pub(crate) sessions: u64,
    /// Feature bits accepted by the driver, in hexadecimal.
    pub(crate) features: String,
    /// Protocol features of vhost-user accepted by the VMM, in hexadecimal.
    pub(crate) protocol_features: String,
    /// Memory mapped for the VMM, in bytes.
    pub(crate) memory: u64,
    /// Limit of `memory`, in bytes.
    pub(crate) max_memory: u64,
    pub(crate) queues: Vec<Queue>,
    /// Connections that could not be accepted, for example without descriptors.
    pub(crate) refused_connections: u64,
    /// Connections ended by an error of the VMM.
    pub(crate) protocol_errors: u64,
    /// IOMMU translations of the VMM that were refused.
    pub(crate) refused_translations: u64,
    /// The last error of a connection or queue.
    pub(crate) last_error: Option<String>,
    /// Network cards: what of the host's network is gone, and the way out.
    pub(crate) host_error: Option<String>,
    /// Message of a panic that ended the device.
    pub(crate) failed: Option<String>,
    /// Settings that a reload changes while the device is served.
    pub(crate) settings: Settings,
    /// How often a rate limit delayed a queue.
    pub(crate) throttled: u64,
    /// Disks: requests that storage failed.
    pub(crate) storage_errors: Option<StorageErrors>,
    /// Disks: invalid requests, for example for a sector beyond the end.
    pub(crate) rejected_requests: Option<u64>,
    /// Disks: writes wait for room on the host (`--on-full wait`).
    pub(crate) full: Option<Full>,
    /// Disks: how often writes began to wait for room.
    pub(crate) full_times: Option<u64>,
    /// Disks: number of snapshots that were taken while served.
    pub(crate) snapshots: u64,
    pub(crate) last_snapshot: Option<Snapshot>,
    /// Disks: why the last check of the size failed.
    pub(crate) size_error: Option<String>,
    /// Disks: the image was unlinked; its data are lost when the device stops.
    pub(crate) image_deleted: bool,
    /// Figures of its kind, by name.
    pub(crate) figures: BTreeMap<String, u64>,
    /// Disks: image and backing files that are no files of this host, top first.
    pub(crate) stores: Vec<Store>,
    /// The device was removed or changed in the file, and stops.
    pub(crate) stopping: Option<Stopping>,
    pub(crate) net: Option<Net>,
}

/// Settings of a device that a reload changes in place, as they are now.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Settings {
    /// Rate limit; `None`: none. Network cards: of each direction.
    pub(crate) bytes_per_second: Option<u64>,
    pub(crate) burst_bytes: Option<u64>,
    /// As `bytes_per_second`, in requests or frames.
    pub(crate) ops_per_second: Option<u64>,
    pub(crate) burst_ops: Option<u64>,
    /// Longest poll in microseconds.
    pub(crate) poll_us: u64,
    /// Latencies are measured.
    pub(crate) latencies: bool,
    /// Disks: threshold of the slow-request log in microseconds.
    pub(crate) slow_us: Option<u64>,
    /// Disks: "wait" or "error".
    pub(crate) on_full: Option<String>,
}

impl Settings {
    /// Has these limits in it.
    pub(crate) fn limit(&mut self, limit: RateLimit) {
        self.bytes_per_second = limit.bytes.map(|rate| rate.per_second.get());
        self.burst_bytes = limit.bytes.map(|rate| rate.burst);
        self.ops_per_second = limit.ops.map(|rate| rate.per_second.get());
        self.burst_ops = limit.ops.map(|rate| rate.burst);
    }
}

/// One I/O thread.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Thread {
    /// "io0", "io1".
    pub(crate) name: String,
    /// CPU time in seconds, user and system.
    pub(crate) cpu_s: f64,
    /// Time in seconds that it was runnable without running.
    pub(crate) run_delay_s: f64,
}

/// One virtqueue.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Queue {
    pub(crate) index: u16,
    pub(crate) enabled: bool,
    /// The queue is being served.
    pub(crate) live: bool,
    pub(crate) size: u16,
    pub(crate) kicks: u64,
    /// Available buffers taken.
    pub(crate) taken: u64,
    /// Buffers returned to the driver.
    pub(crate) completed: u64,
    /// Buffers taken and not yet returned.
    pub(crate) in_flight: u64,
    pub(crate) interrupts: u64,
    /// Time for which shared I/O threads served the queue, in seconds.
    pub(crate) busy_s: f64,
    /// Disks: requests that storage failed.
    pub(crate) storage_errors: u64,
    /// Error that stopped the queue until its reset.
    pub(crate) error: Option<String>,
    /// Latency of each operation that occurred.
    pub(crate) operations: Vec<OperationLatency>,
    /// Latency of each stage that occurred, of all operations together.
    pub(crate) stages: Vec<StageLatency>,
    /// Requests in flight, counted each time that some were taken.
    pub(crate) depth: Option<Distribution>,
    /// Requests taken together.
    pub(crate) batch: Option<Distribution>,
}

/// Latency of one operation, from the ring to the interrupt.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct OperationLatency {
    /// Name of the operation: "read", "write_zeroes", "frame_in".
    ///
    /// Others: "write", "flush", "discard", "other", "frame_out" and "entropy".
    pub(crate) operation: String,
    /// In nanoseconds.
    pub(crate) latency: Distribution,
}

/// Latency of one stage.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct StageLatency {
    /// "ring", "throttled", "host" or "interrupt".
    pub(crate) stage: String,
    /// In nanoseconds.
    pub(crate) latency: Distribution,
}

/// Distribution of latencies in nanoseconds, or of counts.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Distribution {
    pub(crate) count: u64,
    pub(crate) sum: u64,
    pub(crate) max: u64,
    /// Median, at most 1/8 too high. So are the other percentiles.
    pub(crate) p50: u64,
    pub(crate) p99: u64,
    /// 99.9 %.
    pub(crate) p999: u64,
    /// Buckets that are not empty: largest value and number of values.
    ///
    /// A bucket begins at most 1/8 below its largest value.
    pub(crate) buckets: Vec<(u64, u64)>,
}

impl From<&latency::Distribution> for Distribution {
    fn from(from: &latency::Distribution) -> Self {
        Self {
            count: from.count,
            sum: from.sum,
            max: from.max,
            p50: from.quantile(0.5),
            p99: from.quantile(0.99),
            p999: from.quantile(0.999),
            buckets: from.buckets.clone(),
        }
    }
}

impl Queue {
    /// Fills in the latencies.
    pub(crate) fn with_latencies(self, of: &LatencySnapshot) -> Self {
        let operation = |(operation, latency): &(&latency::Operation, latency::Distribution)| {
            OperationLatency { operation: operation.name().to_owned(), latency: latency.into() }
        };
        let stage = |(stage, latency): &(latency::Stage, latency::Distribution)| StageLatency {
            stage: stage.name().to_owned(),
            latency: latency.into(),
        };
        Self {
            operations: of.operations.iter().map(operation).collect(),
            stages: of.stages.iter().map(stage).collect(),
            depth: of.depth.as_ref().map(Into::into),
            batch: of.batch.as_ref().map(Into::into),
            ..self
        }
    }
}

/// Traffic of a network card.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Net {
    /// From the guest.
    pub(crate) transmitted_frames: u64,
    pub(crate) transmitted_bytes: u64,
    /// To the guest.
    pub(crate) received_frames: u64,
    pub(crate) received_bytes: u64,
    /// Frames dropped: the sum of the next three.
    pub(crate) dropped_frames: u64,
    /// From the guest: not a frame, or an invalid header.
    pub(crate) malformed_frames: u64,
    /// From the guest: refused by the host.
    pub(crate) refused_frames: u64,
    /// To the guest: larger than its buffers.
    pub(crate) no_room_frames: u64,
    /// Receive buffers of the guest too short for any frame.
    pub(crate) unusable_buffers: u64,
    /// Whether the guest's link is up.
    pub(crate) link_up: bool,
}

/// Writes that wait for room.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Full {
    /// When they began to, in RFC 3339, UTC.
    pub(crate) since: String,
    /// Seconds since 1970.
    pub(crate) since_unix_s: f64,
    /// Number of requests that wait.
    pub(crate) requests: u64,
    pub(crate) error: String,
}

impl Full {
    pub(crate) fn new(full: &FullStatus) -> Self {
        Self {
            since: rfc3339(full.since),
            since_unix_s: seconds(full.since),
            requests: full.requests,
            error: full.error.clone(),
        }
    }
}

/// A snapshot of a disk.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Snapshot {
    /// RFC 3339, UTC.
    pub(crate) time: String,
    /// Seconds since 1970.
    pub(crate) unix_time_s: f64,
    /// Time for which the disk stood still, in microseconds.
    pub(crate) pause_us: f64,
    /// The image that it has frozen.
    pub(crate) base: String,
}

impl Snapshot {
    /// A snapshot that was taken now.
    pub(crate) fn now(snapshot: &blk::Snapshot) -> Self {
        let now = SystemTime::now();
        Self {
            time: rfc3339(now),
            unix_time_s: seconds(now),
            pause_us: snapshot.pause.as_secs_f64() * 1e6,
            base: snapshot.base.display().to_string(),
        }
    }
}

/// Requests that storage failed, by operation.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct StorageErrors {
    pub(crate) read: u64,
    pub(crate) write: u64,
    pub(crate) flush: u64,
    pub(crate) discard: u64,
    pub(crate) write_zeroes: u64,
    pub(crate) last: Option<StorageError>,
}

/// One failed request.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct StorageError {
    /// RFC 3339, UTC.
    pub(crate) time: String,
    /// Seconds since 1970.
    pub(crate) unix_time_s: f64,
    /// "read", "write", "flush", "discard" or "write_zeroes".
    pub(crate) operation: String,
    pub(crate) queue: u16,
    /// First sector (512 bytes) not transferred; `None` for a flush.
    pub(crate) sector: Option<u64>,
    /// Number of bytes not transferred.
    pub(crate) bytes: u64,
    pub(crate) error: String,
}

impl StorageErrors {
    pub(crate) fn new(totals: &ErrorTotals) -> Self {
        let [read, write, flush, discard, write_zeroes] = totals.operations;
        let last = totals.last.as_ref().map(|last| StorageError {
            time: rfc3339(last.time),
            unix_time_s: seconds(last.time),
            operation: last.operation.name().to_owned(),
            queue: last.queue,
            sector: last.sector,
            bytes: last.bytes,
            error: last.error.clone(),
        });
        Self { read, write, flush, discard, write_zeroes, last }
    }

    /// Name and count of each operation.
    pub(crate) fn operations(&self) -> [(&'static str, u64); 5] {
        let counts = [self.read, self.write, self.flush, self.discard, self.write_zeroes];
        std::array::from_fn(|at| (OPERATIONS[at].name(), counts[at]))
    }

    /// Sum over all operations.
    pub(crate) fn total(&self) -> u64 {
        self.operations().iter().map(|(_, count)| count).sum()
    }
}

fn rfc3339(time: SystemTime) -> String {
    humantime::format_rfc3339_millis(time).to_string()
}

fn seconds(time: SystemTime) -> f64 {
    time.duration_since(SystemTime::UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

/// A device that failed to start.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Failed {
    pub(crate) name: String,
    pub(crate) why: String,
    /// Seconds until the next attempt; `None`: it is under way.
    pub(crate) retry_s: Option<f64>,
    /// A session of an earlier daemon is kept for it.
    pub(crate) kept: bool,
}

/// State of a stopping device.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Stopping {
    /// Seconds since it began to stop.
    pub(crate) seconds: f64,
    /// Number of requests that it waits for.
    pub(crate) in_flight: u64,
}

/// A device that starts later.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Waiting {
    pub(crate) name: String,
    /// What it waits for.
    pub(crate) why: String,
    pub(crate) seconds: f64,
}

impl Device {
    /// Sums over the queues: kicks, buffers taken, buffers returned, interrupts.
    pub(crate) fn totals(&self) -> [u64; 4] {
        let sum = |of: fn(&Queue) -> u64| self.queues.iter().map(of).sum();
        [
            sum(|queue| queue.kicks),
            sum(|queue| queue.taken),
            sum(|queue| queue.completed),
            sum(|queue| queue.interrupts),
        ]
    }

    /// Number of requests that storage failed.
    pub(crate) fn storage_errors(&self) -> u64 {
        self.storage_errors.as_ref().map_or(0, StorageErrors::total)
    }

    /// The column ERRORS.
    pub(crate) fn errors(&self) -> u64 {
        self.protocol_errors + self.refused_connections + self.latched() as u64 + self.storage_errors()
    }

    /// Whether the device needs attention.
    pub(crate) fn has_problem(&self) -> bool {
        self.failed.is_some()
            || self.stopping.is_some()
            || self.size_error.is_some()
            || self.not_kept.is_some()
            || self.host_error.is_some()
            || self.image_deleted
            || self.stores.iter().any(Store::has_problem)
            || self.full.is_some()
            || self.errors() > 0
    }

    /// Number of queues stopped by an error.
    pub(crate) fn latched(&self) -> usize {
        self.queues.iter().filter(|queue| queue.error.is_some()).count()
    }
}
