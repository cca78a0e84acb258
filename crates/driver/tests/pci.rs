//! The driver's side of PCI against a function in plain memory.
//!
//! Reads return what was written. Each test spoils one place.
use paravane_driver::pci::{Ecam, Function, Message, Pci, Space};
use paravane_driver::{DriverError, Transport, Virtio};
use paravane_spec::pci::{self, NO_VENDOR, cap, capability, command, common, ecam, header, msix};
use paravane_spec::queue::QueueAddresses;
use paravane_spec::{device_id, feature, mmio, status};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

const ECAM: u64 = 0xb000_0000;
const WINDOW: std::ops::Range<u64> = 0xe000_0000..0xe010_0000;
const BAR: u64 = 0xe000_0000;
/// Where the function's configuration space is: device 3.
const FUNCTION: u64 = ECAM + 3 * ecam::FUNCTIONS * ecam::FUNCTION;
const MSIX_AT: u16 = 0x40;
const NOTIFY_AT: u16 = 0x80;
/// In the BAR.
const COMMON: u64 = 0;
const ISR: u64 = 0x1000;
const DEVICE: u64 = 0x2000;
const TABLE: u64 = 0x8000;
const NOTIFY: u64 = 0x1_0000;

/// Memory.
///
/// What was never written reads as ones in the configuration spaces and as 0 elsewhere.
#[derive(Clone, Default)]
struct Memory(Rc<RefCell<State>>);

#[derive(Default)]
struct State {
    bytes: BTreeMap<u64, u8>,
    /// Every write, in order: address, width, value.
    writes: Vec<(u64, usize, u32)>,
}

impl Memory {
    fn get<const N: usize>(&self, addr: u64) -> [u8; N] {
        assert!(addr.is_multiple_of(N as u64), "{addr:#x} is not aligned to {N}");
        let ecam = ECAM..ECAM + ecam::BUS;
        assert!(ecam.contains(&addr) || WINDOW.contains(&addr), "{addr:#x} is nobody's");
        let state = self.0.borrow();
        std::array::from_fn(|n| {
            let there = (FUNCTION..FUNCTION + ecam::FUNCTION).contains(&addr) || WINDOW.contains(&addr);
            state.bytes.get(&(addr + n as u64)).copied().unwrap_or(if there { 0 } else { 0xff })
        })
    }

    fn put<const N: usize>(&self, addr: u64, value: [u8; N]) {
        self.get::<N>(addr);
        let mut word = [0; 4];
        word[..N].copy_from_slice(&value);
        self.0.borrow_mut().writes.push((addr, N, u32::from_le_bytes(word)));
        self.set(addr, value);
    }

    fn set<const N: usize>(&self, addr: u64, value: [u8; N]) {
        let mut state = self.0.borrow_mut();
        for (addr, byte) in (addr..).zip(value) {
            state.bytes.insert(addr, byte);
        }
    }

    fn config<const N: usize>(&self, register: u16, value: [u8; N]) {
        self.set(FUNCTION + u64::from(register), value);
    }

    /// A block device with two queues and four vectors.
    fn good() -> Self {
        let memory = Self::default();
        memory.config(header::VENDOR, pci::VENDOR.to_le_bytes());
        memory.config(header::DEVICE, (pci::DEVICE_BASE + 2).to_le_bytes());
        memory.config(header::STATUS, header::STATUS_CAPABILITIES.to_le_bytes());
        memory.config(header::BAR, (BAR | 4).to_le_bytes());
        memory.config(header::CAPABILITIES, [MSIX_AT as u8]);
        memory.config(MSIX_AT, [capability::MSIX, 0x50, 3, 0]);
        memory.config(MSIX_AT + msix::TABLE, (TABLE as u32).to_le_bytes());
        for (at, next, kind, offset, len) in [
            (0x50, 0x60, cap::COMMON, COMMON, common::LENGTH),
            (0x60, 0x70, cap::ISR, ISR, 1),
            (0x70, NOTIFY_AT, cap::DEVICE, DEVICE, 0x100),
            (NOTIFY_AT, 0, cap::NOTIFY, NOTIFY, 8),
        ] {
            memory.config(at, [capability::VENDOR, next as u8, 16, kind]);
            memory.config(at + cap::OFFSET, (offset as u32).to_le_bytes());
            memory.config(at + cap::LENGTH, (len as u32).to_le_bytes());
        }
        memory.config(NOTIFY_AT + cap::NOTIFY_OFF_MULTIPLIER, 4_u32.to_le_bytes());
        memory.set(BAR + common::NUM_QUEUES, 2_u16.to_le_bytes());
        memory.set(BAR + common::QUEUE_SIZE, 256_u16.to_le_bytes());
        memory
    }

    fn ecam(&self) -> Ecam<Self> {
        Ecam::new(self.clone(), ECAM, WINDOW)
    }

    fn function(&self) -> Function<Self> {
        self.ecam().function(3).unwrap()
    }

    fn open(&self) -> Result<Pci<Self>, DriverError> {
        Pci::open(self.function())
    }

    fn written(&self, addr: u64) -> Vec<u32> {
        self.0.borrow().writes.iter().filter(|write| write.0 == addr).map(|write| write.2).collect()
    }
}

impl Space for Memory {
    fn read8(&self, addr: u64) -> u8 {
        self.get::<1>(addr)[0]
    }
    fn read16(&self, addr: u64) -> u16 {
        u16::from_le_bytes(self.get(addr))
    }
    fn read32(&self, addr: u64) -> u32 {
        u32::from_le_bytes(self.get(addr))
    }
    fn write8(&self, addr: u64, value: u8) {
        self.put(addr, [value]);
    }
    fn write16(&self, addr: u64, value: u16) {
        self.put(addr, value.to_le_bytes());
    }
    fn write32(&self, addr: u64, value: u32) {
        self.put(addr, value.to_le_bytes());
    }
}

fn message(number: u16) -> Message {
    Message { address: 0xfee0_0000, data: 0x60 + u32::from(number) }
}

const QUEUE: QueueAddresses =
    QueueAddresses { size: 64, desc: 0x1_0000_1000, driver: 0x2000, device: 0x3000 };

#[test]
fn the_bus_is_searched() {
    let memory = Memory::good();
    let found: Vec<_> = memory.ecam().functions().map(|function| function.virtio()).collect();
    assert_eq!(found, [Some(device_id::BLK)]);
    assert!(memory.ecam().function(200).is_none());
    memory.config(header::VENDOR, NO_VENDOR.to_le_bytes());
    assert_eq!(memory.ecam().functions().count(), 0);
}

#[test]
fn a_device_is_opened_and_negotiated_with() {
    let memory = Memory::good();
    let pci = memory.open().unwrap();
    let on = u32::from(command::MEMORY | command::BUS_MASTER);
    assert_eq!(memory.written(FUNCTION + u64::from(header::COMMAND)), [on]);
    let mut device = Virtio::probe(pci, device_id::BLK).unwrap();
    // Each word of the offer reads the same in plain memory.
    memory.set(BAR + common::DEVICE_FEATURE, 1_u32.to_le_bytes());
    assert_eq!(device.negotiate(feature::VERSION_1, 1), Ok(feature::VERSION_1 | 1));
    assert_eq!(memory.written(BAR + common::DRIVER_FEATURE), [1, 1]);
    let ladder = [0, 1, 3, 11];
    assert_eq!(memory.written(BAR + common::DEVICE_STATUS), ladder);
    assert_eq!(device.status(), status::ACKNOWLEDGE | status::DRIVER | status::FEATURES_OK);
    memory.set(BAR + ISR, [0xff]);
    assert_eq!(device.interrupt(), Ok(mmio::INT_USED_BUFFER | mmio::INT_CONFIG_CHANGE));
}

#[test]
fn what_is_no_modern_virtio_device_is_refused() {
    for (register, value) in [
        (header::VENDOR, 0x8086),
        (header::DEVICE, 0x1001),
        (header::DEVICE, 0x1080),
        (header::HEADER_TYPE, 1),
    ] {
        let memory = Memory::good();
        memory.config(register, u16::to_le_bytes(value));
        assert!(matches!(memory.open(), Err(DriverError::Function { .. })), "{register:#x} = {value:#x}");
    }
}

#[test]
fn a_list_of_capabilities_that_does_not_end_or_leaves_its_space() {
    for (at, next) in [(MSIX_AT, 0x40), (NOTIFY_AT, 0x50), (0x50, 0x3c), (0x50, 0x04)] {
        let memory = Memory::good();
        memory.config(at + 1, [next]);
        let error = memory.open().map(|_| ()).unwrap_err();
        assert!(matches!(error, DriverError::Capabilities(_)), "{next:#x}: {error}");
    }
    let memory = Memory::good();
    memory.config(header::STATUS, [0, 0]);
    assert_eq!(memory.open().map(|_| ()), Err(DriverError::Structure(cap::COMMON)));
}

#[test]
fn a_structure_that_is_missing_too_short_or_elsewhere() {
    let spoilt: [(u16, u16, u32, u8); 10] = [
        (0x50, cap::OFFSET, 2, cap::COMMON),
        (NOTIFY_AT, cap::OFFSET, 0x1_0001, cap::NOTIFY),
        (0x50, cap::LENGTH, common::LEAST as u32 - 1, cap::COMMON),
        (0x50, cap::OFFSET, WINDOW.end as u32, cap::COMMON),
        (0x50, cap::LENGTH, u32::MAX, cap::COMMON),
        (0x60, cap::LENGTH, 0, cap::ISR),
        (0x60, cap::OFFSET, u32::MAX, cap::ISR),
        (NOTIFY_AT, cap::LENGTH, 1, cap::NOTIFY),
        (NOTIFY_AT, cap::OFFSET, 0x10_0000 - 7, cap::NOTIFY),
        (0x50, 0, 0, cap::COMMON),
    ];
    for (at, field, value, kind) in spoilt {
        let memory = Memory::good();
        match field {
            0 => memory.config(at, [0]),
            _ => memory.config(at + field, value.to_le_bytes()),
        }
        assert_eq!(
            memory.open().map(|_| ()),
            Err(DriverError::Structure(kind)),
            "{at:#x}+{field} = {value:#x}"
        );
    }
    for bar in [1_u8, 2, 6, 255] {
        let memory = Memory::good();
        memory.config(0x50 + cap::BAR, [bar]);
        assert_eq!(memory.open().map(|_| ()), Err(DriverError::Structure(cap::COMMON)), "BAR {bar}");
    }
}

#[test]
fn a_bar_that_claims_to_be_ram_or_ports_is_not_touched() {
    for bar in [0x10_0004, 4, WINDOW.start - 4092, 0xffff_ffff_ffff_f004, WINDOW.start + 1, WINDOW.start + 6]
    {
        let memory = Memory::good();
        memory.config(header::BAR, u64::to_le_bytes(bar));
        assert_eq!(memory.open().map(|_| ()), Err(DriverError::Structure(cap::COMMON)), "{bar:#x}");
        assert_eq!(memory.0.borrow().writes, []);
    }
}

#[test]
fn a_queue_is_kicked_at_its_own_address() {
    let memory = Memory::good();
    let mut pci = memory.open().unwrap();
    memory.set(BAR + common::QUEUE_NOTIFY_OFF, 1_u16.to_le_bytes());
    pci.enable_queue(5, &QUEUE).unwrap();
    assert_eq!(memory.written(BAR + common::QUEUE_ENABLE), [1]);
    assert_eq!(memory.written(BAR + common::QUEUE_DESC + 4), [1]);
    pci.notify(5, None);
    pci.notify(5, Some(0x1234_0005));
    assert_eq!(memory.written(BAR + NOTIFY + 4), [5, 0x1234_0005]);
    let before = memory.0.borrow().writes.len();
    pci.notify(6, None);
    assert_eq!(memory.0.borrow().writes.len(), before);
}

#[test]
fn a_notification_address_outside_of_its_structure_is_refused() {
    for (off, multiplier) in [(2, 4), (1, 8), (0xffff, u32::MAX), (1, 5)] {
        let memory = Memory::good();
        memory.config(NOTIFY_AT + cap::NOTIFY_OFF_MULTIPLIER, u32::to_le_bytes(multiplier));
        memory.set(BAR + common::QUEUE_NOTIFY_OFF, u16::to_le_bytes(off));
        let mut pci = memory.open().unwrap();
        assert_eq!(pci.enable_queue(0, &QUEUE), Err(DriverError::Queue(0)), "{off} times {multiplier}");
        assert_eq!(memory.written(BAR + common::QUEUE_ENABLE), []);
    }
}

#[test]
fn messages_are_set_under_the_function_mask() {
    let memory = Memory::good();
    let mut pci = memory.open().unwrap();
    assert!(pci.use_messages(message));
    assert_eq!(pci.messages(), 3);
    let control = FUNCTION + u64::from(MSIX_AT + msix::CONTROL);
    let [masked, on] = [msix::ENABLE | msix::FUNCTION_MASK, msix::ENABLE].map(u32::from);
    assert_eq!(memory.written(control), [masked, on]);
    for vector in 0..4 {
        let entry = BAR + TABLE + vector * msix::ENTRY;
        let data = if vector < 3 { vec![0x60 + vector as u32] } else { vec![] };
        assert_eq!(memory.written(entry + msix::DATA), data);
        assert_eq!(memory.written(entry + msix::VECTOR_CONTROL), [u32::from(vector == 3)]);
    }
    {
        let state = memory.0.borrow();
        assert_eq!((state.writes[1].0, state.writes.last().unwrap().0), (control, control));
    }
    pci.set_up_interrupts(0).unwrap();
    for queue in [0, 1, 9] {
        pci.enable_queue(queue, &QUEUE).unwrap();
    }
    assert_eq!(memory.written(BAR + common::CONFIG_MSIX_VECTOR), [0]);
    assert_eq!(memory.written(BAR + common::QUEUE_MSIX_VECTOR), [1, 2, 2]);
    assert_eq!(pci.take_causes(), mmio::INT_CONFIG_CHANGE);
}

#[test]
fn a_message_moves_under_the_mask_of_its_vector() {
    let memory = Memory::good();
    let mut pci = memory.open().unwrap();
    let moved = Message { address: 0xfee0_3000, data: 0x80 };
    assert_eq!(pci.set_message(1, moved), Err(DriverError::Message(1)));
    assert!(pci.use_messages(message));
    // Queue 9 shares the last of the three vectors.
    for (number, vector) in [(1, 1), (10, 2)] {
        let before = memory.0.borrow().writes.len();
        pci.set_message(number, moved).unwrap();
        let entry = BAR + TABLE + vector * msix::ENTRY;
        let writes: Vec<_> =
            memory.0.borrow().writes[before..].iter().map(|write| (write.0, write.2)).collect();
        let expected = [
            (entry + msix::VECTOR_CONTROL, msix::MASKED),
            (entry + msix::ADDRESS_LOW, 0xfee0_3000),
            (entry + msix::ADDRESS_HIGH, 0),
            (entry + msix::DATA, 0x80),
            (entry + msix::VECTOR_CONTROL, 0),
        ];
        assert_eq!(writes, expected);
    }
}

#[test]
fn without_a_usable_table_the_wire_stays() {
    for table in [TABLE as u32 | 6, 0xfff_fff8, 0x10_0000 - 56] {
        let memory = Memory::good();
        memory.config(MSIX_AT + msix::TABLE, table.to_le_bytes());
        let mut pci = memory.open().unwrap();
        assert!(!pci.use_messages(message));
        pci.enable_queue(0, &QUEUE).unwrap();
        assert_eq!(memory.written(BAR + common::QUEUE_MSIX_VECTOR), []);
    }
}

/// A device that takes no vector: writes to the two fields do not stick.
#[derive(Clone)]
struct Stubborn(Memory);

impl Space for Stubborn {
    fn read8(&self, addr: u64) -> u8 {
        self.0.read8(addr)
    }
    fn read16(&self, addr: u64) -> u16 {
        match addr - BAR.min(addr) {
            common::CONFIG_MSIX_VECTOR | common::QUEUE_MSIX_VECTOR => 0xffff,
            _ => self.0.read16(addr),
        }
    }
    fn read32(&self, addr: u64) -> u32 {
        self.0.read32(addr)
    }
    fn write8(&self, addr: u64, value: u8) {
        self.0.write8(addr, value);
    }
    fn write16(&self, addr: u64, value: u16) {
        self.0.write16(addr, value);
    }
    fn write32(&self, addr: u64, value: u32) {
        self.0.write32(addr, value);
    }
}

#[test]
fn a_vector_that_does_not_stick_is_an_error() {
    let ecam = Ecam::new(Stubborn(Memory::good()), ECAM, WINDOW);
    let mut pci = Pci::open(ecam.function(3).unwrap()).unwrap();
    assert!(pci.use_messages(message));
    assert_eq!(pci.set_up_interrupts(0), Err(DriverError::Vector { wanted: 0, got: 0xffff }));
    assert_eq!(pci.enable_queue(0, &QUEUE), Err(DriverError::Vector { wanted: 1, got: 0xffff }));
}

#[test]
fn the_configuration_space_ends_where_the_device_says() {
    let memory = Memory::good();
    memory.set(BAR + DEVICE + 0xfc, 0x1234_5678_u32.to_le_bytes());
    let pci = memory.open().unwrap();
    assert_eq!((pci.config32(0xfc), pci.config32(0x100), pci.config8(0x100)), (0x1234_5678, 0, 0));
    assert_eq!(pci.config32(u64::MAX - 3), 0);
}
