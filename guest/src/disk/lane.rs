//! One queue of a disk at work: keeps requests in flight, and its report up to date.
use super::buffers::Buffers;
use super::driver::Disk;
use super::job::Job;
use super::work::{Flight, Work};
use crate::histogram;
use crate::platform::Platform;
use crate::report::{DiskPage, Failure, Measured};
use crate::worker::{Interrupts, Step, Worker};
use alloc::vec::Vec;
use paravane_driver::blk::Request;
use paravane_spec::blk::S_OK;
use paravane_spec::builtin::{error, state};

/// One queue of a disk, and its part of the job.
pub(crate) struct Lane<D> {
    disk: D,
    job: Job,
    buffers: Buffers,
    page: DiskPage,
    /// Requests in flight, by slot; the slot is the request's tag.
    flights: Vec<Option<Flight>>,
    /// Slots whose requests are added and not published yet.
    fresh: Vec<usize>,
    state: u32,
    moved: u64,
    measured: Measured,
    /// When the measured phase began.
    began: Option<u64>,
}

impl<D: Disk> Lane<D> {
    /// `depth` is at most the disk's slots, and `buffers` has as many.
    pub(crate) fn new(disk: D, mut job: Job, depth: usize, buffers: Buffers, page: DiskPage) -> Self {
        if let Job::Hash(hash) = &mut job {
            hash.finish_if_all(&page);
        }
        page.moved(0, job.total());
        page.state(job.state());
        Self {
            state: job.state(),
            disk,
            job,
            buffers,
            page,
            flights: alloc::vec![None; depth],
            fresh: Vec::with_capacity(depth),
            moved: 0,
            measured: Measured::default(),
            began: None,
        }
    }

    /// Whether the job is done.
    pub(super) fn is_done(&self) -> bool {
        self.state == state::DONE
    }

    /// See [`Worker::hold`].
    pub(super) fn hold(&mut self, holds: bool) {
        self.job.hold(holds);
    }

    /// Takes completed requests, and sends as many as fit.
    pub(super) fn turn(&mut self, clock: impl Fn() -> u64) -> Result<Step, Failure> {
        let mut step = Step::default();
        // Half of them at most: while their data are looked at, the disk has the other half to work
        // on.
        while step.completed < self.flights.len().div_ceil(2) as u64 {
            let Some(done) = self.disk.complete()? else { break };
            let now = clock();
            step.completed += 1;
            let flight = usize::try_from(done.tag)
                .ok()
                .and_then(|slot| Some((slot, self.flights.get_mut(slot)?.take()?)));
            let Some((slot, flight)) = flight else {
                return Err(Failure {
                    error: error::RING,
                    detail: done.tag,
                    sector: 0,
                    reason: "a request completed that was not in flight",
                });
            };
            if done.status != S_OK {
                return Err(Failure {
                    error: error::IO,
                    detail: u64::from(done.status),
                    sector: flight.work.sector(),
                    reason: "the disk failed a request",
                });
            }
            self.job.done(slot, flight.work, &self.buffers, &self.page)?;
            self.count(flight, now);
        }
        self.send(&clock, &mut step)?;
        if step.completed > 0 {
            self.page.moved(self.moved, self.job.total());
            self.page.measured(self.measured);
        }
        if self.state != self.job.state() {
            self.state = self.job.state();
            self.page.state(self.state);
        }
        Ok(step)
    }

    fn count(&mut self, flight: Flight, now: u64) {
        let bytes = flight.work.len() as u64;
        self.moved += bytes;
        if flight.measured {
            self.page.count_latency(histogram::bucket(now.saturating_sub(flight.since)));
            self.measured.ops += 1;
            self.measured.bytes += bytes;
            self.measured.elapsed_ns = now.saturating_sub(self.began.unwrap_or(now));
        }
    }

    /// Adds what the job has to send, and publishes it at once.
    fn send(&mut self, clock: &impl Fn() -> u64, step: &mut Step) -> Result<(), Failure> {
        let now = clock();
        while let Some((slot, work)) = self.job.next(now, &self.flights, &self.buffers) {
            let refused = Failure {
                error: error::RING,
                detail: 0,
                sector: work.sector(),
                reason: "the driver has less room than it reported",
            };
            let buffer = self.buffers.slot(slot, work.len()).ok_or(refused)?;
            let request = match work {
                Work::Read { sector, .. } => Request::Read { sector, buffer },
                Work::Write { sector, .. } => Request::Write { sector, buffer },
                Work::Flush => Request::Flush,
            };
            if !self.disk.submit(request, slot as u64)? {
                return Err(refused);
            }
            *self.flights.get_mut(slot).ok_or(refused)? =
                Some(Flight { work, since: now, measured: self.job.is_measured() });
            self.fresh.push(slot);
        }
        if self.fresh.is_empty() {
            return Ok(());
        }
        // The latency begins when the device can know of the request, not when its data were made.
        let now = clock();
        step.sent += self.fresh.len() as u64;
        for slot in self.fresh.drain(..) {
            if let Some(flight) = &mut self.flights[slot] {
                flight.since = now;
                if flight.measured {
                    self.began.get_or_insert(now);
                }
            }
        }
        step.kicks += u64::from(self.disk.kick());
        Ok(())
    }
}

impl<P: Platform, D: Disk> Worker<P> for Lane<D> {
    fn step(&mut self, platform: &P, _ready: bool) -> Result<Step, Failure> {
        self.turn(|| platform.now_ns())
    }

    fn finished(&self) -> bool {
        self.is_done()
    }

    /// Whether what is sent now is measured, and something was sent.
    fn is_measuring(&self) -> bool {
        self.began.is_some() && self.job.is_measured()
    }

    fn completes_by_interrupt(&self) -> bool {
        true
    }

    fn hold(&mut self, holds: bool) {
        self.hold(holds);
    }

    fn driver(&mut self) -> &mut dyn Interrupts {
        &mut self.disk
    }
}
