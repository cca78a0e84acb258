//! The host verifies the images after the guest's end, when queues are drained.
use crate::run::report_area::ReportArea;
use paravane_guest::pattern;
use paravane_spec::blk::SECTOR;
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};

/// Bytes read at once.
const CHUNK: usize = 256 << 10;
/// Bytes of a sector.
const SECTOR_LEN: usize = SECTOR as usize;

/// Why a verification was not finished.
#[derive(Debug)]
pub(crate) enum Unfinished {
    /// The operator cancelled the run.
    Cancelled,
    /// The image or the pass map could not be read.
    Failed(String),
}

impl From<io::Error> for Unfinished {
    fn from(error: io::Error) -> Self {
        Self::Failed(format!("the host cannot read the image back: {error}"))
    }
}

/// SHA-256 of the bytes up to the last of `ends`, and of the parts that end there.
///
/// # Errors
/// The image could not be read, or the operator cancelled.
pub(crate) fn hash(
    image: &File,
    ends: impl IntoIterator<Item = u64>,
    cancel: &AtomicBool,
) -> Result<([u8; 32], Vec<[u8; 32]>), Unfinished> {
    let mut sha256 = Sha256::new();
    let mut buffer = vec![0; CHUNK];
    let mut of_parts = Vec::new();
    let mut at = 0;
    for end in ends {
        let mut of_part = Sha256::new();
        while at < end {
            let len = buffer.len().min(usize::try_from(end - at).unwrap_or(CHUNK));
            // Relaxed: a request that is seen one chunk later is as good.
            if cancel.load(Ordering::Relaxed) {
                return Err(Unfinished::Cancelled);
            }
            image.read_exact_at(&mut buffer[..len], at)?;
            sha256.update(&buffer[..len]);
            of_part.update(&buffer[..len]);
            at += len as u64;
        }
        of_parts.push(of_part.finalize().into());
    }
    Ok((sha256.finalize().into(), of_parts))
}

/// Hex digits of a digest.
pub(crate) fn hex(digest: &[u8; 32]) -> String {
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Content that a write test must have left behind.
#[derive(Clone, Debug)]
pub(crate) struct Expected {
    /// Seed of the pattern.
    pub(crate) seed: u64,
    /// Size of a block in bytes.
    pub(crate) block: u64,
    /// Bytes of the image, whole blocks.
    pub(crate) part: Range<u64>,
    /// Guest-physical address of the pass map.
    pub(crate) map: u64,
}

/// Result of a comparison.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Found {
    /// Bytes that are as expected.
    pub(crate) verified: u64,
    /// The first sector that is not as expected, in one line.
    pub(crate) mismatch: Option<String>,
}

/// Compares every sector with the pattern of its block's pass in the map.
///
/// # Errors
/// The image or the map could not be read, or the operator cancelled.
pub(crate) fn pattern(
    image: &File,
    area: &ReportArea,
    expected: &Expected,
    cancel: &AtomicBool,
) -> Result<Found, Unfinished> {
    let mut found = Found::default();
    let mut buffer = vec![0; CHUNK];
    let mut passes = Passes { area, map: expected.map, first: 0, known: Vec::new() };
    let Range { start, end } = expected.part;
    let blocks = (end - start) / expected.block;
    let mut at = start;
    while at < end {
        if cancel.load(Ordering::Relaxed) {
            return Err(Unfinished::Cancelled);
        }
        let len = CHUNK.min(usize::try_from(end - at).unwrap_or(CHUNK));
        image.read_exact_at(&mut buffer[..len], at)?;
        let (sectors, _) = buffer[..len].as_chunks::<SECTOR_LEN>();
        for sector in sectors {
            let pass = passes.of((at - start) / expected.block, blocks)?;
            let number = at / SECTOR;
            if pattern::check(sector, expected.seed, number, pass) {
                found.verified += SECTOR;
            } else if found.mismatch.is_none() {
                found.mismatch = Some(describe(sector, expected.seed, number, pass));
            }
            at += SECTOR;
        }
    }
    Ok(found)
}

/// Contents of a wrong sector, as far as they can be recognised.
fn describe(sector: &[u8; SECTOR_LEN], seed: u64, number: u64, pass: u32) -> String {
    let field = |at: usize| {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(&sector[at..at + 8]);
        u64::from_le_bytes(bytes)
    };
    let (theirs, their_pass) = (field(0), field(8) as u32);
    let what = if pattern::check(sector, seed, theirs, their_pass) {
        if theirs == number {
            format!("it holds pass {their_pass}")
        } else {
            format!("it holds sector {theirs} of pass {their_pass}")
        }
    } else if sector.iter().all(|byte| *byte == 0) {
        "it holds zeroes".to_owned()
    } else if theirs == number {
        format!("it begins like pass {their_pass} and is damaged")
    } else {
        "it does not hold the pattern".to_owned()
    };
    format!("sector {number} must hold pass {pass}, but {what}")
}

/// The guest's pass map, read piece by piece.
struct Passes<'a> {
    area: &'a ReportArea,
    map: u64,
    first: u64,
    known: Vec<u32>,
}

impl Passes<'_> {
    /// Entries read at once.
    const PIECE: u64 = 4096;

    fn of(&mut self, block: u64, blocks: u64) -> Result<u32, Unfinished> {
        let lost = || Unfinished::Failed("the guest's pass map lies outside its memory".into());
        let position = block.checked_sub(self.first).and_then(|at| usize::try_from(at).ok());
        if let Some(pass) = position.and_then(|at| self.known.get(at)) {
            return Ok(*pass);
        }
        let count = Self::PIECE.min(blocks.saturating_sub(block)).max(1);
        self.known.clear();
        self.known.resize(usize::try_from(count).map_err(|_| lost())?, 0);
        self.first = block;
        self.area.passes(self.map, block, &mut self.known).ok_or_else(lost)?;
        self.known.first().copied().ok_or_else(lost)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use paravane_dma::{Access, Backing, Memory, Region, RegionConfig};

    const MAP: u64 = 0x1000;

    fn memory() -> Memory {
        let config = RegionConfig { gpa: 0, size: 1 << 20, backing: Backing::Pages, writable: true };
        Memory::new(vec![Region::new(config).unwrap()]).unwrap()
    }

    fn written(passes: &[u32]) -> (File, Memory, Expected) {
        let (memory, image) = (memory(), tempfile::tempfile().unwrap());
        let mut sector = [0; SECTOR_LEN];
        for (block, &pass) in (0_u64..).zip(passes) {
            memory.handle().enter().write_obj(MAP + block * 4, &pass, Access::WRITE).unwrap();
            for number in block * 2..block * 2 + 2 {
                pattern::fill(&mut sector, 9, number, pass);
                image.write_all_at(&sector, number * SECTOR).unwrap();
            }
        }
        let expected = Expected { seed: 9, block: 1024, part: 0..passes.len() as u64 * 1024, map: MAP };
        (image, memory, expected)
    }

    fn look(image: &File, memory: &Memory, expected: &Expected) -> Found {
        pattern(image, &ReportArea::new(memory, [0], 1), expected, &AtomicBool::new(false)).unwrap()
    }

    #[test]
    fn a_right_image_verifies_whole() {
        let passes: Vec<u32> = (0..5000).map(|block| block % 7 + 1).collect();
        let (image, memory, expected) = written(&passes);
        let found = look(&image, &memory, &expected);
        assert_eq!(found, Found { verified: 5000 * 1024, mismatch: None });
    }

    #[test]
    fn each_part_has_a_map() {
        let passes: Vec<u32> = (0..100).map(|block| block % 7 + 1).collect();
        let (image, memory, expected) = written(&passes);
        for (first, blocks) in [(0, 10), (33, 50), (83, 17)] {
            // A map of the part alone.
            for (entry, &pass) in (0_u64..).zip(&passes[first..first + blocks]) {
                memory.handle().enter().write_obj(0x8000 + entry * 4, &pass, Access::WRITE).unwrap();
            }
            let part = first as u64 * 1024..(first + blocks) as u64 * 1024;
            let found = look(&image, &memory, &Expected { part, map: 0x8000, ..expected.clone() });
            assert_eq!(found, Found { verified: blocks as u64 * 1024, mismatch: None });
        }
    }

    #[test]
    fn each_kind_of_wrong_sector_is_named() {
        let (image, memory, expected) = written(&[1, 2, 3]);
        let mut sector = [0; SECTOR_LEN];
        let try_it = |sector: &[u8; SECTOR_LEN]| {
            image.write_all_at(sector, 3 * SECTOR).unwrap();
            let found = look(&image, &memory, &expected);
            assert_eq!(found.verified, 5 * SECTOR);
            found.mismatch.unwrap()
        };
        pattern::fill(&mut sector, 9, 3, 1);
        assert_eq!(try_it(&sector), "sector 3 must hold pass 2, but it holds pass 1");
        sector[500] ^= 1;
        assert_eq!(try_it(&sector), "sector 3 must hold pass 2, but it begins like pass 1 and is damaged");
        pattern::fill(&mut sector, 9, 4, 2);
        assert_eq!(try_it(&sector), "sector 3 must hold pass 2, but it holds sector 4 of pass 2");
        assert_eq!(try_it(&[0; 512]), "sector 3 must hold pass 2, but it holds zeroes");
        assert_eq!(try_it(&[7; 512]), "sector 3 must hold pass 2, but it does not hold the pattern");
    }

    #[test]
    fn a_pass_map_outside_memory_is_an_error() {
        let (image, memory, expected) = written(&[1]);
        let area = ReportArea::new(&memory, [0], 1);
        for map in [u64::MAX - 2, 1 << 20, 1 << 40] {
            let result =
                pattern(&image, &area, &Expected { map, ..expected.clone() }, &AtomicBool::new(false));
            assert!(matches!(result, Err(Unfinished::Failed(_))));
        }
    }

    #[test]
    fn a_cancelled_look_ends() {
        let (image, memory, expected) = written(&[1]);
        let cancel = AtomicBool::new(true);
        assert!(matches!(hash(&image, [512], &cancel), Err(Unfinished::Cancelled)));
        let area = ReportArea::new(&memory, [0], 1);
        assert!(matches!(pattern(&image, &area, &expected, &cancel), Err(Unfinished::Cancelled)));
    }

    #[test]
    fn the_hash_is_sha256() {
        let image = tempfile::tempfile().unwrap();
        image.write_all_at(b"abc", 0).unwrap();
        let abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        let hash = |ends: &[u64]| hash(&image, ends.iter().copied(), &AtomicBool::new(false)).unwrap();
        let (whole, parts) = hash(&[3]);
        assert_eq!((hex(&whole).as_str(), parts), (abc, vec![whole]));
        let (whole, parts) = hash(&[1, 3, 3]);
        assert_eq!((hex(&whole).as_str(), parts.len()), (abc, 3));
        let of = |bytes: &[u8]| -> [u8; 32] { Sha256::digest(bytes).into() };
        assert_eq!(parts, [of(b"a"), of(b"bc"), of(b"")]);
    }
}
