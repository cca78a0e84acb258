//! What the guest finds behind addresses that are not RAM.
use crate::console::{Console, GuestEnd};
use crate::footprint;
use crate::linux::Ports;
use crate::measured::MeasuredPhase;
use crate::process::Process;
use crate::report::PhaseFigures;
use crate::slot::Slot;
use paravane_spec::builtin::{CONTROL_BASE, PCI_ECAM, control};
use paravane_spec::pci::ecam;
use paravane_transport::pci::Pci;
use paravane_transport::pci::root::{Root, Target};
use std::sync::Arc;

/// The MMIO bus: the devices' windows, PCI's configuration spaces and the control page. Any thread that runs guest
/// code may use it. Nothing that a guest does here is an error; what is not there reads as all ones.
pub(crate) struct Bus {
    slots: Vec<Slot>,
    /// If the devices are on PCI: device n is endpoint n.
    root: Option<Root>,
    console: Console,
    /// A Linux guest's I/O ports. It has no control page.
    ports: Option<Ports>,
    measured: MeasuredPhase,
    /// The process that owns the queues, if another one does.
    owner: Option<Arc<Process>>,
}

impl Bus {
    /// With these devices, each in its own window.
    pub(crate) fn new(slots: Vec<Slot>, root: Option<Root>, console: Console) -> Self {
        Self { slots, root, console, ports: None, measured: MeasuredPhase::default(), owner: None }
    }

    /// The same, with queues that are another process's.
    pub(crate) fn with_owner(self, owner: Option<Arc<Process>>) -> Self {
        Self { owner, ..self }
    }

    /// The same for a Linux guest.
    pub(crate) fn with_ports(self, ports: Ports) -> Self {
        Self { ports: Some(ports), ..self }
    }

    /// The root, and the offset of `addr` in its window.
    fn ecam(&self, addr: u64) -> Option<(&Root, u64)> {
        let offset = addr.checked_sub(PCI_ECAM).filter(|&offset| offset < ecam::BUS)?;
        Some((self.root.as_ref()?, offset))
    }

    /// The endpoint's slot, and the offset of its register in the slot's window.
    fn endpoint(&self, target: Target) -> Option<(&Slot, u64)> {
        Some((self.slots.get(target.endpoint)?, Pci::CONFIG_SPACE + u64::from(target.register)))
    }

    fn slot(&self, addr: u64) -> Option<(&Slot, u64)> {
        self.slots.iter().find_map(|slot| Some((slot, slot.offset(addr)?)))
    }

    /// The guest reads `data.len()` bytes at `addr`.
    pub(crate) fn read(&self, addr: u64, data: &mut [u8]) {
        if let Some((root, offset)) = self.ecam(addr) {
            root.read(offset, data, |target, data| {
                let endpoint = self.endpoint(target);
                endpoint.map(|(slot, offset)| slot.read(offset, data)).is_some()
            });
            return;
        }
        match self.slot(addr) {
            Some((slot, offset)) => slot.read(offset, data),
            None => data.fill(0xff),
        }
    }

    /// The guest writes; says so when that was the last thing it does.
    pub(crate) fn write(&self, addr: u64, data: &[u8]) -> Option<GuestEnd> {
        let slot = match self.ecam(addr) {
            Some((root, offset)) => {
                let target = root.write(offset, data.len());
                Some(target.and_then(|target| self.endpoint(target))?)
            }
            None => self.slot(addr),
        };
        if let Some((slot, offset)) = slot {
            slot.write(offset, data);
            return None;
        }
        if self.ports.is_some() {
            return None;
        }
        let offset = addr.checked_sub(CONTROL_BASE)?;
        let value = u32::from_le_bytes(data.try_into().ok()?);
        if offset == control::EVENT {
            self.measured.event(value, || self.counters());
        }
        self.console.write(offset, value)
    }

    /// The guest reads an I/O port.
    pub(crate) fn read_port(&self, port: u16, data: &mut [u8]) {
        match &self.ports {
            Some(ports) => ports.read(port, data),
            None => data.fill(0xff),
        }
    }

    /// The guest writes to an I/O port; says so when that was the last thing it does.
    pub(crate) fn write_port(&self, port: u16, data: &[u8]) -> Option<GuestEnd> {
        self.ports.as_ref()?.write(port, data).map(GuestEnd::Power)
    }

    /// The counters as they stand.
    fn counters(&self) -> PhaseFigures {
        let tally = self.console.tally();
        let owner = self.owner.as_ref().map(|owner| owner.figures()).unwrap_or_default();
        PhaseFigures {
            exits: tally.exits_by_kind(),
            kicks: tally.kicks() + owner.kicks,
            interrupts: self.slots.iter().map(Slot::interrupts).sum::<u64>() + owner.interrupts,
            // The guest's own count comes with its report.
            taken: 0,
            cpu_s: footprint::cpu_seconds() + owner.cpu_s,
        }
    }

    /// What the guest's measured phase took, once it has ended one.
    pub(crate) fn measured(&self) -> Option<PhaseFigures> {
        self.measured.figures()
    }

    /// The control page.
    pub(crate) fn console(&self) -> &Console {
        &self.console
    }

    /// The devices.
    pub(crate) fn slots(&self) -> &[Slot] {
        &self.slots
    }
}
