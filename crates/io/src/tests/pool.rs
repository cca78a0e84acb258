//! Pools of threads, and what they keep apart.
use super::*;
use crate::{DeviceThreads, IoPool};
use paravane_test_support::wait_until;
use std::sync::atomic::AtomicBool;
use std::sync::{Condvar, Mutex};

/// Is told of panics, and of used buffers, which it may hold up.
#[derive(Default)]
struct Told {
    panics: Mutex<Vec<(u16, String)>>,
    blocks: AtomicBool,
    unblocked: Mutex<u64>,
    change: Condvar,
}

impl QueueEvents for Told {
    fn used_buffer(&self, _queue: u16) {
        if self.blocks.load(Ordering::Relaxed) {
            let before = self.unblocked.lock().unwrap();
            let count = *before;
            let waited = self.change.wait_timeout_while(before, patience(), |now| *now == count).unwrap();
            assert!(!waited.1.timed_out(), "nobody unblocks it");
        }
    }

    fn kicked(&self, _queue: u16, _count: u64) {}

    fn failed(&self, queue: u16, error: &ServeError) {
        panic!("queue {queue}: {error}");
    }

    fn panicked(&self, queue: u16, message: &str) {
        self.panics.lock().unwrap().push((queue, message.to_owned()));
    }
}

impl Told {
    fn unblock(&self) {
        *self.unblocked.lock().unwrap() += 1;
        self.change.notify_all();
    }
}

/// A queue of a device of a pool.
fn on(
    threads: &DeviceThreads,
    number: u16,
    handler: impl QueueHandler + 'static,
    events: &Arc<Told>,
) -> (Box<HostQueue>, Arc<HostNotifier>) {
    let (mut queue, notifier) = queue_with(threads.key(number), handler);
    queue.tell(Arc::clone(events) as _);
    (queue, notifier)
}

/// Panics when it is told to.
struct Explosive(Arc<AtomicBool>);

impl QueueHandler for Explosive {
    fn serve(&mut self, _queue: &mut MappedQueue) -> Result<Served, ServeError> {
        assert!(!self.0.load(Ordering::Relaxed), "the handler has blown");
        Ok(Served::default())
    }

    fn drain(&mut self, _queue: &mut MappedQueue, _complete: bool) -> Served {
        Served::default()
    }
}

/// Interrupts with each batch.
struct Signals(Fed);

impl QueueHandler for Signals {
    fn serve(&mut self, queue: &mut MappedQueue) -> Result<Served, ServeError> {
        let served = QueueHandler::serve(&mut self.0, queue)?;
        Ok(Served { interrupt: served.taken > 0, ..served })
    }

    fn drain(&mut self, _queue: &mut MappedQueue, _complete: bool) -> Served {
        Served::default()
    }
}

#[test]
fn queues_of_a_shared_pool_spread_over_its_threads() {
    let pool = Arc::new(IoPool::shared(3, Duration::ZERO).unwrap());
    let devices: Vec<_> = (0..6).map(|_| pool.device(|| ())).collect();
    let events = Arc::default();
    for device in &devices {
        assert!(device.put_on(on(device, 0, Fed::default(), &events).0).is_ok());
    }
    let mut ids: Vec<_> = devices.iter().flat_map(|device| device.ids(0..1)).collect();
    ids.sort_unstable();
    let mut expected: Vec<_> = pool.ids().into_iter().flat_map(|id| [id, id]).collect();
    expected.sort_unstable();
    assert_eq!(ids, expected);
    for device in &devices {
        device.take_off(device.key(0)).unwrap().stop(true);
        assert!(device.take_off(device.key(0)).is_none() && device.ids(0..1).is_empty());
    }
}

#[test]
fn a_device_with_its_own_threads_keeps_them() {
    let pool = Arc::new(IoPool::own(2, Duration::ZERO, "d").unwrap());
    let device = pool.device(|| ());
    assert_eq!(device.ids(0..0), pool.ids());
}

/// Has work without end, and notes whose turn it was.
struct Turns {
    number: u16,
    turns: Arc<Mutex<Vec<u16>>>,
}

impl QueueHandler for Turns {
    fn serve(&mut self, _queue: &mut MappedQueue) -> Result<Served, ServeError> {
        self.turns.lock().unwrap().push(self.number);
        Ok(Served { taken: 1, completed: 1, ..Served::default() })
    }

    fn drain(&mut self, _queue: &mut MappedQueue, _complete: bool) -> Served {
        Served::default()
    }
}

#[test]
fn busy_queues_of_a_thread_take_turns() {
    // Nobody takes the queues of its thread while that waits for a CPU.
    let pool = Arc::new(IoPool::own(1, Duration::ZERO, "d").unwrap());
    let device = pool.device(|| ());
    let (events, turns) = (Arc::default(), Arc::new(Mutex::new(Vec::new())));
    for number in 0..3 {
        let handler = Turns { number, turns: Arc::clone(&turns) };
        assert!(device.put_on(on(&device, number, handler, &events).0).is_ok());
    }
    wait_until("all have turns", || {
        let turns = turns.lock().unwrap();
        (0..3).all(|number| turns.iter().filter(|turn| **turn == number).count() > 1000)
    });
    let mut turns = turns.lock().unwrap().clone();
    for number in 0..3 {
        device.take_off(device.key(number)).unwrap().stop(true);
    }
    let start = turns.iter().position(|turn| *turn == 2).unwrap();
    // A queue may be served several times a turn, for as long as that lasts.
    turns.drain(..start);
    turns.dedup();
    assert!(turns.len() > 3, "{turns:?}");
    let unfair = turns.chunks_exact(3).find(|three| {
        let mut three = three.to_vec();
        three.sort_unstable();
        three != [0, 1, 2]
    });
    assert_eq!(unfair, None);
}

#[test]
fn two_busy_queues_leave_each_other() {
    let pool = Arc::new(IoPool::shared(2, Duration::ZERO).unwrap());
    // Both queues of one device would follow it to a thread of its own, if the host is short of memory.
    let devices = [0; 2].map(|_| pool.device(|| ()));
    let (events, served) = (Arc::default(), [0; 2].map(|_| Arc::new(AtomicU64::new(0))));
    for (device, served) in devices.iter().zip(&served) {
        let (queue, _) = on(device, 0, Busy { served: Arc::clone(served) }, &events);
        assert!(device.put_on(queue).is_ok());
        let _ = pool.shared.move_to(device.key(0), 0);
    }
    wait_until("the moves", || devices[0].ids(0..1) != devices[1].ids(0..1));
    let before = served.each_ref().map(|served| served.load(Ordering::Relaxed));
    wait_until("both are served", || {
        served.iter().zip(before).all(|(served, before)| served.load(Ordering::Relaxed) > before)
    });
    for device in &devices {
        device.take_off(device.key(0)).unwrap().stop(true);
    }
}

#[test]
fn a_queue_that_moves_is_taken_off_all_the_same() {
    let pool = Arc::new(IoPool::shared(2, Duration::ZERO).unwrap());
    let device = pool.device(|| ());
    let (key, events, ended) = (device.key(0), Arc::default(), Arc::new(AtomicBool::new(false)));
    let mover = {
        let (pool, ended) = (Arc::clone(&pool), Arc::clone(&ended));
        std::thread::spawn(move || {
            let mut to = 0;
            while !ended.load(Ordering::Relaxed) {
                to = 1 - to;
                let _ = pool.shared.move_to(key, to);
            }
        })
    };
    let fed = Fed::default();
    let (mut queue, notifier) = on(&device, 0, fed.clone(), &events);
    for _ in 0..500 {
        assert!(device.put_on(queue).is_ok());
        fed.serve(&notifier);
        queue = device.take_off(key).expect("the queue, wherever it was");
    }
    ended.store(true, Ordering::Relaxed);
    mover.join().unwrap();
    queue.stop(true);
}

#[test]
fn a_panic_ends_its_queue_and_no_other_on_its_thread() {
    let pool = Arc::new(IoPool::shared(1, Duration::ZERO).unwrap());
    let (bad, good) = (pool.device(|| ()), pool.device(|| ()));
    let (told, quiet, lit) = (Arc::<Told>::default(), Arc::default(), Arc::new(AtomicBool::new(false)));
    let (queue, fuse) = on(&bad, 7, Explosive(Arc::clone(&lit)), &told);
    let fed = Fed::default();
    let (other, notifier) = on(&good, 0, fed.clone(), &quiet);
    assert!(bad.put_on(queue).is_ok() && good.put_on(other).is_ok());
    fed.serve(&notifier);
    lit.store(true, Ordering::Relaxed);
    fuse.kick();
    wait_until("the panic", || !told.panics.lock().unwrap().is_empty());
    assert_eq!(*told.panics.lock().unwrap(), [(7, "the handler has blown".to_owned())]);
    assert!(bad.take_off(bad.key(7)).is_none());
    for _ in 0..100 {
        fed.serve(&notifier);
    }
    assert!(quiet.panics.lock().unwrap().is_empty());
    good.take_off(good.key(0)).unwrap().stop(true);
}

#[test]
fn a_thread_that_a_client_blocks_is_unblocked_for_the_others() {
    let pool = Arc::new(IoPool::shared(1, Duration::ZERO).unwrap());
    let (told, quiet) = (Arc::<Told>::default(), Arc::default());
    let unblock = Arc::clone(&told);
    let (hostile, good) = (pool.device(move || unblock.unblock()), pool.device(|| ()));
    let (blocking, fed) = (Fed::default(), Fed::default());
    let (queue, kick) = on(&hostile, 0, Signals(blocking.clone()), &told);
    let (other, notifier) = on(&good, 0, fed.clone(), &quiet);
    assert!(hostile.put_on(queue).is_ok() && good.put_on(other).is_ok());
    told.blocks.store(true, Ordering::Relaxed);
    for _ in 0..5 {
        blocking.serve(&kick);
        fed.serve(&notifier);
    }
    // The last one may still be blocked: another thread has served `good` meanwhile.
    wait_until("the last unblocking", || *told.unblocked.lock().unwrap() >= 5);
    told.blocks.store(false, Ordering::Relaxed);
    for device in [&hostile, &good] {
        device.take_off(device.key(0)).unwrap().stop(true);
    }
}

/// The watcher sleeps between; each time the first work wakes it.
#[test]
fn a_blocked_thread_is_found_after_an_idle_time() {
    let pool = Arc::new(IoPool::shared(1, Duration::ZERO).unwrap());
    let told = Arc::<Told>::default();
    let unblock = Arc::clone(&told);
    let device = pool.device(move || unblock.unblock());
    let fed = Fed::default();
    let (queue, kick) = on(&device, 0, Signals(fed.clone()), &told);
    assert!(device.put_on(queue).is_ok());
    // Longer than the watcher stays awake without work.
    std::thread::sleep(Duration::from_millis(1500));
    told.blocks.store(true, Ordering::Relaxed);
    fed.serve(&kick);
    wait_until("the unblocking", || *told.unblocked.lock().unwrap() > 0);
    told.blocks.store(false, Ordering::Relaxed);
    told.unblock();
    device.take_off(device.key(0)).unwrap().stop(true);
}
