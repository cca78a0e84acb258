//! Which parts of a file or store read as zeroes, without reading them.
//!
//! [`Store::extents`] tells. The latest answer is kept: on tmpfs, it looks at each page up to the next
//! hole, and a server sends a list for many parts at once.
use paravane_store::Store;
use paravane_store::lock;
use std::io;
use std::sync::{Arc, Mutex};

/// Most bytes that a store is asked about at once.
const AT_ONCE: u64 = 1 << 30;
/// Least bytes that a store is asked about at once: clusters lie side by side in an image.
const AHEAD: u64 = 64 << 20;

/// A part of a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Part {
    /// Its end; it begins where the part before it ends.
    end: u64,
    zeroes: bool,
}

/// What is known of a source.
#[derive(Debug, Default)]
pub(super) struct BlockStatus {
    known: Mutex<Known>,
}

/// The latest answer.
#[derive(Debug, Default)]
struct Known {
    start: u64,
    parts: Vec<Part>,
}

impl Known {
    /// The part with the byte at `offset`.
    fn find(&self, offset: u64) -> Option<Part> {
        let place = self.parts.partition_point(|part| part.end <= offset);
        self.parts.get(place).copied().filter(|_| offset >= self.start)
    }

    /// Appends a part that ends at `end`, if that is beyond what is known.
    fn push(&mut self, end: u64, zeroes: bool) {
        match self.parts.last_mut() {
            Some(last) if last.end >= end => {}
            Some(last) if last.zeroes == zeroes => last.end = end,
            None if self.start >= end => {}
            _ => self.parts.push(Part { end, zeroes }),
        }
    }

    /// Forgets a range that was written.
    fn forget(&mut self, offset: u64, end: u64) {
        if offset <= self.start {
            self.start = self.start.max(end);
            return;
        }
        let place = self.parts.partition_point(|part| part.end <= offset);
        if let Some(part) = self.parts.get_mut(place) {
            part.end = offset;
            self.parts.truncate(place + 1);
        }
    }
}

impl BlockStatus {
    /// Whether the bytes at `offset` read as zeroes, and how many are alike: at most `len`, at least 1.
    ///
    /// `false` where the source cannot tell. The range is not empty and lies within the source, or
    /// beyond the end of a file, where there are zeroes.
    pub(super) fn zeroes(&self, source: &Arc<dyn Store>, offset: u64, len: u64) -> io::Result<(bool, u64)> {
        let mut known = lock(&self.known);
        let found = match known.find(offset) {
            Some(part) => part,
            None => {
                *known = ask(source, offset, len)?;
                known.find(offset).unwrap_or(Part { end: offset.saturating_add(len), zeroes: false })
            }
        };
        Ok((found.zeroes, (found.end - offset).min(len)))
    }

    /// Forgets a range that was written to, or was freed.
    pub(super) fn forget(&self, offset: u64, len: u64) {
        lock(&self.known).forget(offset, offset.saturating_add(len));
    }
}

/// The answer of a store for `len` bytes at `offset` and what follows. Its
/// blocks are called zeroes as a whole or not at all.
fn ask(source: &Arc<dyn Store>, offset: u64, len: u64) -> io::Result<Known> {
    let block = u64::from(source.limits().block);
    let start = offset / block * block;
    let size = source.try_size()?;
    let end = offset.saturating_add(len.clamp(AHEAD, AT_ONCE)).next_multiple_of(block).min(size);
    // A file system has looked at all that it tells.
    let told = if source.file().is_some() { u64::MAX } else { end };
    let mut known = Known { start, parts: Vec::new() };
    if start >= end {
        // A store reads as zeroes beyond its end, which a format may use.
        known.parts.push(Part { end: u64::MAX, zeroes: true });
        return Ok(known);
    }
    // Where the run of zeroes begins that ends at `at`.
    let (mut at, mut run) = (start, start);
    for extent in source.extents(start, end - start)? {
        at = at.saturating_add(extent.len).min(told);
        if !extent.zeroes {
            run = at;
        }
        let (first, last) = (run.next_multiple_of(block), at / block * block);
        if first < last {
            known.push(first, false);
            known.push(last, true);
        }
    }
    known.push(at.next_multiple_of(block), false);
    Ok(known)
}

#[cfg(test)]
mod tests {
    use super::*;
    use paravane_store::file::FileStore;
    use paravane_store::{Job, StoreExtent, StoreLimits, StoreQueue};
    use std::os::unix::fs::FileExt;
    use std::sync::atomic::{AtomicU32, Ordering};

    /// A store that has `extents`, up to `most` in a list, and counts lists.
    #[derive(Debug)]
    struct Listed {
        extents: Vec<StoreExtent>,
        most: usize,
        block: u32,
        size: u64,
        asked: Arc<AtomicU32>,
    }

    impl Store for Listed {
        fn queue(&self, _: u16) -> io::Result<Box<dyn StoreQueue>> {
            Err(io::ErrorKind::Unsupported.into())
        }

        unsafe fn perform(&self, _: Job) -> i32 {
            -libc::EIO
        }

        fn size(&self) -> u64 {
            self.size
        }

        fn extents(&self, offset: u64, len: u64) -> io::Result<Vec<StoreExtent>> {
            assert!(len > 0 && (offset | len).is_multiple_of(self.block.into()) && offset + len <= self.size);
            self.asked.fetch_add(1, Ordering::Relaxed);
            let cut = |extent: &StoreExtent| {
                let start = extent.offset.max(offset);
                let end = (extent.offset + extent.len).min(offset + len);
                (start < end).then(|| StoreExtent { offset: start, len: end - start, ..*extent })
            };
            Ok(self.extents.iter().filter_map(cut).take(self.most).collect())
        }

        fn limits(&self) -> StoreLimits {
            StoreLimits {
                read_only: true,
                block: self.block,
                physical_block: 4096,
                discard_block: 4096,
                discard: false,
                zeroes: false,
            }
        }
    }

    /// All parts of a source, and how often a store was asked.
    fn parts(status: &BlockStatus, source: &Arc<dyn Store>, size: u64) -> Vec<(u64, bool)> {
        let (mut at, mut found) = (0, Vec::new());
        while at < size {
            let (zeroes, len) = status.zeroes(source, at, size - at).unwrap();
            assert!(len > 0 && at + len <= size);
            at += len;
            match found.last_mut() {
                Some((end, last)) if *last == zeroes => *end = at,
                _ => found.push((at, zeroes)),
            }
        }
        found
    }

    fn listed(extents: &[StoreExtent], most: usize, block: u32) -> (Arc<dyn Store>, Arc<AtomicU32>) {
        let asked = Arc::new(AtomicU32::new(0));
        let size = extents.iter().map(|extent| extent.offset + extent.len).max().unwrap_or(0);
        let store = Listed { extents: extents.to_vec(), most, block, size, asked: asked.clone() };
        (Arc::new(store), asked)
    }

    #[test]
    fn a_list_is_asked_for_once() {
        let holes = (0..64).map(|n| match n % 2 {
            0 => StoreExtent::hole(n * 4096, 4096),
            _ => StoreExtent::data(n * 4096, 4096),
        });
        let extents: Vec<_> = holes.collect();
        for (most, lists) in [(100, 1), (16, 4), (1, 64)] {
            let (source, asked) = listed(&extents, most, 512);
            let status = BlockStatus::default();
            let found = parts(&status, &source, 64 * 4096);
            assert_eq!(found.len(), 64);
            assert!(found.iter().enumerate().all(|(n, part)| *part == ((n as u64 + 1) * 4096, n % 2 == 0)));
            assert_eq!(asked.load(Ordering::Relaxed), lists);
        }
    }

    #[test]
    fn only_zeroes_are_zeroes_and_only_whole_blocks() {
        // A hole of unknown content; zeroes that take room; zeroes with odd borders.
        let extents = [
            StoreExtent { zeroes: false, ..StoreExtent::hole(0, 4096) },
            StoreExtent { hole: false, ..StoreExtent::hole(4096, 4096) },
            StoreExtent::data(8192, 100),
            StoreExtent::hole(8292, 8000),
            StoreExtent::hole(16292, 92),
            StoreExtent::data(16384, 4096),
        ];
        let found = |block| parts(&BlockStatus::default(), &listed(&extents, 100, block).0, 20480);
        let exact = [(4096, false), (8192, true), (8292, false), (16384, true), (20480, false)];
        assert_eq!(found(1), exact);
        assert_eq!(found(4096), [(4096, false), (8192, true), (12288, false), (16384, true), (20480, false)]);
        // Beyond the end of a store is nothing.
        let (source, _) = listed(&extents, 100, 1);
        assert_eq!(BlockStatus::default().zeroes(&source, 1 << 20, 512).unwrap(), (true, 512));
        // A store that lists nothing has data.
        let (silent, _) = listed(&extents, 0, 1);
        assert_eq!(BlockStatus::default().zeroes(&silent, 0, 512).unwrap(), (false, 512));
    }

    #[test]
    fn what_was_written_is_asked_for_again() {
        let (source, asked) = listed(&[StoreExtent::hole(0, 1 << 20)], 100, 512);
        let status = BlockStatus::default();
        let zeroes = |at| status.zeroes(&source, at, 4096).unwrap();
        assert_eq!(zeroes(0), (true, 4096));
        // From the front, as a copy goes, the rest stays known.
        for at in 0..10 {
            status.forget(at * 4096, 4096);
            assert_eq!(zeroes((at + 1) * 4096), (true, 4096));
        }
        assert_eq!(asked.load(Ordering::Relaxed), 1);
        status.forget(1 << 19, 512);
        assert_eq!(zeroes(1 << 16), (true, 4096));
        assert_eq!(asked.load(Ordering::Relaxed), 1, "what lies before is known");
        zeroes(1 << 19);
        assert_eq!(asked.load(Ordering::Relaxed), 2);
        status.forget(0, u64::MAX);
        zeroes(0);
        assert_eq!(asked.load(Ordering::Relaxed), 3);
    }

    #[test]
    fn holes_of_a_file_are_zeroes() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(1 << 20).unwrap();
        file.write_all_at(&[1; 4096], 1 << 18).unwrap();
        let source = FileStore::of(file);
        let status = BlockStatus::default();
        let found = parts(&status, &source, 1 << 20);
        assert_eq!(found, [(1 << 18, true), ((1 << 18) + 4096, false), (1 << 20, true)]);
        assert_eq!(status.zeroes(&source, 1 << 20, 4096).unwrap(), (true, 4096), "beyond the end");
    }
}
