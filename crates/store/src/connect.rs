//! How a store gets its connections.
use std::fmt::{self, Debug};
use std::io;
use std::net::{TcpStream, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Where a server listens.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Target {
    /// A host by name or address, and a TCP port.
    Tcp {
        /// Name or address; an IPv6 address has no brackets.
        host: String,
        /// Port.
        port: u16,
    },
    /// Path of a Unix socket.
    Unix(PathBuf),
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp { host, port } if host.contains(':') => write!(f, "[{host}]:{port}"),
            Self::Tcp { host, port } => write!(f, "{host}:{port}"),
            Self::Unix(path) => fmt::Display::fmt(&path.display(), f),
        }
    }
}

/// Makes connections.
///
/// A process in a sandbox has a connector that asks another process.
pub trait Connector: Debug + Send + Sync {
    /// Connects, and waits up to `timeout`. The stream blocks.
    ///
    /// # Errors
    /// The name is unknown, or the server does not accept the connection in time.
    fn connect(&self, target: &Target, timeout: Duration) -> io::Result<OwnedFd>;
}

/// Connects from this process.
#[derive(Clone, Copy, Debug, Default)]
pub struct Direct;

impl Connector for Direct {
    fn connect(&self, target: &Target, timeout: Duration) -> io::Result<OwnedFd> {
        match target {
            // A full backlog blocks here; a server on this host has none for long.
            Target::Unix(path) => Ok(UnixStream::connect(path)?.into()),
            Target::Tcp { host, port } => {
                let end = Instant::now() + timeout;
                let mut failed = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
                for address in (host.as_str(), *port).to_socket_addrs()? {
                    let left = end.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
                    match TcpStream::connect_timeout(&address, left) {
                        Ok(stream) => {
                            stream.set_nodelay(true)?;
                            return Ok(stream.into());
                        }
                        Err(error) => failed = error,
                    }
                }
                Err(failed)
            }
        }
    }
}
