//! Export: a device with a socket, served by protocol threads and I/O threads.
//!
//! ```text
//!  start --> waiting (listens, or tries to connect) --client--> session --it disconnects, or is disconnected--> waiting
//!                     |                                   |
//!                     '--- stop, or a thread panics ------'--> stopping: socket removed, queues drained --> ended
//! ```
//! [`Export::begin_hand_over`] ends it in another way: the socket and the client's connection stay
//! open, and [`Export::resume`] continues with them:
//! ```text
//!  waiting, session --begin_hand_over--> queues drained: a Handover --> device dropped --> ended
//!  Handover --resume--> session (its messages are replayed first), or waiting
//! ```
//! [`Export::begin_exchange`] and [`Export::exchange`] do so within a process; see [`crate::exchanged`].
//!
//! With a [`Keeper`], another process continues it after a crash ([`Export::recover`]); see
//! [`crate::keeper`].
//!
//! An export of a connection ([`Endpoint::Connection`]) ends with its only session.
//!
//! One client at a time; the next one waits until it has disconnected. A client can end its session
//! at most. A panic in one of the threads ends the export, because the state of the device is then
//! unknown.
//!
//! Draining waits for the host's storage, which may take any time. [`Export::begin_stop`] does not
//! wait; call [`Export::has_ended`] to learn when the export has ended.
//!
//! An export runs in steps, on whichever protocol thread is free
//! ([`ProtocolThreads`]); one that waits needs no thread.
//!
//! A client never blocks a protocol thread. It is signalled through the I/O threads only
//! (`notifiers`), which are unblocked whenever they are waited for. A client that blocks I/O threads
//! that devices share is disconnected.
mod backoff;
mod endpoint;
mod host_watch;
pub(crate) mod note;
mod orders;
mod outcome;
mod rights;
mod talk;
mod task;
mod unseen;

pub use endpoint::Endpoint;
use endpoint::{Acceptor, SocketFile};
use host_watch::HostState;
use note::Note;
use orders::{Order, Orders};
use outcome::Outcome;
use task::ExportTask;

use crate::exchanged::{Earlier, Exchanged, Left};
use crate::framing::SessionEnd;
use crate::handover::record::{ConnectionState, ExportState};
use crate::handover::{Handover, HandoverError};
use crate::keeper::{Fixed, Keeper, Keeping, Kept};
use crate::protocol::{Offer, Protocol};
use crate::protocol_threads::ProtocolThreads;
use crate::socket::{Inspector, SocketError};
use crate::status::{ExportStatus, SharedStatus};
use paravane_device::latency::{LatencySnapshot, QueueLatency};
use paravane_device::{Device, LogDevice};
use paravane_dma::MappingQuota;
use paravane_io::{DeviceThreads, IoPool};
use paravane_notify::Notifier;
use std::any::Any;
use std::convert::Infallible;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;
use thiserror::Error;

/// Configuration of an export with the protocol `P`.
///
/// The crate of a protocol has a name for it, so that a caller need not name `P`.
#[derive(Debug)]
#[non_exhaustive]
pub struct ExportConfig<P> {
    /// Protocol of the clients.
    pub protocol: P,
    /// Name in logs and in the status.
    pub name: String,
    /// Where the export listens or connects.
    pub endpoint: Endpoint,
    /// Number of I/O threads of its own (default 1, at least 1). Queues are assigned round-robin.
    ///
    /// Without effect with [`ExportConfig::io_pool`].
    pub workers: usize,
    /// I/O threads that devices share (default: none, and the export has its own).
    ///
    /// A device that may block them ([`Device::may_block`]) has its own nevertheless.
    pub io_pool: Option<Arc<IoPool>>,
    /// Threads for the protocol, which exports can share (default: its own).
    pub protocol_threads: Option<ProtocolThreads>,
    /// Longest poll of a queue before its thread sleeps (default 50 µs).
    ///
    /// 0 disables polling.
    pub longest_poll: Duration,
    /// Offer packed queues (default).
    pub packed: bool,
    /// Offer IN_ORDER: use buffers in the order of their arrival (default: no).
    ///
    /// Good for network devices. If the driver accepts it, the requests of a disk wait for one
    /// another.
    pub in_order: bool,
    /// Measure the latencies of requests (default); see [`Export::latencies`].
    pub latencies: bool,
    /// Quota of the clients' mappings (default: a pool with the host's limits).
    ///
    /// Give all exports of a process quotas of one pool.
    pub quota: MappingQuota,
    /// Notifier to signal when the export stops or fails (default: none).
    pub ended: Option<Arc<Notifier>>,
    /// Looks at clients' descriptors before this process has them (default: none, all are taken).
    pub inspector: Option<Arc<dyn Inspector>>,
    /// Keeps the state for a process that starts when this one has died (default: none).
    ///
    /// IN_ORDER is not offered then.
    pub keeper: Option<Box<dyn Keeper>>,
    /// What its owner wants to find with a kept session, at most 8192 bytes (default: nothing).
    ///
    /// See [`Kept::note`] and [`Export::noter`].
    pub note: Vec<u8>,
}

impl<P: Protocol + Default> ExportConfig<P> {
    /// Makes a configuration with the defaults.
    #[must_use]
    pub fn new(name: impl Into<String>, endpoint: Endpoint) -> Self {
        Self {
            protocol: P::default(),
            name: name.into(),
            endpoint,
            workers: 1,
            io_pool: None,
            protocol_threads: None,
            longest_poll: Duration::from_micros(50),
            packed: true,
            in_order: false,
            latencies: true,
            quota: MappingQuota::default(),
            ended: None,
            inspector: None,
            keeper: None,
            note: Vec::new(),
        }
    }
}

impl<P: Protocol + 'static> ExportConfig<P> {
    /// The same for all protocols.
    fn erased(self) -> ExportConfig<Arc<dyn Protocol>> {
        let Self { protocol, name, endpoint, workers, io_pool, protocol_threads, longest_poll, .. } = self;
        let Self { packed, in_order, latencies, quota, ended, inspector, keeper, note, .. } = self;
        ExportConfig {
            protocol: Arc::new(protocol),
            name,
            endpoint,
            workers,
            io_pool,
            protocol_threads,
            longest_poll,
            packed,
            in_order,
            latencies,
            quota,
            ended,
            inspector,
            keeper,
            note,
        }
    }
}

/// Device that cannot be exported.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ExportError {
    /// Socket path with a live server.
    #[error("{}: another server listens here; stop it or use another path", path.display())]
    InUse {
        /// Path of the socket.
        path: PathBuf,
    },
    /// Socket path with another file.
    #[error("{}: exists and is not a socket; remove it or use another path", path.display())]
    NotASocket {
        /// Path of the file.
        path: PathBuf,
    },
    /// Socket that cannot be made.
    #[error("{}: {source}", path.display())]
    Socket {
        /// Path of the socket.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// Device with more queues than a client can address.
    #[error("the device has {queues} queues; {protocol} addresses at most {max}")]
    Queues {
        /// Number of queues of the device.
        queues: usize,
        /// Name of the protocol.
        protocol: &'static str,
        /// Largest number of queues.
        max: usize,
    },
    /// Thread or eventfd that cannot be made.
    #[error("cannot start a thread: {0}")]
    Thread(#[source] io::Error),
    /// A thread of the export panicked, see [`Export::join`].
    #[error("the device has failed: {0}")]
    Failed(String),
    /// Handover that cannot be resumed.
    #[error(transparent)]
    Handover(#[from] HandoverError),
}

/// Exported device. Stops when it is dropped.
#[derive(Debug)]
pub struct Export {
    shared: Arc<Shared>,
    /// Gone when the task has ended.
    threads: Weak<DeviceThreads>,
    // They end with their last owner.
    _protocol_threads: ProtocolThreads,
}

/// See [`Export::noter`].
#[derive(Clone, Debug)]
pub struct Noter {
    shared: Arc<Shared>,
}

impl Noter {
    /// Replaces [`ExportConfig::note`], and waits until a process that starts after a crash would find it.
    ///
    /// `false`: the export has not recorded it within this time.
    #[must_use]
    pub fn note(&self, note: Vec<u8>, patience: Duration) -> bool {
        let change = self.shared.note.set(note);
        self.shared.orders.wake();
        self.shared.note.wait(change, patience)
    }
}

/// See [`Export::refresher`].
#[derive(Clone, Debug)]
pub struct Refresher {
    shared: Arc<Shared>,
}

impl Refresher {
    /// See [`Export::refresh`].
    pub fn refresh(&self) {
        self.shared.orders.give(&[Order::Look, Order::Refresh]);
    }
}

/// State shared by an export's task and its owner.
#[derive(Debug)]
struct Shared {
    shared_status: Arc<SharedStatus>,
    orders: Orders,
    outcome: Outcome,
    /// See [`ExportConfig::ended`].
    tell_ended: Option<Arc<Notifier>>,
    /// File of the socket, until the export stops.
    file: Mutex<Option<SocketFile>>,
    handed: Mutex<Handed>,
    host: Mutex<HostState>,
    note: Arc<Note>,
    /// What is left of an export that was handed over, and takes long to give up.
    remains: Mutex<Vec<Box<dyn Any + Send>>>,
}

/// What an export leaves to its successor.
#[derive(Debug, Default)]
struct Handed {
    /// State to hand over, or why there is none. Set before the device is dropped.
    state: Option<Result<Handover, HandoverError>>,
    /// What is kept, if the successor is in this process.
    left: Option<Keeping>,
}

impl Shared {
    /// Number of buffers returned to clients so far.
    fn completed(&self) -> u64 {
        self.shared_status.work.iter().fold(0, |sum, work| sum.wrapping_add(work.completed()))
    }

    /// Records that a thread panicked with this message.
    fn fail(&self, message: &str) {
        let name = {
            let mut status = self.shared_status.write();
            status.failed.get_or_insert_with(|| message.to_owned());
            status.name.clone()
        };
        tracing::error!(
            device = name,
            "device failed: a thread panicked: {message}; restart to serve it again"
        );
        self.orders.give(&[Order::Fail]);
    }

    fn has_failed(&self) -> bool {
        self.orders.has(Order::Fail)
    }

    fn is_handing_over(&self) -> bool {
        self.orders.has(Order::HandOver)
    }

    /// Whether it hands over within the process.
    fn is_exchanging(&self) -> bool {
        self.orders.has(Order::Exchange)
    }

    /// Records the outcome of a handover; `None`: the export ended before.
    ///
    /// Removes the socket if there is no state to hand over. `keeping`: of an exchange.
    fn finish_hand_over(&self, state: Option<Result<ExportState, HandoverError>>, keeping: Option<Keeping>) {
        let handed = match state {
            Some(state) => state.and_then(ExportState::encode),
            None if self.has_failed() => Err(HandoverError::Failed),
            None => Err(HandoverError::Stopped),
        };
        if handed.is_err() {
            self.remove_file();
        }
        let left = match handed {
            Ok(_) => keeping,
            Err(_) => {
                keeping.into_iter().for_each(Keeping::end);
                None
            }
        };
        let mut given = self.handed();
        // What an earlier call has left stays for the owner, who ends it.
        given.left = left.or(given.left.take());
        given.state = Some(handed);
    }

    fn handed(&self) -> MutexGuard<'_, Handed> {
        // Each change is one assignment.
        self.handed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is kept of an export that was exchanged, once.
    fn take_left(&self) -> Option<Keeping> {
        self.handed().left.take()
    }

    /// Tells the owner that the export's state is there, or that it has ended.
    fn signal_ended(&self) {
        if let Some(ended) = &self.tell_ended {
            ended.signal();
        }
    }

    /// Keeps `remains` until the export is dropped.
    fn put_aside(&self, remains: Box<dyn Any + Send>) {
        self.remains.lock().unwrap_or_else(PoisonError::into_inner).push(remains);
    }

    /// Removes the socket, so that no client can connect.
    fn remove_file(&self) {
        drop(self.file.lock().unwrap_or_else(PoisonError::into_inner).take());
    }
}

impl Export {
    /// Starts an export.
    ///
    /// Returns when the socket listens, or when the first attempt to connect is under way.
    ///
    /// The socket's file has mode 0600. A stale socket, on which no server listens, is replaced.
    ///
    /// # Errors
    /// The socket or a thread cannot be made, or the device has too many queues: see
    /// [`ExportError`].
    pub fn start<P: Protocol + 'static>(
        config: ExportConfig<P>,
        device: Box<dyn Device>,
    ) -> Result<Self, ExportError> {
        Self::launch(config.erased(), device, |endpoint| {
            let (acceptor, file) = Acceptor::open(endpoint)?;
            let (connection, kept, restoring) = (None, Earlier::Nothing, None);
            Ok(Beginning { acceptor, file, sessions: 0, connection, kept, restoring })
        })
    }

    fn launch(
        config: ExportConfig<Arc<dyn Protocol>>,
        mut device: Box<dyn Device>,
        begin: impl FnOnce(Endpoint) -> Result<Beginning, ExportError>,
    ) -> Result<Self, ExportError> {
        let queues = device.queue_sizes().len();
        let (name, max) = (config.protocol.name(), config.protocol.max_queues());
        if queues > max {
            return Err(ExportError::Queues { queues, protocol: name, max });
        }
        let ExportConfig {
            protocol,
            name,
            endpoint,
            workers,
            io_pool,
            protocol_threads,
            longest_poll,
            packed,
            in_order,
            latencies,
            quota,
            ended,
            inspector,
            keeper,
            note,
        } = config;
        // In-flight tracking, which finds the position of a queue after a crash, is for queues that
        // complete out of order.
        let offer = Offer { packed, in_order: in_order && keeper.is_none() };
        let log_name: Arc<str> = name.as_str().into();
        // The threads inherit it.
        let _named = LogDevice::enter(Some(Arc::clone(&log_name)));
        let Beginning { acceptor, file, sessions, connection, kept, restoring } = begin(endpoint)?;
        let note = Arc::new(Note::new(note));
        let keeping = keeper.map(|keeper| {
            let endpoint = acceptor.state(file.as_ref())?;
            let fds = device
                .net()
                .map(|net| net.host_fds().into_iter().map(|fd| fd.try_clone_to_owned()).collect());
            let device = fds.unwrap_or_else(|| Ok(Vec::new()))?;
            let (note, protocol) = (Arc::clone(&note), protocol.number());
            Ok(Keeping::new(keeper, Fixed { endpoint, device, note, protocol }))
        });
        let mut keeping = keeping.transpose().map_err(ExportError::Thread)?;
        let shared_status = SharedStatus::new(&name, queues, quota);
        let shared_status = if latencies { shared_status } else { shared_status.without_latencies() };
        let protocol_threads = match protocol_threads {
            Some(threads) => threads,
            None => ProtocolThreads::new().map_err(ExportError::Thread)?,
        };
        {
            let mut status = shared_status.write();
            // The session that continues counts already.
            (status.sessions, status.connected) = (sessions, connection.is_some());
        }
        let shared = Arc::new(Shared {
            shared_status: Arc::new(shared_status),
            orders: Orders::new(Order::Keep),
            outcome: Outcome::default(),
            tell_ended: ended,
            file: Mutex::new(file),
            handed: Mutex::default(),
            host: Mutex::default(),
            note,
            remains: Mutex::new(Vec::new()),
        });
        let io_pool = io_pool.filter(|_| !device.may_block());
        let threads =
            io_threads(&shared, io_pool, workers, longest_poll, &name).map_err(ExportError::Thread)?;
        let threads = Arc::new(threads.polling_for(longest_poll));
        let weak_threads = Arc::downgrade(&threads);
        // A panic ends the device, whose state is unknown then.
        let weak = Arc::downgrade(&shared);
        shared.shared_status.notifiers.watch_panics(move |message| {
            if let Some(shared) = weak.upgrade() {
                shared.fail(message);
            }
        });
        // Last: nothing fails from here on, so that a copy of what was handed over can be resumed until then.
        if let Some(keeping) = &mut keeping {
            keeping.adopt(kept.take());
            // It stays so until the first record.
            shared.shared_status.write().kept = keeping.is_active();
        }
        let task = ExportTask {
            shared: Arc::clone(&shared),
            name: log_name,
            device: Some(device),
            threads: Some(threads),
            protocol,
            offer,
            keeping,
            restoring,
            acceptor: Some(acceptor),
            resumed: connection,
            talk: None,
            is_first: true,
            repeated: None,
            inspector,
        };
        shared.orders.serve(protocol_threads.add(Box::new(task)));
        Ok(Self { shared, threads: weak_threads, _protocol_threads: protocol_threads })
    }

    /// Returns the current status.
    #[must_use]
    pub fn status(&self) -> ExportStatus {
        let mut status = self.shared.shared_status.read();
        if let Some(threads) = self.threads.upgrade() {
            status.threads = threads.ids(0..status.queues.len() as u16);
        }
        status
    }

    /// Returns the latencies of all queues by index. They span all clients.
    ///
    /// Empty where [`ExportConfig::latencies`] is off.
    #[must_use]
    pub fn latencies(&self) -> Vec<LatencySnapshot> {
        self.shared.shared_status.latencies()
    }

    /// Returns what measures each queue, by index: for observers of its requests.
    ///
    /// It spans all clients. Empty where [`ExportConfig::latencies`] is off.
    #[must_use]
    pub fn queue_latencies(&self) -> Vec<Arc<QueueLatency>> {
        self.shared.shared_status.queue_latencies()
    }

    /// Whether a thread has panicked.
    ///
    /// The export disconnects its client and accepts no other.
    #[must_use]
    pub fn has_failed(&self) -> bool {
        self.shared.has_failed()
    }

    /// Tells the driver that the configuration space changed, if its VMM supports that.
    pub fn config_changed(&self) {
        self.shared.orders.give(&[Order::TellConfig]);
    }

    /// Has the device read its host-side configuration again.
    ///
    /// Calls [`Device::refresh`] on the export's thread.
    ///
    /// Tells the driver about a change, if its VMM supports that.
    pub fn refresh(&self) {
        self.refresher().refresh();
    }

    /// Refreshes the device from any thread, also when the export is gone: then nothing happens.
    #[must_use]
    pub fn refresher(&self) -> Refresher {
        Refresher { shared: Arc::clone(&self.shared) }
    }

    /// Changes what a later process finds, from any thread, also when the export is gone.
    #[must_use]
    pub fn noter(&self) -> Noter {
        Noter { shared: Arc::clone(&self.shared) }
    }

    /// Has queues polled for at most `longest`; [`Export::renew`] applies it to live ones.
    pub fn poll_for(&self, longest: Duration) {
        if let Some(threads) = self.threads.upgrade() {
            threads.poll_for(longest);
        }
    }

    /// Turns the latencies of all queues on or off; [`Export::renew`] applies it to live ones.
    ///
    /// Requests that are in flight at that moment are not measured.
    pub fn measure(&self, on: bool) {
        self.shared.shared_status.work.iter().for_each(|work| work.measure(on));
    }

    /// Has live queues apply settings that have changed; returns at once.
    ///
    /// Also those of the device, such as a [`paravane_device::Limiter`]. What is in flight stays so,
    /// and the client notices nothing.
    pub fn renew(&self) {
        if let Some(threads) = self.threads.upgrade() {
            threads.renew();
        }
    }

    /// Has the export try its keeper again, after [`std::io::ErrorKind::WouldBlock`] or a failure.
    pub fn keep(&self) {
        self.shared.orders.give(&[Order::Keep]);
    }

    /// Begins to stop, and returns at once.
    ///
    /// The socket is removed, requests in flight are completed, the connection is closed, and the
    /// device is dropped. [`Export::has_ended`] then returns true.
    pub fn begin_stop(&self) {
        self.shared.orders.give(&[Order::Stop]);
        self.shared.remove_file();
    }

    /// Begins to stop as [`Export::begin_stop`], and leaves the session to a later process.
    ///
    /// The keeper goes on to have the client's connection, and the socket's file stays. Without a
    /// keeper that works, this is [`Export::begin_stop`].
    pub fn begin_leave(&self) {
        if !self.shared.shared_status.write().kept {
            return self.begin_stop();
        }
        self.shared.orders.give(&[Order::Leave, Order::Stop]);
    }

    /// Begins to hand the export over to another process, and returns at once.
    ///
    /// No further client is accepted and no message is read. The queues are drained and keep their
    /// positions, and the device is dropped. [`Export::take_handover`] then returns the state.
    ///
    /// The client notices nothing: its connection stays open, and its kicks are counted. Its memory
    /// stays mapped until the export is dropped, and so may the device's: to unmap them takes time
    /// that the successor can use.
    pub fn begin_hand_over(&self) {
        self.shared.orders.give(&[Order::HandOver]);
    }

    /// Begins to hand the export over to another one in this process, and returns at once.
    ///
    /// As [`Export::begin_hand_over`], but the keeper goes on to have the session: if this process dies,
    /// a later one can continue it ([`Export::recover`]), whichever export serves it then.
    /// [`Export::take_exchange`] returns the state.
    pub fn begin_exchange(&self) {
        self.shared.orders.give(&[Order::Exchange, Order::HandOver]);
    }

    /// Returns the state for [`Export::exchange`]; `None` until the queues have been drained.
    ///
    /// Call [`Export::begin_exchange`] first. All else is as in [`Export::take_handover`].
    ///
    /// # Errors
    /// As [`Export::take_handover`].
    pub fn take_exchange(&self) -> Option<Result<Exchanged, HandoverError>> {
        let handover = self.take_handover()?;
        let keeping = self.shared.take_left();
        // If there is no state, what was kept has ended.
        Some(handover.map(|handover| Exchanged { handover, left: Arc::new(Left::new(keeping)) }))
    }

    /// Returns the state to hand over; `None` until the queues have been drained.
    ///
    /// [`ExportConfig::ended`] is signalled when the state is there, and again when the device has been
    /// dropped, which the successor's device may have to wait for. From this call on the socket's file
    /// belongs to the caller: resume the state, here or in another process.
    ///
    /// Call [`Export::begin_hand_over`] first. Only the first call returns the state.
    ///
    /// # Errors
    /// The export stopped or failed before, or its session cannot be handed over. The client is
    /// disconnected, and can reconnect to a new export.
    #[must_use]
    pub fn take_handover(&self) -> Option<Result<Handover, HandoverError>> {
        if !self.shared.is_handing_over() {
            return None;
        }
        let has_ended = self.has_ended();
        let handed = self.shared.handed().state.take();
        if handed.is_none() && !has_ended {
            return None;
        }
        if let Some(Ok(_)) = handed
            && let Some(file) = self.shared.file.lock().unwrap_or_else(PoisonError::into_inner).take()
        {
            file.give_away();
        }
        Some(handed.unwrap_or(Err(HandoverError::Stopped)))
    }

    /// Starts an export that continues where another one was handed over.
    ///
    /// Returns when the queues are served, or the session could not be restored.
    ///
    /// The configuration's endpoint must be that of the handover, or [`Endpoint::Handover`].
    ///
    /// If the session cannot be restored, its client is disconnected, and the next one is served.
    ///
    /// # Errors
    /// As [`Export::start`], or the handover is invalid. The client is disconnected.
    pub fn resume<P: Protocol + 'static>(
        config: ExportConfig<P>,
        device: Box<dyn Device>,
        handover: Handover,
    ) -> Result<Self, ExportError> {
        Self::go_on(config.erased(), device, handover, Earlier::Nothing)
    }

    /// Starts an export that continues where another one of this process was.
    ///
    /// As [`Export::resume`]. Set [`ExportConfig::keeper`] to a keeper of the same descriptors: it still
    /// has them, and this export's first record replaces the record of its predecessor.
    ///
    /// # Errors
    /// As [`Export::resume`]. What is kept ends with the last copy of `exchanged`.
    pub fn exchange<P: Protocol + 'static>(
        config: ExportConfig<P>,
        device: Box<dyn Device>,
        exchanged: Exchanged,
    ) -> Result<Self, ExportError> {
        let Exchanged { handover, left } = exchanged;
        Self::go_on(config.erased(), device, handover, Earlier::Exchanged(left))
    }

    /// Starts an export that continues where that of a dead process was.
    ///
    /// As [`Export::resume`]. Set [`ExportConfig::keeper`] to the keeper of the descriptors: it still
    /// has them.
    ///
    /// The device's queues do again what was in flight, in the order in which it was taken. Make sure
    /// before that the kernel has finished all requests of the dead process.
    ///
    /// # Errors
    /// As [`Export::resume`]. Have the keeper close its copies.
    pub fn recover<P: Protocol + 'static>(
        config: ExportConfig<P>,
        device: Box<dyn Device>,
        kept: Kept,
    ) -> Result<Self, ExportError> {
        Self::go_on(config.erased(), device, kept.handover, Earlier::Died(Box::new(kept.keeping)))
    }

    fn go_on(
        config: ExportConfig<Arc<dyn Protocol>>,
        device: Box<dyn Device>,
        handover: Handover,
        kept: Earlier,
    ) -> Result<Self, ExportError> {
        let ExportState { endpoint, sessions, connection, protocol: _, note: _ } =
            ExportState::decode(handover, &*config.protocol)?;
        if connection.as_ref().is_some_and(|connection| !endpoint::is_stream(&connection.socket)) {
            return Err(HandoverError::Record("its connection is no stream socket").into());
        }
        let (restoring, restored) = channel();
        let export = Self::launch(config, device, |configured| {
            let (acceptor, file) = Acceptor::resume(configured, endpoint)?;
            Ok(Beginning { acceptor, file, sessions, connection, kept, restoring: Some(restoring) })
        })?;
        // Nothing is sent: the other end is dropped when the session is restored, or the thread ends.
        let _ = restored.recv();
        Ok(export)
    }

    /// Has requests that take several steps end after the current one.
    ///
    /// Call it after [`Export::begin_stop`].
    ///
    /// See [`paravane_device::QueueHandler::drain_until`].
    pub fn cut_short(&self) {
        // Relaxed: a request that misses it takes one more step.
        self.shared.shared_status.cut.store(true, Ordering::Relaxed);
    }

    /// Whether the device has been dropped: the export was stopped, or has failed.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.shared.outcome.is_device_dropped()
    }

    /// Stops the export.
    ///
    /// Completes what is in flight, closes the connection, and removes the socket.
    ///
    /// Waits as long as the host takes to complete what is in flight.
    pub fn stop(mut self) {
        self.quit();
    }

    /// Waits until the export has ended.
    ///
    /// Another thread has called [`Export::begin_stop`], or a thread of the export has panicked.
    ///
    /// # Errors
    /// [`ExportError::Failed`] with the message of the panic.
    pub fn join(&self) -> Result<(), ExportError> {
        self.shared.outcome.wait();
        match self.status().failed {
            Some(message) => Err(ExportError::Failed(message)),
            None => Ok(()),
        }
    }

    fn quit(&mut self) {
        self.begin_stop();
        self.shared.outcome.wait();
        // Of an exchange that nobody has taken.
        self.shared.take_left().into_iter().for_each(Keeping::end);
    }
}

impl Drop for Export {
    fn drop(&mut self) {
        self.quit();
    }
}

/// How an export begins.
struct Beginning {
    acceptor: Acceptor,
    file: Option<SocketFile>,
    /// Number of sessions so far.
    sessions: u64,
    /// Connection that another process has handed over.
    connection: Option<ConnectionState>,
    kept: Earlier,
    /// Dropped when the session of another process is restored, or cannot be.
    restoring: Option<Sender<Infallible>>,
}

/// Why a session ended.
#[derive(Debug, Error)]
enum EndCause {
    #[error(transparent)]
    Session(#[from] SessionEnd),
    #[error(transparent)]
    Socket(#[from] SocketError),
    #[error("cannot restore the session: {0}")]
    Restore(#[source] SessionEnd),
    #[error("the client kept its call eventfd full, which blocks the I/O threads of other devices")]
    Floods,
    #[error("device failed")]
    Failed,
}

/// The I/O threads of an export.
fn io_threads(
    shared: &Arc<Shared>,
    pool: Option<Arc<IoPool>>,
    workers: usize,
    longest_poll: Duration,
    name: &str,
) -> io::Result<DeviceThreads> {
    let notifiers = Arc::clone(&shared.shared_status.notifiers);
    let Some(pool) = pool else {
        let pool = Arc::new(IoPool::own(workers, longest_poll, name)?);
        return Ok(pool.device(move || {
            notifiers.unblock();
        }));
    };
    let weak = Arc::downgrade(shared);
    Ok(pool.device(move || {
        if notifiers.unblock()
            && let Some(shared) = weak.upgrade()
        {
            shared.orders.give(&[Order::Disconnect]);
        }
    }))
}

/// Logs the result of a refresh.
fn log_refresh(device: &str, changed: io::Result<bool>) {
    match changed {
        Ok(true) => tracing::info!(device, "device configuration has changed"),
        Ok(false) => {}
        Err(error) => tracing::error!(device, %error, "cannot read the device's configuration"),
    }
}
