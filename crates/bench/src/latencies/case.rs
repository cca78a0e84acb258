//! The cases: a kind of request, a batch, and how the thread finds it.
use std::fmt;

/// What a queue serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Work {
    /// Disk: reads of 4 KiB from an image in memory.
    Disk,
    /// Network card: frames from the guest.
    FramesOut,
    /// Network card: frames to the guest.
    FramesIn,
}

/// How the thread finds a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pace {
    /// The queue never runs dry: the next batch is available when one is done.
    Busy,
    /// Polling finds each batch; the queue runs dry after it.
    Polled,
}

/// One case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Case {
    pub(super) work: Work,
    /// Requests that are available together.
    pub(super) batch: u16,
    pub(super) pace: Pace,
}

impl Case {
    /// Every combination.
    pub(super) fn all() -> Vec<Self> {
        let mut cases = Vec::new();
        for work in [Work::Disk, Work::FramesOut, Work::FramesIn] {
            for batch in [1, 8, 32] {
                cases.extend([Pace::Busy, Pace::Polled].map(|pace| Self { work, batch, pace }));
            }
        }
        cases
    }

    /// The case with this path.
    pub(super) fn parse(path: &str) -> Option<Self> {
        Self::all().into_iter().find(|case| case.to_string() == path)
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let work = match self.work {
            Work::Disk => "disk",
            Work::FramesOut => "frames-out",
            Work::FramesIn => "frames-in",
        };
        let pace = match self.pace {
            Pace::Busy => "busy",
            Pace::Polled => "polled",
        };
        write!(f, "{work}/{pace}/batch{}", self.batch)
    }
}
