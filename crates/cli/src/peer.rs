//! The process at the other end of a connection.
use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, geteuid, pidfd_open};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// The process at the other end of a connection.
#[derive(Debug)]
pub(crate) struct Peer {
    /// 0: it is in a PID namespace that this process does not see.
    pub(crate) pid: i32,
    uid: u32,
    process: Result<OwnedFd, Errno>,
}

impl Peer {
    /// Who has connected, or called listen(2).
    ///
    /// # Errors
    /// The kernel refuses.
    pub(crate) fn of(connection: &impl AsFd) -> io::Result<Self> {
        let peer = getsockopt(connection, PeerCredentials)?;
        let pid = Pid::from_raw(peer.pid()).ok_or(Errno::INVAL);
        let process = pid.and_then(|pid| pidfd_open(pid, PidfdFlags::empty()));
        Ok(Self { pid: peer.pid(), uid: peer.uid(), process })
    }

    /// Whether it runs as this user or as root.
    pub(crate) fn is_trusted(&self) -> bool {
        self.uid == 0 || self.uid == geteuid().as_raw()
    }

    /// Readable when the process has ended, if the kernel tells.
    pub(crate) fn process(&self) -> Option<BorrowedFd<'_>> {
        self.process.as_ref().ok().map(AsFd::as_fd)
    }

    /// Whether the process has ended, as far as the kernel tells.
    pub(crate) fn has_ended(&self) -> bool {
        match &self.process {
            // Readable: it has ended, and its parent has not looked yet.
            Ok(process) => is_ready(process),
            Err(error) => *error == Errno::SRCH,
        }
    }
}

/// Whether a descriptor is readable now.
pub(crate) fn is_ready(fd: &impl AsFd) -> bool {
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut [PollFd::new(fd, PollFlags::IN)], Some(&now)).is_ok_and(|ready| ready > 0)
}

/// Allows a client of this user, or of root, to do `what`: "take over from".
///
/// # Errors
/// It is another user's, in one line.
pub(crate) fn allow(client: &impl AsFd, what: &str) -> Result<(), String> {
    let peer = Peer::of(client).map_err(|error| format!("cannot identify the client: {error}"))?;
    let (uid, own) = (peer.uid, geteuid().as_raw());
    match peer.is_trusted() {
        true => Ok(()),
        false => Err(format!("user {uid} may not {what} user {own}: run as that user or root")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixDatagram;

    #[test]
    fn this_process_is_trusted_and_has_not_ended() {
        let (near, _far) = UnixDatagram::pair().unwrap();
        let peer = Peer::of(&near).unwrap();
        assert!(peer.is_trusted() && !peer.has_ended());
        assert_eq!(u32::try_from(peer.pid), Ok(std::process::id()));
        assert!(allow(&near, "take over from").is_ok());
    }
}
