//! Why a run did not take place or could not go on.
use crate::linux::LoadError;
use paravane_device::blk::OpenError;
use paravane_device::net::TapError;
use paravane_dma::{DomainError, LogError, MemoryError};
use paravane_notify::NotifyError;
use thiserror::Error;

/// Why a run did not take place or could not go on.
#[derive(Debug, Error)]
pub enum RunError {
    /// {0}
    #[error(transparent)]
    Disk(#[from] OpenError),
    /// KVM was asked for and is not usable: {0}
    #[error("KVM was asked for and is not usable: {0}")]
    NoKvm(String),
    /// {0}
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// {0}
    #[error(transparent)]
    Log(#[from] LogError),
    /// {0}
    #[error(transparent)]
    Domain(#[from] DomainError),
    /// {0}
    #[error(transparent)]
    Load(#[from] LoadError),
    /// {0}
    #[error(transparent)]
    Tap(#[from] TapError),
    /// {0}
    #[error("{0}")]
    Config(String),
    /// {0}
    #[error(transparent)]
    Notify(#[from] NotifyError),
    /// cannot {what}: {source}
    #[error("cannot {what}: {source}")]
    Os {
        /// What was tried.
        what: &'static str,
        /// Why not.
        source: std::io::Error,
    },
}

impl RunError {
    /// The exit status that the program ends with: 2 when the request was at fault and nothing was touched, else 1.
    #[must_use]
    pub fn exit_status(&self) -> u8 {
        match self {
            Self::Disk(_)
            | Self::NoKvm(_)
            | Self::Config(_)
            | Self::Load(_)
            | Self::Memory(_)
            | Self::Tap(_) => 2,
            Self::Notify(_) | Self::Log(_) | Self::Domain(_) | Self::Os { .. } => 1,
        }
    }
}
