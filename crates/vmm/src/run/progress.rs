//! What a run shows while it goes on.
use paravane_spec::builtin::state;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// What a run shows while it goes on, and how it is asked to stop. Shared with the caller's thread.
#[derive(Debug, Default)]
pub struct Progress {
    /// Set by the caller: end the run cleanly, with the report so far.
    pub cancel: AtomicBool,
    /// Bytes that all jobs will move.
    pub bytes_total: AtomicU64,
    /// Bytes moved.
    pub bytes_done: AtomicU64,
    /// Phase of the slowest disk: one of [`paravane_spec::builtin::state`].
    pub phase: AtomicU64,
}

impl Progress {
    /// What the slowest disk is at.
    #[must_use]
    pub fn phase(&self) -> Phase {
        // Relaxed: a figure for the eye.
        Phase::of_state(self.phase.load(Ordering::Relaxed))
    }
}

/// What the disk that is furthest behind is at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// The guest has not reached its disks yet.
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

    /// The phase of a guest's `DiskReport::state`, whatever the guest wrote there.
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

    /// One word or two.
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
