//! Requests that wait for room: the host's file system, quota or store is full.
//!
//! ```text
//!   a write fails with ENOSPC or EDQUOT --> held --every second, Full::retry--> the engine again
//!   later writes of its queue ------------> held          |
//!   reads and flushes: served on                           '--done: the last one ends the state
//! ```
//! A server answers a write beyond the end of its store in the same way. So it is asked for the size of
//! the store, and what is beyond the end fails.
//!
//! The driver sees requests that take long, and nothing else. One line in the log begins the state, and
//! one ends it.
use crate::LogDevice;
use crate::callback::Callback;
use paravane_store::lock;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

/// Time between two attempts.
const INTERVAL: Duration = Duration::from_secs(1);
/// Attempts for each time that a store is asked for its size.
const ASK_EVERY: u32 = 8;
/// Stack of the thread that counts it.
///
/// Asking a server takes name resolution and TLS.
const STACK: usize = 1 << 20;

/// What becomes of a write for which the host has no room (ENOSPC, EDQUOT).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnFull {
    /// It fails.
    #[default]
    Error,
    /// It waits, with the later writes of its queue, and is tried again every second.
    ///
    /// A queue that stops tries once more. What fails then is left to a successor by in-flight
    /// tracking; without, it fails.
    Wait,
}

/// A disk that waits for room.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FullStatus {
    /// When the first request found none.
    pub since: SystemTime,
    /// Requests that wait.
    pub requests: u64,
    /// Error of the host.
    pub error: String,
}

/// Something to call. [`Full::disk`]: has all queues try again; `false`: the disk is gone.
type Retry = dyn Fn() -> bool + Send + Sync;

/// Requests of a disk that wait for room.
#[derive(Debug)]
pub struct Full {
    /// Name in the log.
    device: String,
    /// Whether requests wait ([`OnFull::Wait`]).
    waits: AtomicBool,
    state: Mutex<FullState>,
    ended: Condvar,
    disk: Callback<Retry>,
    /// Asks the store of the image for its size. `true`: it has shrunk.
    store: Callback<Retry>,
}

#[derive(Debug, Default)]
struct FullState {
    now: Option<(FullStatus, Instant)>,
    /// Number of times that the disk began to wait.
    times: u64,
    /// A thread counts the time to the next attempt.
    retries: bool,
    /// The log has a line that the disk is full.
    is_logged: bool,
}

impl Full {
    pub(super) fn new(device: String, policy: OnFull) -> Arc<Self> {
        let (state, ended) = (Mutex::default(), Condvar::new());
        let waits = AtomicBool::new(policy == OnFull::Wait);
        Arc::new(Self { device, waits, state, ended, disk: Callback::default(), store: Callback::default() })
    }

    /// Sets, once, what has all queues try again, and returns `false` when the disk is gone.
    pub(super) fn retried_by(&self, retry: impl Fn() -> bool + Send + Sync + 'static) {
        self.disk.set(Box::new(retry));
    }

    /// Sets, once, what asks the store of the image for its size, and returns whether it has shrunk.
    ///
    /// It may block. Writes beyond the end of a store fail as if it were full.
    pub(super) fn asked_by(&self, ask: impl Fn() -> bool + Send + Sync + 'static) {
        self.store.set(Box::new(ask));
    }

    /// Whether the store of the image has shrunk. Asks it.
    fn has_shrunk(&self) -> bool {
        self.store.get().is_some_and(|ask| ask())
    }

    fn retry_all(&self) -> bool {
        self.disk.get().is_some_and(|retry| retry())
    }

    /// The state, while requests wait.
    #[must_use]
    pub fn status(&self) -> Option<FullStatus> {
        lock(&self.state).now.as_ref().map(|(status, _)| status.clone())
    }

    /// Number of times that requests began to wait.
    #[must_use]
    pub fn times(&self) -> u64 {
        lock(&self.state).times
    }

    /// Tries all waiting requests again now.
    pub fn retry(&self) {
        if self.status().is_some() {
            self.retry_all();
        }
    }

    /// Whether requests wait rather than fail.
    pub(super) fn waits(&self) -> bool {
        // Relaxed: it orders nothing.
        self.waits.load(Ordering::Relaxed)
    }

    /// Changes what becomes of writes without room. Those that wait are tried once more.
    pub fn set_policy(&self, policy: OnFull) {
        // Relaxed: a queue that misses it has been told to look again.
        self.waits.store(policy == OnFull::Wait, Ordering::Relaxed);
        self.retry();
    }

    /// Counts one more request that waits. `false`: it cannot.
    #[cold]
    pub(super) fn hold(self: &Arc<Self>, error: i32) -> bool {
        let mut state = lock(&self.state);
        if !state.retries {
            if let Err(error) = self.count_time() {
                tracing::error!(device = self.device, "writes cannot wait for room: no thread: {error}");
                return false;
            }
            state.retries = true;
        }
        if let Some((status, _)) = &mut state.now {
            status.requests += 1;
            return true;
        }
        let error = io::Error::from_raw_os_error(error).to_string();
        state.times += 1;
        state.now = Some((FullStatus { since: SystemTime::now(), requests: 1, error }, Instant::now()));
        // A store is asked before: it may have shrunk instead.
        if self.store.get().is_none() {
            self.log(state);
        }
        true
    }

    /// Logs that the disk is full, once.
    fn log(&self, mut state: MutexGuard<'_, FullState>) {
        let Some(error) = state.now.as_ref().map(|(status, _)| status.error.clone()) else { return };
        if !std::mem::replace(&mut state.is_logged, true) {
            drop(state);
            tracing::error!(device = self.device, "disk full: writes wait for room: {error}");
        }
    }

    /// Counts a request that waits no more.
    #[cold]
    pub(super) fn release(&self) {
        let mut state = lock(&self.state);
        let Some((status, _)) = &mut state.now else { return };
        status.requests = status.requests.saturating_sub(1);
        if status.requests > 0 {
            return;
        }
        let seconds = state.now.take().map_or(0.0, |(_, since)| since.elapsed().as_secs_f64());
        let is_logged = std::mem::take(&mut state.is_logged);
        drop(state);
        self.ended.notify_all();
        if !is_logged {
            return;
        }
        tracing::info!(device = self.device, "disk no longer full: no write waits, after {seconds:.1} s");
    }

    /// Starts a thread that tries again until no request waits.
    fn count_time(self: &Arc<Self>) -> io::Result<()> {
        let (full, device) = (self.clone(), LogDevice::current());
        let run = move || {
            let _named = LogDevice::enter(device);
            let mut state = lock(&full.state);
            for attempt in 0.. {
                // At once for the first time: what is beyond the end of a store does not wait.
                if attempt > 0 || full.store.get().is_none() {
                    state =
                        full.ended.wait_timeout(state, INTERVAL).unwrap_or_else(PoisonError::into_inner).0;
                }
                if state.now.is_none() {
                    break;
                }
                // A queue may want the lock.
                drop(state);
                let has_shrunk = attempt % ASK_EVERY == 0 && full.has_shrunk();
                if !has_shrunk {
                    full.log(lock(&full.state));
                }
                let is_there = full.retry_all();
                state = lock(&full.state);
                if !is_there {
                    break;
                }
            }
            state.retries = false;
        };
        // It waits for the lock, which the caller has until the state is there.
        std::thread::Builder::new().name("blk-full".into()).stack_size(STACK).spawn(run).map(drop)
    }
}
