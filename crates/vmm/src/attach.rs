//! Devices behind a transport: its registers and interrupts, and where both are.
use crate::accel::Accelerator;
use crate::config::TransportChoice;
use crate::error::RunError;
use crate::plan;
use crate::slot::{Attachment, Surroundings, describe};
use paravane_device::Device;
use paravane_notify::Interrupts;
use paravane_notify::msi::MsiTable;
use paravane_spec::builtin::FIRST_GSI;
use paravane_spec::{mmio, mmio_msi};
use paravane_transport::mmio::Mmio;
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
    let sink = accelerator.sink(FIRST_GSI + number)?;
    let mut description = describe(device, surroundings);
    let (interrupts, size) = match choice {
        TransportChoice::Mmio => (Interrupts::wired(sink), mmio::WINDOW),
        TransportChoice::MmioMsi => {
            description.features |= mmio_msi::F_MSI | mmio_msi::F_NOTIFICATION;
            let queues = description.queue_sizes.len();
            // Each queue has a vector and the configuration change one; no device has so many queues that this matters.
            let vectors = u16::try_from(queues + 1).unwrap_or(u16::MAX);
            let table = MsiTable::new(&*accelerator.msi(), vectors, queues)?;
            (Interrupts::with_msi(sink, table), mmio_msi::WINDOW)
        }
    };
    let interrupts = Arc::new(interrupts);
    Ok(Attachment {
        base: plan::base(number),
        size,
        transport: Box::new(Mmio::new(description, Arc::clone(&interrupts))),
        interrupts,
    })
}
