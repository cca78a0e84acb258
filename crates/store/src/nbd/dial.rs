//! Makes connections that are ready for requests.
use super::error::NbdError;
use super::export::Export;
use super::handshake::{Purpose, choose, greet};
use super::options::NbdOptions;
use super::socket::Timed;
use super::wire::Wire;
use crate::{Connector, NamedFiles, NbdLocation};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::net::sockopt;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Idle time until the kernel asks whether the peer is there, and between questions.
const KEEP_ALIVE: Duration = Duration::from_secs(10);

/// Time for one more connection to a server that answers.
const ANOTHER: Duration = Duration::from_secs(2);

/// How to get a connection.
#[derive(Debug)]
pub(super) struct Dialer {
    pub(super) location: NbdLocation,
    connector: Arc<dyn Connector>,
    connect_timeout: Duration,
    silence: Duration,
    #[cfg(feature = "tls")]
    tls: Option<super::tls::TlsClient>,
}

impl Dialer {
    /// Reads the files of TLS, if the location has it and they were not read.
    pub(super) fn new(
        location: NbdLocation,
        options: &NbdOptions,
        connector: Arc<dyn Connector>,
        named: &NamedFiles,
    ) -> Result<Self, NbdError> {
        #[cfg(not(feature = "tls"))]
        let _ = named;
        #[cfg(feature = "tls")]
        let tls = location
            .tls
            .as_ref()
            .map(|files| super::tls::TlsClient::new(files, &location.target, named))
            .transpose()?;
        #[cfg(not(feature = "tls"))]
        if location.tls.is_some() {
            return Err(NbdError::NoTls);
        }
        Ok(Self {
            location,
            connector,
            connect_timeout: options.connect_timeout,
            silence: options.silence,
            #[cfg(feature = "tls")]
            tls,
        })
    }

    /// Connects and negotiates.
    pub(super) fn dial(&self, purpose: Purpose) -> Result<(Wire, Export), NbdError> {
        self.dial_within(self.connect_timeout, purpose)
    }

    /// Connects once more to a server that has just answered, but may serve no more clients.
    pub(super) fn dial_another(&self) -> Result<(Wire, Export), NbdError> {
        self.dial_within(self.connect_timeout.min(ANOTHER), Purpose::Transmit)
    }

    /// As [`Dialer::dial`], with another time limit.
    pub(super) fn dial_within(
        &self,
        timeout: Duration,
        purpose: Purpose,
    ) -> Result<(Wire, Export), NbdError> {
        let end = Instant::now() + timeout;
        let socket = self.connector.connect(&self.location.target, timeout).map_err(NbdError::Connect)?;
        self.prepare(&socket).map_err(NbdError::Host)?;
        let mut stream = Timed { socket: socket.as_fd(), end };
        let greeting = greet(&mut stream)?;
        let name = &self.location.export;
        #[cfg(feature = "tls")]
        if let Some(tls) = &self.tls {
            let mut encrypted = tls.start(socket, end)?;
            let export = encrypted.negotiate(end, |stream| choose(stream, greeting, name, purpose))?;
            export.check()?;
            return Ok((Wire::Tls(Box::new(encrypted)), export));
        }
        let export = choose(&mut stream, greeting, name, purpose)?;
        export.check()?;
        Ok((Wire::Plain(socket), export))
    }

    /// Sets what a socket needs.
    fn prepare(&self, socket: &OwnedFd) -> io::Result<()> {
        fcntl_setfl(socket, fcntl_getfl(socket)? | OFlags::NONBLOCK)?;
        if sockopt::socket_domain(socket)? == rustix::net::AddressFamily::UNIX {
            return Ok(());
        }
        // A peer that is gone without a word is noticed, also while nothing is sent.
        sockopt::set_tcp_nodelay(socket, true)?;
        sockopt::set_socket_keepalive(socket, true)?;
        sockopt::set_tcp_keepidle(socket, KEEP_ALIVE)?;
        sockopt::set_tcp_keepintvl(socket, KEEP_ALIVE / 2)?;
        let count = self.silence.as_secs().saturating_sub(KEEP_ALIVE.as_secs()) / (KEEP_ALIVE.as_secs() / 2);
        sockopt::set_tcp_keepcnt(socket, u32::try_from(count.clamp(1, 100)).unwrap_or(1))?;
        let silence = u32::try_from(self.silence.as_millis()).unwrap_or(u32::MAX);
        sockopt::set_tcp_user_timeout(socket, silence)?;
        Ok(())
    }
}
