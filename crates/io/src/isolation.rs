//! Threads of their own for devices that have blocked a shared one.
//!
//! ```text
//!   a thread waits in the kernel for memory of a device: watcher --> isolate: the device's queues leave the
//!                                                                    shared threads as soon as they are there
//!   it has not done so for QUIET:                        watcher --> rejoin: they go back
//! ```
//! That another thread goes on with the loop is not enough. What the blocked thread has submitted to
//! io_uring for other devices completes when it wakes, and each block costs the others up to 20 ms.
use crate::IoThread;
use crate::spares::MOST;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Time without a block after which a device shares threads again.
pub(crate) const QUIET: Duration = Duration::from_secs(30);

/// More devices than [`MOST`] block threads.
#[derive(Debug)]
pub(crate) struct TooMany;

/// The devices that have threads of their own.
#[derive(Default)]
pub(crate) struct Isolation {
    devices: Mutex<HashMap<usize, Isolated>>,
}

struct Isolated {
    /// `None`: it starts when the first queue has left the shared threads.
    thread: Option<Arc<IoThread>>,
    /// Queues are on their way.
    is_moving: bool,
    /// What the thread did at the last look.
    seen: (u64, Option<usize>),
    /// When it was blocked last.
    blocked: Instant,
}

impl Isolation {
    /// The thread of a device that is isolated.
    pub(crate) fn thread(&self, device: usize) -> Option<Arc<IoThread>> {
        self.devices.lock().get(&device)?.thread.clone()
    }

    /// Notes that a device has blocked a shared thread. `true`: call `Shared::isolate` now.
    ///
    /// # Errors
    /// Too many devices are isolated.
    pub(crate) fn begin(&self, device: usize) -> Result<bool, TooMany> {
        let mut devices = self.devices.lock();
        if devices.len() >= MOST && !devices.contains_key(&device) {
            return Err(TooMany);
        }
        let now = Instant::now();
        let isolated = devices.entry(device).or_insert(Isolated {
            thread: None,
            is_moving: false,
            seen: (0, None),
            blocked: now,
        });
        isolated.blocked = now;
        Ok(!std::mem::replace(&mut isolated.is_moving, true))
    }

    /// Looks at the threads. Returns devices that block theirs, and those that have not done so for
    /// `quiet`: call `Shared::rejoin` for these.
    pub(crate) fn look(&self, quiet: Duration) -> (Vec<usize>, Vec<usize>) {
        let (mut blocking, mut done) = (Vec::new(), Vec::new());
        for (&device, isolated) in self.devices.lock().iter_mut() {
            let now = isolated.thread.as_ref().map_or((0, None), |thread| thread.setting.counters.now());
            if now == std::mem::replace(&mut isolated.seen, now) && now.1.is_some() {
                isolated.blocked = Instant::now();
                blocking.push(device);
            } else if !isolated.is_moving && isolated.blocked.elapsed() >= quiet {
                isolated.is_moving = true;
                done.push(device);
            }
        }
        (blocking, done)
    }

    /// Forgets a device without queues.
    pub(crate) fn forget(&self, device: usize) {
        drop(self.end(device));
    }

    /// Has new queues of a device share threads again.
    ///
    /// Returns its thread, which ends when it is dropped.
    pub(crate) fn end(&self, device: usize) -> Option<Arc<IoThread>> {
        self.devices.lock().remove(&device)?.thread
    }

    /// Number of devices.
    #[cfg(test)]
    pub(crate) fn count(&self) -> usize {
        self.devices.lock().len()
    }

    /// Gives a device a thread.
    pub(crate) fn set_thread(&self, device: usize, thread: &Arc<IoThread>) {
        if let Some(isolated) = self.devices.lock().get_mut(&device) {
            isolated.thread = Some(Arc::clone(thread));
        }
    }

    /// The device's queues have moved.
    pub(crate) fn moved(&self, device: usize) {
        if let Some(isolated) = self.devices.lock().get_mut(&device) {
            isolated.is_moving = false;
        }
    }
}
