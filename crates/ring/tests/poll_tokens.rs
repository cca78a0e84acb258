//! Poll tokens: which changes each kind of token detects.
#![cfg(not(loom))]
mod memory;

use memory::Memory;
use paravane_ring::device::{self, Batch};
use paravane_ring::driver::poll::{
    Counting, IndexToken, NoCount, PollError, PollToken, Poller, Position, WrapCount, WrapToken,
};
use paravane_ring::driver::{DriverConfig, Queue, Used};
use paravane_ring::{QueueError, Segment, Smp};
use paravane_spec::feature::{EVENT_IDX, IN_ORDER, RING_PACKED};
use proptest::prelude::*;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Release};

const LAYOUTS: [u64; 4] = [0, IN_ORDER, RING_PACKED, RING_PACKED | IN_ORDER];

/// Both sides of a queue, and a poller.
struct Pair<C: Counting> {
    driver: Queue<Smp, C>,
    device: device::Queue,
    batch: Batch,
    poller: Poller<Smp, C>,
    // Dropped last.
    memory: Memory,
}

impl<C: Counting> Pair<C> {
    fn new(size: u16, features: u64) -> Self {
        let layout = DriverConfig::new(size, 0, features).unwrap();
        let memory = Memory::new(layout.memory());
        let (mut driver, addresses) = Queue::<Smp, C>::lay_out(layout, memory.dma()).unwrap();
        let poller = driver.poller().unwrap();
        let device = memory.activate(addresses, features);
        Self { driver, device, batch: Batch::new(size.into()), poller, memory }
    }

    fn add(&mut self, segments: usize) {
        self.driver.add(&[Segment { addr: 0x1000, len: 8 }; 8][..segments], &[]).unwrap();
        self.driver.publish();
    }

    /// The device uses all that is available.
    fn serve(&mut self) {
        self.device.pop(&mut self.batch, |_, _| false).unwrap();
        self.device.complete_all(self.batch.chains().iter().map(|chain| (chain.head, 0))).unwrap();
        self.device.publish().unwrap();
    }

    /// Passes buffers of one segment over and back; leaves `left` with the device.
    fn rounds(&mut self, count: u64, left: u64) {
        for i in 0..count {
            self.add(1);
            if i + left < count {
                self.serve();
                assert!(self.driver.pop_used().unwrap().is_some());
                assert!(self.driver.pop_used().unwrap().is_none());
            }
        }
    }

    /// The queue's owner and everyone else see the same.
    fn news(&self, token: C::Token) -> bool {
        let news = self.poller.poll(token);
        assert_eq!(self.driver.poll(token), news);
        assert_eq!(self.poller.clone().poll(token), news);
        news
    }
}

fn nothing_then_used_then_taken<C: Counting>() {
    for features in LAYOUTS.into_iter().flat_map(|layout| [layout, layout | EVENT_IDX]) {
        let mut pair = Pair::<C>::new(8, features);
        for _ in 0..if cfg!(miri) { 4 } else { 50 } {
            pair.add(3);
            let token = pair.driver.enable_interrupts();
            assert!(!pair.news(token), "available is not used");
            pair.serve();
            assert!(pair.news(token), "used, not taken back");
            assert!(pair.driver.pop_used().unwrap().is_some());
            assert!(pair.news(token), "used and taken back");
            let now = pair.driver.enable_interrupts();
            assert!(!pair.news(now));
        }
    }
}

#[test]
fn every_kind_sees_what_was_used() {
    nothing_then_used_then_taken::<NoCount>();
    nothing_then_used_then_taken::<WrapCount>();
    nothing_then_used_then_taken::<Position>();
}

/// Whether a token of each kind sees that exactly `count` buffers came and went.
fn seen_after(size: u16, features: u64, count: u64) -> [bool; 3] {
    fn seen<C: Counting>(size: u16, features: u64, count: u64) -> bool {
        let mut pair = Pair::<C>::new(size, features);
        let token = pair.driver.enable_interrupts();
        pair.rounds(count, 0);
        pair.news(token)
    }
    let bare = seen::<NoCount>(size, features, count);
    [bare, seen::<WrapCount>(size, features, count), seen::<Position>(size, features, count)]
}

#[test]
#[cfg_attr(miri, ignore = "2^16 round trips take the interpreter too long")]
fn split_a_bare_index_is_fooled_after_a_whole_turn() {
    for features in [0, IN_ORDER] {
        assert_eq!(seen_after(8, features, (1 << 16) - 1), [true, true, true]);
        assert_eq!(seen_after(8, features, 1 << 16), [false, true, true]);
        assert_eq!(seen_after(8, features, (1 << 16) + 1), [true, true, true]);
    }
}

/// Packed rings: flags in one slot.
///
/// After one buffer the slot still shows it used; after two laps it looks used for this lap again.
/// In between, in the lap of the other wrap counter, bare flags see nothing; the wrap counter sees
/// it.
#[test]
fn packed_bare_flags_are_fooled_in_every_other_lap() {
    let size = 4;
    for features in [RING_PACKED, RING_PACKED | IN_ORDER] {
        for laps in 0..if cfg!(miri) { 3 } else { 6 } {
            for more in 0..u64::from(size) {
                let count = laps * u64::from(size) + more;
                // Slot 0 was last used in lap `laps` if there was a buffer in it, else in the one
                // before.
                let last = if more == 0 { laps.checked_sub(1) } else { Some(laps) };
                let bare = last.is_some_and(|lap| lap % 2 == 0);
                let seen = [bare, bare || laps > 0, count > 0];
                assert_eq!(seen_after(size, features, count), seen, "{count} buffers");
            }
        }
    }
}

/// The wrap counter counts laps in 16 bits: it repeats after `size * 2^16`.
///
/// That many buffers later the slot shows a lap of the other wrap counter or is available, and its
/// token is fooled; the position is not.
#[test]
#[cfg_attr(miri, ignore = "2^16 laps take the interpreter too long")]
fn packed_a_wrap_counter_is_fooled_after_2_to_the_16_laps() {
    let size = 2;
    let turn = u64::from(size) << 16;
    assert_eq!(seen_after(size, RING_PACKED, turn - 1)[1..], [true, true]);
    assert_eq!(seen_after(size, RING_PACKED, turn), [false, false, true]);
}

/// Split: the wrap counter repeats after 2^32, not at multiples of 2^16.
#[test]
#[cfg_attr(miri, ignore = "2^18 round trips take the interpreter too long")]
fn split_a_wrap_counter_is_not_fooled_after_several_turns() {
    assert_eq!(seen_after(4, 0, 3 << 16), [false, true, true]);
}

/// One buffer fools flags: the ring is full, and the token's slot is reused.
///
/// The slot is used, taken back and filled again. It is merely available then, and no lap has
/// ended: the wrap counter is what it was. Linux's packed `virtqueue_poll` has this hole with and
/// without the wrap counter series.
#[test]
fn packed_a_slot_that_was_filled_again() {
    fn news<C: Counting>(features: u64) -> bool {
        let mut pair = Pair::<C>::new(4, features);
        pair.batch = Batch::new(1);
        for _ in 0..4 {
            pair.add(1);
        }
        let token = pair.driver.enable_interrupts();
        assert!(!pair.news(token));
        pair.serve();
        assert!(pair.news(token));
        assert!(pair.driver.pop_used().unwrap().is_some());
        assert!(pair.news(token));
        pair.add(1);
        pair.news(token)
    }
    for features in [RING_PACKED, RING_PACKED | IN_ORDER, RING_PACKED | EVENT_IDX] {
        let seen = [news::<NoCount>(features), news::<WrapCount>(features), news::<Position>(features)];
        assert_eq!(seen, [false, false, true]);
    }
}

#[test]
fn pollers_are_asked_for_before_the_queue_is_ready() {
    for features in LAYOUTS {
        let layout = DriverConfig::new(4, 0, features).unwrap();
        let memory = Memory::new(layout.memory());
        let (mut queue, _) = Queue::new(layout, memory.dma()).unwrap();
        assert!(queue.poller().is_ok());
        assert!(queue.poller().is_ok(), "any number of them");
        queue.ready();
        assert_eq!(queue.poller().unwrap_err(), PollError::Ready);

        let (mut queue, _) = Queue::new(layout, memory.dma()).unwrap();
        queue.add(&[Segment { addr: 0, len: 1 }], &[]).unwrap();
        assert!(queue.poller().is_ok(), "nothing was published");
        queue.publish();
        assert_eq!(queue.poller().unwrap_err(), PollError::Ready);
    }
    // Something used though nothing was published: the queue latches before it is in use.
    let layout = DriverConfig::new(4, 0, 0).unwrap();
    let memory = Memory::new(layout.memory());
    let (mut queue, addresses) = Queue::new(layout, memory.dma()).unwrap();
    memory.put(addresses.device + 2, 2, 1);
    let error = QueueError::UsedIndex { old: 0, new: 1, in_flight: 0 };
    assert_eq!(queue.pop_used(), Err(error));
    assert_eq!(queue.poller().unwrap_err(), PollError::Stopped(error));
}

/// Without the opt-in the wrap counter is idle: its token is a bare index.
#[test]
fn the_wrap_counter_counts_only_after_the_opt_in() {
    // Until bare flags, or a bare index, are fooled; the interpreter has no patience for the
    // latter.
    let turns = [(RING_PACKED, 5), (0, 1 << 16)];
    for &(features, turn) in &turns[..if cfg!(miri) { 1 } else { 2 }] {
        let layout = DriverConfig::new(4, 0, features).unwrap();
        let memory = Memory::new(layout.memory());
        let (mut driver, addresses) = Queue::<Smp, WrapCount>::lay_out(layout, memory.dma()).unwrap();
        let mut device = memory.activate(addresses, features);
        let mut batch = Batch::new(4);
        let token = driver.enable_interrupts();
        for _ in 0..turn {
            driver.add(&[Segment { addr: 0, len: 1 }], &[]).unwrap();
            driver.publish();
            device.pop(&mut batch, |_, _| false).unwrap();
            device.complete(batch.chains()[0].head, 0).unwrap();
            device.publish().unwrap();
            driver.pop_used().unwrap().unwrap();
        }
        assert!(!driver.poll(token));
    }
}

/// Bits 31 to 16: wraps; bits 15 to 0: the index.
///
/// In a packed ring the index has the wrap counter in bit 15.
#[test]
fn a_wrap_token_has_the_bits_of_the_series() {
    let mut split = Pair::<WrapCount>::new(8, 0);
    let mut packed = Pair::<WrapCount>::new(4, RING_PACKED);
    assert_eq!(split.driver.enable_interrupts().into_raw(), 0);
    assert_eq!(packed.driver.enable_interrupts().into_raw(), 0x8000);
    split.rounds(3, 0);
    packed.rounds(3, 0);
    assert_eq!(split.driver.enable_interrupts().into_raw(), 3);
    assert_eq!(packed.driver.enable_interrupts().into_raw(), 0x8003);
    packed.rounds(2, 0);
    assert_eq!(packed.driver.enable_interrupts().into_raw(), 0x0001_0001);
    packed.rounds(4, 0);
    let token = packed.driver.enable_interrupts();
    assert_eq!(token.into_raw(), 0x0002_8001);
    assert!(!packed.news(WrapToken::from_raw(token.into_raw())));
    assert!(packed.news(WrapToken::from_raw(0x0001_8001)));
}

/// A raw token may come from anywhere: it is looked up inside the ring.
#[test]
fn raw_tokens_are_harmless() {
    let bare = Pair::<NoCount>::new(4, RING_PACKED);
    let wrap = Pair::<WrapCount>::new(4, RING_PACKED);
    let position = Pair::<Position>::new(4, RING_PACKED);
    for raw in [0u16, 3, 4, 0x7fff, 0x8003, 0xffff] {
        let _ = bare.news(IndexToken::from_raw(raw));
        let _ = wrap.news(WrapToken::from_raw(raw.into()));
        let _ = position.news(PollToken::from(u64::from(raw)));
    }
    drop((bare.memory, wrap.memory, position.memory));
}

/// One thread consumes, another polls: its token has news of every buffer.
#[test]
fn another_thread_polls() {
    for features in LAYOUTS {
        let mut pair = Pair::<Position>::new(4, features | EVENT_IDX);
        let rounds = if cfg!(miri) { 5 } else { 2000 };
        let (send, tokens) = std::sync::mpsc::sync_channel::<PollToken>(0);
        let poller = pair.poller.clone();
        let told = AtomicBool::new(true);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for token in tokens {
                    while !poller.poll(token) {
                        std::hint::spin_loop();
                        std::thread::yield_now();
                    }
                    told.store(true, Release);
                }
            });
            for round in 0..rounds {
                while !told.swap(false, Acquire) {
                    std::thread::yield_now();
                }
                pair.add(1);
                send.send(pair.driver.enable_interrupts()).unwrap();
                pair.serve();
                // Now and then all of it happens before the other thread looks for the first time.
                assert!(pair.driver.pop_used().unwrap().is_some());
                if round % 2 == 0 {
                    pair.add(4);
                    pair.serve();
                    assert!(pair.driver.pop_used().unwrap().is_some());
                    pair.add(4);
                    pair.serve();
                    assert!(pair.driver.pop_used().unwrap().is_some());
                }
            }
            drop(send);
        });
    }
}

/// One step of a driver and a device at work.
#[derive(Clone, Copy, Debug)]
enum Step {
    /// Adds a buffer with this number of segments, if it fits.
    Add(usize),
    Publish,
    /// The device takes at most this number of buffers and uses them.
    Serve(usize),
    /// Takes one back, if there is one.
    Pop,
    /// Takes back at most this number of buffers.
    Take(usize),
    /// Asks for a token.
    Ask,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => (1..=2usize).prop_map(Step::Add),
        2 => Just(Step::Publish),
        2 => (1..=4usize).prop_map(Step::Serve),
        2 => Just(Step::Pop),
        1 => (1..=4usize).prop_map(Step::Take),
        2 => Just(Step::Ask),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: if cfg!(miri) { 2 } else { 256 },
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    /// A token has news if, and only if, the device has used more since.
    ///
    /// More than had been taken back when it was asked for: independent of what was taken back,
    /// added or published since.
    #[test]
    fn a_token_tells_whether_more_was_used(
        layout in 0..LAYOUTS.len(),
        steps in proptest::collection::vec(step(), 1..400),
    ) {
        let mut pair = Pair::<Position>::new(4, LAYOUTS[layout]);
        let (mut used, mut taken) = (0, 0);
        let mut tokens = Vec::new();
        for step in steps {
            match step {
                Step::Add(segments) => {
                    let segments = [Segment { addr: 0x1000, len: 8 }; 2][..segments].to_vec();
                    let fits = segments.len() <= pair.driver.room();
                    prop_assert_eq!(pair.driver.add(&segments, &[]).is_ok(), fits);
                }
                Step::Publish => {
                    pair.driver.publish();
                }
                Step::Serve(most) => {
                    pair.batch = Batch::new(most);
                    pair.serve();
                    used += pair.batch.chains().len();
                }
                Step::Pop => taken += usize::from(pair.driver.pop_used().unwrap().is_some()),
                Step::Take(most) => {
                    taken += pair.driver.take_used(&mut vec![Used::default(); most]).unwrap();
                }
                Step::Ask => tokens.push((pair.driver.enable_interrupts(), taken)),
            }
            for &(token, before) in &tokens {
                prop_assert_eq!(pair.news(token), used > before, "{:?} after {:?}", token, step);
            }
        }
    }
}

/// A queue that has latched, and one that is gone, has news for every token.
#[test]
fn a_poller_has_news_of_a_queue_that_has_stopped() {
    for features in LAYOUTS {
        let mut pair = Pair::<Position>::new(4, features);
        let token = pair.driver.enable_interrupts();
        assert!(!pair.news(token));
        // A buffer is used that nobody has made available: the first descriptor's flags, or
        // used.idx.
        let used = if features & RING_PACKED != 0 { (14, 0x8080) } else { (128 + 2, 1) };
        pair.memory.put(memory::BASE + used.0, 2, used.1);
        assert!(pair.driver.pop_used().is_err());
        // The ring looks as it did.
        pair.memory.put(memory::BASE + used.0, 2, 0);
        assert!(pair.news(token));
        let now = pair.driver.enable_interrupts();
        assert!(pair.news(token) && pair.news(now), "asking again starts nothing anew");
        assert!(pair.driver.add(&[Segment { addr: 0, len: 1 }], &[]).is_err());
        assert_eq!(pair.driver.room(), 0);
        assert!(pair.news(token) && pair.news(now));
    }
    for features in LAYOUTS {
        let mut pair = Pair::<Position>::new(4, features);
        let token = pair.driver.enable_interrupts();
        assert!(!pair.news(token));
        let poller = pair.poller.clone();
        let memory = pair.driver.into_memory();
        assert!(poller.poll(token));
        assert_eq!(memory.addr, memory::BASE);
    }
}

fn is_send_and_sync<T: Send + Sync>() {}

#[test]
fn pollers_and_tokens_go_anywhere() {
    is_send_and_sync::<Poller>();
    is_send_and_sync::<Poller<Smp, WrapCount>>();
    is_send_and_sync::<Poller<Smp, NoCount>>();
    is_send_and_sync::<PollToken>();
}
