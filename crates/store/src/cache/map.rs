//! The map file: what the chunks are of, and a checksum for each one that is there.
//!
//! ```text
//!   0     "PVCHUNKS", version, chunk size, object size, key, CRC-32 of these
//!   4096  8 bytes for each chunk: CRC-32 of key, number and data; a mark.  All zero: absent
//! ```
use super::Layout;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

const MAGIC: [u8; 8] = *b"PVCHUNKS";
const VERSION: u32 = 1;
const HEADER: usize = 60;
const ENTRIES: u64 = 4096;
/// Tells an entry from what else a disk may hold.
const MARK: u32 = 0x4348_4b31;

/// A map file that this process has locked.
#[derive(Debug)]
pub(super) struct ChunkMap {
    file: File,
    key: [u8; 32],
}

fn header(layout: Layout, key: &[u8; 32]) -> [u8; HEADER] {
    let mut header = [0; HEADER];
    header[..8].copy_from_slice(&MAGIC);
    header[8..12].copy_from_slice(&VERSION.to_le_bytes());
    header[12..16].copy_from_slice(&layout.chunk_bytes().to_le_bytes());
    header[16..24].copy_from_slice(&layout.size().to_le_bytes());
    header[24..56].copy_from_slice(key);
    let crc = crc32fast::hash(&header[..56]);
    header[56..].copy_from_slice(&crc.to_le_bytes());
    header
}

impl ChunkMap {
    /// Takes up a file. `true`: it has no entries, and what the data file has is void.
    ///
    /// # Errors
    /// The file cannot be read or written.
    pub(super) fn open(file: File, layout: Layout, key: [u8; 32]) -> io::Result<(Self, bool)> {
        let wanted = header(layout, &key);
        let mut found = [0; HEADER];
        let len = ENTRIES + layout.count() * 8;
        let same =
            file.metadata()?.len() == len && file.read_exact_at(&mut found, 0).is_ok() && found == wanted;
        if !same {
            file.set_len(0)?;
            file.set_len(len)?;
            file.write_all_at(&wanted, 0)?;
        }
        Ok((Self { file, key }, !same))
    }

    /// Checksum of a chunk's data.
    pub(super) fn checksum(&self, chunk: u64, data: &[u8]) -> u32 {
        let mut crc = crc32fast::Hasher::new();
        crc.update(&self.key);
        crc.update(&chunk.to_le_bytes());
        crc.update(data);
        crc.finalize()
    }

    /// Writes the entry of a chunk: its checksum, or that it is absent.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(super) fn set(&self, chunk: u64, checksum: Option<u32>) -> io::Result<()> {
        let mut entry = [0; 8];
        if let Some(checksum) = checksum {
            entry[..4].copy_from_slice(&checksum.to_le_bytes());
            entry[4..].copy_from_slice(&MARK.to_le_bytes());
        }
        // Aligned to 8 bytes, so within a page: SIGKILL does not cut it.
        self.file.write_all_at(&entry, ENTRIES + chunk * 8)
    }

    /// The checksum of a chunk, if it has one.
    pub(super) fn get(&self, chunk: u64) -> Option<u32> {
        let mut entry = [0; 8];
        self.file.read_exact_at(&mut entry, ENTRIES + chunk * 8).ok()?;
        decode(&entry)
    }

    /// Calls `found` with each chunk that has a checksum, in order.
    ///
    /// # Errors
    /// The file cannot be read.
    pub(super) fn for_each(&self, layout: Layout, mut found: impl FnMut(u64)) -> io::Result<()> {
        let mut block = vec![0; 64 << 10];
        let (mut chunk, count) = (0, layout.count());
        while chunk < count {
            let entries = (count - chunk).min(block.len() as u64 / 8);
            let bytes = &mut block[..entries as usize * 8];
            self.file.read_exact_at(bytes, ENTRIES + chunk * 8)?;
            for (entry, chunk) in bytes.as_chunks::<8>().0.iter().zip(chunk..) {
                if decode(entry).is_some() {
                    found(chunk);
                }
            }
            chunk += entries;
        }
        Ok(())
    }
}

fn decode(entry: &[u8; 8]) -> Option<u32> {
    let [a, b, c, d, mark @ ..] = *entry;
    (u32::from_le_bytes(mark) == MARK).then(|| u32::from_le_bytes([a, b, c, d]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_found_again_and_void_for_another_object() {
        let layout = Layout::new(100_000, 4096).unwrap();
        let file = tempfile::tempfile().unwrap();
        let (map, fresh) = ChunkMap::open(file.try_clone().unwrap(), layout, [1; 32]).unwrap();
        assert!(fresh);
        map.set(3, Some(7)).unwrap();
        map.set(24, Some(0)).unwrap();
        map.set(5, Some(9)).unwrap();
        map.set(5, None).unwrap();
        let (map, fresh) = ChunkMap::open(file.try_clone().unwrap(), layout, [1; 32]).unwrap();
        let mut found = Vec::new();
        map.for_each(layout, |chunk| found.push(chunk)).unwrap();
        assert_eq!((fresh, found), (false, vec![3, 24]));
        assert_eq!((map.get(3), map.get(24), map.get(5)), (Some(7), Some(0), None));

        let (map, fresh) = ChunkMap::open(file, layout, [2; 32]).unwrap();
        assert!(fresh);
        assert_eq!(map.get(3), None);
    }

    #[test]
    fn a_checksum_is_one_of_this_place() {
        let layout = Layout::new(100_000, 4096).unwrap();
        let map = ChunkMap::open(tempfile::tempfile().unwrap(), layout, [1; 32]).unwrap().0;
        assert_ne!(map.checksum(1, b"data"), map.checksum(2, b"data"));
    }
}
