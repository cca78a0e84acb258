//! A machine with two entropy devices on one I/O thread, and its guest.
//!
//! The guest is in this process.
use crate::config::{RunConfig, TransportChoice};
use crate::error::RunError;
use crate::machine::Machine;
use crate::machine::accel::{Accelerator, Ended, Running};
use crate::machine::addresses::Addresses;
use crate::machine::attach;
use crate::machine::bus::Bus;
use crate::machine::counters::RunCounters;
use crate::machine::devices::NamedDevice;
use crate::machine::dirty::VcpuLog;
use paravane_attach::AttachedDevice;
use paravane_attach::LocalIoEventFds;
use paravane_device::rng::Rng as Source;
use paravane_dma::{Backing, Memory, Region, RegionConfig};
use paravane_driver::mmio::{Mmio, Window};
use paravane_driver::pci::{Ecam, Pci};
use paravane_driver::rng::Rng;
use paravane_driver::{Area, DmaArea, Message, Pool};
use paravane_notify::msi::{MsiController, MsiMessage, MsiSink};
use paravane_notify::{InterruptSink, IoEventFds, NotifyError};
use paravane_spec::builtin::{PCI_BAR_STEP, PCI_ECAM, PCI_WINDOW};
use paravane_spec::mmio::{QUEUE_NOTIFY, WINDOW};
use paravane_spec::mmio_msi;
use paravane_test_support::patience;
use paravane_transport::pci::Pci as Function;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

const RAM_SIZE: u64 = 2 << 20;
/// Every transport.
pub(super) const TRANSPORTS: [TransportChoice; 3] =
    [TransportChoice::Mmio, TransportChoice::MmioMsi, TransportChoice::Pci];

/// Interrupts go nowhere; the devices count them.
#[derive(Clone, Copy)]
struct Nowhere;

impl InterruptSink for Nowhere {
    fn raise(&self) {}
}

impl MsiController for Nowhere {
    fn sink(&self) -> Result<Box<dyn MsiSink>, NotifyError> {
        Ok(Box::new(*self))
    }
}

impl MsiSink for Nowhere {
    fn route(&self, _message: MsiMessage) -> Result<(), NotifyError> {
        Ok(())
    }
    fn fire(&self, _message: MsiMessage) {}
}

/// What a machine needs of what runs its guest, which here is the test.
struct Played(Arc<LocalIoEventFds>);

impl Accelerator for Played {
    fn name(&self) -> &'static str {
        "played"
    }
    fn sink(&self, _gsi: u32) -> Result<Arc<dyn InterruptSink>, NotifyError> {
        Ok(Arc::new(Nowhere))
    }
    fn msi(&self) -> Arc<dyn MsiController> {
        Arc::new(Nowhere)
    }
    fn ioeventfds(&self) -> Arc<dyn IoEventFds> {
        Arc::clone(&self.0) as Arc<dyn IoEventFds>
    }
    fn cpus(&self) -> u16 {
        1
    }

    fn clock_khz(&self) -> u64 {
        0
    }
    fn prepare(&mut self) -> Result<(), RunError> {
        Ok(())
    }
    fn vcpu_log(&self) -> Option<Box<dyn VcpuLog>> {
        None
    }
    fn start(self: Box<Self>, _bus: Arc<Bus>, _ended: Sender<Ended>) -> Result<Box<dyn Running>, RunError> {
        Err(RunError::Config("the test is the guest".into()))
    }
}

/// The driver of one device, over any transport.
pub(super) enum Driver {
    Mmio(Rng<Mmio<Window<Addresses>>>),
    Pci(Rng<Pci<Addresses>>),
}

macro_rules! rng {
    ($driver:expr, $rng:ident => $call:expr) => {
        match $driver {
            Driver::Mmio($rng) => $call,
            Driver::Pci($rng) => $call,
        }
    };
}

impl Driver {
    /// Asks for `count` answers in turn, each with an interrupt.
    ///
    /// Polls for the answers, and does not wait for the interrupts.
    pub(super) fn exchange(&mut self, count: u32) {
        for number in 0..count {
            rng!(self, rng => rng.enable_interrupts());
            rng!(self, rng => rng.request(64)).unwrap();
            let start = Instant::now();
            while rng!(self, rng => rng.poll(&mut [0; 64])).unwrap().is_none() {
                assert!(start.elapsed() < patience(), "answer {number} does not come");
                std::thread::yield_now();
            }
        }
    }

    /// What a driver does at an interrupt.
    pub(super) fn interrupt(&mut self) -> u32 {
        rng!(self, rng => rng.interrupt()).unwrap()
    }
}

/// The machine.
pub(super) struct Host {
    machine: Machine,
    pub(super) addresses: Addresses,
    pub(super) counters: Arc<RunCounters>,
    transport: TransportChoice,
    region: Arc<Region>,
}

impl Host {
    /// Creates a machine with two devices over `transport`, on one I/O thread.
    ///
    /// The thread polls for up to `longest_poll`; there are ioeventfds or none.
    pub(super) fn new(transport: TransportChoice, ioeventfd: bool, longest_poll: Duration) -> Self {
        let config = RegionConfig { gpa: 0, size: RAM_SIZE, backing: Backing::Pages, writable: true };
        let region = Region::new(config).unwrap();
        let memory = Memory::new(vec![Arc::clone(&region)]).unwrap();
        let (counters, fds) = (Arc::new(RunCounters::new(1)), Arc::new(LocalIoEventFds::default()));
        let config =
            RunConfig { transport, ioeventfd, longest_poll, io_threads: Some(1), ..RunConfig::default() };
        let device = |number| NamedDevice::new(&format!("rng {number}"), Box::new(Source::new()));
        let devices = (0..2).map(device).collect();
        let played = Played(Arc::clone(&fds));
        let machine = Machine::new(&config, &memory, &counters, &played, devices, None).unwrap();
        let addresses = Addresses { bus: Arc::clone(&machine.bus), fds };
        Self { machine, addresses, counters, transport, region }
    }

    pub(super) fn device(&self, device: u32) -> &AttachedDevice {
        &self.machine.bus.devices()[device as usize]
    }

    /// Sets a device up, with messages if the transport has them and not `wired`.
    pub(super) fn driver(&self, device: u32, wired: bool) -> Driver {
        let half = RAM_SIZE / 2;
        let addr = u64::from(device) * half;
        // SAFETY: the two halves lie in the region, which lives as long as the host, and the host
        // outlives the drivers of its tests; nobody makes references to it.
        let area = unsafe { Area::new(self.region.host().add(addr as usize), half as usize) };
        let mut pool = Pool::new(DmaArea { area, addr });
        let message = |number: u16| Message { address: 0xfee0_0000, data: 0x40 + u32::from(number) };
        if self.transport == TransportChoice::Pci {
            let bus = Ecam::new(self.addresses.clone(), PCI_ECAM, PCI_WINDOW);
            let mut pci = Pci::open(bus.function(device as u8 + 1).unwrap()).unwrap();
            assert!(wired || pci.use_messages(message));
            return Driver::Pci(Rng::new(pci, 64, &mut pool).unwrap());
        }
        let msi = self.transport == TransportChoice::MmioMsi;
        let (base, size) = (self.base(device), if msi { mmio_msi::WINDOW } else { WINDOW });
        let mut mmio = Mmio::new(Window::new(self.addresses.clone(), base, size)).unwrap();
        if msi && !wired {
            mmio.use_messages(vec![message(0), message(1)]);
        }
        Driver::Mmio(Rng::new(mmio, 64, &mut pool).unwrap())
    }

    /// Where a device's registers are: the window, or the BAR.
    pub(super) fn base(&self, device: u32) -> u64 {
        match self.transport {
            TransportChoice::Pci => PCI_WINDOW.start + u64::from(device) * PCI_BAR_STEP,
            other => attach::base(other, device),
        }
    }

    /// Kicks the queue of a device, whatever is in it.
    ///
    /// Says whether an ioeventfd took the kick.
    pub(super) fn kick(&self, device: u32) -> bool {
        let (offset, data) = match self.transport {
            TransportChoice::Mmio => (QUEUE_NOTIFY, [0; 4].as_slice()),
            TransportChoice::MmioMsi => (mmio_msi::NOTIFY_PAGE, [0; 4].as_slice()),
            TransportChoice::Pci => (Function::notification(0), [0; 2].as_slice()),
        };
        let addr = self.base(device) + offset;
        let rung = self.addresses.fds.signal(addr, data);
        if !rung {
            assert!(self.addresses.bus.write(addr, data).is_none());
        }
        rung
    }

    /// Turns that the I/O thread has given.
    pub(super) fn turns(&self) -> u64 {
        self.machine.figures().iter().map(|thread| thread.turns).sum()
    }

    /// Waits until the I/O thread is asleep.
    pub(super) fn settle(&self) {
        let start = Instant::now();
        loop {
            let before = self.turns();
            // 0.1 s, and up to 1 s on a busy host, which takes the CPU away from the thread.
            std::thread::sleep(patience() / 600);
            if self.turns() == before {
                return;
            }
            assert!(start.elapsed() < patience(), "the thread goes on by itself");
        }
    }

    /// Stops all queues and threads.
    pub(super) fn stop(&self) {
        drop(self.machine.stop());
    }
}
