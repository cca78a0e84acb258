//! Feature negotiation (section 2.2): words of 32 bits, each behind a selector.
//!
//! Version 1.4 has bits up to 127, in four words. Words 2 and 3 of the offer are 0. What a driver
//! writes to them is kept, so that it reads back and can be taken back; a set with one of these bits
//! is refused as any other that was not offered. Words from 4 on do not exist: they read 0, and
//! writes have no effect.
use crate::saved::{Reader, RestoreError, same};
use paravane_spec::feature;

/// Offered and accepted features, and the two selectors.
#[derive(Debug)]
pub(crate) struct Features {
    offered: u64,
    pub(crate) accepted: u64,
    /// Words 2 and 3 of the accepted features. No device offers such bits.
    extended: u64,
    pub(crate) offered_sel: u32,
    pub(crate) accepted_sel: u32,
}

impl Features {
    pub(crate) fn new(offered: u64) -> Self {
        Self { offered, accepted: 0, extended: 0, offered_sel: 0, accepted_sel: 0 }
    }

    pub(crate) fn reset(&mut self) {
        *self = Self::new(self.offered);
    }

    /// Writes what was offered, and what the driver has set.
    pub(super) fn save(&self, into: &mut Vec<u8>) {
        for bits in [self.offered, self.accepted, self.extended] {
            into.extend(bits.to_le_bytes());
        }
        into.extend(self.offered_sel.to_le_bytes());
        into.extend(self.accepted_sel.to_le_bytes());
    }

    /// Takes up what the driver has set.
    pub(super) fn restore(&mut self, from: &mut Reader<'_>) -> Result<(), RestoreError> {
        same(from.u64()?, self.offered, "offered features")?;
        (self.accepted, self.extended) = (from.u64()?, from.u64()?);
        (self.offered_sel, self.accepted_sel) = (from.u32()?, from.u32()?);
        Ok(())
    }

    /// Selected word of the offer; words that do not exist are 0.
    pub(crate) fn offered_word(&self) -> u32 {
        word(self.offered, self.offered_sel)
    }

    /// Selected word of the accepted features.
    pub(crate) fn accepted_word(&self) -> u32 {
        match self.accepted_sel.checked_sub(2) {
            None => word(self.accepted, self.accepted_sel),
            Some(select) => word(self.extended, select),
        }
    }

    /// Accepts `bits` of the selected word.
    ///
    /// Kept as written: the driver learns of a mistake when FEATURES_OK does not stick (section
    /// 2.2.2).
    pub(crate) fn accept(&mut self, bits: u32) {
        let (words, select) = match self.accepted_sel.checked_sub(2) {
            None => (&mut self.accepted, self.accepted_sel),
            Some(select) => (&mut self.extended, select),
        };
        match select {
            0 => *words = (*words & !0xffff_ffff) | u64::from(bits),
            1 => *words = (*words & 0xffff_ffff) | (u64::from(bits) << 32),
            _ => {}
        }
    }

    /// Whether FEATURES_OK may stick.
    ///
    /// All bits were offered, and VERSION_1 is among them, since there is no legacy interface.
    pub(crate) fn acceptable(&self) -> bool {
        self.accepted & !self.offered == 0 && self.extended == 0 && self.accepted & feature::VERSION_1 != 0
    }
}

fn word(bits: u64, select: u32) -> u32 {
    match select {
        0 => bits as u32,
        1 => (bits >> 32) as u32,
        _ => 0,
    }
}
