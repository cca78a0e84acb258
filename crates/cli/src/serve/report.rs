//! What the daemon says of its devices: the JSON of the control socket and of `paravane status --json`.
//!
//! Names stay as they are once released; more may come.
use paravane_device::blk::{ErrorTotals, Operation};
use serde::{Deserialize, Serialize};
use std::time::SystemTime;

/// One daemon.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Report {
    pub(crate) version: String,
    pub(crate) pid: u32,
    /// Seconds since the daemon was ready.
    pub(crate) uptime_s: f64,
    /// The last time that the file was read again: what came of it. Empty if it never was.
    pub(crate) last_reload: String,
    /// The same, if there was one.
    #[serde(default)]
    pub(crate) reload: Option<Reload>,
    /// Open file descriptors, where the kernel counts them (Linux 6.2).
    #[serde(default)]
    pub(crate) open_files: Option<u64>,
    /// RLIMIT_NOFILE; `None`: no limit.
    #[serde(default)]
    pub(crate) max_open_files: Option<u64>,
    pub(crate) devices: Vec<Device>,
    /// Devices of the file that could not be started when it was read again.
    pub(crate) failed: Vec<Failed>,
    /// Devices of the file that are not there yet.
    #[serde(default)]
    pub(crate) waiting: Vec<Waiting>,
}

/// What came of a SIGHUP.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Reload {
    /// RFC 3339, UTC.
    pub(crate) time: String,
    /// Seconds since 1970.
    pub(crate) unix_time_s: f64,
    /// The file was read, and none of its devices failed. Some may still be `waiting`.
    pub(crate) ok: bool,
}

impl Reload {
    /// One that has just ended.
    pub(crate) fn now(ok: bool) -> Self {
        let now = SystemTime::now();
        Self { time: rfc3339(now), unix_time_s: seconds(now), ok }
    }
}

/// One device that is served. All counts are since it was started.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Device {
    pub(crate) name: String,
    /// "blk", "net", "rng".
    pub(crate) kind: String,
    /// "listen PATH", "connect PATH" or "activated".
    pub(crate) endpoint: String,
    pub(crate) back_end: String,
    /// Bytes of a disk, when it was last looked at.
    pub(crate) size: Option<u64>,
    pub(crate) workers: u16,
    /// A VMM is connected.
    pub(crate) connected: bool,
    /// Connections so far.
    pub(crate) sessions: u64,
    /// Feature bits that the driver has accepted, in hexadecimal.
    pub(crate) features: String,
    /// Bytes mapped for the VMM.
    #[serde(default)]
    pub(crate) memory: u64,
    /// Most bytes that may be mapped for it.
    #[serde(default)]
    pub(crate) max_memory: u64,
    pub(crate) queues: Vec<Queue>,
    /// Connections that could not be accepted, for want of descriptors say.
    #[serde(default)]
    pub(crate) refused_connections: u64,
    /// Connections that ended with an error of the VMM.
    pub(crate) protocol_errors: u64,
    /// Translations that VMMs have told and that were not taken.
    pub(crate) refused_translations: u64,
    /// The last one's text, or the last queue's.
    pub(crate) last_error: Option<String>,
    /// A thread of it has panicked, with these words: it is served no more.
    #[serde(default)]
    pub(crate) failed: Option<String>,
    /// How often a rate limit has held a queue.
    #[serde(default)]
    pub(crate) throttled: u64,
    /// Of a disk: requests that the storage failed.
    #[serde(default)]
    pub(crate) storage_errors: Option<StorageErrors>,
    /// Of a disk: requests that were refused, such as for a sector beyond the end.
    #[serde(default)]
    pub(crate) rejected_requests: Option<u64>,
    /// Of a disk: why its size could not be found out when it was last looked at.
    #[serde(default)]
    pub(crate) size_error: Option<String>,
    /// Of a disk: the image has no name any more, and its data go when the device is stopped.
    #[serde(default)]
    pub(crate) image_deleted: bool,
    /// It stops, and is not in the file any more as it was.
    #[serde(default)]
    pub(crate) stopping: Option<Stopping>,
    pub(crate) net: Option<Net>,
}

/// One virtqueue.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Queue {
    pub(crate) index: u16,
    pub(crate) enabled: bool,
    /// It is being served.
    pub(crate) live: bool,
    pub(crate) size: u16,
    pub(crate) kicks: u64,
    /// Buffers taken from the driver.
    pub(crate) taken: u64,
    /// Buffers given back.
    pub(crate) completed: u64,
    /// Buffers taken and not given back yet.
    #[serde(default)]
    pub(crate) in_flight: u64,
    pub(crate) interrupts: u64,
    /// Of a disk: requests that the storage failed.
    #[serde(default)]
    pub(crate) storage_errors: u64,
    /// Why the queue has stopped for good.
    pub(crate) error: Option<String>,
}

/// What a network card has moved.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Net {
    /// From the guest.
    pub(crate) transmitted_frames: u64,
    pub(crate) transmitted_bytes: u64,
    /// To the guest.
    pub(crate) received_frames: u64,
    pub(crate) received_bytes: u64,
    /// Frames that were dropped, for whatever reason: the sum of the next three.
    pub(crate) dropped_frames: u64,
    /// From the guest: no frame, or a header that lies.
    #[serde(default)]
    pub(crate) malformed_frames: u64,
    /// From the guest: not taken by the host.
    #[serde(default)]
    pub(crate) refused_frames: u64,
    /// To the guest: longer than its buffers.
    #[serde(default)]
    pub(crate) no_room_frames: u64,
    /// Buffers of the guest that are too short for any frame.
    #[serde(default)]
    pub(crate) unusable_buffers: u64,
}

/// Requests that the storage failed, by what the guest asked for.
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
    /// First sector (512 bytes) that was not transferred; none for a flush.
    pub(crate) sector: Option<u64>,
    /// Bytes that were not transferred.
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
        let mut named = Operation::ALL.map(|operation| (operation.name(), 0));
        named.iter_mut().zip(counts).for_each(|(named, count)| named.1 = count);
        named
    }

    /// Of all operations.
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

/// A device that is not there.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Failed {
    pub(crate) name: String,
    pub(crate) why: String,
}

/// A device on its way out.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Stopping {
    /// Since it was told to stop.
    pub(crate) seconds: f64,
    /// Requests that it waits for.
    pub(crate) in_flight: u64,
}

/// A device that starts as soon as it can.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Waiting {
    pub(crate) name: String,
    /// What it waits for.
    pub(crate) why: String,
    pub(crate) seconds: f64,
}

impl Device {
    /// Sums over the queues: kicks, buffers taken, given back, interrupts.
    pub(crate) fn totals(&self) -> [u64; 4] {
        self.queues.iter().fold([0; 4], |[kicks, taken, completed, interrupts], queue| {
            [
                kicks + queue.kicks,
                taken + queue.taken,
                completed + queue.completed,
                interrupts + queue.interrupts,
            ]
        })
    }

    /// Requests that the storage failed.
    pub(crate) fn storage_errors(&self) -> u64 {
        self.storage_errors.as_ref().map_or(0, StorageErrors::total)
    }

    /// All that the column ERRORS counts.
    pub(crate) fn errors(&self) -> u64 {
        self.protocol_errors + self.refused_connections + self.latched() as u64 + self.storage_errors()
    }

    /// Whether somebody should look at it.
    pub(crate) fn has_problem(&self) -> bool {
        self.failed.is_some()
            || self.stopping.is_some()
            || self.size_error.is_some()
            || self.image_deleted
            || self.errors() > 0
    }

    /// How many queues have stopped for good.
    pub(crate) fn latched(&self) -> usize {
        self.queues.iter().filter(|queue| queue.error.is_some()).count()
    }
}
