//! Reads stores through a queue, as a device does.
use paravane_dma::HostSlice;
use paravane_store::{CacheConfig, Direct, Job, Object, ObjectOptions, Outcome, Pieces, Store, StoreQueue};
use paravane_test_support::Random;
use std::collections::VecDeque;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

/// Bytes of chunks in these tests.
pub(crate) const CHUNK: u64 = 16 << 10;

/// Bytes that differ from place to place.
pub(crate) fn content(len: usize) -> Vec<u8> {
    let mut random = Random::new(len as u64);
    let mut bytes: Vec<u8> = (0..len.div_ceil(8)).flat_map(|_| random.u64().to_le_bytes()).collect();
    bytes.truncate(len);
    bytes
}

/// Options that do not try again.
pub(crate) fn at_once() -> ObjectOptions {
    ObjectOptions { retry: Duration::ZERO, ..ObjectOptions::default() }
}

/// A cache in a folder without reading ahead.
pub(crate) fn cache(folder: &Path) -> CacheConfig {
    CacheConfig { chunk_bytes: CHUNK as u32, read_ahead: 0, ..CacheConfig::new(folder) }
}

/// Opens an object.
pub(crate) fn open(
    url: &str,
    options: &ObjectOptions,
    cache: Option<&CacheConfig>,
) -> Result<Object, String> {
    Object::open(&url.parse().unwrap(), options, cache, Arc::new(Direct)).map_err(|error| error.to_string())
}

/// A queue with one job at a time, or some.
pub(crate) struct Reader(pub(crate) Box<dyn StoreQueue>);

/// Memory of one read in several pieces.
pub(crate) struct Memory {
    pub(crate) bytes: Vec<u8>,
    pieces: Vec<HostSlice>,
}

impl Memory {
    pub(crate) fn new(len: usize) -> Self {
        let mut bytes = vec![0xaa; len];
        let base = bytes.as_mut_ptr();
        let cuts = [0, len / 3, len / 2, len];
        let piece = |cut: &[usize]| HostSlice { ptr: base.wrapping_add(cut[0]), len: cut[1] - cut[0] };
        Self { pieces: cuts.windows(2).map(piece).collect(), bytes }
    }

    fn pieces(&mut self) -> Pieces {
        Pieces { first: NonNull::new(self.pieces.as_mut_ptr()).unwrap(), count: 3 }
    }
}

impl Reader {
    pub(crate) fn new(store: &dyn Store) -> Self {
        Self(store.queue(256).unwrap())
    }

    /// Pushes a read. The memory must outlive it.
    pub(crate) fn push(&mut self, head: u16, memory: &mut Memory, offset: u64) {
        let job = Job::Read { pieces: memory.pieces(), offset };
        // SAFETY: tests keep the memory until the outcome, or the end of the queue.
        unsafe { self.0.push(head, job).unwrap() };
    }

    /// Waits for an outcome.
    pub(crate) fn outcome(&mut self) -> Outcome {
        let mut outcomes = VecDeque::new();
        self.0.wait().unwrap();
        self.0.reap(&mut outcomes);
        assert_eq!(outcomes.len(), 1);
        outcomes.pop_front().unwrap()
    }

    /// Reads. Fails with a positive error number.
    pub(crate) fn read(&mut self, offset: u64, len: usize) -> Result<Vec<u8>, i32> {
        let mut memory = Memory::new(len);
        self.push(7, &mut memory, offset);
        let outcome = self.outcome();
        assert_eq!(outcome.head(), 7);
        match outcome.result() {
            result @ 0.. => {
                memory.bytes.truncate(result as usize);
                Ok(memory.bytes)
            }
            error => Err(-error),
        }
    }
}

/// Reads without a queue.
pub(crate) fn perform(store: &dyn Store, offset: u64, len: usize) -> Result<Vec<u8>, i32> {
    let mut memory = Memory::new(len);
    // SAFETY: the memory outlives the call.
    let result = unsafe { store.perform(Job::Read { pieces: memory.pieces(), offset }) };
    memory.bytes.truncate(usize::try_from(result).map_err(|_| -result)?);
    Ok(memory.bytes)
}
