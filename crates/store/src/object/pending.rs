//! Jobs that wait for chunks.
//!
//! Whoever ends a job holds its lock, and so does whoever copies into its memory: when its outcome
//! is made, nobody accesses its memory any more.
use crate::lock::lock;
use crate::pieces::scatter;
use crate::posted::Posted;
use crate::{Outcome, Pieces};
use std::sync::{Arc, Mutex};

/// Number of a job, and where its queue takes outcomes from.
type End = (u16, Arc<Posted<Outcome>>);

/// A read that waits for chunks.
#[derive(Debug)]
pub(super) struct PendingJob {
    pieces: Pieces,
    offset: u64,
    len: u64,
    /// Chunks that are still missing; `None`: it has ended.
    missing: Mutex<Option<u64>>,
    end: End,
}

// SAFETY: the memory of the pieces is accessed under the lock, and only until the job has ended
// (the contract of `PendingJob::new`).
unsafe impl Sync for PendingJob {}

impl PendingJob {
    /// A read of `len` bytes that waits for `missing` chunks, of which there is one.
    ///
    /// # Safety
    /// The pieces, the array that lists them and the memory that they name are valid until the job
    /// has ended, and have at least `len` bytes.
    pub(super) unsafe fn new(pieces: Pieces, offset: u64, len: u64, missing: u64, end: End) -> Arc<Self> {
        Arc::new(Self { pieces, offset, len, missing: Mutex::new(Some(missing)), end })
    }

    /// Where it reads, and how many bytes.
    pub(super) fn range(&self) -> (u64, u64) {
        (self.offset, self.len)
    }

    /// Whether it has ended.
    pub(super) fn is_over(&self) -> bool {
        lock(&self.missing).is_none()
    }

    /// Takes its part of a missing chunk, which begins at `start`. The last one ends the job.
    pub(super) fn fill(&self, start: u64, data: &[u8]) {
        let mut missing = lock(&self.missing);
        let Some(left) = missing.as_mut() else { return };
        let from = self.offset.max(start);
        let to = (self.offset + self.len).min(start + data.len() as u64);
        if from < to {
            let data = &data[(from - start) as usize..(to - start) as usize];
            // SAFETY: the job has not ended, and its lock is held (the contract of `new`).
            unsafe { scatter(self.pieces.slices(), from - self.offset, data) };
        }
        *left -= 1;
        if *left == 0 {
            // The device takes 32 bits; a job has less.
            let result = i32::try_from(self.len).unwrap_or(i32::MAX);
            self.end(&mut missing, result);
        }
    }

    /// Ends it with a negative error number, if it has not ended.
    pub(super) fn fail(&self, result: i32) {
        let mut missing = lock(&self.missing);
        if missing.is_some() {
            self.end(&mut missing, result);
        }
    }

    fn end(&self, missing: &mut Option<u64>, result: i32) {
        *missing = None;
        let (head, to) = &self.end;
        // SAFETY: the job ends here, once, under its lock: nobody accesses its memory any more.
        to.put(unsafe { Outcome::new(*head, result) });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use paravane_dma::HostSlice;
    use std::ptr::NonNull;

    #[test]
    fn chunks_fill_the_pieces_in_any_order_and_a_failed_job_is_left_alone() {
        let mut memory = [0_u8; 12];
        let base = memory.as_mut_ptr();
        let piece = |at: usize, len| HostSlice { ptr: base.wrapping_add(at), len };
        let mut list = [piece(0, 3), piece(3, 0), piece(4, 7)];
        let pieces = Pieces { first: NonNull::new(list.as_mut_ptr()).unwrap(), count: 3 };
        let completions = Arc::new(Posted::new(2).unwrap());
        let end = |head| (head, completions.clone());
        let mut outcomes = Vec::new();

        // Bytes 6 to 15 of chunks of 8 bytes.
        // SAFETY: the list and its memory outlive the job.
        let job = unsafe { PendingJob::new(pieces, 6, 10, 2, end(1)) };
        job.fill(8, &[8, 9, 10, 11, 12, 13, 14, 15]);
        assert!(!completions.has_some());
        job.fill(0, &[0, 1, 2, 3, 4, 5, 6, 7]);
        completions.take(&mut outcomes);
        assert_eq!(memory, [6, 7, 8, 0, 9, 10, 11, 12, 13, 14, 15, 0]);
        assert_eq!((outcomes[0].head(), outcomes[0].result(), outcomes.len()), (1, 10, 1));

        // SAFETY: as above.
        let job = unsafe { PendingJob::new(pieces, 0, 8, 1, end(2)) };
        assert!(!completions.listen());
        job.fail(-5);
        job.fail(-6);
        job.fill(0, &[99; 8]);
        assert!(completions.listen());
        completions.take(&mut outcomes);
        assert!(!memory.contains(&99));
        assert_eq!((outcomes[1].head(), outcomes[1].result(), outcomes.len()), (2, -5, 2));
    }
}
