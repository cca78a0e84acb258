//! Connections to the servers of images, made outside of the sandbox.
//!
//! ```text
//!  daemon: start --allow TARGET*, sealed--> broker: a process of its own, without device code
//!    | sandbox: no TCP, no names
//!    '-- Broker::connect --TARGET, a socket for the answer--> is it allowed? --> connect(2) --> descriptor, or an error
//! ```
//! The broker resolves names and connects, and does nothing else: no byte from a server passes it,
//! nor one of a guest. It connects only to targets that the daemon named before it entered its
//! sandbox, or that the [reader](super::reader) has found in the file of devices since: a daemon that
//! a guest has taken over cannot add a target. Its environment is empty. It ends with the daemon.
pub(crate) mod message;
mod process;
mod targets;

use super::helper::Helper;
use super::sandbox::helpers;
use crate::fds;
use message::{Message, PATIENCE, receive, send};
use paravane_store::{Connector, Target};
use rustix::net::sockopt;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

pub(crate) use process::main;

const BROKER: Helper = Helper { name: "broker", does: "connects to servers" };

/// The daemon's end.
#[derive(Debug)]
pub(crate) struct Broker {
    socket: OwnedFd,
}

impl Broker {
    /// Starts the process. `reader`: names more targets later.
    ///
    /// # Errors
    /// The host refuses a process.
    pub(crate) fn start(
        targets: &[Target],
        reader: Option<OwnedFd>,
        user: Option<&str>,
    ) -> Result<Self, anyhow::Error> {
        let near = BROKER.start(&[("RES_OPTIONS", helpers::resolver_options())])?;
        for target in targets {
            send(&near, &Message::Allow(target.clone()), None)?;
        }
        let sealed = Message::Sealed { user: user.map(ToOwned::to_owned) };
        send(&near, &sealed, reader.as_ref().map(AsFd::as_fd))?;
        Ok(Self { socket: near })
    }
}

impl Connector for Broker {
    fn connect(&self, target: &Target, timeout: Duration) -> io::Result<OwnedFd> {
        let (near, far) = fds::pair()?;
        sockopt::set_socket_timeout(&near, sockopt::Timeout::Recv, Some(timeout + PATIENCE))?;
        let millis = timeout.as_millis().try_into().unwrap_or(u64::MAX);
        send(&self.socket, &Message::Connect { target: target.clone(), millis }, Some(far.as_fd()))
            .map_err(ended)?;
        drop(far);
        match receive(&near)? {
            Some((Message::Connected, Some(stream))) => Ok(stream),
            Some((Message::Failed { error, number }, _)) => Err(match number {
                Some(number) => io::Error::from_raw_os_error(number),
                None => io::Error::other(error),
            }),
            Some(_) => Err(io::Error::new(io::ErrorKind::InvalidData, "the broker has sent no answer")),
            None => Err(ended(io::ErrorKind::BrokenPipe.into())),
        }
    }
}

/// The broker has died.
fn ended(error: io::Error) -> io::Error {
    match error.kind() {
        io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => {
            io::Error::new(error.kind(), BROKER.has_ended())
        }
        _ => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    use std::io::{Read, Write};
    use std::net::TcpListener;
    use std::os::unix::net::UnixStream;
    use targets::Targets;

    /// A broker in a thread.
    fn broker(targets: Vec<Target>, reader: Option<OwnedFd>) -> Broker {
        let (near, far) = fds::pair().unwrap();
        let allowed = Targets::new(targets, reader);
        std::thread::spawn(move || process::serve(&far, allowed));
        Broker { socket: near }
    }

    #[test]
    fn only_named_targets_are_connected_to() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let target = |port| Target::Tcp { host: "127.0.0.1".into(), port };
        let broker = broker(vec![target(port)], None);
        let stream = broker.connect(&target(port), Duration::from_secs(20)).unwrap();
        let (mut far, _) = listener.accept().unwrap();
        far.write_all(b"x").unwrap();
        assert_eq!(std::fs::File::from(stream).read(&mut [0; 8]).unwrap(), 1);
        let error = broker.connect(&target(port ^ 1), Duration::from_secs(20)).unwrap_err();
        assert!(error.to_string().contains("is not configured"), "{error}");
        drop(listener);
        let error = broker.connect(&target(port), Duration::from_secs(20)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
    }

    #[test]
    fn the_reader_of_the_file_names_more_targets() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("server.sock");
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (reader, far) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        let broker = broker(Vec::new(), Some(far));
        let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        let target = Target::Unix(socket);
        let error = broker.connect(&target, Duration::from_secs(20)).unwrap_err();
        assert!(error.to_string().contains("restart the daemon"), "{error}");
        rustix::io::ioctl_fionbio(&reader, false).unwrap();
        // More than the socket has room for: the broker takes them unasked.
        for port in 0..=2000 {
            let target = Target::Tcp { host: "store".into(), port };
            send(&reader, &Message::Allow(target.clone()), None).unwrap();
        }
        send(&reader, &Message::Allow(target.clone()), None).unwrap();
        let stream = broker.connect(&target, Duration::from_secs(20)).unwrap();
        assert!(UnixStream::from(stream).peer_addr().is_ok());
        drop(reader);
        broker.connect(&target, Duration::from_secs(20)).unwrap();
    }

    #[test]
    fn a_broker_that_has_ended_is_named() {
        let (near, far) = fds::pair().unwrap();
        drop(far);
        let target = Target::Unix("/x".into());
        let error = Broker { socket: near }.connect(&target, Duration::from_secs(20)).unwrap_err();
        assert!(error.to_string().contains("restart the daemon"), "{error}");
    }
}
