//! A guest that makes random requests, and checks what it reads.
use super::log::Clock;
use super::machine::{DEPTH, MOST, Machine, Request};
use super::model::{Model, Value};
use super::stamp::{self, SECTOR};
use paravane_test_support::Random;
use std::ops::Range;

/// What a guest does.
#[derive(Clone, Copy, Debug)]
pub(super) struct Habits {
    /// Sectors of a cluster of the image.
    pub(super) cluster: u64,
    /// Most requests in flight.
    pub(super) depth: usize,
    /// Most batches of requests in a life, about.
    pub(super) batches: usize,
    /// The disk changes its size: least and most sectors.
    pub(super) sizes: Option<(u64, u64)>,
    /// Discards most of the disk at once.
    pub(super) storms: bool,
}

/// See the module.
pub(super) struct Guest<'a> {
    pub(super) machine: Machine,
    pub(super) model: &'a mut Model,
    pub(super) random: Random,
    pub(super) clock: Clock,
    pub(super) habits: Habits,
    /// Number of the next write.
    pub(super) stamp: u64,
}

impl Guest<'_> {
    /// Makes batches of requests.
    ///
    /// # Errors
    /// A request fails, or a read does not return what was written.
    pub(super) fn live(&mut self, batches: usize) -> Result<(), String> {
        for batch in 0..batches {
            // What a crash has left beyond the end must not show.
            let odds = if batch == 0 { 2 } else { 8 };
            if let Some(sizes) = self.habits.sizes
                && self.random.once_in(odds)
            {
                self.resize(sizes)?;
            }
            if self.habits.storms && self.random.once_in(8) {
                self.discard_most()?;
            }
            let count = 1 + self.random.below(self.habits.depth);
            self.batch(count)?;
        }
        Ok(())
    }

    /// Flushes.
    pub(super) fn flush(&mut self) -> Result<(), String> {
        self.make(&[Request::Flush])
    }

    /// Makes requests that do not overlap, all at once.
    fn batch(&mut self, count: usize) -> Result<(), String> {
        let mut requests: Vec<Request> = Vec::new();
        let mut used: Vec<Range<u64>> = Vec::new();
        for _ in 0..count.min(DEPTH) {
            let range = self.range();
            let request = self.request(&range);
            if request != Request::Flush {
                if used.iter().any(|one| one.start < range.end && range.start < one.end) {
                    continue;
                }
                used.push(range);
            }
            requests.push(request);
        }
        self.make(&requests)
    }

    fn request(&mut self, range: &Range<u64>) -> Request {
        let (first, count) = (range.start, range.end - range.start);
        match self.random.below(100) {
            0..56 => {
                self.stamp += 1;
                Request::Write { first, count, stamp: self.stamp }
            }
            56..66 => Request::Zeroes { first, count, unmap: self.random.once_in(2) },
            66..76 => Request::Discard { first, count },
            76..88 => Request::Read { first, count },
            _ => Request::Flush,
        }
    }

    /// A range of the disk: a few sectors, a cluster, or several; often where others were.
    fn range(&mut self) -> Range<u64> {
        let (size, cluster) = (self.model.size(), self.habits.cluster);
        let random = &mut self.random;
        let most = (MOST / SECTOR) as u64;
        let mut below = |end: u64| random.below(end.max(1) as usize) as u64;
        let clusters = size.div_ceil(cluster);
        // Half of the requests meet in an eighth of the disk.
        let at = match below(2) {
            0 => below(clusters.div_ceil(8)),
            _ => below(clusters),
        };
        let start = at * cluster;
        let (start, len) = match below(8) {
            0..3 => (start + below(cluster), 1 + below(cluster.min(16))),
            3 => (start + below(cluster), 1 + below(cluster * 2)),
            4..6 => (start, cluster),
            6 => (start, cluster * (1 + below(4))),
            _ => (start + below(cluster), cluster * (1 + below(16)) + below(cluster)),
        };
        let start = start.min(size - 1);
        start..(start + len.clamp(1, most)).min(size)
    }

    fn make(&mut self, requests: &[Request]) -> Result<(), String> {
        let begun = self.clock.tick();
        for (place, &request) in requests.iter().enumerate() {
            let mut data = Vec::new();
            match request {
                Request::Write { first, count, stamp } => {
                    data.resize(count as usize * SECTOR, 0);
                    stamp::fill(&mut data, stamp, first);
                    self.model.begin(first, count, Value::Write(stamp), begun);
                }
                Request::Zeroes { first, count, .. } => self.model.begin(first, count, Value::Zero, begun),
                Request::Discard { first, count } => self.model.begin(first, count, Value::Discarded, begun),
                Request::Read { .. } | Request::Flush => {}
            }
            self.machine.add(place, request, &data);
        }
        let (model, clock) = (&mut *self.model, &self.clock);
        self.machine.run(&mut |request, data| {
            let done = clock.tick();
            match request {
                Request::Read { first, .. } => model.compare(first, data, model.now())?,
                Request::Flush => model.flushed(begun, done),
                Request::Write { first, count, .. }
                | Request::Zeroes { first, count, .. }
                | Request::Discard { first, count } => model.end(first, count, done),
            }
            Ok(())
        })
    }

    /// Discards the disk but for a part of its start.
    fn discard_most(&mut self) -> Result<(), String> {
        let size = self.model.size();
        let first = self.random.below(size as usize / 8) as u64;
        self.make(&[Request::Discard { first, count: size - first }])
    }

    /// Makes the disk larger or smaller.
    fn resize(&mut self, (least, most): (u64, u64)) -> Result<(), String> {
        let size = self.model.size();
        let sectors = least + self.random.below((most - least) as usize + 1) as u64;
        if sectors == size {
            return Ok(());
        }
        let begun = self.clock.tick();
        self.model.begin_resize(sectors, begun);
        self.machine.resize(sectors).map_err(|error| format!("cannot resize: {error}"))?;
        self.model.end_resize(self.clock.tick());
        Ok(())
    }
}
