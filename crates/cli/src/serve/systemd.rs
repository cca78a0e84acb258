//! Notifies systemd (sd_notify(3)) and takes sockets from it (sd_listen_fds(3)).
//!
//! The notification socket is opened at startup, as the sandbox denies it later.
use anyhow::Context;
use sd_notify::NotifyState;
use std::collections::HashMap;
use std::io;
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram, UnixListener};
use std::time::Duration;

/// The connection to the service manager, if there is one.
#[derive(Debug)]
pub(crate) struct Manager {
    socket: Option<UnixDatagram>,
}

impl Manager {
    /// Connects to the socket named by NOTIFY_SOCKET.
    ///
    /// # Errors
    /// NOTIFY_SOCKET is set and cannot be connected to.
    pub(crate) fn from_environment() -> Result<Self, anyhow::Error> {
        let Some(name) = std::env::var_os("NOTIFY_SOCKET").filter(|name| !name.is_empty()) else {
            return Ok(Self { socket: None });
        };
        let open = || {
            let address = match name.as_bytes().strip_prefix(b"@") {
                Some(name) => SocketAddr::from_abstract_name(name)?,
                None => SocketAddr::from_pathname(&name)?,
            };
            let socket = UnixDatagram::unbound()?;
            socket.connect_addr(&address)?;
            // A manager that does not read must not block the daemon.
            socket.set_nonblocking(true)?;
            Ok::<_, io::Error>(socket)
        };
        let socket = open().with_context(|| format!("NOTIFY_SOCKET {name:?}"))?;
        Ok(Self { socket: Some(socket) })
    }

    /// Sends the state of the service. Failure is logged only.
    pub(crate) fn tell(&self, states: &[NotifyState<'_>]) {
        let Some(socket) = &self.socket else { return };
        let message: String = states.iter().map(|state| format!("{state}\n")).collect();
        if let Err(error) = socket.send(message.as_bytes()) {
            tracing::warn!(%error, "cannot notify the service manager");
        }
    }

    /// Announces the stop and extends its timeout to `time`.
    pub(crate) fn stopping(&self, time: Duration) {
        // Some more, so that the daemon's own deadline comes first.
        let time = (time + Duration::from_secs(5)).as_micros();
        let time = NotifyState::ExtendTimeoutUsec(u32::try_from(time).unwrap_or(u32::MAX));
        self.tell(&[NotifyState::Stopping, time]);
    }

    /// Announces a reload, which [`NotifyState::Ready`] ends.
    pub(crate) fn reloading(&self) {
        match NotifyState::monotonic_usec_now() {
            Ok(now) => self.tell(&[NotifyState::Reloading, now]),
            Err(error) => tracing::warn!(%error, "cannot read the clock for the service manager"),
        }
    }
}

/// Listening sockets passed by systemd, by name.
///
/// Devices clone them, so a reload can use them again.
pub(crate) type Sockets = HashMap<String, UnixListener>;

/// Takes the listening sockets that systemd passed.
///
/// # Errors
/// The environment is invalid, or two sockets have the same name.
pub(crate) fn sockets() -> Result<Sockets, anyhow::Error> {
    let mut sockets = HashMap::new();
    for (number, name) in sd_notify::listen_fds_with_names().context("LISTEN_FDS")? {
        // SAFETY: LISTEN_PID says that descriptor `number` was passed to this process, so it is
        // open, and no other code owns it: this function is called once, at startup.
        let fd = unsafe { OwnedFd::from_raw_fd(number) };
        let listener = UnixListener::from(fd);
        listener.local_addr().with_context(|| format!("LISTEN_FDS: {name:?} is not a Unix socket"))?;
        if sockets.insert(name.clone(), listener).is_some() {
            anyhow::bail!("LISTEN_FDS: two sockets are named {name:?}: change FileDescriptorName= of one");
        }
    }
    Ok(sockets)
}
