//! The jobs of one virtqueue on a connection.
use super::channel::{Channel, Fds};
use super::task::Work;
use crate::{Job, Outcome, StoreQueue};
use rustix::event::{PollFd, PollFlags, poll};
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

/// A queue of a store behind NBD.
#[derive(Debug)]
pub(super) struct NbdQueue {
    channel: Arc<Channel>,
    member: u16,
    fds: Arc<Fds>,
    jobs: usize,
    /// Pushed and not submitted.
    pushed: Vec<(u16, Work)>,
    /// Pushed and not reaped.
    in_flight: usize,
}

impl NbdQueue {
    pub(super) fn new(channel: Arc<Channel>, jobs: u16) -> io::Result<Self> {
        let jobs = usize::from(jobs.max(1));
        let (member, fds) = channel.join(jobs)?;
        Ok(Self { channel, member, fds, jobs, pushed: Vec::with_capacity(jobs), in_flight: 0 })
    }

    /// Descriptors, for a thread that waits without the queue.
    pub(super) fn fds(&self) -> &Arc<Fds> {
        &self.fds
    }

    /// As [`StoreQueue::push`].
    ///
    /// # Safety
    /// As there.
    pub(super) unsafe fn push_work(&mut self, head: u16, work: Work) -> io::Result<()> {
        if self.in_flight >= self.jobs {
            return Err(io::Error::new(
                io::ErrorKind::QuotaExceeded,
                "the queue has no room for another job",
            ));
        }
        self.in_flight += 1;
        self.pushed.push((head, work));
        Ok(())
    }

    /// Whether there is something to do that its descriptor does not tell of.
    pub(super) fn has_more(&self) -> bool {
        self.channel.has_more()
    }

    /// Extents that the job with this head has found; its outcome was reaped.
    pub(super) fn take_extents(&self, head: u16) -> Vec<(u64, u32)> {
        self.channel.take_extents(self.member, head)
    }
}

impl StoreQueue for NbdQueue {
    fn fd(&self) -> BorrowedFd<'_> {
        self.fds.as_fd()
    }

    fn listen(&mut self) -> bool {
        !self.pushed.is_empty() || self.channel.has_news(self.member)
    }

    fn has_news(&mut self) -> Option<bool> {
        match (self.pushed.is_empty(), self.in_flight) {
            (false, _) => Some(true),
            (true, 0) => Some(false),
            (true, _) => None,
        }
    }

    unsafe fn push(&mut self, head: u16, job: Job) -> io::Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.push_work(head, Work::Job(job)) }
    }

    fn submit(&mut self) -> io::Result<()> {
        if !self.pushed.is_empty() {
            self.channel.submit(self.member, &mut self.pushed);
        }
        Ok(())
    }

    fn reap(&mut self, outcomes: &mut VecDeque<Outcome>) {
        let before = outcomes.len();
        self.channel.reap(self.member, outcomes);
        self.in_flight -= outcomes.len() - before;
    }

    fn wait(&mut self) -> io::Result<()> {
        self.submit()?;
        while !self.channel.has_outcomes(self.member) {
            if !self.channel.has_more() {
                wait(&self.fds)?;
            }
            self.channel.work(self.member);
        }
        Ok(())
    }

    fn cancel(&mut self) {
        self.channel.cancel(self.member, &mut self.pushed);
    }
}

impl Drop for NbdQueue {
    fn drop(&mut self) {
        self.channel.leave(self.member);
    }
}

/// Waits until there is something to do.
pub(super) fn wait(fds: &Fds) -> io::Result<()> {
    let mut polled = [PollFd::new(fds, PollFlags::IN)];
    match poll(&mut polled, None) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}
