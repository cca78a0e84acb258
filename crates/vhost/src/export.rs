//! A device that other VMMs can have: a socket, a thread for its protocol, threads for its queues.
//!
//! ```text
//!  start --> waiting (listens, or tries to connect) --a client--> session --it goes, or is thrown out--> waiting ...
//!                     |                                   |
//!                     '--- stop, or a thread panics ------'--> stopping: socket file removed, queues drained --> ended
//! ```
//! One client at a time; the next one waits until this one is gone. Whatever a client does ends its session at most. A mistake
//! of ours, a panic in one of its threads, ends the export: nobody knows what the device is worth then.
//!
//! Draining waits for the host's storage, which may take any time. [`Export::begin_stop`] does not wait for it; an owner that
//! has others to look after asks [`Export::has_ended`].
//!
//! The export's thread is never blocked by its client. It signals the client by its I/O threads only (`notifiers`), and frees those
//! whenever it waits for them.
mod backoff;
mod endpoint;
mod rights;

pub use endpoint::Endpoint;
use endpoint::{Acceptor, NextClient, SocketFile};

use crate::message::MessageError;
use crate::session::{Offer, Session, SessionError, Workers};
use crate::socket::{Connection, Received, SocketError};
use crate::status::{ExportStatus, SharedStatus};
use paravane_device::{Device, LogDevice};
use paravane_dma::MappingQuota;
use paravane_io::{IoThread, caught};
use paravane_notify::Notifier;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use thiserror::Error;

/// How long to wait before the next attempt when the host refuses to wait for events.
const REST: Duration = Duration::from_millis(200);

/// What to export.
#[derive(Debug)]
#[non_exhaustive]
pub struct ExportConfig {
    /// What it is called in logs and in its status.
    pub name: String,
    /// Where clients come from.
    pub endpoint: Endpoint,
    /// Threads that serve its queues, at least 1.
    pub workers: usize,
    /// Longest poll of a queue before its thread waits for a kick; 0: none.
    pub longest_poll: Duration,
    /// Offer packed queues.
    pub packed: bool,
    /// Offer to use buffers in the order in which they were made available. Good for network cards; a disk's requests wait
    /// for one another then, if the driver accepts it.
    pub in_order: bool,
    /// What its clients may have mapped. Give all exports of a process quotas of one pool.
    pub quota: MappingQuota,
    /// Signalled when the export has ended: stopped, or failed.
    pub ended: Option<Arc<Notifier>>,
}

impl ExportConfig {
    /// One worker, polls of up to 50 microseconds where that pays, packed queues offered, a quota alone in a pool with the limits
    /// of the host.
    #[must_use]
    pub fn new(name: impl Into<String>, endpoint: Endpoint) -> Self {
        Self {
            name: name.into(),
            endpoint,
            workers: 1,
            longest_poll: Duration::from_micros(50),
            packed: true,
            in_order: false,
            quota: MappingQuota::default(),
            ended: None,
        }
    }
}

/// Why a device cannot be exported.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ExportError {
    /// {path}: another server listens there
    #[error("{}: another server listens there", path.display())]
    InUse {
        /// The socket.
        path: PathBuf,
    },
    /// {path}: is there, and is no socket
    #[error("{}: is there, and is no socket", path.display())]
    NotASocket {
        /// The path.
        path: PathBuf,
    },
    /// {path}: {source}
    #[error("{}: {source}", path.display())]
    Socket {
        /// The socket.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// the device has {0} queues, and a client can name 256
    #[error("the device has {0} queues, and a client can name 256")]
    Queues(usize),
    /// cannot start a thread: {0}
    #[error("cannot start a thread: {0}")]
    Thread(#[source] io::Error),
    /// A thread of the export panicked, see [`Export::join`].
    #[error("the device has failed: {0}")]
    Failed(String),
}

/// A device that is exported. Stops when it is dropped.
#[derive(Debug)]
pub struct Export {
    shared: Arc<Shared>,
    /// `None`: it has been joined.
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// What the export's thread and its owner both have.
#[derive(Debug)]
struct Shared {
    shared_status: SharedStatus,
    /// Wakes the thread.
    control: Notifier,
    stop: AtomicBool,
    refresh: AtomicBool,
    config_changed: AtomicBool,
    failed: AtomicBool,
    /// Set last, when the device is gone.
    ended: AtomicBool,
    /// The socket's file, until the export stops.
    file: Mutex<Option<SocketFile>>,
}

impl Shared {
    /// A thread has panicked, with these words.
    fn fail(&self, words: &str) {
        let name = {
            let mut status = self.shared_status.write();
            status.failed.get_or_insert_with(|| words.to_owned());
            status.name.clone()
        };
        tracing::error!(device = name, "failed, and served no more: {words}");
        // Relaxed: the signal orders.
        self.failed.store(true, Ordering::Relaxed);
        self.control.signal();
    }

    fn has_failed(&self) -> bool {
        // Relaxed: as above.
        self.failed.load(Ordering::Relaxed)
    }

    /// Nobody is to come any more.
    fn remove_file(&self) {
        drop(self.file.lock().unwrap_or_else(PoisonError::into_inner).take());
    }
}

impl Export {
    /// Returns when the socket listens, or the first attempt to connect is under way. The socket's file has mode 0600; one that
    /// nobody listens on any more is replaced.
    ///
    /// # Errors
    /// See [`ExportError`].
    pub fn start(config: ExportConfig, device: Box<dyn Device>) -> Result<Self, ExportError> {
        let queues = device.queue_sizes().len();
        if queues > 256 {
            return Err(ExportError::Queues(queues));
        }
        let ExportConfig { name, endpoint, workers, longest_poll, packed, in_order, quota, ended } = config;
        let offer = Offer { packed, in_order };
        let log_name: Arc<str> = name.as_str().into();
        // The threads inherit it.
        let _named = LogDevice::enter(Some(Arc::clone(&log_name)));
        let (acceptor, file) = Acceptor::open(endpoint)?;
        let control = Notifier::new(false).map_err(|error| ExportError::Thread(io::Error::other(error)))?;
        let shared = Arc::new(Shared {
            shared_status: SharedStatus::new(&name, queues, quota),
            control,
            stop: AtomicBool::new(false),
            refresh: AtomicBool::new(false),
            config_changed: AtomicBool::new(false),
            failed: AtomicBool::new(false),
            ended: AtomicBool::new(false),
            file: Mutex::new(file),
        });
        let thread = |number| {
            let (shared, notifiers) = (Arc::clone(&shared), Arc::clone(&shared.shared_status.notifiers));
            let name = format!("io{number}-{name}");
            let thread = IoThread::watched(name, longest_poll, move |words| shared.fail(words))?;
            Ok(thread.freed_by(move || notifiers.unblock()))
        };
        let threads = (0..workers.max(1)).map(thread).collect::<io::Result<Vec<_>>>();
        let threads = threads.map_err(ExportError::Thread)?;
        let at_work = AtWork { shared: Arc::clone(&shared), name, device, threads, offer };
        let thread = std::thread::Builder::new()
            .name(format!("vhost-{}", at_work.name))
            .spawn(move || {
                let _named = LogDevice::enter(Some(log_name));
                paravane_io::outlive_pipes();
                let shared = Arc::clone(&at_work.shared);
                // Queues that are still served are stopped with their threads.
                if let Err(words) = caught(|| at_work.run(acceptor)) {
                    let mut status = shared.shared_status.write();
                    status.connected = false;
                    status.queues.iter_mut().for_each(|queue| queue.live = false);
                    drop(status);
                    shared.fail(&words);
                }
                shared.remove_file();
                // Release: who sees it sees that the device is gone.
                shared.ended.store(true, Ordering::Release);
                if let Some(ended) = ended {
                    ended.signal();
                }
            })
            .map_err(ExportError::Thread)?;
        Ok(Self { shared, thread: Mutex::new(Some(thread)) })
    }

    /// What it is doing.
    #[must_use]
    pub fn status(&self) -> ExportStatus {
        self.shared.shared_status.read()
    }

    /// Whether a thread of it has panicked. Its client has been disconnected then, or soon will be, and it takes no other one.
    #[must_use]
    pub fn has_failed(&self) -> bool {
        self.shared.has_failed()
    }

    /// The device's configuration space has changed: the driver is told, if its VMM can hear it.
    pub fn config_changed(&self) {
        // Relaxed: the signal orders.
        self.shared.config_changed.store(true, Ordering::Relaxed);
        self.shared.control.signal();
    }

    /// Has the device look at the host's side again ([`Device::refresh`]), in the export's own thread. If its configuration
    /// space has changed, the driver is told, if its VMM can hear it.
    pub fn refresh(&self) {
        // Relaxed: the signal orders.
        self.shared.refresh.store(true, Ordering::Relaxed);
        self.shared.control.signal();
    }

    /// Has it stop, and returns at once: the socket's file is removed, requests in flight are completed, the connection is
    /// closed, and the device is dropped. [`Export::has_ended`] says when.
    pub fn begin_stop(&self) {
        // Relaxed: the signal orders.
        self.shared.stop.store(true, Ordering::Relaxed);
        self.shared.control.signal();
        self.shared.remove_file();
    }

    /// After [`Export::begin_stop`]: a request that takes several steps in the host is not continued; see
    /// [`paravane_device::QueueHandler::drain_until`].
    pub fn cut_short(&self) {
        // Relaxed: a request that does not see it yet goes one step further.
        self.shared.shared_status.cut.store(true, Ordering::Relaxed);
    }

    /// Whether the device is gone: the export was stopped, or has failed.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.shared.ended.load(Ordering::Acquire)
    }

    /// Completes what is in flight, closes the connection, and removes the socket's file. Waits as long as the host takes for
    /// what is in flight.
    pub fn stop(mut self) {
        self.quit();
    }

    /// Waits until the export has ended: another thread has called [`Export::begin_stop`], or a thread of the export has
    /// panicked.
    ///
    /// # Errors
    /// [`ExportError::Failed`] with the message of the panic.
    pub fn join(&self) -> Result<(), ExportError> {
        // Others that join wait for the lock meanwhile.
        let mut thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(thread) = thread.take()
            && thread.join().is_err()
        {
            self.shared.fail("the thread of the export panicked");
        }
        match self.status().failed {
            Some(message) => Err(ExportError::Failed(message)),
            None => Ok(()),
        }
    }

    fn quit(&mut self) {
        self.begin_stop();
        let thread = self.thread.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if thread.is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the thread of an export panicked");
        }
    }
}

impl Drop for Export {
    fn drop(&mut self) {
        self.quit();
    }
}

/// The export's thread.
struct AtWork {
    shared: Arc<Shared>,
    name: String,
    device: Box<dyn Device>,
    threads: Vec<IoThread>,
    offer: Offer,
}

/// Why a session ended that was not simply closed.
#[derive(Debug, Error)]
enum Ended {
    #[error(transparent)]
    Session(#[from] SessionError),
    #[error(transparent)]
    Socket(#[from] SocketError),
    #[error("cannot wait: {0}")]
    Poll(#[from] rustix::io::Errno),
    #[error("the device has failed")]
    Failed,
}

impl From<MessageError> for Ended {
    fn from(error: MessageError) -> Self {
        Self::Session(error.into())
    }
}

impl AtWork {
    /// Looks at the host's side again, if that was asked for. There is no session.
    fn refresh(&mut self) {
        // Relaxed: the signal orders.
        if self.shared.refresh.swap(false, Ordering::Relaxed) {
            refreshed(&self.name, self.device.refresh());
        }
    }

    fn run(mut self, mut acceptor: Acceptor) {
        while let Some(socket) = self.wait(&mut acceptor) {
            let (start, before) = (Instant::now(), self.completed());
            self.session(socket);
            acceptor.closed(self.completed() != before || start.elapsed() >= backoff::LONGEST);
        }
    }

    /// Buffers that clients were given back so far.
    fn completed(&self) -> u64 {
        self.shared.shared_status.work.iter().fold(0, |sum, work| sum.wrapping_add(work.completed()))
    }

    fn stopping(&self) -> bool {
        // Relaxed: the signal orders.
        self.shared.stop.load(Ordering::Relaxed) || self.shared.has_failed()
    }

    /// The next client; `None`: the export is to stop.
    fn wait(&mut self, acceptor: &mut Acceptor) -> Option<OwnedFd> {
        loop {
            if self.stopping() {
                return None;
            }
            self.refresh();
            let control = self.shared.control.as_fd();
            let waited = match (acceptor.next(), acceptor.fd()) {
                (NextClient::Here(socket), _) => return Some(socket),
                (NextClient::Wait, Some(fd)) => wait_for(&[control, fd], None),
                (NextClient::Wait, None) => wait_for(&[control], None),
                (NextClient::Pause(time), _) => wait_for(&[control], Some(time)),
                (NextClient::Failed { error, pause }, fd) => {
                    // Only a listener has a descriptor. A VMM that does not listen yet is no error.
                    if fd.is_some() {
                        let mut status = self.shared.shared_status.write();
                        status.refused_connections += 1;
                        status.last_error = Some(error);
                    }
                    wait_for(&[control], Some(pause))
                }
            };
            if let Err(error) = waited {
                tracing::error!("poll: {error}");
                std::thread::sleep(REST);
            }
            let _ = self.shared.control.take();
        }
    }

    fn session(&mut self, socket: OwnedFd) {
        let number = {
            let mut status = self.shared.shared_status.write();
            status.connected = true;
            status.sessions += 1;
            (status.features, status.protocol_features) = (0, 0);
            status.sessions
        };
        tracing::info!(device = self.name, session = number, "a client has come");
        let result = self.converse(Connection::new(socket));
        let mut status = self.shared.shared_status.write();
        status.connected = false;
        match result {
            Ok(()) => {
                drop(status);
                tracing::info!(device = self.name, session = number, "the client has gone");
            }
            // No fault of the client's, and told already.
            Err(_) if self.shared.has_failed() => {}
            Err(error) => {
                status.protocol_errors += 1;
                status.last_error = Some(error.to_string());
                drop(status);
                tracing::warn!(device = self.name, session = number, "session ended: {error}");
            }
        }
    }

    fn converse(&mut self, mut connection: Connection) -> Result<(), Ended> {
        let Self { shared, device, threads, offer, name } = self;
        let workers = Workers { threads, device: 0 };
        let mut session = Session::new(&mut **device, workers, &shared.shared_status, *offer)?;
        let result = converse(&mut session, &mut connection, shared, name);
        session.end();
        result
    }
}

/// Says what came of a look at the host's side.
fn refreshed(device: &str, changed: io::Result<bool>) {
    match changed {
        Ok(true) => tracing::info!(device, "the device's configuration has changed"),
        Ok(false) => {}
        Err(error) => tracing::error!(device, %error, "cannot look at the device's configuration"),
    }
}

/// Until the client goes, or has to go, or the export stops.
fn converse(
    session: &mut Session<'_>,
    connection: &mut Connection,
    shared: &Shared,
    device: &str,
) -> Result<(), Ended> {
    loop {
        match connection.receive()? {
            Received::Closed => return Ok(()),
            Received::Message(header, fds) => {
                let (answer, result) = session.answer(header, connection.payload(), fds);
                let sent = match answer {
                    Some((bytes, fd)) => connection.send(&bytes, fd.as_ref().map(AsFd::as_fd)),
                    None => Ok(()),
                };
                result?;
                sent?;
            }
            Received::Nothing => {
                let ticks = session.next_tick();
                let time = [ticks, connection.rest()].into_iter().flatten().min();
                let back_channel = session.back_channel();
                let mut fds = vec![connection.as_fd(), session.alarm(), shared.control.as_fd()];
                fds.extend(back_channel.as_ref().map(AsFd::as_fd));
                let ready = wait_for(&fds, time)?;
                if ready[1] {
                    session.check_memory()?;
                }
                if ready.get(3) == Some(&true) {
                    session.hear();
                }
                if ticks.is_some() {
                    session.tick()?;
                }
            }
        }
        let _ = shared.control.take();
        // Relaxed, both: the signal orders.
        if shared.stop.load(Ordering::Relaxed) {
            return Ok(());
        }
        if shared.has_failed() {
            return Err(Ended::Failed);
        }
        if shared.refresh.swap(false, Ordering::Relaxed) {
            refreshed(device, session.refresh());
        }
        // Relaxed: as above.
        if shared.config_changed.swap(false, Ordering::Relaxed) {
            session.config_changed();
        }
    }
}

/// Waits until one of them is readable (or broken), and says which are.
fn wait_for(fds: &[BorrowedFd<'_>], time: Option<Duration>) -> Result<Vec<bool>, rustix::io::Errno> {
    let mut fds: Vec<_> = fds.iter().map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN)).collect();
    let time = time
        .map(|time| Timespec { tv_sec: time.as_secs().cast_signed(), tv_nsec: time.subsec_nanos().into() });
    match poll(&mut fds, time.as_ref()) {
        Ok(_) | Err(rustix::io::Errno::INTR) => {}
        Err(error) => return Err(error),
    }
    Ok(fds.iter().map(|fd| !fd.revents().is_empty()).collect())
}
