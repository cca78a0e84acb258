//! Random jobs against a model of the disk.
use crate::disk::Buffer;
use paravane_store::{Job, Outcome, StoreLimits, StoreQueue};
use paravane_test_support::Random;
use std::collections::VecDeque;
use std::ops::Range;

/// A byte that a discard has left undefined.
const UNKNOWN: u16 = 256;

/// A disk whose content is known.
pub(crate) struct Model {
    bytes: Vec<u16>,
    limits: StoreLimits,
    random: Random,
    /// Where in the store it begins.
    pub(crate) base: u64,
    /// Longest transfer in bytes.
    pub(crate) longest: usize,
    in_flight: Vec<Option<InFlight>>,
    outcomes: VecDeque<Outcome>,
    /// Jobs done.
    pub(crate) done: usize,
    /// Errors that a job may end with.
    pub(crate) tolerates: bool,
}

struct InFlight {
    kind: Kind,
    range: Range<usize>,
    buffer: Buffer,
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Read,
    Write,
    Discard,
    Zeroes,
    Flush,
}

impl Model {
    /// A disk of zeroes.
    pub(crate) fn new(size: u64, limits: StoreLimits, depth: usize, seed: u64) -> Self {
        Self {
            bytes: vec![0; size as usize],
            limits,
            base: 0,
            random: Random::new(seed),
            longest: 300 << 10,
            in_flight: (0..depth).map(|_| None).collect(),
            outcomes: VecDeque::new(),
            done: 0,
            tolerates: false,
        }
    }

    fn range(&mut self) -> Option<Range<usize>> {
        let block = (self.limits.block as usize).max(512);
        let longest = if self.random.once_in(4) { self.longest } else { 8192 };
        let len = (1 + self.random.below(longest / block)) * block;
        let len = len.min(self.bytes.len());
        let start = self.random.below((self.bytes.len() - len) / block + 1) * block;
        let range = start..start + len;
        let overlaps = |other: &InFlight| other.range.start < range.end && range.start < other.range.end;
        (!self.in_flight.iter().flatten().any(overlaps)).then_some(range)
    }

    /// Fills free places with jobs, and submits.
    pub(crate) fn push(&mut self, queue: &mut dyn StoreQueue) {
        for head in 0..self.in_flight.len() {
            if self.in_flight[head].is_some() || self.random.once_in(4) {
                continue;
            }
            let kind = match self.random.below(16) {
                0..6 => Kind::Read,
                6..12 => Kind::Write,
                12 if self.limits.discard => Kind::Discard,
                13 | 14 if self.limits.zeroes => Kind::Zeroes,
                _ => Kind::Flush,
            };
            let range = if kind == Kind::Flush { Some(0..0) } else { self.range() };
            let Some(range) = range else { continue };
            let mut data = vec![0; if matches!(kind, Kind::Read | Kind::Write) { range.len() } else { 0 }];
            if kind == Kind::Write {
                data.fill_with(|| self.random.u64() as u8);
            }
            let mut buffer = Buffer::new(data);
            let (offset, len) = (self.base + range.start as u64, range.len() as u64);
            let job = match kind {
                Kind::Read => Job::Read { pieces: buffer.pieces(), offset },
                Kind::Write => {
                    Job::Write { pieces: buffer.pieces(), offset, durable: self.random.once_in(4) }
                }
                Kind::Discard => Job::Discard { offset, len },
                Kind::Zeroes => Job::Zeroes { offset, len, unmap: self.random.once_in(2) },
                Kind::Flush => Job::Flush,
            };
            self.in_flight[head] = Some(InFlight { kind, range, buffer });
            // SAFETY: the buffer lives until the outcome, and boxes do not move.
            unsafe { queue.push(head as u16, job) }.unwrap();
        }
        queue.submit().unwrap();
    }

    /// Takes outcomes and checks them.
    pub(crate) fn reap(&mut self, queue: &mut dyn StoreQueue) {
        let mut outcomes = std::mem::take(&mut self.outcomes);
        queue.reap(&mut outcomes);
        for outcome in outcomes.drain(..) {
            let job = self.in_flight[usize::from(outcome.head())].take().expect("a job in flight");
            self.done += 1;
            if outcome.result() < 0 && self.tolerates {
                if job.kind != Kind::Read {
                    self.bytes[job.range].fill(UNKNOWN);
                }
                continue;
            }
            let moves = matches!(job.kind, Kind::Read | Kind::Write);
            let expected = if moves { job.range.len() as i32 } else { 0 };
            assert_eq!(outcome.result(), expected, "{:?}", job.range);
            let bytes = &mut self.bytes[job.range.clone()];
            match job.kind {
                Kind::Read => {
                    let differs = bytes
                        .iter()
                        .zip(job.buffer.data())
                        .position(|(a, b)| *a != UNKNOWN && *a != u16::from(*b));
                    assert_eq!(differs, None, "a read of {:?} differs", job.range);
                }
                Kind::Write => {
                    bytes.iter_mut().zip(job.buffer.data()).for_each(|(a, b)| *a = (*b).into());
                }
                Kind::Zeroes => bytes.fill(0),
                Kind::Discard => bytes.fill(UNKNOWN),
                Kind::Flush => {}
            }
        }
        self.outcomes = outcomes;
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.in_flight.iter().all(Option::is_none)
    }

    /// Waits for all jobs in flight.
    pub(crate) fn settle(&mut self, queue: &mut dyn StoreQueue) {
        while !self.is_idle() {
            queue.wait().unwrap();
            self.reap(queue);
        }
    }

    /// Runs until this many jobs are done.
    pub(crate) fn run(&mut self, queue: &mut dyn StoreQueue, jobs: usize) {
        let end = self.done + jobs;
        while self.done < end {
            self.push(queue);
            if !self.is_idle() {
                queue.wait().unwrap();
                self.reap(queue);
            }
        }
        self.settle(queue);
    }

    /// Compares the whole disk with an image.
    pub(crate) fn compare(&self, image: &[u8]) {
        assert!(image.len() >= self.bytes.len());
        let differs = self.bytes.iter().zip(image).position(|(a, b)| *a != UNKNOWN && *a != u16::from(*b));
        assert_eq!(differs, None, "the image differs at this offset");
    }
}
