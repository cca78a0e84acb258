//! Chunks of one object in one file, with their states.
use super::Layout;
use super::map::ChunkMap;
use crate::Pieces;
use crate::lock::lock;
use rustix::fs::{FallocateFlags, MemfdFlags};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
use std::sync::{Mutex, MutexGuard};

/// State of a chunk: it is here, and it is right.
const VALID: u32 = 1;
/// State: an earlier process has kept it; it is compared with its checksum before its first use.
const UNCHECKED: u32 = 1 << 1;
/// State: it was used since the clock's hand last passed.
const USED: u32 = 1 << 2;
/// State: the next chunks are fetched when it is used.
const MARKED: u32 = 1 << 3;
/// The rest counts how often the chunk became absent.
const GENERATION: u32 = 1 << 4;

/// What became of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// Some of it is absent, or not checked yet.
    Absent,
    /// It is here, but the disk has to be waited for.
    Later,
    /// The pieces have it.
    Copied {
        /// The chunk from which on more should be fetched.
        mark: Option<u64>,
    },
    /// The memory is not accessible: an error number.
    Failed(i32),
}

/// The chunks of a read, as they were before it.
#[derive(Clone, Copy, Debug)]
pub(super) struct BegunRead {
    first: u64,
    last: u64,
    /// Sum of their generations.
    generations: u64,
    marked: bool,
}

/// Chunks in a file or in memory. Readers take no lock.
#[derive(Debug)]
pub(super) struct Chunks {
    layout: Layout,
    /// The file that has the data.
    pub(super) data: File,
    /// None for memory.
    map: Option<ChunkMap>,
    states: Box<[AtomicU32]>,
    /// The hand of the clock. Held by whoever changes data or map.
    changes: Mutex<u64>,
    used: AtomicU64,
    evicted: AtomicU64,
    /// The file system can tell that it would wait.
    at_once: AtomicBool,
}

/// States of an object whose size its server has chosen: up to 64 MiB.
fn states(layout: Layout) -> io::Result<Box<[AtomicU32]>> {
    let mut states = Vec::new();
    let count = usize::try_from(layout.count()).map_err(|_| io::ErrorKind::OutOfMemory)?;
    states.try_reserve_exact(count).map_err(|_| io::ErrorKind::OutOfMemory)?;
    states.resize_with(count, AtomicU32::default);
    Ok(states.into_boxed_slice())
}

impl Chunks {
    /// Without any chunk, in memory.
    ///
    /// # Errors
    /// The host refuses memory.
    pub(super) fn in_memory(layout: Layout) -> io::Result<Self> {
        let data = File::from(rustix::fs::memfd_create("paravane-chunks", MemfdFlags::CLOEXEC)?);
        data.set_len(layout.size())?;
        Ok(Self::new(layout, data, None, states(layout)?))
    }

    /// With the chunks that the map has, all of them unchecked.
    ///
    /// # Errors
    /// A file cannot be read or written.
    pub(super) fn in_files(layout: Layout, data: File, map: File, key: [u8; 32]) -> io::Result<Self> {
        let (map, fresh) = ChunkMap::open(map, layout, key)?;
        if fresh {
            data.set_len(0)?;
        }
        data.set_len(layout.size())?;
        let mut absent = 0;
        let mut used = 0;
        let states = states(layout)?;
        let punch = |from, to| punch(&data, layout, from, to);
        map.for_each(layout, |chunk| {
            states[chunk as usize].store(UNCHECKED, Ordering::Relaxed);
            used += layout.len(chunk) as u64;
            // What a kill has left of chunks that were being kept or evicted.
            punch(absent, chunk);
            absent = chunk + 1;
        })?;
        punch(absent, layout.count());
        Ok(Self { used: used.into(), ..Self::new(layout, data, Some(map), states) })
    }

    fn new(layout: Layout, data: File, map: Option<ChunkMap>, states: Box<[AtomicU32]>) -> Self {
        Self {
            layout,
            at_once: AtomicBool::new(map.is_some()),
            data,
            map,
            states,
            changes: Mutex::default(),
            used: AtomicU64::new(0),
            evicted: AtomicU64::new(0),
        }
    }

    /// Bytes of the chunks that are here.
    pub(super) fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// Chunks that were evicted.
    pub(super) fn evicted(&self) -> u64 {
        self.evicted.load(Ordering::Relaxed)
    }

    /// Bytes of one chunk.
    pub(super) fn len(&self, chunk: u64) -> u64 {
        self.layout.len(chunk) as u64
    }

    /// Whether a chunk is here, perhaps unchecked.
    pub(super) fn has(&self, chunk: u64) -> bool {
        self.states[chunk as usize].load(Ordering::Relaxed) & (VALID | UNCHECKED) != 0
    }

    /// Sum of the generations of some chunks, and whether one of them is marked.
    ///
    /// `None` if one is not valid. A generation only grows, so equal sums are equal generations.
    fn generations(&self, first: u64, last: u64) -> Option<(u64, bool)> {
        let (mut sum, mut marked) = (0, false);
        for state in &self.states[first as usize..=last as usize] {
            // Acquire: the data is there. Pairs with the release in `keep` and `load`.
            let now = state.load(Ordering::Acquire);
            if now & VALID == 0 {
                return None;
            }
            if now & USED == 0 {
                state.fetch_or(USED, Ordering::Relaxed);
            }
            marked |= now & MARKED != 0;
            sum += u64::from(now / GENERATION);
        }
        Some((sum, marked))
    }

    /// Copies a range into the pieces, which are as long, if its chunks are valid.
    ///
    /// # Safety
    /// The pieces, the array that lists them and the memory that they name are valid.
    pub(super) unsafe fn read(&self, pieces: Pieces, offset: u64, len: u64, at_once: bool) -> Found {
        let Some(begun) = self.begin(offset, len) else { return Found::Absent };
        let at_once = at_once && self.reads_at_once();
        // SAFETY: the caller's promise.
        let copied = unsafe { self.copy(pieces, offset, at_once) };
        self.end(begun, len, copied, at_once)
    }

    /// Begins a read: the caller copies and calls [`Chunks::end`]. `None`: a chunk is not valid.
    pub(super) fn begin(&self, offset: u64, len: u64) -> Option<BegunRead> {
        let (first, last) = self.layout.chunks(offset, len);
        let (generations, marked) = self.generations(first, last)?;
        Some(BegunRead { first, last, generations, marked })
    }

    /// Whether a copy need not wait for the disk.
    pub(super) fn reads_at_once(&self) -> bool {
        self.at_once.load(Ordering::Relaxed)
    }

    /// Copies a range into the pieces. Returns the bytes, or an error number.
    ///
    /// # Safety
    /// The pieces, the array that lists them and the memory that they name are valid.
    pub(super) unsafe fn copy(&self, pieces: Pieces, offset: u64, at_once: bool) -> Result<u64, i32> {
        // SAFETY: the caller's promise.
        unsafe { preadv(&self.data, pieces, offset, if at_once { libc::RWF_NOWAIT } else { 0 }) }
    }

    /// Ends a read of `len` bytes, which has copied what [`Chunks::copy`] would return.
    pub(super) fn end(&self, begun: BegunRead, len: u64, copied: Result<u64, i32>, at_once: bool) -> Found {
        let BegunRead { first, last, generations, marked } = begun;
        // The copy is done before the states are looked at again. Pairs with the fence in `forget`: if
        // the copy has bytes of a hole, the load sees the generation that came before the hole.
        fence(Ordering::SeqCst);
        if self.generations(first, last).is_none_or(|(after, _)| after != generations) {
            return Found::Absent;
        }
        match copied {
            Ok(bytes) if bytes == len => {
                Found::Copied { mark: if marked { self.take_mark(first, last) } else { None } }
            }
            // A part of it is in the page cache.
            Ok(_) if at_once => Found::Later,
            Err(libc::EAGAIN) => Found::Later,
            Err(libc::EOPNOTSUPP) if at_once => {
                self.at_once.store(false, Ordering::Relaxed);
                Found::Later
            }
            Err(error @ (libc::EFAULT | libc::EINVAL)) => Found::Failed(error),
            // The disk below the folder fails: these chunks are fetched again.
            _ => {
                (first..=last).for_each(|chunk| self.forget(&lock(&self.changes), chunk));
                Found::Absent
            }
        }
    }

    #[cold]
    fn take_mark(&self, first: u64, last: u64) -> Option<u64> {
        // All marks go, and the last one counts: it is the farthest.
        let take =
            |chunk: &u64| self.states[*chunk as usize].fetch_and(!MARKED, Ordering::Relaxed) & MARKED != 0;
        (first..=last).filter(take).last()
    }

    /// Reads a chunk, and checks it if that was not done yet. Waits for the disk.
    pub(super) fn load(&self, chunk: u64, data: &mut Vec<u8>) -> bool {
        let state = &self.states[chunk as usize];
        let before = state.load(Ordering::Acquire);
        if before & (VALID | UNCHECKED) == 0 {
            return false;
        }
        data.resize(self.layout.len(chunk), 0);
        let read = self.data.read_exact_at(data, self.layout.start(chunk));
        fence(Ordering::SeqCst);
        let same = |now: u32| now / GENERATION == before / GENERATION;
        if !same(state.load(Ordering::Acquire)) {
            return false;
        }
        if before & VALID != 0 && read.is_ok() {
            return true;
        }
        let checksum = self.map.as_ref().and_then(|map| map.get(chunk));
        let right =
            read.is_ok() && self.map.as_ref().is_some_and(|map| checksum == Some(map.checksum(chunk, data)));
        let changes = lock(&self.changes);
        if !same(state.load(Ordering::Acquire)) {
            return false;
        }
        if right {
            // Release: pairs with the acquire in `generations`.
            state.store(before & !UNCHECKED | VALID | USED, Ordering::Release);
        } else {
            self.forget(&changes, chunk);
        }
        right
    }

    /// Keeps a chunk that is absent.
    ///
    /// # Errors
    /// The file system refuses. The chunk stays absent.
    pub(super) fn keep(&self, chunk: u64, data: &[u8], mark: bool) -> io::Result<()> {
        let _changes = lock(&self.changes);
        let state = &self.states[chunk as usize];
        let before = state.load(Ordering::Relaxed);
        if before & (VALID | UNCHECKED) != 0 {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        let written = self.data.write_all_at(data, self.layout.start(chunk)).and_then(|()| match &self.map {
            Some(map) => map.set(chunk, Some(map.checksum(chunk, data))),
            None => Ok(()),
        });
        if let Err(error) = written {
            self.erase(chunk);
            return Err(error);
        }
        self.used.fetch_add(self.len(chunk), Ordering::Relaxed);
        // Release: pairs with the acquire in `generations`.
        state.store(before | VALID | if mark { MARKED } else { 0 }, Ordering::Release);
        Ok(())
    }

    /// Evicts the next chunk that was not used for a turn of the clock. Returns its bytes.
    pub(super) fn evict(&self) -> Option<u64> {
        let mut hand = lock(&self.changes);
        for _ in 0..2 * self.layout.count() + 1 {
            let chunk = *hand % self.layout.count();
            *hand = chunk + 1;
            let state = &self.states[chunk as usize];
            let now = state.load(Ordering::Relaxed);
            if now & (VALID | UNCHECKED) == 0 {
                continue;
            }
            if now & USED != 0 {
                state.fetch_and(!USED, Ordering::Relaxed);
                continue;
            }
            self.forget(&hand, chunk);
            self.evicted.fetch_add(1, Ordering::Relaxed);
            return Some(self.len(chunk));
        }
        None
    }

    /// Makes a chunk absent. Readers that are copying it notice.
    fn forget(&self, _changes: &MutexGuard<'_, u64>, chunk: u64) {
        let state = &self.states[chunk as usize];
        let now = state.load(Ordering::Relaxed);
        if now & (VALID | UNCHECKED) == 0 {
            return;
        }
        // Readers may set or clear other bits at any time; they do not matter to an absent chunk.
        state.store((now / GENERATION).wrapping_add(1).wrapping_mul(GENERATION), Ordering::Relaxed);
        // Before the hole. Pairs with the fences in `end` and `load`.
        fence(Ordering::SeqCst);
        self.erase(chunk);
        self.used.fetch_sub(self.len(chunk), Ordering::Relaxed);
    }

    /// Removes the entry, then the data.
    fn erase(&self, chunk: u64) {
        if let Some(Err(error)) = self.map.as_ref().map(|map| map.set(chunk, None)) {
            // The next process finds data that does not match.
            tracing::debug!("an entry of a map of chunks cannot be removed: {error}");
        }
        punch(&self.data, self.layout, chunk, chunk + 1);
    }
}

/// Makes a hole of some chunks.
fn punch(data: &File, layout: Layout, from: u64, to: u64) {
    if from >= to {
        return;
    }
    let (start, end) = (layout.start(from), layout.start(to).min(layout.size()));
    // To the end of the file's last block.
    let len = (end - start).next_multiple_of(u64::from(layout.chunk_bytes()));
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    if let Err(error) = rustix::fs::fallocate(data, flags, start, len) {
        tracing::debug!("chunks cannot be removed from a file: {error}");
    }
}

/// Reads from a file into the pieces. Returns the bytes, or an error number.
///
/// # Safety
/// The pieces, the array that lists them and the memory that they name are valid.
unsafe fn preadv(file: &File, pieces: Pieces, offset: u64, flags: i32) -> Result<u64, i32> {
    loop {
        let (fd, offset) = (file.as_raw_fd(), offset as libc::off_t);
        // SAFETY: the caller's promise; the descriptor is open.
        let bytes = unsafe { libc::preadv2(fd, pieces.iovecs(), pieces.count as libc::c_int, offset, flags) };
        if let Ok(bytes) = u64::try_from(bytes) {
            return Ok(bytes);
        }
        match io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO) {
            libc::EINTR => {}
            error => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use paravane_dma::HostSlice;
    use std::ptr::NonNull;

    fn read(chunks: &Chunks, out: &mut [u8], offset: u64) -> Found {
        let mut slice = HostSlice { ptr: out.as_mut_ptr(), len: out.len() };
        let pieces = Pieces { first: NonNull::from(&mut slice), count: 1 };
        // SAFETY: the slice and its memory live for the call.
        unsafe { chunks.read(pieces, offset, out.len() as u64, false) }
    }

    #[test]
    fn a_chunk_is_kept_read_and_evicted() {
        let chunks = Chunks::in_memory(Layout::new(10_000, 4096).unwrap()).unwrap();
        let mut out = [0; 100];
        assert_eq!(read(&chunks, &mut out, 4096), Found::Absent);
        chunks.keep(1, &[7; 4096], true).unwrap();
        chunks.keep(2, &[8; 1808], false).unwrap();
        assert_eq!(read(&chunks, &mut out, 4096), Found::Copied { mark: Some(1) });
        assert_eq!(out, [7; 100]);
        assert_eq!(read(&chunks, &mut out, 8150), Found::Copied { mark: None });
        assert_eq!((out[41], out[42]), (7, 8));
        assert_eq!(chunks.used(), 4096 + 1808);

        // Both were used: the hand passes them once.
        assert_eq!(chunks.evict(), Some(4096));
        assert_eq!(read(&chunks, &mut out, 8150), Found::Absent);
        assert_eq!(read(&chunks, &mut out, 9000), Found::Copied { mark: None });
        assert_eq!(chunks.evict(), Some(1808));
        assert_eq!(chunks.evict(), None);
        assert_eq!(chunks.used(), 0);
    }

    #[test]
    fn chunks_of_an_earlier_process_are_checked_before_their_use() {
        let layout = Layout::new(16_384, 4096).unwrap();
        let (data, map) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
        let open = || {
            let clone = |file: &File| file.try_clone().unwrap();
            Chunks::in_files(layout, clone(&data), clone(&map), [3; 32]).unwrap()
        };
        let chunks = open();
        for chunk in 0..3 {
            chunks.keep(chunk, &[chunk as u8 + 1; 4096], false).unwrap();
        }
        drop(chunks);
        // As a power failure leaves it: the entry, not the data.
        data.write_all_at(&[0; 512], 4096 + 512).unwrap();
        // As a kill leaves it: data without an entry.
        data.write_all_at(&[9; 4096], 3 * 4096).unwrap();

        let chunks = open();
        assert_eq!(chunks.used(), 3 * 4096);
        let mut out = [0; 16];
        assert_eq!(read(&chunks, &mut out, 0), Found::Absent);
        let mut loaded = Vec::new();
        assert!(chunks.load(0, &mut loaded) && loaded == [1; 4096]);
        assert_eq!(read(&chunks, &mut out, 0), Found::Copied { mark: None });
        assert!(!chunks.load(1, &mut loaded));
        assert!(!chunks.has(1) && chunks.has(2));
        assert!(!chunks.load(3, &mut loaded));
        let mut left = [1; 4096];
        data.read_exact_at(&mut left, 3 * 4096).unwrap();
        assert_eq!(left, [0; 4096], "data without an entry is removed");
    }

    /// What an object holds, in each version of it.
    fn content(layout: Layout, key: u8, chunk: u64) -> Vec<u8> {
        (0..layout.len(chunk)).map(|at| (at / 300 + at) as u8 ^ key ^ chunk as u8).collect()
    }

    #[test]
    fn a_power_loss_leaves_no_wrong_chunk() {
        use paravane_test_support::{Random, torn};
        let layout = Layout::new(11 * 4096 + 700, 4096).unwrap();
        let (data, map) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
        let bytes = |file: &File| {
            let mut bytes = vec![0; file.metadata().unwrap().len() as usize];
            file.read_exact_at(&mut bytes, 0).unwrap();
            bytes
        };
        let mut random = Random::new(1);
        let (mut found, mut lost) = (0, 0);
        for _ in 0..300 {
            // What the disk may hold of both files: nothing is ever flushed.
            let mut versions = (vec![bytes(&data)], vec![bytes(&map)]);
            let key = random.below(4).min(1) as u8;
            let clone = |file: &File| file.try_clone().unwrap();
            let chunks = Chunks::in_files(layout, clone(&data), clone(&map), [key; 32]).unwrap();
            for chunk in 0..layout.count() {
                let (had, mut loaded) = (chunks.has(chunk), Vec::new());
                match chunks.load(chunk, &mut loaded) {
                    true => assert!(loaded == content(layout, key, chunk), "chunk {chunk} is wrong"),
                    false => lost += usize::from(had),
                }
                found += usize::from(chunks.has(chunk));
            }
            for _ in 0..random.below(12) {
                match random.once_in(4) {
                    true => drop(chunks.evict()),
                    false => {
                        let chunk = random.below(layout.count() as usize) as u64;
                        let _ = chunks.keep(chunk, &content(layout, key, chunk), false);
                    }
                }
                versions.0.push(bytes(&data));
                versions.1.push(bytes(&map));
            }
            drop(chunks);
            for (file, versions) in [(&data, &versions.0), (&map, &versions.1)] {
                let crashed = torn(versions, &mut random);
                file.set_len(0).unwrap();
                file.write_all_at(&crashed, 0).unwrap();
            }
        }
        assert!(found > 100 && lost > 100, "{found} found, {lost} lost");
    }

    #[test]
    fn readers_notice_an_eviction_under_them() {
        let layout = Layout::new(4 * 65_536, 65_536).unwrap();
        let (data, map) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
        let in_files = Chunks::in_files(layout, data, map, [3; 32]).unwrap();
        for chunks in [Chunks::in_memory(layout).unwrap(), in_files] {
            let (done, wrong) = (AtomicBool::new(false), AtomicBool::new(false));
            let (copied, absent) = (AtomicU64::new(0), AtomicU64::new(0));
            std::thread::scope(|scope| {
                for reader in 0..2 {
                    let (chunks, done, wrong) = (&chunks, &done, &wrong);
                    let (copied, absent) = (&copied, &absent);
                    scope.spawn(move || {
                        let mut out = vec![0; 3 * 65_536];
                        while !done.load(Ordering::Relaxed) {
                            out.fill(0xee);
                            match read(chunks, &mut out, reader * 65_536) {
                                Found::Copied { .. } => {
                                    wrong.fetch_or(out.iter().any(|byte| *byte != 7), Ordering::Relaxed);
                                    copied.fetch_add(1, Ordering::Relaxed);
                                }
                                Found::Absent => {
                                    absent.fetch_add(1, Ordering::Relaxed);
                                }
                                Found::Later | Found::Failed(_) => wrong.store(true, Ordering::Relaxed),
                            }
                        }
                    });
                }
                // Until both have happened often.
                let enough =
                    |count: &AtomicU64| count.load(Ordering::Relaxed) > 300 || wrong.load(Ordering::Relaxed);
                while !enough(&copied) || !enough(&absent) {
                    for chunk in 0..4 {
                        let _ = chunks.keep(chunk, &[7; 65_536], false);
                    }
                    std::thread::yield_now();
                    chunks.evict();
                }
                done.store(true, Ordering::Relaxed);
            });
            assert!(!wrong.into_inner() && chunks.evicted() > 0);
        }
    }
}
