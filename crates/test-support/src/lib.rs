//! Helpers for the tests of all crates. Not published.
//!
//! - [`skip()`]: reports a test that cannot run on this host.
//! - [`Random`]: reproducible pseudorandom numbers.
//! - [`CephCluster`]: the cluster that `scripts/ceph-one` makes, and its OSD.
//! - [`NoInterrupt`], [`RecordedMessages`]: a machine without interrupts, and one that records them.
mod ceph;
mod interrupts;
mod random;
mod skip;

pub use ceph::{CephCluster, KilledOsd, StoppedOsd};
pub use interrupts::{NoInterrupt, RecordedMessages};
pub use random::Random;
pub use skip::skip;
