//! io_uring for a disk with smaller blocks than direct I/O on its file takes, and workers for the rest.
//!
//! ```text
//!   push --> io_uring --EINVAL--> a worker: whole blocks (blk/whole_blocks.rs) --> reap
//!                '------------------------ else ---------------------------------> reap
//! ```
//! To change a part of a block takes a read and a write, for which workers wait.
use paravane_store::Job;
use paravane_store::file::Rule;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct WholeBlocks {
    /// Transfers below, by head; as long as the greatest head so far needs.
    transfers: Vec<Option<Job>>,
}

// SAFETY: the job itself is placed.
unsafe impl Rule for WholeBlocks {
    fn place(&mut self, head: u16, job: Job) -> Option<Job> {
        if self.transfers.len() <= usize::from(head) {
            self.transfers.resize(usize::from(head) + 1, None);
        }
        let is_transfer = matches!(job, Job::Read { .. } | Job::Write { .. });
        self.transfers[usize::from(head)] = is_transfer.then_some(job);
        Some(job)
    }

    fn done(&mut self, head: u16, result: i32) -> Option<Job> {
        let transfer = self.transfers.get_mut(usize::from(head)).and_then(Option::take);
        transfer.filter(|_| result == -libc::EINVAL)
    }

    fn refused(&mut self, _: u16) {}
}
