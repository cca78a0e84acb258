//! Where requests arrive that librbd has ended.
//!
//! librbd calls back on threads of its own. (It can also signal an eventfd for each request and keep
//! the list, `rbd_poll_io_events`. An image has one such list, but each queue needs one; and it
//! writes the eventfd for each request, also to an owner that polls.)
use crate::posted::Posted;
use std::io;
use std::sync::atomic::{AtomicU32, Ordering};

/// Requests `R` of one queue that have ended, and when those in flight began.
#[derive(Debug)]
pub(super) struct EndedRequests<R> {
    /// Posted by threads of librbd.
    pub(super) posted: Posted<R>,
    /// For each slot the second in which its job began, counted from 1; 0 if it has none.
    began: Box<[AtomicU32]>,
}

/// Jobs in flight that are late.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Late {
    pub(super) count: u32,
    /// The second in which the first of them began; `u32::MAX` if there is none.
    pub(super) first: u32,
}

impl<R> EndedRequests<R> {
    pub(super) fn new(slots: usize) -> io::Result<Self> {
        // Callbacks do not allocate.
        Ok(Self { posted: Posted::new(slots)?, began: (0..slots).map(|_| AtomicU32::new(0)).collect() })
    }

    /// Notes the second in which the job of a slot began; 0 when it has ended.
    pub(super) fn note(&self, slot: usize, second: u32) {
        // Relaxed: for observers only.
        self.began[slot].store(second, Ordering::Relaxed);
    }

    /// Jobs in flight that began before `second`.
    pub(super) fn older_than(&self, second: u32) -> Late {
        let began = self.began.iter().map(|began| began.load(Ordering::Relaxed));
        began.filter(|&began| began != 0 && began < second).fold(
            Late { count: 0, first: u32::MAX },
            |Late { count, first }, began| Late { count: count + 1, first: first.min(began) },
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_jobs_are_counted() {
        let ended = EndedRequests::<()>::new(3).unwrap();
        ended.note(0, 5);
        ended.note(2, 9);
        let late = |second| (ended.older_than(second).count, ended.older_than(second).first);
        assert_eq!([5, 6, 9, 10].map(late), [(0, u32::MAX), (1, 5), (1, 5), (2, 5)]);
        ended.note(0, 0);
        assert_eq!(late(10), (1, 9));
    }
}
