//! Errors of the sandbox.
use std::io;
use std::path::PathBuf;
use thiserror::Error;

/// The sandbox cannot be set up.
#[derive(Debug, Error)]
pub(crate) enum SandboxError {
    /// A path for a Landlock rule cannot be opened.
    #[error("{}: {source}", path.display())]
    Path {
        /// The path.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The kernel lacks Landlock, or it is disabled.
    #[error(
        "the sandbox needs Landlock (Linux 5.13, and `landlock` in lsm=): enable it, or use --no-sandbox"
    )]
    NoLandlock,
    /// The kernel refuses the Landlock rules.
    #[error("cannot set up Landlock: {0}")]
    Landlock(String),
    /// The kernel refuses the seccomp filter.
    #[error("cannot install the seccomp filter: {0}")]
    Seccomp(String),
    /// The kernel refuses to drop capabilities.
    #[error("cannot drop capabilities: {0}")]
    Capabilities(io::Error),
    /// No such user.
    #[error("--user: unknown user {0}")]
    NoUser(String),
    /// The change of user failed.
    #[error("--user: cannot become user {name}: {source}")]
    User {
        /// The user.
        name: String,
        /// The cause.
        source: io::Error,
    },
}

impl SandboxError {
    /// What the seccomp filter's compiler, or the kernel, says.
    pub(super) fn seccomp(error: impl std::fmt::Display) -> Self {
        Self::Seccomp(error.to_string())
    }
}
