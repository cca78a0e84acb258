//! Lines of a trace on the control socket.
//!
//! ```text
//!   client                                    daemon
//!     binds its end to a name, connects
//!     {"trace": TraceRequest}       ----->
//!                                   <-----    {"started": {"pid": 7, "queues": 1}}, {"no_device": "..."}
//!                                             or {"error": "..."}
//!                                   <-----    {"request": TraceLine} ... {"dropped": 3} ...
//!                                   <-----    {"end": "..."}, or the connection closes
//!     closes: the trace ends
//! ```
//! A client whose end has no name gets the report at once, and is not read.
use crate::serve::reload::messages::ReloadRequest;
use crate::serve::snapshot::messages::SnapshotRequest;
use paravane_device::latency::{RequestRecord, Stage};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;

/// The client's line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum Ask {
    Trace(TraceRequest),
    /// See [`crate::serve::take_over`].
    HandOver(HandOverRequest),
    /// See [`crate::serve::snapshot`].
    Snapshot(SnapshotRequest),
    /// See [`crate::serve::reload`].
    Reload(ReloadRequest),
}

/// A request for all devices of the daemon.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct HandOverRequest {
    pub(crate) version: u32,
}

/// Which requests a client wants.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct TraceRequest {
    pub(crate) device: String,
    /// Whole latency in nanoseconds, at least.
    #[serde(default)]
    pub(crate) slower_than_ns: u64,
    /// Names of operations; none: all.
    #[serde(default)]
    pub(crate) operations: Vec<String>,
    /// `None`: all queues.
    #[serde(default)]
    pub(crate) queue: Option<u16>,
    /// Number of requests, at most.
    #[serde(default)]
    pub(crate) limit: Option<u64>,
}

/// A line of the daemon.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Answer {
    Started {
        pid: u32,
        queues: usize,
    },
    Request(TraceLine),
    /// Number of requests so far that are missing, as the client reads too slowly.
    Dropped(u64),
    End(String),
    NoDevice(String),
    Error(String),
}

/// One request that has ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TraceLine {
    /// End of the request in nanoseconds since 1970.
    pub(crate) end_unix_ns: u64,
    pub(crate) queue: u16,
    /// Index of its descriptor chain.
    pub(crate) head: u16,
    /// "read", "write", "flush", "discard", "write_zeroes" or "other".
    pub(crate) operation: Cow<'static, str>,
    /// First sector (512 bytes), if it has one.
    pub(crate) sector: Option<u64>,
    /// Bytes of data, or the length of its ranges.
    pub(crate) bytes: u64,
    /// Status byte: 0 success, 1 I/O error, 2 not supported.
    pub(crate) status: u8,
    pub(crate) ring_ns: u64,
    pub(crate) throttled_ns: u64,
    pub(crate) host_ns: u64,
    pub(crate) interrupt_ns: u64,
    pub(crate) total_ns: u64,
}

impl TraceLine {
    pub(super) fn new(queue: u16, end_unix_ns: u64, record: &RequestRecord) -> Self {
        let [ring, throttled, host, interrupt] = record.stages;
        let request = record.request;
        Self {
            end_unix_ns,
            queue,
            head: request.head,
            operation: record.operation.name().into(),
            sector: request.sector,
            bytes: request.bytes,
            status: request.status,
            ring_ns: ring,
            throttled_ns: throttled,
            host_ns: host,
            interrupt_ns: interrupt,
            total_ns: record.total(),
        }
    }

    /// Name and time of each stage, in the order of a request.
    pub(crate) fn stages(&self) -> [(&'static str, u64); Stage::ALL.len()] {
        let times = [self.ring_ns, self.throttled_ns, self.host_ns, self.interrupt_ns];
        std::array::from_fn(|at| (Stage::ALL[at].name(), times[at]))
    }
}
