//! Configuration of an export.
use super::endpoint::Endpoint;
use crate::keeper::Keeper;
use crate::protocol::Protocol;
use crate::protocol_threads::ProtocolThreads;
use crate::socket::Inspector;
use paravane_dma::MappingQuota;
use paravane_io::IoPool;
use paravane_notify::Notifier;
use std::sync::Arc;
use std::time::Duration;

/// Configuration of an export with the protocol `P`.
///
/// The crate of a protocol has a name for it, so that a caller need not name `P`.
#[derive(Debug)]
#[non_exhaustive]
pub struct ExportConfig<P> {
    /// Protocol of the clients.
    pub protocol: P,
    /// Name in logs and in the status.
    pub name: String,
    /// Where the export listens or connects.
    pub endpoint: Endpoint,
    /// Number of I/O threads that serve this device alone (default 1, at least 1). Queues are assigned
    /// round-robin.
    ///
    /// Without effect with [`ExportConfig::io_pool`].
    pub workers: usize,
    /// I/O threads that devices share (default: none, and the export has its own).
    ///
    /// A device that may block them ([`Device::may_block`](paravane_device::Device::may_block)) has its own nevertheless.
    pub io_pool: Option<Arc<IoPool>>,
    /// Threads for the protocol, which exports can share (default: its own).
    pub protocol_threads: Option<ProtocolThreads>,
    /// Longest poll of a queue before its thread sleeps (default 50 µs).
    ///
    /// 0 disables polling.
    pub longest_poll: Duration,
    /// Offer packed queues (default).
    pub packed: bool,
    /// Offer IN_ORDER: use buffers in the order of their arrival (default: no).
    ///
    /// Good for network devices. If the driver accepts it, the requests of a disk wait for one
    /// another.
    pub in_order: bool,
    /// Measure the latencies of requests (default); see [`Export::latencies`](crate::Export::latencies).
    pub latencies: bool,
    /// Quota of the clients' mappings (default: a pool with the host's limits).
    ///
    /// Give all exports of a process quotas of one pool.
    pub quota: MappingQuota,
    /// Notifier to signal when the export stops or fails (default: none).
    pub ended: Option<Arc<Notifier>>,
    /// Looks at clients' descriptors before this process has them (default: none, all are taken).
    pub inspector: Option<Arc<dyn Inspector>>,
    /// Keeps the state for a process that starts when this one has died (default: none).
    ///
    /// IN_ORDER is not offered then.
    pub keeper: Option<Box<dyn Keeper>>,
    /// What its owner wants to find with a kept session, at most 8192 bytes (default: nothing).
    ///
    /// See [`Kept::note`](crate::Kept::note) and [`Export::noter`](crate::Export::noter).
    pub note: Vec<u8>,
}

impl<P: Protocol + Default> ExportConfig<P> {
    /// Makes a configuration with the defaults.
    #[must_use]
    pub fn new(name: impl Into<String>, endpoint: Endpoint) -> Self {
        Self {
            protocol: P::default(),
            name: name.into(),
            endpoint,
            workers: 1,
            io_pool: None,
            protocol_threads: None,
            longest_poll: Duration::from_micros(50),
            packed: true,
            in_order: false,
            latencies: true,
            quota: MappingQuota::default(),
            ended: None,
            inspector: None,
            keeper: None,
            note: Vec::new(),
        }
    }
}
