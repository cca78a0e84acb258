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
//! With a [`Keeper`](crate::Keeper), another process continues it after a crash ([`Export::recover`]); see
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
mod config;
mod endpoint;
mod error;
mod host_watch;
pub(crate) mod note;
mod orders;
mod outcome;
mod rights;
mod shared;
mod talk;
mod task;
mod unseen;

pub use config::ExportConfig;
pub use endpoint::Endpoint;
pub use error::ExportError;

use endpoint::{Acceptor, SocketFile};
use note::Note;
use orders::Order;
use shared::Shared;
use task::ExportTask;

use crate::exchanged::{Exchanged, Left};
use crate::handover::record::{ConnectionState, ExportState};
use crate::handover::{Handover, HandoverError};
use crate::keeper::{Active, Fixed, Keeping, Kept};
use crate::protocol::{Offer, Protocol};
use crate::protocol_threads::ProtocolThreads;
use crate::status::{ExportStatus, SharedStatus};
use paravane_device::latency::{LatencySnapshot, QueueLatency};
use paravane_device::{Device, LogDevice};
use paravane_io::{DeviceThreads, IoPool};
use std::convert::Infallible;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Weak};
use std::time::Duration;

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
        Self::launch(config, device, |endpoint| {
            let (acceptor, file) = Acceptor::open(endpoint)?;
            let (connection, kept, restoring) = (None, Box::new(|| None), None);
            Ok(Beginning { acceptor, file, sessions: 0, connection, kept, restoring })
        })
    }

    fn launch<P: Protocol + 'static>(
        config: ExportConfig<P>,
        mut device: Box<dyn Device>,
        begin: impl FnOnce(Endpoint) -> Result<Beginning, ExportError>,
    ) -> Result<Self, ExportError> {
        let queues = device.queue_sizes().len();
        let (name, max) = (config.protocol.name(), config.protocol.max_queues());
        if queues > max {
            return Err(ExportError::Queues { queues, protocol: name, max });
        }
        // In-flight tracking, which finds the position of a queue after a crash, is for queues that
        // complete out of order.
        let offer = Offer { packed: config.packed, in_order: config.in_order && config.keeper.is_none() };
        let log_name: Arc<str> = config.name.as_str().into();
        // The threads inherit it.
        let _named = LogDevice::enter(Some(Arc::clone(&log_name)));
        let Beginning { acceptor, file, sessions, connection, kept, restoring } = begin(config.endpoint)?;
        let note = Arc::new(Note::new(config.note));
        let fixed = |device: &mut dyn Device| -> io::Result<Fixed> {
            let (endpoint, device) = (acceptor.state(file.as_ref())?, host_fds(device)?);
            let (note, protocol) = (Arc::clone(&note), config.protocol.number());
            Ok(Fixed { endpoint, device, note, protocol })
        };
        let keeping = config.keeper.map(|keeper| Ok(Keeping::new(keeper, fixed(&mut *device)?)));
        let mut keeping = keeping.transpose().map_err(ExportError::Thread)?;
        let shared_status = SharedStatus::new(&config.name, queues, config.quota);
        let shared_status = if config.latencies { shared_status } else { shared_status.without_latencies() };
        let protocol_threads =
            config.protocol_threads.map_or_else(ProtocolThreads::new, Ok).map_err(ExportError::Thread)?;
        {
            let mut status = shared_status.write();
            // The session that continues counts already.
            (status.sessions, status.connected) = (sessions, connection.is_some());
        }
        let shared = Arc::new(Shared::new(shared_status, file, note, config.ended));
        let io_pool = config.io_pool.filter(|_| !device.may_block());
        let threads = io_threads(&shared, io_pool, config.workers, config.longest_poll, &config.name)
            .map_err(ExportError::Thread)?;
        let threads = Arc::new(threads.polling_for(config.longest_poll));
        let weak_threads = Arc::downgrade(&threads);
        watch_panics(&shared);
        // Last: nothing fails from here on, so that a copy of what was handed over can be resumed until then.
        if let Some(keeping) = &mut keeping {
            keeping.adopt(kept());
            // It stays so until the first record.
            shared.shared_status.write().kept = keeping.is_active();
        }
        let task = ExportTask {
            shared: Arc::clone(&shared),
            name: log_name,
            device: Some(device),
            threads: Some(threads),
            protocol: Arc::new(config.protocol),
            offer,
            keeping,
            restoring,
            acceptor: Some(acceptor),
            resumed: connection,
            talk: None,
            is_first: true,
            repeated: None,
            inspector: config.inspector,
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
        let keeping = self.shared.handed.lock().left.take();
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
        let handed = self.shared.handed.lock().state.take();
        if handed.is_none() && !has_ended {
            return None;
        }
        if let Some(Ok(_)) = handed
            && let Some(file) = self.shared.file.lock().take()
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
        Self::go_on(config, device, handover, Box::new(|| None))
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
        Self::go_on(config, device, handover, Box::new(move || left.take()))
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
        Self::go_on(config, device, kept.handover, Box::new(|| Some(kept.keeping)))
    }

    fn go_on<P: Protocol + 'static>(
        config: ExportConfig<P>,
        device: Box<dyn Device>,
        handover: Handover,
        kept: TakeKept,
    ) -> Result<Self, ExportError> {
        let ExportState { endpoint, sessions, connection, protocol: _, note: _ } =
            ExportState::decode(handover, &config.protocol)?;
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
        let left = self.shared.handed.lock().left.take();
        left.into_iter().for_each(Keeping::end);
    }
}

impl Drop for Export {
    fn drop(&mut self) {
        self.quit();
    }
}

/// Takes what is kept of an export. From then on, its new task writes the record file.
type TakeKept = Box<dyn FnOnce() -> Option<Active>>;

/// How an export begins.
struct Beginning {
    acceptor: Acceptor,
    file: Option<SocketFile>,
    /// Number of sessions so far.
    sessions: u64,
    /// Connection that another process has handed over.
    connection: Option<ConnectionState>,
    kept: TakeKept,
    /// Dropped when the session of another process is restored, or cannot be.
    restoring: Option<Sender<Infallible>>,
}

/// Has a panic end the device, whose state is unknown then.
fn watch_panics(shared: &Arc<Shared>) {
    let weak = Arc::downgrade(shared);
    shared.shared_status.notifiers.watch_panics(move |message| {
        if let Some(shared) = weak.upgrade() {
            shared.fail(message);
        }
    });
}

/// Copies of the host's descriptors of a device.
fn host_fds(device: &dyn Device) -> io::Result<Vec<OwnedFd>> {
    device.host_fds().into_iter().map(|fd| fd.try_clone_to_owned()).collect()
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
