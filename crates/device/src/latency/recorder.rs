//! Records the latencies of one live queue.
//!
//! ```text
//!   owner (I/O thread)                              handler
//!
//!   announce, announce_since
//!   begin_turn                ----->  take -> Taken, kept with each request; batch
//!                                     |    or: empty (nothing there), hold (rate limit), starve (no buffer)
//!                                     v
//!                                     reap, then complete for each request that is done
//!                                     |    or: complete_now
//!   signalled, finish         <-----  |
//!   idle (nothing left)       <-----  '
//! ```
//! `finish` sees all times of a request, and is the only place that writes to the histograms.
//!
//! **Readings of the clock are shared.** A reading is most of the cost of a small batch. `finish`
//! uses that of `complete_now`, unless the driver was signalled in between. In the same turn, the
//! first `reap` or `take` after `finish` uses that of `finish`: nothing happens in between.
use super::operation::Operation;
use super::probes::ProbedQueue;
use super::queue::QueueLatency;
use super::request::{Request, RequestRecord};
use super::stage::Stage;
use quanta::Clock;
use std::sync::Arc;
use std::time::Duration;

/// Runs of completed requests that a queue has room for without allocation.
const RUNS: usize = 64;

/// Operation of a run without requests.
static NOTHING: Operation = Operation::new(0, c"", "");

/// Reading of the clock, in its own unit.
type Ticks = u64;

/// When a chain was taken from the ring, and how long it had waited.
///
/// Kept with the request while it is in flight.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Taken {
    /// When the thread learned of it.
    announced: Ticks,
    /// When it was taken; or let go by a rate limit, if that was later.
    at: Ticks,
    /// Time before `at` for which a rate limit held it.
    throttled: Ticks,
}

/// Times of a completed request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Times {
    taken: Taken,
    done: Ticks,
}

impl Times {
    /// Whether the request was taken while latencies were recorded.
    #[inline]
    fn is_known(&self) -> bool {
        self.taken.at != 0
    }
}

/// Completed requests of one operation with the same times.
#[derive(Clone, Copy, Debug)]
struct Run {
    operation: &'static Operation,
    times: Times,
    count: u64,
}

/// A completed request that an observer is told of.
#[derive(Clone, Copy, Debug)]
struct Observed {
    operation: &'static Operation,
    times: Times,
    request: Request,
}

/// Nanoseconds of the stages, in the order of [`Stage::ALL`].
type Stages = [u64; Stage::ALL.len()];

/// Converts between ticks and nanoseconds, by a multiplication and a shift.
#[derive(Clone, Copy, Debug)]
struct Scale {
    /// Nanoseconds of 2^32 ticks.
    nanos: u64,
    /// Ticks of 2^32 nanoseconds.
    ticks: u64,
}

impl Scale {
    fn new(clock: &Clock) -> Self {
        let nanos = clock.delta_as_nanos(0, 1 << 32).max(1);
        Self { nanos, ticks: u64::try_from((1_u128 << 64) / u128::from(nanos)).unwrap_or(u64::MAX) }
    }

    /// Nanoseconds from one reading to another; 0 if the clock went back.
    #[inline]
    fn nanos(self, from: Ticks, to: Ticks) -> u64 {
        ((u128::from(to.saturating_sub(from)) * u128::from(self.nanos)) >> 32) as u64
    }

    #[inline]
    fn ticks(self, time: Duration) -> Ticks {
        let nanos = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        u64::try_from((u128::from(nanos) * u128::from(self.ticks)) >> 32).unwrap_or(Ticks::MAX)
    }

    #[inline]
    fn stages(self, Times { taken: Taken { announced, at, throttled }, done }: Times, end: Ticks) -> Stages {
        [
            self.nanos(announced.saturating_add(throttled), at),
            self.nanos(0, throttled),
            self.nanos(at, done),
            self.nanos(done, end),
        ]
    }
}

/// Records the latencies of one live queue into its [`QueueLatency`].
///
/// It is off unless the owner of the queue turns it on
/// ([`MappedQueue::record_into`](crate::MappedQueue::record_into)); it then does nothing.
#[derive(Debug, Default)]
pub struct LatencyRecorder {
    on: Option<On>,
}

#[derive(Debug)]
struct On {
    latency: Arc<QueueLatency>,
    clock: Clock,
    scale: Scale,
    /// The last reading of the clock, while nothing has happened since.
    fresh: Option<Ticks>,
    /// Since when available chains are known, or may be there.
    announced: Option<Ticks>,
    /// Since when a rate limit holds the queue.
    held: Option<Ticks>,
    /// Frames wait for buffers.
    starved: bool,
    /// When the requests that complete now were done.
    reaped: Ticks,
    /// Completed and not yet signalled; none if its count is 0.
    run: Run,
    /// The same, before `run`.
    earlier: Vec<Run>,
    /// Each request of the last reaping is kept until it ends.
    keeps: bool,
    observed: Vec<Observed>,
    /// What probes report.
    probed: ProbedQueue,
}

/// Measures the speed of this process's clock, which takes about 0.6 ms.
///
/// The first queue whose latencies are recorded does it otherwise. Call it before a client waits.
pub fn calibrate() {
    let _ = Clock::new();
}

impl LatencyRecorder {
    /// Records into `latency`. Probes fire for `probed`.
    pub(crate) fn new(latency: Arc<QueueLatency>, probed: ProbedQueue) -> Self {
        Self::with_clock(latency, probed, Clock::new())
    }

    pub(super) fn with_clock(latency: Arc<QueueLatency>, probed: ProbedQueue, clock: Clock) -> Self {
        Self {
            on: Some(On {
                latency,
                scale: Scale::new(&clock),
                clock,
                fresh: None,
                announced: None,
                held: None,
                starved: false,
                reaped: 0,
                run: Run { operation: &NOTHING, times: Times::default(), count: 0 },
                earlier: Vec::with_capacity(RUNS),
                keeps: false,
                observed: Vec::new(),
                probed,
            }),
        }
    }

    /// Whether latencies are recorded.
    #[must_use]
    #[inline]
    pub fn is_on(&self) -> bool {
        self.on.is_some()
    }

    /// Owner: the thread learns now that there is work.
    ///
    /// Does nothing if it has learned of work before, which is not taken yet.
    #[inline]
    pub fn announce(&mut self) {
        if let Some(on) = &mut self.on
            && on.announced.is_none()
        {
            on.announced = Some(on.clock.raw());
        }
    }

    /// Owner: the thread finds work, and has last looked for it some time `ago`.
    #[inline]
    pub fn announce_since(&mut self, ago: Duration) {
        if let Some(on) = &mut self.on
            && on.announced.is_none()
        {
            on.announced = Some(on.clock.raw().saturating_sub(on.scale.ticks(ago)));
        }
    }

    /// Owner: a kick arrived.
    #[inline]
    pub fn kicked(&self) {
        if let Some(on) = &self.on {
            on.probed.kick();
        }
    }

    /// Owner: serves the queue now, after something else.
    #[inline]
    pub fn begin_turn(&mut self) {
        if let Some(on) = &mut self.on {
            on.fresh = None;
        }
    }

    /// Owner: has signalled the driver, before [`LatencyRecorder::finish`].
    #[inline]
    pub fn signalled(&mut self) {
        if let Some(on) = &mut self.on {
            on.probed.interrupt();
            // Signalling took time.
            on.fresh = None;
        }
    }

    /// Owner: nothing is left; the next work is announced.
    #[inline]
    pub fn idle(&mut self) {
        if let Some(on) = &mut self.on {
            on.fresh = None;
            if on.held.is_none() && !on.starved {
                on.announced = None;
            }
        }
    }

    /// Owner: the completed requests are published, and the driver is signalled if it wants it.
    #[inline]
    pub fn finish(&mut self) {
        if let Some(on) = &mut self.on {
            if on.run.count > 0 {
                on.finish();
            } else {
                on.fresh = None;
            }
        }
    }

    /// Handler: takes chains now.
    ///
    /// Keep the result with each of their requests.
    #[inline]
    pub fn take(&mut self) -> Taken {
        match &mut self.on {
            Some(on) => on.take(),
            None => Taken::default(),
        }
    }

    /// Handler: took `chains` chains together; `in_flight` are in flight now.
    ///
    /// Joins [`LatencyRecorder::take`], [`LatencyRecorder::batch`] and, for no chain,
    /// [`LatencyRecorder::empty`].
    #[inline]
    pub fn take_batch(&mut self, chains: usize, in_flight: usize) -> Taken {
        if chains == 0 {
            self.empty();
            return Taken::default();
        }
        self.batch(chains, in_flight);
        self.take()
    }

    /// Handler: took `chains` chains together; `in_flight` are in flight now.
    #[inline]
    pub fn batch(&mut self, chains: usize, in_flight: usize) {
        if let Some(on) = &self.on
            && chains > 0
        {
            let looks = on.latency.looks();
            looks.batch.count(chains as u64);
            looks.depth.count(in_flight as u64);
            on.probed.batch_taken(chains, in_flight);
        }
    }

    /// Handler: looked, and there was nothing to take.
    #[inline]
    pub fn empty(&mut self) {
        if let Some(on) = &mut self.on {
            if let Some(held) = on.held.take() {
                on.throttle_ends(held, on.clock.raw());
            }
            (on.fresh, on.announced, on.starved) = (None, None, false);
        }
    }

    /// Handler: a rate limit holds the queue, from now on or still.
    pub fn hold(&mut self) {
        if let Some(on) = &mut self.on {
            on.fresh = None;
            if on.held.is_none() {
                let now = on.clock.raw();
                on.held = Some(now);
                on.announced.get_or_insert(now);
                on.probed.throttle_begin();
            }
        }
    }

    /// Handler: goes on with requests that were taken before, after a [`LatencyRecorder::hold`] or
    /// not.
    pub fn resume(&mut self, taken: &mut Taken) {
        if let Some(on) = &mut self.on
            && let Some(held) = on.held.take()
        {
            let now = on.clock.raw();
            on.throttle_ends(held, now);
            taken.throttled += now.saturating_sub(held.max(taken.at));
            taken.at = now;
        }
    }

    /// Handler: has frames, and there is no buffer to take for them.
    pub fn starve(&mut self) {
        if let Some(on) = &mut self.on {
            on.fresh = None;
            on.starved = true;
            on.announced.get_or_insert_with(|| on.clock.raw());
        }
    }

    /// Handler: a request was parsed that was taken from the ring.
    #[inline]
    pub fn request_taken(&self, request: impl FnOnce() -> (&'static Operation, Request)) {
        if let Some(on) = &self.on {
            on.probed.request_taken(request);
        }
    }

    /// Handler: the request goes to the host.
    #[inline]
    pub fn request_started(&self, request: impl FnOnce() -> (&'static Operation, Request)) {
        if let Some(on) = &self.on {
            on.probed.request_started(request);
        }
    }

    /// Handler: the host is done with the requests that complete next.
    #[inline]
    pub fn reap(&mut self) {
        if let Some(on) = &mut self.on {
            on.reaped = on.now();
            on.keeps = on.keeps_requests();
        }
    }

    /// Handler: has completed requests that were taken at the same time, just now.
    ///
    /// Publish them next.
    #[inline]
    pub fn complete_now(&mut self, operation: &'static Operation, taken: Taken, count: usize) {
        if let Some(on) = &mut self.on
            && count > 0
        {
            let done = on.clock.raw();
            on.fresh = Some(done);
            on.complete(operation, Times { taken, done }, count as u64);
        }
    }

    /// Handler: completes a request that an observer may look at, and that was done at the last
    /// [`LatencyRecorder::reap`].
    #[inline]
    pub fn complete_request(
        &mut self,
        operation: &'static Operation,
        taken: Taken,
        request: impl FnOnce() -> Request,
    ) {
        if let Some(on) = &mut self.on {
            let times = Times { taken, done: on.reaped };
            on.complete(operation, times, 1);
            if on.keeps {
                on.keep(Observed { operation, times, request: request() });
            }
        }
    }

    /// Handler: as [`LatencyRecorder::complete_request`], for a request that is answered when it is
    /// taken, without host I/O.
    #[inline]
    pub fn answer_request(
        &mut self,
        operation: &'static Operation,
        taken: Taken,
        request: impl FnOnce() -> Request,
    ) {
        if let Some(on) = &mut self.on {
            let times = Times { taken, done: taken.at };
            on.complete(operation, times, 1);
            if on.keeps_requests() {
                on.keep(Observed { operation, times, request: request() });
            }
        }
    }
}

impl On {
    /// The time; a fresh reading serves once.
    #[inline]
    fn now(&mut self) -> Ticks {
        self.fresh.take().unwrap_or_else(|| self.clock.raw())
    }

    #[inline]
    fn take(&mut self) -> Taken {
        let now = self.now();
        // Chains that are not taken now are there, or come after this look at the ring.
        let announced = self.announced.replace(now).unwrap_or(now);
        let throttled = match self.held.take() {
            None => 0,
            Some(held) => self.throttle_ends(held, now),
        };
        self.starved = false;
        Taken { announced, at: now, throttled }
    }

    /// The limit has held the queue since `held`. Returns the time.
    fn throttle_ends(&self, held: Ticks, now: Ticks) -> Ticks {
        self.probed.throttle_end(|| self.scale.nanos(held, now));
        now.saturating_sub(held)
    }

    /// Whether an observer or a probe is to be told of each request.
    #[inline]
    fn keeps_requests(&self) -> bool {
        self.probed.wants_requests() || self.latency.is_observed()
    }

    #[cold]
    fn keep(&mut self, observed: Observed) {
        let Observed { operation, times: Times { taken, done }, request } = &observed;
        if self.probed.wants_requests() {
            self.probed.request_done(operation, request, self.scale.nanos(taken.at, *done));
        }
        self.observed.push(observed);
    }

    #[inline]
    fn complete(&mut self, operation: &'static Operation, times: Times, count: u64) {
        if self.run.count == 0 {
            self.run = Run { operation, times, count };
        } else if std::ptr::eq(self.run.operation, operation) && self.run.times == times {
            self.run.count += count;
        } else if count > 0 {
            self.begin_run(Run { operation, times, count });
        }
    }

    #[inline(never)]
    fn begin_run(&mut self, run: Run) {
        self.earlier.push(std::mem::replace(&mut self.run, run));
    }

    #[inline(never)]
    fn finish(&mut self) {
        let end = self.now();
        self.fresh = Some(end);
        if !self.observed.is_empty() {
            self.tell(end);
        }
        if self.probed.wants_batches() {
            self.probe(end);
        }
        let Self { latency, scale, run, earlier, .. } = self;
        if earlier.is_empty() {
            record(latency, *scale, std::slice::from_ref(run), end);
        } else {
            earlier.push(*run);
            record_all(latency, *scale, earlier, end);
            earlier.clear();
        }
        run.count = 0;
    }

    #[cold]
    fn tell(&mut self, end: Ticks) {
        let Self { latency, scale, observed, probed, .. } = self;
        let observer = latency.observer();
        for Observed { operation, times, request } in observed.drain(..).filter(|one| one.times.is_known()) {
            let record = RequestRecord { operation, request, stages: scale.stages(times, end) };
            if let Some(observer) = &observer {
                observer.ended(&record);
            }
            if probed.wants_requests() {
                probed.request_ended(&record);
            }
        }
    }

    #[cold]
    fn probe(&self, end: Ticks) {
        for run in self.earlier.iter().chain([&self.run]).filter(|run| run.times.is_known()) {
            self.probed.batch_ended(run.operation, run.count, self.scale.stages(run.times, end));
        }
    }
}

/// Adds runs to the histograms. Neighbours with the same times share the stages.
#[inline(never)]
fn record_all(latency: &QueueLatency, scale: Scale, runs: &[Run], end: Ticks) {
    let groups = runs.chunk_by(|one, next| one.times == next.times);
    groups.for_each(|group| record(latency, scale, group, end));
}

/// Adds runs with the same times to the histograms.
#[inline(always)]
fn record(latency: &QueueLatency, scale: Scale, runs: &[Run], end: Ticks) {
    let Some(Run { times, .. }) = runs.first().filter(|run| run.times.is_known()) else { return };
    let [ring, throttled, host, interrupt] = scale.stages(*times, end);
    let whole = ring.wrapping_add(throttled).wrapping_add(host).wrapping_add(interrupt);
    let mut sum = 0;
    for run in runs {
        latency.operation(run.operation).add(whole, run.count);
        sum += run.count;
    }
    let stages = latency.stages();
    stages.ring.add(ring, sum);
    if throttled > 0 {
        latency.throttled().add(throttled, sum);
    }
    stages.host.add(host, sum);
    stages.interrupt.add(interrupt, sum);
}

#[cfg(test)]
mod tests;
