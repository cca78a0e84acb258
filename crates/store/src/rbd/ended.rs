//! Where requests arrive that librbd has ended: a list and an eventfd.
//!
//! librbd calls back on threads of its own. (It can also signal an eventfd for each request and keep
//! the list, `rbd_poll_io_events`. An image has one such list, but each queue needs one; and it
//! writes the eventfd for each request, also to an owner that polls.)
use crate::lock::lock;
use rustix::event::EventfdFlags;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// Requests `R` of one queue that have ended, and when those in flight began.
#[derive(Debug)]
pub(super) struct EndedRequests<R> {
    list: Mutex<List<R>>,
    /// Length of the list, for an owner that polls.
    count: AtomicUsize,
    /// The owner sleeps, or is about to.
    asleep: AtomicBool,
    event: Arc<OwnedFd>,
    /// For each slot the second in which its job began, counted from 1; 0 if it has none.
    began: Box<[AtomicU32]>,
}

#[derive(Debug)]
struct List<R> {
    requests: Vec<R>,
    /// Nobody will take them any more.
    abandoned: bool,
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
        Ok(Self {
            // Callbacks do not allocate.
            list: Mutex::new(List { requests: Vec::with_capacity(slots), abandoned: false }),
            count: AtomicUsize::new(0),
            asleep: AtomicBool::new(false),
            event: Arc::new(rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?),
            began: (0..slots).map(|_| AtomicU32::new(0)).collect(),
        })
    }

    /// Adds a request. Called by threads of librbd.
    pub(super) fn put(&self, request: R) {
        let mut list = lock(&self.list);
        if list.abandoned {
            return;
        }
        list.requests.push(request);
        // Relaxed: the list itself is behind the lock.
        self.count.store(list.requests.len(), Ordering::Relaxed);
        drop(list);
        // The lock orders this and `listen`: either it finds the request, or this finds it asleep.
        if self.asleep.swap(false, Ordering::Relaxed) {
            self.signal();
        }
    }

    /// Makes the descriptor readable.
    pub(super) fn signal(&self) {
        // It fails if the counter is full, and then it is readable.
        _ = rustix::io::write(&self.event, &1_u64.to_ne_bytes());
    }

    /// Swaps the list for an empty one of the owner.
    pub(super) fn take(&self, into: &mut Vec<R>) {
        debug_assert!(into.is_empty());
        if self.count.load(Ordering::Relaxed) == 0 {
            return;
        }
        let mut list = lock(&self.list);
        std::mem::swap(&mut list.requests, into);
        self.count.store(0, Ordering::Relaxed);
    }

    /// Whether the list has requests.
    pub(super) fn has_some(&self) -> bool {
        self.count.load(Ordering::Relaxed) != 0
    }

    /// Readable when the owner sleeps and a request has ended.
    pub(super) fn event(&self) -> &Arc<OwnedFd> {
        &self.event
    }

    /// Prepares for sleep on the descriptor. `true` if the list has requests already.
    pub(super) fn listen(&self) -> bool {
        // What signalled before has been seen, or is in the list.
        _ = rustix::io::read(&self.event, &mut [0; 8]);
        self.asleep.store(true, Ordering::Relaxed);
        !lock(&self.list).requests.is_empty()
    }

    /// Drops what will still arrive.
    pub(super) fn abandon(&self) {
        let mut list = lock(&self.list);
        list.abandoned = true;
        list.requests.clear();
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
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    fn is_readable(ended: &EndedRequests<u32>) -> bool {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut [PollFd::new(&ended.event, PollFlags::IN)], Some(&now)).unwrap() == 1
    }

    #[test]
    fn only_a_sleeper_is_signalled() {
        let ended = EndedRequests::new(2).unwrap();
        ended.put(1);
        assert!(ended.has_some() && !is_readable(&ended));
        assert!(ended.listen(), "there is one already");
        let mut taken = Vec::new();
        ended.take(&mut taken);
        assert_eq!(taken, [1]);
        assert!(!ended.has_some() && !ended.listen() && !is_readable(&ended));
        ended.put(2);
        ended.put(3);
        assert!(is_readable(&ended));
        ended.abandon();
        ended.put(4);
        taken.clear();
        ended.take(&mut taken);
        assert!(taken.is_empty());
    }

    #[test]
    fn no_request_is_slept_over() {
        const EACH: u32 = 20_000;
        let ended = Arc::new(EndedRequests::new(8).unwrap());
        std::thread::scope(|scope| {
            for thread in 0..2 {
                let ended = &ended;
                scope.spawn(move || (0..EACH).for_each(|number| ended.put(number * 2 + thread)));
            }
            let (mut seen, mut taken) = (vec![false; EACH as usize * 2], Vec::new());
            let mut left = seen.len();
            while left > 0 {
                if !ended.listen() {
                    poll(&mut [PollFd::new(&ended.event, PollFlags::IN)], None).unwrap();
                }
                ended.take(&mut taken);
                for number in taken.drain(..) {
                    assert!(!std::mem::replace(&mut seen[number as usize], true), "{number} came twice");
                    left -= 1;
                }
            }
        });
    }

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
