//! Where the ring is handed the memory that dma vouches for: the only place that sees both.
use paravane_dma::{DmaError, Handle, Mapping};
use paravane_ring::device::{Batch, Queue};
use paravane_ring::{ConfigError, QueueAddresses};
use thiserror::Error;

/// Why a queue could not be started.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum StartError {
    /// {0}
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// the {part}: {source}
    #[error("the {part}: {source}")]
    Memory {
        /// Which area.
        part: &'static str,
        /// What is wrong with its memory.
        source: DmaError,
    },
}

/// A live queue with its door to guest memory and its batch storage.
#[derive(Debug)]
pub struct LiveQueue {
    /// The ring.
    pub ring: Queue,
    /// The door to guest memory.
    pub memory: Handle,
    /// Storage for popped chains.
    pub batch: Batch,
    _areas: [Mapping; 3],
}

impl LiveQueue {
    /// Checks what the driver asked for, maps the three areas, and takes the queue into use.
    ///
    /// # Errors
    /// The configuration is invalid or its memory is not there.
    pub fn start(
        addresses: QueueAddresses,
        max_size: u16,
        features: u64,
        memory: Handle,
    ) -> Result<Self, StartError> {
        let _ = (addresses, max_size, features, memory);
        todo!()
    }
}
