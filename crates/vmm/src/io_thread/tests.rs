//! Queues whose handlers do nothing but count.
use super::{Crew, HostQueue, QueueKey};
use crate::tally::Tally;
use paravane_device::{LiveQueue, QueueHandler, ServeError, Served};
use paravane_dma::{Backing, Memory, Region, RegionConfig};
use paravane_notify::{HostNotifier, InterruptSink, Interrupts, NoIoEventFds};
use paravane_spec::feature;
use paravane_spec::queue::QueueAddresses;
use paravane_transport::DeviceDescription;
use paravane_transport::mmio::Mmio;
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

/// A queue in memory of its own, which nobody kicks.
fn queue(number: u16, handler: Box<dyn QueueHandler>) -> Box<HostQueue> {
    let config = RegionConfig { gpa: 0, size: 1 << 20, backing: Backing::Pages, writable: true };
    let memory = Memory::new(vec![Region::new(config).unwrap()]).unwrap();
    let addresses = QueueAddresses { size: 4, desc: 0x1000, driver: 0x2000, device: 0x3000 };
    let live = LiveQueue::start(addresses, 4, feature::VERSION_1, memory.handle()).unwrap();
    let notifier = Arc::new(HostNotifier::new(Arc::new(NoIoEventFds), 0, None).unwrap());
    let interrupts = Arc::new(Interrupts::wired(Arc::new(NoLine)));
    let description = DeviceDescription { device_id: 4, features: 0, queue_sizes: vec![4] };
    let transport = Mmio::new(description, Arc::clone(&interrupts));
    let key = QueueKey { device: 0, queue: number };
    Box::new(HostQueue::new(
        key,
        live,
        handler,
        notifier,
        interrupts,
        Arc::new(Mutex::new(Box::new(transport))),
    ))
}

/// Without the signal at `put_on` a queue that is moved in the middle of its work waits for a kick for ever.
#[test]
fn work_that_was_begun_goes_on_elsewhere() {
    let tally = Arc::new(Tally::default());
    let crew = Crew::spawn(0..2, true, &tally).unwrap();
    let served = Arc::new(AtomicU64::new(0));
    let mut moving = queue(0, Box::new(Busy { served: Arc::clone(&served) }));
    let key = moving.key;
    for moves in 0..1000 {
        let before = served.load(Ordering::Relaxed);
        let thread = crew.thread(moves % 2).unwrap();
        assert!(thread.put_on(moving).is_ok());
        let start = Instant::now();
        while served.load(Ordering::Relaxed) == before {
            assert!(start.elapsed() < Duration::from_secs(20), "it stands still after {moves} moves");
            std::thread::yield_now();
        }
        moving = thread.take_off(key).unwrap();
        assert!(thread.take_off(key).is_none(), "it is nobody's now");
    }
    assert_eq!(tally.kicks(), 0, "none of the signals was a kick");
    moving.stop(true, &tally);
}
