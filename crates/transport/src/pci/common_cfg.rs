//! Common configuration (section 4.1.4.3).
//!
//! The fields of the device state with their widths.
use super::Pci;
use crate::Effect;
use crate::state::Part;
use crate::violation::Violation;
use paravane_notify::msi::MsiTable;
use paravane_spec::feature;
use paravane_spec::pci::{NO_VECTOR, common as reg};

/// Half of a 64-bit field that an access reaches.
enum Half {
    Low,
    High,
    Both,
}

/// Area and half, if the access is to an area.
fn area(offset: u64, len: usize) -> Option<(Part, Half)> {
    let part = match offset & !7 {
        reg::QUEUE_DESC => Part::Desc,
        reg::QUEUE_DRIVER => Part::Driver,
        reg::QUEUE_DEVICE => Part::Device,
        _ => return None,
    };
    match (len, offset % 8) {
        (4, 0) => Some((part, Half::Low)),
        (4, 4) => Some((part, Half::High)),
        (8, 0) => Some((part, Half::Both)),
        _ => None,
    }
}

impl Pci {
    pub(super) fn read_common(&self, offset: u64, len: usize) -> Result<u64, Violation> {
        let (state, queue) = (&self.state, self.state.selected());
        if let Some((part, half)) = area(offset, len) {
            let value = queue.map_or(0, |queue| queue.area(part));
            return Ok(match half {
                Half::Low => value & 0xffff_ffff,
                Half::High => value >> 32,
                Half::Both => value,
            });
        }
        Ok(match (offset, len) {
            (reg::DEVICE_FEATURE_SELECT, 4) => state.features.offered_sel().into(),
            (reg::DEVICE_FEATURE, 4) => state.features.offered_word().into(),
            (reg::DRIVER_FEATURE_SELECT, 4) => state.features.accepted_sel().into(),
            (reg::DRIVER_FEATURE, 4) => state.features.accepted_word().into(),
            (reg::CONFIG_MSIX_VECTOR, 2) => {
                self.interrupts.msi().map_or(NO_VECTOR, MsiTable::configuration_vector).into()
            }
            (reg::NUM_QUEUES, 2) => state.queue_count().into(),
            (reg::DEVICE_STATUS, 1) => state.status().into(),
            // Signals a change; not a count.
            (reg::CONFIG_GENERATION, 1) => u64::from(state.generation() as u8),
            (reg::QUEUE_SELECT, 2) => state.queue_sel().into(),
            (reg::QUEUE_SIZE, 2) => queue.map_or(0, |queue| queue.size().into()),
            (reg::QUEUE_MSIX_VECTOR, 2) => {
                let vector = self.interrupts.msi().zip(state.selected_index());
                vector.map_or(NO_VECTOR, |(msi, queue)| msi.queue_vector(queue)).into()
            }
            (reg::QUEUE_ENABLE, 2) => queue.is_some_and(|queue| queue.enabled()).into(),
            (reg::QUEUE_NOTIFY_OFF, 2) => queue.map_or(0, |_| state.queue_sel().into()),
            (reg::QUEUE_RESET, 2) if state.negotiated(feature::RING_RESET) => {
                queue.is_some_and(|queue| queue.resetting()).into()
            }
            _ => return Err(Violation),
        })
    }

    pub(super) fn write_common(
        &mut self,
        offset: u64,
        len: usize,
        value: u64,
    ) -> Result<Option<Effect>, Violation> {
        let (word, half_word) = (value as u32, value as u16);
        if (offset, len) == (reg::DEVICE_STATUS, 1) {
            let effect = self.state.write_status(word)?;
            if self.state.status() == 0 {
                self.at_reset();
            }
            return Ok(effect);
        }
        if self.state.resetting() {
            return Err(Violation);
        }
        if let Some((part, half)) = area(offset, len) {
            let queue = self.state.writable_queue()?;
            match half {
                Half::Low => queue.set_low(part, word)?,
                Half::High => queue.set_high(part, word)?,
                Half::Both => {
                    queue.set_low(part, word)?;
                    queue.set_high(part, (value >> 32) as u32)?;
                }
            }
            return Ok(None);
        }
        match (offset, len) {
            (reg::DEVICE_FEATURE_SELECT, 4) => self.state.features.select_offered(word),
            (reg::DRIVER_FEATURE_SELECT, 4) => self.state.features.select_accepted(word),
            (reg::DRIVER_FEATURE, 4) if self.state.features_writable() => self.state.features.accept(word),
            (reg::CONFIG_MSIX_VECTOR, 2) => {
                if let Some(msi) = self.interrupts.msi() {
                    msi.map_configuration(half_word);
                }
            }
            (reg::QUEUE_SELECT, 2) => self.state.select_queue(word),
            (reg::QUEUE_SIZE, 2) => self.state.writable_queue()?.set_size(word)?,
            (reg::QUEUE_MSIX_VECTOR, 2) => {
                let queue = self.state.selected_index().ok_or(Violation)?;
                if let Some(msi) = self.interrupts.msi() {
                    msi.map_queue(queue, half_word);
                }
            }
            (reg::QUEUE_ENABLE, 2) if half_word == 1 => return self.state.enable_queue(1),
            (reg::QUEUE_RESET, 2) => {
                let effect = self.state.reset_queue(word)?;
                if let Some(queue) = self.state.selected_index()
                    && self.state.selected().is_some_and(|queue| !queue.resetting())
                {
                    self.msix.queue_reset(queue);
                }
                return Ok(effect);
            }
            _ => return Err(Violation),
        }
        Ok(None)
    }
}
