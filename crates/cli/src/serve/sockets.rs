//! Sockets from the parent process: systemd (sd_listen_fds(3)), or by `--fd`.
use super::shelf;
use super::store::Held;
use anyhow::{Context, anyhow, bail};
use parking_lot::Mutex;
use rustix::io::{FdFlags, fcntl_setfd};
use rustix::net::sockopt::{socket_acceptconn, socket_domain, socket_type};
use rustix::net::{AddressFamily, SocketType, getpeername};
use std::collections::HashMap;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::{UnixListener, UnixStream};

/// Sockets by name or number.
#[derive(Debug, Default)]
pub(crate) struct Sockets {
    /// Devices clone them, so a reload can use them again.
    activated: HashMap<String, UnixListener>,
    /// The socket of `--fd`, until its device starts.
    inherited: Mutex<Option<Inherited>>,
}

/// The socket of `--fd`.
#[derive(Debug)]
pub(crate) enum Inherited {
    /// VMMs connect to it.
    Listener(UnixListener),
    /// The VMM is at the other end.
    Connection(UnixStream),
}

impl Sockets {
    /// Takes the listening sockets that systemd passed, and the socket of `--fd`.
    ///
    /// Also returns the descriptors that systemd has kept for an earlier daemon.
    ///
    /// Call it once, before the process opens sockets.
    ///
    /// # Errors
    /// The environment is invalid, two sockets have the same name, or `fd` is no such socket.
    pub(crate) fn take(fd: Option<RawFd>) -> Result<(Self, Vec<Held>), anyhow::Error> {
        let (mut activated, mut stored) = (HashMap::new(), Vec::new());
        for (number, name) in sd_notify::listen_fds_with_names().context("LISTEN_FDS")? {
            if fd == Some(number) {
                bail!("--fd: descriptor {number} is one of LISTEN_FDS: use --socket-activation");
            }
            // SAFETY: LISTEN_PID says that descriptor `number` was passed to this process, so it is
            // open, and no other code owns it: this function is called once, at startup.
            let fd = unsafe { OwnedFd::from_raw_fd(number) };
            if shelf::is_stored(&name) {
                let name = name.parse().with_context(|| format!("LISTEN_FDS: {name:?}"))?;
                stored.push(Held { name, fd });
                continue;
            }
            let listener = UnixListener::from(fd);
            listener.local_addr().with_context(|| format!("LISTEN_FDS: {name:?} is not a Unix socket"))?;
            if activated.insert(name.clone(), listener).is_some() {
                bail!("LISTEN_FDS: two sockets are named {name:?}: change FileDescriptorName= of one");
            }
        }
        let inherited = fd.map(inherit).transpose()?;
        Ok((Self { activated, inherited: Mutex::new(inherited) }, stored))
    }

    /// The socket of systemd with this name.
    pub(crate) fn activated(&self, name: &str) -> Option<&UnixListener> {
        self.activated.get(name)
    }

    /// The socket of `--fd`, once.
    pub(crate) fn inherited(&self) -> Option<Inherited> {
        self.inherited.lock().take()
    }
}

/// Takes ownership of a descriptor.
///
/// It must be a listening or connected Unix stream socket.
fn inherit(number: RawFd) -> Result<Inherited, anyhow::Error> {
    // SAFETY: F_GETFD takes any number and changes nothing.
    if unsafe { libc::fcntl(number, libc::F_GETFD) } < 0 {
        bail!("--fd: descriptor {number} is not open: the parent process must pass it");
    }
    // SAFETY: the descriptor is open, as F_GETFD has shown, and this thread closes none meanwhile.
    let fd = unsafe { BorrowedFd::borrow_raw(number) };
    let is_unix = socket_domain(fd).is_ok_and(|domain| domain == AddressFamily::UNIX);
    if !is_unix || !socket_type(fd).is_ok_and(|kind| kind == SocketType::STREAM) {
        bail!("--fd: descriptor {number} is not a Unix stream socket");
    }
    let listens = socket_acceptconn(fd).map_err(|error| anyhow!("--fd: descriptor {number}: {error}"))?;
    if !listens && getpeername(fd).is_err() {
        bail!("--fd: descriptor {number} neither listens nor is connected");
    }
    // Programs that the daemon starts must not keep the connection open.
    fcntl_setfd(fd, FdFlags::CLOEXEC).map_err(|error| anyhow!("--fd: descriptor {number}: {error}"))?;
    // SAFETY: the descriptor is an open stream socket, and this process has made none yet: the
    // parent passed it, and the command line gives it to this call.
    let fd = unsafe { OwnedFd::from_raw_fd(fd.as_raw_fd()) };
    Ok(if listens { Inherited::Listener(fd.into()) } else { Inherited::Connection(fd.into()) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::{AsFd, IntoRawFd};

    /// Passes a descriptor on, which stays open if it is refused.
    fn refused(fd: impl AsFd) -> String {
        let number = fd.as_fd().try_clone_to_owned().unwrap().into_raw_fd();
        let error = inherit(number).unwrap_err().to_string();
        // SAFETY: `inherit` left the descriptor alone.
        drop(unsafe { OwnedFd::from_raw_fd(number) });
        error
    }

    #[test]
    fn listening_and_connected_sockets_are_told_apart() {
        let folder = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(folder.path().join("s")).unwrap();
        let (near, _far) = UnixStream::pair().unwrap();
        assert!(matches!(inherit(listener.into_raw_fd()).unwrap(), Inherited::Listener(_)));
        assert!(matches!(inherit(near.into_raw_fd()).unwrap(), Inherited::Connection(_)));
    }

    #[test]
    fn other_descriptors_are_refused_and_stay_open() {
        assert!(inherit(i32::MAX).unwrap_err().to_string().contains("is not open"));
        assert!(refused(std::io::stderr()).contains("not a Unix stream socket"));
        let (datagrams, _) = std::os::unix::net::UnixDatagram::pair().unwrap();
        assert!(refused(datagrams).contains("not a Unix stream socket"));
        let idle = rustix::net::socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
        assert!(refused(idle).contains("neither listens nor is connected"));
    }
}
