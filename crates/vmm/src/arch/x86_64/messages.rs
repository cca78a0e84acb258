//! Messages to the local APICs.
use paravane_notify::NotifyError;
use paravane_notify::msi::MsiMessage;
use paravane_spec::builtin::{IRQ_VECTOR_BASE, message_address};

/// The message that raises interrupt `number` of the first processor.
pub(crate) fn message(number: u32) -> MsiMessage {
    MsiMessage { address: message_address(0), data: u32::from(IRQ_VECTOR_BASE) + number, device: 0 }
}

/// The processor that `message` interrupts, and the number of the interrupt; `None`: one without a
/// handler.
///
/// # Errors
/// The message is no interrupt.
pub(crate) fn interrupt(message: MsiMessage) -> Result<Option<(usize, usize)>, NotifyError> {
    let vector = vector(message).ok_or(message.refused())?;
    let cpu = usize::from((message.address >> 12) as u8);
    Ok(vector.checked_sub(IRQ_VECTOR_BASE).map(|number| (cpu, usize::from(number))))
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
