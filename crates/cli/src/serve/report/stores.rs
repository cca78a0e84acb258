//! Stores of a disk, in a report.
use paravane_store::{CacheStatus, Link, StoreStatus};
use serde::{Deserialize, Serialize};

/// An image or backing file that is no file of this host.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Store {
    /// URL without secrets.
    pub(crate) location: String,
    /// "up", "stalled" or "reconnecting" (requests wait), "down" or "unusable" (requests fail).
    pub(crate) link: String,
    /// Number of connections that are up.
    pub(crate) connections: u32,
    /// Number of connections that were made again.
    pub(crate) reconnects: u64,
    /// Number of requests that wait for a connection or a reply.
    pub(crate) waiting: u32,
    /// The last error, which may be over.
    pub(crate) error: Option<String>,
    /// Its cache on this host, if it has one.
    pub(crate) cache: Option<Cache>,
}

/// A cache on this host.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Cache {
    /// Bytes of chunks that requests found.
    pub(crate) hit_bytes: u64,
    /// Bytes of chunks that were fetched for a request.
    pub(crate) miss_bytes: u64,
    /// Bytes of chunks that were fetched ahead.
    pub(crate) read_ahead_bytes: u64,
    /// Bytes that it holds.
    pub(crate) used_bytes: u64,
    /// Most bytes that it holds.
    pub(crate) limit_bytes: u64,
    /// Number of chunks that were evicted.
    pub(crate) evicted: u64,
    /// Number of chunks that could not be kept.
    pub(crate) not_kept: u64,
    /// Whether it keeps no chunks at present.
    #[serde(default)]
    pub(crate) failing: bool,
}

impl Store {
    /// Whether requests wait or fail, or nothing is cached.
    pub(crate) fn has_problem(&self) -> bool {
        self.link != "up" || self.cache.as_ref().is_some_and(|cache| cache.failing)
    }
}

impl From<StoreStatus> for Store {
    fn from(status: StoreStatus) -> Self {
        let cache = |cache: CacheStatus| Cache {
            hit_bytes: cache.hit_bytes,
            miss_bytes: cache.miss_bytes,
            read_ahead_bytes: cache.read_ahead_bytes,
            used_bytes: cache.used_bytes,
            limit_bytes: cache.limit_bytes,
            evicted: cache.evicted,
            not_kept: cache.not_kept,
            failing: cache.is_failing,
        };
        let link = match status.link {
            Link::Up => "up",
            Link::Stalled => "stalled",
            Link::Reconnecting => "reconnecting",
            Link::Down => "down",
            Link::Unusable => "unusable",
        };
        Self {
            location: status.location,
            link: link.to_owned(),
            connections: status.connections,
            reconnects: status.reconnects,
            waiting: status.waiting,
            error: status.error,
            cache: status.cache.map(cache),
        }
    }
}
