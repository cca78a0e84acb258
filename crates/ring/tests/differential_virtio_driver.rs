//! Our device side with the driver side of the crate virtio-driver.
//!
//! Its queue wants something that translates addresses, and only a transport can give it that: so a
//! server that knows just enough of vhost-user answers one, and addresses translate to themselves.
//!
//! Of its packed queue some things must not be asked. A request that does not fit is taken back
//! only half: its later descriptors stay marked as available, and a device finds them behind the
//! next request. Descriptors are counted between looks for a kick, but without EVENT_IDX never
//! reset: 2^16 of them overflow. A request of one descriptor keeps its NEXT flag. And it panics
//! unless every writable byte is written.
#![cfg(not(any(loom, miri)))]

use paravane_ring::device::{Batch, Queue, QueueConfig};
use paravane_ring::{Area, QueueAddresses, Segment};
use paravane_spec::feature::{EVENT_IDX, RING_PACKED};
use proptest::prelude::*;
use std::collections::{BTreeMap, VecDeque};
use std::io::{Read, Write};
use std::os::unix::net::UnixListener;
use std::ptr::NonNull;
use virtio_driver::virtqueue::{Virtqueue, VirtqueueLayout};
use virtio_driver::{IovaTranslator, Le64, VhostUser, VirtioFeatureFlags, VirtioTransport, iovec};

/// A request in the queue's memory: a question to read, an answer to write.
#[derive(Clone, Copy)]
#[repr(C)]
struct Slot {
    question: u64,
    answer: u64,
}

/// Something that takes addresses as they are.
fn translator() -> Box<dyn IovaTranslator> {
    static NUMBER: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
    let number = NUMBER.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let path = std::env::temp_dir().join(format!("paravane-{}-{number}.sock", std::process::id()));
    let listener = UnixListener::bind(&path).unwrap();
    let server = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut header = [0; 12];
        while stream.read_exact(&mut header).is_ok() {
            let field = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().unwrap());
            let (request, flags, len) = (field(0), field(4), field(8));
            stream.read_exact(&mut vec![0; len as usize]).unwrap();
            let answer = match request {
                // GET_FEATURES, GET_PROTOCOL_FEATURES, GET_QUEUE_NUM, GET_MAX_MEM_SLOTS.
                1 | 15 => u64::MAX,
                17 | 36 => 1,
                // The rest is acknowledged, if that is asked for.
                _ if flags & 8 == 0 => continue,
                _ => 0,
            };
            let reply = [request.to_le_bytes(), 5_u32.to_le_bytes(), 8_u32.to_le_bytes()].concat();
            stream.write_all(&[&reply[..], &answer.to_le_bytes()].concat()).unwrap();
        }
    });
    let transport = VhostUser::<Le64, Slot>::new(path.to_str().unwrap(), u64::MAX).unwrap();
    let translator = transport.iova_translator();
    drop(transport);
    server.join().unwrap();
    std::fs::remove_file(path).unwrap();
    translator
}

#[derive(Clone, Debug)]
enum Op {
    /// The driver adds a request of these readable and writable segments.
    ///
    /// Beside the slot's two.
    Add(usize, usize),
    Pop,
    /// The device answers one of those in flight (modulo their number).
    Complete(usize),
    Publish,
    /// The driver takes back what was used.
    TakeBack,
    Arm,
    DisableKicks,
    Notifications(bool),
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let op = prop_oneof![
        8 => (0..4usize, 0..4usize).prop_map(|(readable, writable)| Op::Add(readable, writable)),
        4 => Just(Op::Pop),
        8 => (0..64usize).prop_map(Op::Complete),
        4 => Just(Op::Publish),
        4 => Just(Op::TakeBack),
        1 => Just(Op::Arm),
        1 => Just(Op::DisableKicks),
        1 => any::<bool>().prop_map(Op::Notifications),
    ];
    prop::collection::vec(op, 1..500)
}

/// A request of the driver: identifier, question, and expected contents.
#[derive(Clone, Debug)]
struct Request {
    id: u16,
    question: u64,
    readable: Vec<Segment>,
    writable: Vec<Segment>,
}

fn run(size: u16, packed: bool, event_idx: bool, slots: usize, ops: &[Op]) {
    let mut flags = VirtioFeatureFlags::VERSION_1;
    flags.set(VirtioFeatureFlags::RING_PACKED, packed);
    flags.set(VirtioFeatureFlags::RING_EVENT_IDX, event_idx);
    let features = if packed { RING_PACKED } else { 0 } | if event_idx { EVENT_IDX } else { 0 };
    let layout = VirtqueueLayout::new::<Slot>(1, size.into(), flags).unwrap();
    let mut memory = vec![0u128; layout.end_offset.div_ceil(16)];
    let (start, len) = (memory.as_mut_ptr().cast::<u8>(), memory.len() * 16);
    // SAFETY: `memory` outlives both sides. Theirs takes a Rust slice of what we change, as it does
    // with every device; the compiler cannot know of our accesses.
    let (bytes, area) =
        unsafe { (std::slice::from_raw_parts_mut(start, len), Area::new(NonNull::new(start).unwrap(), len)) };
    let base = start as u64;
    let at = |addr: u64, len: usize| area.slice(usize::try_from(addr.checked_sub(base)?).ok()?, len);
    let mut driver = Virtqueue::<Slot>::new(translator(), bytes, size, flags).unwrap();
    let addresses = QueueAddresses {
        size,
        desc: driver.desc_table_ptr() as u64,
        driver: driver.driver_area_ptr() as u64,
        device: driver.device_area_ptr() as u64,
    };
    let config = QueueConfig::new(addresses, size, features).unwrap();
    let [desc, avail, used] = config.areas().map(|area| at(area.addr, area.len).unwrap());
    // SAFETY: these are the areas asked for, and `memory` outlives the queue.
    let mut device: Queue = unsafe { config.activate(desc, avail, used) }.unwrap();
    let mut batch = Batch::new(slots);

    let mut tag = 0_u64;
    let mut available: VecDeque<Request> = VecDeque::new();
    let mut in_flight: BTreeMap<u16, Request> = BTreeMap::new();
    let mut completed: Vec<Request> = Vec::new();
    let mut used: VecDeque<Request> = VecDeque::new();
    // Whether the next one must bring a kick, an interrupt; `None` where it is a matter of taste.
    let (mut kick, mut interrupt) = (None, None);
    driver.set_used_notif_enabled(false);
    for op in ops {
        match *op {
            Op::Add(readable, writable) => {
                tag += 1;
                let mut segments = |count| {
                    let make = |_| {
                        tag += 1;
                        Segment { addr: tag << 20, len: 1 + (tag as u32 * 41) % 3000 }
                    };
                    (0..count).map(make).collect::<Vec<_>>()
                };
                let (mut readable, mut writable) = (segments(readable), segments(writable));
                let all = available.iter().chain(in_flight.values()).chain(&completed).chain(&used);
                let taken = all.map(|request| request.readable.len() + request.writable.len()).sum::<usize>();
                if packed && taken + readable.len() + writable.len() + 2 > size.into() {
                    continue;
                }
                let question = !tag;
                let added = driver.add_request(|slot, add| {
                    *slot = Slot { question, answer: 0 };
                    let slot = std::ptr::from_mut(slot) as u64;
                    readable.insert(0, Segment { addr: slot, len: 8 });
                    writable.push(Segment { addr: slot + 8, len: 8 });
                    for (segments, write) in [(&readable, false), (&writable, true)] {
                        for &Segment { addr, len } in segments {
                            add(iovec { iov_base: addr as *mut _, iov_len: len as usize }, write)?;
                        }
                    }
                    Ok(())
                });
                if let Ok(id) = added {
                    available.push_back(Request { id, question, readable, writable });
                    let needed = driver.avail_notif_needed();
                    if let Some(kick) = kick.take() {
                        assert_eq!(needed, kick, "kick");
                    }
                }
            }
            Op::Pop => {
                let popped = device.pop(&mut batch, |_, _| false).unwrap();
                assert_eq!(popped, available.len().min(slots));
                for (chain, request) in batch.chains().iter().zip(available.drain(..popped)) {
                    assert_eq!(chain.head, request.id);
                    assert_eq!(batch.readable(chain), request.readable);
                    assert_eq!(batch.writable(chain), request.writable);
                    let mut question = [0; 8];
                    assert!(at(request.readable[0].addr, 8).unwrap().read(0, &mut question));
                    assert_eq!(u64::from_le_bytes(question), request.question);
                    assert!(in_flight.insert(chain.head, request).is_none());
                }
            }
            Op::Complete(which) => {
                if let Some(&id) = in_flight.keys().nth(which % in_flight.len().max(1)) {
                    let request = in_flight.remove(&id).unwrap();
                    let answer = at(request.writable.last().unwrap().addr, 8).unwrap();
                    assert!(answer.write(0, &request.question.swap_bytes().to_le_bytes()));
                    // It takes nothing else than every byte.
                    let written = request.writable.iter().map(|segment| segment.len).sum();
                    device.complete(id, written).unwrap();
                    completed.push(request);
                }
            }
            Op::Publish => {
                let told = device.publish().unwrap();
                if completed.is_empty() {
                    assert!(!told);
                } else if let Some(interrupt) = interrupt.take() {
                    assert_eq!(told, interrupt, "interrupt");
                }
                used.extend(completed.drain(..));
            }
            Op::TakeBack => {
                for completion in driver.completions() {
                    let request = used.pop_front().expect("something was used");
                    assert_eq!(completion.id, request.id);
                    assert_eq!(completion.req.question, request.question);
                    assert_eq!(completion.req.answer, request.question.swap_bytes());
                }
                assert!(used.is_empty());
                interrupt = None;
            }
            Op::Arm => {
                assert_eq!(device.arm_kicks().unwrap(), !available.is_empty());
                // Of those that it waits for already it is not told again.
                kick = available.is_empty().then_some(true);
            }
            Op::DisableKicks => {
                device.disable_kicks();
                kick = if event_idx { None } else { Some(false) };
            }
            Op::Notifications(enabled) => {
                driver.set_used_notif_enabled(enabled);
                interrupt = match (enabled, used.is_empty(), event_idx) {
                    (true, true, _) => Some(true),
                    (false, _, false) => Some(false),
                    _ => None,
                };
            }
        }
        assert_eq!(usize::from(device.in_flight()), in_flight.len());
        assert_eq!(device.error(), None);
    }
}

/// Packed, or not.
const LAYOUTS: [bool; 2] = [false, true];

proptest! {
    #![proptest_config(ProptestConfig { cases: 192, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn its_driver_and_our_device_understand_each_other(
        size_log in 1u32..8,
        packed in prop::sample::select(&LAYOUTS[..]),
        event_idx in any::<bool>(),
        slots in 1usize..20,
        ops in ops(),
    ) {
        run(1 << size_log, packed, event_idx, slots, &ops);
    }
}

#[test]
fn positions_wrap_around() {
    for packed in LAYOUTS {
        for event_idx in [false, true] {
            let mut ops = Vec::new();
            for i in 0..if packed { 5000 } else { 24_000 } {
                ops.extend([Op::Add(i % 3, 0), Op::Add(0, 1), Op::Add(1, i % 2), Op::Pop]);
                ops.extend((0..3).map(|_| Op::Complete(i)));
                ops.extend([Op::Publish, Op::TakeBack]);
                match i % 7 {
                    0 => ops.extend([Op::Arm, Op::Notifications(true)]),
                    3 => ops.extend([Op::DisableKicks, Op::Notifications(false)]),
                    _ => {}
                }
            }
            run(16, packed, event_idx, 8, &ops);
        }
    }
}
