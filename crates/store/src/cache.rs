//! Chunks of objects, kept on this host.
//!
//! An object is cut into chunks of one size. A chunk is here and right, or absent:
//!
//! ```text
//!   keep:    data -> data file,  then checksum -> map file,  then state := VALID
//!   evict:   state := absent, generation + 1,  then checksum := 0,  then the data becomes a hole
//!   read:    state VALID?  copy  state still the same?  -- no: as if it were absent
//! ```
//! SIGKILL between two of these steps leaves an absent chunk, because the page cache keeps what was
//! written and its order. After a power failure a checksum may be there without its data: a chunk
//! of an earlier process is compared with its checksum before its first use.
//!
//! A reader takes no lock and holds no chunk. If the chunk was evicted meanwhile, the generation
//! tells, and the reader drops what it has copied.
//!
//! # One owner
//!
//! An object has two files in the folder, and one process locks them (`flock`). Another process
//! that opens the object keeps chunks in memory and asks for the lock from time to time, so a
//! daemon that takes over from another one has its chunks as soon as that has ended. Files that no
//! process has locked stay for later, and are the first to be removed when the folder is full. The
//! limit is that of the files of this process and of those that no process has.
//!
//! What the folder cannot keep (it is full, fails, or belongs to another process) is kept in a
//! little memory.
//!
//! | file | content |
//! |---|---|
//! | `layout` | where chunks begin and end |
//! | `map` | the map file: what it is of, and a checksum for each chunk |
//! | `chunks` | chunks of one object in one file, with their states |
//! | `batch` | reads of chunks that one system call does |
//! | `budget` | the limit that stores of chunks share |
//! | `folder` | the files of a folder, and who has them |
mod batch;
mod budget;
mod chunks;
mod folder;
mod layout;
mod map;

pub(crate) use batch::{Batch, Read};
pub(crate) use chunks::Found;
pub(crate) use layout::Layout;

use crate::lock::lock;
use crate::{CacheStatus, Pieces};
use budget::Budget;
use chunks::Chunks;
use folder::{Folder, Waiting};
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// Most bytes of memory for chunks that the folder cannot keep.
const SPARE_MEMORY: u64 = 16 << 20;

/// How often the lock of another process is asked for at most.
const LOCK_PERIOD: Duration = Duration::from_secs(1);

/// Where and how chunks of objects are kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheConfig {
    /// An existing folder. Objects and devices may share it.
    pub folder: PathBuf,
    /// Most bytes of chunks in the folder \[10 GiB\].
    pub limit_bytes: u64,
    /// Bytes of a chunk: a power of two from 4 KiB to 4 MiB \[256 KiB\].
    pub chunk_bytes: u32,
    /// Most bytes to fetch ahead of a reader that reads in order; 0 for none \[4 MiB\].
    pub read_ahead: u32,
}

impl CacheConfig {
    /// A cache in `folder`, with defaults.
    #[must_use]
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        Self { folder: folder.into(), limit_bytes: 10 << 30, chunk_bytes: 256 << 10, read_ahead: 4 << 20 }
    }
}

/// The chunks of one object that are here.
#[derive(Debug)]
pub(crate) struct Cache {
    layout: Layout,
    /// In the folder, once this process has the lock.
    file: OnceLock<Arc<Chunks>>,
    folder: Option<Arc<Folder>>,
    /// The files of the folder while another process has them, and when to ask again.
    waiting: Mutex<Option<(Waiting, Instant)>>,
    memory: Arc<Chunks>,
    memory_budget: Arc<Budget>,
    not_kept: AtomicU64,
    /// Why the folder did not keep the last chunk.
    failure: Mutex<Option<String>>,
}

impl Cache {
    /// Opens the chunks of the object that `key` identifies.
    ///
    /// # Errors
    /// The folder cannot be used.
    pub(crate) fn open(
        layout: Layout,
        key: [u8; 32],
        config: Option<&CacheConfig>,
        memory_bytes: u64,
    ) -> io::Result<Self> {
        let memory_bytes = if config.is_some() { memory_bytes.min(SPARE_MEMORY) } else { memory_bytes };
        let memory_budget = Arc::new(Budget::new(memory_bytes.max(2 * u64::from(layout.chunk_bytes()))));
        let memory = Arc::new(Chunks::in_memory(layout)?);
        memory_budget.add(&memory);
        let mut cache = Self {
            layout,
            file: OnceLock::new(),
            folder: None,
            waiting: Mutex::new(None),
            memory,
            memory_budget,
            not_kept: AtomicU64::new(0),
            failure: Mutex::default(),
        };
        if let Some(config) = config {
            let folder = Folder::open(&config.folder, config.limit_bytes)?;
            let waiting = match folder.files(layout, key) {
                Ok(files) => Some((files, Instant::now())),
                // What another program has put there stops no disk.
                Err(error) => {
                    tracing::warn!("{}: the cache is not used: {error}", folder.path.display());
                    None
                }
            };
            cache.folder = Some(folder);
            *cache.waiting.get_mut().unwrap_or_else(PoisonError::into_inner) = waiting;
            cache.take_files();
        }
        Ok(cache)
    }

    /// Takes the files of the folder, if no other process has them any more.
    pub(crate) fn take_files(&self) {
        let mut waiting = lock(&self.waiting);
        let Some((files, next)) = waiting.as_mut() else { return };
        let now = Instant::now();
        let Some(folder) = self.folder.as_ref().filter(|_| now >= *next) else { return };
        *next = now + LOCK_PERIOD;
        match folder.take(files, self.layout) {
            Ok(Some(chunks)) => {
                *waiting = None;
                let _ = self.file.set(chunks);
            }
            Ok(None) => {}
            Err(error) => {
                tracing::warn!("{}: the cache is not used: {error}", folder.path.display());
                *waiting = None;
            }
        }
    }

    /// Why chunks are kept in memory only, though there is a folder.
    pub(crate) fn trouble(&self) -> Option<String> {
        let folder = self.folder.as_ref()?;
        if self.file.get().is_some() {
            return lock(&self.failure).clone();
        }
        let waits = lock(&self.waiting).is_some();
        let why = if waits { "is used by another process" } else { "failed" };
        Some(format!("{}: the cache {why}; chunks are kept in memory", folder.path.display()))
    }

    fn stores(&self) -> impl Iterator<Item = &Arc<Chunks>> {
        self.file.get().into_iter().chain([&self.memory])
    }

    /// Copies a range into the pieces, which are as long, if all of its chunks are here.
    ///
    /// With `at_once`, it does not wait for the disk.
    ///
    /// # Safety
    /// The pieces, the array that lists them and the memory that they name are valid.
    pub(crate) unsafe fn read(&self, pieces: Pieces, offset: u64, len: u64, at_once: bool) -> Found {
        for store in self.stores() {
            // SAFETY: the caller's promise.
            match unsafe { store.read(pieces, offset, len, at_once) } {
                Found::Absent => {}
                found => return found,
            }
        }
        Found::Absent
    }

    /// Adds a read to a batch, which has room. `false`: it goes its own way ([`Cache::read`]).
    ///
    /// # Safety
    /// See [`Batch::push`].
    pub(crate) unsafe fn collect(&self, batch: &mut Batch, read: Read) -> bool {
        // SAFETY: the caller's promise.
        self.file.get().is_some_and(|file| unsafe { batch.push(file, read) })
    }

    /// Does the reads of a batch, in order. Does not wait for the disk.
    ///
    /// What is absent now may be in memory, which [`Cache::load`] finds.
    pub(crate) fn perform(&self, batch: &mut Batch) -> impl Iterator<Item = (Read, Found)> {
        self.file.get().map(|file| batch.perform(file)).into_iter().flatten()
    }

    /// Whether a chunk is here, perhaps unchecked.
    pub(crate) fn has(&self, chunk: u64) -> bool {
        self.stores().any(|store| store.has(chunk))
    }

    /// Reads a chunk into `data`, and checks it at its first use. May wait for the disk.
    pub(crate) fn load(&self, chunk: u64, data: &mut Vec<u8>) -> bool {
        self.stores().any(|store| store.load(chunk, data))
    }

    /// Keeps a chunk. With `mark`, its first reader is told so ([`Found::Copied`]).
    pub(crate) fn keep(&self, chunk: u64, data: &[u8], mark: bool) {
        if let (Some(file), Some(folder)) = (self.file.get(), &self.folder) {
            let kept = folder.keep(file, chunk, data, mark);
            let mut last = lock(&self.failure);
            let Err(error) = kept else {
                *last = None;
                return;
            };
            self.not_kept.fetch_add(1, Ordering::Relaxed);
            let failure = format!("{}: a chunk could not be kept: {error}", folder.path.display());
            // One line for each run of failures.
            if last.is_none() {
                tracing::warn!("{failure}");
            }
            *last = Some(failure);
        }
        if self.memory_budget.keep(&self.memory, chunk, data, mark).is_err() && self.folder.is_none() {
            self.not_kept.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Most bytes that are kept.
    pub(crate) fn limit(&self) -> u64 {
        self.folder.as_ref().map_or(self.memory_budget.limit, |folder| folder.budget.limit)
    }

    /// Counters; those of the queues and of the server are the caller's.
    pub(crate) fn status(&self) -> CacheStatus {
        let evicted = self.file.get().unwrap_or(&self.memory).evicted();
        CacheStatus {
            used_bytes: self.stores().map(|store| store.used()).sum(),
            limit_bytes: self.limit(),
            evicted,
            not_kept: self.not_kept.load(Ordering::Relaxed),
            is_failing: self.trouble().is_some(),
            ..CacheStatus::default()
        }
    }
}

impl Drop for Cache {
    fn drop(&mut self) {
        if let (Some(folder), Some(file)) = (&self.folder, self.file.take()) {
            folder.leave(&file);
        }
    }
}
