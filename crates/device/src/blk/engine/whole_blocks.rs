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
#[derive(Debug)]
pub(super) struct WholeBlocks;

// SAFETY: the job itself is placed.
unsafe impl Rule for WholeBlocks {
    fn place(&mut self, _: u16, job: Job) -> Option<Job> {
        Some(job)
    }

    fn done(&mut self, _: u16, job: Job, result: Option<i32>) -> bool {
        result == Some(-libc::EINVAL) && matches!(job, Job::Read { .. } | Job::Write { .. })
    }
}
