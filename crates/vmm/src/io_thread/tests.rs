//! Queues whose handlers do nothing but count.
use super::{Crew, HostQueue, IoThread, QueueKey};
use crate::report::IoThreadResult;
use crate::tally::Tally;
use paravane_device::{LiveQueue, QueueHandler, ServeError, Served};
use paravane_dma::{Backing, Memory, Region, RegionConfig};
use paravane_notify::{HostNotifier, InterruptSink, Interrupts, NoIoEventFds};
use paravane_spec::feature;
use paravane_spec::queue::QueueAddresses;
use paravane_transport::mmio::Mmio;
use paravane_transport::{DeviceDescription, Transport};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

struct NoLine;

impl InterruptSink for NoLine {
    fn raise(&self) {}
}

/// Always has something to do.
struct Busy {
    served: Arc<AtomicU64>,
}

impl QueueHandler for Busy {
    fn serve(&mut self, _queue: &mut LiveQueue) -> Result<Served, ServeError> {
        self.served.fetch_add(1, Ordering::Relaxed);
        Ok(Served { taken: 1, ..Served::default() })
    }

    fn drain(&mut self, _queue: &mut LiveQueue, _complete: bool) -> Served {
        Served::default()
    }
}

/// Has as much to do as it is fed.
#[derive(Clone, Default)]
struct Fed {
    fed: Arc<AtomicU64>,
    served: Arc<AtomicU64>,
}

impl Fed {
    /// Feeds it one, and says whether it is served by itself.
    fn is_served_without_a_kick(&self) -> bool {
        let before = self.served.load(Ordering::Relaxed);
        self.fed.fetch_add(1, Ordering::Relaxed);
        let start = Instant::now();
        while start.elapsed() < Duration::from_millis(2) {
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
            assert!(start.elapsed() < PATIENCE, "{count} of it does not come");
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
    fn serve(&mut self, _queue: &mut LiveQueue) -> Result<Served, ServeError> {
        let taken = self.fed.swap(0, Ordering::Relaxed);
        self.served.fetch_add(taken, Ordering::Relaxed);
        Ok(Served { taken: taken as u32, ..Served::default() })
    }

    fn listen(&mut self) -> bool {
        self.has_news() == Some(true)
    }

    fn has_news(&mut self) -> Option<bool> {
        Some(self.fed.load(Ordering::Relaxed) > 0)
    }

    fn drain(&mut self, _queue: &mut LiveQueue, _complete: bool) -> Served {
        Served::default()
    }
}

/// Who waits longer has lost something.
const PATIENCE: Duration = Duration::from_secs(20);

/// A queue in memory of its own, and where it is kicked.
fn queue(number: u16, handler: impl QueueHandler + 'static) -> (Box<HostQueue>, Arc<HostNotifier>) {
    let config = RegionConfig { gpa: 0, size: 1 << 20, backing: Backing::Pages, writable: true };
    let memory = Memory::new(vec![Region::new(config).unwrap()]).unwrap();
    let addresses = QueueAddresses { size: 4, desc: 0x1000, driver: 0x2000, device: 0x3000 };
    let live = LiveQueue::start(addresses, 4, feature::VERSION_1, memory.handle()).unwrap();
    let notifier = Arc::new(HostNotifier::new(Arc::new(NoIoEventFds), 0, None).unwrap());
    let interrupts = Arc::new(Interrupts::wired(Arc::new(NoLine)));
    let description = DeviceDescription { device_id: 4, features: 0, queue_sizes: vec![4] };
    let transport = Mmio::new(description, Arc::clone(&interrupts));
    let key = QueueKey { device: 0, queue: number };
    let (handler, transport) =
        (Box::new(handler), Arc::new(Mutex::new(Box::new(transport) as Box<dyn Transport>)));
    (
        Box::new(HostQueue::new(
            key,
            live,
            handler,
            Arc::clone(&notifier),
            interrupts,
            transport,
            Arc::default(),
        )),
        notifier,
    )
}

/// One thread that polls for so long.
fn thread(longest_poll: Duration) -> (IoThread, Arc<Tally>) {
    let tally = Arc::new(Tally::default());
    (IoThread::spawn(0, longest_poll, Arc::clone(&tally)).unwrap(), tally)
}

/// Without the signal at `put_on` a queue that is moved in the middle of its work waits for a kick for ever.
#[test]
fn work_that_was_begun_goes_on_elsewhere() {
    let tally = Arc::new(Tally::default());
    let crew = Crew::spawn(0..2, true, Duration::ZERO, &tally).unwrap();
    let served = Arc::new(AtomicU64::new(0));
    let (mut moving, _) = queue(0, Busy { served: Arc::clone(&served) });
    let key = moving.key;
    for moves in 0..1000 {
        let before = served.load(Ordering::Relaxed);
        let thread = crew.thread(moves % 2).unwrap();
        assert!(thread.put_on(moving).is_ok());
        let start = Instant::now();
        while served.load(Ordering::Relaxed) == before {
            assert!(start.elapsed() < PATIENCE, "it stands still after {moves} moves");
            std::thread::yield_now();
        }
        moving = thread.take_off(key).unwrap();
        assert!(thread.take_off(key).is_none(), "it is nobody's now");
    }
    assert_eq!(tally.kicks(), 0, "none of the signals was a kick");
    moving.stop(true, &tally);
}

#[test]
fn who_polls_finds_work_without_a_kick() {
    let (thread, _tally) = thread(Duration::from_millis(10));
    let fed = Fed::default();
    let (queue, notifier) = queue(0, fed.clone());
    assert!(thread.put_on(queue).is_ok());
    let start = Instant::now();
    while !fed.is_served_without_a_kick() {
        // Asleep, or not yet awake long enough for it: the next one, soon after this one, makes it poll for longer.
        assert!(start.elapsed() < PATIENCE, "it never polls");
        notifier.kick();
        fed.wait(fed.served.load(Ordering::Relaxed) + fed.fed.load(Ordering::Relaxed));
    }
    // It may have been awake for another reason, or have found it at first sight.
    let IoThreadResult { mut polled_ns, mut fruitful_polls, .. } = thread.figures();
    while polled_ns == 0 || fruitful_polls == 0 {
        assert!(start.elapsed() < PATIENCE, "{:?}", thread.figures());
        fed.serve(&notifier);
        IoThreadResult { polled_ns, fruitful_polls, .. } = thread.figures();
    }
}

#[test]
fn where_polling_is_off_nothing_is_polled() {
    let (thread, tally) = thread(Duration::ZERO);
    let fed = Fed::default();
    let (queue, notifier) = queue(0, fed.clone());
    assert!(thread.put_on(queue).is_ok());
    (0..1000).for_each(|_| fed.serve(&notifier));
    assert_eq!(IoThreadResult { turns: 0, ..thread.figures() }, IoThreadResult::default());
    assert!(tally.kicks() > 0);
}

/// Waits until polling costs nothing while `during` happens.
fn costs_nothing(thread: &IoThread, during: impl Fn()) {
    let start = Instant::now();
    loop {
        let polls = || IoThreadResult { turns: 0, ..thread.figures() };
        let before = polls();
        during();
        let now = polls();
        if now == before {
            return;
        }
        assert!(start.elapsed() < PATIENCE, "it polls on and on: {now:?}");
    }
}

#[test]
fn an_idle_queue_is_not_polled() {
    let (thread, _tally) = thread(Duration::from_millis(5));
    let fed = Fed::default();
    let (queue, notifier) = queue(0, fed.clone());
    assert!(thread.put_on(queue).is_ok());
    (0..1000).for_each(|_| fed.serve(&notifier));
    costs_nothing(&thread, || std::thread::sleep(Duration::from_millis(100)));
}

#[test]
fn a_queue_with_rare_work_is_not_polled() {
    let (thread, _tally) = thread(Duration::from_micros(500));
    let fed = Fed::default();
    let (queue, notifier) = queue(0, fed.clone());
    assert!(thread.put_on(queue).is_ok());
    (0..200).for_each(|_| fed.serve(&notifier));
    let rarely = || {
        std::thread::sleep(Duration::from_millis(2));
        fed.serve(&notifier);
    };
    costs_nothing(&thread, || (0..20).for_each(|_| rarely()));
}

#[test]
fn a_busy_queue_keeps_nobody_from_being_polled_or_kicked_or_taken_off() {
    let (thread, _tally) = thread(Duration::from_millis(10));
    let (polled, kicked) = (Fed::default(), Fed::default());
    let served = Arc::new(AtomicU64::new(0));
    let (busy, _) = queue(0, Busy { served: Arc::clone(&served) });
    let (one, one_notifier) = queue(1, polled.clone());
    let (other, other_notifier) = queue(2, kicked.clone());
    let keys = [busy.key, one.key, other.key];
    for queue in [busy, one, other] {
        assert!(thread.put_on(queue).is_ok());
    }
    let start = Instant::now();
    while !polled.is_served_without_a_kick() {
        assert!(start.elapsed() < PATIENCE, "it never polls");
        one_notifier.kick();
        polled.wait(polled.served.load(Ordering::Relaxed) + polled.fed.load(Ordering::Relaxed));
        kicked.serve(&other_notifier);
    }
    let before = served.load(Ordering::Relaxed);
    while served.load(Ordering::Relaxed) == before {
        assert!(start.elapsed() < PATIENCE, "the busy one starves");
    }
    for key in keys {
        assert!(thread.take_off(key).is_some());
    }
}
