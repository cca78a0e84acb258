//! The registers of our MSI extension (docs/reference/virtio-mmio-msi.md).
//!
//! ```text
//!         ENABLE (before DRIVER_OK)                CONFIGURE
//!   Off ----------------------------> On: source -----------> has a message  <--. MASK, UNMASK, CONFIGURE
//!    ^                                            <-----------      |     '-----'
//!    |  DISABLE (before DRIVER_OK), reset         UNCONFIGURE,
//!    +--------------------------------------------queue reset
//! ```
//! A source is a queue, or the configuration change (QueueSel 0xffff). Its message is staged in three registers, which
//! are the device's and not the source's, and takes effect as a unit at CONFIGURE. These are the vectors of
//! [`paravane_notify::msi`], one a source, the configuration change's last; what they promise about mask, pending
//! and a change under way is said there.
use crate::state::Violation;
use paravane_notify::Interrupts;
use paravane_notify::msi::{MsiMessage, MsiTable};
use paravane_spec::mmio_msi::{self as reg, command, state};

/// A source of interrupts that exists.
#[derive(Clone, Copy)]
pub(super) enum Source {
    /// A queue.
    Queue(u16),
    /// The configuration change.
    Configuration,
}

/// What the device keeps beside the vectors.
#[derive(Debug, Default)]
pub(super) struct MsiRegisters {
    staged: MsiMessage,
    /// The last command was not carried out.
    refused: bool,
}

impl MsiRegisters {
    /// A register write but a command.
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

    /// MSI_STATE for `source`.
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

    /// A command. Before the driver is `running` MSI may be turned on and off.
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

    /// Whether it was carried out.
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
            // What the machine cannot deliver is no fault of the driver's.
            command::CONFIGURE => return Ok(table.set_message(vector, self.staged).is_ok()),
            command::MASK => table.mask(vector),
            command::UNMASK => table.unmask(vector),
            command::UNCONFIGURE => table.forget(vector),
            _ => return Err(Violation),
        }
        Ok(true)
    }
}

/// From here on each source has its vector, and the status register stays 0.
fn turn_on(interrupts: &Interrupts, table: &MsiTable) {
    interrupts.reset();
    for vector in 0..queues(table) {
        table.map_queue(vector, vector);
    }
    table.map_configuration(queues(table));
    interrupts.use_msi(true);
}

/// `queue` is at its defaults again.
pub(super) fn queue_was_reset(interrupts: &Interrupts, queue: u16) {
    if let Some(table) = interrupts.msi() {
        table.forget(queue);
    }
}

/// Whether there is a vector for each of `queues` queues and the configuration change.
pub(super) fn suffices(table: &MsiTable, queues: usize) -> bool {
    usize::from(table.len()) == queues + 1
}

/// As many as there are vectors but the last.
fn queues(table: &MsiTable) -> u16 {
    table.len().saturating_sub(1)
}

fn vector(table: &MsiTable, source: Source) -> u16 {
    match source {
        Source::Queue(queue) => queue,
        Source::Configuration => queues(table),
    }
}
