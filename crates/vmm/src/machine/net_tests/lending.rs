//! Queues that are lent and taken back while frames go both ways.
//!
//! The back end is a thread of this process that does what a vhost back end does: it goes by the
//! position, the memory and the eventfds that it is given, and has no I/O thread.
use super::link::{Streams, use_pairs};
use super::{BASE, Guest, RAM, Window, frame};
use paravane_attach::{AttachedDevice, RingFeatures};
use paravane_device::net::LinkEnd;
use paravane_device::{MappedQueue, QueueHandler, Rest, ServeError, State, StateError, WakeSet};
use paravane_dma::{Access, DirtyLog, LogError, Memory, Region};
use paravane_driver::mmio::Registers;
use paravane_driver::net::NetOptions;
use paravane_io::{LendError, Loan, QueueBackend};
use paravane_notify::Notifier;
use paravane_spec::mmio::{QUEUE_NOTIFY, STATUS};
use paravane_spec::status::DEVICE_NEEDS_RESET;
use paravane_test_support::patience;
use rustix::event::epoll::{self, EventData, EventFlags};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Loans of queues under traffic, at least.
const LOANS: u64 = 2000;

/// Position and handler that a borrower returns.
type Left = (Result<State, StateError>, Box<dyn QueueHandler>);

/// Serves a queue in a separate thread.
struct Borrower {
    memory: Memory,
    at_work: Option<(Arc<Notifier>, JoinHandle<Left>)>,
    handler: Option<Box<dyn QueueHandler>>,
}

impl Borrower {
    fn new(region: &Arc<Region>) -> Box<Self> {
        Box::new(Self {
            memory: Memory::new(vec![Arc::clone(region)]).unwrap(),
            at_work: None,
            handler: None,
        })
    }
}

impl QueueBackend for Borrower {
    fn start(&mut self, loan: &mut Loan<'_>) -> io::Result<()> {
        let handle = self.memory.handle();
        // As it comes over vhost's interface.
        let base = loan.parked.state().vring_base();
        let state = State::from_vring_base(base, loan.features).unwrap();
        assert_eq!(loan.memory.regions()[0].gpa(), RAM);
        let live = MappedQueue::resume(loan.addresses, u16::MAX, loan.features, handle, Some(state), None);
        let live = live.unwrap();
        assert_eq!(loan.parked.areas().len(), 3);
        let stop = Arc::new(Notifier::new(false).unwrap());
        let work = Work {
            live,
            handler: loan.handler.take().unwrap(),
            kick: loan.kick.try_clone().unwrap(),
            call: loan.call.try_clone().unwrap(),
            error: loan.error.try_clone().unwrap(),
            stop: Arc::clone(&stop),
        };
        self.at_work = Some((
            stop,
            thread::Builder::new().name(format!("lent{}", loan.queue)).spawn(move || work.run())?,
        ));
        Ok(())
    }

    fn stop(&mut self) -> io::Result<u32> {
        let (stop, thread) = self.at_work.take().unwrap();
        stop.signal();
        let (state, handler) = thread.join().unwrap();
        self.handler = Some(handler);
        state.map(State::vring_base).map_err(io::Error::other)
    }

    fn handler(&mut self) -> Option<Box<dyn QueueHandler>> {
        self.handler.take()
    }
}

struct Work {
    live: MappedQueue,
    handler: Box<dyn QueueHandler>,
    kick: Notifier,
    call: Notifier,
    error: Notifier,
    stop: Arc<Notifier>,
}

impl Work {
    fn run(mut self) -> Left {
        let poll = Arc::new(epoll::create(epoll::CreateFlags::CLOEXEC).unwrap());
        let add =
            |fd: std::os::fd::BorrowedFd<'_>, flags| epoll::add(&poll, fd, EventData::new_u64(0), flags);
        use std::os::fd::AsFd;
        add(self.kick.as_fd(), EventFlags::IN).unwrap();
        add(self.stop.as_fd(), EventFlags::IN).unwrap();
        self.handler.register(Some(&WakeSet::new(&poll, 0))).unwrap();
        let mut events = Vec::with_capacity(4);
        loop {
            events.clear();
            let _ = epoll::wait(&poll, rustix::buffer::spare_capacity(&mut events), None);
            if self.kick.take() > 0 {
                self.live.disable_kicks();
            }
            if self.stop.take() > 0 {
                // Perhaps with a signal taken, kicks turned off, and the ring not looked at.
                break;
            }
            self.serve();
        }
        while !self.handler.at_rest() {
            self.serve();
        }
        if self.handler.drain(&mut self.live, true).interrupt {
            self.call.signal();
        }
        (self.live.park().map(|parked| parked.state()), self.handler)
    }

    fn serve(&mut self) {
        // One that has latched stays so.
        if self.live.queue().error().is_none() && self.try_serve().is_err() {
            self.error.signal();
        }
    }

    fn try_serve(&mut self) -> Result<(), ServeError> {
        self.live.disable_kicks();
        loop {
            let served = self.handler.serve(&mut self.live)?;
            if served.interrupt {
                self.call.signal();
            }
            let idle = served.taken + served.completed == 0;
            if idle {
                let rest = self.handler.rest(true);
                let more = rest == Rest::Serve || rest.kicks() && self.live.arm_kicks()?;
                if !more {
                    return Ok(());
                }
            }
        }
    }
}

/// Takes no queue.
struct Unwilling;

impl QueueBackend for Unwilling {
    fn start(&mut self, _loan: &mut Loan<'_>) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn stop(&mut self) -> io::Result<u32> {
        unreachable!("it was never started")
    }
}

/// Two I/O threads each, which poll queues: kicks are off most of the time.
fn guests(pairs: u16, rings: RingFeatures) -> [Guest; 2] {
    let (a, b) = LinkEnd::pair(pairs).unwrap();
    [a, b].map(|end| Guest::with_threads(end, 1500, rings, 2, Duration::from_micros(100)))
}

/// Lends `queue`, as soon as its back end has room.
fn lend(device: &AttachedDevice, queue: u16, region: &Arc<Region>) {
    loop {
        match device.lend_queue(queue, Borrower::new(region)) {
            Err(LendError::Busy { .. }) => thread::yield_now(),
            result => return result.unwrap(),
        }
    }
}

/// Waits until `queue` has moved `frames` frames.
fn progress(guest: &Guest, queue: u16, frames: u64) {
    let moved = || if queue.is_multiple_of(2) { guest.totals().received } else { guest.totals().transmitted };
    let (before, start) = (moved(), Instant::now());
    while moved() < before + frames {
        assert!(start.elapsed() < patience(), "the back end of queue {queue} has missed a kick");
        thread::yield_now();
    }
}

/// Lends the queues of the first of two guests, alone and several at a time.
///
/// Until enough has happened.
fn streams_survive(pairs: u16, rings: RingFeatures) {
    let guests = guests(pairs, rings);
    let options = NetOptions { pairs, receive_slots: 16, transmit_slots: 16, ..NetOptions::default() };
    let mut drivers = guests.each_ref().map(|guest| guest.driver(options));
    if pairs > 1 {
        for (guest, driver) in guests.iter().zip(&mut drivers) {
            use_pairs(guest, driver, pairs);
        }
    }
    let (mut loans, mut rounds) = (0, 0);
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let (device, region, over, guests) = (&guests[0].device, &guests[0].region, &done, &guests);
        let lender = scope.spawn(move || {
            let (mut loans, queues) = (0_u64, 2 * pairs);
            while loans < LOANS && !over.load(Ordering::Relaxed) {
                let queue = (loans % u64::from(queues)) as u16;
                let other = (queue + 1) % queues;
                lend(device, queue, region);
                if loans.is_multiple_of(3) {
                    lend(device, other, region);
                    device.take_back_queue(other).unwrap();
                }
                if loans.is_multiple_of(5) {
                    assert!(matches!(
                        device.lend_queue(queue, Box::new(Unwilling)),
                        Err(LendError::NotOurs { .. })
                    ));
                    let refused = device.lend_queue(other, Box::new(Unwilling));
                    let refused = matches!(refused, Err(LendError::Refused { .. } | LendError::Busy { .. }));
                    assert!(refused);
                }
                if loans.is_multiple_of(7) {
                    // Not only what was there before: nobody else signals the back end any more.
                    progress(&guests[0], queue, 20);
                }
                device.take_back_queue(queue).unwrap();
                device.move_queue(queue, loans as usize / 2 % 2).unwrap();
                loans += 1;
            }
            over.store(true, Ordering::Relaxed);
            loans
        });
        // Few frames at a time, so that both sides sleep again and again: a kick that is lost is a
        // test that waits in vain.
        while rounds < 4 || !done.load(Ordering::Relaxed) {
            thread::scope(|scope| {
                for ((guest, driver), (ours, theirs)) in guests.iter().zip(&mut drivers).zip([(1, 9), (9, 1)])
                {
                    let streams = Streams { ours, theirs, frames: 50, longest: 1514 };
                    scope.spawn(move || streams.run(guest, driver));
                }
            });
            rounds += 1;
        }
        loans = lender.join().unwrap();
    });
    assert_eq!(loans, LOANS);
    let all = rounds * 50 * u64::from(pairs);
    for guest in &guests {
        guest.device.stop();
        let totals = guest.totals();
        assert_eq!((totals.transmitted, totals.received), (all, all));
        assert_eq!(totals.malformed + totals.refused + totals.no_room + totals.unusable, 0);
    }
}

#[test]
fn no_frame_is_lost_while_queues_are_lent() {
    streams_survive(1, RingFeatures::default());
}

#[test]
fn nor_with_several_packed_ones() {
    streams_survive(2, RingFeatures::default().packed());
}

/// Set when it goes, however that comes.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// The back end finds the available index out of range.
#[test]
fn a_queue_that_its_back_end_finds_broken_needs_a_reset() {
    let guest = Guest::new(LinkEnd::echo(1).unwrap(), 1500, RingFeatures::default());
    let _broken = guest.driver(NetOptions::default());
    let device = &guest.device;
    device.lend_queue(1, Borrower::new(&guest.region)).unwrap();
    let available = device.queue_addresses(1).unwrap().driver + 2;
    guest.memory.handle().enter().write_obj(available, &5000_u16, Access::WRITE).unwrap();
    assert!(guest.fds.signal(BASE + QUEUE_NOTIFY, &1_u32.to_le_bytes()));
    let window = Window { device: Arc::clone(device), fds: Arc::clone(&guest.fds) };
    let start = Instant::now();
    while window.read32(STATUS) & DEVICE_NEEDS_RESET == 0 {
        assert!(start.elapsed() < patience(), "DEVICE_NEEDS_RESET does not come");
        thread::yield_now();
    }
    assert!(matches!(device.take_back_queue(1), Err(LendError::Lost { queue: 1, .. })));
    // And after a reset all is well.
    let mut driver = guest.driver(NetOptions::default());
    device.lend_queue(1, Borrower::new(&guest.region)).unwrap();
    assert!(driver.send(0, &frame(1, 0, 100)).unwrap());
    driver.kick();
    while guest.totals().transmitted == 0 {
        assert!(start.elapsed() < patience(), "the back end has missed a kick");
        thread::yield_now();
    }
}

/// The driver resets the card many times, with queues lent and not.
#[test]
fn a_reset_ends_every_loan() {
    let guests = guests(1, RingFeatures::default());
    let options = NetOptions { receive_slots: 16, transmit_slots: 16, ..NetOptions::default() };
    let over = AtomicBool::new(false);
    let (device, region) = (&guests[0].device, &guests[0].region);
    thread::scope(|scope| {
        let lender = scope.spawn(|| {
            let mut loans = 0_u64;
            while !over.load(Ordering::Relaxed) {
                for queue in [0, 1] {
                    // The driver is faster now and then.
                    match device.lend_queue(queue, Borrower::new(region)) {
                        Ok(()) => loans += 1,
                        Err(LendError::NotOurs { .. } | LendError::Busy { .. }) => {}
                        Err(error) => panic!("{error}"),
                    }
                }
                for queue in [1, 0] {
                    match device.take_back_queue(queue) {
                        Ok(()) | Err(LendError::NotLent { .. }) => {}
                        Err(error) => panic!("{error}"),
                    }
                }
            }
            loans
        });
        let ending = Over(&over);
        for _ in 0..50 {
            let mut drivers = guests.each_ref().map(|guest| guest.driver(options));
            thread::scope(|scope| {
                for ((guest, driver), (ours, theirs)) in guests.iter().zip(&mut drivers).zip([(1, 9), (9, 1)])
                {
                    let streams = Streams { ours, theirs, frames: 20, longest: 1514 };
                    scope.spawn(move || streams.run(guest, driver));
                }
            });
        }
        drop(ending);
        assert!(lender.join().unwrap() > 50);
    });
    // And the machine stops while both are lent.
    let _driver = guests[0].driver(options);
    for queue in [0, 1] {
        device.lend_queue(queue, Borrower::new(region)).unwrap();
    }
    assert!(device.stop().is_some());
    assert!(matches!(device.take_back_queue(0), Err(LendError::NotLent { queue: 0 })));
}

#[test]
fn what_the_cable_has_no_room_for_is_not_lost() {
    const FRAMES: u64 = 200;
    let guests = guests(1, RingFeatures::default());
    let options = NetOptions { transmit_slots: FRAMES as u16, receive_slots: 1, ..NetOptions::default() };
    let [mut sender, mut receiver] = guests.each_ref().map(|guest| guest.driver(options));
    for n in 0..FRAMES {
        assert!(sender.send(0, &frame(1, n, 100)).unwrap());
    }
    sender.kick();
    let (device, region) = (&guests[0].device, &guests[0].region);
    let start = Instant::now();
    while !matches!(device.lend_queue(1, Borrower::new(region)), Err(LendError::Busy { queue: 1 })) {
        assert!(start.elapsed() < patience(), "the cable does not become full");
        // Too early: it has not begun.
        device.take_back_queue(1).unwrap();
    }
    let mut out = [0; 1514];
    for n in 0..FRAMES {
        let len = loop {
            match receiver.receive(0, &mut out).unwrap() {
                Some(len) => break len,
                None => {
                    receiver.kick();
                }
            }
            thread::yield_now();
            assert!(start.elapsed() < patience(), "frame {n} is lost");
        };
        assert_eq!(out[..len], frame(1, n, 100));
    }
    lend(device, 1, region);
}

#[test]
fn no_dirty_log_is_on_during_a_loan() {
    let guest = Guest::new(LinkEnd::echo(1).unwrap(), 1500, RingFeatures::default());
    assert!(matches!(
        guest.device.lend_queue(0, Borrower::new(&guest.region)),
        Err(LendError::NotOurs { queue: 0 })
    ));
    let _driver = guest.driver(NetOptions::default());
    let log = || DirtyLog::new(guest.memory.end(), 4096).unwrap();
    let patience = patience();
    guest.device.lend_queue(0, Borrower::new(&guest.region)).unwrap();
    assert!(matches!(guest.memory.start_log(log(), patience), Err(LogError::Lent(1))));
    guest.device.take_back_queue(0).unwrap();
    guest.memory.start_log(log(), patience).unwrap();
    let refused = guest.device.lend_queue(0, Borrower::new(&guest.region));
    assert!(matches!(refused, Err(LendError::Log(LogError::On))), "{refused:?}");
    guest.memory.stop_log(patience).unwrap();
    guest.device.lend_queue(0, Borrower::new(&guest.region)).unwrap();
}
