//! Messages between daemon, broker and reader: JSON in packets, with at most one descriptor.
use paravane_store::Target;
use rustix::io::{Errno, IoSlice, IoSliceMut};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use serde::{Deserialize, Serialize};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
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
    Allow(Place),
    /// No more targets, except those that come by the socket that comes along; the user to become.
    Sealed { user: Option<String> },
    /// To the reader: the file to read, and the user to become. A socket of the broker may come along.
    File { path: PathBuf, user: Option<String> },
    /// To the reader: read the file, and answer on the pipe that comes along.
    Read,
    /// Connect, and answer on the socket that comes along.
    Connect { target: Place, millis: u64 },
    /// Done: the descriptor comes along.
    Connected,
    /// Not done.
    Failed { error: String, number: Option<i32> },
}

/// A target, in a message.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Place {
    Tcp { host: String, port: u16 },
    Unix(PathBuf),
}

impl From<&Target> for Place {
    fn from(target: &Target) -> Self {
        match target {
            Target::Tcp { host, port } => Self::Tcp { host: host.clone(), port: *port },
            Target::Unix(path) => Self::Unix(path.clone()),
        }
    }
}

impl From<Place> for Target {
    fn from(place: Place) -> Self {
        match place {
            Place::Tcp { host, port } => Self::Tcp { host, port },
            Place::Unix(path) => Self::Unix(path),
        }
    }
}

/// Sends a message.
pub(crate) fn send(socket: &OwnedFd, message: &Message, fd: Option<BorrowedFd<'_>>) -> io::Result<()> {
    let text = serde_json::to_vec(message)?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let fds: Vec<_> = fd.into_iter().collect();
    loop {
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(&fds));
        }
        match sendmsg(socket, &[IoSlice::new(&text)], &mut control, SendFlags::NOSIGNAL) {
            Err(Errno::INTR) => {}
            sent => return Ok(sent.map(drop)?),
        }
    }
}

/// Receives a message. `None`: the other side has closed its end.
pub(crate) fn receive(socket: &OwnedFd) -> io::Result<Option<(Message, Option<OwnedFd>)>> {
    let mut text = vec![0; MOST];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = loop {
        let mut slices = [IoSliceMut::new(&mut text)];
        match recvmsg(socket.as_fd(), &mut slices, &mut control, RecvFlags::CMSG_CLOEXEC) {
            Err(Errno::INTR) => {}
            Err(Errno::CONNRESET) => return Ok(None),
            Err(Errno::AGAIN) => return Err(io::ErrorKind::TimedOut.into()),
            received => break received?,
        }
    };
    if received.bytes == 0 {
        return Ok(None);
    }
    let mut found = None;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(fds) = message {
            found = fds.last();
        }
    }
    let message = serde_json::from_slice(&text[..received.bytes])?;
    Ok(Some((message, found)))
}
