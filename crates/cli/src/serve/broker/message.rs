//! Messages between daemon, broker and reader: JSON in packets, with at most one descriptor.
use crate::fds::{self, Received};
use paravane_store::Target;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};
use serde::{Deserialize, Serialize};
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::time::Duration;

/// How long an answer may take beyond the time to connect.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);
/// Most bytes of a packet. A path has at most 4096.
const MOST: usize = 64 << 10;

/// One packet.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Message {
    /// The daemon may ask for it.
    Allow(#[serde(with = "Place")] Target),
    /// No more targets, except those that come by the socket that comes along; the user to become.
    Sealed { user: Option<String> },
    /// To the reader: the file to read, and the user to become. A socket of the broker may come along.
    File { path: PathBuf, user: Option<String> },
    /// To the reader: read the file, and answer on the pipe that comes along.
    Read,
    /// Connect, and answer on the socket that comes along.
    Connect {
        #[serde(with = "Place")]
        target: Target,
        millis: u64,
    },
    /// Done: the descriptor comes along.
    Connected,
    /// Not done.
    Failed { error: String, number: Option<i32> },
}

/// A target, in a message.
#[derive(Serialize, Deserialize)]
#[serde(remote = "Target", rename_all = "snake_case")]
enum Place {
    Tcp { host: String, port: u16 },
    Unix(PathBuf),
}

/// Sends a message.
pub(crate) fn send(socket: &OwnedFd, message: &Message, fd: Option<BorrowedFd<'_>>) -> io::Result<()> {
    Ok(fds::send(socket, &serde_json::to_vec(message)?, fd.as_slice(), SendFlags::empty())?)
}

/// Receives a message. `None`: the other side has closed its end.
pub(crate) fn receive(socket: &OwnedFd) -> io::Result<Option<(Message, Option<OwnedFd>)>> {
    let mut text = vec![0; MOST];
    match fds::receive(socket, &mut text, 1, RecvFlags::empty()) {
        Err(Errno::CONNRESET) => Ok(None),
        Err(Errno::AGAIN) => Err(io::ErrorKind::TimedOut.into()),
        received => match received? {
            Received { len: 0, .. } => Ok(None),
            Received { len, mut fds, .. } => Ok(Some((serde_json::from_slice(&text[..len])?, fds.pop()))),
        },
    }
}
