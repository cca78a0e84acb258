//! For tests: an engine that does, shortens or fails jobs as the test orders.
use crate::blk::image::Image;
use crate::{Rest, WakeSet, WakeSource};
use paravane_dma::HostSlice;
use paravane_store::{Job, Outcome, Pieces, StoreQueue};
use rustix::event::EventfdFlags;
use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex};

/// Orders of the test, and the log for it.
#[derive(Debug, Default)]
pub(super) struct Orders {
    /// Do jobs when they are submitted; otherwise only in `wait`.
    pub(super) prompt: bool,
    /// Most bytes that one transfer moves.
    pub(super) most: Option<usize>,
    /// Results of the next jobs, which are then not done.
    pub(super) results: VecDeque<i32>,
    /// Most jobs that a cancellation does not reach, because the host has begun them.
    pub(super) begun: usize,
    /// Jobs in order, with their results.
    pub(super) log: Vec<(Job, i32)>,
}

#[derive(Debug)]
pub(super) struct Held {
    image: Arc<Image>,
    orders: Arc<Mutex<Orders>>,
    jobs: VecDeque<(u16, Job)>,
    done: Vec<Outcome>,
    event: Arc<OwnedFd>,
    wakes: Option<WakeSource>,
}

impl Held {
    pub(super) fn new(image: Arc<Image>, orders: Arc<Mutex<Orders>>) -> Self {
        let event = Arc::new(rustix::event::eventfd(0, EventfdFlags::NONBLOCK).unwrap());
        Self { image, orders, jobs: VecDeque::new(), done: Vec::new(), event, wakes: None }
    }
}

impl StoreQueue for Held {
    fn register(&mut self, wakes: Option<&WakeSet>) -> io::Result<()> {
        WakeSource::register(&mut self.wakes, &self.event, wakes)
    }

    unsafe fn push(&mut self, head: u16, job: Job) -> io::Result<()> {
        self.jobs.push_back((head, job));
        Ok(())
    }

    fn submit(&mut self) -> io::Result<()> {
        let prompt = self.orders.lock().unwrap().prompt;
        if prompt { self.wait() } else { Ok(()) }
    }

    fn wait(&mut self) -> io::Result<()> {
        let mut orders = self.orders.lock().unwrap();
        for (head, job) in self.jobs.drain(..) {
            let result = match orders.results.pop_front() {
                Some(result) => result,
                None => shortened(&self.image, job, orders.most),
            };
            orders.log.push((job, result));
            // SAFETY: the job has been done or skipped, once.
            self.done.push(unsafe { Outcome::new(head, result) });
            rustix::io::write(&self.event, &1u64.to_ne_bytes()).unwrap();
        }
        Ok(())
    }

    fn cancel(&mut self) {
        let begun = self.orders.lock().unwrap().begun.min(self.jobs.len());
        let given_up = self.jobs.drain(begun..);
        self.done.extend(given_up.map(|(head, _)| {
            // SAFETY: the job is gone.
            unsafe { Outcome::new(head, -libc::ECANCELED) }
        }));
    }

    fn rest(&mut self, arm: bool) -> Rest {
        if arm {
            let _ = rustix::io::read(&self.event, &mut [0; 8]);
        }
        match arm && !self.done.is_empty() {
            true => Rest::Serve,
            false => Rest::Ask { kicks: true },
        }
    }

    fn reap(&mut self, outcomes: &mut VecDeque<Outcome>) {
        outcomes.extend(self.done.drain(..));
    }
}

/// Does a job.
fn perform(image: &Image, job: Job) -> i32 {
    // SAFETY: the memory is valid until the outcome is reaped (StoreQueue::push).
    unsafe { image.perform(job) }
}

/// Does a job, but moves no more than `most` bytes.
fn shortened(image: &Image, job: Job, most: Option<usize>) -> i32 {
    let mut left = most.unwrap_or(usize::MAX);
    let mut cut = |pieces: Pieces| -> Vec<HostSlice> {
        // SAFETY: the list is valid until the outcome is reaped (StoreQueue::push).
        let pieces = unsafe { pieces.slices() };
        pieces
            .iter()
            .map(|piece| {
                let len = piece.len.min(left);
                left -= len;
                HostSlice { ptr: piece.ptr, len }
            })
            .collect()
    };
    let again = |list: &mut Vec<HostSlice>| Pieces {
        first: NonNull::new(list.as_mut_ptr()).unwrap(),
        count: list.len() as u32,
    };
    match job {
        Job::Read { pieces, offset } => {
            let mut list = cut(pieces);
            perform(image, Job::Read { pieces: again(&mut list), offset })
        }
        Job::Write { pieces, offset, durable } => {
            let mut list = cut(pieces);
            perform(image, Job::Write { pieces: again(&mut list), offset, durable })
        }
        other => perform(image, other),
    }
}
