//! Serves one daemon after another, in a `poll` loop.
//!
//! ```text
//!             .----- connection closed, or process ended; descriptors stay held -----.
//!             v                                                                      |
//!   idle --connection of this user or root--> HOLD=1 --> owned --a message--> its answer
//!    | other user: ERROR                                   | another connection: waits; a third: ERROR
//! ```
//! The daemon that waits takes over, or its predecessor is about to end. It gets `HOLD=1` then.
//!
//! A dead daemon's last messages are read before its successor is served.
use super::socket::Listener;
use super::table::Table;
use crate::fds::{self, Received};
use crate::peer::{Peer, is_ready};
use crate::serve::signals::{Request as Signal, Signals};
use crate::serve::store::text::{Answer, MAX_FDS, MAX_REQUEST, Request};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

/// Messages that are read in a row: more than fit into a socket's buffer.
const MESSAGES: usize = 1024;
/// Time until another attempt to accept a connection.
const RETRY: Duration = Duration::from_millis(100);

/// The daemon that is served.
#[derive(Debug)]
struct Owner {
    connection: OwnedFd,
    peer: Peer,
}

/// Why a daemon is no longer served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Gone {
    /// It closed the connection, or has ended.
    Ended,
    /// It does not read its answers.
    NotReading,
}

/// The holder.
#[derive(Debug)]
pub(super) struct Server {
    listener: Listener,
    table: Table,
    owner: Option<Owner>,
    /// The next owner.
    waiting: Option<Owner>,
}

impl Server {
    pub(super) fn new(listener: Listener, limit: usize) -> Self {
        Self { listener, table: Table::new(limit), owner: None, waiting: None }
    }

    /// Number of held descriptors.
    pub(super) fn held(&self) -> usize {
        self.table.len()
    }

    /// Serves until SIGTERM or SIGINT.
    ///
    /// # Errors
    /// The kernel refuses to wait.
    pub(super) fn run(&mut self, signals: &Signals) -> io::Result<()> {
        loop {
            let (signal, listener) = self.wait(signals)?;
            // SIGHUP: the terminal was closed, and there is nothing to read again.
            if signal && signals.next()? == Some(Signal::End) {
                return Ok(());
            }
            self.serve_owner();
            if listener {
                self.accept();
            }
        }
    }

    /// Waits. Whether there is a signal, and whether there is a connection.
    fn wait(&self, signals: &Signals) -> io::Result<(bool, bool)> {
        let owner = self.owner.as_ref();
        let more =
            [owner.map(|owner| owner.connection.as_fd()), owner.and_then(|owner| owner.peer.process())];
        let fds = [signals.as_fd(), self.listener.as_fd()].into_iter().chain(more.into_iter().flatten());
        let mut fds: Vec<_> = fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
        match poll(&mut fds, None) {
            Ok(_) => Ok((!fds[0].revents().is_empty(), !fds[1].revents().is_empty())),
            Err(Errno::INTR) => Ok((false, false)),
            Err(error) => Err(error.into()),
        }
    }

    /// Accepts a connection, or refuses it.
    fn accept(&mut self) {
        let connection = match self.listener.accept() {
            Ok(Some(connection)) => connection,
            Ok(None) => return,
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection");
                std::thread::sleep(RETRY);
                return;
            }
        };
        let peer = match Peer::of(&connection) {
            Ok(peer) => peer,
            Err(error) => return tracing::warn!(%error, "cannot identify a client"),
        };
        // The owner may have died after `wait`; its end then lies before this connection.
        self.serve_owner();
        // A daemon sends nothing before it is served: it has ended.
        self.waiting.take_if(|waiting| is_ready(&waiting.connection));
        let pid = peer.pid;
        let refused = match &self.waiting {
            _ if !peer.is_trusted() => Some("permission denied: run as the user of the holder".to_owned()),
            Some(Owner { peer: Peer { pid, .. }, .. }) => Some(format!("process {pid} waits already")),
            None => None,
        };
        if let Some(why) = refused {
            tracing::warn!(pid, "connection refused: {why}");
            // The buffer of a new connection is empty, and the client may be gone already.
            let text = Answer::Refused(why).to_string();
            let _ = fds::send(&connection, text.as_bytes(), &[], SendFlags::DONTWAIT);
            return;
        }
        if let Some(owner) = &self.owner {
            tracing::info!(pid, owner = owner.peer.pid, "daemon waits for another one to end");
        }
        self.waiting = Some(Owner { connection, peer });
        self.admit();
    }

    /// Serves the daemon that waits, if there is no other.
    fn admit(&mut self) {
        let Some(next) = self.waiting.take_if(|_| self.owner.is_none()) else { return };
        let (pid, held) = (next.peer.pid, self.table.len());
        // As above.
        let text = Answer::Hello { held }.to_string();
        if fds::send(&next.connection, text.as_bytes(), &[], SendFlags::DONTWAIT).is_ok() {
            tracing::info!(pid, held, "daemon connected");
            self.owner = Some(next);
        }
    }

    /// Answers the messages that have arrived.
    fn serve_owner(&mut self) {
        let Some(owner) = &self.owner else { return };
        if let Some(why) = serve(owner, &mut self.table) {
            let (pid, held) = (owner.peer.pid, self.table.len());
            match why {
                Gone::Ended => tracing::info!(pid, held, "daemon disconnected"),
                Gone::NotReading => tracing::warn!(pid, held, "daemon disconnected: it does not read"),
            }
            self.owner = None;
            self.admit();
        }
    }
}

/// Answers the messages of a daemon that have arrived. `None`: it is still served.
fn serve(owner: &Owner, table: &mut Table) -> Option<Gone> {
    let connection = owner.connection.as_fd();
    // Before its last messages are read: a process that has ended sends no more.
    let has_ended = owner.peer.has_ended();
    let mut buffer = [0; MAX_REQUEST];
    for _ in 0..MESSAGES {
        match fds::receive(&connection, &mut buffer, MAX_FDS, RecvFlags::DONTWAIT) {
            // Another process may have a copy of its end of the connection.
            Err(Errno::AGAIN) => return has_ended.then_some(Gone::Ended),
            // It died with an unread answer; messages may follow.
            Err(Errno::CONNRESET) => {}
            Err(error) => {
                tracing::warn!(%error, "cannot receive");
                return Some(Gone::Ended);
            }
            Ok(Received { len: 0, .. }) => return Some(Gone::Ended),
            Ok(received) => {
                if !answer(connection, table, &buffer, received) {
                    return Some(Gone::NotReading);
                }
            }
        }
    }
    None
}

/// Handles a message, and answers it. Whether the daemon reads.
fn answer(connection: BorrowedFd<'_>, table: &mut Table, buffer: &[u8], received: Received) -> bool {
    let refused = |why: String| {
        tracing::warn!("message refused: {why}");
        (Answer::Refused(why), Vec::new())
    };
    let (text, fds) = handle(table, buffer, received).unwrap_or_else(refused);
    let send = |text: &Answer, fds: &[BorrowedFd<'_>]| {
        fds::send(&connection, text.to_string().as_bytes(), fds, SendFlags::DONTWAIT)
    };
    let sent = match send(&text, &fds) {
        // The daemon's user has too many descriptors in messages (ETOOMANYREFS), for example.
        Err(error)
            if !fds.is_empty() && !matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::BrokenPipe) =>
        {
            send(&refused(format!("cannot send descriptors: {error}")).0, &[])
        }
        sent => sent,
    };
    // A dead daemon's messages are handled to the last.
    !sent.is_err_and(|error| error.kind() == ErrorKind::WouldBlock)
}

/// An answer, and its descriptors.
type Handled<'a> = (Answer, Vec<BorrowedFd<'a>>);

/// Handles a message.
fn handle<'a>(table: &'a mut Table, buffer: &[u8], received: Received) -> Result<Handled<'a>, String> {
    let Received { len, fds, text_cut, fds_cut } = received;
    if text_cut {
        return Err(format!("message is longer than {MAX_REQUEST} bytes"));
    }
    if fds_cut {
        return Err(format!(
            "message has more than {MAX_FDS} descriptors, or too many are open: raise LimitNOFILE="
        ));
    }
    let request = Request::parse(&buffer[..len]).map_err(|error| error.to_string())?;
    match request {
        Request::Store(_) if fds.is_empty() => Err("FDSTORE=1 without descriptors".to_owned()),
        Request::Store(name) => {
            let count = fds.len();
            table.put(&name, fds).map_err(|full| full.to_string())?;
            tracing::debug!(%name, count, held = table.len(), "descriptors stored");
            Ok((Answer::Done, Vec::new()))
        }
        _ if !fds.is_empty() => Err("only FDSTORE=1 has descriptors".to_owned()),
        Request::Remove(name) => {
            let count = table.remove(&name);
            tracing::debug!(%name, count, held = table.len(), "descriptors removed");
            Ok((Answer::Done, Vec::new()))
        }
        Request::Take { from } => Ok(table.chunk(from)),
        Request::Limit => Ok((Answer::Limit { most: table.limit }, Vec::new())),
    }
}
