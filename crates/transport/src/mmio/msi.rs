//! Registers of the MSI extension of virtio-mmio.
//!
//! docs/reference/virtio-mmio-msi.md specifies them.
//!
//! ```text
//!         ENABLE (before DRIVER_OK)                CONFIGURE
//!   Off ----------------------------> On: source -----------> has a message  <--. MASK, UNMASK, CONFIGURE
//!    ^                                            <-----------      |     '-----'
//!    |  DISABLE (before DRIVER_OK), reset         UNCONFIGURE,
//!    +--------------------------------------------queue reset
//! ```
//! A source is a queue, or the configuration change (QueueSel 0xffff). Its message is staged in
//! three registers, which all sources share, and takes effect as a unit at CONFIGURE. Each source
//! has one vector of [`paravane_notify::msi`], the configuration change the last; that module
//! states the promises about mask, pending and concurrent changes.
use crate::saved::{Reader, RestoreError, possible};
use crate::violation::Violation;
use paravane_notify::Interrupts;
use paravane_notify::msi::{MsiMessage, MsiTable};
use paravane_spec::mmio_msi::{self as reg, command, state};

/// Source of interrupts that exists.
#[derive(Clone, Copy)]
pub(super) enum Source {
    /// A queue.
    Queue(u16),
    /// The configuration change.
    Configuration,
}

/// State of the extension beside the vectors.
#[derive(Debug, Default)]
pub(super) struct MsiRegisters {
    staged: MsiMessage,
    /// Whether the last command was refused.
    refused: bool,
}

impl MsiRegisters {
    /// Writes a register other than the command.
    pub(super) fn stage(&mut self, offset: u64, value: u32) -> Result<(), Violation> {
        let address = &mut self.staged.address;
        match offset {
            reg::MSI_ADDRESS_LOW => *address = (*address & !0xffff_ffff) | u64::from(value),
            reg::MSI_ADDRESS_HIGH => *address = (*address & 0xffff_ffff) | u64::from(value) << 32,
            reg::MSI_DATA => self.staged.data = value,
            _ => return Err(Violation),
        }
        Ok(())
    }

    /// Reads MSI_STATE for `source`.
    pub(super) fn state(&self, interrupts: &Interrupts, source: Option<Source>) -> u32 {
        let bit = |set: bool, bit: u32| if set { bit } else { 0 };
        let common = bit(interrupts.msi_on(), state::ON) | bit(self.refused, state::REFUSED);
        let (Some(source), Some(table)) = (source, interrupts.msi()) else { return common };
        let vector = vector(table, source);
        common
            | bit(table.message(vector).is_some(), state::CONFIGURED)
            | bit(table.masked(vector), state::MASKED)
            | bit(table.pending(vector), state::PENDING)
    }

    /// Carries out a command.
    ///
    /// MSI can be turned on and off before the driver is `running`.
    pub(super) fn command(
        &mut self,
        value: u32,
        interrupts: &Interrupts,
        source: Option<Source>,
        running: bool,
    ) -> Result<(), Violation> {
        let done = self.try_command(value, interrupts, source, running);
        self.refused = !matches!(done, Ok(true));
        done.map(|_| ())
    }

    /// Carries out a command; `false` if it is refused.
    fn try_command(
        &self,
        value: u32,
        interrupts: &Interrupts,
        source: Option<Source>,
        running: bool,
    ) -> Result<bool, Violation> {
        let table = interrupts.msi().ok_or(Violation)?;
        if matches!(value, command::ENABLE | command::DISABLE) {
            if running {
                return Err(Violation);
            }
            if value == command::DISABLE {
                interrupts.reset();
            } else if !interrupts.msi_on() {
                turn_on(interrupts, table);
            }
            return Ok(true);
        }
        if !interrupts.msi_on() {
            return Err(Violation);
        }
        let vector = vector(table, source.ok_or(Violation)?);
        match value {
            // A message that the machine cannot deliver is no violation.
            command::CONFIGURE => return Ok(table.set_message(vector, self.staged).is_ok()),
            command::MASK => table.mask(vector),
            command::UNMASK => table.unmask(vector),
            command::UNCONFIGURE => table.forget(vector),
            _ => return Err(Violation),
        }
        Ok(true)
    }
}

/// Bits of a saved vector.
mod saved {
    pub(super) const MESSAGE: u8 = 1;
    pub(super) const MASKED: u8 = 2;
    pub(super) const PENDING: u8 = 4;
}

impl MsiRegisters {
    /// Writes the registers, and the vectors if there are any.
    pub(super) fn save(&self, interrupts: &Interrupts, into: &mut Vec<u8>) {
        into.push(self.refused.into());
        write_message(self.staged, into);
        into.push(interrupts.msi_on().into());
        let Some(table) = interrupts.msi().filter(|_| interrupts.msi_on()) else { return };
        for vector in 0..table.len() {
            let message = table.message(vector);
            let bit = |set: bool, bit: u8| if set { bit } else { 0 };
            into.push(
                bit(message.is_some(), saved::MESSAGE)
                    | bit(table.masked(vector), saved::MASKED)
                    | bit(table.pending(vector), saved::PENDING),
            );
            write_message(message.unwrap_or_default(), into);
        }
    }

    /// Takes up registers, and vectors if MSI is on. It can be if the driver has `negotiated` it.
    pub(super) fn restore(
        &mut self,
        interrupts: &Interrupts,
        negotiated: bool,
        from: &mut Reader<'_>,
    ) -> Result<(), RestoreError> {
        self.refused = from.flag("MSI_STATE")?;
        self.staged = read_message(from)?;
        if !from.flag("MSI_STATE")? {
            return Ok(());
        }
        let table = interrupts.msi().filter(|_| negotiated).ok_or(RestoreError::Value("MSI is on"))?;
        turn_on(interrupts, table);
        for vector in 0..table.len() {
            let (bits, message) = (from.u8()?, read_message(from)?);
            let [has_message, masked, pending] =
                [saved::MESSAGE, saved::MASKED, saved::PENDING].map(|bit| bits & bit != 0);
            // What is pending was sent if nothing masks it.
            possible(bits < 8 && (masked || !pending), "state of a vector")?;
            if has_message {
                table.set_message(vector, message)?;
            }
            if masked {
                table.mask(vector);
            }
            if pending {
                table.set_pending(vector);
            }
        }
        Ok(())
    }
}

fn write_message(message: MsiMessage, into: &mut Vec<u8>) {
    into.extend(message.address.to_le_bytes());
    into.extend(message.data.to_le_bytes());
}

fn read_message(from: &mut Reader<'_>) -> Result<MsiMessage, RestoreError> {
    Ok(MsiMessage { address: from.u64()?, data: from.u32()?, device: 0 })
}

/// Maps each source to its vector; the status register stays 0 from here on.
fn turn_on(interrupts: &Interrupts, table: &MsiTable) {
    interrupts.reset();
    for vector in 0..queues(table) {
        table.map_queue(vector, vector);
    }
    table.map_configuration(queues(table));
    interrupts.use_msi(true);
}

/// Whether there are vectors for `queues` queues and the configuration change.
pub(super) fn suffices(table: &MsiTable, queues: usize) -> bool {
    usize::from(table.len()) == queues + 1
}

/// Number of queues: one less than the vectors.
fn queues(table: &MsiTable) -> u16 {
    table.len().saturating_sub(1)
}

fn vector(table: &MsiTable, source: Source) -> u16 {
    match source {
        Source::Queue(queue) => queue,
        Source::Configuration => queues(table),
    }
}
