//! Errors of a run.
use crate::arch::LoadError;
use paravane_dma::{DomainError, LogError, MemoryError};
use paravane_notify::NotifyError;
use thiserror::Error;

/// Error of a run that did not take place or could not go on.
#[derive(Debug, Error)]
pub enum RunError {
    /// KVM was requested.
    #[error("KVM is not usable: {0}")]
    NoKvm(String),
    /// The host refuses guest memory.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The dirty log cannot be started or stopped.
    #[error(transparent)]
    Log(#[from] LogError),
    /// A domain refuses a mapping.
    #[error(transparent)]
    Domain(#[from] DomainError),
    /// The kernel cannot be loaded.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The configuration is invalid, or impossible on this host.
    #[error("{0}")]
    Config(String),
    /// The host refuses an eventfd or an interrupt.
    #[error(transparent)]
    Notify(#[from] NotifyError),
    /// The host refuses something else.
    #[error("cannot {what}: {source}")]
    Os {
        /// The action.
        what: &'static str,
        /// The reason.
        source: std::io::Error,
    },
}

impl RunError {
    /// Exit status: 2 if the request is invalid and nothing was touched, else 1.
    #[must_use]
    pub fn exit_status(&self) -> u8 {
        match self {
            Self::NoKvm(_) | Self::Config(_) | Self::Load(_) | Self::Memory(_) => 2,
            Self::Notify(_) | Self::Log(_) | Self::Domain(_) | Self::Os { .. } => 1,
        }
    }
}
