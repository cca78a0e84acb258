//! How an export is used.
use super::linger::LINGER;
use std::time::Duration;

/// How to use an export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct NbdOptions {
    /// Never write to it.
    pub read_only: bool,
    /// Most connections; more than one only to servers that allow it. \[4\]
    pub connections: u16,
    /// Longest time for a connection and its negotiation. [10 s]
    pub connect_timeout: Duration,
    /// The same for the first connection alone. [as the others]
    pub open_timeout: Option<Duration>,
    /// How long jobs wait for a connection before they fail with an I/O error. [60 s]
    pub request_timeout: Duration,
    /// When a peer that TCP cannot reach counts as dead. [45 s]
    pub silence: Duration,
    /// Connect again if requests have had no reply for this time. [never]
    ///
    /// A reply may take twice as long. Servers wait for disks, so a short time does harm: see
    /// [`nbd`](crate::nbd).
    pub stall_timeout: Option<Duration>,
    /// Each write is durable when it is acknowledged; also if the location asks for it.
    pub write_through: bool,
    /// Longest time for which a thread waits without sleeping for the rest of a reply that has begun,
    /// with few jobs in flight; 0: it sleeps. [15 µs]
    pub linger: Duration,
}

impl Default for NbdOptions {
    fn default() -> Self {
        Self {
            read_only: false,
            connections: 4,
            connect_timeout: Duration::from_secs(10),
            open_timeout: None,
            request_timeout: Duration::from_secs(60),
            silence: Duration::from_secs(45),
            stall_timeout: None,
            write_through: false,
            linger: LINGER,
        }
    }
}
