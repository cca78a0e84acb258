//! An object as all of its users share it: its server, its cache, and what is wanted of it.
use super::answer::{Failure, ObjectIdentity};
use super::board::Board;
use super::client::HttpClient;
use super::digests::Digests;
use super::link::{AfterFailure, LinkState};
use super::pending::PendingJob;
use crate::cache::{Batch, Cache, Found, Layout, Read};
use crate::lock::lock;
use crate::{CacheStatus, Link, Pieces, StoreStatus};
use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::Notify;

/// Most bytes of one read; a longer one is short.
const MOST_BYTES: u64 = 1 << 30;

/// An object that is open.
#[derive(Debug)]
pub(super) struct Source {
    pub(super) client: HttpClient,
    pub(super) identity: ObjectIdentity,
    pub(super) layout: Layout,
    digests: Option<Arc<Digests>>,
    cache: Cache,
    retry: Duration,
    board: Mutex<Board>,
    /// There is something to fetch, or to stop.
    pub(super) wake: Notify,
    pub(super) stop: AtomicBool,
    link: LinkState,
    unusable: AtomicBool,
    miss_bytes: AtomicU64,
    read_ahead_bytes: AtomicU64,
}

impl Source {
    /// An object of which nothing is wanted yet.
    pub(super) fn new(
        client: HttpClient,
        identity: ObjectIdentity,
        layout: Layout,
        digests: Option<Arc<Digests>>,
        cache: Cache,
        read_ahead: u64,
        retry: Duration,
    ) -> Self {
        // Chunks that are fetched ahead do not evict each other.
        let read_ahead = read_ahead.min(cache.limit() / 4);
        Self {
            client,
            identity,
            layout,
            digests,
            cache,
            retry,
            board: Mutex::new(Board::new(layout, read_ahead)),
            wake: Notify::new(),
            stop: AtomicBool::new(false),
            link: LinkState::default(),
            unusable: AtomicBool::new(false),
            miss_bytes: AtomicU64::new(0),
            read_ahead_bytes: AtomicU64::new(0),
        }
    }

    /// Whether all jobs fail from now on.
    pub(super) fn is_unusable(&self) -> bool {
        self.unusable.load(Ordering::Relaxed)
    }

    /// Ends the thread that fetches.
    pub(super) fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
        self.wake.notify_one();
    }

    /// Bytes that a read at `offset` gets.
    ///
    /// # Safety
    /// As [`Pieces::bytes`].
    pub(super) unsafe fn readable(&self, pieces: Pieces, offset: u64) -> u64 {
        // SAFETY: the caller's promise.
        let len = unsafe { pieces.bytes() }.min(MOST_BYTES);
        len.min(self.layout.size().saturating_sub(offset))
    }

    /// Copies a range into the pieces, which are as long, if all of its chunks are here.
    ///
    /// With `at_once`, it does not wait for the disk.
    ///
    /// # Safety
    /// The pieces, the array that lists them and the memory that they name are valid.
    pub(super) unsafe fn read(&self, pieces: Pieces, offset: u64, len: u64, at_once: bool) -> Found {
        // SAFETY: the caller's promise.
        let found = unsafe { self.cache.read(pieces, offset, len, at_once) };
        self.copied(found);
        found
    }

    /// Adds a read to a batch, which has room. `false`: it goes its own way ([`Source::read`]).
    ///
    /// # Safety
    /// See [`Batch::push`].
    pub(super) unsafe fn collect(&self, batch: &mut Batch, read: Read) -> bool {
        // SAFETY: the caller's promise.
        unsafe { self.cache.collect(batch, read) }
    }

    /// Does the reads of a batch, in order. Does not wait for the disk.
    pub(super) fn perform(&self, batch: &mut Batch) -> impl Iterator<Item = (Read, Found)> {
        self.cache.perform(batch).inspect(|(_, found)| self.copied(*found))
    }

    fn copied(&self, found: Found) {
        if let Found::Copied { mark: Some(chunk) } = found {
            self.go_on(chunk);
        }
    }

    #[cold]
    fn go_on(&self, mark: u64) {
        lock(&self.board).go_on(mark, |chunk| self.cache.has(chunk));
        self.wake.notify_one();
    }

    /// Adds jobs, which wait for their chunks.
    pub(super) fn want<'a>(&self, jobs: impl IntoIterator<Item = &'a Arc<PendingJob>>) {
        {
            let mut board = lock(&self.board);
            for job in jobs {
                board.want(job, |chunk| self.cache.has(chunk));
            }
        }
        self.wake.notify_one();
        // It may have become unusable meanwhile, with nobody to end these.
        if self.is_unusable() {
            self.give_up_waiting();
        }
    }

    /// The next chunk to begin with.
    pub(super) fn next(&self) -> Option<u64> {
        lock(&self.board).next()
    }

    /// The chunks to fetch together with one.
    pub(super) fn run(&self, first: u64) -> RangeInclusive<u64> {
        lock(&self.board).run(first, |chunk| self.cache.has(chunk))
    }

    /// Ends the flight of a chunk that is here after all.
    pub(super) fn serve_from_cache(&self, chunk: u64, data: &mut Vec<u8>) -> bool {
        self.cache.take_files();
        let found = self.cache.load(chunk, data);
        if found {
            self.end_flight(chunk, data);
        }
        found
    }

    /// Checks and keeps a chunk from the server, and serves the jobs that wait for it.
    ///
    /// # Errors
    /// Its digest is another one.
    pub(super) fn deliver(&self, chunk: u64, data: &[u8]) -> Result<(), Failure> {
        if self.digests.as_ref().is_some_and(|digests| !digests.holds(chunk, data)) {
            let at = self.layout.start(chunk);
            return Err(Failure::Again(format!("the chunk at {at} does not have its digest")));
        }
        // Before the jobs end: whoever waits for them sees a server that answers.
        self.link.answered(&self.client.origin);
        let (ahead, mark) = lock(&self.board).kind(chunk);
        let counter = if ahead { &self.read_ahead_bytes } else { &self.miss_bytes };
        counter.fetch_add(data.len() as u64, Ordering::Relaxed);
        // First: who comes after the end of the flight finds it.
        self.cache.keep(chunk, data, mark);
        self.end_flight(chunk, data);
        Ok(())
    }

    fn end_flight(&self, chunk: u64, data: &[u8]) {
        let Some(flight) = lock(&self.board).end(chunk) else { return };
        let start = self.layout.start(chunk);
        flight.jobs.iter().for_each(|job| job.fill(start, data));
    }

    /// A request for chunks that were begun has failed. Returns whether to try again.
    pub(super) fn failed(&self, failure: &Failure, chunks: RangeInclusive<u64>) -> bool {
        self.client.failed();
        let next = self.link.failed(failure, self.retry, &self.client.origin);
        if next == AfterFailure::Again {
            if lock(&self.board).is_waited_for(chunks.clone()) {
                return true;
            }
            self.link.leave();
        }
        // First what others see, then the ends of their jobs.
        if next == AfterFailure::Never {
            self.unusable.store(true, Ordering::SeqCst);
        }
        let mut flights = Vec::new();
        {
            // All at once: a job that comes after the first end is not one of these.
            let mut board = lock(&self.board);
            flights.extend(chunks.filter_map(|chunk| board.end(chunk)));
            if next != AfterFailure::Again {
                flights.append(&mut board.end_waiting());
            }
        }
        flights.iter().flat_map(|flight| &flight.jobs).for_each(|job| job.fail(-libc::EIO));
        false
    }

    /// The object was found to be another one.
    pub(super) fn changed(&self, failure: &Failure) {
        self.failed(failure, RangeInclusive::new(1, 0));
    }

    /// Ends what was not begun.
    fn give_up_waiting(&self) {
        let flights = lock(&self.board).end_waiting();
        flights.iter().flat_map(|flight| &flight.jobs).for_each(|job| job.fail(-libc::EIO));
    }

    /// State, for observers.
    pub(super) fn status(&self) -> StoreStatus {
        let (link, error) = self.link.get();
        // What fails now goes before what may be over.
        let trouble = self.cache.trouble();
        let error = if link == Link::Up { trouble.or(error) } else { error.or(trouble) };
        let waiting = if link == Link::Up { 0 } else { lock(&self.board).waiting() };
        StoreStatus {
            location: self.client.origin.to_string(),
            link,
            connections: self.client.connections.load(Ordering::Relaxed),
            reconnects: self.client.reconnects.load(Ordering::Relaxed),
            waiting: waiting.try_into().unwrap_or(u32::MAX),
            error,
            cache: Some(CacheStatus {
                miss_bytes: self.miss_bytes.load(Ordering::Relaxed),
                read_ahead_bytes: self.read_ahead_bytes.load(Ordering::Relaxed),
                ..self.cache.status()
            }),
        }
    }
}
