//! Messages to the local APIC of the only processor.
use paravane_notify::NotifyError;
use paravane_notify::msi::MsiMessage;
use paravane_spec::builtin::{IRQ_VECTOR_BASE, MESSAGE_ADDRESS};

/// The message that raises interrupt `number`.
pub(crate) fn message(number: u32) -> MsiMessage {
    MsiMessage { address: MESSAGE_ADDRESS, data: u32::from(IRQ_VECTOR_BASE) + number }
}

/// The interrupt that `message` raises; `None`: one without a handler.
///
/// # Errors
/// The message is no interrupt.
pub(crate) fn interrupt_number(message: MsiMessage) -> Result<Option<usize>, NotifyError> {
    Ok(message.check_apic()?.checked_sub(IRQ_VECTOR_BASE).map(usize::from))
}
