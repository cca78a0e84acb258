//! Queues whose handlers do nothing but count.
use crate::{ForeignKicks, HostQueue, IoThread, IoThreadFigures, Kicks, QueueEvents, QueueKey};
use paravane_device::{MappedQueue, QueueHandler, Rest, ServeError, Served};
use paravane_dma::{Backing, Memory, Region, RegionConfig};
use paravane_notify::{HostNotifier, NoIoEventFds};
use paravane_spec::feature;
use paravane_spec::queue::QueueAddresses;
use paravane_test_support::patience;
use rustix::event::{EventfdFlags, eventfd};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

mod blocked;
mod pool;
mod queue_set;

/// Counts kicks.
#[derive(Default)]
struct Counting(AtomicU64);

impl QueueEvents for Counting {
    fn used_buffer(&self, _queue: u16) {}

    fn kicked(&self, _queue: u16, count: u64) {
        self.0.fetch_add(count, Ordering::Relaxed);
    }

    fn failed(&self, queue: u16, error: &ServeError) {
        panic!("queue {queue}: {error}");
    }
}

impl Counting {
    fn kicks(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Always has something to do.
struct Busy {
    served: Arc<AtomicU64>,
}

impl QueueHandler for Busy {
    fn serve(&mut self, _queue: &mut MappedQueue) -> Result<Served, ServeError> {
        self.served.fetch_add(1, Ordering::Relaxed);
        Ok(Served { taken: 1, ..Served::default() })
    }

    fn drain(&mut self, _queue: &mut MappedQueue, _complete: bool) -> Served {
        Served::default()
    }
}

/// Has as much to do as it is fed.
#[derive(Clone, Default)]
struct Fed {
    fed: Arc<AtomicU64>,
    served: Arc<AtomicU64>,
    /// Preferred batch size.
    preferred_batch: u32,
}

impl Fed {
    /// Feeds it one, and says whether it is served by itself.
    fn is_served_without_a_kick(&self) -> bool {
        let before = self.served.load(Ordering::Relaxed);
        self.fed.fetch_add(1, Ordering::Relaxed);
        let start = Instant::now();
        while start.elapsed() < LONG / 4 {
            if self.served.load(Ordering::Relaxed) > before {
                return true;
            }
            std::thread::yield_now();
        }
        false
    }

    fn wait(&self, count: u64) {
        let start = Instant::now();
        while self.served.load(Ordering::Relaxed) < count {
            assert!(start.elapsed() < patience(), "{count} of it does not come");
            std::thread::yield_now();
        }
    }

    /// Feeds it one, kicks, and waits until it is served.
    fn serve(&self, notifier: &HostNotifier) {
        let count = self.served.load(Ordering::Relaxed) + self.fed.fetch_add(1, Ordering::Relaxed) + 1;
        notifier.kick();
        self.wait(count);
    }
}

impl QueueHandler for Fed {
    fn serve(&mut self, _queue: &mut MappedQueue) -> Result<Served, ServeError> {
        let taken = self.fed.swap(0, Ordering::Relaxed);
        self.served.fetch_add(taken, Ordering::Relaxed);
        Ok(Served { taken: taken as u32, completed: taken as u32, ..Served::default() })
    }

    fn preferred_batch(&self, _size: u16) -> u32 {
        self.preferred_batch
    }

    fn rest(&mut self, _arm: bool) -> Rest {
        Rest::serve_if(self.fed.load(Ordering::Relaxed) > 0)
    }

    fn drain(&mut self, _queue: &mut MappedQueue, _complete: bool) -> Served {
        Served::default()
    }
}

/// A poll that outlasts a turn of everybody else on a busy machine.
const LONG: Duration = Duration::from_millis(400);

/// A queue in separate memory, kicked by `kicks`.
fn queue_of(
    number: u16,
    handler: impl QueueHandler + 'static,
    kicks: Kicks,
    events: &Arc<Counting>,
) -> Box<HostQueue> {
    keyed_queue(QueueKey { device: 0, queue: number }, handler, kicks, events)
}

/// A queue of this name, and the place of its kicks.
fn queue_with(key: QueueKey, handler: impl QueueHandler + 'static) -> (Box<HostQueue>, Arc<HostNotifier>) {
    let notifier = Arc::new(HostNotifier::new(Arc::new(NoIoEventFds), 0, None).unwrap());
    (keyed_queue(key, handler, Arc::clone(&notifier).into(), &Arc::default()), notifier)
}

fn keyed_queue(
    key: QueueKey,
    handler: impl QueueHandler + 'static,
    kicks: Kicks,
    events: &Arc<Counting>,
) -> Box<HostQueue> {
    let config = RegionConfig { gpa: 0, size: 1 << 20, backing: Backing::Pages, writable: true };
    let memory = Memory::new(vec![Region::new(config).unwrap()]).unwrap();
    let addresses = QueueAddresses { size: 4, desc: 0x1000, driver: 0x2000, device: 0x3000 };
    let live = MappedQueue::start(addresses, 4, feature::VERSION_1, memory.handle()).unwrap();
    Box::new(HostQueue::new(key, live, Box::new(handler), kicks, Arc::clone(events) as _, Arc::default()))
}

/// A queue in separate memory, and the place of its kicks.
fn queue(
    number: u16,
    handler: impl QueueHandler + 'static,
    events: &Arc<Counting>,
) -> (Box<HostQueue>, Arc<HostNotifier>) {
    let notifier = Arc::new(HostNotifier::new(Arc::new(NoIoEventFds), 0, None).unwrap());
    (queue_of(number, handler, Arc::clone(&notifier).into(), events), notifier)
}

/// One thread that polls for so long, and what counts the kicks of its queues.
fn thread(longest_poll: Duration) -> (IoThread, Arc<Counting>) {
    (IoThread::spawn("io0".into(), longest_poll).unwrap(), Arc::default())
}

/// A queue that is moved at work needs the look of `put_on`, not a kick.
#[test]
fn work_that_was_begun_goes_on_elsewhere() {
    let threads = [0, 1].map(|_| thread(Duration::ZERO).0);
    let events = Arc::default();
    let served = Arc::new(AtomicU64::new(0));
    let (mut moving, _) = queue(0, Busy { served: Arc::clone(&served) }, &events);
    let key = moving.key();
    for moves in 0..1000 {
        let before = served.load(Ordering::Relaxed);
        let thread = &threads[moves % 2];
        assert!(thread.put_on(moving).is_ok());
        let start = Instant::now();
        while served.load(Ordering::Relaxed) == before {
            assert!(start.elapsed() < patience(), "it stands still after {moves} moves");
            std::thread::yield_now();
        }
        moving = thread.take_off(key).unwrap();
        assert!(thread.take_off(key).is_none(), "the thread has given it up");
    }
    assert_eq!(events.kicks(), 0, "none of the signals was a kick");
    moving.stop(true);
}

#[test]
fn who_polls_finds_work_without_a_kick() {
    let (thread, events) = thread(LONG);
    let fed = Fed::default();
    let (queue, notifier) = queue(0, fed.clone(), &events);
    assert!(thread.put_on(queue).is_ok());
    let start = Instant::now();
    while !fed.is_served_without_a_kick() {
        // Asleep, or not yet awake long enough for it: the next one, soon after this one, makes it
        // poll for longer.
        assert!(start.elapsed() < patience(), "it never polls");
        notifier.kick();
        fed.wait(fed.served.load(Ordering::Relaxed) + fed.fed.load(Ordering::Relaxed));
    }
    // It may have been awake for another reason, or have found it at first sight.
    let IoThreadFigures { mut polled_ns, mut fruitful_polls, .. } = thread.figures();
    while polled_ns == 0 || fruitful_polls == 0 {
        assert!(start.elapsed() < patience(), "{:?}", thread.figures());
        fed.serve(&notifier);
        IoThreadFigures { polled_ns, fruitful_polls, .. } = thread.figures();
    }
}

/// Work in quick portions: each turn leaves the queue alone for microseconds.
///
/// All of it is served, the last of each stream without a kick, since its queue is polled.
#[test]
fn what_is_left_alone_for_a_while_is_not_forgotten() {
    let (thread, events) = thread(LONG);
    let fed = Fed { preferred_batch: 64, ..Fed::default() };
    let (queue, notifier) = queue(0, fed.clone(), &events);
    assert!(thread.put_on(queue).is_ok());
    let start = Instant::now();
    let (mut sum, mut by_itself) = (0, 0);
    while by_itself < 20 {
        assert!(start.elapsed() < patience(), "streams that ended without a kick: {by_itself}");
        for _ in 0..2000 {
            fed.fed.fetch_add(16, Ordering::Relaxed);
            (0..100).for_each(|_| std::hint::spin_loop());
        }
        sum += 2000 * 16;
        let end = Instant::now() + LONG / 4;
        while fed.served.load(Ordering::Relaxed) < sum && Instant::now() < end {
            std::thread::yield_now();
        }
        if fed.served.load(Ordering::Relaxed) == sum {
            by_itself += 1;
        } else {
            // Asleep: the next stream finds it awake.
            notifier.kick();
            fed.wait(sum);
        }
    }
    assert_eq!(fed.served.load(Ordering::Relaxed), sum);
}

#[test]
fn where_polling_is_off_nothing_is_polled() {
    let (thread, events) = thread(Duration::ZERO);
    let fed = Fed::default();
    let (queue, notifier) = queue(0, fed.clone(), &events);
    assert!(thread.put_on(queue).is_ok());
    (0..1000).for_each(|_| fed.serve(&notifier));
    assert_eq!(IoThreadFigures { turns: 0, ..thread.figures() }, IoThreadFigures::default());
    assert!(events.kicks() > 0);
}

/// Waits until polling costs nothing while `during` happens.
fn costs_nothing(thread: &IoThread, during: impl Fn()) {
    let start = Instant::now();
    loop {
        let polls = || IoThreadFigures { turns: 0, ..thread.figures() };
        let before = polls();
        during();
        let now = polls();
        if now == before {
            return;
        }
        assert!(start.elapsed() < patience(), "it polls on and on: {now:?}");
    }
}

#[test]
fn an_idle_queue_is_not_polled() {
    let (thread, events) = thread(Duration::from_millis(5));
    let fed = Fed::default();
    let (queue, notifier) = queue(0, fed.clone(), &events);
    assert!(thread.put_on(queue).is_ok());
    (0..1000).for_each(|_| fed.serve(&notifier));
    costs_nothing(&thread, || std::thread::sleep(Duration::from_millis(100)));
}

#[test]
fn a_queue_with_rare_work_is_not_polled() {
    let (thread, events) = thread(Duration::from_micros(500));
    let fed = Fed::default();
    let (queue, notifier) = queue(0, fed.clone(), &events);
    assert!(thread.put_on(queue).is_ok());
    (0..200).for_each(|_| fed.serve(&notifier));
    let rarely = || {
        std::thread::sleep(Duration::from_millis(2));
        fed.serve(&notifier);
    };
    costs_nothing(&thread, || (0..20).for_each(|_| rarely()));
}

#[test]
fn a_busy_queue_keeps_no_other_from_being_polled_or_kicked_or_taken_off() {
    let (thread, events) = thread(LONG);
    let (polled, kicked) = (Fed::default(), Fed::default());
    let served = Arc::new(AtomicU64::new(0));
    let (busy, _) = queue(0, Busy { served: Arc::clone(&served) }, &events);
    let (one, one_notifier) = queue(1, polled.clone(), &events);
    let (other, other_notifier) = queue(2, kicked.clone(), &events);
    let keys = [busy.key(), one.key(), other.key()];
    for queue in [busy, one, other] {
        assert!(thread.put_on(queue).is_ok());
    }
    let start = Instant::now();
    while !polled.is_served_without_a_kick() {
        assert!(start.elapsed() < patience(), "it never polls");
        one_notifier.kick();
        polled.wait(polled.served.load(Ordering::Relaxed) + polled.fed.load(Ordering::Relaxed));
        kicked.serve(&other_notifier);
    }
    let before = served.load(Ordering::Relaxed);
    while served.load(Ordering::Relaxed) == before {
        assert!(start.elapsed() < patience(), "the busy one starves");
    }
    for key in keys {
        assert!(thread.take_off(key).is_some());
    }
}

/// Another process's kicks, by a blocking descriptor that only we read.
fn foreign(kick: impl Fn(), fd: OwnedFd) -> IoThread {
    let (thread, events) = thread(Duration::ZERO);
    let fed = Fed::default();
    let kicks = Kicks::Foreign(ForeignKicks::new(fd).unwrap());
    assert!(thread.put_on(queue_of(0, fed.clone(), kicks, &events)).is_ok());
    for count in 1..20_000 {
        fed.fed.fetch_add(1, Ordering::Relaxed);
        kick();
        fed.wait(count);
    }
    assert!(events.kicks() > 0);
    thread
}

#[test]
fn an_eventfd_kicks_and_is_left_as_it_is() {
    let ours = eventfd(0, EventfdFlags::empty()).unwrap();
    let theirs = ours.try_clone().unwrap();
    let kick = || assert_eq!(rustix::io::write(&theirs, &1u64.to_ne_bytes()), Ok(8));
    drop(foreign(kick, ours));
    let flags = rustix::fs::fcntl_getfl(&theirs).unwrap();
    assert!(!flags.contains(rustix::fs::OFlags::NONBLOCK));
}

#[test]
fn a_pipe_kicks_and_does_not_fill_up() {
    // 20 000 words of 8 bytes are more than a pipe holds: one that is not emptied blocks the
    // writer.
    let (ours, theirs) = rustix::pipe::pipe().unwrap();
    foreign(|| assert_eq!(rustix::io::write(&theirs, &[1; 8]), Ok(8)), ours);
}

#[test]
fn a_pipe_whose_bytes_are_stolen_blocks_nobody() {
    let (ours, theirs) = rustix::pipe::pipe().unwrap();
    let thief = ours.try_clone().unwrap();
    rustix::fs::fcntl_setfl(&thief, rustix::fs::OFlags::empty()).unwrap();
    let (thread, events) = thread(Duration::ZERO);
    let fed = Fed::default();
    let kicks = Kicks::Foreign(ForeignKicks::new(ours).unwrap());
    let queue = queue_of(0, fed.clone(), kicks, &events);
    let key = queue.key();
    assert!(thread.put_on(queue).is_ok());
    for _ in 0..2000 {
        assert_eq!(rustix::io::write(&theirs, &[1; 8]), Ok(8));
        // Whatever of it the thread has left: without waiting, for there may be nothing.
        let mut bytes = [0; 64];
        if rustix::io::ioctl_fionread(&thief).unwrap() > 0 {
            let mut slices = [rustix::io::IoSliceMut::new(&mut bytes)];
            let _ = rustix::io::preadv2(&thief, &mut slices, u64::MAX, rustix::io::ReadWriteFlags::NOWAIT);
        }
    }
    assert!(thread.take_off(key).is_some());
}

#[test]
fn a_file_cannot_kick() {
    let file = std::fs::File::open(std::env::current_exe().unwrap()).unwrap();
    assert!(ForeignKicks::new(file.into()).is_err());
}
