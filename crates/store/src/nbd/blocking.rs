//! Jobs of threads that wait for each.
//!
//! ```text
//!   perform -> place (one for each waiting thread) -> push, submit
//!     -> the first thread waits for the server and hands results out -> result
//!        the others wait for it, and one follows it
//! ```
use super::channel::Channel;
use super::member::Fds;
use super::queue::NbdQueue;
use super::task::Work;
use crate::event::wait;
use crate::lock::lock;
use crate::{Outcome, StoreQueue};
use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

/// Most threads whose jobs are in flight at a time.
const PLACES: u16 = 64;

/// Where threads wait for jobs.
#[derive(Debug)]
pub(super) struct Blocking {
    fds: Arc<Fds>,
    state: Mutex<BlockingState>,
    changed: Condvar,
}

#[derive(Debug)]
struct BlockingState {
    queue: NbdQueue,
    /// Free heads.
    free: Vec<u16>,
    /// Results by head.
    results: Vec<Option<i32>>,
    outcomes: VecDeque<Outcome>,
    /// A thread waits for the server.
    has_leader: bool,
}

impl Blocking {
    pub(super) fn new(channel: Arc<Channel>) -> io::Result<Self> {
        let queue = NbdQueue::new(channel, PLACES)?;
        Ok(Self {
            fds: queue.fds.clone(),
            state: Mutex::new(BlockingState {
                queue,
                free: (0..PLACES).collect(),
                results: vec![None; usize::from(PLACES)],
                outcomes: VecDeque::new(),
                has_leader: false,
            }),
            changed: Condvar::new(),
        })
    }

    /// Does some work and waits for it. Returns its result, and extents if it asks for them.
    ///
    /// # Safety
    /// The memory of the job is valid during the call.
    pub(super) unsafe fn perform(&self, work: Work) -> (i32, Vec<(u64, u32)>) {
        let mut state = lock(&self.state);
        let head = loop {
            match state.free.pop() {
                Some(head) => break head,
                None => state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            }
        };
        // SAFETY: the caller's promise; this returns when the job has ended.
        let pushed = unsafe { state.queue.push_work(head, work) }.and_then(|()| state.queue.submit());
        if let Err(error) = pushed {
            state.free.push(head);
            return (-error.raw_os_error().unwrap_or(libc::EIO), Vec::new());
        }
        let result = loop {
            if let Some(result) = state.results[usize::from(head)].take() {
                break result;
            }
            if state.has_leader {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            state.has_leader = true;
            let has_more = state.queue.has_more();
            drop(state);
            if !has_more {
                // Without it, the loop turns until the reply is there.
                let _ = wait(&*self.fds);
            }
            state = lock(&self.state);
            state.has_leader = false;
            let BlockingState { queue, outcomes, results, .. } = &mut *state;
            queue.reap(outcomes);
            for outcome in outcomes.drain(..) {
                results[usize::from(outcome.head())] = Some(outcome.result());
            }
            self.changed.notify_all();
        };
        let extents = match work {
            Work::Extents { .. } => state.queue.take_extents(head),
            _ => Vec::new(),
        };
        state.free.push(head);
        drop(state);
        self.changed.notify_all();
        (result, extents)
    }
}
