//! A small generator for the order of the mixed phase, repeatable by its seed.

/// A splitmix64 generator.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Chance(u64);

impl Chance {
    /// The sequence of `seed` for the device with this number.
    pub(crate) fn new(seed: u64, device: usize) -> Self {
        let mut own = Self(seed ^ 0x5851_f42d_4c95_7f2d);
        own.0 ^= own.draw().wrapping_mul(2 * device as u64 + 1);
        own
    }

    fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ (word >> 31)
    }

    /// A number below `end`, 0 if that is 0.
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        // The upper half of the product is uniform enough for any `end` that a disk has.
        ((u128::from(self.draw()) * u128::from(end)) >> 64) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_stay_below_the_end_and_reach_all_of_it() {
        let mut chance = Chance::new(1, 0);
        let mut seen = [0u32; 10];
        for _ in 0..1000 {
            seen[chance.below(10) as usize] += 1;
        }
        assert!(seen.iter().all(|&count| count > 50), "{seen:?}");
        assert_eq!(chance.below(1), 0);
        assert_eq!(chance.below(0), 0);
    }

    #[test]
    fn the_order_depends_on_seed_and_device_and_on_nothing_else() {
        let first = |seed, device| Chance::new(seed, device).below(u64::MAX);
        assert_eq!(first(1, 0), first(1, 0));
        assert_ne!(first(1, 0), first(2, 0));
        assert_ne!(first(1, 0), first(1, 1));
    }
}
