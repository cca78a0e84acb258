//! Files after a power loss.
use crate::Random;

/// Bytes that a storage keeps or loses as a whole.
const SECTOR: usize = 512;

/// A file that was never flushed, after a power loss: each sector is that of any of its versions.
///
/// The same holds for its length; what no version has there is zero.
///
/// # Panics
/// There are no versions.
#[must_use]
pub fn torn(versions: &[Vec<u8>], random: &mut Random) -> Vec<u8> {
    let len = versions[random.below(versions.len())].len();
    let mut file = vec![0; len];
    // Mostly old, mostly new, or any.
    let (favourite, odds) = (random.below(versions.len()), 1 + random.below(16) as u32);
    for (number, sector) in file.chunks_mut(SECTOR).enumerate() {
        let version = if random.once_in(odds) { random.below(versions.len()) } else { favourite };
        let start = (number * SECTOR).min(versions[version].len());
        let there = &versions[version][start..];
        let there = &there[..there.len().min(sector.len())];
        sector[..there.len()].copy_from_slice(there);
    }
    file
}
