//! The queue's own thread, which does each job at once: for images in memory.
//!
//! ```text
//!   push -> submit: a copy, or preadv, pwritev, ... -> done -> reap
//! ```
//! I/O in memory does not wait for a disk. An image in memory is mapped, and transfers are copies
//! where possible ([`Mapped`](super::Mapped)). Other jobs are system calls. io_uring would take longer: neither
//! tmpfs nor the buffered writes of most file systems support non-blocking attempts, so io_uring
//! hands every job to a worker thread (Linux 6.18: 7 to 9 µs for 4 KiB of tmpfs alone and 2.0 µs in
//! a batch of 32, where preadv takes 1.6 µs).
use crate::{Job, Outcome, Rest, StoreQueue};
use std::collections::VecDeque;
use std::fmt::Debug;
use std::io;
use std::sync::Arc;

/// Does jobs while its caller waits, for engines that are no rings.
pub trait Perform: Debug + Send + Sync {
    /// Does a job and waits for it. Returns what [`Outcome::result`] would be.
    ///
    /// # Safety
    /// The pieces of the job, the array that lists them, and the memory that they name stay valid
    /// during the call.
    unsafe fn perform(&self, job: Job) -> i32;

    /// Does a job, if that waits for nothing.
    ///
    /// # Safety
    /// As [`Perform::perform`].
    unsafe fn at_once(&self, _job: Job) -> Option<i32> {
        None
    }

    /// Stack in bytes that [`Perform::perform`] needs \[for system calls and log lines\].
    fn stack(&self) -> usize {
        256 << 10
    }
}

/// See the module.
#[derive(Debug)]
pub struct Immediate {
    work: Arc<dyn Perform>,
    pushed: Vec<(u16, Job)>,
    done: VecDeque<Outcome>,
}

impl Immediate {
    /// The engine of one queue, which does jobs by `work`.
    #[must_use]
    pub fn new(work: Arc<dyn Perform>) -> Self {
        Self { work, pushed: Vec::new(), done: VecDeque::new() }
    }
}

impl StoreQueue for Immediate {
    fn rest(&mut self, _arm: bool) -> Rest {
        Rest::serve_if(!self.done.is_empty() || !self.pushed.is_empty())
    }

    unsafe fn push(&mut self, head: u16, job: Job) -> io::Result<()> {
        self.pushed.push((head, job));
        Ok(())
    }

    /// Does all jobs.
    fn submit(&mut self) -> io::Result<()> {
        for &(head, job) in &self.pushed {
            // SAFETY: the pieces and their memory are valid until the outcome is reaped
            // (StoreQueue::push), and it has not even been made.
            let result = unsafe { self.work.perform(job) };
            // SAFETY: the job has been done, here and once.
            self.done.push_back(unsafe { Outcome::new(head, result) });
        }
        self.pushed.clear();
        Ok(())
    }

    fn wait(&mut self) -> io::Result<()> {
        self.submit()
    }

    /// Cancels the jobs that were not submitted.
    fn cancel(&mut self) {
        for (head, _) in self.pushed.drain(..) {
            // SAFETY: the job was never begun.
            self.done.push_back(unsafe { Outcome::new(head, -libc::ECANCELED) });
        }
    }

    fn reap(&mut self, outcomes: &mut VecDeque<Outcome>) {
        if !self.done.is_empty() {
            outcomes.append(&mut self.done);
        }
    }
}
