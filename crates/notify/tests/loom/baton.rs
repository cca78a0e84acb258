//! Who has a value that a thread offers while it may block: an event loop with two queues.
use loom::cell::UnsafeCell;
use loom::sync::Mutex;
use loom::sync::atomic::{AtomicUsize, Ordering};
use loom::thread;
use paravane_notify::Baton;
use std::sync::Arc;

/// What one thread at a time uses: the checker fails if two do, or one without seeing the other's work.
struct Owned(UnsafeCell<u32>);

impl Owned {
    fn new() -> Self {
        Self(UnsafeCell::new(0))
    }

    fn used(&self) {
        // SAFETY: the caller owns it, which the checker verifies.
        self.0.with_mut(|uses| unsafe { *uses += 1 });
    }
}

struct EventLoop {
    turns: Owned,
    /// Queues that are with threads that it has left.
    away: Vec<usize>,
}

/// What the threads of one event loop share.
struct Shared {
    baton: Mutex<Arc<Baton<EventLoop>>>,
    /// Queues that come back by message.
    back: Mutex<Vec<usize>>,
    queues: [Owned; 2],
    /// Threads that have ended with the loop.
    owners: AtomicUsize,
}

// SAFETY: the model is about who may use it. The checker watches the cells.
unsafe impl Send for EventLoop {}
// SAFETY: as above.
unsafe impl Sync for Shared {}
// SAFETY: as above.
unsafe impl Send for Shared {}

impl Shared {
    /// Serves these queues, one after the other. Returns the loop, unless another thread has it.
    fn serve(&self, mut event_loop: Box<EventLoop>, queues: &[usize]) -> Option<Box<EventLoop>> {
        let baton = Arc::new(Baton::default());
        *self.baton.lock().unwrap() = Arc::clone(&baton);
        for &number in queues {
            event_loop.turns.used();
            for back in self.back.lock().unwrap().drain(..) {
                let at =
                    event_loop.away.iter().position(|away| *away == back).expect("a queue is back twice");
                event_loop.away.swap_remove(at);
            }
            // Queues that are away are not served.
            if event_loop.away.contains(&number) {
                continue;
            }
            baton.offer(event_loop);
            self.queues[number].used();
            let Some(back) = baton.take() else {
                self.back.lock().unwrap().push(number);
                return None;
            };
            event_loop = back;
        }
        Some(event_loop)
    }

    fn end(&self, event_loop: Option<Box<EventLoop>>) {
        if let Some(event_loop) = event_loop {
            event_loop.turns.used();
            assert_eq!(self.owners.fetch_add(1, Ordering::Relaxed), 0, "two threads have the loop");
        }
    }
}

/// A watcher takes the loop from a thread at any moment of its turns, and another thread goes on.
///
/// One thread has the loop at any time, and one thread each queue, whenever the first one wakes. A queue
/// that is back is served by the other thread.
#[test]
fn a_loop_and_each_queue_have_one_owner() {
    loom::model(|| {
        let shared = Arc::new(Shared {
            baton: Mutex::new(Arc::default()),
            back: Mutex::new(Vec::new()),
            queues: [Owned::new(), Owned::new()],
            owners: AtomicUsize::new(0),
        });
        let first = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                let event_loop = Box::new(EventLoop { turns: Owned::new(), away: Vec::new() });
                shared.end(shared.serve(event_loop, &[0, 1]));
            })
        };
        // The watcher, and then the spare thread. The first thread serves queue 0 or 1.
        let baton = Arc::clone(&shared.baton.lock().unwrap());
        if let Some(mut event_loop) = baton.take() {
            let first = event_loop.turns.0.with(|turns| {
                // SAFETY: as in `used`.
                unsafe { *turns }
            });
            event_loop.away.push(first as usize - 1);
            let event_loop = shared.serve(event_loop, &[0, 1, 0]);
            assert!(event_loop.is_some(), "nobody takes it from this thread");
            shared.end(event_loop);
        }
        first.join().unwrap();
        assert_eq!(shared.owners.load(Ordering::Relaxed), 1, "the loop is lost");
    });
}
