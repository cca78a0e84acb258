//! Helpers for the tests of all crates. Not published.
//!
//! - [`skip()`]: reports a test that cannot run on this host.
//! - [`patience()`], [`wait_for()`], [`wait_until()`]: time limits that only end a hang, longer on a busy machine.
//! - [`Random`]: reproducible pseudorandom numbers.
//! - [`torn()`]: a file after a power loss.
//! - [`copy_program()`]: copies a program to a place where another user may execute it.
//! - [`in_own_network()`], [`ip()`]: a network namespace for a test.
//! - [`qemu_img()`]: runs `qemu-img`, which images that are locked for a moment do not fail.
//! - [`CephCluster`]: the cluster that `scripts/ceph-one` makes, and its OSD.
//! - [`NoInterrupt`], [`RecordedMessages`], [`apic_vector()`]: a machine without interrupts, one that records them.
mod ceph;
mod interrupts;
mod network;
mod patience;
mod program;
mod qemu_img;
mod random;
mod skip;
mod torn;

pub use ceph::{CephCluster, KilledOsd, StoppedOsd};
pub use interrupts::{NoInterrupt, RecordedMessages, apic_vector};
pub use network::{in_own_network, ip};
pub use patience::{patience, wait_for, wait_until};
pub use program::copy_program;
pub use qemu_img::qemu_img;
pub use random::Random;
pub use skip::skip;
pub use torn::torn;
