//! Where each device of the machine is attached.
use crate::config::TransportChoice;
use crate::error::RunError;
use crate::machine::accel::Accelerator;
use paravane_attach::{AttachError, AttachedDevice, Builder, PciPlace};
use paravane_spec::builtin::{FIRST_GSI, MMIO_BASE, PCI_BAR_STEP, PCI_ECAM, PCI_WINDOW};
use paravane_spec::pci::ecam;
use paravane_spec::{mmio, mmio_msi};

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
            let place = PciPlace { bar, interrupt_line: gsi as u8 };
            builder.pci(place, line, Some(&*accelerator.msi()))
        }
    };
    attached.map_err(|error| match error {
        AttachError::Interrupts(error) => error.into(),
        other => RunError::Config(format!("device {number}: {other}")),
    })
}

/// Bytes of a virtio-mmio device's window.
pub(crate) fn window(choice: TransportChoice) -> u64 {
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
