//! What lies between a daemon and an NBD server, and fails as it is told.
//!
//! ```text
//!   daemon --TCP--> proxy --Unix socket--> server        requests: counted
//!          <------        <------                        replies: held back, reordered, spoiled
//! ```
//! Whole messages are read, and written in one piece or in many.
use super::messages::{Message, Wrong, of_client, of_server};
use std::io::{BufReader, Error, ErrorKind, Result, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread;

/// Most replies that are held back.
const MOST_HELD: usize = 8;
/// Bytes of a message that are written one by one, and the pieces of the rest.
const ONE_BY_ONE: usize = 48;
const PIECES: [usize; 4] = [1, 7, 536, 1448];

/// A proxy, which ends with its value.
pub(super) struct Proxy {
    port: u16,
    shared: Arc<Shared>,
}

struct Shared {
    server: PathBuf,
    faults: Mutex<Faults>,
    changed: Condvar,
}

#[derive(Default)]
struct Faults {
    ended: bool,
    stalls: bool,
    splits: bool,
    reorders: bool,
    /// What the next replies are, and how many.
    wrong: Option<(Wrong, usize)>,
    reordered: usize,
}

impl Proxy {
    /// Passes connections on to the socket of a server.
    pub(super) fn start(server: &Path) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let (server, faults) = (server.to_owned(), Mutex::default());
        let shared = Arc::new(Shared { server, faults, changed: Condvar::new() });
        let accepts = shared.clone();
        thread::spawn(move || {
            for client in listener.incoming() {
                if accepts.faults().ended {
                    break;
                }
                let shared = accepts.clone();
                thread::spawn(move || shared.serve(client.unwrap()));
            }
        });
        Self { port, shared }
    }

    /// Location of an export of the server.
    pub(super) fn location(&self, export: &str) -> String {
        format!("nbd://127.0.0.1:{}/{export}.img", self.port)
    }

    fn set(&self, change: impl FnOnce(&mut Faults)) {
        change(&mut self.shared.faults());
        self.shared.changed.notify_all();
    }

    /// Passes no byte, or goes on.
    pub(super) fn stall(&self, stalls: bool) {
        self.set(|faults| faults.stalls = stalls);
    }

    /// Writes messages in many small pieces.
    pub(super) fn split(&self, splits: bool) {
        self.set(|faults| faults.splits = splits);
    }

    /// Passes replies on in another order.
    pub(super) fn reorder(&self, reorders: bool) {
        self.set(|faults| faults.reorders = reorders);
    }

    /// How many replies have overtaken another one.
    pub(super) fn reordered(&self) -> usize {
        self.shared.faults().reordered
    }

    /// Makes the next replies wrong.
    pub(super) fn spoil(&self, wrong: Wrong, count: usize) {
        self.set(|faults| faults.wrong = Some((wrong, count)));
    }

    /// Makes no more replies wrong.
    pub(super) fn spoil_none(&self) {
        self.set(|faults| faults.wrong = None);
    }

    /// Waits until all of the replies are spoiled.
    pub(super) fn wait_until_spoiled(&self) {
        let faults = self.shared.faults();
        let patience = crate::daemon::patience();
        let waits = self.shared.changed.wait_timeout_while(faults, patience, |faults| faults.wrong.is_some());
        assert!(!waits.unwrap().1.timed_out(), "there was no such reply");
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.set(|faults| faults.ended = true);
        // The thread that accepts notices.
        let _ = TcpStream::connect(("127.0.0.1", self.port));
    }
}

impl Shared {
    fn faults(&self) -> MutexGuard<'_, Faults> {
        self.faults.lock().unwrap()
    }

    /// Passes the messages of a connection, until one side ends it.
    fn serve(&self, client: TcpStream) {
        client.set_nodelay(true).unwrap();
        let Ok(server) = UnixStream::connect(&self.server) else { return };
        let (in_flight, ends) = (AtomicUsize::new(0), (client.try_clone(), server.try_clone()));
        let (Ok(client_too), Ok(server_too)) = ends else { return };
        thread::scope(|scope| {
            scope.spawn(|| {
                // Half of the connection: what the server has begun is still answered.
                let _ = self.requests(client_too, &server, &in_flight);
                let _ = server.shutdown(Shutdown::Write);
            });
            let _ = self.replies(server_too, &client, &in_flight);
            let _ = (client.shutdown(Shutdown::Both), server.shutdown(Shutdown::Both));
        });
    }

    fn requests(&self, from: TcpStream, mut to: &UnixStream, in_flight: &AtomicUsize) -> Result<()> {
        let mut from = BufReader::new(from);
        loop {
            let message = of_client(&mut from)?;
            in_flight.fetch_add(message.counts.into(), Ordering::SeqCst);
            self.write(&mut to, &message.bytes)?;
        }
    }

    fn replies(&self, from: UnixStream, mut to: &TcpStream, in_flight: &AtomicUsize) -> Result<()> {
        let mut from = BufReader::new(from);
        let (mut reply, mut held) = (Vec::new(), Vec::new());
        loop {
            let Message { bytes, counts, is_reply } = of_server(&mut from)?;
            if !is_reply {
                self.write(&mut to, &bytes)?;
                continue;
            }
            reply.extend(bytes);
            if !counts {
                continue;
            }
            held.push(std::mem::take(&mut reply));
            // Another reply comes for sure while more requests are in flight.
            let all = in_flight.load(Ordering::SeqCst).min(MOST_HELD);
            if self.faults().reorders && held.len() < all {
                continue;
            }
            in_flight.fetch_sub(held.len(), Ordering::SeqCst);
            self.faults().reordered += held.len() - 1;
            for mut reply in held.drain(..).rev() {
                self.spoil(&mut reply);
                self.write(&mut to, &reply)?;
            }
        }
    }

    fn spoil(&self, reply: &mut Vec<u8>) {
        let mut faults = self.faults();
        let Some((wrong, count)) = faults.wrong else { return };
        if wrong.spoil(reply) {
            faults.wrong = (count > 1).then_some((wrong, count - 1));
            self.changed.notify_all();
        }
    }

    /// Writes a message when nothing stalls.
    fn write(&self, to: &mut impl Write, message: &[u8]) -> Result<()> {
        let waits = |faults: &mut Faults| faults.stalls && !faults.ended;
        let faults = self.changed.wait_while(self.faults(), waits).unwrap();
        if faults.ended {
            return Err(Error::from(ErrorKind::NotConnected));
        }
        let splits = faults.splits;
        drop(faults);
        if !splits {
            return to.write_all(message);
        }
        let (mut rest, mut sizes) = (message, PIECES.into_iter().cycle());
        while !rest.is_empty() {
            let one_by_one = message.len() - rest.len() < ONE_BY_ONE;
            let size = if one_by_one { 1 } else { sizes.next().unwrap_or(1) };
            let (piece, more) = rest.split_at(size.min(rest.len()));
            to.write_all(piece)?;
            rest = more;
        }
        Ok(())
    }
}
