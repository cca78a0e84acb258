//! Records the latencies of one live queue.
//!
//! ```text
//!   owner (I/O thread)                              handler
//!
//!   announce, announce_since  ----->  take -> Taken, kept with each request; batch
//!                                     |    or: empty (nothing there), hold (rate limit), starve (no buffer)
//!                                     v
//!                                     reap, then complete for each request that is done
//!   finish (signalled)        <-----  |
//!   idle (nothing left)       <-----  '
//! ```
//! `finish` sees all times of a request, and is the only place that writes to the histograms.
use super::probes::ProbedQueue;
use super::{Operation, QueueLatency, Stage};
use quanta::Clock;
use std::sync::Arc;
use std::time::Duration;

/// Runs of completed requests that a queue has room for without allocation.
const RUNS: usize = 64;

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

/// What one request of a disk was, for a [`RequestObserver`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Index of its descriptor chain.
    pub head: u16,
    /// First sector (512 bytes), if it has one.
    pub sector: Option<u64>,
    /// Bytes of data asked for, or the length of its ranges.
    pub bytes: u64,
    /// Status byte.
    pub status: u8,
}

/// One request that has ended, with its stages in nanoseconds.
///
/// Their sum is its whole latency; it ends when the observer is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestRecord {
    /// Operation.
    pub operation: Operation,
    /// The request.
    pub request: Request,
    /// Time in the ring; see [`Stage::Ring`].
    pub ring: u64,
    /// Time held by a rate limit.
    pub throttled: u64,
    /// Time of host I/O.
    pub host: u64,
    /// Time from completion to the interrupt.
    pub interrupt: u64,
}

impl RequestRecord {
    /// Times in the order of [`Stage::ALL`].
    pub(super) fn stages(&self) -> [u64; Stage::ALL.len()] {
        [self.ring, self.throttled, self.host, self.interrupt]
    }
}

/// Is told of each request of a queue; see [`QueueLatency::observe`].
pub trait RequestObserver: Send + Sync {
    /// A request has ended just now. Called by the I/O thread; must not block.
    fn ended(&self, record: &RequestRecord);
}

/// Completed requests with the same times; or one, that is observed or probed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Run {
    operation: Operation,
    taken: Taken,
    done: Ticks,
    count: u64,
    request: Option<Request>,
}

/// Records the latencies of one live queue into its [`QueueLatency`].
///
/// It is off unless the owner of the queue turns it on
/// ([`MappedQueue::with_latency`](crate::MappedQueue::with_latency)); it then does nothing.
#[derive(Debug, Default)]
pub struct LatencyRecorder {
    on: Option<On>,
}

#[derive(Debug)]
struct On {
    latency: Arc<QueueLatency>,
    clock: Clock,
    /// Since when available chains are known, or may be there.
    announced: Option<Ticks>,
    /// Since when a rate limit holds the queue.
    held: Option<Ticks>,
    /// Frames wait for buffers.
    starved: bool,
    /// When the requests that complete now were done.
    reaped: Ticks,
    /// Completed and not yet signalled.
    runs: Vec<Run>,
    /// What probes report.
    probed: ProbedQueue,
}

impl LatencyRecorder {
    /// Records into `latency`.
    pub(crate) fn new(latency: Arc<QueueLatency>) -> Self {
        Self::with_clock(latency, Clock::new())
    }

    pub(super) fn with_clock(latency: Arc<QueueLatency>, clock: Clock) -> Self {
        Self {
            on: Some(On {
                latency,
                clock,
                announced: None,
                held: None,
                starved: false,
                reaped: 0,
                runs: Vec::with_capacity(RUNS),
                probed: ProbedQueue::default(),
            }),
        }
    }

    /// Sets the device and the index of the queue in probes [no name, 0].
    pub(crate) fn name(&mut self, device: &str, queue: u16) {
        if let Some(on) = &mut self.on {
            on.probed = ProbedQueue::new(device, queue);
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
            on.announced = Some(on.clock.raw().saturating_sub(on.ticks(ago)));
        }
    }

    /// Owner: a kick arrived.
    #[inline]
    pub fn kicked(&self) {
        if let Some(on) = &self.on {
            on.probed.kick();
        }
    }

    /// Owner: the driver was interrupted.
    #[inline]
    pub fn interrupted(&self) {
        if let Some(on) = &self.on {
            on.probed.interrupt();
        }
    }

    /// Owner: nothing is left; the next work is announced.
    #[inline]
    pub fn idle(&mut self) {
        if let Some(on) = &mut self.on
            && on.held.is_none()
            && !on.starved
        {
            on.announced = None;
        }
    }

    /// Owner: the completed requests are published, and the driver is signalled if it wants it.
    #[inline]
    pub fn finish(&mut self) {
        if let Some(on) = &mut self.on
            && !on.runs.is_empty()
        {
            on.finish();
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
            on.latency.batch().add(chains as u64, 1);
            on.latency.depth().add(in_flight as u64, 1);
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
            (on.announced, on.starved) = (None, false);
        }
    }

    /// Handler: a rate limit holds the queue, from now on or still.
    pub fn hold(&mut self) {
        if let Some(on) = &mut self.on
            && on.held.is_none()
        {
            let now = on.clock.raw();
            on.held = Some(now);
            on.announced.get_or_insert(now);
            on.probed.throttle_begin();
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
            on.starved = true;
            on.announced.get_or_insert_with(|| on.clock.raw());
        }
    }

    /// Handler: a request was parsed that was taken from the ring.
    #[inline]
    pub fn request_taken(&self, request: impl FnOnce() -> (Operation, Request)) {
        if let Some(on) = &self.on {
            on.probed.request_taken(request);
        }
    }

    /// Handler: the request goes to the host.
    #[inline]
    pub fn request_started(&self, request: impl FnOnce() -> (Operation, Request)) {
        if let Some(on) = &self.on {
            on.probed.request_started(request);
        }
    }

    /// Handler: the host is done with the requests that complete next.
    #[inline]
    pub fn reap(&mut self) {
        if let Some(on) = &mut self.on {
            on.reaped = on.clock.raw();
        }
    }

    /// Handler: completes requests that were taken at the same time and were done at the last
    /// [`LatencyRecorder::reap`].
    #[inline]
    pub fn complete(&mut self, operation: Operation, taken: Taken, count: usize) {
        if let Some(on) = &mut self.on {
            on.complete(Run { operation, taken, done: on.reaped, count: count as u64, request: None });
        }
    }

    /// Handler: as [`LatencyRecorder::complete`], for one request that an observer may look at.
    #[inline]
    pub fn complete_request(
        &mut self,
        operation: Operation,
        taken: Taken,
        request: impl FnOnce() -> Request,
    ) {
        if let Some(on) = &mut self.on {
            let done = on.reaped;
            on.complete_request(operation, taken, done, request);
        }
    }

    /// Handler: as [`LatencyRecorder::complete_request`], for a request that is answered when it is
    /// taken, without host I/O.
    #[inline]
    pub fn answer_request(&mut self, operation: Operation, taken: Taken, request: impl FnOnce() -> Request) {
        if let Some(on) = &mut self.on {
            on.complete_request(operation, taken, taken.at, request);
        }
    }
}

impl On {
    /// Duration in ticks of the clock.
    fn ticks(&self, time: Duration) -> Ticks {
        const MANY: Ticks = 1 << 32;
        let nanos = self.clock.delta_as_nanos(0, MANY).max(1);
        u64::try_from(time.as_nanos() * u128::from(MANY) / u128::from(nanos)).unwrap_or(u64::MAX)
    }

    #[inline]
    fn take(&mut self) -> Taken {
        let now = self.clock.raw();
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
        self.probed.throttle_end(|| self.clock.delta_as_nanos(held, now));
        now.saturating_sub(held)
    }

    #[inline]
    fn complete_request(
        &mut self,
        operation: Operation,
        taken: Taken,
        done: Ticks,
        request: impl FnOnce() -> Request,
    ) {
        let probed = self.probed.wants_requests();
        let request = (probed || self.latency.is_observed()).then(request);
        if probed && let Some(request) = &request {
            self.probed.request_done(operation, request, self.clock.delta_as_nanos(taken.at, done));
        }
        self.complete(Run { operation, taken, done, count: 1, request });
    }

    #[inline]
    fn complete(&mut self, run: Run) {
        if run.count == 0 {
            return;
        }
        if let Some(last) = self.runs.last_mut()
            && last.operation == run.operation
            && (last.taken, last.done) == (run.taken, run.done)
            && (last.request, run.request) == (None, None)
        {
            last.count += run.count;
            return;
        }
        self.runs.push(run);
    }

    #[inline(never)]
    fn finish(&mut self) {
        let end = self.clock.raw();
        let Self { latency, clock, runs, probed, .. } = self;
        let nanos = |from, to| clock.delta_as_nanos(from, to);
        let stages = |Run { taken: Taken { announced, at, throttled }, done, .. }: &Run| {
            let ring = nanos(announced.saturating_add(*throttled), *at);
            [ring, nanos(0, *throttled), nanos(*at, *done), nanos(*done, end)]
        };
        if runs.iter().any(|run| run.request.is_some()) {
            let record = |run: &Run| {
                let (operation, request) = (run.operation, run.request?);
                let [ring, throttled, host, interrupt] = stages(run);
                Some(RequestRecord { operation, request, ring, throttled, host, interrupt })
            };
            latency.tell(runs.iter().filter_map(record));
            if probed.wants_requests() {
                runs.iter().filter_map(record).for_each(|record| probed.request_ended(&record));
            }
        }
        if probed.wants_batches() {
            runs.iter().for_each(|run| probed.batch_ended(run.operation, run.count, stages(run)));
        }
        let mut runs = runs.drain(..).peekable();
        while let Some(Run { operation, taken, done, count, .. }) = runs.next() {
            let whole = nanos(taken.announced, end);
            latency.operation(operation).add(whole, count);
            // Neighbours with the same times share the work.
            let mut sum = count;
            while let Some(next) = runs.next_if(|next| (next.taken, next.done) == (taken, done)) {
                latency.operation(next.operation).add(whole, next.count);
                sum += next.count;
            }
            let Taken { announced, at, throttled } = taken;
            latency.stage(Stage::Ring).add(nanos(announced.saturating_add(throttled), at), sum);
            if throttled > 0 {
                latency.stage(Stage::Throttled).add(nanos(0, throttled), sum);
            }
            latency.stage(Stage::Host).add(nanos(at, done), sum);
            latency.stage(Stage::Interrupt).add(nanos(done, end), sum);
        }
    }
}

#[cfg(test)]
mod tests;
