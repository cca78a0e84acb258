//! What systemd is told (sd_notify(3)), and the sockets that it passes (sd_listen_fds(3)).
//!
//! The socket to it is kept from the beginning: the sandbox lets none be made later.
use anyhow::Context;
use sd_notify::NotifyState;
use std::collections::HashMap;
use std::io;
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram, UnixListener};
use std::time::Duration;

/// The way to the service manager, if there is one.
#[derive(Debug)]
pub(crate) struct Manager {
    socket: Option<UnixDatagram>,
}

impl Manager {
    /// Opens the socket that NOTIFY_SOCKET names.
    ///
    /// # Errors
    /// There is a name, and no socket.
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
            // A manager that does not read must not keep the daemon from its signals.
            socket.set_nonblocking(true)?;
            Ok::<_, io::Error>(socket)
        };
        let socket = open().with_context(|| format!("NOTIFY_SOCKET {name:?}"))?;
        Ok(Self { socket: Some(socket) })
    }

    /// Says how the service is. A manager that does not listen is no reason to stop.
    pub(crate) fn tell(&self, states: &[NotifyState<'_>]) {
        let Some(socket) = &self.socket else { return };
        let message: String = states.iter().map(|state| format!("{state}\n")).collect();
        if let Err(error) = socket.send(message.as_bytes()) {
            tracing::warn!(%error, "the service manager does not listen");
        }
    }

    /// The service ends, and may take so long for that; what the unit file allows is no less.
    pub(crate) fn stopping(&self, time: Duration) {
        // Somewhat more: the deadline is the daemon's own.
        let time = (time + Duration::from_secs(5)).as_micros();
        let time = NotifyState::ExtendTimeoutUsec(u32::try_from(time).unwrap_or(u32::MAX));
        self.tell(&[NotifyState::Stopping, time]);
    }

    /// The configuration is read again from now on until [`NotifyState::Ready`].
    pub(crate) fn reloading(&self) {
        match NotifyState::monotonic_usec_now() {
            Ok(now) => self.tell(&[NotifyState::Reloading, now]),
            Err(error) => tracing::warn!(%error, "no clock"),
        }
    }
}

/// The listening sockets that this process was started with, by their names.
///
/// # Errors
/// What the environment says of them is nonsense, or two have the same name.
pub(crate) fn sockets() -> Result<HashMap<String, UnixListener>, anyhow::Error> {
    let mut sockets = HashMap::new();
    for (number, name) in sd_notify::listen_fds_with_names().context("LISTEN_FDS")? {
        // SAFETY: LISTEN_PID says that descriptor `number` was passed to this process for it to use, and nobody has touched
        // it yet: this is called once, at the beginning.
        let fd = unsafe { OwnedFd::from_raw_fd(number) };
        let listener = UnixListener::from(fd);
        listener
            .local_addr()
            .with_context(|| format!("LISTEN_FDS: {name:?} is no socket in the file system"))?;
        if sockets.insert(name.clone(), listener).is_some() {
            anyhow::bail!("LISTEN_FDS: two sockets have the name {name:?} (FileDescriptorName=)");
        }
    }
    Ok(sockets)
}
