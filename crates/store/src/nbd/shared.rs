//! What the connections of a store have in common.
use super::export::Opened;
use super::options::NbdOptions;
use crate::lock::lock;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// State of a store.
#[derive(Debug)]
pub(super) struct NbdShared {
    pub(super) options: NbdOptions,
    /// As the owner knows the export. Its size is `size`.
    opened: Opened,
    size: AtomicU64,
    /// Bytes that the server named last.
    pub(super) end: AtomicU64,
    pub(super) reconnects: AtomicU64,
    error: Mutex<Option<String>>,
    gave_up: AtomicBool,
    sleep: Mutex<()>,
    wake: Condvar,
}

impl NbdShared {
    pub(super) fn new(options: NbdOptions, opened: Opened) -> Self {
        Self {
            options,
            size: opened.size.into(),
            end: opened.size.into(),
            opened,
            reconnects: 0.into(),
            error: Mutex::new(None),
            gave_up: false.into(),
            sleep: Mutex::new(()),
            wake: Condvar::new(),
        }
    }

    /// What the owner relies on now.
    pub(super) fn opened(&self) -> Opened {
        Opened { size: self.size(), ..self.opened }
    }

    pub(super) fn size(&self) -> u64 {
        self.size.load(Ordering::Relaxed)
    }

    /// The export has at least this size.
    pub(super) fn grow(&self, size: u64) {
        self.end.store(size, Ordering::Relaxed);
        self.size.fetch_max(size, Ordering::Relaxed);
    }

    /// Keeps an error for observers.
    pub(super) fn note(&self, error: String) {
        *lock(&self.error) = Some(error);
    }

    pub(super) fn error(&self) -> Option<String> {
        lock(&self.error).clone()
    }

    /// Whether nothing waits for connections any more.
    pub(super) fn gave_up(&self) -> bool {
        self.gave_up.load(Ordering::Relaxed)
    }

    pub(super) fn give_up(&self) {
        self.gave_up.store(true, Ordering::Relaxed);
        self.wake();
    }

    /// Ends pauses.
    pub(super) fn wake(&self) {
        let _guard = lock(&self.sleep);
        self.wake.notify_all();
    }

    /// Waits, until [`NbdShared::wake`] at the latest, as long as `is_wanted`.
    pub(super) fn pause(&self, time: Duration, is_wanted: impl Fn() -> bool) {
        let end = Instant::now() + time;
        let mut guard = lock(&self.sleep);
        while is_wanted() {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            guard = self.wake.wait_timeout(guard, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// The socket of a connection that is of no more use, which the server may still read.
#[derive(Debug)]
pub(super) struct OldSocket(pub(super) OwnedFd);
