//! The bus: guest-physical addresses that are not RAM.
use crate::arch::SystemDevices;
use crate::machine::console::{Console, GuestEnd};
use crate::machine::footprint;
use crate::machine::measured::MeasuredPhase;
use crate::machine::server::QueueServer;
use crate::report::PhaseFigures;
use paravane_attach::AttachedDevice;
use paravane_spec::builtin::{CONTROL_BASE, PCI_ECAM, control};
use paravane_spec::pci::ecam;
use paravane_transport::pci::Pci;
use paravane_transport::pci::root::{Root, Target};
use std::sync::Arc;

/// The MMIO bus: windows of devices, PCI configuration spaces and the control page.
///
/// Any thread that runs guest code may use it. Nothing that a guest does here is an error;
/// unassigned addresses read as all ones.
pub(crate) struct Bus {
    devices: Vec<AttachedDevice>,
    /// The PCI root, if the devices are on PCI: device n is endpoint n.
    root: Option<Root>,
    console: Console,
    /// Console and power controls of a Linux guest, which has no control page.
    system: Option<SystemDevices>,
    measured: MeasuredPhase,
    /// Who serves the queues in place of I/O threads.
    server: Option<Arc<dyn QueueServer>>,
}

impl Bus {
    /// A bus with these devices, each in its window.
    pub(crate) fn new(devices: Vec<AttachedDevice>, root: Option<Root>, console: Console) -> Self {
        Self { devices, root, console, system: None, measured: MeasuredPhase::default(), server: None }
    }

    /// The same, with queues that `server` serves.
    pub(crate) fn with_server(self, server: Option<Arc<dyn QueueServer>>) -> Self {
        Self { server, ..self }
    }

    /// The same for a Linux guest.
    pub(crate) fn with_system(self, system: SystemDevices) -> Self {
        Self { system: Some(system), ..self }
    }

    /// The root, and the offset of `addr` in its window.
    fn ecam(&self, addr: u64) -> Option<(&Root, u64)> {
        let offset = addr.checked_sub(PCI_ECAM).filter(|&offset| offset < ecam::BUS)?;
        Some((self.root.as_ref()?, offset))
    }

    /// The endpoint, and the offset of its register in the transport's window.
    fn endpoint(&self, target: Target) -> Option<(&AttachedDevice, u64)> {
        Some((self.devices.get(target.endpoint)?, Pci::CONFIG_SPACE + u64::from(target.register)))
    }

    fn device(&self, addr: u64) -> Option<(&AttachedDevice, u64)> {
        self.devices.iter().find_map(|device| Some((device, device.offset(addr)?)))
    }

    /// The guest reads `data.len()` bytes at `addr`.
    pub(crate) fn read(&self, addr: u64, data: &mut [u8]) {
        if let Some((root, offset)) = self.ecam(addr) {
            root.read(offset, data, |target, data| {
                let endpoint = self.endpoint(target);
                endpoint.map(|(device, offset)| device.read(offset, data)).is_some()
            });
            return;
        }
        match self.device(addr) {
            Some((device, offset)) => device.read(offset, data),
            None => data.fill(0xff),
        }
    }

    /// The guest writes at `addr`. `Some`: that ends the guest.
    pub(crate) fn write(&self, addr: u64, data: &[u8]) -> Option<GuestEnd> {
        let device = match self.ecam(addr) {
            Some((root, offset)) => {
                let target = root.write(offset, data.len());
                Some(target.and_then(|target| self.endpoint(target))?)
            }
            None => self.device(addr),
        };
        if let Some((device, offset)) = device {
            device.write(offset, data);
            return None;
        }
        if self.system.is_some() {
            return None;
        }
        let offset = addr.checked_sub(CONTROL_BASE)?;
        let value = u32::from_le_bytes(data.try_into().ok()?);
        if offset == control::EVENT {
            self.measured.event(value, || self.counters());
        }
        self.console.write(offset, value)
    }

    /// Console and power controls of a Linux guest.
    pub(crate) fn system(&self) -> Option<&SystemDevices> {
        self.system.as_ref()
    }

    /// The counters now.
    fn counters(&self) -> PhaseFigures {
        let counters = self.console.counters();
        let server = self.server.as_ref().map(|server| server.figures()).unwrap_or_default();
        PhaseFigures {
            exits: counters.exits_by_kind(),
            kvm_exits: counters.kvm_exits(),
            kicks: counters.kicks() + server.kicks,
            interrupts: self.devices.iter().map(AttachedDevice::interrupts).sum::<u64>() + server.interrupts,
            // The guest's own count comes with its report.
            taken: 0,
            cpu_s: footprint::cpu_seconds() + server.cpu_s,
            wall_s: footprint::clock_seconds(),
        }
    }

    /// Cost of the guest's measured phase, once it has ended.
    pub(crate) fn measured(&self) -> Option<PhaseFigures> {
        self.measured.figures()
    }

    /// The control page.
    pub(crate) fn console(&self) -> &Console {
        &self.console
    }

    /// The devices.
    pub(crate) fn devices(&self) -> &[AttachedDevice] {
        &self.devices
    }
}
