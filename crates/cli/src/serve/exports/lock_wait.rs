//! The wait of an opening thread for the requests of a dead daemon.
//!
//! ```text
//!   Unlocked --a dead process has requests in flight--> waits --storage has done them--> Device
//!                                                         '--cancel (device removed)---> error
//! ```
//! io_uring requests outlive their process. The wait lasts as long as the storage takes: nothing
//! else ends them, and a write that lands later would undo a newer one.
use crate::kinds::opening::{Opened, Opening};
use anyhow::anyhow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Time between two attempts at first: guests wait, and mostly the lock is granted at once.
const SHORTEST: Duration = Duration::from_micros(100);
/// How long the attempts stay that close.
const CLOSE: Duration = Duration::from_millis(20);
/// Longest time between two attempts.
const LONGEST: Duration = Duration::from_millis(100);
/// A wait that is shorter is not logged: the kernel takes this long after every kill.
const UNLOGGED: Duration = Duration::from_millis(500);
/// Time between two log lines.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// What a device waits for, in log and status.
pub(super) const WAITS_FOR: &str = "the lock of its image: a dead process has requests in flight";

/// The state of a wait, shared by the opening thread and its observers.
///
/// All accesses are Relaxed: they order nothing.
#[derive(Debug, Default)]
pub(super) struct LockWait {
    waits: AtomicBool,
    cancelled: AtomicBool,
}

impl LockWait {
    /// Whether the thread waits.
    pub(super) fn waits(&self) -> bool {
        self.waits.load(Ordering::Relaxed)
    }

    /// Ends the wait: the device is no longer wanted.
    pub(super) fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }

    /// Waits until the image of the device `name` is locked.
    ///
    /// # Errors
    /// The wait was cancelled, or the image cannot be used.
    pub(super) fn wait(&self, name: &str, mut opening: Opening) -> Result<Opened, anyhow::Error> {
        let start = Instant::now();
        let (mut interval, mut next_line) = (SHORTEST, UNLOGGED);
        loop {
            let disk = match opening {
                Opening::Unlocked(disk) => disk,
                Opening::Ahead(_) | Opening::Late(_) => {
                    return Err(anyhow!("internal error: the device is not open"));
                }
                Opening::Device(opened) => {
                    self.waits.store(false, Ordering::Relaxed);
                    let waited = start.elapsed();
                    if waited >= UNLOGGED {
                        tracing::info!(device = name, "image locked after {} s", waited.as_secs());
                    }
                    return Ok(opened);
                }
            };
            if self.cancelled.load(Ordering::Relaxed) {
                return Err(anyhow!("removed while it waited for {WAITS_FOR}"));
            }
            self.waits.store(true, Ordering::Relaxed);
            if start.elapsed() >= next_line {
                next_line += LOG_INTERVAL;
                let seconds = start.elapsed().as_secs();
                tracing::warn!(device = name, seconds, "waiting for {WAITS_FOR}; check the storage");
            }
            std::thread::sleep(interval);
            if start.elapsed() > CLOSE {
                interval = (interval * 2).min(LONGEST);
            }
            opening = Opening::locked(*disk)?;
        }
    }
}
