//! Who has a value that a thread offers while it may block.
use loom::cell::UnsafeCell;
use loom::sync::Mutex;
use loom::sync::atomic::{AtomicUsize, Ordering};
use loom::thread;
use paravane_notify::Baton;
use std::sync::Arc;

/// An event loop: the checker fails if two threads use it at the same time.
struct Owned {
    turns: UnsafeCell<u32>,
    /// Queues that are with threads that it has left.
    away: Vec<u32>,
}

// SAFETY: the model is about who may use it. The checker watches the cell.
unsafe impl Send for Owned {}

impl Owned {
    fn turn(&self) {
        // SAFETY: the caller owns it, which the checker verifies.
        self.turns.with_mut(|turns| unsafe { *turns += 1 });
    }
}

/// What the threads of one event loop share.
struct Shared {
    baton: Mutex<Arc<Baton<Owned>>>,
    /// Queues that come back by message.
    back: Mutex<Vec<u32>>,
    /// Users of each queue.
    users: [AtomicUsize; 2],
    owners: AtomicUsize,
}

impl Shared {
    /// Serves queue `number` in up to `turns` turns. Returns the loop, unless another thread has it.
    fn serve(&self, mut owned: Box<Owned>, number: u32, turns: u32) -> Option<Box<Owned>> {
        let baton = Arc::new(Baton::default());
        *self.baton.lock().unwrap() = Arc::clone(&baton);
        for _ in 0..turns {
            owned.turn();
            // Queues that are away are not served.
            if owned.away.contains(&number) {
                continue;
            }
            baton.offer(owned);
            let user = &self.users[number as usize];
            assert_eq!(user.fetch_add(1, Ordering::Relaxed), 0, "two threads serve a queue");
            thread::yield_now();
            user.fetch_sub(1, Ordering::Relaxed);
            let Some(back) = baton.take() else {
                self.back.lock().unwrap().push(number);
                return None;
            };
            owned = back;
        }
        Some(owned)
    }

    /// Ends the time of a thread with the loop. It looks for what has come back.
    fn end(&self, owned: Option<Box<Owned>>) {
        if let Some(owned) = owned {
            assert_eq!(self.owners.fetch_add(1, Ordering::Relaxed), 0, "two threads have the loop");
            owned.turn();
            let back = self.back.lock().unwrap();
            assert!(back.iter().all(|number| owned.away.contains(number)), "a queue is back twice");
        }
    }
}

/// A watcher takes the loop from a thread at any moment of its turns, and another thread runs on.
///
/// One thread has the loop at any time, and one thread each queue, whenever the first one wakes.
#[test]
fn a_loop_and_each_queue_have_one_owner() {
    loom::model(|| {
        let shared = Arc::new(Shared {
            baton: Mutex::new(Arc::default()),
            back: Mutex::new(Vec::new()),
            users: [AtomicUsize::new(0), AtomicUsize::new(0)],
            owners: AtomicUsize::new(0),
        });
        let first = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                let owned = Box::new(Owned { turns: UnsafeCell::new(0), away: Vec::new() });
                shared.end(shared.serve(owned, 0, 2));
            })
        };
        // The watcher, and then the spare thread.
        let baton = Arc::clone(&shared.baton.lock().unwrap());
        if let Some(mut owned) = baton.take() {
            owned.away.push(0);
            assert!(shared.serve(owned, 0, 1).map(|owned| shared.serve(owned, 1, 2)).is_some_and(|owned| {
                shared.end(owned);
                true
            }));
        }
        first.join().unwrap();
        assert_eq!(shared.owners.load(Ordering::Relaxed), 1, "the loop is lost");
        assert_eq!(shared.users[0].load(Ordering::Relaxed), 0);
    });
}
