//! Devices with several queues, each with an owner.
use paravane_driver::blk::{BlkDevice, Request, RequestQueue};
use paravane_driver::net::{NetDevice, NetOptions, QueuePair};
use paravane_driver::{Area, DmaArea, DriverError, Message, Pool, Transport};
use paravane_ring::device::{Batch, Queue, QueueConfig};
use paravane_ring::{QueueAddresses, QueueError};
use paravane_spec::{blk, feature, mmio, net, split, status};
use std::collections::HashMap;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex};

const RAM_BASE: u64 = 0x10_0000;
const RAM_SIZE: usize = 4 << 20;
const MANY: u64 = feature::VERSION_1 | blk::F_MQ;
const PAIRS: u64 = feature::VERSION_1 | net::F_MQ | net::F_CTRL_VQ;

struct State {
    device_id: u32,
    features: u64,
    accepted: u64,
    status: u32,
    causes: u32,
    /// 64 bytes of the configuration space.
    config: [u8; 64],
    addresses: HashMap<u16, QueueAddresses>,
    live: HashMap<u16, Queue>,
    kicks: Vec<u16>,
    messages: Vec<(u16, Message)>,
    /// A message is being changed.
    is_selected: bool,
    ram: DmaArea,
}

/// A device that completes what is in the queue of a kick, before the kick returns.
#[derive(Clone)]
struct Device(Arc<Mutex<State>>);

impl Device {
    fn new(device_id: u32, features: u64, queues: u16) -> (Self, Pool) {
        let words = Box::leak(vec![[0u8; 4096]; RAM_SIZE / 4096 + 1].into_boxed_slice());
        let start = words.as_mut_ptr().cast::<u8>();
        // SAFETY: the allocation has a page to spare, and was leaked, so it stays mapped and no
        // reference to it is left.
        let area = unsafe { Area::new(NonNull::new(start.add(start.align_offset(4096))).unwrap(), RAM_SIZE) };
        let ram = DmaArea { area, addr: RAM_BASE };
        let mut config = [0; 64];
        let at = if device_id == 2 { std::mem::offset_of!(blk::Config, num_queues) } else { 8 };
        config[at..at + 2].copy_from_slice(&queues.to_le_bytes());
        let state = State {
            device_id,
            features,
            accepted: 0,
            status: 0,
            causes: 0,
            config,
            addresses: HashMap::new(),
            live: HashMap::new(),
            kicks: Vec::new(),
            messages: Vec::new(),
            is_selected: false,
            ram,
        };
        (Self(Arc::new(Mutex::new(state))), Pool::new(ram))
    }

    fn disk(features: u64, queues: u16) -> (Self, Pool) {
        Self::new(2, features, queues)
    }

    /// Claims to have used a buffer, where none is in flight.
    fn lie(&self, queue: u16) {
        let state = self.0.lock().unwrap();
        assert!(state.at(state.addresses[&queue].device + split::USED_IDX as u64, 2).write(0, &[1, 0]));
    }

    fn needs_reset(&self) {
        let mut state = self.0.lock().unwrap();
        state.status |= status::DEVICE_NEEDS_RESET;
        state.causes = mmio::INT_CONFIG_CHANGE;
    }
}

impl State {
    fn at(&self, addr: u64, len: usize) -> Area {
        self.ram.slice((addr - RAM_BASE) as usize, len).expect("shared memory").area
    }

    fn serve(&mut self, index: u16) {
        let mut queue = self.live.remove(&index).expect("a live queue");
        let mut batch = Batch::new(64);
        queue.pop(&mut batch, |_, _| false).unwrap();
        for chain in batch.chains() {
            // The status of a request, or the answer to a command.
            if let Some(status) = batch.writable(chain).last() {
                assert!(self.at(status.addr, 1).write(0, &[0]));
            }
            queue.complete(chain.head, chain.writable_len()).unwrap();
        }
        queue.publish().unwrap();
        queue.arm_kicks().unwrap();
        self.live.insert(index, queue);
    }
}

impl Transport for Device {
    fn device_id(&self) -> u32 {
        self.0.lock().unwrap().device_id
    }
    fn status(&self) -> u32 {
        self.0.lock().unwrap().status
    }
    fn set_status(&self, status: u32) {
        let mut state = self.0.lock().unwrap();
        state.status = status;
        if status & status::DRIVER_OK == 0 {
            return;
        }
        for (index, at) in state.addresses.clone() {
            let config = QueueConfig::new(at, 256, state.accepted).unwrap();
            let [desc, driver, device] = config.areas().map(|area| state.at(area.addr, area.len));
            // SAFETY: these are the areas asked for, in memory that is never given back.
            let queue = unsafe { config.activate(desc, driver, device) }.unwrap();
            state.live.insert(index, queue);
        }
    }
    fn device_features(&self) -> u64 {
        self.0.lock().unwrap().features
    }
    fn set_driver_features(&self, accepted: u64) {
        self.0.lock().unwrap().accepted = accepted;
    }
    fn set_message(&self, number: u16, message: Message) -> Result<(), DriverError> {
        let select = |on| std::mem::replace(&mut self.0.lock().unwrap().is_selected, on);
        assert!(!select(true), "two change messages at the same time");
        std::thread::yield_now();
        self.0.lock().unwrap().messages.push((number, message));
        assert!(select(false));
        Ok(())
    }
    fn queue_max(&self, _index: u16) -> u32 {
        16
    }
    fn queue_enabled(&self, index: u16) -> bool {
        self.0.lock().unwrap().addresses.contains_key(&index)
    }
    fn enable_queue(&mut self, index: u16, at: &QueueAddresses) -> Result<(), DriverError> {
        self.0.lock().unwrap().addresses.insert(index, *at);
        Ok(())
    }
    fn reset_queue(&self, _index: u16) {}
    fn queue_resetting(&self, _index: u16) -> bool {
        false
    }
    fn notify(&self, index: u16, _data: Option<u32>) {
        let mut state = self.0.lock().unwrap();
        state.kicks.push(index);
        // Receive queues of a card keep their buffers.
        if state.device_id == 2 || index % 2 == 1 || state.live.len() == usize::from(index) + 1 {
            state.serve(index);
        }
    }
    fn take_causes(&self) -> u32 {
        std::mem::take(&mut self.0.lock().unwrap().causes)
    }
    fn generation(&self) -> u32 {
        0
    }
    fn config32(&self, offset: u64) -> u32 {
        u32::from(self.config16(offset)) | u32::from(self.config16(offset + 2)) << 16
    }
    fn config16(&self, offset: u64) -> u16 {
        u16::from(self.config8(offset)) | u16::from(self.config8(offset + 1)) << 8
    }
    fn config8(&self, offset: u64) -> u8 {
        self.0.lock().unwrap().config[offset as usize]
    }
}

/// One flush, there and back.
fn flush(queue: &mut RequestQueue<Device>, tag: u64) -> Result<(), DriverError> {
    assert!(queue.submit(Request::Flush, tag)?);
    assert!(queue.kick());
    let done = queue.complete()?.expect("the device serves at once");
    assert_eq!((done.tag, done.status), (tag, blk::S_OK));
    Ok(())
}

#[test]
fn a_disk_has_as_many_queues_as_both_want() {
    let features = MANY | blk::F_FLUSH;
    for (wanted, has, gets) in [(1, 4, 1), (3, 4, 3), (4, 4, 4), (9, 4, 4), (0, 4, 1)] {
        let (device, mut pool) = Device::disk(features, has);
        let (disk, queues) = BlkDevice::new(device.clone(), wanted, 4, &mut pool).unwrap();
        assert_eq!(queues.len(), gets, "{wanted} of {has}");
        assert_eq!(disk.features() & blk::F_MQ != 0, wanted > 1);
        let numbers: Vec<_> = queues.iter().map(|queue| (queue.index(), queue.message())).collect();
        assert_eq!(numbers, (0..gets as u16).map(|index| (index, index + 1)).collect::<Vec<_>>());
        assert_eq!(device.0.lock().unwrap().addresses.len(), gets);
    }
    // A disk without the feature has one.
    let (device, mut pool) = Device::disk(feature::VERSION_1, 4);
    assert_eq!(BlkDevice::new(device, 4, 4, &mut pool).unwrap().1.len(), 1);
    let (device, mut pool) = Device::disk(MANY, 0);
    assert_eq!(BlkDevice::new(device.clone(), 4, 4, &mut pool).map(drop), Err(DriverError::Queue(0)));
    assert_ne!(device.status() & status::FAILED, 0);
}

#[test]
fn queues_are_used_by_their_threads_at_the_same_time() {
    const ROUNDS: u64 = 50;
    let (device, mut pool) = Device::disk(MANY | blk::F_FLUSH, 4);
    let (disk, queues) = BlkDevice::new(device.clone(), 4, 4, &mut pool).unwrap();
    let queues: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = queues
            .into_iter()
            .map(|mut queue| {
                scope.spawn(move || {
                    for tag in 0..ROUNDS {
                        flush(&mut queue, tag).unwrap();
                        // The device checks that no two do this at once.
                        let message = Message { address: tag, data: queue.index().into() };
                        queue.device().set_message(queue.message(), message).unwrap();
                    }
                    queue
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let state = device.0.lock().unwrap();
    for queue in &queues {
        let kicks = state.kicks.iter().filter(|&&index| index == queue.index()).count();
        assert_eq!((kicks as u64, queue.in_flight()), (ROUNDS, 0));
        let of_queue = |&&(number, message): &&(u16, Message)| {
            assert!(number != queue.message() || message.data == queue.index().into());
            number == queue.message()
        };
        assert_eq!(state.messages.iter().filter(of_queue).count() as u64, ROUNDS);
    }
    drop(state);
    assert!(!disk.read_only());
}

#[test]
fn the_error_of_a_queue_is_that_queues_and_the_devices_is_all_of_theirs() {
    let (device, mut pool) = Device::disk(MANY | blk::F_FLUSH, 2);
    let (mut disk, mut queues) = BlkDevice::new(device.clone(), 2, 4, &mut pool).unwrap();
    device.lie(0);
    let lie = Err(DriverError::Ring(QueueError::UsedIndex { old: 0, new: 1, in_flight: 0 }));
    assert_eq!(queues[0].complete().map(drop), lie);
    assert_eq!(queues[0].submit(Request::Flush, 1).map(drop), lie);
    assert!(queues[0].enable_interrupts() && !queues[0].kick());
    flush(&mut queues[1], 1).unwrap();
    assert_eq!(disk.interrupt(), Ok(0));

    device.needs_reset();
    assert_eq!(disk.interrupt(), Err(DriverError::NeedsReset));
    assert_eq!(disk.interrupt(), Err(DriverError::NeedsReset), "it latches");
    assert_eq!(queues[0].complete().map(drop), lie, "the first error stays");
    assert_eq!(queues[1].complete().map(drop), Err(DriverError::NeedsReset));
    assert!(queues[1].enable_interrupts() && !queues[1].kick());
}

fn card(pairs: u16) -> (Device, NetDevice<Device>, Vec<QueuePair<Device>>) {
    let (device, mut pool) = Device::new(1, PAIRS, pairs);
    let options = NetOptions { pairs, receive_slots: 4, transmit_slots: 4, ..NetOptions::default() };
    let (card, pairs) = NetDevice::new(device.clone(), options, &mut pool).unwrap();
    (device, card, pairs)
}

#[test]
fn pairs_are_used_by_their_threads_once_they_are_in_use() {
    let (device, mut card, mut pairs) = card(3);
    let numbers: Vec<_> = pairs.iter().map(|pair| (pair.number(), pair.messages())).collect();
    assert_eq!(numbers, [(0, [1, 2]), (1, [3, 4]), (2, [5, 6])]);
    assert_eq!((card.pairs(), card.pairs_set_up()), (1, 3));
    assert_eq!(pairs[0].send(&[0; 60]), Ok(true));
    assert!(matches!(pairs[1].send(&[0; 60]), Err(DriverError::Request(_))), "not in use yet");
    card.ask_for_pairs(3).unwrap();
    assert_eq!((card.answer(), card.pairs()), (Ok(Some(true)), 3));
    let kicks = |index| device.0.lock().unwrap().kicks.iter().filter(|&&kick| kick == index).count();
    let before = [1, 3, 5].map(kicks);
    std::thread::scope(|scope| {
        for pair in &mut pairs {
            scope.spawn(move || {
                for _ in 0..200 {
                    assert_eq!(pair.send(&[0; 60]), Ok(true));
                    assert_eq!(pair.kick(), 1);
                    assert_eq!(pair.in_flight(), Ok(0));
                    assert_eq!(pair.receive(&mut []), Ok(None));
                }
            });
        }
    });
    assert_eq!([1, 3, 5].map(kicks), before.map(|count| count + 200));
    // Those that are given up are not sent on.
    card.ask_for_pairs(2).unwrap();
    assert!(pairs[1].send(&[0; 60]).is_ok() && pairs[2].send(&[0; 60]).is_err());
}

#[test]
fn the_error_of_a_pair_is_that_pairs_and_the_cards_is_all_of_theirs() {
    let (device, mut card, mut pairs) = card(2);
    let lie = Err(DriverError::Ring(QueueError::UsedIndex { old: 0, new: 1, in_flight: 0 }));
    device.lie(3);
    assert_eq!(pairs[1].in_flight().map(drop), lie);
    assert_eq!(pairs[1].receive(&mut []).map(drop), lie);
    assert!(pairs[1].enable_interrupts());
    assert_eq!(pairs[0].receive(&mut []), Ok(None));
    device.needs_reset();
    assert_eq!(card.interrupt(), Err(DriverError::NeedsReset));
    assert_eq!(pairs[0].receive(&mut []), Err(DriverError::NeedsReset));
    assert_eq!(pairs[0].kick(), 0);
    assert_eq!(card.ask_for_pairs(1), Err(DriverError::NeedsReset));
}
