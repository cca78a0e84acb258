//! An open image beside a model of its bytes.
use paravane_dma::HostSlice;
use paravane_store::rbd::Rbd;
use paravane_store::{Job, Pieces, Store, StoreQueue};
use paravane_test_support::Random;
use std::collections::{HashMap, VecDeque};
use std::ptr::NonNull;

/// Memory of a job in random pieces, and the list of them.
pub(crate) struct Memory {
    bytes: Vec<u8>,
    list: Vec<HostSlice>,
}

impl Memory {
    pub(crate) fn new(mut bytes: Vec<u8>, random: &mut Random) -> Self {
        let (mut list, mut at) = (Vec::new(), 0);
        let base = bytes.as_mut_ptr();
        while at < bytes.len() {
            let len = (1 + random.below(bytes.len())).min(bytes.len() - at);
            list.push(HostSlice { ptr: base.wrapping_add(at), len });
            at += len;
        }
        Self { bytes, list }
    }

    pub(crate) fn whole(bytes: Vec<u8>) -> Self {
        let mut memory = Self { bytes, list: Vec::new() };
        memory.list.push(HostSlice { ptr: memory.bytes.as_mut_ptr(), len: memory.bytes.len() });
        memory
    }

    pub(crate) fn pieces(&mut self) -> Pieces {
        let first = NonNull::new(self.list.as_mut_ptr()).expect("a vector");
        Pieces { first, count: self.list.len() as u32 }
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}

pub(crate) fn read(store: &Rbd, offset: u64, len: usize) -> Vec<u8> {
    let mut memory = Memory::whole(vec![0xee; len]);
    // SAFETY: `memory` lives during the call.
    let result = unsafe { store.perform(Job::Read { pieces: memory.pieces(), offset }) };
    assert_eq!(result, len as i32, "read {len} at {offset}");
    memory.bytes
}

pub(crate) fn write(store: &Rbd, offset: u64, bytes: &[u8]) -> i32 {
    let mut memory = Memory::whole(bytes.to_vec());
    // SAFETY: `memory` lives during the call.
    unsafe { store.perform(Job::Write { pieces: memory.pieces(), offset, durable: true }) }
}

pub(crate) fn perform(store: &Rbd, job: Job) -> i32 {
    assert!(!matches!(job, Job::Read { .. } | Job::Write { .. }));
    // SAFETY: the job has no memory.
    unsafe { store.perform(job) }
}

enum Expected {
    Bytes { memory: Memory, offset: usize },
    Written { memory: Memory },
    Done { discarded: Option<std::ops::Range<usize>> },
}

/// Random requests on ranges that do not overlap, compared with the model.
pub(crate) struct Load {
    /// Until the load ends.
    queue: Option<Box<dyn StoreQueue>>,
    model: Vec<u8>,
    /// Undefined since a discard.
    undefined: Vec<bool>,
    busy: Vec<std::ops::Range<usize>>,
    flights: HashMap<u16, (std::ops::Range<usize>, Expected)>,
    random: Random,
    depth: usize,
    longest: usize,
    pub(crate) done: usize,
}

impl Load {
    pub(crate) fn new(store: &Rbd, depth: usize, longest: usize, seed: u64) -> Self {
        let size = store.size() as usize;
        Self {
            queue: Some(store.queue(depth as u16).expect("a queue")),
            model: read(store, 0, size),
            undefined: vec![false; size],
            busy: Vec::new(),
            flights: HashMap::new(),
            random: Random::new(seed),
            depth,
            longest,
            done: 0,
        }
    }

    fn range(&mut self) -> Option<std::ops::Range<usize>> {
        let start = self.random.below(self.model.len());
        let len = 1 + self.random.below(self.longest.min(self.model.len() - start));
        // Half of them in whole sectors, as guests ask.
        let range = if self.random.once_in(2) {
            start & !511..((start + len + 511) & !511).min(self.model.len())
        } else {
            start..start + len
        };
        let overlaps = |busy: &std::ops::Range<usize>| busy.start < range.end && range.start < busy.end;
        (!self.busy.iter().any(overlaps)).then_some(range)
    }

    /// Fills the queue, waits for what has ended, and compares.
    pub(crate) fn step(&mut self) {
        while self.flights.len() < self.depth {
            let Some(range) = self.range() else { break };
            self.start(range);
        }
        self.queue().submit().expect("submit");
        self.collect();
    }

    /// Waits for all requests, and lets go of the store.
    pub(crate) fn end(&mut self) {
        while !self.flights.is_empty() {
            self.collect();
        }
        self.queue = None;
    }

    fn queue(&mut self) -> &mut dyn StoreQueue {
        self.queue.as_deref_mut().expect("the load has not ended")
    }

    fn start(&mut self, range: std::ops::Range<usize>) {
        let head = (0..).find(|head| !self.flights.contains_key(head)).expect("a free head");
        let (offset, len) = (range.start as u64, range.len() as u64);
        let (job, expected) = match self.random.below(16) {
            0 => {
                self.undefined[range.clone()].fill(true);
                (Job::Discard { offset, len }, Expected::Done { discarded: Some(range.clone()) })
            }
            1 | 2 => {
                self.model[range.clone()].fill(0);
                self.undefined[range.clone()].fill(false);
                let unmap = self.random.once_in(2);
                (Job::Zeroes { offset, len, unmap }, Expected::Done { discarded: None })
            }
            3 => (Job::Flush, Expected::Done { discarded: None }),
            4..9 => {
                let mut memory = Memory::new(vec![0xee; range.len()], &mut self.random);
                let job = Job::Read { pieces: memory.pieces(), offset };
                (job, Expected::Bytes { memory, offset: range.start })
            }
            _ => {
                let bytes: Vec<u8> = (0..range.len()).map(|_| self.random.u64() as u8).collect();
                self.model[range.clone()].copy_from_slice(&bytes);
                self.undefined[range.clone()].fill(false);
                let mut memory = Memory::new(bytes, &mut self.random);
                let durable = self.random.once_in(4);
                let job = Job::Write { pieces: memory.pieces(), offset, durable };
                (job, Expected::Written { memory })
            }
        };
        // SAFETY: the memory stays in `flights` until the outcome.
        unsafe { self.queue().push(head, job) }.expect("push");
        self.busy.push(range.clone());
        self.flights.insert(head, (range, expected));
    }

    fn collect(&mut self) {
        let mut outcomes = VecDeque::new();
        self.queue().wait().expect("wait");
        self.queue().reap(&mut outcomes);
        for outcome in outcomes {
            let (range, expected) = self.flights.remove(&outcome.head()).expect("a request in flight");
            self.busy.retain(|busy| *busy != range);
            self.done += 1;
            match expected {
                Expected::Done { discarded } => {
                    assert_eq!(outcome.result(), 0);
                    assert!(discarded.is_none_or(|range| self.undefined[range].iter().all(|&is| is)));
                }
                Expected::Written { memory } => assert_eq!(outcome.result(), memory.bytes().len() as i32),
                Expected::Bytes { memory, offset } => {
                    assert_eq!(outcome.result(), memory.bytes().len() as i32);
                    self.compare(offset, memory.bytes());
                }
            }
        }
    }

    fn compare(&self, offset: usize, bytes: &[u8]) {
        for (at, &byte) in bytes.iter().enumerate() {
            let place = offset + at;
            assert!(
                self.undefined[place] || byte == self.model[place],
                "byte {place}: {byte}, not {}",
                self.model[place]
            );
        }
    }

    /// Compares all of an image, for example after it has been opened again.
    pub(crate) fn compare_all(&self, store: &Rbd) {
        assert!(self.flights.is_empty());
        self.compare(0, &read(store, 0, self.model.len()));
    }

    pub(crate) fn into_model(self) -> Vec<u8> {
        assert!(self.flights.is_empty());
        self.model
    }
}
