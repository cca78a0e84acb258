//! Virtqueues, device side and driver side.
//!
//! ```text
//!             QueueAddresses (unchecked, from a transport)
//!                   |  QueueConfig::new        sizes, alignment, features
//!                   v
//!             QueueConfig --activate(areas)--> device::Queue
//!
//!   device::Queue: pop* -> (serve) -> complete* -> publish -> interrupt?
//!                  disable_kicks ... arm_kicks -> sleep, or more work is there
//!   driver::Queue: add* -> publish -> kick?      pop_used*
//!                  disable_notifications ... enable_notifications -> sleep, or more is there
//! ```
//!
//! Both sides treat the other as hostile: what lies in shared memory is read once into a local and
//! checked there; the first error latches the queue.
#![no_std]
extern crate alloc;

mod area;
mod batch;
pub mod device;
pub mod driver;
mod error;
pub mod event;
mod in_flight;
mod split;

pub use area::{Area, DmaArea};
pub use error::{ConfigError, QueueError};
pub use paravane_spec::queue::{QueueAddresses, Segment};
