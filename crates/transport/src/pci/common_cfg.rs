//! Common configuration (section 4.1.4.3).
//!
//! The fields of the device state with their widths.
use super::Pci;
use crate::Effect;
use crate::common::{reset_queue, write_status};
use crate::violation::Violation;
use paravane_notify::msi::MsiTable;
use paravane_spec::feature;
use paravane_spec::pci::{NO_VECTOR, common as reg};
use std::ops::Range;

/// Words of the areas that an access reaches, if it is to an area.
fn area_words(offset: u64, len: usize) -> Option<Range<usize>> {
    let at = usize::try_from(offset.checked_sub(reg::QUEUE_DESC)?).ok()?;
    let is_area = matches!(len, 4 | 8) && at.is_multiple_of(len) && offset < reg::QUEUE_DEVICE + 8;
    is_area.then_some(at / 4..(at + len) / 4)
}

impl Pci {
    pub(super) fn read_common(&self, offset: u64, len: usize) -> Result<u64, Violation> {
        let (state, queue) = (&self.state, self.state.selected());
        if let Some(words) = area_words(offset, len) {
            let words = queue.map_or(&[][..], |queue| &queue.areas[words]);
            return Ok(words.iter().rev().fold(0, |value, word| value << 32 | u64::from(*word)));
        }
        Ok(match (offset, len) {
            (reg::DEVICE_FEATURE_SELECT, 4) => state.features.offered_sel.into(),
            (reg::DEVICE_FEATURE, 4) => state.features.offered_word().into(),
            (reg::DRIVER_FEATURE_SELECT, 4) => state.features.accepted_sel.into(),
            (reg::DRIVER_FEATURE, 4) => state.features.accepted_word().into(),
            (reg::CONFIG_MSIX_VECTOR, 2) => {
                self.state.interrupts.msi().map_or(NO_VECTOR, MsiTable::configuration_vector).into()
            }
            (reg::NUM_QUEUES, 2) => state.queue_count().into(),
            (reg::DEVICE_STATUS, 1) => state.status.bits.into(),
            // Signals a change; not a count.
            (reg::CONFIG_GENERATION, 1) => u64::from(state.generation as u8),
            (reg::QUEUE_SELECT, 2) => state.queue_sel.into(),
            (reg::QUEUE_SIZE, 2) => queue.map_or(0, |queue| queue.size.into()),
            (reg::QUEUE_MSIX_VECTOR, 2) => {
                let vector = self.state.interrupts.msi().zip(state.selected_index());
                vector.map_or(NO_VECTOR, |(msi, queue)| msi.queue_vector(queue)).into()
            }
            (reg::QUEUE_ENABLE, 2) => queue.is_some_and(|queue| queue.enabled()).into(),
            (reg::QUEUE_NOTIFY_OFF, 2) => queue.map_or(0, |_| state.queue_sel.into()),
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
            return write_status(self, word);
        }
        if self.state.status.resetting() {
            return Err(Violation);
        }
        if let Some(words) = area_words(offset, len) {
            let areas = &mut self.state.idle_queue()?.areas[words];
            areas.iter_mut().zip([word, (value >> 32) as u32]).for_each(|(area, word)| *area = word);
            return Ok(None);
        }
        match (offset, len) {
            (reg::DEVICE_FEATURE_SELECT, 4) => self.state.features.offered_sel = word,
            (reg::DRIVER_FEATURE_SELECT, 4) => self.state.features.accepted_sel = word,
            (reg::DRIVER_FEATURE, 4) if self.state.status.features_writable() => {
                self.state.features.accept(word);
            }
            (reg::CONFIG_MSIX_VECTOR, 2) => {
                if let Some(msi) = self.state.interrupts.msi() {
                    msi.map_configuration(half_word);
                }
            }
            (reg::QUEUE_SELECT, 2) => self.state.queue_sel = word,
            (reg::QUEUE_SIZE, 2) => self.state.idle_queue()?.size = word,
            (reg::QUEUE_MSIX_VECTOR, 2) => {
                let queue = self.state.selected_index().ok_or(Violation)?;
                if let Some(msi) = self.state.interrupts.msi() {
                    msi.map_queue(queue, half_word);
                }
            }
            (reg::QUEUE_ENABLE, 2) if half_word == 1 => return self.state.enable_queue(1),
            (reg::QUEUE_RESET, 2) => return reset_queue(self, word),
            _ => return Err(Violation),
        }
        Ok(None)
    }
}
