//! Serves a transmit queue: frames out of guest memory, to the back end.
//!
//! ```text
//!   serve:  pop a batch -> check and send each -> complete those -> flush -> publish
//!              ^                  | Full
//!              '-- nothing popped until the rest has been sent; the back end's descriptor wakes the thread
//! ```
//! Chains that were in flight when an earlier process died come first (in-flight tracking). That process
//! may have sent their frames: they are completed and not sent again, as a cable may lose a frame and
//! never doubles one.
//!
//! A chain with an invalid frame or header is completed and counted, and the queue goes on. An
//! address outside guest memory latches the queue.
use super::back_end::{Outgoing, Sender, Sent};
use super::counters::{Counters, Totals};
use super::header::{EncodedHeader, HEADER, Rules};
use super::operation::FRAME_OUT;
use crate::ahead::ahead;
use crate::latency::Taken;
use crate::{MappedQueue, QueueBatch, QueueGuard, QueueHandler, Rest, ServeError, Served, WakeSet};
use arrayvec::ArrayVec;
use paravane_dma::{Access, AccessGuard, ReadSpan};
use paravane_ring::Segment;
use paravane_ring::device::{Batch, Chain};
use paravane_spec::net::{ETH_HEADER, MAX_FRAME};
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

/// Most chains popped at once.
const BATCH: usize = 64;
/// Chains whose memory is prefetched: header and start of the frame.
///
/// `EXPECTED` bytes of each. A processor drops requests beyond about twenty cache lines, and a long
/// copy prefetches the rest.
const AHEAD: usize = 8;
const EXPECTED: usize = 128;

pub(super) struct Transmit<S> {
    sender: S,
    rules: Rules,
    /// The handler's own: frames stay here while the back end has no room.
    batch: Batch,
    /// Number of chains of the batch that are done.
    done: usize,
    /// Number of chains that an earlier process took and that have not come yet; `None`: not looked up.
    recovered: Option<u16>,
    /// When the batch was taken.
    taken: Taken,
    /// The back end had no room.
    full: bool,
    counters: Arc<Counters>,
    counts: Totals,
}

impl<S: Sender> Transmit<S> {
    pub(super) fn new(sender: S, features: u64, counters: Arc<Counters>) -> Self {
        let counts = Totals::default();
        let rules = Rules::new(features);
        let (batch, taken) = (Batch::new(BATCH), Taken::default());
        Self { sender, rules, batch, done: 0, recovered: None, taken, full: false, counters, counts }
    }

    /// Sends the rest of the batch, and returns the number of chains that are done.
    ///
    /// The first `skipped` chains of it are not sent.
    fn send_rest(&mut self, memory: &AccessGuard<'_>, skipped: usize) -> Result<usize, ServeError> {
        self.full = false;
        let first = self.done.max(skipped);
        let mut done = first;
        let (mut bytes, mut others) = (0, 0);
        let mut result = Ok(());
        let rules = self.rules;
        let mut candidates = ArrayVec::<Candidate<'_>, BATCH>::new();
        for chain in self.batch.iter().skip(first) {
            if candidates.try_push(Candidate::of(chain, memory, rules)).is_err() {
                break;
            }
        }
        // The driver's processor has the cache lines: those of some chains are prefetched before
        // the first one is needed.
        for candidate in ahead(candidates.iter(), AHEAD, |candidate| candidate.expect(memory, rules)) {
            match candidate.send(&mut self.sender, rules, memory) {
                Ok(Some(Sent::Sent)) => bytes += candidate.len as u64,
                Ok(Some(Sent::Refused)) => {
                    self.counts.refused += 1;
                    others += 1;
                }
                Ok(Some(Sent::Full)) => {
                    self.full = true;
                    break;
                }
                Ok(None) => {
                    self.counts.malformed += 1;
                    others += 1;
                }
                Err(error) => {
                    result = Err(error);
                    break;
                }
            }
            done += 1;
        }
        self.counts.transmitted += (done - first - others) as u64;
        self.counts.transmitted_bytes += bytes;
        self.sender.flush();
        result.map(|()| done)
    }

    /// Takes chains of the new batch as done that an earlier process may have sent.
    #[cold]
    fn skip(&mut self, recovered: u16) -> usize {
        let again = self.batch.chains().len().min(recovered.into());
        self.recovered = Some(recovered - again as u16);
        self.counts.refused += again as u64;
        tracing::info!(frames = again, "frames that an earlier process may have sent are not sent again");
        again
    }

    /// Whether the rest of an earlier batch is still translated.
    #[cold]
    fn rest_is_translated(&self, memory: &QueueGuard<'_>) -> bool {
        self.batch.iter().skip(self.done).all(|(_, frame, _)| memory.translates_chain(frame, &[]))
    }

    fn serve_batch(&mut self, batch: QueueBatch<'_>) -> Result<Served, ServeError> {
        let QueueBatch { queue, memory, latency, .. } = batch;
        let mut served = Served::default();
        let mut skipped = 0;
        if self.done == self.batch.chains().len() {
            // First: the batch is empty after an error, too.
            self.done = 0;
            // Before the first chain is taken, what is in flight is what comes again.
            let recovered = *self.recovered.get_or_insert_with(|| queue.in_flight());
            served.taken = memory.pop(queue, &mut self.batch)? as u32;
            if recovered > 0 {
                skipped = self.skip(recovered);
            }
            queue.expect_completions(served.taken as usize);
            self.taken = latency.take_batch(served.taken as usize, queue.in_flight().into());
        } else if memory.translates_on_demand() && !self.rest_is_translated(&memory) {
            self.full = false;
            return Ok(served);
        } else {
            latency.resume(&mut self.taken);
        }
        let done = self.send_rest(&memory, skipped)?;
        if self.full && self.sender.is_held() {
            latency.hold();
        }
        let before = std::mem::replace(&mut self.done, done);
        let finished = &self.batch.chains()[before..self.done];
        served.completed = finished.len() as u32;
        queue.complete_all(finished.iter().map(|chain| (chain.head, 0)))?;
        latency.complete_now(&FRAME_OUT, self.taken, finished.len());
        served.interrupt = queue.publish()?;
        Ok(served)
    }
}

/// A chain that is sent soon, and its memory.
#[derive(Clone, Copy)]
struct Candidate<'a> {
    segments: &'a [Segment],
    /// All of it, if it is in one piece.
    span: Option<ReadSpan<'a>>,
    /// Length of the frame in bytes; 0 if it is invalid.
    len: usize,
}

impl<'a> Candidate<'a> {
    const NONE: Self = Self { segments: &[], span: None, len: 0 };

    #[inline(always)]
    fn of(
        (chain, segments, writable): (&Chain, &'a [Segment], &[Segment]),
        memory: &'a AccessGuard<'_>,
        rules: Rules,
    ) -> Self {
        let len = (chain.readable_len() as usize).saturating_sub(rules.header_len);
        if !(ETH_HEADER..=MAX_FRAME).contains(&len) || !writable.is_empty() {
            return Self::NONE;
        }
        let span = match segments {
            [only] => memory.read_span(only.addr, only.len as usize),
            _ => None,
        };
        Self { segments, span, len }
    }

    /// Prefetches the header, if it is needed, and the start of the frame.
    ///
    /// A header that is not read stays with the driver's processor.
    #[inline(always)]
    fn expect(&self, memory: &AccessGuard<'_>, rules: Rules) {
        let skip = if rules.need_header() { 0 } else { rules.header_len };
        match self.span {
            Some(span) => drop(span.from(skip).map(|span| span.expect())),
            None => expect_parts(self.segments, memory, skip),
        }
    }

    /// Sends the frame; `None` if it is invalid.
    #[inline(always)]
    fn send<S: Sender>(
        &self,
        sender: &mut S,
        rules: Rules,
        memory: &AccessGuard<'_>,
    ) -> Result<Option<Sent>, ServeError> {
        let Self { segments, span, len } = *self;
        if len == 0 {
            return Ok(None);
        }
        let header = match span {
            _ if !rules.need_header() => EncodedHeader::default(),
            Some(span) if rules.header_len == HEADER => EncodedHeader::read(span),
            _ => read_header(segments, memory, rules.header_len)?,
        };
        let Some(header) = rules.check(header, len) else { return Ok(None) };
        let header_len = rules.header_len;
        Ok(Some(sender.send(&Outgoing { header, memory, segments, span, header_len, len })?))
    }
}

/// The header of `len` bytes of a frame that is not in one piece, or of a legacy driver.
#[inline(never)]
fn read_header(
    segments: &[Segment],
    memory: &AccessGuard<'_>,
    len: usize,
) -> Result<EncodedHeader, ServeError> {
    let mut bytes = [0; HEADER];
    memory.read_segments(segments, 0, &mut bytes[..len], Access::READ)?;
    Ok(bytes.into())
}

/// Prefetches the start of a frame that is not in one piece.
#[inline(never)]
fn expect_parts(segments: &[Segment], memory: &AccessGuard<'_>, skip: usize) {
    if let Some(first) = segments.iter().find(|one| one.len as usize > skip) {
        // No segment wraps around.
        memory.expect_read(first.addr + skip as u64, EXPECTED.min(first.len as usize - skip));
    }
}

impl<S: Sender> QueueHandler for Transmit<S> {
    fn serve(&mut self, queue: &mut MappedQueue) -> Result<Served, ServeError> {
        let served = self.serve_batch(queue.begin_batch());
        self.counters.add(&mut self.counts);
        match served {
            Err(ServeError::Queue(error)) => Err(queue.begin_batch().queue.fail(error).into()),
            served => served,
        }
    }

    fn register(&mut self, wakes: Option<&WakeSet>) -> io::Result<()> {
        self.sender.register(wakes)
    }

    fn renew(&mut self) -> io::Result<()> {
        self.sender.renew()
    }

    fn rest(&mut self, arm: bool) -> Rest {
        // While the back end is full, more frames are of no use.
        if self.full { self.sender.rest(arm).with_kicks(false) } else { Rest::Poll { kicks: true } }
    }

    fn preferred_batch(&self, size: u16) -> u32 {
        // At most a quarter, so that the driver does not run out of descriptors meanwhile.
        (BATCH as u32).min(u32::from(size) / 4)
    }

    fn tap(&self) -> Option<BorrowedFd<'_>> {
        self.sender.tap()
    }

    fn at_rest(&self) -> bool {
        self.done == self.batch.chains().len()
    }

    fn drain(&mut self, queue: &mut MappedQueue, complete: bool) -> Served {
        let mut served = Served::default();
        let rest = &self.batch.chains()[self.done..];
        self.counts.refused += rest.len() as u64;
        if complete {
            let QueueBatch { queue, latency, .. } = queue.begin_batch();
            // A queue that has latched publishes nothing.
            if queue.complete_all(rest.iter().map(|chain| (chain.head, 0))).is_ok() {
                latency.complete_now(&FRAME_OUT, self.taken, rest.len());
                served.completed = rest.len() as u32;
                served.interrupt = queue.publish().unwrap_or(false);
            }
        }
        (self.done, self.full) = (self.batch.chains().len(), false);
        self.counters.add(&mut self.counts);
        served
    }
}
