//! The built-in guest of `paravane run`.
//!
//! Tests and measures devices through the drivers of `paravane-driver`.
//!
//! The same program runs in ring 3 of a KVM guest (the `image` binary, feature `image`) and as a
//! host thread, linked into the VMM. It is `no_std`; the machine under it is a [`Platform`].
//!
//! ```text
//! program   brings the devices up; processor: the loop over the queues of one, sleeping and waking
//!   disk    Lane: the requests of one queue of a disk in flight; Hash and WriteTest decide what they are
//!   entropy draws from an entropy source
//!   pair    one pair of a card's queues
//!   ping    frames to an echo and back; mirror is such an echo, on another card
//!   stream  frames one way, as fast as they go
//!   report  figures for the VMM; console: messages; boot: the boot information; worker: the work on a queue
//! ```
#![no_std]
// Tests make their own guest memory.
#![cfg_attr(not(test), forbid(unsafe_code))]
extern crate alloc;

#[cfg(not(target_arch = "x86_64"))]
compile_error!(
    "the built-in guest has no machine for this architecture in crates/spec/src/builtin and guest/src/image/arch; \
     `paravane serve` needs none: build without the feature `run`"
);

mod boot;
mod chance;
mod connection;
mod console;
mod disk;
mod entropy;
mod failure;
pub mod histogram;
mod mirror;
mod pair;
pub mod pattern;
mod ping;
mod platform;
mod processor;
mod program;
mod report;
mod space;
mod stream;
mod worker;

pub use paravane_driver::{Area, DmaArea, Space, VolatileSpace};
pub use platform::Platform;
pub use program::run;
