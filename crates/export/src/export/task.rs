//! The task of an export: it waits for clients, and talks with one at a time.
//!
//! ```text
//!   waits for a client --it is here--> talks --the session ends--> waits for a client
//!        '------ stop, hand over, a panic --------'--> finished: device dropped
//! ```
use super::backoff;
use super::endpoint::{Acceptor, NextClient};
use super::error::EndCause;
use super::host_watch::{Look, log_refresh};
use super::orders::Order;
use super::shared::Shared;
use super::talk::{Talk, Talked};
use super::unseen::Unseen;
use crate::handover::HandoverError;
use crate::handover::record::{ConnectionState, ExportState, Pending};
use crate::keeper::{Keeping, State};
use crate::protocol::{Collected, Offer, Protocol, Section, Session, Successor};
use crate::protocol_threads::{Next, Ready, Task};
use crate::socket::{Connection, Inspector};
use paravane_device::{Device, LogDevice};
use paravane_io::{DeviceThreads, caught};
use std::convert::Infallible;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

/// Number of the listening socket among the descriptors to wait for.
const LISTENER: u8 = 0;

/// A session that was handed over, or why not.
type Handed = Result<ConnectionState, HandoverError>;

/// See the module.
pub(super) struct ExportTask {
    pub(super) shared: Arc<Shared>,
    pub(super) name: Arc<str>,
    /// `None`: its session has it, or it was dropped.
    pub(super) device: Option<Box<dyn Device>>,
    /// `None`: it has finished.
    pub(super) threads: Option<Arc<DeviceThreads>>,
    pub(super) protocol: Arc<dyn Protocol>,
    pub(super) offer: Offer,
    pub(super) keeping: Option<Keeping>,
    /// Dropped when the session of another process is restored, or cannot be.
    pub(super) restoring: Option<Sender<Infallible>>,
    /// `None`: it has finished.
    pub(super) acceptor: Option<Acceptor>,
    /// Connection of another process, to continue.
    pub(super) resumed: Option<ConnectionState>,
    /// The client that is connected.
    pub(super) talk: Option<Box<Talk>>,
    /// Whether no step was run.
    pub(super) is_first: bool,
    /// Error of the latest session, if that made no progress, and how often it came in a row.
    pub(super) repeated: Option<(String, u64)>,
    /// Looks at descriptors before this process has them.
    pub(super) inspector: Option<Arc<dyn Inspector>>,
}

/// What a task does next.
enum Progress {
    Waits(Option<Duration>),
    /// It ends; with this session, if it is handed over.
    Ends(Option<Box<Handed>>),
}

impl Task for ExportTask {
    fn step(&mut self, ready: Ready) -> Next {
        let _named = LogDevice::enter(Some(Arc::clone(&self.name)));
        let stepped = caught(|| match self.advance(ready) {
            Progress::Waits(time) => Next::Wait(time),
            Progress::Ends(handed) => {
                self.finish(handed);
                Next::End
            }
        });
        let next = stepped.unwrap_or_else(|message| {
            self.give_up(&message);
            Next::End
        });
        if next == Next::End {
            self.end();
        }
        next
    }

    fn fds(&self) -> Vec<(u8, BorrowedFd<'_>)> {
        if let Some(talk) = &self.talk {
            return talk.fds();
        }
        let listener = self.acceptor.as_ref().and_then(Acceptor::fd);
        listener.map(|fd| (LISTENER, fd)).into_iter().collect()
    }
}

impl ExportTask {
    /// Runs until it has to wait, or ends.
    fn advance(&mut self, mut ready: Ready) -> Progress {
        if std::mem::take(&mut self.is_first) {
            self.begin();
        }
        let mut is_new = false;
        loop {
            if let Some(talk) = &mut self.talk {
                let talked = talk.step(std::mem::take(&mut ready), std::mem::take(&mut is_new));
                match talked {
                    Ok(Talked::Waits(time)) => return Progress::Waits(time),
                    Ok(Talked::Over) => {
                        if let Some(handed) = self.end_session(Ok(())) {
                            return Progress::Ends(Some(Box::new(handed)));
                        }
                    }
                    Err(error) => drop(self.end_session(Err(error))),
                }
            }
            match self.next_client() {
                Ok(connection) => self.begin_session(connection, false),
                Err(progress) => return progress,
            }
            is_new = true;
        }
    }

    /// Before the first client: continues a session of another process.
    fn begin(&mut self) {
        if let Some(device) = &mut self.device {
            let shared = Arc::clone(&self.shared);
            device.tell_change(Box::new(move || {
                shared.orders.give(&[Order::Look]);
            }));
            if self.keeping.is_some() {
                let shared = Arc::clone(&self.shared);
                device.tell_state(Box::new(move || {
                    shared.orders.give(&[Order::Record]);
                }));
            }
        }
        match self.resumed.take() {
            None => self.restoring = None,
            Some(connection) => self.begin_session(connection, true),
        }
    }

    /// Refreshes the device between sessions, if requested.
    fn refresh(&mut self) {
        if self.shared.orders.take(Order::Refresh)
            && let Some(device) = &mut self.device
        {
            log_refresh(&self.name, device.refresh());
        }
    }

    /// Keeps the state without a client.
    fn keep(&mut self) {
        let change = self.shared.note.pending();
        if let Some(keeping) = &mut self.keeping {
            if self.shared.orders.take(Order::Keep) || keeping.has_given_up() {
                keeping.begin();
            }
            keeping.record(State { sessions: self.shared.shared_status.sessions(), client: None });
            self.shared.shared_status.write().kept = keeping.is_active();
        }
        if let Some(change) = change {
            self.shared.note.recorded(change);
        }
    }

    /// Whether what is kept stays for a later process.
    fn leaves(&self) -> bool {
        let is_kept = self.keeping.as_ref().is_some_and(Keeping::is_active);
        is_kept && self.shared.orders.has(Order::Leave) && !self.shared.has_failed()
    }

    fn stopping(&self) -> bool {
        self.shared.orders.has(Order::Stop) || self.shared.has_failed()
    }

    /// Takes the next client.
    ///
    /// # Errors
    /// There is none yet, or there will be none.
    fn next_client(&mut self) -> Result<ConnectionState, Progress> {
        if self.stopping() || self.shared.is_handing_over() {
            return Err(Progress::Ends(None));
        }
        self.refresh();
        self.keep();
        let look = match &mut self.device {
            Some(device) => self.shared.look(&self.name, &mut **device),
            None => Look::default(),
        };
        let Some(acceptor) = &mut self.acceptor else { return Err(Progress::Ends(None)) };
        let next = acceptor.next();
        let time = match next {
            NextClient::Here(socket) => return Ok(ConnectionState::new(socket)),
            NextClient::Ended => return Err(Progress::Ends(None)),
            NextClient::Wait => None,
            NextClient::Pause(time) => Some(time),
            NextClient::Failed { error, pause } => {
                // Only a listener has a descriptor. A VMM that does not listen yet is no error.
                if acceptor.fd().is_some() {
                    let mut status = self.shared.shared_status.write();
                    status.refused_connections += 1;
                    status.last_error = Some(error);
                }
                Some(pause)
            }
        };
        Err(Progress::Waits(time.into_iter().chain(look.again).min()))
    }

    /// Begins the session of a client.
    fn begin_session(&mut self, connection: ConnectionState, is_resumed: bool) {
        let number = {
            let mut status = self.shared.shared_status.write();
            status.connected = true;
            status.sessions += u64::from(!is_resumed);
            (status.features, status.protocol_features) = (0, 0);
            status.sessions
        };
        self.shared.orders.give_to_self(&[Order::Look]);
        self.shared.host.lock().forget_link();
        match is_resumed {
            true => tracing::info!(device = &*self.name, session = number, "session taken over"),
            // Reported when it makes progress.
            false if self.is_repeating() => {
                tracing::debug!(device = &*self.name, session = number, "client connected");
            }
            false => tracing::info!(device = &*self.name, session = number, "client connected"),
        }
        if let Err(error) = self.try_begin_session(connection, number) {
            match self.talk {
                Some(_) => drop(self.end_session(Err(error))),
                None => self.report_end(number, Err(error), false),
            }
        }
    }

    fn try_begin_session(&mut self, connection: ConnectionState, number: u64) -> Result<(), EndCause> {
        let restoring = self.restoring.take();
        let ConnectionState { socket, partial: (part, fds), session: state, pending } = connection;
        let connection = Connection::resume(socket, self.protocol.framing(), &part, fds)?
            .inspected_by(self.inspector.clone());
        let (Some(device), Some(threads)) = (self.device.take(), &self.threads) else {
            return Err(EndCause::Failed);
        };
        let status = Arc::clone(&self.shared.shared_status);
        let mut session = match self.protocol.begin(device, Arc::clone(threads), status, self.offer) {
            Ok(session) => session,
            Err((device, error)) => {
                self.device = Some(device);
                return Err(error.into());
            }
        };
        // A failure is that of the keeping only.
        if (self.keeping.is_some() || pending.is_some())
            && let Err(error) = session.track()
        {
            tracing::warn!(device = &*self.name, "cannot keep the session for the next process: {error}");
        }
        let hold = pending == Some(Pending::Begun);
        let talk = Talk {
            session,
            connection,
            shared: Arc::clone(&self.shared),
            keeping: self.keeping.take(),
            device: Arc::clone(&self.name),
            number,
            start: Instant::now(),
            completed: self.shared.completed(),
            is_quiet: self.is_repeating(),
            unseen: Unseen::new(&self.shared.shared_status.read()),
        };
        let talk = self.talk.insert(Box::new(talk));
        let replayed = talk.session.replay(state, hold).map_err(EndCause::Restore);
        drop(restoring);
        replayed?;
        talk.begin(pending)
    }

    /// Ends the session. Returns it if that is handed over.
    fn end_session(&mut self, result: Result<(), EndCause>) -> Option<Handed> {
        let Talk { session, connection, shared, keeping, number, start, completed, .. } =
            *self.talk.take()?;
        self.keeping = keeping;
        if result.is_ok() && shared.is_handing_over() && !shared.orders.has(Order::Stop) {
            let session = self.hand_over(session);
            if let Some(keeping) = self.keeping.as_mut().filter(|_| shared.orders.has(Order::Exchange)) {
                keeping.detach(connection.as_fd());
            }
            let (socket, part, fds) = connection.into_parts();
            let partial = (part, fds);
            let state = |session| ConnectionState { socket, partial, session, pending: None };
            return Some(self.report_handed(number, session.map(state)));
        }
        let leaves = result.is_ok() && shared.orders.has(Order::Leave) && !shared.has_failed();
        if let Some(keeping) = self.keeping.as_mut().filter(|_| !leaves) {
            // Before the connection is closed, which the client may answer by another one.
            keeping.record(State { sessions: shared.shared_status.sessions(), client: None });
        }
        self.device = Some(session.end());
        drop(connection);
        let made_progress = shared.completed() != completed || start.elapsed() >= backoff::LONGEST;
        self.report_end(number, result, made_progress);
        if let Some(acceptor) = &mut self.acceptor {
            acceptor.closed(made_progress);
        }
        None
    }

    /// Stops a session and saves it.
    fn hand_over(&mut self, mut session: Box<dyn Session>) -> Result<Vec<Section>, HandoverError> {
        let mut keeping = self.keeping.as_mut().filter(|_| self.shared.orders.has(Order::Exchange));
        let successor = if keeping.is_some() { Successor::Within } else { Successor::Present };
        let give = |fd: BorrowedFd<'_>| {
            if let Some(keeping) = &mut keeping {
                keeping.detach(fd);
            }
            fd.try_clone_to_owned().map_err(HandoverError::Fd)
        };
        let mut collected = Collected { sections: Vec::new(), give };
        let saved = session.stop().and_then(|()| session.save(successor, &mut collected));
        match saved {
            Ok(()) => {
                let sections = collected.sections;
                let (device, remains) = session.leave();
                self.device = Some(device);
                self.shared.remains.lock().push(remains);
                Ok(sections)
            }
            Err(error) => {
                self.device = Some(session.end());
                Err(error)
            }
        }
    }

    fn report_handed(&self, number: u64, handed: Handed) -> Handed {
        match &handed {
            Ok(_) => tracing::info!(device = &*self.name, session = number, "session handed over"),
            Err(error) => {
                let mut status = self.shared.shared_status.write();
                status.connected = false;
                status.last_error = Some(error.to_string());
                drop(status);
                tracing::warn!(
                    device = &*self.name,
                    session = number,
                    "cannot hand the session over: {error}"
                );
            }
        }
        handed
    }

    /// Whether sessions end one after the other with the same error.
    fn is_repeating(&self) -> bool {
        self.repeated.as_ref().is_some_and(|(_, times)| *times > 1)
    }

    fn report_end(&mut self, number: u64, result: Result<(), EndCause>, made_progress: bool) {
        let shared = Arc::clone(&self.shared);
        let mut status = shared.shared_status.write();
        status.connected = false;
        let before = self.repeated.take();
        match result {
            Ok(()) => {
                drop(status);
                tracing::info!(device = &*self.name, session = number, "client disconnected");
            }
            // Not the client's fault, and already logged.
            Err(_) if shared.has_failed() => {}
            Err(error) => {
                let error = error.to_string();
                status.protocol_errors += 1;
                status.last_error = Some(error.clone());
                drop(status);
                let times = match before {
                    Some((same, times)) if same == error => times + 1,
                    _ => 1,
                };
                self.report_error(number, &error, times);
                self.repeated = (!made_progress).then_some((error, times));
            }
        }
    }

    /// Logs the error of a session, which came so many times in a row.
    fn report_error(&self, session: u64, error: &str, times: u64) {
        let device = &*self.name;
        match times {
            1 => tracing::warn!(device, session, "session ended: {error}"),
            2 => tracing::warn!(
                device,
                session,
                "session ended again: {error}; the client repeats what ended its session, \
                 and further sessions that end so are only counted (protocol_errors of the status)"
            ),
            _ => tracing::debug!(device, session, times, "session ended again: {error}"),
        }
    }

    /// Gives up the endpoint, and the device unless it is handed over.
    fn finish(&mut self, handed: Option<Box<Handed>>) {
        let leaves = self.leaves();
        let mut keeping = self.keeping.take_if(|_| !leaves);
        if !self.shared.orders.has(Order::Exchange) {
            // Before another process has the state.
            keeping.take().into_iter().for_each(Keeping::end);
        }
        let handed = self.leave(handed.map(|handed| *handed), leaves);
        if self.shared.is_handing_over() {
            // The successor can begin while the device is dropped.
            self.shared.finish_hand_over(handed, keeping);
            self.shared.signal_ended();
            if let Some(remains) = self.device.take().and_then(|device| device.retire()) {
                self.shared.remains.lock().push(remains);
            }
        } else {
            self.device = None;
            self.shared.remove_file();
        }
    }

    /// Gives up the endpoint. Returns the state if the export is handed over.
    ///
    /// `leaves`: a later process goes on with what is kept.
    fn leave(&mut self, handed: Option<Handed>, leaves: bool) -> Option<Result<ExportState, HandoverError>> {
        if leaves {
            let file = self.shared.file.lock().take();
            if let Some(file) = file {
                file.give_away();
            }
        }
        let acceptor = self.acceptor.take()?;
        if self.stopping() || !self.shared.is_handing_over() {
            return None;
        }
        let file = self.shared.file.lock();
        let endpoint = acceptor.state(file.as_ref());
        drop(file);
        let unserved: Option<OwnedFd> = acceptor.into_unserved();
        let endpoint = match endpoint {
            Ok(endpoint) => endpoint,
            Err(error) => return Some(Err(HandoverError::Fd(error))),
        };
        let sessions = self.shared.shared_status.read().sessions;
        let connection = match handed {
            Some(Ok(connection)) => Some(connection),
            Some(Err(error)) => return Some(Err(error)),
            None => unserved.map(ConnectionState::new),
        };
        let protocol = self.protocol.number();
        Some(Ok(ExportState { protocol, endpoint, sessions, connection, note: Vec::new() }))
    }

    /// Ends after a panic: the state of the device is unknown.
    fn give_up(&mut self, message: &str) {
        if let Some(threads) = &self.threads {
            threads.abandon();
        }
        let parts = (self.talk.take(), self.device.take(), self.keeping.take(), self.acceptor.take());
        if let Err(words) = caught(|| drop(parts)) {
            tracing::error!("device cannot be dropped after a panic: {words}");
        }
        self.restoring = None;
        let mut status = self.shared.shared_status.write();
        status.connected = false;
        status.queues.iter_mut().for_each(|queue| queue.live = false);
        drop(status);
        self.shared.fail(message);
        match self.shared.is_handing_over() {
            true => self.shared.finish_hand_over(None, None),
            false => self.shared.remove_file(),
        }
    }

    /// Tells the owner that the device is gone.
    fn end(&mut self) {
        // With their descriptors. A panic has left more than these.
        drop((self.keeping.take(), self.acceptor.take(), self.resumed.take(), self.restoring.take()));
        self.shared.outcome.device_dropped();
        self.shared.signal_ended();
        // Nobody waits for them, and a client may wait for its next server.
        drop(self.threads.take());
        self.shared.outcome.ended();
    }
}
