//! A device and a driver made of register writes.
use crate::{AttachedDevice, Builder, InterruptFn, LocalIoEventFds};
use paravane_device::rng::Rng;
use paravane_device::{Device, QueueHandler};
use paravane_dma::{Access, Backing, Domain, Handle, Memory, Region, RegionConfig};
use paravane_io::{IoPool, Loan, QueueBackend, Spread};
use paravane_notify::msi::{MsiController, MsiMessage, MsiSink};
use paravane_notify::{IoEventFds, NoIoEventFds, NotifyError};
use paravane_spec::feature;
use paravane_spec::mmio::{
    CONFIG, CONFIG_GENERATION, DRIVER_FEATURES, DRIVER_FEATURES_SEL, INT_CONFIG_CHANGE, INT_USED_BUFFER,
    INTERRUPT_ACK, INTERRUPT_STATUS, QUEUE_DESC_LOW, QUEUE_DEVICE_LOW, QUEUE_DRIVER_LOW, QUEUE_NOTIFY,
    QUEUE_READY, QUEUE_RESET, QUEUE_SEL, QUEUE_SIZE, STATUS, WINDOW,
};
use paravane_spec::mmio_msi::{
    self, MSI_ADDRESS_LOW, MSI_COMMAND, MSI_DATA, NOTIFY_PAGE, SELECT_CONFIGURATION, command,
};
use paravane_spec::status::{ACKNOWLEDGE, DEVICE_NEEDS_RESET, DRIVER, DRIVER_OK, FEATURES_OK, SUSPEND};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

mod reset;
mod saved;

const BASE: u64 = 0xd000_0000;
const DESC: u64 = 0x1000;
const AVAIL: u64 = 0x2000;
const USED: u64 = 0x3000;
const BUFFER: u64 = 0x4000;
const FEATURES_HIGH: u32 = ((feature::VERSION_1 | feature::RING_RESET) >> 32) as u32;

/// Counts messages by their data.
#[derive(Clone, Default)]
struct Apic(Arc<Mutex<BTreeMap<u8, u64>>>);

impl MsiController for Apic {
    fn sink(&self) -> Result<Box<dyn MsiSink>, NotifyError> {
        Ok(Box::new(self.clone()))
    }
}

impl MsiSink for Apic {
    fn route(&self, message: MsiMessage) -> Result<(), NotifyError> {
        paravane_test_support::apic_vector(message).map(|_| ()).ok_or(message.refused())
    }

    fn fire(&self, message: MsiMessage) {
        *self.0.lock().entry(paravane_test_support::apic_vector(message).unwrap()).or_default() += 1;
    }
}

impl Apic {
    /// The vectors that had messages, and how many.
    fn taken(&self) -> Vec<(u8, u64)> {
        self.0.lock().iter().map(|(&vector, &count)| (vector, count)).collect()
    }
}

/// An entropy device with one queue of 4, and a driver made of register writes.
struct Rig {
    device: AttachedDevice,
    memory: Handle,
    /// Feature bits of the extension.
    extension: u64,
    available: u16,
}

/// Memory of 1 MiB at 0.
fn memory() -> Memory {
    let config = RegionConfig { gpa: 0, size: 1 << 20, backing: Backing::Pages, writable: true };
    Memory::new(vec![Region::new(config).unwrap()]).unwrap()
}

impl Rig {
    fn new(fds: Arc<dyn IoEventFds>) -> Self {
        Self::with(&memory(), fds, |builder| builder)
    }

    fn with(memory: &Memory, fds: Arc<dyn IoEventFds>, choose: impl FnOnce(Builder) -> Builder) -> Self {
        let attach = |builder| choose(builder).mmio(BASE, InterruptFn::new(|| ()));
        Self::attached(Box::new(Rng::new()), memory, fds, 0, |builder| attach(builder).unwrap())
    }

    /// With two vectors, for the queue and for the configuration change.
    fn with_messages(fds: Arc<dyn IoEventFds>) -> (Self, Apic) {
        let apic = Apic::default();
        let extension = mmio_msi::F_MSI | mmio_msi::F_NOTIFICATION;
        let attach = |builder: Builder| builder.mmio_msi(BASE, InterruptFn::new(|| ()), &apic).unwrap();
        (Self::attached(Box::new(Rng::new()), &memory(), fds, extension, attach), apic.clone())
    }

    fn attached(
        device: Box<dyn Device>,
        memory: &Memory,
        fds: Arc<dyn IoEventFds>,
        extension: u64,
        attach: impl FnOnce(Builder) -> AttachedDevice,
    ) -> Self {
        let pool = Arc::new(IoPool::fixed(1, Duration::ZERO, Spread::Devices).unwrap());
        let builder = AttachedDevice::builder(device, memory);
        let device = attach(builder.io_pool(&pool).ioeventfds(fds));
        Self { device, memory: memory.handle(), extension, available: 0 }
    }

    fn write(&self, offset: u64, value: u32) {
        self.device.write(offset, &value.to_le_bytes());
    }

    fn read(&self, offset: u64) -> u32 {
        let mut data = [0; 4];
        self.device.read(offset, &mut data);
        u32::from_le_bytes(data)
    }

    /// Up to DRIVER_OK, with the descriptor area at `desc`.
    fn start(&mut self, desc: u32) {
        self.set_up(desc);
        self.driver_ok();
    }

    fn driver_ok(&self) {
        self.write(STATUS, ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK);
    }

    fn set_up(&mut self, desc: u32) {
        self.write(STATUS, ACKNOWLEDGE | DRIVER);
        self.write(DRIVER_FEATURES_SEL, 1);
        let extension = (self.extension >> 32) as u32;
        self.write(DRIVER_FEATURES, FEATURES_HIGH | extension);
        self.write(STATUS, ACKNOWLEDGE | DRIVER | FEATURES_OK);
        self.set_up_queue(desc);
    }

    fn set_up_queue(&mut self, desc: u32) {
        self.available = 0;
        for area in [DESC, AVAIL, USED] {
            self.memory.enter().fill(area, 0, 0x1000, Access::WRITE).unwrap();
        }
        self.write(QUEUE_SEL, 0);
        self.write(QUEUE_SIZE, 4);
        self.write(QUEUE_DESC_LOW, desc);
        self.write(QUEUE_DRIVER_LOW, AVAIL as u32);
        self.write(QUEUE_DEVICE_LOW, USED as u32);
        self.write(QUEUE_READY, 1);
    }

    /// Makes a buffer of 64 bytes available.
    fn offer(&mut self) {
        let at = u64::from(self.available % 4);
        self.memory.enter().write_obj(DESC, &BUFFER, Access::WRITE).unwrap();
        self.memory.enter().write_obj(DESC + 8, &64_u32, Access::WRITE).unwrap();
        // WRITE, no next one.
        self.memory.enter().write_obj(DESC + 12, &2_u32, Access::WRITE).unwrap();
        self.memory.enter().write_obj(AVAIL + 4 + 2 * at, &0_u16, Access::WRITE).unwrap();
        self.available += 1;
        self.memory.enter().write_obj(AVAIL + 2, &self.available, Access::FULL | Access::WRITE).unwrap();
    }

    /// From now on the source sends this.
    fn configure(&self, source: u32, vector: u8) {
        self.write(QUEUE_SEL, source);
        self.write(MSI_ADDRESS_LOW, 0xfee0_0000);
        self.write(MSI_DATA, vector.into());
        self.write(MSI_COMMAND, command::CONFIGURE);
    }

    /// Negotiates and starts with MSI.
    ///
    /// Vector 0x40 is the queue's, 0x41 that of the configuration change.
    fn start_with_messages(&mut self) {
        self.set_up(DESC as u32);
        self.write(MSI_COMMAND, command::ENABLE);
        self.configure(0, 0x40);
        self.configure(SELECT_CONFIGURATION, 0x41);
        self.driver_ok();
    }

    fn kick(&self) {
        self.write(QUEUE_NOTIFY, 0);
    }

    fn used(&mut self) -> u16 {
        self.memory.enter().read_obj(USED + 2, Access::READ).unwrap()
    }

    fn wait_for(&mut self, what: &str, condition: impl Fn(&mut Self) -> bool) {
        paravane_test_support::wait_until(what, || condition(self));
    }

    fn needs_reset(&self) -> bool {
        self.read(STATUS) & DEVICE_NEEDS_RESET != 0
    }

    fn served(&mut self) {
        self.offer();
        self.kick();
        let available = self.available;
        self.wait_for("a used buffer", |rig| rig.used() == available);
    }
}

#[test]
fn a_kick_by_ioeventfd_is_served() {
    let fds = Arc::new(LocalIoEventFds::default());
    let mut rig = Rig::new(Arc::clone(&fds) as Arc<dyn IoEventFds>);
    assert!(!fds.signal(BASE + QUEUE_NOTIFY, &[0; 4]));
    rig.start(DESC as u32);
    rig.offer();
    assert!(fds.signal(BASE + QUEUE_NOTIFY, &[0; 4]));
    rig.wait_for("a used buffer", |rig| rig.used() == 1);
    rig.wait_for("an interrupt", |rig| rig.read(INTERRUPT_STATUS) == INT_USED_BUFFER);
    rig.write(INTERRUPT_ACK, INT_USED_BUFFER);
    assert_eq!(rig.read(INTERRUPT_STATUS), 0);
    assert_eq!((rig.device.counters().kicks(), rig.device.exit_kicks(), rig.device.interrupts()), (1, 0, 1));
}

#[test]
fn a_kick_at_the_queues_own_address_is_answered_by_a_message() {
    let fds = Arc::new(LocalIoEventFds::default());
    let (mut rig, apic) = Rig::with_messages(Arc::clone(&fds) as Arc<dyn IoEventFds>);
    rig.start_with_messages();
    assert!(!fds.signal(BASE + QUEUE_NOTIFY, &[0; 4]), "the register goes the long way");
    rig.offer();
    assert!(fds.signal(BASE + NOTIFY_PAGE, &[0x34, 0x12, 0, 0]), "whatever is written");
    rig.wait_for("a message", |_| apic.taken() == [(0x40, 1)]);
    assert_eq!((rig.used(), rig.read(INTERRUPT_STATUS)), (1, 0));
    rig.served();
    rig.wait_for("another message", |_| apic.taken() == [(0x40, 2)]);
    assert_eq!((rig.device.counters().kicks(), rig.device.exit_kicks(), rig.device.messages()), (2, 1, 2));
    // A broken queue is a configuration change.
    rig.memory.enter().write_obj(AVAIL + 2, &1000_u16, Access::WRITE).unwrap();
    assert!(fds.signal(BASE + NOTIFY_PAGE, &[0; 4]));
    rig.wait_for("DEVICE_NEEDS_RESET", |rig| rig.needs_reset());
    rig.wait_for("its message", |_| apic.taken() == [(0x40, 2), (0x41, 1)]);
}

#[test]
fn no_interrupt_is_lost_or_goes_astray_while_its_message_is_rewritten() {
    let fds = Arc::new(LocalIoEventFds::default());
    let (mut rig, apic) = Rig::with_messages(Arc::clone(&fds) as Arc<dyn IoEventFds>);
    rig.start_with_messages();
    let mut before = apic.taken();
    for round in 0..500 {
        let (old, new) = if round % 2 == 0 { (0x50, 0x51) } else { (0x51, 0x50) };
        rig.configure(0, old);
        rig.offer();
        assert!(fds.signal(BASE + NOTIFY_PAGE, &[0; 4]));
        // While the buffer is served; in every third round masked, so that it may wait.
        if round % 3 == 0 {
            rig.write(MSI_COMMAND, command::MASK);
        }
        rig.configure(0, new);
        rig.write(MSI_COMMAND, command::UNMASK);
        let in_force = apic.taken();
        rig.wait_for("the interrupt", |_| count(&apic.taken()) == count(&before) + 1);
        // What came after the change came to the new message.
        assert_eq!(of(&apic.taken(), old), of(&in_force, old), "round {round}: astray");
        before = apic.taken();
    }
    assert_eq!(count(&before), 500);
    assert!(before.iter().all(|(vector, _)| matches!(vector, 0x50 | 0x51)), "{before:?}");
}

fn count(taken: &[(u8, u64)]) -> u64 {
    taken.iter().map(|(_, count)| count).sum()
}

fn of(taken: &[(u8, u64)], vector: u8) -> u64 {
    taken.iter().find(|(number, _)| *number == vector).map_or(0, |(_, count)| *count)
}

#[test]
fn where_the_host_refuses_kicks_exit_and_are_served() {
    let mut rig = Rig::new(Arc::new(NoIoEventFds));
    rig.start(DESC as u32);
    rig.served();
    rig.served();
    assert!(!rig.needs_reset());
    rig.wait_for("the count", |rig| rig.device.counters().kicks() == 2);
    assert_eq!(rig.device.exit_kicks(), 2);
}

/// A back end that takes no queue.
struct Refuses;

impl QueueBackend for Refuses {
    fn start(&mut self, _loan: &mut Loan<'_>) -> io::Result<()> {
        Err(io::ErrorKind::NotConnected.into())
    }

    fn stop(&mut self) -> io::Result<u32> {
        unreachable!("it never started")
    }
}

#[test]
fn a_queue_that_its_back_end_refuses_stays_ours() {
    let fds = Arc::new(LocalIoEventFds::default());
    let refuses = |builder: Builder| builder.lend_to(|_| Box::new(Refuses));
    let mut rig = Rig::with(&memory(), Arc::clone(&fds) as Arc<dyn IoEventFds>, refuses);
    rig.start(DESC as u32);
    rig.offer();
    assert!(fds.signal(BASE + QUEUE_NOTIFY, &[0; 4]), "its ioeventfd is where it was");
    rig.wait_for("a used buffer", |rig| rig.used() == 1);
    rig.served();
    assert!(!rig.needs_reset());
}

/// A back end that takes queues and does nothing.
struct Idle;

impl QueueBackend for Idle {
    fn start(&mut self, loan: &mut Loan<'_>) -> io::Result<()> {
        match loan.parked.state().vring_base() {
            0 => Ok(()),
            other => Err(io::Error::other(format!("position {other}"))),
        }
    }

    fn stop(&mut self) -> io::Result<u32> {
        Ok(0)
    }
}

#[test]
fn a_queue_that_is_lent_at_its_start_was_not_served_before() {
    for _ in 0..50 {
        let fds = Arc::new(LocalIoEventFds::default());
        let mut rig = Rig::with(&memory(), fds, |builder| builder.lend_to(|_| Box::new(Idle)));
        rig.set_up(DESC as u32);
        rig.offer();
        rig.driver_ok();
        assert_eq!(rig.used(), 0);
        rig.device.take_back_queue(0).unwrap();
        rig.wait_for("a used buffer", |rig| rig.used() == 1);
        assert!(!rig.needs_reset());
    }
}

const RUNNING: u32 = ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK;
const SUSPENDED: u32 = ACKNOWLEDGE | DRIVER | FEATURES_OK | SUSPEND;

/// A device that can be suspended.
fn suspendable() -> (Rig, Arc<LocalIoEventFds>) {
    let fds = Arc::new(LocalIoEventFds::default());
    let mut rig = Rig::with(&memory(), Arc::clone(&fds) as Arc<dyn IoEventFds>, Builder::suspendable);
    assert_ne!(rig.device.features() & feature::SUSPEND, 0);
    rig.extension = feature::SUSPEND;
    (rig, fds)
}

#[test]
fn a_suspended_device_goes_on_where_it_was() {
    let (mut rig, fds) = suspendable();
    rig.start(DESC as u32);
    for round in 1..4 {
        rig.served();
        rig.write(STATUS, RUNNING | SUSPEND);
        assert_eq!(rig.read(STATUS), SUSPENDED);
        let used = rig.used();
        // A driver that breaks its promise: the kick waits, and the other is refused.
        rig.offer();
        assert!(fds.signal(BASE + QUEUE_NOTIFY, &[0; 4]));
        let violations = rig.device.violations();
        rig.kick();
        assert_eq!((rig.device.violations(), rig.used()), (violations + 1, used));
        assert!(!rig.device.refresh().unwrap());
        assert!(rig.device.move_queue(0, 0).is_err());
        rig.write(STATUS, SUSPENDED | DRIVER_OK);
        assert_eq!(rig.read(STATUS), RUNNING);
        rig.wait_for("the buffer that waited", |rig| rig.used() == 2 * round);
    }
    assert!(!rig.needs_reset());
}

/// An entropy device whose host side may change once, and whose reset may panic.
struct Altered {
    rng: Rng,
    changes: bool,
    reset_panics: bool,
}

impl Altered {
    fn new() -> Self {
        Self { rng: Rng::new(), changes: false, reset_panics: false }
    }
}

impl Device for Altered {
    fn device_id(&self) -> u32 {
        self.rng.device_id()
    }

    fn features(&self) -> u64 {
        self.rng.features()
    }

    fn queue_sizes(&self) -> &[u16] {
        self.rng.queue_sizes()
    }

    fn read_config(&self, offset: u32, out: &mut [u8]) {
        self.rng.read_config(offset, out);
    }

    fn start_queue(&mut self, index: u16, features: u64) -> io::Result<Box<dyn QueueHandler>> {
        self.rng.start_queue(index, features)
    }

    fn refresh(&mut self) -> io::Result<bool> {
        Ok(std::mem::take(&mut self.changes))
    }

    fn reset(&mut self) {
        assert!(!self.reset_panics, "as the test asks");
        self.rng.reset();
    }
}

#[test]
fn a_refresh_of_a_suspended_device_interrupts_once_at_its_resumption() {
    let memory = memory();
    let mut rig = Rig::attached(
        Box::new(Altered { changes: true, ..Altered::new() }),
        &memory,
        Arc::new(NoIoEventFds),
        0,
        |builder| builder.suspendable().mmio(BASE, InterruptFn::new(|| ())).unwrap(),
    );
    rig.extension = feature::SUSPEND;
    rig.start(DESC as u32);
    let generation = rig.read(CONFIG_GENERATION);
    rig.write(STATUS, RUNNING | SUSPEND);
    assert!(!rig.device.refresh().unwrap());
    assert!(!rig.device.refresh().unwrap());
    assert_eq!((rig.read(CONFIG_GENERATION), rig.device.interrupts()), (generation, 0));
    rig.write(STATUS, SUSPENDED | DRIVER_OK);
    assert_eq!(rig.read(INTERRUPT_STATUS), INT_CONFIG_CHANGE);
    assert_eq!((rig.read(CONFIG_GENERATION), rig.device.interrupts()), (generation + 1, 1));
    // Nothing is left to refresh.
    rig.write(STATUS, RUNNING | SUSPEND);
    rig.write(STATUS, SUSPENDED | DRIVER_OK);
    assert_eq!(rig.device.interrupts(), 1);
}

#[test]
fn a_suspended_device_is_reset_and_starts_anew() {
    let (mut rig, fds) = suspendable();
    for _ in 0..3 {
        rig.start(DESC as u32);
        rig.served();
        rig.write(STATUS, RUNNING | SUSPEND);
        assert_eq!(rig.read(STATUS), SUSPENDED);
        rig.write(STATUS, 0);
        assert_eq!(rig.read(STATUS), 0);
        assert!(!fds.signal(BASE + QUEUE_NOTIFY, &[0; 4]), "its ioeventfd is gone");
    }
    rig.start(DESC as u32);
    rig.write(STATUS, RUNNING | SUSPEND);
    assert!(rig.device.stop().is_some());
    // Nothing starts again.
    rig.write(STATUS, RUNNING);
    assert!(!fds.signal(BASE + QUEUE_NOTIFY, &[0; 4]));
}

#[test]
fn a_queue_that_failed_before_stays_broken() {
    let (mut rig, _fds) = suspendable();
    rig.start(DESC as u32);
    rig.memory.enter().write_obj(AVAIL + 2, &1000_u16, Access::WRITE).unwrap();
    rig.kick();
    rig.wait_for("DEVICE_NEEDS_RESET", |rig| rig.needs_reset());
    rig.write(STATUS, RUNNING | SUSPEND);
    assert_eq!(rig.read(STATUS), RUNNING | DEVICE_NEEDS_RESET);
    rig.write(STATUS, 0);
    rig.start(DESC as u32);
    rig.served();
}

#[test]
fn a_device_is_suspendable_only_where_that_was_asked_for() {
    let mut rig = Rig::new(Arc::new(NoIoEventFds));
    assert_eq!(rig.device.features() & feature::SUSPEND, 0);
    rig.start(DESC as u32);
    rig.write(STATUS, RUNNING | SUSPEND);
    assert_eq!(rig.read(STATUS), RUNNING);
    rig.served();
}

#[test]
fn a_buffer_offered_before_the_start_needs_no_kick() {
    let mut rig = Rig::new(Arc::new(LocalIoEventFds::default()));
    rig.set_up(DESC as u32);
    rig.offer();
    rig.driver_ok();
    rig.wait_for("a used buffer", |rig| rig.used() == 1);
    assert_eq!(rig.device.counters().kicks(), 0);
}

#[test]
fn after_a_reset_nothing_is_used_until_the_next_start() {
    let fds = Arc::new(LocalIoEventFds::default());
    let mut rig = Rig::new(Arc::clone(&fds) as Arc<dyn IoEventFds>);
    for _ in 0..3 {
        rig.start(DESC as u32);
        rig.served();
        rig.write(STATUS, 0);
        assert_eq!(rig.read(STATUS), 0);
        assert_eq!(rig.read(INTERRUPT_STATUS), 0);
        assert!(!fds.signal(BASE + QUEUE_NOTIFY, &[0; 4]), "the ioeventfd is gone");
        rig.offer();
        rig.kick();
        std::thread::sleep(Duration::from_millis(5));
        assert_eq!(rig.used(), 1);
    }
}

#[test]
fn a_broken_queue_asks_for_a_reset_and_works_after_it() {
    let mut rig = Rig::new(Arc::new(LocalIoEventFds::default()));
    rig.start(DESC as u32);
    rig.memory.enter().write_obj(AVAIL + 2, &1000_u16, Access::WRITE).unwrap();
    rig.kick();
    rig.wait_for("DEVICE_NEEDS_RESET", |rig| rig.needs_reset());
    assert_eq!(rig.read(INTERRUPT_STATUS), INT_CONFIG_CHANGE);
    assert!(rig.device.counters().fault_of(0).unwrap().contains("available index"));
    rig.kick();
    rig.write(STATUS, 0);
    assert_eq!(rig.read(STATUS), 0);
    rig.start(DESC as u32);
    rig.served();
}

#[test]
fn a_queue_outside_memory_asks_for_a_reset() {
    let mut rig = Rig::new(Arc::new(LocalIoEventFds::default()));
    rig.start(0xf000_0000);
    assert!(rig.needs_reset());
    assert!(rig.device.counters().fault_of(0).unwrap().contains("no memory there"));
    rig.write(STATUS, 0);
    rig.start(DESC as u32);
    rig.served();
}

#[test]
fn no_access_of_any_width_anywhere_is_fatal() {
    let mut rig = Rig::new(Arc::new(LocalIoEventFds::default()));
    rig.start(DESC as u32);
    for offset in (0..WINDOW + 16).chain([mmio_msi::WINDOW - 1, u64::from(u32::MAX), u64::MAX]) {
        for len in [0, 1, 2, 3, 4, 8] {
            rig.device.read(offset, &mut [0; 8][..len]);
            rig.device.write(offset, &[0xff; 8][..len]);
            rig.device.write(offset, &[0; 8][..len]);
        }
    }
    rig.write(STATUS, 0);
    assert_eq!(rig.read(CONFIG_GENERATION), rig.read(CONFIG_GENERATION));
    rig.start(DESC as u32);
    rig.served();
}

#[test]
fn one_queue_is_reset_and_started_again() {
    let fds = Arc::new(LocalIoEventFds::default());
    let mut rig = Rig::new(Arc::clone(&fds) as Arc<dyn IoEventFds>);
    rig.start(DESC as u32);
    for _ in 0..3 {
        rig.served();
        rig.write(QUEUE_RESET, 1);
        assert_eq!(rig.read(QUEUE_RESET), 0);
        assert!(!fds.signal(BASE + QUEUE_NOTIFY, &[0; 4]), "the ioeventfd is gone");
        rig.offer();
        rig.kick();
        std::thread::sleep(Duration::from_millis(5));
        assert_eq!(rig.used(), 1);
        rig.set_up_queue(DESC as u32);
    }
    rig.served();
    assert!(!rig.needs_reset());
}

#[test]
fn a_stopped_device_is_given_back() {
    let mut rig = Rig::new(Arc::new(LocalIoEventFds::default()));
    rig.start(DESC as u32);
    rig.served();
    assert!(rig.device.stop().is_some());
    assert!(rig.device.stop().is_none());
    rig.kick();
    rig.write(STATUS, 0);
    rig.start(DESC as u32);
    assert!(rig.needs_reset());
    rig.device.read(CONFIG, &mut [0; 4]);
}

#[test]
fn a_device_behind_a_domain_takes_its_own_addresses_and_no_others() {
    let memory = memory();
    let domain = Domain::new(&memory);
    let mut rig = Rig::with(&memory, Arc::new(NoIoEventFds), |builder| builder.behind(domain.clone()));
    assert!(rig.device.features() & feature::ACCESS_PLATFORM != 0);
    // Rings and buffer, nothing else, each at its address of before.
    for page in [DESC, AVAIL, USED, BUFFER & !0xfff] {
        domain.map(page, page, 0x1000, Access::READ | Access::WRITE).unwrap();
    }
    rig.start(DESC as u32);
    rig.served();
    assert!(!rig.needs_reset());
    let busy = domain.unmap(USED, 0x1000, Duration::from_millis(10)).unwrap_err();
    assert!(busy.to_string().contains("device 0, queue 0"), "{busy}");
    rig.write(STATUS, 0);
    domain.clear(paravane_test_support::patience()).unwrap();
    rig.start(DESC as u32);
    rig.wait_for("a reset request", |rig| rig.needs_reset());
    assert!(rig.device.counters().fault_of(0).unwrap().contains("no translation in the device's domain"));
}

#[test]
fn the_host_resets_and_the_driver_starts_again() {
    let mut rig = Rig::new(Arc::new(LocalIoEventFds::default()));
    for _ in 0..3 {
        rig.device.reset();
        assert_eq!(rig.read(STATUS), 0);
        rig.start(DESC as u32);
        rig.served();
    }
    rig.device.reset();
    assert_eq!(rig.read(STATUS), 0);
    assert!(rig.device.queues().iter().all(|queue| !queue.live));
}
