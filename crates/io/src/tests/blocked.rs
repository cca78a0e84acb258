//! Threads that are blocked by a client's memory, and those that take over from them.
use super::*;
use crate::{DeviceThreads, IoPool};
use paravane_test_support::wait_until;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Condvar, Mutex};

/// Blocks those who pass while it is closed. Nothing unblocks them, as in a page fault.
#[derive(Default)]
struct Barrier {
    is_closed: Mutex<bool>,
    change: Condvar,
    /// Those whom it blocks.
    blocked: AtomicUsize,
}

impl Barrier {
    fn pass(&self) {
        self.blocked.fetch_add(1, Ordering::Relaxed);
        let closed = self.is_closed.lock().unwrap();
        drop(self.change.wait_while(closed, |closed| *closed).unwrap());
        self.blocked.fetch_sub(1, Ordering::Relaxed);
    }

    fn set(&self, closed: bool) {
        *self.is_closed.lock().unwrap() = closed;
        self.change.notify_all();
    }

    fn wait_for(&self, count: usize) {
        wait_until("a thread is blocked", || self.blocked.load(Ordering::Relaxed) == count);
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum After {
    Serves,
    Fails,
    Panics,
}

/// Passes a barrier to serve, and to look for work.
struct Passes {
    fed: Fed,
    barrier: Arc<Barrier>,
    looks: bool,
    after: After,
    /// Threads that are in it.
    users: Arc<AtomicUsize>,
    /// Times that it has applied new settings.
    renewed: Arc<AtomicUsize>,
}

impl Passes {
    fn new(fed: &Fed, barrier: &Arc<Barrier>) -> Self {
        let (fed, barrier) = (fed.clone(), Arc::clone(barrier));
        let (users, renewed) = (Arc::default(), Arc::default());
        Self { fed, barrier, looks: false, after: After::Serves, users, renewed }
    }

    fn used<T>(&mut self, passes: bool, work: impl FnOnce(&mut Self) -> T) -> T {
        assert_eq!(self.users.fetch_add(1, Ordering::Relaxed), 0, "two threads have the queue");
        if passes {
            self.barrier.pass();
        }
        let done = work(self);
        self.users.fetch_sub(1, Ordering::Relaxed);
        done
    }
}

impl QueueHandler for Passes {
    fn serve(&mut self, queue: &mut MappedQueue) -> Result<Served, ServeError> {
        let served = self.used(!self.looks, |this| this.fed.serve_all(queue))?;
        match self.after {
            _ if served.taken == 0 => Ok(served),
            After::Serves => Ok(served),
            After::Fails => Err(std::io::Error::other("it fails").into()),
            After::Panics => panic!("it panics"),
        }
    }

    fn rest(&mut self, arm: bool) -> Rest {
        match arm {
            true => Rest::Ask { kicks: true },
            false => self.used(self.looks, |this| this.fed.rest(false)),
        }
    }

    fn renew(&mut self) -> std::io::Result<()> {
        self.renewed.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn drain(&mut self, _queue: &mut MappedQueue, _complete: bool) -> Served {
        Served::default()
    }
}

impl Fed {
    fn serve_all(&mut self, queue: &mut MappedQueue) -> Result<Served, ServeError> {
        QueueHandler::serve(self, queue)
    }
}

/// Counts failures.
#[derive(Default)]
struct Ends(AtomicUsize);

impl QueueEvents for Ends {
    fn used_buffer(&self, _queue: u16) {}

    fn kicked(&self, _queue: u16, _count: u64) {}

    fn failed(&self, _queue: u16, _error: &ServeError) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// A pool of one thread, a device whose queue 0 passes the barrier, and another one.
struct Scene {
    bad: DeviceThreads,
    good: DeviceThreads,
    barrier: Arc<Barrier>,
    fed: Fed,
    kick: Arc<HostNotifier>,
    neighbour: Fed,
    neighbour_kick: Arc<HostNotifier>,
    ends: Arc<Ends>,
    renewed: Arc<AtomicUsize>,
    pool: Arc<IoPool>,
}

impl Scene {
    fn new(longest_poll: Duration, change: impl FnOnce(&mut Passes)) -> Self {
        let pool = Arc::new(IoPool::shared(1, longest_poll).unwrap());
        let (bad, good) = (pool.device(|| ()), pool.device(|| ()));
        let (barrier, fed, neighbour, ends) =
            (Arc::default(), Fed::default(), Fed::default(), Arc::<Ends>::default());
        let mut handler = Passes::new(&fed, &barrier);
        change(&mut handler);
        let renewed = Arc::clone(&handler.renewed);
        let (mut queue, kick) = queue_with(bad.key(0), handler);
        queue.tell(Arc::clone(&ends) as _);
        let (other, neighbour_kick) = queue_with(good.key(0), neighbour.clone());
        assert!(bad.put_on(queue).is_ok() && good.put_on(other).is_ok());
        neighbour.serve(&neighbour_kick);
        Self { bad, good, barrier, fed, kick, neighbour, neighbour_kick, ends, renewed, pool }
    }

    /// Has the thread blocked that serves the bad device.
    fn block(&self) {
        self.barrier.set(true);
        self.fed.fed.fetch_add(1, Ordering::Relaxed);
        self.kick.kick();
        self.barrier.wait_for(1);
    }

    fn neighbour_is_served(&self) {
        (0..100).for_each(|_| self.neighbour.serve(&self.neighbour_kick));
    }

    /// Changes settings of the bad device.
    fn is_renewed(&self) {
        let before = self.renewed.load(Ordering::Relaxed);
        self.bad.renew();
        wait_until("it has new settings", || self.renewed.load(Ordering::Relaxed) > before);
    }

    fn end(self) {
        for device in [&self.bad, &self.good] {
            device.take_off(device.key(0)).unwrap().stop(true);
        }
    }
}

#[test]
fn a_blocked_thread_leaves_the_queues_of_others_to_another_one() {
    let scene = Scene::new(Duration::ZERO, |_| ());
    for _ in 0..3 {
        let before = scene.pool.ids();
        scene.block();
        scene.neighbour_is_served();
        assert_eq!(scene.barrier.blocked.load(Ordering::Relaxed), 1, "it is blocked on");
        assert_ne!(scene.pool.ids(), before, "another thread has the loop");
        let (count, renewed) =
            (scene.fed.served.load(Ordering::Relaxed), scene.renewed.load(Ordering::Relaxed));
        // When it is back.
        scene.bad.renew();
        scene.barrier.set(false);
        scene.fed.wait(count + 1);
        wait_until("it has new settings", || scene.renewed.load(Ordering::Relaxed) > renewed);
        scene.fed.serve(&scene.kick);
    }
    scene.end();
}

#[test]
fn a_thread_that_is_blocked_while_it_polls_does_so_too() {
    let scene = Scene::new(LONG, |handler| handler.looks = true);
    let start = Instant::now();
    // Polled once work has followed soon after work.
    scene.barrier.set(true);
    while scene.barrier.blocked.load(Ordering::Relaxed) == 0 {
        assert!(start.elapsed() < patience(), "it never polls");
        scene.fed.fed.fetch_add(1, Ordering::Relaxed);
        scene.kick.kick();
        std::thread::yield_now();
    }
    scene.neighbour_is_served();
    scene.barrier.set(false);
    scene.fed.serve(&scene.kick);
    scene.end();
}

/// Each queue of a client would hold up one more thread.
#[test]
fn a_device_blocks_one_thread_of_a_loop() {
    let scene = Scene::new(Duration::ZERO, |_| ());
    let kicks: Vec<_> = (1..8)
        .map(|number| {
            let handler = Passes::new(&scene.fed, &scene.barrier);
            let (queue, kick) = queue_with(scene.bad.key(number), handler);
            assert!(scene.bad.put_on(queue).is_ok());
            kick
        })
        .collect();
    scene.block();
    scene.neighbour_is_served();
    for kick in &kicks {
        scene.fed.fed.fetch_add(1, Ordering::Relaxed);
        kick.kick();
        scene.neighbour_is_served();
    }
    assert_eq!(scene.barrier.blocked.load(Ordering::Relaxed), 1);
    scene.barrier.set(false);
    wait_until("all are served on", || scene.fed.fed.load(Ordering::Relaxed) == 0);
    for number in 1..8 {
        scene.bad.take_off(scene.bad.key(number)).unwrap().stop(true);
    }
    scene.end();
}

#[test]
fn a_queue_that_blocks_is_taken_off_when_it_is_back() {
    let scene = Scene::new(Duration::ZERO, |_| ());
    scene.block();
    scene.neighbour_is_served();
    let leaving = scene.bad.begin_take_off(scene.bad.key(0)).unwrap();
    scene.neighbour_is_served();
    scene.barrier.set(false);
    let queue = leaving.wait().expect("the queue");
    assert!(scene.bad.put_on(queue).is_ok());
    scene.fed.serve(&scene.kick);
    scene.end();
}

#[test]
fn tasks_of_a_device_keep_their_order_and_delay_no_other_ones() {
    let scene = Scene::new(Duration::ZERO, |_| ());
    let order = Arc::new(Mutex::new(Vec::new()));
    scene.barrier.set(true);
    for number in 0..3 {
        let (order, barrier) = (Arc::clone(&order), Arc::clone(&scene.barrier));
        scene.bad.tasks(0).run(move || {
            barrier.pass();
            order.lock().unwrap().push(number);
        });
    }
    scene.barrier.wait_for(1);
    scene.good.finish_tasks(0);
    scene.neighbour_is_served();
    assert_eq!(scene.barrier.blocked.load(Ordering::Relaxed), 1);
    scene.barrier.set(false);
    scene.bad.finish_tasks(0);
    assert_eq!(*order.lock().unwrap(), [0, 1, 2]);
    scene.end();
}

#[test]
fn a_queue_that_fails_when_its_thread_wakes_has_ended() {
    for after in [After::Fails, After::Panics] {
        let scene = Scene::new(Duration::ZERO, |handler| handler.after = after);
        scene.block();
        scene.neighbour_is_served();
        scene.barrier.set(false);
        wait_until("the failure", || scene.ends.0.load(Ordering::Relaxed) == 1);
        assert!(scene.bad.take_off(scene.bad.key(0)).is_none());
        scene.neighbour_is_served();
        scene.good.take_off(scene.good.key(0)).unwrap().stop(true);
    }
}

#[test]
fn a_pool_ends_when_its_blocked_threads_have_woken() {
    let scene = Scene::new(Duration::ZERO, |_| ());
    scene.block();
    scene.neighbour_is_served();
    let is_open = Arc::new(AtomicBool::new(false));
    let opener = {
        let (barrier, is_open) = (Arc::clone(&scene.barrier), Arc::clone(&is_open));
        std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(50));
            is_open.store(true, Ordering::Relaxed);
            barrier.set(false);
        })
    };
    drop(scene);
    assert!(is_open.load(Ordering::Relaxed), "a thread still has a queue");
    opener.join().unwrap();
}

#[test]
fn a_device_that_blocks_threads_has_one_of_its_own_for_a_while() {
    let scene = Scene::new(Duration::ZERO, |_| ());
    let (shared, device) = (&scene.pool.shared, scene.bad.key(0).device);
    scene.block();
    assert!(shared.isolation.begin(device).unwrap());
    assert!(!shared.isolation.begin(device).unwrap(), "its queues move already");
    let mover = {
        let shared = Arc::clone(shared);
        std::thread::spawn(move || shared.isolate(device))
    };
    scene.neighbour_is_served();
    scene.barrier.set(false);
    mover.join().unwrap();
    let shares = || scene.bad.ids(0..1) == scene.good.ids(0..1);
    assert!(!shares());
    scene.fed.serve(&scene.kick);
    scene.is_renewed();
    // It blocks its own thread, and no spare one.
    let extra = shared.spares.extra();
    scene.block();
    wait_until("the watcher", || shared.isolation.look(Duration::MAX).0 == [device]);
    scene.neighbour_is_served();
    assert_eq!(shared.spares.extra(), extra);
    scene.barrier.set(false);
    scene.fed.serve(&scene.kick);
    // A new queue goes there, too.
    let (queue, _) = queue_with(scene.bad.key(1), Fed::default());
    assert!(scene.bad.put_on(queue).is_ok());
    assert_eq!(scene.bad.ids(1..2), scene.bad.ids(0..1));
    wait_until("it is quiet", || shared.isolation.look(Duration::ZERO).1 == [device]);
    shared.rejoin(device);
    assert!(shares() && scene.bad.ids(1..2) == scene.bad.ids(0..1));
    assert_eq!(shared.isolation.count(), 0);
    scene.fed.serve(&scene.kick);
    scene.is_renewed();
    scene.bad.take_off(scene.bad.key(1)).unwrap().stop(true);
    scene.end();
}

/// More clients than there are spare threads: the rest waits, and nothing is lost.
#[test]
fn blocked_threads_have_a_limit() {
    let pool = Arc::new(IoPool::shared(1, Duration::ZERO).unwrap());
    let (barrier, most) = (Arc::<Barrier>::default(), crate::spares::MOST);
    let feds: Vec<_> = (0..most + 5).map(|_| Fed::default()).collect();
    let devices: Vec<_> = feds
        .iter()
        .map(|fed| {
            let device = pool.device(|| ());
            let (queue, kick) = queue_with(device.key(0), Passes::new(fed, &barrier));
            assert!(device.put_on(queue).is_ok());
            (device, kick)
        })
        .collect();
    barrier.set(true);
    for ((_, kick), fed) in devices.iter().zip(&feds) {
        fed.fed.fetch_add(1, Ordering::Relaxed);
        kick.kick();
    }
    // Those who have lost the loop, and the one that has it.
    barrier.wait_for(most + 1);
    assert_eq!(pool.shared.spares.extra(), most);
    barrier.set(false);
    for ((device, _), fed) in devices.iter().zip(&feds) {
        fed.wait(1);
        device.take_off(device.key(0)).unwrap().stop(true);
    }
    wait_until("surplus threads end", || pool.shared.spares.extra() <= 2);
}
