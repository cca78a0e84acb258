//! The write test's data, which depend on seed, sector and pass.
//!
//! Each sector states its sector and pass.
//!
//! ```text
//! bytes 0..8    sector number, little endian
//! bytes 8..12   pass, little endian
//! bytes 12..16  the lower half of the key, which seed, number and pass give
//! bytes 16..512 62 words made of the key and of their position
//! ```
//! So a sector that landed in the wrong place, an old one, or one of another run is told at a
//! glance in a hex dump, and a single wrong bit anywhere is found. The words do not depend on one
//! another, so that the processor makes several at once.

/// 2^64 divided by the golden ratio, odd.
///
/// Its multiples are spread over all 64 bits.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
/// An odd constant with about half of its bits set, to mix by multiplication.
const MIX: u64 = 0xd6e8_feb8_6659_fd93;

/// One word that depends on every bit of seed, number and pass.
fn key(seed: u64, number: u64, pass: u32) -> u64 {
    let mut key = seed;
    for part in [number, u64::from(pass)] {
        key = (key ^ part).wrapping_add(STEP);
        key = (key ^ (key >> 32)).wrapping_mul(MIX);
        key = (key ^ (key >> 29)).wrapping_mul(MIX);
        key ^= key >> 32;
    }
    key
}

/// The word at a position from 2 to 63.
fn word(key: u64, position: usize) -> u64 {
    let spread = key.wrapping_add(STEP.wrapping_mul(position as u64));
    (spread ^ (spread >> 31)).wrapping_mul(MIX)
}

/// The second word: pass, and the lower half of the key.
fn second(key: u64, pass: u32) -> u64 {
    u64::from(pass) | key << 32
}

/// Fills `sector` (512 bytes) with the pattern of the given sector number and pass.
pub fn fill(sector: &mut [u8; 512], seed: u64, number: u64, pass: u32) {
    let key = key(seed, number, pass);
    let (words, _) = sector.as_chunks_mut::<8>();
    for (position, bytes) in words.iter_mut().enumerate() {
        *bytes = word(key, position).to_le_bytes();
    }
    words[0] = number.to_le_bytes();
    words[1] = second(key, pass).to_le_bytes();
}

/// Whether `sector` holds exactly that pattern.
#[must_use]
pub fn check(sector: &[u8; 512], seed: u64, number: u64, pass: u32) -> bool {
    let key = key(seed, number, pass);
    let (words, _) = sector.as_chunks::<8>();
    // No early end: nearly every sector is right, and a loop without branches is the fast one.
    let mut wrong = u64::from_le_bytes(words[0]) ^ number;
    wrong |= u64::from_le_bytes(words[1]) ^ second(key, pass);
    for (position, bytes) in words.iter().enumerate().skip(2) {
        wrong |= u64::from_le_bytes(*bytes) ^ word(key, position);
    }
    wrong == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_filled_sector_checks(seed: u64, number: u64, pass: u32) {
            let mut sector = [0; 512];
            fill(&mut sector, seed, number, pass);
            prop_assert!(check(&sector, seed, number, pass));
            prop_assert_eq!(&sector[..8], &number.to_le_bytes());
            prop_assert_eq!(&sector[8..12], &pass.to_le_bytes());
        }

        #[test]
        fn a_wrong_bit_anywhere_is_found(seed: u64, number: u64, pass: u32, bit in 0usize..4096) {
            let mut sector = [0; 512];
            fill(&mut sector, seed, number, pass);
            sector[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(!check(&sector, seed, number, pass));
        }

        #[test]
        fn another_place_pass_or_seed_does_not_check(seed: u64, number: u64, pass: u32, other in 1u64..) {
            let mut sector = [0; 512];
            fill(&mut sector, seed, number, pass);
            prop_assert!(!check(&sector, seed ^ other, number, pass));
            prop_assert!(!check(&sector, seed, number ^ other, pass));
            prop_assert!(!check(&sector, seed, number, pass ^ ((other as u32) | 1)));
        }
    }

    #[test]
    fn the_words_of_a_sector_differ_from_one_another_and_from_the_next_pass() {
        let (mut one, mut two) = ([0; 512], [0; 512]);
        fill(&mut one, 1, 7, 1);
        fill(&mut two, 1, 7, 2);
        let (one, two) = (one.as_chunks::<8>().0, two.as_chunks::<8>().0);
        for position in 1..64 {
            assert_ne!(one[position], two[position], "word {position} is the same in both passes");
            assert!(!one[..position].contains(&one[position]), "word {position} comes twice");
        }
    }
}
