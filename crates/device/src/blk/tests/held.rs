//! For tests: an engine that does, shortens or fails jobs as the test orders.
use super::fake_queue::FakeHost;
use crate::Rest;
use crate::blk::image::Image;
use paravane_dma::HostSlice;
use paravane_store::{Job, Pieces};
use std::collections::VecDeque;
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

/// Does jobs on an image.
#[derive(Debug)]
pub(super) struct Held {
    pub(super) image: Arc<Image>,
    pub(super) orders: Arc<Mutex<Orders>>,
}

impl FakeHost for Held {
    fn run(&mut self, jobs: &mut VecDeque<(u16, Job)>, done: &mut Vec<(u16, i32)>) {
        let mut orders = self.orders.lock().unwrap();
        for (head, job) in jobs.drain(..) {
            let result = match orders.results.pop_front() {
                Some(result) => result,
                None => shortened(&self.image, job, orders.most),
            };
            orders.log.push((job, result));
            done.push((head, result));
        }
    }

    fn is_prompt(&self) -> bool {
        self.orders.lock().unwrap().prompt
    }

    fn begun(&self) -> usize {
        self.orders.lock().unwrap().begun
    }

    fn rest(&self, arm: bool, has_outcomes: bool) -> Rest {
        if arm && has_outcomes { Rest::Serve } else { Rest::Ask { kicks: true } }
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
