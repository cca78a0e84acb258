//! The write test's data: what a sector holds depends on seed, sector and pass, and says so itself.

/// Fills `sector` (512 bytes) with the pattern of the given sector number and pass.
pub fn fill(sector: &mut [u8; 512], seed: u64, number: u64, pass: u32) {
    let _ = (sector, seed, number, pass);
    todo!()
}

/// Whether `sector` holds exactly that pattern.
#[must_use]
pub fn check(sector: &[u8; 512], seed: u64, number: u64, pass: u32) -> bool {
    let _ = (sector, seed, number, pass);
    todo!()
}
