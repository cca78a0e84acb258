//! Reproducible random numbers.

/// A SplitMix64 generator: every seed is good, and it is one line of state.
#[derive(Clone, Debug)]
pub(crate) struct Dice(u64);

impl Dice {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// A number below `end`, which is not 0.
    pub(crate) fn below(&mut self, end: usize) -> usize {
        (self.u64() % end as u64) as usize
    }

    /// True once in `times`; never for 0.
    pub(crate) fn once_in(&mut self, times: u32) -> bool {
        times != 0 && self.u64().is_multiple_of(times.into())
    }
}
