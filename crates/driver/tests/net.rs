//! The network card driver, against an honest device and a lying one.
//!
//! Each lie is a test with its name.
#[path = "../examples/polled_net.rs"]
#[allow(dead_code, unreachable_pub, unused_attributes, reason = "an example; the test uses a part of it")]
mod polled_net;

use paravane_driver::net::{Net, NetOptions};
use paravane_driver::{Area, DmaArea, DriverError, Pool, Transport};
use paravane_ring::device::{Batch, Queue, QueueConfig};
use paravane_ring::{QueueAddresses, QueueError};
use paravane_spec::net::{F_CTRL_VQ, F_MAC, F_MQ, F_MRG_RXBUF, F_MTU, F_STATUS};
use paravane_spec::{feature, mmio, status};
use std::cell::RefCell;
use std::collections::HashMap;
use std::ptr::NonNull;
use std::rc::Rc;

/// Where the shared memory lies in the device's address space, and its size.
const RAM_BASE: u64 = 0x10_0000;
const RAM_SIZE: usize = 4 << 20;
const HEADER: usize = 12;
const ALL: u64 = feature::VERSION_1 | F_MAC | F_MTU | F_STATUS | F_MRG_RXBUF | F_CTRL_VQ | F_MQ;

struct State {
    features: u64,
    accepted: u64,
    status: u32,
    queue_max: u32,
    config: [u8; 12],
    generation: u32,
    causes: u32,
    addresses: HashMap<u16, QueueAddresses>,
    live: HashMap<u16, Queue>,
    kicks: Vec<u16>,
    /// Every frame sent on pair 0 comes back before the kick returns.
    echoes: bool,
    ram: DmaArea,
}

/// A card; copies are the same one.
#[derive(Clone)]
struct Card(Rc<RefCell<State>>);

impl Card {
    fn new(features: u64) -> (Self, Pool) {
        let words = Box::leak(vec![[0u8; 4096]; RAM_SIZE / 4096 + 1].into_boxed_slice());
        let start = words.as_mut_ptr().cast::<u8>();
        // SAFETY: the allocation has a page to spare, and was leaked, so it stays mapped and no
        // reference to it is left.
        let area = unsafe { Area::new(NonNull::new(start.add(start.align_offset(4096))).unwrap(), RAM_SIZE) };
        let ram = DmaArea { area, addr: RAM_BASE };
        let state = State {
            features,
            accepted: 0,
            status: 0,
            queue_max: 256,
            // Address, link up, 3 pairs, an MTU of 1500.
            config: [2, 0, 0, 0, 0, 7, 1, 0, 3, 0, 0xdc, 5],
            generation: 0,
            causes: 0,
            addresses: HashMap::new(),
            live: HashMap::new(),
            kicks: Vec::new(),
            echoes: false,
            ram,
        };
        (Self(Rc::new(RefCell::new(state))), Pool::new(ram))
    }

    fn at(&self, addr: u64, len: usize) -> Area {
        let state = self.0.borrow();
        state.ram.slice((addr - RAM_BASE) as usize, len).expect("shared memory").area
    }

    fn with_queue<R>(&self, index: u16, work: impl FnOnce(&mut Queue, &mut Batch) -> R) -> R {
        let mut queue = self.0.borrow_mut().live.remove(&index).expect("a live queue");
        let done = work(&mut queue, &mut Batch::new(1));
        self.0.borrow_mut().live.insert(index, queue);
        done
    }

    /// Takes the next frame that was sent on a queue, with the header before it.
    fn sent(&self, index: u16) -> Option<Vec<u8>> {
        self.with_queue(index, |queue, batch| {
            queue.pop(batch, |_, _| false).unwrap();
            let (chain, readable, _) = batch.iter().next()?;
            let mut frame = Vec::new();
            for segment in readable {
                let mut bytes = vec![0; segment.len as usize];
                assert!(self.at(segment.addr, bytes.len()).read(0, &mut bytes));
                frame.extend(bytes);
            }
            queue.complete(chain.head, 0).unwrap();
            queue.publish().unwrap();
            Some(frame)
        })
    }

    /// Fills the next buffer of a queue, and says that `len` bytes of it are.
    fn fill(&self, index: u16, bytes: &[u8], len: u32) {
        self.with_queue(index, |queue, batch| {
            assert_eq!(queue.pop(batch, |_, _| false).unwrap(), 1, "no buffer");
            let (chain, _, writable) = batch.iter().next().unwrap();
            assert!(self.at(writable[0].addr, bytes.len()).write(0, bytes));
            queue.complete(chain.head, len).unwrap();
            queue.publish().unwrap();
        });
    }

    /// Gives a frame, in as many buffers of `size` bytes as it takes.
    fn give(&self, index: u16, frame: &[u8], size: usize) {
        let buffers = (HEADER + frame.len()).div_ceil(size) as u16;
        let bytes = [&[0; 10], &buffers.to_le_bytes()[..], frame].concat();
        for part in bytes.chunks(size) {
            self.fill(index, part, part.len() as u32);
        }
    }

    /// Buffers on offer.
    fn offered(&self, index: u16) -> bool {
        self.with_queue(index, |queue, _| queue.arm_kicks().unwrap())
    }
}

impl Transport for Card {
    fn device_id(&self) -> u32 {
        1
    }
    fn status(&self) -> u32 {
        self.0.borrow().status
    }
    fn set_status(&self, status: u32) {
        let mut state = self.0.borrow_mut();
        state.status = status;
        if status & status::DRIVER_OK == 0 || !state.live.is_empty() {
            return;
        }
        for (&index, &at) in &state.addresses.clone() {
            let config = QueueConfig::new(at, 256, state.accepted).unwrap();
            let [desc, driver, device] = config
                .areas()
                .map(|area| state.ram.slice((area.addr - RAM_BASE) as usize, area.len).unwrap().area);
            // SAFETY: these are the areas asked for, in memory that is never given back.
            let queue = unsafe { config.activate(desc, driver, device) }.unwrap();
            state.live.insert(index, queue);
        }
    }
    fn device_features(&self) -> u64 {
        self.0.borrow().features
    }
    fn set_driver_features(&self, accepted: u64) {
        self.0.borrow_mut().accepted = accepted;
    }
    fn queue_max(&self, _index: u16) -> u32 {
        self.0.borrow().queue_max
    }
    fn queue_enabled(&self, index: u16) -> bool {
        self.0.borrow().addresses.contains_key(&index)
    }
    fn enable_queue(&mut self, index: u16, at: &QueueAddresses) -> Result<(), DriverError> {
        self.0.borrow_mut().addresses.insert(index, *at);
        Ok(())
    }
    fn reset_queue(&self, _index: u16) {}
    fn queue_resetting(&self, _index: u16) -> bool {
        false
    }
    fn notify(&self, index: u16, _data: Option<u32>) {
        self.0.borrow_mut().kicks.push(index);
        if index == 1 && self.0.borrow().echoes {
            while let Some(sent) = self.sent(1) {
                self.give(0, &sent[HEADER..], 2048);
            }
        }
    }
    fn take_causes(&self) -> u32 {
        std::mem::take(&mut self.0.borrow_mut().causes)
    }
    fn generation(&self) -> u32 {
        self.0.borrow().generation
    }
    fn config32(&self, _offset: u64) -> u32 {
        panic!("the card has no field of 32 bits")
    }
    fn config16(&self, offset: u64) -> u16 {
        assert!(offset >= 6 && offset.is_multiple_of(2));
        let config = self.0.borrow().config;
        u16::from_le_bytes([config[offset as usize], config[offset as usize + 1]])
    }
    fn config8(&self, offset: u64) -> u8 {
        assert!(offset < 6);
        self.0.borrow().config[offset as usize]
    }
}

fn net(features: u64, options: NetOptions) -> (Card, Net<Card>) {
    let (card, mut pool) = Card::new(features);
    let net = Net::new(card.clone(), options, &mut pool).unwrap();
    (card, net)
}

fn small() -> NetOptions {
    NetOptions { receive_slots: 8, transmit_slots: 4, ..NetOptions::default() }
}

fn frame(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|at| (at as u8).wrapping_mul(3).wrapping_add(seed)).collect()
}

fn assert_latched(card: &Card, net: &mut Net<Card>, error: DriverError) {
    let kicks = card.0.borrow().kicks.len();
    assert_eq!(net.send(0, &frame(60, 0)), Err(error));
    assert_eq!(net.receive(0, &mut [0; 100]), Err(error));
    assert_eq!(net.interrupt(), Err(error));
    assert_eq!(net.kick(), 0);
    assert_eq!(card.0.borrow().kicks.len(), kicks);
    assert!(net.enable_interrupts(), "a caller must not sleep on a driver that has failed");
}

#[test]
fn the_card_is_described_and_all_buffers_are_on_offer() {
    let (card, net) = net(ALL, small());
    assert_eq!(net.mac(), Some([2, 0, 0, 0, 0, 7]));
    assert_eq!((net.mtu(), net.link_up(), net.largest_frame()), (Some(1500), true, 1518));
    assert_eq!((net.pairs_set_up(), net.pairs()), (1, 1));
    assert_eq!(net.features() & (F_CTRL_VQ | F_MQ), 0, "one pair needs no control");
    assert!(card.offered(0));
    let (_, net) = self::net(feature::VERSION_1, small());
    assert_eq!((net.mac(), net.mtu(), net.link_up()), (None, None, true));
}

#[test]
fn frames_are_sent_in_order_and_slots_come_back() {
    for features in
        [ALL, feature::VERSION_1, ALL | feature::RING_PACKED | feature::IN_ORDER | feature::EVENT_IDX]
    {
        let (card, mut net) = net(features, small());
        for n in 0..100 {
            for k in 0..4 {
                assert_eq!(net.send(0, &frame(14 + n + k, n as u8)), Ok(true));
            }
            assert_eq!(net.send(0, &frame(60, 0)), Ok(false), "there are four slots");
            net.kick();
            for k in 0..4 {
                assert_eq!(card.sent(1), Some([vec![0; HEADER], frame(14 + n + k, n as u8)].concat()));
            }
            assert_eq!(card.sent(1), None);
        }
    }
}

/// A caller that waits for an answer sleeps; one that waits for a slot wakes.
#[test]
fn a_frame_that_has_gone_is_news_only_to_who_waits_for_its_slot() {
    for features in [ALL, ALL | feature::EVENT_IDX, ALL | feature::RING_PACKED | feature::EVENT_IDX] {
        let (card, mut net) = net(features, NetOptions { transmit_slots: 1, ..small() });
        let interrupted = |card: &Card| {
            card.with_queue(1, |queue, batch| {
                assert_eq!(queue.pop(batch, |_, _| false).unwrap(), 1);
                let head = batch.chains()[0].head;
                queue.complete(head, 0).unwrap();
                queue.publish().unwrap()
            })
        };
        for _ in 0..10 {
            assert_eq!(net.send(0, &frame(60, 0)), Ok(true));
            net.kick();
            assert!(!net.enable_interrupts());
            assert!(!interrupted(&card), "no caller waits for a slot");
            assert!(!net.enable_interrupts(), "the answer is not there yet");
        }
        net.disable_interrupts();
        assert_eq!(net.send(0, &frame(60, 0)), Ok(true));
        assert_eq!(net.send(0, &frame(60, 1)), Ok(false));
        net.kick();
        assert!(!net.enable_interrupts());
        assert!(interrupted(&card), "a caller waits for the slot");
        assert!(net.enable_interrupts());
        assert_eq!(net.send(0, &frame(60, 1)), Ok(true));
        assert!(!net.enable_interrupts());
    }
}

#[test]
fn frames_that_cannot_be_are_refused() {
    let (_card, mut net) = net(ALL, NetOptions { frame: 4000, ..small() });
    for len in [0, 13, 1519, 4001] {
        assert!(matches!(net.send(0, &frame(len, 0)), Err(DriverError::Request(_))), "{len}");
    }
    assert_eq!(net.send(0, &frame(1518, 0)), Ok(true));
    assert!(matches!(net.send(1, &frame(60, 0)), Err(DriverError::Request(_))));
    assert!(matches!(net.receive(1, &mut []), Err(DriverError::Request(_))));
    for frame in [13, 65554, usize::MAX] {
        let (card, mut pool) = Card::new(ALL);
        let made = Net::new(card, NetOptions { frame, ..small() }, &mut pool).map(drop);
        assert!(matches!(made, Err(DriverError::Request(_))));
    }
}

#[test]
fn frames_come_in_one_buffer_or_in_several() {
    let (card, mut net) = net(ALL, NetOptions { receive_slot: 128, ..small() });
    let mut out = [0xee; 2000];
    for n in 0..200_usize {
        assert_eq!(net.receive(0, &mut out), Ok(None));
        let sent = frame(14 + n * 4, n as u8);
        card.give(0, &sent, 128);
        assert_eq!(net.receive(0, &mut out), Ok(Some(sent.len())));
        assert_eq!(out[..sent.len()], sent);
        assert_eq!(out[sent.len()], 0xee);
        out.fill(0xee);
        net.kick();
    }
}

#[test]
fn without_merging_a_slot_holds_a_whole_frame() {
    let (card, mut net) = net(ALL & !F_MRG_RXBUF, NetOptions { receive_slot: 128, ..small() });
    let sent = frame(1518, 1);
    // The number of buffers means nothing here.
    card.fill(0, &[vec![0xff; HEADER], sent.clone()].concat(), (HEADER + sent.len()) as u32);
    let mut out = [0; 1518];
    assert_eq!(net.receive(0, &mut out), Ok(Some(1518)));
    assert_eq!(out[..], sent);
}

#[test]
fn a_short_destination_takes_what_it_holds() {
    let (card, mut net) = net(ALL, NetOptions { receive_slot: 64, ..small() });
    let sent = frame(300, 1);
    for room in [0, 10, 52, 53, 200, 300] {
        card.give(0, &sent, 64);
        let mut out = vec![0; room];
        assert_eq!(net.receive(0, &mut out), Ok(Some(300)));
        assert_eq!(out, sent[..room]);
        net.kick();
    }
}

#[test]
fn a_frame_that_comes_in_parts_is_waited_for() {
    let (card, mut net) = net(ALL, NetOptions { receive_slot: 64, ..small() });
    let sent = frame(100, 1);
    let bytes = [&[0; 10][..], &[2, 0], &sent].concat();
    let mut out = [0; 100];
    card.fill(0, &bytes[..64], 64);
    for _ in 0..3 {
        assert_eq!(net.receive(0, &mut out), Ok(None));
    }
    card.fill(0, &bytes[64..], 48);
    assert_eq!(net.receive(0, &mut out), Ok(Some(100)));
    assert_eq!(out[..], sent);
}

#[test]
fn a_number_of_buffers_that_cannot_be_latches() {
    for buffers in [0_u16, 9, u16::MAX] {
        let (card, mut net) = net(ALL, small());
        card.fill(0, &[&[0; 10][..], &buffers.to_le_bytes(), &[0; 60]].concat(), 72);
        let error = DriverError::Buffers { buffers: buffers.into(), most: 8 };
        assert_eq!(net.receive(0, &mut [0; 100]), Err(error));
        assert_latched(&card, &mut net, error);
    }
}

#[test]
fn a_used_length_is_clamped_to_the_slot() {
    let (card, mut net) = net(ALL, NetOptions { receive_slot: 64, ..small() });
    card.fill(0, &[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0], u32::MAX);
    assert_eq!(net.receive(0, &mut [0; 100]), Ok(Some(64 - HEADER)));
    // Of a later buffer as well.
    net.kick();
    card.fill(0, &[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0], 64);
    card.fill(0, &[], u32::MAX);
    assert_eq!(net.receive(0, &mut [0; 100]), Ok(Some(128 - HEADER)));
}

#[test]
fn runts_are_counted_and_their_buffers_offered_again() {
    let (card, mut net) = net(ALL, small());
    for n in 0..100 {
        card.fill(0, &[0xff; 11], n % 12);
        assert_eq!(net.receive(0, &mut [0; 100]), Ok(None));
        net.kick();
    }
    assert_eq!(net.dropped().runts, 100);
    card.give(0, &frame(60, 0), 2048);
    assert_eq!(net.receive(0, &mut [0; 100]), Ok(Some(60)));
    // A frame of no bytes is the device's affair.
    card.give(0, &[], 2048);
    assert_eq!(net.receive(0, &mut [0; 100]), Ok(Some(0)));
}

#[test]
fn a_device_that_fills_everything_at_once_does_not_keep_the_driver() {
    let (card, mut net) = net(ALL, small());
    for _ in 0..8 {
        card.fill(0, &[], 0);
    }
    assert_eq!(net.receive(0, &mut [0; 100]), Ok(None));
    assert_eq!(net.dropped().runts, 8);
    assert!(!card.offered(0), "nothing is published before the kick");
    net.kick();
    assert!(card.offered(0));
}

#[test]
fn a_used_identifier_that_is_not_in_flight_latches() {
    let (card, mut net) = net(ALL, small());
    let at = card.0.borrow().addresses[&1];
    // The transmit queue has nothing in flight, and the device says that it has used 4.
    for n in 0..4 {
        assert_eq!(net.send(0, &frame(60, n)), Ok(true));
    }
    net.kick();
    assert!(card.at(at.device + 4, 8).write(0, &[3, 0, 0, 0, 0, 0, 0, 0]));
    assert!(card.at(at.device + 12, 8).write(0, &[3, 0, 0, 0, 0, 0, 0, 0]));
    assert!(card.at(at.device + 2, 2).write(0, &[2, 0]));
    let error = net.send(0, &frame(60, 9)).unwrap_err();
    assert_eq!(error, DriverError::Ring(QueueError::NotInFlight { id: 3 }));
    assert_latched(&card, &mut net, error);
}

#[test]
fn tokens_tell_of_frames_and_of_failure() {
    let (card, mut net) = net(ALL | feature::EVENT_IDX, small());
    let token = net.position(0).unwrap();
    let poller = net.poller(0).unwrap();
    assert!(!net.has_news(0, token) && !poller.poll(token));
    card.give(0, &frame(60, 0), 2048);
    assert!(net.has_news(0, token) && poller.poll(token));
    assert_eq!(net.receive(0, &mut [0; 100]), Ok(Some(60)));
    assert!(net.has_news(0, token) && poller.poll(token), "it does not go away");
    let token = net.position(0).unwrap();
    assert!(!net.has_news(0, token));
    assert!(net.position(1).is_none() && net.poller(1).is_none());
    card.0.borrow_mut().status |= status::DEVICE_NEEDS_RESET;
    card.0.borrow_mut().causes = mmio::INT_CONFIG_CHANGE;
    assert_eq!(net.interrupt(), Err(DriverError::NeedsReset));
    assert!(net.has_news(0, token));
}

#[test]
fn the_link_may_go_down_and_up() {
    let (card, mut net) = net(ALL, small());
    for up in [0, 1, 0] {
        card.0.borrow_mut().config[6] = up;
        card.0.borrow_mut().causes = mmio::INT_CONFIG_CHANGE;
        assert_eq!(net.interrupt(), Ok(mmio::INT_CONFIG_CHANGE));
        assert_eq!(net.link_up(), up == 1);
    }
    // The MTU does not follow: slots were made for the first one.
    card.0.borrow_mut().config[10..].fill(0xff);
    card.0.borrow_mut().causes = mmio::INT_CONFIG_CHANGE;
    net.interrupt().unwrap();
    assert_eq!(net.mtu(), Some(1500));
}

#[test]
fn pairs_come_into_use_with_the_answer() {
    let (card, mut net) = net(ALL, NetOptions { pairs: 5, ..small() });
    assert_eq!((net.pairs_set_up(), net.pairs()), (3, 1));
    assert!(matches!(net.ask_for_pairs(0), Err(DriverError::Request(_))));
    assert!(matches!(net.ask_for_pairs(4), Err(DriverError::Request(_))));
    for (answer, agreed) in [(1, false), (0xee, false), (0, true)] {
        net.ask_for_pairs(3).unwrap();
        assert!(matches!(net.ask_for_pairs(2), Err(DriverError::Request(_))), "one at a time");
        assert_eq!((net.answer(), net.pairs()), (Ok(None), 1));
        card.with_queue(6, |queue, batch| {
            queue.pop(batch, |_, _| false).unwrap();
            let (chain, readable, writable) = batch.iter().next().unwrap();
            let mut command = [0; 4];
            assert!(card.at(readable[0].addr, 4).read(0, &mut command));
            assert_eq!((command, readable[0].len), ([4, 0, 3, 0], 4));
            assert!(card.at(writable[0].addr, 1).write(0, &[answer]));
            queue.complete(chain.head, 1).unwrap();
            queue.publish().unwrap();
        });
        assert_eq!(net.answer(), Ok(Some(agreed)));
        assert_eq!(net.pairs(), if agreed { 3 } else { 1 });
    }
    assert_eq!(net.send(2, &frame(60, 0)), Ok(true));
    net.kick();
    assert!(card.sent(5).is_some());
    card.give(4, &frame(70, 1), 2048);
    assert_eq!(net.receive(2, &mut [0; 100]), Ok(Some(70)));
    // A pair that is to be given up is not sent on, whatever the answer will be.
    net.ask_for_pairs(1).unwrap();
    assert!(net.send(2, &frame(60, 0)).is_err());
}

#[test]
fn numbers_of_pairs_that_cannot_be_are_refused() {
    for pairs in [0_u16, 0x8000, 0xffff] {
        let (card, mut pool) = Card::new(ALL);
        card.0.borrow_mut().config[8..10].copy_from_slice(&pairs.to_le_bytes());
        let options = NetOptions { pairs: 2, ..small() };
        let made = Net::new(card.clone(), options, &mut pool).map(drop);
        assert_eq!(made, Err(DriverError::Queue(pairs)));
        assert_ne!(card.status() & status::FAILED, 0);
    }
}

#[test]
fn too_little_memory() {
    let mut outcomes = Vec::new();
    for pages in 0..40 {
        let (card, _) = Card::new(ALL);
        let mut tiny = Pool::new(card.0.borrow().ram.slice(0, pages * 4096).unwrap());
        let made = Net::new(card.clone(), small(), &mut tiny).map(drop);
        assert_eq!(card.status() & status::FAILED != 0, made.is_err());
        assert!(matches!(made, Ok(()) | Err(DriverError::Memory { .. })), "{pages}: {made:?}");
        outcomes.push(made.is_ok());
    }
    assert!(outcomes.is_sorted(), "more memory never does worse");
    assert_eq!((outcomes[0], outcomes[39]), (false, true));
}

#[test]
fn small_queues_make_fewer_slots() {
    for most in [1, 2, 3, 256] {
        let (card, mut pool) = Card::new(ALL);
        card.0.borrow_mut().queue_max = most;
        let mut net = Net::new(card.clone(), small(), &mut pool).unwrap();
        let mut sent = 0;
        while net.send(0, &frame(60, 0)).unwrap() {
            sent += 1;
        }
        assert_eq!(sent, [0, 1, 2, 2, 4][most.min(4) as usize], "a queue of {most}");
    }
}

#[test]
fn the_polled_example_gets_an_answer() {
    let (card, mut pool) = Card::new(ALL);
    card.0.borrow_mut().echoes = true;
    let (frame, mut answer) = ([7; 60], [0; 2048]);
    assert_eq!(polled_net::exchange(card.clone(), &mut pool, &frame, &mut answer), Ok(60));
    assert_eq!(answer[..60], frame);
}
