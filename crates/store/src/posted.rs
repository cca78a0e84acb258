//! What other threads post to a queue: a list and an eventfd.
use crate::event::{clear, eventfd, signal, wait};
use crate::lock::lock;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// Items `T` for one queue, which its owner takes.
#[derive(Debug)]
pub(crate) struct Posted<T> {
    list: Mutex<List<T>>,
    /// Length of the list, for an owner that polls.
    count: AtomicUsize,
    /// The owner sleeps, or is about to.
    asleep: AtomicBool,
    /// Readable when the owner sleeps and there is an item.
    pub(crate) event: Arc<OwnedFd>,
}

#[derive(Debug)]
struct List<T> {
    items: Vec<T>,
    /// Nobody will take them any more.
    abandoned: bool,
}

impl<T> Posted<T> {
    /// An empty list, which allocates only for more than `most` items.
    ///
    /// # Errors
    /// The host refuses a descriptor.
    pub(crate) fn new(most: usize) -> io::Result<Self> {
        Ok(Self {
            list: Mutex::new(List { items: Vec::with_capacity(most), abandoned: false }),
            count: AtomicUsize::new(0),
            asleep: AtomicBool::new(false),
            event: eventfd()?,
        })
    }

    /// Adds an item. Called by any thread.
    pub(crate) fn put(&self, item: T) {
        let mut list = lock(&self.list);
        if list.abandoned {
            return;
        }
        list.items.push(item);
        // Relaxed: the list itself is behind the lock.
        self.count.store(list.items.len(), Ordering::Relaxed);
        drop(list);
        // The lock orders this and `listen`: either it finds the item, or this finds it asleep.
        if self.asleep.swap(false, Ordering::Relaxed) {
            self.signal();
        }
    }

    /// Makes the descriptor readable.
    pub(crate) fn signal(&self) {
        signal(&self.event);
    }

    /// Takes the list.
    pub(crate) fn take(&self, into: &mut impl Extend<T>) {
        if self.has_some() {
            let mut list = lock(&self.list);
            into.extend(list.items.drain(..));
            self.count.store(0, Ordering::Relaxed);
        }
    }

    /// Whether the list has items.
    pub(crate) fn has_some(&self) -> bool {
        self.count.load(Ordering::Relaxed) != 0
    }

    /// Prepares for sleep on the descriptor. `true` if the list has items already.
    pub(crate) fn listen(&self) -> bool {
        // What signalled before has been seen, or is in the list.
        clear(&self.event);
        self.asleep.store(true, Ordering::Relaxed);
        !lock(&self.list).items.is_empty()
    }

    /// Sleeps until the descriptor is readable.
    pub(crate) fn sleep(&self) -> io::Result<()> {
        wait(&self.event)
    }

    /// Drops what is there and what will still arrive.
    #[cfg(any(feature = "rbd", test))]
    pub(crate) fn abandon(&self) {
        let mut list = lock(&self.list);
        list.abandoned = true;
        list.items.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    fn is_readable(posted: &Posted<u32>) -> bool {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut [PollFd::new(&posted.event, PollFlags::IN)], Some(&now)).unwrap() == 1
    }

    #[test]
    fn only_a_sleeper_is_signalled() {
        let posted = Posted::new(2).unwrap();
        posted.put(1);
        assert!(posted.has_some() && !is_readable(&posted));
        assert!(posted.listen(), "there is one already");
        let mut taken = Vec::new();
        posted.take(&mut taken);
        assert_eq!(taken, [1]);
        assert!(!posted.has_some() && !posted.listen() && !is_readable(&posted));
        posted.put(2);
        posted.put(3);
        assert!(is_readable(&posted));
        posted.abandon();
        posted.put(4);
        taken.clear();
        posted.take(&mut taken);
        assert!(taken.is_empty());
    }

    #[test]
    fn no_request_is_slept_over() {
        const EACH: u32 = 20_000;
        let posted = Arc::new(Posted::new(8).unwrap());
        std::thread::scope(|scope| {
            for thread in 0..2 {
                let posted = &posted;
                scope.spawn(move || (0..EACH).for_each(|number| posted.put(number * 2 + thread)));
            }
            let (mut seen, mut taken) = (vec![false; EACH as usize * 2], Vec::new());
            let mut left = seen.len();
            while left > 0 {
                if !posted.listen() {
                    poll(&mut [PollFd::new(&posted.event, PollFlags::IN)], None).unwrap();
                }
                posted.take(&mut taken);
                for number in taken.drain(..) {
                    assert!(!std::mem::replace(&mut seen[number as usize], true), "{number} came twice");
                    left -= 1;
                }
            }
        });
    }
}
