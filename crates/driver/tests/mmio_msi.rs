//! The driver's side of docs/reference/virtio-mmio-msi.md.
//!
//! Against our register machine, and against one that lies.
use paravane_driver::mmio::{Mmio, Registers};
use paravane_driver::{DriverError, Message, Transport, Virtio};
use paravane_notify::msi::{MsiController, MsiMessage, MsiSink, MsiTable};
use paravane_notify::{Interrupts, NotifyError};
use paravane_spec::mmio::{INT_CONFIG_CHANGE, INT_USED_BUFFER};
use paravane_spec::mmio_msi::{
    self as msi, F_MSI, F_NOTIFICATION, MSI_LIMIT, NOTIFY_BASE, NOTIFY_MULTIPLIER,
};
use paravane_spec::queue::QueueAddresses;
use paravane_spec::{device_id, feature, mmio, status};
use paravane_test_support::NoInterrupt;
use paravane_transport::Transport as _;
use paravane_transport::{DeviceDescription, Effect, mmio::Mmio as Machine};
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::{Arc, Mutex};

const QUEUES: [u16; 3] = [8, 8, 8];
const OFFERED: u64 = feature::VERSION_1 | feature::RING_RESET | F_MSI | F_NOTIFICATION;

/// Sends messages by keeping their data. Data from `limit` on is refused.
#[derive(Clone, Default)]
struct Platform {
    sent: Arc<Mutex<Vec<u32>>>,
    limit: Option<u32>,
}

impl MsiController for Platform {
    fn sink(&self) -> Result<Box<dyn MsiSink>, NotifyError> {
        Ok(Box::new(self.clone()))
    }
}

impl MsiSink for Platform {
    fn route(&self, message: MsiMessage) -> Result<(), NotifyError> {
        if self.limit.is_some_and(|limit| message.data >= limit) {
            return Err(NotifyError::Message { address: message.address, data: message.data });
        }
        paravane_test_support::apic_vector(message).map(|_| ()).ok_or(message.refused())
    }

    fn fire(&self, message: MsiMessage) {
        self.sent.lock().unwrap().push(message.data);
    }
}

/// A register, and what was written there, if it was not read.
type Access = (u64, Option<u32>);

/// Our device, with a log of the accesses, and registers that lie.
#[derive(Clone)]
struct Device {
    machine: Rc<RefCell<Machine>>,
    interrupts: Arc<Interrupts>,
    platform: Platform,
    accesses: Rc<RefCell<Vec<Access>>>,
    lies: Rc<RefCell<Vec<(u64, u32)>>>,
    window: u64,
}

impl Device {
    fn new(platform: Platform, offered: u64) -> Self {
        let table = MsiTable::new(&platform, QUEUES.len() as u16 + 1, QUEUES.len()).unwrap();
        let interrupts = Arc::new(Interrupts::with_msi(Arc::new(NoInterrupt), table));
        let description =
            DeviceDescription { device_id: device_id::RNG, features: offered, queue_sizes: QUEUES.to_vec() };
        let machine = Machine::new(description, Arc::clone(&interrupts));
        Self {
            machine: Rc::new(RefCell::new(machine)),
            interrupts,
            platform,
            accesses: Rc::default(),
            lies: Rc::default(),
            window: msi::WINDOW,
        }
    }

    /// From now on these registers read so.
    fn lie<const N: usize>(&self, lies: [(u64, u32); N]) {
        *self.lies.borrow_mut() = lies.to_vec();
    }

    fn sent(&self) -> Vec<u32> {
        self.platform.sent.lock().unwrap().drain(..).collect()
    }

    fn accesses(&self) -> Vec<Access> {
        self.accesses.borrow_mut().drain(..).collect()
    }

    /// One interrupt of each source.
    fn interrupt_all(&self) -> Vec<u32> {
        self.machine.borrow_mut().config_changed();
        for queue in 0..QUEUES.len() as u16 {
            self.interrupts.used_buffer(queue);
        }
        self.sent()
    }
}

impl Registers for Device {
    fn read32(&self, offset: u64) -> u32 {
        self.accesses.borrow_mut().push((offset, None));
        if let Some(&(_, lie)) = self.lies.borrow().iter().find(|(at, _)| *at == offset) {
            return lie;
        }
        let mut data = [0; 4];
        self.machine.borrow().read(offset, &mut data, |_, out| out.fill(0));
        u32::from_le_bytes(data)
    }

    fn write32(&self, offset: u64, value: u32) {
        assert!(offset + 4 <= self.window, "a write beyond the device, at {offset:#x}");
        self.accesses.borrow_mut().push((offset, Some(value)));
        let mut machine = self.machine.borrow_mut();
        match machine.write(offset, &value.to_le_bytes()) {
            Some(Effect::Reset) => machine.reset_done(),
            Some(Effect::ResetQueue { queue }) => machine.queue_reset_done(queue),
            _ => {}
        }
    }

    fn read16(&self, _offset: u64) -> u16 {
        0
    }

    fn read8(&self, _offset: u64) -> u8 {
        0
    }

    fn window(&self) -> u64 {
        self.window
    }
}

fn messages(first: u32, count: u32) -> Vec<Message> {
    (first..first + count).map(|data| Message { address: 0xfee0_0000, data }).collect()
}

fn at() -> QueueAddresses {
    QueueAddresses { size: 8, desc: 0x1000, driver: 0x2000, device: 0x3000 }
}

/// Negotiates as [`Virtio`] does, and leaves the transport to the test.
fn negotiate(device: &Device, messages: Vec<Message>) -> Result<Mmio<Device>, DriverError> {
    let mut transport = Mmio::new(device.clone())?;
    transport.use_messages(messages);
    transport.set_status(status::ACKNOWLEDGE | status::DRIVER);
    let accepted = transport.device_features()
        & (feature::VERSION_1 | feature::RING_RESET | transport.wanted_features());
    transport.set_driver_features(accepted);
    transport.set_status(status::ACKNOWLEDGE | status::DRIVER | status::FEATURES_OK);
    transport.set_up_interrupts(accepted)?;
    Ok(transport)
}

fn start(device: &Device, messages: Vec<Message>) -> Result<Mmio<Device>, DriverError> {
    let mut transport = negotiate(device, messages)?;
    for queue in 0..QUEUES.len() as u16 {
        transport.enable_queue(queue, &at())?;
        assert!(transport.queue_enabled(queue));
    }
    transport.set_status(transport.status() | status::DRIVER_OK);
    Ok(transport)
}

#[test]
fn each_source_has_the_message_that_was_meant_for_it() {
    let device = Device::new(Platform::default(), OFFERED);
    let transport = start(&device, messages(0x60, 4)).unwrap();
    assert!(transport.uses_messages());
    assert_eq!(device.interrupt_all(), [0x60, 0x61, 0x62, 0x63]);
    assert_eq!(device.machine.borrow().violations(), 0);
    // Neither status nor acknowledgement is touched.
    device.accesses();
    assert_eq!(transport.take_causes(), INT_CONFIG_CHANGE);
    assert_eq!(device.accesses(), []);
}

#[test]
fn queues_beyond_share_the_last_message() {
    let device = Device::new(Platform::default(), OFFERED);
    let _transport = start(&device, messages(0x60, 2)).unwrap();
    assert_eq!(device.interrupt_all(), [0x60, 0x61, 0x61, 0x61]);
    let limited = Device::new(Platform::default(), OFFERED);
    limited.lie([(MSI_LIMIT, 3)]);
    let _transport = start(&limited, messages(0x60, 4)).unwrap();
    assert_eq!(limited.interrupt_all(), [0x60, 0x61, 0x62, 0x62]);
}

#[test]
fn a_kick_is_one_write_to_the_queues_own_address() {
    let device = Device::new(Platform::default(), OFFERED);
    let transport = start(&device, Vec::new()).unwrap();
    device.accesses();
    transport.notify(2, None);
    transport.notify(1, Some(0x8005_0001));
    assert_eq!(device.accesses(), [(0x1008, Some(2)), (0x1004, Some(0x8005_0001))]);
    assert_eq!(device.machine.borrow().violations(), 0);
}

#[test]
fn without_messages_or_without_the_bits_the_wire_is_used() {
    for (offered, given) in [(OFFERED, 0), (OFFERED & !F_MSI, 4), (feature::VERSION_1, 4)] {
        let device = Device::new(Platform::default(), offered);
        let transport = start(&device, messages(0x60, given)).unwrap();
        assert!(!transport.uses_messages());
        assert_eq!(device.interrupt_all(), []);
        assert_eq!(transport.take_causes(), INT_USED_BUFFER | INT_CONFIG_CHANGE);
        assert_eq!(device.interrupts.line().status(), 0);
        assert_eq!(device.machine.borrow().violations(), 0);
    }
}

#[test]
fn another_vendors_bits_are_not_taken_for_ours() {
    let device = Device::new(Platform::default(), OFFERED);
    device.lie([(mmio::VENDOR_ID, 0x1af4)]);
    let transport = start(&device, messages(0x60, 4)).unwrap();
    assert!(!transport.uses_messages());
    device.accesses();
    transport.notify(1, None);
    assert_eq!(device.accesses(), [(mmio::QUEUE_NOTIFY, Some(1))]);
}

#[test]
fn a_refused_message_sends_everything_back_to_the_wire() {
    // The first that is refused: the configuration's, a queue's in the middle, the last one's.
    for limit in [0x60, 0x62, 0x63] {
        let platform = Platform { limit: Some(limit), ..Platform::default() };
        let device = Device::new(platform, OFFERED);
        let transport = start(&device, messages(0x60, 4)).unwrap();
        assert!(!transport.uses_messages());
        assert_eq!(device.interrupt_all(), []);
        assert_eq!(transport.take_causes(), INT_USED_BUFFER | INT_CONFIG_CHANGE);
        assert_eq!(device.machine.borrow().violations(), 0);
    }
}

#[test]
fn a_message_moves_while_the_device_works() {
    let device = Device::new(Platform { limit: Some(0x80), ..Platform::default() }, OFFERED);
    let transport = start(&device, messages(0x60, 4)).unwrap();
    device.accesses();
    let moved = |number: u16, data| transport.set_message(number, Message { address: 0xfee0_3000, data });
    assert_eq!(moved(2, 0x72), Ok(()));
    let commands = device.accesses();
    let commands = commands.iter().filter(|(at, _)| *at == msi::MSI_COMMAND).map(|(_, value)| *value);
    let commands: Vec<_> = commands.flatten().collect();
    assert_eq!(commands, [msi::command::MASK, msi::command::CONFIGURE, msi::command::UNMASK]);
    assert_eq!(moved(0, 0x70), Ok(()));
    assert_eq!(device.interrupt_all(), [0x70, 0x61, 0x72, 0x63]);
    // A refused one leaves the old one, and nothing masked.
    assert_eq!(moved(1, 0x90), Err(DriverError::Message(0)));
    assert_eq!(moved(9, 0x70), Err(DriverError::Message(8)));
    assert_eq!(device.interrupt_all(), [0x70, 0x61, 0x72, 0x63]);
    let plain = Device::new(Platform::default(), OFFERED & !F_MSI);
    let transport = start(&plain, messages(0x60, 4)).unwrap();
    let message = Message { address: 0xfee0_0000, data: 0x60 };
    assert_eq!(transport.set_message(1, message), Err(DriverError::Message(1)));
}

#[test]
fn a_refusal_when_it_is_too_late_is_an_error() {
    let device = Device::new(Platform::default(), OFFERED);
    let mut transport = start(&device, messages(0x60, 4)).unwrap();
    // A queue that is reset has no message until it is enabled again.
    transport.reset_queue(1);
    assert_eq!(device.interrupt_all(), [0x60, 0x61, 0x63]);
    transport.enable_queue(1, &at()).unwrap();
    assert_eq!(device.interrupt_all(), [0x60, 0x61, 0x62, 0x63]);
    transport.reset_queue(1);
    device.lie([(msi::MSI_STATE, msi::state::ON | msi::state::REFUSED)]);
    assert_eq!(transport.enable_queue(1, &at()), Err(DriverError::Message(1)));
    assert!(!transport.queue_enabled(1));
}

#[test]
fn a_device_that_cannot_be_told_to_use_its_wire_is_given_up() {
    let device = Device::new(Platform::default(), OFFERED);
    device.lie([(msi::MSI_STATE, msi::state::ON | msi::state::REFUSED)]);
    let refused = Err(DriverError::Message(msi::SELECT_CONFIGURATION));
    assert_eq!(start(&device, messages(0x60, 4)).map(|_| ()), refused);
}

#[test]
fn a_device_cannot_make_the_driver_write_just_anywhere() {
    for (base, multiplier) in
        [(0, 4), (0x50, 4), (0x1000, 0), (0x1000, 2), (0x1000, 0x7fff_fffc), (0x2000, 4), (0xffff_f000, 4)]
    {
        let device = Device::new(Platform::default(), OFFERED);
        device.lie([(NOTIFY_BASE, base), (NOTIFY_MULTIPLIER, multiplier)]);
        let started = start(&device, Vec::new()).map(|_| ());
        assert!(matches!(started, Err(DriverError::Queue(_))), "{base:#x} {multiplier:#x}: {started:?}");
    }
    // Where firmware gives no room for them the addresses are not asked for.
    let mut small = Device::new(Platform::default(), OFFERED);
    small.window = mmio::WINDOW;
    let transport = start(&small, Vec::new()).unwrap();
    small.accesses();
    transport.notify(1, None);
    assert_eq!(small.accesses(), [(mmio::QUEUE_NOTIFY, Some(1))]);
}

#[test]
fn a_reset_turns_messages_off() {
    let device = Device::new(Platform::default(), OFFERED);
    drop(start(&device, messages(0x60, 4)).unwrap());
    let mut transport = Mmio::new(device.clone()).unwrap();
    transport.use_messages(messages(0x70, 4));
    let mut again = Virtio::probe(transport, device_id::RNG).unwrap();
    assert!(!device.interrupts.msi_on());
    let accepted = again.negotiate(feature::VERSION_1, 0).unwrap();
    assert_eq!(accepted, feature::VERSION_1 | F_MSI | F_NOTIFICATION);
    assert!(device.interrupts.msi_on());
    again.reset().unwrap();
    assert!(!device.interrupts.msi_on());
}
