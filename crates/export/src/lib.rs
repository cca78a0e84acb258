//! Exports: a virtio device behind a socket, whatever protocol its clients speak.
//!
//! ```text
//!   client --socket--> export's task --whole messages--> Session (a protocol's crate) --queues--> I/O threads
//!                       |  endpoint, one client at a time        '-- answers, sections of a record
//!                       |  keeper: state for a later process
//!                       '- status, threads, handover
//! ```
//! [`Export`] does what all protocols need: it listens on a socket (or connects to one), receives
//! whole messages with their descriptors, sends answers that survive a kill, keeps and hands over
//! the state, and reports the status. A protocol implements [`protocol::Protocol`] and
//! [`protocol::Session`]; `paravane-vhost` does so for vhost-user.
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
//! An export serves one client at a time; further clients wait until it disconnects.
//!
//! # The cut
//!
//! - A session uses no socket. It is given whole messages, and returns answers.
//! - The protocol is a value in [`ExportConfig`], so an [`Export`] has one type whatever its protocol
//!   is, and a program can hold exports of several.
//! - Notifiers of clients ([`notifiers`]) are here: the status counts kicks and failures, and threads
//!   that a client blocks are freed, in every protocol alike.
//! - A record ([`handover`]) has sections of the export and of the session. A session writes and reads
//!   its own. The number of the protocol is a section that is there unless it is 0, vhost-user: the
//!   records of vhost-user are the same as before there were other protocols.
//!
//! # Trust
//!
//! The client is hostile. Frames are bounded here; messages are checked by the session. A client that
//! breaks the protocol is disconnected, and the next one is served.
//!
//! # Files
//!
//! * A device behind a socket, for clients of any protocol.
//! * `protocol` has the two traits that a protocol implements (`Protocol`, `Session`), `framing`
//!   where its messages end.
//! * `Export`: a socket and a device; it outlives its clients.
//! * `export/task` runs it in steps on `protocol_threads`, and its queues are on an `io::IoPool`;
//!   `export/orders` is what owner and threads want of it; `export/talk` is the conversation with a
//!   client, in the order that answers need which survive a kill; `socket` moves whole messages
//!   with their descriptors, never waits, and leaves each on the connection until it is settled;
//!   `notifiers` signals the client; `handover` is the state of an export for another process
//!   (`handover/record`: its format; `handover/frame`: its frame; `exchanged`: the same within a
//!   process); `keeper` keeps that state for a process that starts when this one has died
//!   (`record_file`: its latest record); `status` is for observers.
mod exchanged;
mod export;
mod framing;
pub mod handover;
pub mod keeper;
pub mod notifiers;
pub mod pair;
pub mod protocol;
mod protocol_threads;
pub mod record_file;
pub mod socket;
mod status;

pub use exchanged::Exchanged;
pub use export::{Endpoint, Export, ExportConfig, ExportError, Noter, Refresher};
pub use framing::{Framing, SessionEnd};
pub use handover::{Handover, HandoverError};
pub use keeper::{Keeper, Kept, KeptError};
pub use protocol_threads::ProtocolThreads;
pub use socket::Inspector;
pub use status::{ExportStatus, QueueStatus, SharedStatus};
