//! How an image of Ceph is opened.
use std::time::Duration;

/// How an image of Ceph is opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RbdOptions {
    /// Writes fail. A snapshot is always read-only.
    ///
    /// A user who may not write either is not told when the image grows.
    pub read_only: bool,
    /// Holds the exclusive lock of the image while it is open \[true\].
    ///
    /// With it, no other client can write, and a second process is told that the image is in use.
    /// Without it, librbd takes the lock for the first write and gives it away when another client
    /// wants to write: a live migration, where two processes have the image open, needs that. Two
    /// processes that both write then take turns, and nothing protects the file system inside.
    ///
    /// An image without the feature `exclusive-lock` has no lock; opening it logs a warning.
    pub lock: bool,
    /// A dead client whose lock is broken at once, as [`Rbd::lock_owner`](super::Rbd::lock_owner)
    /// has named it.
    ///
    /// Otherwise the lock of a dead client is broken when its watch has ended, after 30 s.
    pub dead_owner: Option<String>,
    /// Time for the cluster to answer \[30 s\].
    ///
    /// It bounds connecting, opening, resizing and closing; requests wait without a bound.
    pub timeout: Duration,
}

impl Default for RbdOptions {
    fn default() -> Self {
        Self { read_only: false, lock: true, dead_owner: None, timeout: Duration::from_secs(30) }
    }
}
