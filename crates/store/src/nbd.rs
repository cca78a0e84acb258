//! A store behind an NBD server.
//!
//! ```text
//!   NbdLocation --Nbd::open--> Nbd --queue()--> queue: one of a virtqueue    (queue)
//!                               |                 | jobs in, outcomes out
//!                               |                 v
//!                               '--------> channel: a connection over its losses   (channel)
//!                                            | session: requests out, replies in    (session)
//!                                            |    task: jobs and their requests, reply: the decoder
//!                                            '-- lost: a thread connects again      (reconnect)
//! ```
//! A server that offers `CAN_MULTI_CONN` gets one connection for each queue, up to
//! [`NbdOptions::connections`]; with any other server all queues share one. Requests are pipelined:
//! a system call sends many, with their data straight from the pieces of the jobs. Large replies go
//! straight to the pieces, small ones over a buffer that one system call fills with many.
//!
//! # A lost connection
//!
//! ```text
//!   Up --closed, time-out, broken protocol--> Reconnecting --request_timeout--> Down: jobs fail
//!    ^                                          |      '--the export has changed--> Unusable: jobs fail
//!    '--- in-flight requests are sent again ----+---------------<----------------------'
//! ```
//! Requests wait while the connection is made again, and what was in flight is sent again, in the
//! order in which it was sent first and before anything new. A read is read again as a whole. A
//! job has its outcome once, when no connection can access its memory any more.
//!
//! An acknowledged write is safe from this:
//!
//! - It is never sent again.
//! - One that needs several requests, without FUA, begins again if the connection is lost before its
//!   last reply: its flush at the new server does not cover what the old one had in memory.
//! - A write that is sent twice has the same offset and length, and an owner that does not change
//!   the memory of a write in flight (virtio drivers do not) sends the same data.
//! - The danger is the *first* copy of a write: a server that is slow rather than dead could do it
//!   late, after a newer write to the same place was acknowledged. So the old connection is
//!   **fenced** first: this side ends it, then waits until the server has closed it, too. A server
//!   closes a connection when it has done or dropped all requests of it, and the kernel closes
//!   those of a process when the last of its threads has left its last system call.
//!
//! The fence is exact where the server ends the connection: a crash, a restart, a fail-over with a
//! reset. It waits 5 s where this side ends it, which happens after a broken protocol, a new size,
//! or [`NbdOptions::stall_timeout`]. If the server has not closed it by then, requests are sent
//! again nevertheless, and the status tells so. What remains for the operator: do not set
//! `stall_timeout` for a server that hangs for longer than this and then goes on, and do not let
//! two servers write to one image, of which one is cut off rather than dead. NBD has no means to
//! lock out an old server.
//!
//! What was acknowledged but not flushed is the server's to keep. One that caches writes in its own
//! memory (`qemu-nbd` with qcow2 metadata, any server whose host crashes) may lose them when it is
//! killed, and NBD tells nobody. [`NbdOptions::write_through`] has each write made durable before
//! it is acknowledged.
//!
//! # Zeroes and holes
//!
//! Zeroes leave a hole in whole units of 2 MiB only, which is the largest cluster of a qcow2 image.
//! The ends of a range are zeroed in place. QEMU 7.2 loses acknowledged writes otherwise, with no
//! server killed: while a write to an allocated cluster that reads as zeroes is in flight, zeroes for
//! another part of the cluster may free it. The place then belongs to two clusters. Discards of a
//! part of a cluster have no effect there, so they are sent as they are, and without `FUA`: what a
//! discarded range reads as is undefined until it is written.
//!
//! # Limits
//!
//! A server that serves one client at a time tells no new size: [`Store::refresh`] asks over a
//! connection of its own, and fails after [`NbdOptions::connect_timeout`]. An export cannot be
//! resized from here. A new size in the middle of requests makes the connections anew, which is a
//! short pause for the disk.
//!
//! # What is mapped to what
//!
//! | job | request |
//! |---|---|
//! | read | `READ` |
//! | write | `WRITE`; durable: with `FUA`, or a `FLUSH` behind it |
//! | flush | `FLUSH`; done at once if the server has none: it keeps no cache |
//! | discard | `TRIM`; done at once if the server has none: it is a hint |
//! | extents | `BLOCK_STATUS` of `base:allocation`; all data if the server has none |
//! | zeroes | `WRITE_ZEROES`, with `NO_HOLE` except for whole 2 MiB of an `unmap`; EOPNOTSUPP if the server has none |

// Files, lowest first. A file imports only those before it.
//
//   proto, flag, coverage, reply    numbers, layouts; what has arrived; the decoder
//   error, export, handshake        what a server says; the negotiation
//   options, socket, tls, wire      how it is used; plain and encrypted connections
//   zeroes, linger                  which part of zeroing may leave a hole; waiting for the rest of a reply
//   extents                         lists of holes and zeroes
//   shared, task, session, channel  a connection and its jobs
//   dial, reconnect                 how it is made, and made again
//   queue, blocking                 its users
mod blocking;
mod channel;
mod coverage;
mod dial;
mod error;
mod export;
mod extents;
mod flag;
mod handshake;
mod linger;
mod member;
mod options;
mod proto;
mod queue;
mod reconnect;
mod reply;
mod session;
mod shared;
mod socket;
mod task;
#[cfg(feature = "tls")]
mod tls;
mod watched;
mod wire;
mod zeroes;

pub use error::NbdError;
pub use options::NbdOptions;
pub use reply::{Asked, Event, Expected, Owed, ReplyDecoder, ReplyError, ReplyStyle};

use crate::lock::lock;
use crate::{
    Connector, Job, Link, NamedFiles, NbdLocation, Store, StoreExtent, StoreLimits, StoreQueue, StoreStatus,
};
use blocking::Blocking;
use channel::{Channel, Launch};
use dial::Dialer;
use export::{Export, Opened};
use extents::joined;
use handshake::Purpose;
use shared::NbdShared;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use task::Work;

/// An open export of an NBD server.
#[derive(Debug)]
pub struct Nbd {
    dialer: Arc<Dialer>,
    shared: Arc<NbdShared>,
    /// As it was when it was opened.
    export: Export,
    channels: Vec<Arc<Channel>>,
    next: AtomicUsize,
    blocking: Mutex<Option<Arc<Blocking>>>,
}

impl Nbd {
    /// Connects to the server and opens the export, with the files of TLS in `files` if it has them.
    ///
    /// Blocks up to twice [`NbdOptions::connect_timeout`]. Threads are started by need, later.
    ///
    /// # Errors
    /// The server does not answer, does not speak NBD, or has no such export; the export does not
    /// fit `options`; a file of TLS is wrong.
    pub fn open(
        location: &NbdLocation,
        options: NbdOptions,
        connector: Arc<dyn Connector>,
        files: &NamedFiles,
    ) -> Result<Self, NbdError> {
        let options =
            NbdOptions { write_through: options.write_through || location.write_through, ..options };
        let dialer = Arc::new(Dialer::new(location.clone(), &options, connector, files)?);
        let timeout = options.open_timeout.unwrap_or(options.connect_timeout);
        let (wire, export) = dialer.dial_within(timeout, Purpose::Transmit)?;
        let read_only = options.read_only || export.has(flag::READ_ONLY);
        if read_only && !options.read_only {
            return Err(NbdError::ReadOnly);
        }
        let mut wires = vec![(wire, export)];
        while export.has(flag::CAN_MULTI_CONN) && wires.len() < usize::from(options.connections) {
            // A server may take fewer than it says.
            match dialer.dial_another() {
                Ok((wire, other)) if Export { allocation: export.allocation, ..other } == export => {
                    wires.push((wire, other));
                }
                Ok(_) => break,
                Err(error) => {
                    tracing::warn!(%location, %error, connections = wires.len(), "no more connections");
                    break;
                }
            }
        }
        let opened = Opened { size: export.size, read_only, block: export.block, connections: wires.len() };
        let shared = Arc::new(NbdShared::new(options, opened));
        let channels = wires.into_iter().map(|(wire, export)| {
            let dialer = dialer.clone();
            let launch: Box<Launch> =
                Box::new(move |channel, old, begin| reconnect::launch(dialer.clone(), channel, old, begin));
            Channel::new(shared.clone(), launch, wire, export).map_err(NbdError::Host)
        });
        let channels = channels.collect::<Result<_, _>>()?;
        Ok(Self { dialer, shared, export, channels, next: 0.into(), blocking: Mutex::new(None) })
    }

    /// Whether a connection shows what another one has written.
    ///
    /// It does if the server says so, and if nobody writes.
    #[must_use]
    pub fn is_coherent(&self) -> bool {
        self.shared.options.read_only || self.export.has(flag::CAN_MULTI_CONN)
    }

    /// Whether there are as many connections as [`NbdOptions::connections`] and the server allow.
    #[must_use]
    pub fn has_all_connections(&self) -> bool {
        let wanted = usize::from(self.shared.options.connections);
        self.channels.len() >= wanted || !self.export.has(flag::CAN_MULTI_CONN)
    }

    /// Hints that a range is read soon. May block until the server has taken notice.
    ///
    /// # Errors
    /// The server does not answer, or refuses.
    pub fn prefetch(&self, offset: u64, len: u64) -> io::Result<()> {
        // SAFETY: it has no memory.
        let (result, _) = unsafe { self.blocking()?.perform(Work::Cache { offset, len }) };
        if result < 0 { Err(io::Error::from_raw_os_error(-result)) } else { Ok(()) }
    }

    fn blocking(&self) -> io::Result<Arc<Blocking>> {
        let mut blocking = lock(&self.blocking);
        if let Some(blocking) = &*blocking {
            return Ok(blocking.clone());
        }
        let new = Arc::new(Blocking::new(self.channels[0].clone())?);
        *blocking = Some(new.clone());
        Ok(new)
    }
}

impl Store for Nbd {
    fn queue(&self, jobs: u16) -> io::Result<Box<dyn StoreQueue>> {
        let place = self.next.fetch_add(1, Ordering::Relaxed) % self.channels.len();
        Ok(Box::new(queue::NbdQueue::new(self.channels[place].clone(), jobs)?))
    }

    unsafe fn perform(&self, job: Job) -> i32 {
        match self.blocking() {
            // SAFETY: the caller's promise.
            Ok(blocking) => unsafe { blocking.perform(Work::Job(job)) }.0,
            Err(error) => -error.raw_os_error().unwrap_or(libc::EIO),
        }
    }

    fn size(&self) -> u64 {
        self.shared.size()
    }

    fn end(&self) -> u64 {
        self.shared.end.load(Ordering::Relaxed)
    }

    fn refresh(&self) -> io::Result<u64> {
        let (_, export) = self.dialer.dial(Purpose::Look)?;
        let (known, now) = (self.shared.size(), export.size);
        self.shared.end.store(now, Ordering::Relaxed);
        if let Some(why) = export.differs(&self.shared.opened()) {
            return Err(io::Error::other(why));
        }
        if now > known {
            // A connection keeps the size that it was told at its start.
            for channel in &self.channels {
                channel.renew();
            }
            self.shared.grow(now);
        }
        Ok(self.shared.size())
    }

    fn set_size(&self, _size: u64) -> io::Result<()> {
        let text = "NBD cannot resize an export: resize it at the server, then refresh the disk";
        Err(io::Error::new(io::ErrorKind::Unsupported, text))
    }

    /// Asks once: the list ends where the server ends it, after 1 GiB at the latest.
    ///
    /// Parts of one kind that follow one another are joined.
    fn extents(&self, offset: u64, len: u64) -> io::Result<Vec<StoreExtent>> {
        // SAFETY: it has no memory.
        let (result, extents) = unsafe { self.blocking()?.perform(Work::Extents { offset, len }) };
        match -result {
            ..=0 => Ok(joined(offset, len, &extents)),
            // Not negotiated, or the server does not do what it has agreed to.
            libc::EOPNOTSUPP | libc::EINVAL => Ok(vec![StoreExtent::data(offset, len)]),
            error => Err(io::Error::from_raw_os_error(error)),
        }
    }

    fn limits(&self) -> StoreLimits {
        StoreLimits {
            read_only: self.shared.options.read_only,
            block: self.export.block,
            physical_block: self.export.physical_block(),
            discard_block: self.export.physical_block(),
            discard: self.export.has(flag::TRIM),
            zeroes: self.export.has(flag::WRITE_ZEROES),
        }
    }

    fn status(&self) -> StoreStatus {
        let mut status = StoreStatus {
            location: self.dialer.location.to_string(),
            reconnects: self.shared.reconnects.load(Ordering::Relaxed),
            error: self.shared.error(),
            ..StoreStatus::default()
        };
        for report in self.channels.iter().map(|channel| channel.report()) {
            status.connections += u32::from(matches!(report.link, Link::Up | Link::Stalled));
            status.waiting += report.waiting;
            status.error = report.error.or(status.error);
            status.link = status.link.max(report.link);
        }
        status
    }

    fn close(&self) {
        self.shared.give_up();
        for channel in &self.channels {
            channel.give_up();
        }
    }
}

impl Drop for Nbd {
    fn drop(&mut self) {
        self.shared.wake();
    }
}
