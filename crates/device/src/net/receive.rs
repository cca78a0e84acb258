//! Serves a receive queue: frames of the back end, into buffers of the driver.
//!
//! ```text
//!            a frame is there              a buffer is taken               all of it is placed
//!   Frames -------------------> Buffers -------------------> filling ------------------------> completed
//!     ^   (asleep on the back end's descriptor)  ^             | none is available: asleep until a kick
//!     '--- no frame                              '-------------'
//! ```
//! Buffers are popped only when there are frames for them, so a waiting queue has nothing in flight
//! and wants no kicks. With MRG_RXBUF, a frame that is longer than a buffer fills several; its
//! header, with their number, is written last. Most frames fit one buffer. They are placed in
//! groups, which are completed together.
use super::back_end::{Incoming, Receiver};
use super::counters::{Counters, Totals};
use super::header::{HEADER, header_len, to_driver};
use super::operation::FRAME_IN;
use crate::ahead::ahead;
use crate::{MappedQueue, QueueBatch, QueueHandler, Rest, ServeError, Served, WakeSet};
use arrayvec::ArrayVec;
use paravane_dma::{Access, AccessGuard, WriteSpan};
use paravane_ring::Segment;
use paravane_ring::device::{Batch, Chain, Queue};
use paravane_spec::net::F_MRG_RXBUF;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

/// Most frames in one serve.
const FRAMES: usize = 64;
/// Buffers that are prefetched before they are filled: header and start of the frame.
///
/// A processor drops requests beyond about twenty cache lines.
const AHEAD: usize = 8;

pub(super) struct Receive<R> {
    receiver: R,
    filling: Filling,
    /// Buffers for the frames at hand; empty between two serves.
    batch: Batch,
    waits_for_buffers: bool,
    counters: Arc<Counters>,
    counts: Totals,
}

/// The partly placed frame, and buffers of earlier frames to complete.
struct Filling {
    features: u64,
    /// See [`header_len`].
    header_len: usize,
    /// Chains that are done or hold a part of the frame, in order.
    ///
    /// Each with the bytes written to it.
    heads: Vec<(u16, u32)>,
    /// Number of chains that are done; the others hold a part of the frame.
    done: usize,
    /// Bytes placed, without the header.
    placed: usize,
    /// Memory of the header. No segment is empty, so this many are enough.
    header: [Segment; HEADER],
}

/// Result of placing a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Delivered,
    Dropped,
    /// The frame needs more buffers.
    Unfinished,
}

// Relaxed: the publication of the used index releases all of it.
const ACCESS: Access = Access::WRITE.union(Access::RELAXED);

impl Filling {
    fn new(features: u64, size: u16) -> Self {
        Self {
            features,
            header_len: header_len(features),
            heads: Vec::with_capacity(usize::from(size) + FRAMES),
            done: 0,
            placed: 0,
            header: [Segment::default(); HEADER],
        }
    }

    /// Whether a part of a frame has been placed.
    fn has_begun(&self) -> bool {
        self.heads.len() > self.done
    }

    /// Places a frame, or the next part of it, in one more buffer.
    fn fill(
        &mut self,
        queue_size: u16,
        memory: &AccessGuard<'_>,
        (chain, readable, writable): (&Chain, &[Segment], &[Segment]),
        frame: Incoming<'_>,
        counts: &mut Totals,
    ) -> Result<Outcome, ServeError> {
        let mergeable = self.features & F_MRG_RXBUF != 0;
        let first = !self.has_begun();
        let before = if first { self.header_len } else { 0 };
        let room = chain.writable_len() as usize;
        if !readable.is_empty() || room < before.max(1) {
            // Before those of the frame, which must stay together.
            self.heads.insert(self.done, (chain.head, 0));
            self.done += 1;
            counts.unusable += 1;
            return Ok(Outcome::Unfinished);
        }
        let rest = &frame.bytes[self.placed..];
        if !mergeable && room - before < rest.len() {
            self.heads.push((chain.head, 0));
            self.done += 1;
            counts.no_room += 1;
            return Ok(Outcome::Dropped);
        }
        if first {
            for (to, from) in self.header.iter_mut().zip(writable) {
                *to = *from;
            }
        }
        let now = &rest[..rest.len().min(room - before)];
        memory.write_segments(writable, before as u64, now, ACCESS)?;
        self.placed += now.len();
        self.heads.push((chain.head, (before + now.len()) as u32));
        let buffers = self.heads.len() - self.done;
        let finished = self.placed == frame.bytes.len();
        if !finished && buffers < usize::from(queue_size) {
            return Ok(Outcome::Unfinished);
        }
        self.placed = 0;
        if finished {
            let header = to_driver(frame.header, self.features, buffers as u16);
            memory.write_segments(&self.header, 0, &header.bytes()[..self.header_len], ACCESS)?;
            counts.received += 1;
            counts.received_bytes += frame.bytes.len() as u64;
        } else {
            // It does not fit the whole queue.
            self.give_up();
            counts.no_room += 1;
        }
        self.done = self.heads.len();
        Ok(if finished { Outcome::Delivered } else { Outcome::Dropped })
    }

    /// Memory of the header of a frame that has begun, without surplus segments.
    fn header_place(&self) -> &[Segment] {
        let mut left = self.header_len;
        let has_part = |segment: &&Segment| {
            let has_part = left > 0;
            left = left.saturating_sub(segment.len as usize);
            has_part
        };
        let count = self.header.iter().take_while(has_part).count();
        &self.header[..count]
    }

    /// Drops the frame; its buffers are to be returned empty.
    fn give_up(&mut self) {
        self.placed = 0;
        self.heads[self.done..].iter_mut().for_each(|(_, len)| *len = 0);
    }

    /// Completes the buffers that are done.
    fn complete(&mut self, queue: &mut Queue, served: &mut Served) -> Result<(), ServeError> {
        served.completed += self.done as u32;
        queue.complete_all(self.heads.drain(..std::mem::take(&mut self.done)))?;
        Ok(())
    }
}

impl<R: Receiver> Receive<R> {
    pub(super) fn new(receiver: R, features: u64, size: u16, counters: Arc<Counters>) -> Self {
        let filling = Filling::new(features, size);
        let batch = Batch::new(FRAMES);
        Self { receiver, filling, batch, waits_for_buffers: false, counters, counts: Totals::default() }
    }

    fn serve_batch(&mut self, batch: QueueBatch<'_>) -> Result<Served, ServeError> {
        let QueueBatch { queue, memory, latency, .. } = batch;
        let mut served = Served::default();
        self.waits_for_buffers = false;
        if self.filling.has_begun() && !memory.translates_chain(&[], self.filling.header_place()) {
            // The header is written last, and its memory is not translated.
            self.waits_for_buffers = true;
            return Ok(served);
        }
        let size = queue.size();
        // Chains, of which each frame takes at least one. Bounded, since the driver may add
        // unusable ones without end.
        let mut left = FRAMES + usize::from(size);
        let mut frames = 0;
        // When the first buffers were taken: one time for all.
        let mut first = None;
        while frames < FRAMES && left > 0 {
            let at_hand = self.receiver.fetch(FRAMES - frames)?;
            if at_hand == 0 {
                if self.receiver.is_held() {
                    latency.hold();
                } else if first.is_none() {
                    latency.empty();
                }
                break;
            }
            // As many buffers as there are frames, so that all are used.
            self.batch.limit(at_hand.min(left));
            let taken = memory.pop(queue, &mut self.batch)?;
            if taken == 0 {
                self.waits_for_buffers = true;
                latency.starve();
                break;
            }
            first.get_or_insert_with(|| latency.take());
            served.taken += taken as u32;
            left -= taken;
            queue.expect_completions(taken);
            let is_short = self.filling.header_len < HEADER;
            let whole =
                if is_short || self.filling.has_begun() { 0 } else { self.place_whole(queue, &memory)? };
            served.completed += whole as u32;
            frames += whole;
            for chain in self.batch.iter().skip(whole) {
                let Some(frame) = self.receiver.frame(0) else {
                    return Err(
                        std::io::Error::other("the back end has fewer frames than it reported").into()
                    );
                };
                match self.filling.fill(size, &memory, chain, frame, &mut self.counts)? {
                    Outcome::Delivered | Outcome::Dropped => {
                        self.receiver.done(1);
                        frames += 1;
                    }
                    Outcome::Unfinished => {}
                }
            }
            self.filling.complete(queue, &mut served)?;
        }
        self.receiver.flush();
        if let Some(taken) = first {
            latency.batch(served.taken as usize, usize::from(queue.in_flight()) + served.completed as usize);
            latency.complete_now(&FRAME_IN, taken, frames);
        }
        served.interrupt = queue.publish()?;
        Ok(served)
    }

    /// Places frames with whole headers in the batch's chains and completes those, and returns their number.
    ///
    /// Stops at the first frame that does not fit one segment in one piece.
    ///
    /// Prefetches the places some frames ahead, and stores headers and frames and nothing else
    /// meanwhile: a store to a cache line that is still with the driver's processor delays all stores
    /// behind it, and a processor buffers only a few dozen.
    #[inline(never)]
    fn place_whole(&mut self, queue: &mut Queue, memory: &AccessGuard<'_>) -> Result<usize, ServeError> {
        let features = self.filling.features;
        let mut places = ArrayVec::<(WriteSpan<'_>, [u32; HEADER / 4], &[u8]), FRAMES>::new();
        let mut bytes = 0;
        for (_, readable, writable) in self.batch.iter() {
            let frame = self.receiver.frame(places.len());
            let ([], [only], Some(frame)) = (readable, writable, frame) else { break };
            let len = HEADER + frame.bytes.len();
            if (only.len as usize) < len {
                break;
            }
            let Some(span) = memory.write_span(only.addr, len) else { break };
            let header = to_driver(frame.header, features, 1).0;
            if places.try_push((span, header, frame.bytes)).is_err() {
                break;
            }
            bytes += frame.bytes.len() as u64;
        }
        for (span, header, frame) in ahead(places.iter(), AHEAD, |(span, ..)| span.expect()) {
            span.write_obj(0, header);
            span.write(HEADER, frame);
        }
        let count = places.len();
        let lens = places.iter().map(|(.., frame)| (HEADER + frame.len()) as u32);
        queue.complete_all(self.batch.chains().iter().zip(lens).map(|(chain, len)| (chain.head, len)))?;
        drop(places);
        self.counts.received += count as u64;
        self.counts.received_bytes += bytes;
        self.receiver.done(count);
        Ok(count)
    }
}

impl<R: Receiver> QueueHandler for Receive<R> {
    fn serve(&mut self, queue: &mut MappedQueue) -> Result<Served, ServeError> {
        let served = self.serve_batch(queue.begin_batch());
        self.counters.add(&mut self.counts);
        match served {
            Err(ServeError::Queue(error)) => Err(queue.begin_batch().queue.fail(error).into()),
            served => served,
        }
    }

    fn register(&mut self, wakes: Option<&WakeSet>) -> io::Result<()> {
        self.receiver.register(wakes)
    }

    fn renew(&mut self) -> io::Result<()> {
        self.receiver.renew()
    }

    fn rest(&mut self, arm: bool) -> Rest {
        if self.waits_for_buffers {
            return Rest::Poll { kicks: true };
        }
        self.receiver.rest(arm).with_kicks(false)
    }

    fn tap(&self) -> Option<BorrowedFd<'_>> {
        self.receiver.tap()
    }

    fn at_rest(&self) -> bool {
        !self.filling.has_begun()
    }

    fn drain(&mut self, queue: &mut MappedQueue, complete: bool) -> Served {
        let mut served = Served::default();
        if self.filling.has_begun() {
            // A partly placed frame is lost.
            self.receiver.done(1);
            self.receiver.flush();
            self.counts.no_room += 1;
        }
        let count = self.filling.heads.len();
        self.filling.give_up();
        if complete {
            let queue = queue.begin_batch().queue;
            // A queue that has latched publishes nothing.
            if queue.complete_all(self.filling.heads.drain(..)).is_ok() {
                served.completed = count as u32;
                served.interrupt = queue.publish().unwrap_or(false);
            }
        }
        self.filling.done = 0;
        self.filling.heads.clear();
        self.counters.add(&mut self.counts);
        served
    }
}
