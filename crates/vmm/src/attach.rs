//! Devices behind a transport: its registers and interrupts, and where both are.
use crate::accel::Accelerator;
use crate::config::TransportChoice;
use crate::error::RunError;
use crate::plan;
use crate::slot::{Attachment, NOWHERE, Surroundings, describe};
use paravane_device::Device;
use paravane_notify::Interrupts;
use paravane_notify::msi::MsiTable;
use paravane_spec::builtin::{FIRST_GSI, PCI_BAR_STEP, PCI_WINDOW};
use paravane_spec::pci::msix;
use paravane_spec::{mmio, mmio_msi};
use paravane_transport::mmio::Mmio;
use paravane_transport::pci::Pci;
use std::sync::Arc;

/// Attaches device `number` as `choice` says.
///
/// # Errors
/// The host has no more interrupts.
pub(crate) fn attach(
    choice: TransportChoice,
    accelerator: &dyn Accelerator,
    number: u32,
    device: &dyn Device,
    surroundings: &Surroundings,
) -> Result<Attachment, RunError> {
    let gsi = FIRST_GSI + number;
    let sink = accelerator.sink(gsi)?;
    let mut description = describe(device, surroundings);
    let interrupts = match choice {
        TransportChoice::Mmio => Interrupts::wired(sink),
        TransportChoice::MmioMsi | TransportChoice::Pci => {
            let queues = description.queue_sizes.len();
            // Each queue has a vector and the configuration change one, as far as MSI-X goes; no device has so many queues
            // that this matters.
            let vectors = u16::try_from(queues + 1).unwrap_or(msix::MOST).min(msix::MOST);
            let table = MsiTable::new(&*accelerator.msi(), vectors, queues)?;
            Interrupts::with_msi(sink, table)
        }
    };
    let interrupts = Arc::new(interrupts);
    let base = plan::base(choice, number);
    Ok(match choice {
        TransportChoice::Mmio | TransportChoice::MmioMsi => {
            let msi = choice == TransportChoice::MmioMsi;
            if msi {
                description.features |= mmio_msi::F_MSI | mmio_msi::F_NOTIFICATION;
            }
            let size = window(choice);
            let transport = Box::new(Mmio::new(description, Arc::clone(&interrupts)));
            Attachment { base, size, transport, interrupts }
        }
        TransportChoice::Pci => {
            let mut pci = Pci::new(description, Arc::clone(&interrupts), gsi as u8);
            pci.place(PCI_WINDOW.start + u64::from(number) * PCI_BAR_STEP);
            Attachment { base: NOWHERE, size: pci.bar_size(), transport: Box::new(pci), interrupts }
        }
    })
}

/// Bytes of a virtio-mmio device's window.
pub(crate) fn window(choice: TransportChoice) -> u64 {
    if choice == TransportChoice::MmioMsi { mmio_msi::WINDOW } else { mmio::WINDOW }
}
