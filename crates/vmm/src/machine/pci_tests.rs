//! A PCI function and our driver, while its BAR is moved and switched off.
use crate::machine::addresses::Addresses;
use crate::machine::bus::Bus;
use crate::machine::console::Console;
use crate::machine::counters::RunCounters;
use paravane_attach::{AttachedDevice, InterruptFn, LocalIoEventFds, PciPlace};
use paravane_device::rng::Rng as Source;
use paravane_dma::{Backing, Memory, Region, RegionConfig};
use paravane_driver::pci::{Ecam, Pci as Driven, Space};
use paravane_driver::rng::Rng;
use paravane_driver::{Area, DmaArea, Pool};
use paravane_notify::IoEventFds;
use paravane_spec::builtin::{PCI_ECAM, PCI_WINDOW};
use paravane_spec::pci::{cap, command, ecam, header};
use paravane_transport::pci::Pci;
use paravane_transport::pci::root::Root;
use std::sync::Arc;
use std::time::{Duration, Instant};

const RAM_SIZE: u64 = 1 << 20;
const HOME: u64 = PCI_WINDOW.start;
const ELSEWHERE: u64 = PCI_WINDOW.start + (64 << 20);
/// The configuration space of the only device.
const FUNCTION: u64 = PCI_ECAM + ecam::FUNCTIONS * ecam::FUNCTION;

/// The machine, as code on its processor sees it.
#[derive(Clone)]
struct Machine(Addresses);

impl Machine {
    fn command(&self, bits: u16) {
        self.0.write16(FUNCTION + u64::from(header::COMMAND), bits);
    }

    fn move_bar(&self, to: u64) {
        self.0.write32(FUNCTION + u64::from(header::BAR), to as u32);
    }

    /// A kick of queue 0 of a BAR at `bar`, if there is an ioeventfd.
    fn ring(&self, bar: u64) -> bool {
        self.0.fds.signal(bar + Pci::notification(0), &[0; 2])
    }
}

/// An entropy source on PCI and its driver.
struct Guest {
    machine: Machine,
    rng: Rng<Driven<Addresses>>,
    /// Outlives the driver.
    _region: Arc<Region>,
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.device().stop();
    }
}

impl Guest {
    fn new() -> Self {
        let config = RegionConfig { gpa: 0, size: RAM_SIZE, backing: Backing::Pages, writable: true };
        let region = Region::new(config).unwrap();
        let memory = Memory::new(vec![Arc::clone(&region)]).unwrap();
        let fds = Arc::new(LocalIoEventFds::default());
        let device = AttachedDevice::builder(Box::new(Source::new()), &memory)
            .ioeventfds(Arc::clone(&fds) as Arc<dyn IoEventFds>)
            .pci(PciPlace { bar: HOME, requester: 8, interrupt_line: 5 }, InterruptFn::new(|| ()), None)
            .unwrap();
        let console = Console::new(&memory, Arc::new(RunCounters::new(1)));
        let bus = Arc::new(Bus::new(vec![device], Some(Root::new()), console));
        let machine = Machine(Addresses { bus, fds });

        // SAFETY: the region lives as long as the guest, and so longer than the driver; nobody
        // makes references to it.
        let area = unsafe { Area::new(region.host(), RAM_SIZE as usize) };
        let mut pool = Pool::new(DmaArea { area, addr: 0 });
        let bus = Ecam::new(machine.0.clone(), PCI_ECAM, PCI_WINDOW);
        let found: Vec<_> = bus.functions().collect();
        assert_eq!(found.len(), 2, "the bridge and the device");
        let function = found.into_iter().find(|function| function.virtio().is_some()).unwrap();
        let rng = Rng::new(Driven::open(function).unwrap(), 64, &mut pool).unwrap();
        Self { machine, rng, _region: region }
    }

    fn device(&self) -> &AttachedDevice {
        &self.machine.0.bus.devices()[0]
    }

    /// Requests, and kicks the BAR's address in the driver, if the device sleeps.
    fn ask(&mut self) {
        self.rng.request(64).unwrap();
    }

    /// What was asked for comes.
    fn answered(&mut self) {
        let start = Instant::now();
        while self.rng.poll(&mut [0; 64]).unwrap().is_none() {
            assert!(start.elapsed() < paravane_test_support::patience(), "no answer comes");
            std::thread::sleep(Duration::from_millis(1));
        }
        // The device goes to sleep; one that did not would find the next request by itself, and
        // prove nothing.
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn kicks_follow_the_bar() {
    let mut guest = Guest::new();
    guest.ask();
    guest.answered();
    let machine = guest.machine.clone();
    machine.move_bar(ELSEWHERE);
    assert_eq!(machine.0.read16(HOME), 0xffff, "nobody is at home");
    assert!(!machine.ring(HOME));
    guest.ask();
    assert!(machine.ring(ELSEWHERE));
    guest.answered();
    machine.move_bar(HOME);
    assert!(!machine.ring(ELSEWHERE));
    guest.ask();
    guest.answered();
    assert_eq!(guest.device().exit_kicks(), 0);
}

#[test]
fn a_kick_into_a_bar_that_is_off_is_made_good_when_it_is_on_again() {
    let mut guest = Guest::new();
    let machine = guest.machine.clone();
    guest.ask();
    guest.answered();
    machine.command(command::BUS_MASTER);
    assert!(!machine.ring(HOME));
    guest.ask();
    machine.command(command::BUS_MASTER | command::MEMORY);
    guest.answered();
    assert!(machine.ring(HOME));
}

#[test]
fn the_window_in_the_configuration_space_kicks_without_a_bar() {
    let mut guest = Guest::new();
    let machine = guest.machine.clone();
    guest.ask();
    guest.answered();
    machine.command(command::BUS_MASTER);
    guest.ask();
    let mut at = u64::from(machine.0.read8(FUNCTION + u64::from(header::CAPABILITIES)));
    while machine.0.read8(FUNCTION + at + u64::from(cap::CFG_TYPE)) != cap::PCI {
        at = u64::from(machine.0.read8(FUNCTION + at + 1));
        assert_ne!(at, 0, "there is a window");
    }
    machine.0.write32(FUNCTION + at + u64::from(cap::OFFSET), Pci::notification(0) as u32);
    machine.0.write32(FUNCTION + at + u64::from(cap::LENGTH), 2);
    machine.0.write16(FUNCTION + at + u64::from(cap::PCI_CFG_DATA), 0);
    guest.answered();
    assert_eq!(guest.device().exit_kicks(), 1);
}
