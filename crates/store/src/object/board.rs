//! Which chunks are wanted, by whom, and in which order they are fetched.
//!
//! A chunk that is wanted has a flight: one request, whoever waits for it. Chunks side by side make
//! a run, which is one request of a range. A reader that reads in order has chunks fetched ahead;
//! the first chunk of such a window is marked, and its first use starts the next window.
use super::pending::PendingJob;
use crate::cache::Layout;
use std::collections::{HashMap, VecDeque};
use std::ops::RangeInclusive;
use std::sync::Arc;

/// Readers in order that are told apart.
const STREAMS: usize = 16;

/// Most bytes of one request.
const MOST_RUN: u64 = 4 << 20;

/// Chunks that are wanted.
#[derive(Debug)]
pub(super) struct Board {
    layout: Layout,
    /// Chunks to fetch ahead.
    window: u64,
    flights: HashMap<u64, ChunkFlight>,
    /// Chunks that somebody waits for, in order of arrival. One may have been begun already.
    wanted: VecDeque<u64>,
    /// Chunks that are fetched ahead, likewise.
    ahead: VecDeque<u64>,
    /// Where the last misses have ended, the latest last.
    ends: VecDeque<u64>,
}

/// One request for a chunk.
#[derive(Debug, Default)]
pub(super) struct ChunkFlight {
    /// Jobs that wait for it.
    pub(super) jobs: Vec<Arc<PendingJob>>,
    begun: bool,
    /// It was not wanted by a job when it was asked for.
    pub(super) ahead: bool,
    /// Its first use starts the next window.
    pub(super) mark: bool,
}

impl Board {
    /// Nothing is wanted. `ahead` bytes are fetched ahead.
    pub(super) fn new(layout: Layout, ahead: u64) -> Self {
        Self {
            layout,
            window: ahead / u64::from(layout.chunk_bytes()),
            flights: HashMap::new(),
            wanted: VecDeque::new(),
            ahead: VecDeque::new(),
            ends: VecDeque::with_capacity(STREAMS),
        }
    }

    /// Adds a job, which waits for all of its chunks. `has`: a chunk is here.
    pub(super) fn want(&mut self, job: &Arc<PendingJob>, has: impl Fn(u64) -> bool) {
        let (offset, len) = job.range();
        let (first, last) = self.layout.chunks(offset, len);
        let mut missed = false;
        for chunk in first..=last {
            missed |= !has(chunk);
            let flight = self.flights.entry(chunk).or_default();
            if flight.jobs.is_empty() && !flight.begun {
                self.wanted.push_back(chunk);
            }
            flight.jobs.push(job.clone());
        }
        if missed && self.is_in_order(first, last) {
            self.fetch_ahead(last + 1, has);
        }
    }

    /// Whether a miss goes on where an earlier one has ended.
    fn is_in_order(&mut self, first: u64, last: u64) -> bool {
        if self.ends.contains(&last) {
            // Others wait for the same chunk.
            return false;
        }
        let known = self.ends.iter().position(|end| *end == first || *end + 1 == first);
        if let Some(index) = known.or((self.ends.len() == STREAMS).then_some(0)) {
            self.ends.remove(index);
        }
        self.ends.push_back(last);
        known.is_some()
    }

    /// A marked chunk was used: starts the window after the one that it begins.
    pub(super) fn go_on(&mut self, mark: u64, has: impl Fn(u64) -> bool) {
        self.fetch_ahead(mark + self.window, has);
    }

    fn fetch_ahead(&mut self, from: u64, has: impl Fn(u64) -> bool) {
        // Many readers at once: those that wait go first.
        if self.ahead.len() as u64 > 4 * self.window {
            return;
        }
        for chunk in from..(from + self.window).min(self.layout.count()) {
            if has(chunk) || self.flights.contains_key(&chunk) {
                continue;
            }
            let flight = ChunkFlight { ahead: true, mark: chunk == from, ..ChunkFlight::default() };
            self.flights.insert(chunk, flight);
            self.ahead.push_back(chunk);
        }
    }

    /// The next chunk to begin with; it is begun.
    pub(super) fn next(&mut self) -> Option<u64> {
        while let Some(chunk) = self.wanted.pop_front().or_else(|| self.ahead.pop_front()) {
            if let Some(flight) = self.flights.get_mut(&chunk).filter(|flight| !flight.begun) {
                flight.begun = true;
                return Some(chunk);
            }
        }
        None
    }

    /// Makes a run of a chunk that was begun and those after it that were not. They are begun.
    pub(super) fn run(&mut self, first: u64, has: impl Fn(u64) -> bool) -> RangeInclusive<u64> {
        let most = (MOST_RUN / u64::from(self.layout.chunk_bytes())).max(1);
        let mut last = first;
        while last + 1 < first + most {
            let next = self.flights.get_mut(&(last + 1)).filter(|flight| !flight.begun);
            let Some(flight) = next.filter(|_| !has(last + 1)) else { break };
            flight.begun = true;
            last += 1;
        }
        first..=last
    }

    /// Whether a chunk was not wanted by a job, and whether it is marked.
    pub(super) fn kind(&self, chunk: u64) -> (bool, bool) {
        self.flights.get(&chunk).map_or((false, false), |flight| (flight.ahead, flight.mark))
    }

    /// Whether a job waits for one of these chunks.
    pub(super) fn is_waited_for(&self, mut chunks: RangeInclusive<u64>) -> bool {
        let waits = |flight: &ChunkFlight| flight.jobs.iter().any(|job| !job.is_over());
        chunks.any(|chunk| self.flights.get(&chunk).is_some_and(waits))
    }

    /// Ends the flight of a chunk.
    pub(super) fn end(&mut self, chunk: u64) -> Option<ChunkFlight> {
        self.flights.remove(&chunk)
    }

    /// Ends all flights that were not begun.
    pub(super) fn end_waiting(&mut self) -> Vec<ChunkFlight> {
        self.wanted.clear();
        self.ahead.clear();
        let waiting: Vec<u64> =
            self.flights.iter().filter(|(_, flight)| !flight.begun).map(|(chunk, _)| *chunk).collect();
        waiting.into_iter().filter_map(|chunk| self.flights.remove(&chunk)).collect()
    }

    /// Jobs that wait.
    pub(super) fn waiting(&self) -> usize {
        // A job of several chunks counts at its first.
        let first =
            |chunk: u64, job: &PendingJob| self.layout.chunks(job.range().0, 1).0 == chunk && !job.is_over();
        let of = |(chunk, flight): (&u64, &ChunkFlight)| {
            flight.jobs.iter().filter(|job| first(*chunk, job)).count()
        };
        self.flights.iter().map(of).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Pieces;
    use crate::posted::Posted;
    use paravane_dma::HostSlice;
    use std::ptr::NonNull;

    const CHUNK: u64 = 4096;

    fn board(ahead: u64) -> Board {
        Board::new(Layout::new(1000 * CHUNK, CHUNK as u32).unwrap(), ahead * CHUNK)
    }

    /// A job for some chunks, which no chunk fills here.
    fn job(chunks: RangeInclusive<u64>) -> Arc<PendingJob> {
        let (first, count) = (*chunks.start(), chunks.count() as u64);
        let end = (0, Arc::new(Posted::new(1).unwrap()));
        let pieces = Pieces { first: NonNull::<HostSlice>::dangling(), count: 0 };
        // SAFETY: the list is empty.
        unsafe { PendingJob::new(pieces, first * CHUNK, count * CHUNK, count, end) }
    }

    fn none(_: u64) -> bool {
        false
    }

    #[test]
    fn many_jobs_have_one_flight() {
        let mut board = board(0);
        for _ in 0..1000 {
            board.want(&job(7..=8), none);
        }
        assert_eq!((board.next(), board.run(7, none), board.next()), (Some(7), 7..=8, None));
        board.want(&job(8..=8), none);
        assert_eq!((board.next(), board.waiting()), (None, 1001));
        assert_eq!(board.end(8).unwrap().jobs.len(), 1001);
        assert_eq!(board.end(7).unwrap().jobs.len(), 1000);
        assert!(board.end(7).is_none());
        // Wanted again, as after an eviction.
        board.want(&job(8..=8), none);
        assert_eq!(board.next(), Some(8));
    }

    #[test]
    fn a_run_ends_where_a_chunk_is_here_begun_or_not_wanted() {
        let mut board = board(0);
        board.want(&job(1..=9), none);
        assert_eq!(board.next(), Some(1));
        assert_eq!(board.run(1, |chunk| chunk == 4), 1..=3);
        assert_eq!(board.next(), Some(4));
        assert_eq!(board.next(), Some(5));
        assert_eq!(board.run(5, none), 5..=9);
        board.want(&job(100..=100 + 2 * MOST_RUN / CHUNK), none);
        let first = board.next().unwrap();
        assert_eq!(board.run(first, none), 100..=99 + MOST_RUN / CHUNK);
    }

    #[test]
    fn misses_in_order_fetch_ahead_and_a_mark_goes_on() {
        let mut board = board(4);
        board.want(&job(10..=10), none);
        assert_eq!((board.next(), board.next()), (Some(10), None));
        board.want(&job(500..=500), none);
        assert_eq!((board.next(), board.next()), (Some(500), None));
        board.want(&job(11..=12), none);
        assert_eq!(board.next(), Some(11));
        assert_eq!(board.run(11, none), 11..=16);
        assert_eq!(board.kind(12), (false, false));
        assert_eq!((board.kind(13), board.kind(14)), ((true, true), (true, false)));
        assert!(board.is_waited_for(12..=16) && !board.is_waited_for(13..=16));
        board.go_on(13, none);
        assert_eq!((board.next(), board.run(17, none), board.kind(17)), (Some(17), 17..=20, (true, true)));
        board.go_on(998, none);
        assert_eq!(board.next(), None);
        board.want(&job(998..=998), none);
        board.want(&job(997..=997), none);
        assert_eq!(board.end_waiting().len(), 2);
        assert_eq!(board.next(), None);
    }

    #[test]
    fn a_job_that_joins_a_flight_ahead_is_served_first() {
        let mut board = board(8);
        board.want(&job(0..=0), none);
        board.want(&job(1..=1), none);
        board.want(&job(6..=6), none);
        assert_eq!([board.next(), board.next(), board.next(), board.next()], [0, 1, 6, 2].map(Some));
    }
}
