//! A bounded cache of pieces of tables. All changes are in the file before they are in the cache.
use super::io::Io;
use std::collections::{HashMap, VecDeque};
use std::io;

/// Most bytes of a slice. A cluster has a whole number of slices.
const SLICE: u64 = 4096;

/// Pieces of tables, by their offsets in the file.
#[derive(Debug)]
pub(super) struct Slices {
    slots: HashMap<u64, CachedSlice>,
    /// Offsets in the order in which they may be dropped.
    order: VecDeque<u64>,
    /// Bytes of a slice.
    pub(super) slice: u64,
    /// Most slices.
    most: usize,
}

#[derive(Debug)]
struct CachedSlice {
    bytes: Box<[u8]>,
    /// It was used since its last turn.
    is_used: bool,
}

impl Slices {
    /// A cache of at most `limit` bytes, for clusters of `cluster` bytes.
    pub(super) fn new(cluster: u64, limit: u64) -> Self {
        let slice = cluster.min(SLICE);
        Self { slots: HashMap::new(), order: VecDeque::new(), slice, most: (limit / slice).max(1) as usize }
    }

    /// The slice that has `offset` of the file.
    pub(super) fn get(&mut self, io: &Io, offset: u64) -> io::Result<&[u8]> {
        let start = offset & !(self.slice - 1);
        if !self.slots.contains_key(&start) {
            let mut bytes = vec![0; self.slice as usize].into_boxed_slice();
            io.read(&mut bytes, start)?;
            self.make_room();
            self.slots.insert(start, CachedSlice { bytes, is_used: false });
            self.order.push_back(start);
        }
        match self.slots.get_mut(&start) {
            Some(slot) => {
                slot.is_used = true;
                Ok(&slot.bytes)
            }
            None => Err(io::ErrorKind::NotFound.into()),
        }
    }

    /// The number at `offset` of the file.
    pub(super) fn long(&mut self, io: &Io, offset: u64) -> io::Result<u64> {
        let within = (offset & (self.slice - 1)) as usize;
        let slice = self.get(io, offset)?;
        Ok(slice
            .get(within..within + 8)
            .and_then(|bytes| bytes.try_into().ok())
            .map_or(0, u64::from_be_bytes))
    }

    /// Writes `data` at `offset`, within one slice.
    ///
    /// # Errors
    /// The file has the old or the new data; the next use reads it again.
    pub(super) fn write(&mut self, io: &Io, data: &[u8], offset: u64) -> io::Result<()> {
        let start = offset & !(self.slice - 1);
        if let Err(error) = io.write(data, offset) {
            self.forget(start, self.slice);
            return Err(error);
        }
        if let Some(slot) = self.slots.get_mut(&start) {
            slot.bytes[(offset - start) as usize..][..data.len()].copy_from_slice(data);
        }
        Ok(())
    }

    /// Drops what is cached of a range.
    pub(super) fn forget(&mut self, offset: u64, len: u64) {
        let mut at = offset & !(self.slice - 1);
        while at < offset.saturating_add(len) {
            self.slots.remove(&at);
            at += self.slice;
        }
    }

    fn make_room(&mut self) {
        while self.slots.len() >= self.most {
            let Some(oldest) = self.order.pop_front() else { return self.slots.clear() };
            match self.slots.get_mut(&oldest) {
                Some(slot) if slot.is_used => {
                    slot.is_used = false;
                    self.order.push_back(oldest);
                }
                _ => {
                    self.slots.remove(&oldest);
                }
            }
        }
        // Slices that were dropped by `forget` have left their offsets.
        if self.order.len() > 4 * self.most {
            self.order.retain(|offset| self.slots.contains_key(offset));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use paravane_store::file::FileStore;
    use std::os::unix::fs::FileExt;

    #[test]
    fn a_cache_keeps_to_its_limit_and_to_the_file() {
        let file = tempfile::tempfile().unwrap();
        for number in 0..64_u64 {
            file.write_all_at(&number.to_be_bytes(), number * 512).unwrap();
        }
        let io = Io::new(FileStore::of(file.try_clone().unwrap())).unwrap();
        let mut slices = Slices::new(512, 8 * 512);
        for round in 0..3 {
            for number in 0..64 {
                assert_eq!(slices.long(&io, number * 512).unwrap(), number);
                assert!(slices.slots.len() <= 8 && slices.order.len() <= 32, "{round}");
            }
        }
        assert_eq!(slices.long(&io, 1 << 40).unwrap(), 0, "beyond the end");
        slices.write(&io, &7_u64.to_be_bytes(), 512).unwrap();
        assert_eq!(slices.long(&io, 512).unwrap(), 7);
        slices.forget(512, 1);
        assert_eq!(slices.long(&io, 512).unwrap(), 7);
    }
}
