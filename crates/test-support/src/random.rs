//! Reproducible pseudorandom numbers.

/// SplitMix64 generator: one word of state, any seed.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// Starts at `seed`.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Next number.
    pub fn u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// Number below `end`, which must not be 0.
    pub fn below(&mut self, end: usize) -> usize {
        (self.u64() % end as u64) as usize
    }

    /// True once in `times` on average; never for 0.
    pub fn once_in(&mut self, times: u32) -> bool {
        times != 0 && self.u64().is_multiple_of(times.into())
    }
}
