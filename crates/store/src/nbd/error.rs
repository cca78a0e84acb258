//! Why an export cannot be used.
use std::io;
use thiserror::Error;

/// An NBD server cannot be used.
///
/// Its text has that of the cause.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum NbdError {
    /// No connection.
    #[error("cannot connect: {}", super::proto::plain(.0))]
    Connect(io::Error),
    /// The connection fails during the negotiation.
    #[error("{during}: {}", super::proto::plain(.error))]
    Io {
        /// What the client did.
        during: &'static str,
        /// As the host reports it.
        error: io::Error,
    },
    /// A wrong first word.
    #[error("no NBD server, or one older than 2011: it begins with {0:#x}")]
    NoServer(u64),
    /// An old server.
    #[error("the server speaks oldstyle NBD only, which names no exports")]
    Oldstyle,
    /// Unknown export.
    #[error("the server has no export of this name{}", detail(.0))]
    NoExport(String),
    /// A server that encrypts only.
    #[error("the server wants TLS: use nbds:// instead of nbd://")]
    NeedsTls,
    /// The server refuses an option.
    #[error("the server refuses {what} with {}{}", refusal(*.code), detail(.text))]
    Refused {
        /// What the client asked for.
        what: &'static str,
        /// Type of the reply.
        code: u32,
        /// Text of the server; may be empty.
        text: String,
    },
    /// The negotiation is malformed.
    #[error("the server breaks the protocol: {0}")]
    Protocol(String),
    /// No encrypted connection, or a wrong file.
    #[error("TLS: {0}")]
    Tls(String),
    /// Missing feature of this build.
    #[error("this build has no TLS: build it with the feature tls")]
    NoTls,
    /// An export that cannot be written to.
    #[error("the export is read-only: open it read-only")]
    ReadOnly,
    /// Blocks that guests do not know.
    #[error("the export has blocks of {0} bytes; at most 4096 can be used")]
    Block(u32),
    /// A system call of this host.
    #[error("the host refuses a resource: {}", super::proto::plain(.0))]
    Host(io::Error),
}

impl From<NbdError> for io::Error {
    fn from(error: NbdError) -> Self {
        let kind = match &error {
            NbdError::Connect(error) | NbdError::Io { error, .. } | NbdError::Host(error) => error.kind(),
            NbdError::NoExport(_) => io::ErrorKind::NotFound,
            NbdError::ReadOnly => io::ErrorKind::ReadOnlyFilesystem,
            _ => io::ErrorKind::Other,
        };
        Self::new(kind, error)
    }
}

fn detail(text: &str) -> String {
    if text.is_empty() { String::new() } else { format!(": {text}") }
}

/// Name of a reply that refuses.
fn refusal(code: u32) -> String {
    match code & !super::proto::REP_ERROR {
        1 => "unsupported".into(),
        2 => "forbidden by policy".into(),
        3 => "invalid".into(),
        4 => "unsupported on its platform".into(),
        5 => "TLS required".into(),
        6 => "unknown export".into(),
        7 => "shutting down".into(),
        8 => "block size required".into(),
        9 => "too big".into(),
        10 => "extended headers required".into(),
        other => format!("error {other}"),
    }
}
