//! Serve virtio devices to other VMMs over vhost-user.
//!
//! [`Export`](paravane_export::Export) does all of it: it listens on a socket (or connects to one), speaks the protocol on
//! one thread, and serves the queues on I/O threads. What it does for any protocol is in the crate
//! `paravane-export`, which this one re-exports; [`VhostUser`] makes the sessions. [`message`] and
//! [`session`] use no socket, so that they can be tested and fuzzed alone.
//!
//! ```text
//!   client (a VMM)                   export's thread                                       I/O threads
//!   messages, descriptors --socket--> Session --handle--> reply
//!                                       |  memory: files -> dma::Memory
//!                                       '- vring: addresses, position, kick -> HostQueue --put_on--> served
//!   kick: eventfd or pipe -------------------------------------------------------------------------->|
//!   call: eventfd, pipe, socket pair <---------------------------------------------- notifiers ------'
//! ```
//!
//! See `paravane-export` for the states of an export, and [`session`] for those of a session.
//!
//! # Trust
//!
//! The client is hostile. Messages are checked when they are decoded, and again against the state
//! of the session. Guest memory may vanish at any time. Rings and requests are checked by the ring
//! and the device. A client that breaks the protocol is disconnected, and the next one is served.
//!
//! # Example
//!
//! Serve an entropy device:
//!
//! ```
//! use paravane_device::rng::Rng;
//! use paravane_export::{Endpoint, Export};
//! use paravane_vhost::ExportConfig;
//! # let folder = tempfile::tempdir()?;
//! # let path = folder.path().join("rng.sock");
//!
//! let config = ExportConfig::new("rng", Endpoint::Listen(path));
//! let export = Export::start(config, Box::new(Rng::new()))?;
//! assert!(!export.status().connected);
//! // A VMM connects here: qemu -chardev socket,id=c,path=rng.sock -device vhost-user-rng-pci,chardev=c
//! export.stop();
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Files
//!
//! * vhost-user for `export`.
//! * `message` (the codec) and `session` (one client: features, memory, queues) know no socket;
//!   `memory` turns a client's files into `dma::Memory`; `vring` is what a client set for one
//!   queue; `iotlb` holds translations, `back_channel` asks for missing ones; `inflight` records
//!   requests in flight; `device_state` is carried in a migration; `session/handover` makes
//!   messages of a session, and a session of messages, `session/saved` the sections that hold them;
//!   `session/protocol` is what an export calls.
mod back_channel;
mod device_state;
mod inflight;
mod iotlb;
pub mod memory;
pub mod message;
mod protocol;
pub mod session;
mod vring;

pub use protocol::{ExportConfig, VhostUser};
pub use session::KnownToDriver;
