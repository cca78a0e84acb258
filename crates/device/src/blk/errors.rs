//! Storage errors of a disk, counted by operation and queue; the last one is kept.
//!
//! A storage error is a request that the host failed. A mistake of the driver (a sector beyond the
//! end, an unknown request) is counted as a rejected request.
use super::operation::FALLIBLE;
use super::request::ByteRange;
use crate::latency::Operation;
use paravane_spec::blk::SECTOR;
use paravane_store::lock;
use std::io;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

/// Least time between two log lines of one disk.
const LOG_INTERVAL: Duration = Duration::from_secs(1);

/// A failed request.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StorageError {
    /// Time of the failure.
    pub time: SystemTime,
    /// Operation of the request.
    pub operation: &'static Operation,
    /// Index of the request's queue.
    pub queue: u16,
    /// First sector that was not transferred; `None` for a flush.
    pub sector: Option<u64>,
    /// Bytes that were not transferred.
    pub bytes: u64,
    /// Error of the host.
    pub error: String,
}

/// Counts since the disk was opened.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ErrorTotals {
    /// Failed requests by operation, as [`OPERATIONS`](super::operation::OPERATIONS) lists them.
    pub operations: [u64; FALLIBLE],
    /// Failed requests by queue.
    pub queues: Vec<u64>,
    /// Requests that were refused as the driver's mistakes.
    pub rejected: u64,
    /// The last failed request.
    pub last: Option<StorageError>,
}

/// Cause of a failed request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cause {
    /// An error number.
    Os(i32),
    /// The image ends before the data.
    End,
}

/// The data that a failed request has not transferred.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Missed {
    pub(super) operation: &'static Operation,
    pub(super) sector: Option<u64>,
    pub(super) bytes: u64,
}

impl Missed {
    pub(super) fn at(operation: &'static Operation, offset: u64, bytes: u64) -> Self {
        Self { operation, sector: Some(offset / SECTOR), bytes }
    }

    pub(super) fn range(operation: &'static Operation, range: Option<&ByteRange>) -> Self {
        match range {
            Some(range) => Self::at(operation, range.offset, range.len),
            None => Self { operation, sector: None, bytes: 0 },
        }
    }
}

/// Live counters of a disk, shared by its queues.
#[derive(Debug)]
pub struct StorageErrors {
    /// Name in the log.
    device: String,
    operations: [AtomicU64; FALLIBLE],
    queues: Box<[AtomicU64]>,
    rejected: AtomicU64,
    recent: Mutex<Recent>,
}

#[derive(Debug, Default)]
struct Recent {
    last: Option<StorageError>,
    logged: Option<Instant>,
    /// Errors since then.
    unlogged: u64,
}

impl StorageErrors {
    pub(super) fn new(device: String, queues: usize) -> Self {
        Self {
            device,
            operations: Default::default(),
            queues: std::iter::repeat_with(AtomicU64::default).take(queues).collect(),
            rejected: AtomicU64::new(0),
            recent: Mutex::default(),
        }
    }

    /// Current counts, and the last error.
    #[must_use]
    pub fn totals(&self) -> ErrorTotals {
        // Relaxed, here and below: counts order nothing.
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        ErrorTotals {
            operations: self.operations.each_ref().map(load),
            queues: self.queues.iter().map(load).collect(),
            rejected: load(&self.rejected),
            last: lock(&self.recent).last.clone(),
        }
    }

    /// Counts a mistake of the driver.
    pub(super) fn reject(&self) {
        self.rejected.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts, keeps and logs a failed request, with one line in a [`LOG_INTERVAL`].
    #[cold]
    pub(super) fn add(&self, queue: u16, missed: Missed, cause: Cause, reason: Option<String>) {
        let Missed { operation, sector, bytes } = missed;
        if let Some(counter) = self.operations.get(operation.index()) {
            counter.fetch_add(1, Ordering::Relaxed);
        }
        if let Some(counter) = self.queues.get(usize::from(queue)) {
            counter.fetch_add(1, Ordering::Relaxed);
        }
        let error = match (cause, reason) {
            (Cause::End, _) => "the image ends before this sector".to_owned(),
            (Cause::Os(libc::EIO), Some(reason)) => reason,
            (Cause::Os(number), _) => io::Error::from_raw_os_error(number).to_string(),
        };
        let failed =
            StorageError { time: SystemTime::now(), operation, queue, sector, bytes, error: error.clone() };
        let Some(unlogged) = lock(&self.recent).keep(failed, Instant::now()) else { return };
        // Not under the lock: the log may be slow.
        tracing::warn!(
            device = self.device,
            queue,
            operation = operation.name(),
            sector,
            bytes,
            unlogged = (unlogged > 0).then_some(unlogged),
            "storage error: {error}"
        );
    }
}

impl Recent {
    /// Keeps the error.
    ///
    /// If it is to be logged, returns the number of errors without a line since the last one.
    fn keep(&mut self, error: StorageError, now: Instant) -> Option<u64> {
        self.last = Some(error);
        if self.logged.is_some_and(|logged| now.saturating_duration_since(logged) < LOG_INTERVAL) {
            self.unlogged += 1;
            return None;
        }
        self.logged = Some(now);
        Some(std::mem::take(&mut self.unlogged))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::blk::operation::{FLUSH, READ, WRITE};

    #[test]
    fn errors_are_counted_by_operation_and_queue() {
        let errors = StorageErrors::new("vm0".into(), 2);
        assert_eq!(errors.totals(), ErrorTotals { queues: vec![0, 0], ..ErrorTotals::default() });
        errors.add(0, Missed::at(WRITE, 4096, 512), Cause::Os(libc::ENOSPC), None);
        errors.add(1, Missed::range(FLUSH, None), Cause::Os(libc::EIO), Some("why".into()));
        let flush = errors.totals().last.unwrap();
        assert_eq!((flush.sector, flush.bytes, flush.error.as_str()), (None, 0, "why"));
        errors.add(1, Missed::at(READ, 1 << 20, 1024), Cause::End, None);
        errors.reject();
        let totals = errors.totals();
        assert_eq!((totals.operations, totals.queues, totals.rejected), ([1, 1, 1, 0, 0], vec![1, 2], 1));
        let last = totals.last.unwrap();
        assert_eq!((last.operation, last.queue, last.sector, last.bytes), (READ, 1, Some(2048), 1024));
        assert!(last.error.contains("ends"), "{last:?}");
    }

    #[test]
    fn the_log_has_the_first_error_at_once_and_then_one_an_interval() {
        let error = || StorageError {
            time: SystemTime::now(),
            operation: READ,
            queue: 0,
            sector: Some(1),
            bytes: 512,
            error: String::new(),
        };
        let (mut recent, start) = (Recent::default(), Instant::now());
        assert_eq!(recent.keep(error(), start), Some(0));
        for _ in 0..5 {
            assert_eq!(recent.keep(error(), start + LOG_INTERVAL / 2), None);
        }
        assert_eq!(recent.keep(error(), start + LOG_INTERVAL), Some(5));
        assert_eq!(recent.keep(error(), start + LOG_INTERVAL * 3), Some(0));
    }
}
