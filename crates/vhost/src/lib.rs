//! Serve virtio devices to other VMMs over vhost-user.
//!
//! [`Export`] does all of it: it listens on a socket (or connects to one), speaks the protocol on
//! one thread, and serves the queues on I/O threads. [`message`] and [`session`] use no socket, so
//! that they can be tested and fuzzed alone.
//!
//! ```text
//!   client (a VMM)                   export's thread                                       I/O threads
//!   messages, descriptors --socket--> Request --session--> Reply
//!                                       |  memory: files -> dma::Memory
//!                                       '- vring: addresses, position, kick -> HostQueue --put_on--> served
//!   kick: eventfd or pipe -------------------------------------------------------------------------->|
//!   call: eventfd, pipe, socket pair <---------------------------------------------- notifiers ------'
//! ```
//!
//! # States of an export
//!
//! ```text
//!   start --> waiting --client connects--> session --client disconnects, or breaks the protocol--> waiting
//!                |                            |
//!                '-- stop, or a panic --------'--> stopping: socket removed, queues drained --> ended
//! ```
//!
//! An export can be handed over to another process while a client is connected
//! ([`Export::begin_hand_over`], [`Export::resume`]): the client keeps its connection. With a
//! [`Keeper`] a later process continues it after a crash, too ([`Export::recover`]). Within a process,
//! an export can take the place of another one ([`Export::begin_exchange`], [`Export::exchange`]).
//!
//! An export serves one client at a time; further clients wait until it disconnects. See
//! [`session`] for the states of a session.
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
//! use paravane_vhost::{Endpoint, Export, ExportConfig};
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
mod back_channel;
mod device_state;
mod exchanged;
mod export;
mod handover;
mod inflight;
mod iotlb;
pub mod keeper;
pub mod memory;
pub mod message;
mod notifiers;
mod pair;
mod protocol_threads;
pub mod record_file;
pub mod session;
pub mod socket;
mod status;
mod vring;

pub use exchanged::Exchanged;
pub use export::{Endpoint, Export, ExportConfig, ExportError, Noter, Refresher};
pub use handover::{Handover, HandoverError, KnownToDriver};
pub use keeper::{Keeper, Kept, KeptError};
pub use paravane_dma::{MappingLimits, MappingPool, MappingQuota};
pub use paravane_io::{IoPool, caught};
pub use paravane_notify::Notifier;
pub use protocol_threads::ProtocolThreads;
pub use socket::Inspector;
pub use status::{ExportStatus, QueueStatus, SharedStatus};
