//! Feature negotiation (section 2.2): two words of 32 bits, each behind a selector.
use paravane_spec::feature;

/// What is offered, what the driver accepts, and the two selectors.
#[derive(Debug)]
pub(crate) struct Features {
    offered: u64,
    accepted: u64,
    /// The driver has accepted a bit from 64 on. None is ever offered, so the set is refused.
    beyond: bool,
    offered_sel: u32,
    accepted_sel: u32,
}

impl Features {
    pub(crate) fn new(offered: u64) -> Self {
        Self { offered, accepted: 0, beyond: false, offered_sel: 0, accepted_sel: 0 }
    }

    pub(crate) fn reset(&mut self) {
        *self = Self::new(self.offered);
    }

    pub(crate) fn select_offered(&mut self, word: u32) {
        self.offered_sel = word;
    }

    pub(crate) fn select_accepted(&mut self, word: u32) {
        self.accepted_sel = word;
    }

    pub(crate) fn offered_sel(&self) -> u32 {
        self.offered_sel
    }

    pub(crate) fn accepted_sel(&self) -> u32 {
        self.accepted_sel
    }

    /// The selected word of the offer; words that do not exist have no bit set.
    pub(crate) fn offered_word(&self) -> u32 {
        word(self.offered, self.offered_sel)
    }

    /// The selected word of what the driver accepts.
    pub(crate) fn accepted_word(&self) -> u32 {
        word(self.accepted, self.accepted_sel)
    }

    /// The driver accepts `bits` of the selected word. Kept as written: the driver learns of a mistake by
    /// FEATURES_OK not sticking (section 2.2.2).
    pub(crate) fn accept(&mut self, bits: u32) {
        match self.accepted_sel {
            0 => self.accepted = (self.accepted & !0xffff_ffff) | u64::from(bits),
            1 => self.accepted = (self.accepted & 0xffff_ffff) | (u64::from(bits) << 32),
            _ => self.beyond |= bits != 0,
        }
    }

    pub(crate) fn accepted(&self) -> u64 {
        self.accepted
    }

    /// Whether FEATURES_OK may stick: nothing that was not offered, and VERSION_1, since there is no legacy
    /// interface here.
    pub(crate) fn acceptable(&self) -> bool {
        self.accepted & !self.offered == 0 && !self.beyond && self.accepted & feature::VERSION_1 != 0
    }
}

fn word(bits: u64, select: u32) -> u32 {
    match select {
        0 => bits as u32,
        1 => (bits >> 32) as u32,
        _ => 0,
    }
}
