//! What the daemon says of its devices: the JSON of the control socket and of `paravane status --json`.
//!
//! Names stay as they are once released; more may come.
use serde::{Deserialize, Serialize};

/// One daemon.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Report {
    pub(crate) version: String,
    pub(crate) pid: u32,
    /// Seconds since the daemon was ready.
    pub(crate) uptime_s: f64,
    /// The last time that the file was read again: what came of it. Empty if it never was.
    pub(crate) last_reload: String,
    pub(crate) devices: Vec<Device>,
    /// Devices of the file that could not be started when it was read again.
    pub(crate) failed: Vec<Failed>,
}

/// One device that is served. All counts are since it was started.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Device {
    pub(crate) name: String,
    /// "blk", "net", "rng".
    pub(crate) kind: String,
    /// "listen PATH", "connect PATH" or "activated".
    pub(crate) endpoint: String,
    pub(crate) back_end: String,
    /// Bytes of a disk, when it was last looked at.
    pub(crate) size: Option<u64>,
    pub(crate) workers: u16,
    /// A VMM is connected.
    pub(crate) connected: bool,
    /// Connections so far.
    pub(crate) sessions: u64,
    /// Feature bits that the driver has accepted, in hexadecimal.
    pub(crate) features: String,
    pub(crate) queues: Vec<Queue>,
    /// Connections that ended with an error of the VMM.
    pub(crate) protocol_errors: u64,
    /// Translations that VMMs have told and that were not taken.
    pub(crate) refused_translations: u64,
    /// The last one's text, or the last queue's.
    pub(crate) last_error: Option<String>,
    /// A thread of it has panicked, with these words: it is served no more.
    #[serde(default)]
    pub(crate) failed: Option<String>,
    pub(crate) net: Option<Net>,
}

/// One virtqueue.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Queue {
    pub(crate) index: u16,
    pub(crate) enabled: bool,
    /// It is being served.
    pub(crate) live: bool,
    pub(crate) size: u16,
    pub(crate) kicks: u64,
    /// Buffers taken from the driver.
    pub(crate) taken: u64,
    /// Buffers given back.
    pub(crate) completed: u64,
    pub(crate) interrupts: u64,
    /// Why the queue has stopped for good.
    pub(crate) error: Option<String>,
}

/// What a network card has moved.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Net {
    /// From the guest.
    pub(crate) transmitted_frames: u64,
    pub(crate) transmitted_bytes: u64,
    /// To the guest.
    pub(crate) received_frames: u64,
    pub(crate) received_bytes: u64,
    /// Frames that were dropped, for whatever reason.
    pub(crate) dropped_frames: u64,
}

/// A device that is not there.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Failed {
    pub(crate) name: String,
    pub(crate) why: String,
}

impl Device {
    /// Sums over the queues: kicks, buffers taken, given back, interrupts.
    pub(crate) fn totals(&self) -> [u64; 4] {
        self.queues.iter().fold([0; 4], |[kicks, taken, completed, interrupts], queue| {
            [
                kicks + queue.kicks,
                taken + queue.taken,
                completed + queue.completed,
                interrupts + queue.interrupts,
            ]
        })
    }

    /// How many queues have stopped for good.
    pub(crate) fn latched(&self) -> usize {
        self.queues.iter().filter(|queue| queue.error.is_some()).count()
    }
}
