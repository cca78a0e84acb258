//! The broker's process: `paravane broker`, started by the daemon with a socket as its stdin.
use super::message::{Message, receive, send};
use super::targets::Targets;
use crate::failure::Failure;
use crate::serve::helper;
use crate::serve::sandbox::{helpers, user::Target as User};
use anyhow::{Context, anyhow};
use paravane_store::{Connector, Direct, Target};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// Most connections that are being made at once.
const MOST: usize = 64;
/// Longest time for one.
const LONGEST: Duration = Duration::from_secs(60);

pub(crate) fn main() -> Result<ExitCode, Failure> {
    let (socket, _blocked) = helper::begin()?;
    let (mut named, mut sealed) = (Vec::new(), None);
    while sealed.is_none() {
        match receive(&socket).context("stdin is not the socket of a daemon")? {
            Some((Message::Allow(target), _)) => named.push(target),
            Some((Message::Sealed { user }, reader)) => sealed = Some((reader, user)),
            Some(_) => return Err(Failure::request(anyhow!("unexpected message"))),
            None => return Ok(ExitCode::SUCCESS),
        }
    }
    let (reader, user) = sealed.unwrap_or_default();
    let user = user.as_deref().map(User::find).transpose().map_err(Failure::request)?;
    let ports = named.iter().filter_map(|target| match target {
        Target::Tcp { port, .. } => Some(*port),
        Target::Unix(_) => None,
    });
    helpers::enter_broker(reader.is_none().then_some(ports), user.as_ref())?;
    serve(&socket, Targets::new(named, reader));
    Ok(ExitCode::SUCCESS)
}

/// Answers until the daemon has gone.
pub(super) fn serve(socket: &OwnedFd, targets: Targets) {
    let (targets, busy) = (Arc::new(targets), Arc::new(AtomicUsize::new(0)));
    let mut reads = targets.reader.is_some();
    loop {
        let asked = match wait(socket, targets.reader.as_ref().filter(|_| reads)) {
            Ok(asked) => asked,
            Err(error) => {
                tracing::warn!(%error, "cannot wait for messages");
                return;
            }
        };
        // Before the daemon's message: it asks for a server of the file once it has the file.
        reads = reads && targets.take();
        if !asked {
            continue;
        }
        let (target, millis, answer) = match receive(socket) {
            Ok(Some((Message::Connect { target, millis }, Some(answer)))) => (target, millis, answer),
            Ok(Some(_)) => continue,
            Ok(None) => return,
            Err(error) => {
                tracing::warn!(%error, "cannot read a message of the daemon");
                return;
            }
        };
        let timeout = Duration::from_millis(millis).min(LONGEST);
        // Relaxed: a limit, with nothing to order.
        if busy.fetch_add(1, Ordering::Relaxed) >= MOST {
            busy.fetch_sub(1, Ordering::Relaxed);
            fail(&answer, "too many connections are being made", None);
            continue;
        }
        let (targets, done) = (targets.clone(), busy.clone());
        let connect = move || {
            connect(&targets, &target, timeout, &answer);
            done.fetch_sub(1, Ordering::Relaxed);
        };
        // The answer's socket is closed if there is no thread.
        if let Err(error) = std::thread::Builder::new().name("connect".into()).spawn(connect) {
            busy.fetch_sub(1, Ordering::Relaxed);
            tracing::warn!(%error, "cannot start a thread");
        }
    }
}

/// Waits for a message of the daemon or of the reader. `true`: the daemon's is there.
fn wait(socket: &OwnedFd, reader: Option<&OwnedFd>) -> io::Result<bool> {
    let one = |fd| PollFd::new(fd, PollFlags::IN);
    let mut fds: Vec<_> = [Some(socket), reader].into_iter().flatten().map(one).collect();
    match poll(&mut fds, None) {
        Ok(_) => Ok(fds.first().is_some_and(|socket| !socket.revents().is_empty())),
        Err(Errno::INTR) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

fn connect(targets: &Targets, target: &Target, timeout: Duration, answer: &OwnedFd) {
    if !targets.has(target) {
        return fail(answer, &format!("{target} is not configured: restart the daemon to add it"), None);
    }
    match Direct.connect(target, timeout) {
        // The daemon may wait no longer.
        Ok(stream) => drop(send(answer, &Message::Connected, Some(stream.as_fd()))),
        Err(error) => fail(answer, &error.to_string(), error.raw_os_error()),
    }
}

fn fail(answer: &OwnedFd, error: &str, number: Option<i32>) {
    drop(send(answer, &Message::Failed { error: error.to_owned(), number }, None));
}
