//! Helpers for the tests of all crates. Not published.
//!
//! - [`skip()`]: reports a test that cannot run on this host.
//! - [`Random`]: reproducible pseudorandom numbers.
//! - [`NoInterrupt`], [`RecordedMessages`]: a machine without interrupts, and one that records them.
mod interrupts;
mod random;
mod skip;

pub use interrupts::{NoInterrupt, RecordedMessages};
pub use random::Random;
pub use skip::skip;
