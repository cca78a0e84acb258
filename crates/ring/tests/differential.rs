//! Ours against the peers', in both roles.
//!
//! The same random work in two worlds, which must not differ.
//!
//! - our driver side with virtio-queue's device side, beside our driver side with our device side;
//! - virtio-drivers' driver side with our device side, beside the data that must come over.
#![cfg(not(any(loom, miri)))]

mod against_virtio_queue {
    use paravane_ring::device::{self, Batch, QueueConfig};
    use paravane_ring::driver::{DriverConfig, Queue};
    use paravane_ring::{Area, DmaArea, QueueAddresses, Segment};
    use paravane_spec::feature::{EVENT_IDX, INDIRECT_DESC};
    use proptest::prelude::*;
    use std::ptr::NonNull;
    use virtio_queue::{QueueOwnedT, QueueT};
    use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryMmap};

    const BASE: u64 = 0x10_0000;
    const SIZE: u16 = 16;

    #[derive(Clone, Debug)]
    enum Op {
        Add(usize, usize),
        Publish,
        Pop,
        Complete(usize, u32),
        PublishUsed,
        TakeBack,
        Arm,
        DisableKicks,
        Enable,
    }

    fn ops() -> impl Strategy<Value = Vec<Op>> {
        let op = prop_oneof![
            6 => (0..4usize, 0..4usize).prop_map(|(readable, writable)| Op::Add(readable, writable)),
            3 => Just(Op::Publish),
            3 => Just(Op::Pop),
            6 => (0..64usize, 0..9000u32).prop_map(|(which, len)| Op::Complete(which, len)),
            3 => Just(Op::PublishUsed),
            4 => Just(Op::TakeBack),
            1 => Just(Op::Arm),
            1 => Just(Op::DisableKicks),
            1 => Just(Op::Enable),
        ];
        prop::collection::vec(op, 1..400)
    }

    /// A chain: head, readable and writable segments.
    type Chain = (u16, Vec<Segment>, Vec<Segment>);

    /// What the two device sides have in common.
    trait Device {
        fn pop(&mut self) -> Vec<Chain>;
        fn complete(&mut self, head: u16, len: u32);
        fn publish(&mut self) -> bool;
        fn arm(&mut self) -> bool;
        fn disable_kicks(&mut self);
    }

    struct Ours {
        queue: device::Queue,
        batch: Batch,
        area: Area,
    }

    impl Device for Ours {
        fn pop(&mut self) -> Vec<Chain> {
            let tables = DmaArea { area: self.area, addr: BASE };
            self.queue.pop_in_place(&mut self.batch, tables).unwrap();
            let batch = &self.batch;
            let chains = batch.chains().iter();
            chains.map(|c| (c.head, batch.readable(c).to_vec(), batch.writable(c).to_vec())).collect()
        }

        fn complete(&mut self, head: u16, len: u32) {
            self.queue.complete(head, len).unwrap();
        }

        fn publish(&mut self) -> bool {
            self.queue.publish().unwrap()
        }

        fn arm(&mut self) -> bool {
            self.queue.arm_kicks().unwrap()
        }

        fn disable_kicks(&mut self) {
            self.queue.disable_kicks();
        }
    }

    struct Theirs<'a> {
        queue: virtio_queue::Queue,
        memory: &'a GuestMemoryMmap,
        staged: bool,
    }

    impl Device for Theirs<'_> {
        fn pop(&mut self) -> Vec<Chain> {
            let chains = self.queue.iter(self.memory).unwrap();
            chains
                .map(|chain| {
                    let segment = |desc: virtio_queue::desc::split::Descriptor| Segment {
                        addr: desc.addr().0,
                        len: desc.len(),
                    };
                    let readable = chain.clone().readable().map(segment).collect();
                    (chain.head_index(), readable, chain.writable().map(segment).collect())
                })
                .collect()
        }

        fn complete(&mut self, head: u16, len: u32) {
            self.queue.add_used(self.memory, head, len).unwrap();
            self.staged = true;
        }

        fn publish(&mut self) -> bool {
            std::mem::take(&mut self.staged) && self.queue.needs_notification(self.memory).unwrap()
        }

        fn arm(&mut self) -> bool {
            self.queue.enable_notification(self.memory).unwrap()
        }

        fn disable_kicks(&mut self) {
            self.queue.disable_notification(self.memory).unwrap();
        }
    }

    fn driver(layout: DriverConfig, memory: &GuestMemoryMmap) -> (Queue, Area, QueueAddresses) {
        let host = memory.get_host_address(GuestAddress(BASE)).unwrap();
        // SAFETY: the mapping outlives both sides in every test.
        let area = unsafe { Area::new(NonNull::new(host).unwrap(), layout.memory()) };
        let (queue, addresses) = Queue::new(layout, DmaArea { area, addr: BASE }).unwrap();
        (queue, area, addresses)
    }

    /// Does the work and says all that happened.
    fn story(ops: &[Op], driver: &mut Queue, device: &mut dyn Device, event_idx: bool) -> Vec<String> {
        let mut story = Vec::new();
        let mut in_flight = Vec::new();
        let mut tag = 0;
        for op in ops {
            match *op {
                Op::Add(readable, writable) => {
                    let mut segments = |count| {
                        let make = |_| {
                            tag += 1;
                            Segment { addr: tag << 20, len: 1 + (tag as u32 * 41) % 3000 }
                        };
                        (0..count).map(make).collect::<Vec<_>>()
                    };
                    let (readable, writable) = (segments(readable), segments(writable));
                    if readable.len() + writable.len() > 0 {
                        story.push(format!("added {:?}", driver.add(&readable, &writable)));
                    }
                }
                Op::Publish => story.push(format!("kick {}", driver.publish())),
                Op::Pop => {
                    let chains = device.pop();
                    in_flight.extend(chains.iter().map(|chain| chain.0));
                    story.push(format!("popped {chains:?}"));
                }
                Op::Complete(which, len) => {
                    if !in_flight.is_empty() {
                        let which = which % in_flight.len();
                        device.complete(in_flight.swap_remove(which), len);
                    }
                }
                Op::PublishUsed => {
                    let interrupt = device.publish();
                    // Without EVENT_IDX virtio-queue always interrupts.
                    if event_idx {
                        story.push(format!("interrupt {interrupt}"));
                    }
                }
                Op::TakeBack => {
                    // virtio-queue publishes at once what it completes: here both must.
                    let interrupt = device.publish();
                    if event_idx {
                        story.push(format!("interrupt {interrupt}"));
                    }
                    story.push(format!("used {:?}", driver.pop_used()));
                }
                Op::Arm => story.push(format!("more {}", device.arm())),
                Op::DisableKicks => device.disable_kicks(),
                Op::Enable => drop(driver.enable_interrupts()),
            }
        }
        story
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn our_driver_sees_no_difference(
            ops in ops(),
            event_idx in any::<bool>(),
            indirect in prop_oneof![Just(0u16), 2u16..6],
        ) {
            let features =
                if event_idx { EVENT_IDX } else { 0 } | if indirect > 0 { INDIRECT_DESC } else { 0 };
            let layout = DriverConfig::new(SIZE, indirect, features).unwrap();
            let ranges = [(GuestAddress(BASE), 0x1_0000)];

            let memory = GuestMemoryMmap::from_ranges(&ranges).unwrap();
            let (mut queue, area, addresses) = driver(layout, &memory);
            let config = QueueConfig::new(addresses, SIZE, features).unwrap();
            let [desc, avail, used] =
                config.areas().map(|part| area.slice((part.addr - BASE) as usize, part.len).unwrap());
            // SAFETY: `memory` outlives the queue.
            let device = unsafe { config.activate(desc, avail, used) }.unwrap();
            let mut ours = Ours { queue: device, batch: Batch::new(SIZE.into()), area };
            let with_ours = story(&ops, &mut queue, &mut ours, event_idx);

            let memory = GuestMemoryMmap::from_ranges(&ranges).unwrap();
            let (mut queue, _, addresses) = driver(layout, &memory);
            let mut device = virtio_queue::Queue::new(SIZE).unwrap();
            device.set_size(SIZE);
            device.try_set_desc_table_address(GuestAddress(addresses.desc)).unwrap();
            device.try_set_avail_ring_address(GuestAddress(addresses.driver)).unwrap();
            device.try_set_used_ring_address(GuestAddress(addresses.device)).unwrap();
            device.set_event_idx(event_idx);
            device.set_ready(true);
            prop_assert!(device.is_valid(&memory));
            let mut theirs = Theirs { queue: device, memory: &memory, staged: false };
            let with_theirs = story(&ops, &mut queue, &mut theirs, event_idx);

            prop_assert_eq!(with_ours, with_theirs);
        }
    }
}

mod against_virtio_drivers {
    use paravane_ring::device::{self, Batch, QueueConfig};
    use paravane_ring::{Area, QueueAddresses};
    use paravane_spec::feature::INDIRECT_DESC;
    use proptest::prelude::*;
    use std::alloc::{Layout, alloc_zeroed, dealloc};
    use std::collections::VecDeque;
    use std::ptr::NonNull;
    use virtio_drivers::queue::VirtQueue;
    use virtio_drivers::transport::{DeviceStatus, DeviceType, InterruptStatus, Transport};
    use virtio_drivers::{BufferDirection, Hal, PAGE_SIZE, PhysAddr};

    const SIZE: usize = 16;

    /// Memory whose device addresses are its host addresses.
    struct Identity;

    // SAFETY: pages come zeroed and page-aligned from the allocator, and buffers are shared in
    // place.
    unsafe impl Hal for Identity {
        fn dma_alloc(pages: usize, _: BufferDirection) -> (PhysAddr, NonNull<u8>) {
            let layout = Layout::from_size_align(pages * PAGE_SIZE, PAGE_SIZE).unwrap();
            // SAFETY: a queue has at least one page.
            let ptr = NonNull::new(unsafe { alloc_zeroed(layout) }).unwrap();
            (ptr.as_ptr().expose_provenance() as u64, ptr)
        }

        unsafe fn dma_dealloc(_: PhysAddr, ptr: NonNull<u8>, pages: usize) -> i32 {
            let layout = Layout::from_size_align(pages * PAGE_SIZE, PAGE_SIZE).unwrap();
            // SAFETY: allocated above with this layout.
            unsafe { dealloc(ptr.as_ptr(), layout) };
            0
        }

        unsafe fn mmio_phys_to_virt(_: PhysAddr, _: usize) -> NonNull<u8> {
            unreachable!("there is no MMIO here")
        }

        unsafe fn share(buffer: NonNull<[u8]>, _: BufferDirection) -> PhysAddr {
            buffer.cast::<u8>().as_ptr().expose_provenance() as u64
        }

        unsafe fn unshare(_: PhysAddr, _: NonNull<[u8]>, _: BufferDirection) {}
    }

    /// A transport that only records the addresses of the queue.
    #[derive(Default)]
    struct Told {
        queue: QueueAddresses,
    }

    impl Transport for Told {
        fn device_type(&self) -> DeviceType {
            DeviceType::EntropySource
        }
        fn read_device_features(&mut self) -> u64 {
            0
        }
        fn write_driver_features(&mut self, _: u64) {}
        fn max_queue_size(&mut self, _: u16) -> u32 {
            SIZE as u32
        }
        fn notify(&mut self, _: u16) {}
        fn get_status(&self) -> DeviceStatus {
            DeviceStatus::empty()
        }
        fn set_status(&mut self, _: DeviceStatus) {}
        fn set_guest_page_size(&mut self, _: u32) {}
        fn requires_legacy_layout(&self) -> bool {
            false
        }
        fn queue_set(&mut self, _: u16, size: u32, desc: PhysAddr, driver: PhysAddr, device: PhysAddr) {
            self.queue = QueueAddresses { size: size as u16, desc, driver, device };
        }
        fn queue_unset(&mut self, _: u16) {}
        fn queue_used(&mut self, _: u16) -> bool {
            false
        }
        fn ack_interrupt(&mut self) -> InterruptStatus {
            InterruptStatus::empty()
        }
        fn read_config_generation(&self) -> u32 {
            0
        }
        fn read_config_space<T>(&self, _: usize) -> virtio_drivers::Result<T> {
            Err(virtio_drivers::Error::Unsupported)
        }
        fn write_config_space<T>(&mut self, _: usize, _: T) -> virtio_drivers::Result<()> {
            Err(virtio_drivers::Error::Unsupported)
        }
    }

    /// Memory at an address that the driver has shared.
    fn at(addr: u64, len: usize) -> Area {
        let ptr = NonNull::new(std::ptr::with_exposed_provenance_mut(addr as usize)).unwrap();
        // SAFETY: the address comes from `Identity` by way of the driver, which is honest here and
        // does not touch what is in flight.
        unsafe { Area::new(ptr, len) }
    }

    #[derive(Clone, Debug)]
    enum Op {
        /// Buffers of these lengths.
        Add(Vec<usize>, Vec<usize>),
        Pop,
        Complete(usize),
        PublishUsed,
        TakeBack,
        Arm,
        DisableKicks,
        WantInterrupts(bool),
    }

    fn ops() -> impl Strategy<Value = Vec<Op>> {
        let lens = || prop::collection::vec(1..200usize, 0..4);
        let op = prop_oneof![
            6 => (lens(), lens()).prop_map(|(readable, writable)| Op::Add(readable, writable)),
            4 => Just(Op::Pop),
            6 => (0..64usize).prop_map(Op::Complete),
            4 => Just(Op::PublishUsed),
            6 => Just(Op::TakeBack),
            1 => Just(Op::Arm),
            1 => Just(Op::DisableKicks),
            1 => any::<bool>().prop_map(Op::WantInterrupts),
        ];
        prop::collection::vec(op, 1..400)
    }

    /// A buffer of the driver's, in place until it comes back.
    struct Request {
        readable: Vec<Vec<u8>>,
        writable: Vec<Vec<u8>>,
    }

    /// Byte `i` of the answer to a request of which the device read `sum`.
    fn answer(sum: u64, i: usize) -> u8 {
        (sum.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as u8 ^ i as u8
    }

    fn sum(bytes: impl Iterator<Item = u8>) -> u64 {
        bytes.fold(1, |sum, byte| sum.wrapping_mul(31).wrapping_add(byte.into()))
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn our_device_serves_their_driver(ops in ops(), indirect in any::<bool>()) {
            let mut told = Told::default();
            let mut driver: VirtQueue<Identity, SIZE> =
                VirtQueue::new(&mut told, 0, indirect, false).unwrap();
            let features = if indirect { INDIRECT_DESC } else { 0 };
            let config = QueueConfig::new(told.queue, SIZE as u16, features).unwrap();
            let [desc, avail, used] = config.areas().map(|part| at(part.addr, part.len));
            // SAFETY: the driver owns the memory and is dropped after the device's last use.
            let mut device: device::Queue = unsafe { config.activate(desc, avail, used) }.unwrap();
            let mut batch = Batch::new(5);

            let mut requests: Vec<Option<Request>> = (0..SIZE).map(|_| None).collect();
            let mut available = VecDeque::new();
            let mut in_flight: Vec<(u16, u32)> = Vec::new();
            let mut staged = VecDeque::new();
            let mut used: VecDeque<(u16, u32)> = VecDeque::new();
            let (mut kicks, mut interrupts) = (true, true);
            let mut tag = 0u8;

            for op in &ops {
                match op {
                    Op::Add(readable, writable) => {
                        let mut fill = |len: &usize| {
                            tag = tag.wrapping_add(1);
                            vec![tag; *len]
                        };
                        let mut request = Request {
                            readable: readable.iter().map(&mut fill).collect(),
                            writable: writable.iter().map(&mut fill).collect(),
                        };
                        let inputs: Vec<&[u8]> = request.readable.iter().map(Vec::as_slice).collect();
                        let mut outputs: Vec<&mut [u8]> =
                            request.writable.iter_mut().map(Vec::as_mut_slice).collect();
                        // SAFETY: the request stays in `requests`, untouched, until it has come
                        // back.
                        if let Ok(token) = unsafe { driver.add(&inputs, &mut outputs) } {
                            prop_assert!(requests[usize::from(token)].replace(request).is_none());
                            available.push_back(token);
                            prop_assert_eq!(driver.should_notify(), kicks);
                        }
                    }
                    Op::Pop => {
                        let fetch = |addr, out: &mut [u8]| at(addr, out.len()).read(0, out);
                        let popped = device.pop(&mut batch, fetch).unwrap();
                        prop_assert_eq!(popped, available.len().min(5));
                        for chain in batch.chains() {
                            let token = available.pop_front().unwrap();
                            prop_assert_eq!(chain.head, token);
                            let request = requests[usize::from(token)].as_ref().unwrap();
                            let mut bytes = Vec::new();
                            for segment in batch.readable(chain) {
                                let start = bytes.len();
                                bytes.resize(start + segment.len as usize, 0);
                                let area = at(segment.addr, segment.len as usize);
                                prop_assert!(area.read(0, &mut bytes[start..]));
                            }
                            prop_assert_eq!(&bytes, &request.readable.concat());
                            prop_assert_eq!(chain.readable_len() as usize, bytes.len());
                            let sum = sum(bytes.into_iter());
                            let mut written = 0;
                            for segment in batch.writable(chain) {
                                let len = segment.len as usize;
                                let bytes: Vec<u8> =
                                    (written..written + len).map(|i| answer(sum, i)).collect();
                                prop_assert!(at(segment.addr, len).write(0, &bytes));
                                written += len;
                            }
                            prop_assert_eq!(chain.writable_len() as usize, written);
                            in_flight.push((token, written as u32));
                        }
                    }
                    Op::Complete(which) => {
                        if !in_flight.is_empty() {
                            let (head, written) = in_flight.swap_remove(which % in_flight.len());
                            device.complete(head, written).unwrap();
                            staged.push_back((head, written));
                        }
                    }
                    Op::PublishUsed => {
                        prop_assert_eq!(device.publish(), Ok(interrupts && !staged.is_empty()));
                        used.append(&mut staged);
                    }
                    Op::TakeBack => {
                        let Some((head, written)) = used.pop_front() else {
                            prop_assert!(!driver.can_pop());
                            continue;
                        };
                        prop_assert_eq!(driver.peek_used(), Some(head));
                        let mut request = requests[usize::from(head)].take().unwrap();
                        let inputs: Vec<&[u8]> = request.readable.iter().map(Vec::as_slice).collect();
                        let mut outputs: Vec<&mut [u8]> =
                            request.writable.iter_mut().map(Vec::as_mut_slice).collect();
                        // SAFETY: these are the buffers that were added under this token.
                        let len = unsafe { driver.pop_used(head, &inputs, &mut outputs) }.unwrap();
                        prop_assert_eq!(len, written);
                        let sum = sum(request.readable.concat().into_iter());
                        let expected: Vec<u8> =
                            (0..written as usize).map(|i| answer(sum, i)).collect();
                        prop_assert_eq!(request.writable.concat(), expected);
                    }
                    Op::Arm => {
                        prop_assert_eq!(device.arm_kicks(), Ok(!available.is_empty()));
                        kicks = true;
                    }
                    Op::DisableKicks => {
                        device.disable_kicks();
                        kicks = false;
                    }
                    Op::WantInterrupts(wanted) => {
                        driver.set_dev_notify(*wanted);
                        interrupts = *wanted;
                    }
                }
                prop_assert_eq!(usize::from(device.in_flight()), in_flight.len());
            }
        }
    }
}
