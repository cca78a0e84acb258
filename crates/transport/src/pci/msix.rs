//! MSI-X: the table and the pending bits.
//!
//! They control the messages that [`Interrupts`] sends.
//!
//! ```text
//!              address, data             vector control: masked
//! driver --> registers of an entry ----.        |
//!                                      '-> unmasked: sets the message of MsiTable, and sends what was pending
//! message control: enable -------> messages or the wired line
//!                  function mask, or bus mastering off --> all vectors masked
//! ```
//! The registers of an entry hold what was written. They become the vector's message when it is
//! unmasked, and with every write while it is. So a driver that masks first, as it should, changes
//! message and destination as a unit. If the platform does not treat the message as an interrupt,
//! the vector sends nothing.
use crate::saved::{Reader, RestoreError, possible, same};
use crate::violation::Violation;
use paravane_notify::Interrupts;
use paravane_notify::msi::{MsiMessage, MsiTable, NO_VECTOR};
use paravane_spec::pci::msix;
use std::sync::Arc;

/// Low and high half of the message address, message data, and vector control.
type Entry = [u32; 4];

/// Entry after a PCI reset.
const AT_RESET: Entry = [0, 0, 0, msix::MASKED];
/// Bits of an entry that can be written. Messages are aligned writes.
const WRITABLE: Entry = [!3, !0, !0, msix::MASKED];

/// Table of one function.
#[derive(Debug)]
pub(super) struct Msix {
    interrupts: Arc<Interrupts>,
    entries: Vec<Entry>,
}

impl Msix {
    /// Makes a table for the vectors of `interrupts`, all masked.
    pub(super) fn new(interrupts: Arc<Interrupts>) -> Self {
        let vectors = interrupts.msi().map_or(0, MsiTable::len).min(msix::MOST);
        let msix = Self { interrupts, entries: vec![AT_RESET; usize::from(vectors)] };
        for vector in 0..vectors {
            msix.apply(vector);
        }
        msix
    }

    /// Number of vectors: 0 without MSI-X.
    pub(super) fn vectors(&self) -> u16 {
        self.entries.len() as u16 // At most `msix::MOST`.
    }

    /// Writes the table, the pending bits, and the vectors of the sources.
    pub(super) fn save(&self, queues: u16, into: &mut Vec<u8>) {
        into.extend(self.vectors().to_le_bytes());
        let Some(msi) = self.interrupts.msi() else { return };
        for (vector, &[low, high, data, control]) in (0..).zip(&self.entries) {
            into.extend([low, high, data].iter().flat_map(|word| word.to_le_bytes()));
            into.extend([control as u8, msi.pending(vector).into()]);
        }
        into.extend(msi.configuration_vector().to_le_bytes());
        (0..queues).for_each(|queue| into.extend(msi.queue_vector(queue).to_le_bytes()));
    }

    /// Takes up the table, the pending bits, and the vectors. All vectors are masked by their function.
    pub(super) fn restore(&mut self, queues: u16, from: &mut Reader<'_>) -> Result<(), RestoreError> {
        same(from.u16()?, self.vectors(), "number of vectors")?;
        let Some(msi) = self.interrupts.msi() else { return Ok(()) };
        for vector in 0..self.vectors() {
            let [low, high, data] = [from.u32()?, from.u32()?, from.u32()?];
            let control = from.flag("mask of a vector")?.into();
            possible(low & 3 == 0, "address of a message")?;
            self.entries[usize::from(vector)] = [low, high, data, control];
            self.apply(vector);
            if from.flag("pending bit")? {
                msi.set_pending(vector);
            }
        }
        let configuration = from.u16()?;
        possible(msi.map_configuration(configuration) == configuration, "vector of the configuration")?;
        for queue in 0..queues {
            let vector = from.u16()?;
            possible(msi.map_queue(queue, vector) == vector, "vector of a queue")?;
        }
        Ok(())
    }

    /// Applies message control; `bus_master` is the bit of the command register.
    pub(super) fn control(&self, control: u16, bus_master: bool) {
        if let Some(msi) = self.interrupts.msi() {
            msi.mask_function(control & msix::FUNCTION_MASK != 0 || !bus_master);
            self.interrupts.use_msi(control & msix::ENABLE != 0);
        }
    }

    /// Resets the device: unmaps all vectors and drops what is pending.
    ///
    /// The table belongs to PCI and stays.
    pub(super) fn device_reset(&self, queues: u16) {
        let Some(msi) = self.interrupts.msi() else { return };
        msi.map_configuration(NO_VECTOR);
        for queue in 0..queues {
            msi.map_queue(queue, NO_VECTOR);
        }
        for vector in 0..self.vectors() {
            msi.forget(vector);
            self.apply(vector);
        }
    }

    /// Resets a queue: unmaps its vector.
    pub(super) fn queue_reset(&self, queue: u16) {
        if let Some(msi) = self.interrupts.msi() {
            msi.map_queue(queue, NO_VECTOR);
        }
    }

    /// Applies an entry to its vector.
    fn apply(&self, vector: u16) {
        let entry = self.entries.get(usize::from(vector));
        let (Some(msi), Some(&[low, high, data, control])) = (self.interrupts.msi(), entry) else { return };
        if control != 0 {
            return msi.mask(vector);
        }
        let message = MsiMessage { address: u64::from(low) | u64::from(high) << 32, data, device: 0 };
        match msi.set_message(vector, message) {
            Ok(()) => msi.unmask(vector),
            // The old message is as invalid as this one.
            Err(_) => msi.forget(vector),
        }
    }

    /// Reads the table: 4 or 8 bytes, naturally aligned.
    pub(super) fn read_table(&self, offset: u64, data: &mut [u8]) -> Result<(), Violation> {
        words(offset, data.len())?;
        for (at, word) in (offset..).step_by(4).zip(data.chunks_exact_mut(4)) {
            let entry = self.entries.get((at / msix::ENTRY) as usize).ok_or(Violation)?;
            word.copy_from_slice(&entry[(at % msix::ENTRY / 4) as usize].to_le_bytes());
        }
        Ok(())
    }

    /// Writes to the table: 4 or 8 bytes, naturally aligned.
    pub(super) fn write_table(&mut self, offset: u64, data: &[u8]) -> Result<(), Violation> {
        words(offset, data.len())?;
        let vector = offset / msix::ENTRY;
        let entry = self.entries.get_mut(vector as usize).ok_or(Violation)?;
        // Eight aligned bytes are in one entry.
        for (at, word) in (offset..).step_by(4).zip(data.chunks_exact(4)) {
            let value = u32::from_le_bytes([word[0], word[1], word[2], word[3]]);
            let at = (at % msix::ENTRY / 4) as usize;
            entry[at] = value & WRITABLE[at];
        }
        self.apply(vector as u16);
        Ok(())
    }

    /// Reads the pending bits: 4 or 8 bytes, naturally aligned.
    pub(super) fn read_pending(&self, offset: u64, data: &mut [u8]) -> Result<(), Violation> {
        words(offset, data.len())?;
        let vectors = u64::from(self.vectors());
        if offset * 8 >= vectors.next_multiple_of(64) {
            return Err(Violation);
        }
        let pending = |vector: u64| {
            vector < vectors && self.interrupts.msi().is_some_and(|msi| msi.pending(vector as u16))
        };
        for (at, byte) in (offset..).zip(data) {
            *byte = (0..8).fold(0, |bits, bit| bits | u8::from(pending(at * 8 + bit)) << bit);
        }
        Ok(())
    }
}

/// Checks that PCI allows the access in the table and the pending bits.
fn words(offset: u64, len: usize) -> Result<(), Violation> {
    if matches!(len, 4 | 8) && offset.is_multiple_of(len as u64) { Ok(()) } else { Err(Violation) }
}
