//! Content of sectors that names the write that made it.

/// Bytes of a sector.
pub(super) const SECTOR: usize = 512;

/// The word that fills a sector: the write's number, and the sector's.
fn word(write: u64, sector: u64) -> [u8; 8] {
    (1 << 63 | write << 24 | sector).to_le_bytes()
}

/// Fills whole sectors from `first` on with the stamp of a write.
pub(super) fn fill(data: &mut [u8], write: u64, first: u64) {
    for (sector, bytes) in (first..).zip(data.chunks_mut(SECTOR)) {
        let word = word(write, sector);
        bytes.chunks_mut(8).for_each(|part| part.copy_from_slice(&word));
    }
}

/// Whether a sector has the stamp of a write.
pub(super) fn is(bytes: &[u8], write: u64, sector: u64) -> bool {
    bytes[..8] == word(write, sector) && bytes[8..] == bytes[..SECTOR - 8]
}

/// Whether a sector reads as zeroes.
pub(super) fn is_zero(bytes: &[u8]) -> bool {
    bytes == [0; SECTOR]
}

/// What a sector holds, for messages.
pub(super) fn describe(bytes: &[u8]) -> String {
    if is_zero(bytes) {
        return "zeroes".into();
    }
    let word = u64::from_le_bytes(std::array::from_fn(|at| bytes[at]));
    if word >> 63 == 1 && bytes[8..] == bytes[..SECTOR - 8] {
        let (write, sector) = (word << 1 >> 25, word & 0xff_ffff);
        return format!("write {write} of sector {sector}");
    }
    format!("bytes {:02x?}...", &bytes[..8])
}
