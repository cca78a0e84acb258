//! Messages to the local APIC of the only processor.
use paravane_notify::NotifyError;
use paravane_notify::msi::MsiMessage;
use paravane_spec::builtin::{IRQ_VECTOR_BASE, MESSAGE_ADDRESS};

/// The message that raises interrupt `number`.
pub(crate) fn message(number: u32) -> MsiMessage {
    MsiMessage { address: MESSAGE_ADDRESS, data: u32::from(IRQ_VECTOR_BASE) + number, device: 0 }
}

/// The interrupt that `message` raises; `None`: one without a handler.
///
/// # Errors
/// The message is no interrupt.
pub(crate) fn interrupt_number(message: MsiMessage) -> Result<Option<usize>, NotifyError> {
    let vector = vector(message).ok_or(message.refused())?;
    Ok(vector.checked_sub(IRQ_VECTOR_BASE).map(usize::from))
}

/// Whether `message` is an interrupt: a write to the local APICs.
pub(crate) fn is_interrupt(message: MsiMessage) -> bool {
    vector(message).is_some()
}

fn vector(message: MsiMessage) -> Option<u8> {
    // Bits 20 to 31 identify the APICs; the bits below hold the destination. The upper half is
    // reserved.
    (message.address >> 20 == 0xfee).then_some(message.data as u8)
}
