//! Where each device of the machine is attached.
use crate::config::TransportChoice;
use crate::error::RunError;
use crate::machine::accel::Accelerator;
use paravane_attach::{AttachError, AttachedDevice, Builder, PciPlace};
use paravane_spec::builtin::{FIRST_GSI, MMIO_BASE, PCI_BAR_STEP, PCI_ECAM, PCI_WINDOW};
use paravane_spec::pci::ecam;
use paravane_spec::{mmio, mmio_msi};

/// A virtio-mmio device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Window {
    /// Guest-physical address of its registers.
    pub(crate) base: u32,
    /// Bytes there.
    pub(crate) size: u32,
    /// Its interrupt line.
    pub(crate) gsi: u32,
}

/// Bus of the guest's devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Attached {
    /// As virtio-mmio devices.
    Mmio(Vec<Window>),
    /// On the PCI bus: the interrupt lines of endpoints 0 and up.
    Pci(Vec<u32>),
}

/// Attaches device `number` behind the transport of `choice`.
///
/// # Errors
/// The host has no interrupts left.
pub(crate) fn attach(
    builder: Builder,
    choice: TransportChoice,
    accelerator: &dyn Accelerator,
    number: u32,
) -> Result<AttachedDevice, RunError> {
    let gsi = FIRST_GSI + number;
    let line = accelerator.sink(gsi)?;
    let base = base(choice, number);
    let builder = builder.number(number as usize);
    let attached = match choice {
        TransportChoice::Mmio => builder.mmio(base, line),
        TransportChoice::MmioMsi => builder.mmio_msi(base, line, &*accelerator.msi()),
        TransportChoice::Pci => {
            let bar = PCI_WINDOW.start + u64::from(number) * PCI_BAR_STEP;
            // Device 0 on the bus is the bridge; each has one function.
            let requester = (number as u16 + 1) * ecam::FUNCTIONS as u16;
            let place = PciPlace { bar, requester, interrupt_line: gsi as u8 };
            builder.pci(place, line, Some(&*accelerator.msi()))
        }
    };
    attached.map_err(|error| match error {
        AttachError::Interrupts(error) => error.into(),
        other => RunError::Config(format!("device {number}: {other}")),
    })
}

/// Bytes of a virtio-mmio device's window.
fn window(choice: TransportChoice) -> u64 {
    if choice == TransportChoice::MmioMsi { mmio_msi::WINDOW } else { mmio::WINDOW }
}

/// Guest-physical address of device `number`.
///
/// It has registers there, on PCI its configuration space. Device 0 on the bus is the bridge.
pub(crate) fn base(transport: TransportChoice, number: u32) -> u64 {
    match transport {
        TransportChoice::Mmio | TransportChoice::MmioMsi => MMIO_BASE + u64::from(number) * mmio_msi::WINDOW,
        TransportChoice::Pci => PCI_ECAM + u64::from(number + 1) * ecam::FUNCTIONS * ecam::FUNCTION,
    }
}

/// Where `count` devices are, for a guest that is told of them.
pub(crate) fn attached(transport: TransportChoice, count: usize) -> Attached {
    let lines = (0..count as u32).map(|number| (number, FIRST_GSI + number));
    match transport {
        TransportChoice::Mmio | TransportChoice::MmioMsi => {
            let size = window(transport) as u32;
            // All windows lie below 4 GiB.
            let at = |(number, gsi)| Window { base: base(transport, number) as u32, size, gsi };
            Attached::Mmio(lines.map(at).collect())
        }
        TransportChoice::Pci => Attached::Pci(lines.map(|(_, gsi)| gsi).collect()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tables_tell_where_the_devices_are() {
        let Attached::Mmio(windows) = attached(TransportChoice::MmioMsi, 2) else { panic!() };
        assert_eq!(windows[1], Window { base: 0xd000_2000, size: 0x2000, gsi: 6 });
        assert_eq!(attached(TransportChoice::Pci, 2), Attached::Pci(vec![5, 6]));
    }
}
