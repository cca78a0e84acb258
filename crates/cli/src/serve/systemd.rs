//! Notifies systemd (sd_notify(3)).
//!
//! The notification socket is opened at startup, as the sandbox denies it later.
use super::store;
use anyhow::Context;
use sd_notify::NotifyState;
use std::cell::{Cell, RefCell};
use std::ffi::OsString;
use std::io;
use std::os::unix::net::UnixDatagram;
use std::time::Duration;

/// NOTIFY_SOCKET, if it is set.
pub(crate) fn notify_socket() -> Option<OsString> {
    std::env::var_os("NOTIFY_SOCKET").filter(|name| !name.is_empty())
}

/// The connection to the service manager, if there is one.
#[derive(Debug)]
pub(crate) struct Manager {
    socket: Option<UnixDatagram>,
    /// The manager shows a status of the start.
    has_status: Cell<bool>,
    /// The status that the manager shows since.
    shown: RefCell<String>,
}

impl Manager {
    /// Connects to the socket named by NOTIFY_SOCKET.
    ///
    /// # Errors
    /// NOTIFY_SOCKET is set and cannot be connected to.
    pub(crate) fn from_environment() -> Result<Self, anyhow::Error> {
        let open = |name: OsString| {
            let open = || {
                let socket = store::connect(&name)?;
                // A manager that does not read must not block the daemon.
                socket.set_nonblocking(true)?;
                Ok::<_, io::Error>(socket)
            };
            open().with_context(|| format!("NOTIFY_SOCKET {name:?}"))
        };
        let socket = notify_socket().map(open).transpose()?;
        Ok(Self { socket, has_status: Cell::new(false), shown: RefCell::default() })
    }

    /// Sends the state of the service. Failure is logged only.
    pub(crate) fn tell(&self, states: &[NotifyState<'_>]) {
        let Some(socket) = &self.socket else { return };
        let message: String = states.iter().map(|state| format!("{state}\n")).collect();
        if let Err(error) = socket.send(message.as_bytes()) {
            tracing::warn!(%error, "cannot notify the service manager");
        }
    }

    /// Extends the timeout of the start to `time` from now.
    pub(crate) fn starting(&self, time: Duration) {
        let status =
            NotifyState::Status("waiting for the lock of an image: a dead process has requests in flight");
        let time = NotifyState::ExtendTimeoutUsec(u32::try_from(time.as_micros()).unwrap_or(u32::MAX));
        self.has_status.set(true);
        self.tell(&[status, time]);
    }

    /// Announces that the start is complete.
    pub(crate) fn ready(&self) {
        match self.has_status.take() {
            true => self.tell(&[NotifyState::Ready, NotifyState::Status("")]),
            false => self.tell(&[NotifyState::Ready]),
        }
    }

    /// Shows a status, one line; empty: none. The same one is sent once.
    pub(crate) fn status(&self, text: String) {
        if *self.shown.borrow() != text {
            self.tell(&[NotifyState::Status(&text)]);
            self.shown.replace(text);
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
