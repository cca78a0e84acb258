//! Virtio devices for other people's VMMs: the device side of vhost-user.
//!
//! ```text
//!   client (a VMM)                      export's thread                                I/O threads
//!   messages, descriptors --socket--> Request --session--> Reply
//!                                        |  memory: files -> dma::Memory
//!                                        '- vring: addresses, position, kick -> HostQueue --put_on--> served
//!   kick: eventfd or pipe ------------------------------------------------------------------------------>|
//!   call: eventfd, pipe, pair <-------------------------------------------------------- notifiers ------------ '
//! ```
//! [`Export`] is all of it. [`message`] and [`session`] know no socket, so that they can be tested and fuzzed as they are.
//!
//! Everybody on the other side is hostile: messages are checked when they are decoded and again against the state of the
//! session; guest memory may vanish; rings and requests are checked where they always are. A client that breaks the
//! protocol is disconnected, and the next one is served.
mod back_channel;
mod device_state;
mod export;
mod inflight;
mod iotlb;
pub mod memory;
pub mod message;
mod notifiers;
mod pair;
pub mod session;
pub mod socket;
mod status;
mod vring;

pub use export::{Endpoint, Export, ExportConfig, ExportError};
pub use paravane_dma::{MappingLimits, MappingPool, MappingQuota};
pub use paravane_io::caught;
pub use paravane_notify::Notifier;
pub use status::{ExportStatus, QueueStatus, SharedStatus};
