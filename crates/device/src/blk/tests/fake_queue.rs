//! A queue whose jobs a test's host does.
use crate::{Rest, WakeSet, WakeSource};
use paravane_store::{Job, Outcome, StoreQueue};
use rustix::event::EventfdFlags;
use std::collections::VecDeque;
use std::fmt::Debug;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// Does the jobs of a queue as a test orders.
pub(super) trait FakeHost: Debug + Send {
    /// Does jobs in any order. Appends their heads and results.
    fn run(&mut self, jobs: &mut VecDeque<(u16, Job)>, done: &mut Vec<(u16, i32)>);

    /// Jobs are done when they are submitted; otherwise only in `wait`.
    fn is_prompt(&self) -> bool;

    /// Most jobs that a cancellation does not reach, because the host has begun them.
    fn begun(&self) -> usize;

    /// What the queue knows of its next event.
    fn rest(&self, arm: bool, has_outcomes: bool) -> Rest;
}

#[derive(Debug)]
pub(super) struct FakeQueue<H> {
    host: H,
    jobs: VecDeque<(u16, Job)>,
    done: Vec<(u16, i32)>,
    event: Arc<OwnedFd>,
    wakes: Option<WakeSource>,
}

impl<H: FakeHost> FakeQueue<H> {
    pub(super) fn new(host: H) -> Self {
        let event = Arc::new(rustix::event::eventfd(0, EventfdFlags::NONBLOCK).unwrap());
        Self { host, jobs: VecDeque::new(), done: Vec::new(), event, wakes: None }
    }
}

impl<H: FakeHost> StoreQueue for FakeQueue<H> {
    fn register(&mut self, wakes: Option<&WakeSet>) -> io::Result<()> {
        WakeSource::register(&mut self.wakes, &self.event, wakes)
    }

    fn rest(&mut self, arm: bool) -> Rest {
        if arm {
            let _ = rustix::io::read(&self.event, &mut [0; 8]);
        }
        self.host.rest(arm, !self.done.is_empty())
    }

    unsafe fn push(&mut self, head: u16, job: Job) -> io::Result<()> {
        self.jobs.push_back((head, job));
        Ok(())
    }

    fn submit(&mut self) -> io::Result<()> {
        if self.host.is_prompt() { self.wait() } else { Ok(()) }
    }

    fn wait(&mut self) -> io::Result<()> {
        self.host.run(&mut self.jobs, &mut self.done);
        rustix::io::write(&self.event, &1u64.to_ne_bytes())?;
        Ok(())
    }

    fn cancel(&mut self) {
        let begun = self.host.begun().min(self.jobs.len());
        self.done.extend(self.jobs.drain(begun..).map(|(head, _)| (head, -libc::ECANCELED)));
    }

    fn reap(&mut self, outcomes: &mut VecDeque<Outcome>) {
        // SAFETY: the job has been done, skipped or given up, once.
        outcomes.extend(self.done.drain(..).map(|(head, result)| unsafe { Outcome::new(head, result) }));
    }
}
