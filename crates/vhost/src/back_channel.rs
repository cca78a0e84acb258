//! The socket for requests of ours. Nothing waits for its answers, and a client that does not read loses it.
use crate::message::message;
use crate::socket::{SocketError, send};
use paravane_spec::vhost_user::{back_end_request, flags};
use std::os::fd::{AsFd, OwnedFd};

/// Our end.
#[derive(Debug)]
pub(crate) struct BackChannel {
    socket: Option<OwnedFd>,
}

impl BackChannel {
    pub(crate) fn new(socket: OwnedFd) -> Self {
        Self { socket: Some(socket) }
    }

    /// The configuration space has changed.
    pub(crate) fn config_changed(&mut self) {
        self.send(&message(back_end_request::CONFIG_CHANGE_MSG, flags::VERSION, &[]));
    }

    fn send(&mut self, bytes: &[u8]) {
        let Some(socket) = &self.socket else { return };
        let sent: Result<(), SocketError> = send(socket.as_fd(), bytes, None);
        if let Err(error) = sent {
            tracing::warn!("the client's socket for our requests is given up: {error}");
            self.socket = None;
        }
    }
}
