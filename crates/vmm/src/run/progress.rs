//! Progress of a run.
use paravane_spec::builtin::state;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Progress of a run, and the request to stop it. Shared with the caller's thread.
#[derive(Debug, Default)]
pub struct Progress {
    /// Set by the caller to end the run, with a report so far.
    pub cancel: AtomicBool,
    /// Bytes that all jobs move.
    pub bytes_total: AtomicU64,
    /// Bytes moved.
    pub bytes_done: AtomicU64,
    /// State of the slowest disk, of [`paravane_spec::builtin::state`].
    pub phase: AtomicU64,
}

impl Progress {
    /// Phase of the slowest disk.
    #[must_use]
    pub fn phase(&self) -> Phase {
        // Relaxed: a figure for the eye.
        Phase::of_state(self.phase.load(Ordering::Relaxed))
    }
}

/// Phase of the slowest disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// The guest has not begun with its disks.
    Starting,
    /// Writing the pattern everywhere.
    Filling,
    /// Random reads and writes.
    Mixing,
    /// Flushing the write cache.
    Flushing,
    /// Reading everything back.
    ReadingBack,
    /// Reading the whole image and hashing it.
    Hashing,
    /// The guest has ended; the host verifies.
    Verifying,
}

impl Phase {
    /// All phases.
    pub const ALL: [Self; 7] = [
        Self::Starting,
        Self::Filling,
        Self::Mixing,
        Self::Flushing,
        Self::ReadingBack,
        Self::Hashing,
        Self::Verifying,
    ];

    /// Phase for a guest's `DiskReport::state`, which may be any number.
    #[must_use]
    pub fn of_state(value: u64) -> Self {
        match u32::try_from(value).unwrap_or(state::DONE) {
            state::IDLE => Self::Starting,
            state::FILL => Self::Filling,
            state::MIX => Self::Mixing,
            state::FLUSH => Self::Flushing,
            state::READ_BACK => Self::ReadingBack,
            state::HASH => Self::Hashing,
            _ => Self::Verifying,
        }
    }

    /// Name, one word or two.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Filling => "filling",
            Self::Mixing => "mixing",
            Self::Flushing => "flushing",
            Self::ReadingBack => "reading back",
            Self::Hashing => "hashing",
            Self::Verifying => "verifying",
        }
    }
}
