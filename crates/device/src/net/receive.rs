//! Serves a receive queue: frames from the back end, into the buffers that the driver has made available.
//!
//! ```text
//!            a frame is there              a buffer is taken               all of it is placed
//!   Frames -------------------> Buffers -------------------> filling ------------------------> completed
//!     ^   (asleep on the back end's descriptor)  ^             | none is available: asleep until a kick
//!     '--- no frame                              '-------------'
//! ```
//! Buffers are taken when frames are there for them and not before, so a queue that waits has nothing in flight and wants
//! no kicks. With MRG_RXBUF a frame fills buffer after buffer; its header, which has their number, is written last.
use super::back_end::{HEADER, Incoming, Receiver};
use super::counters::{Counters, Totals};
use super::header;
use crate::{LiveQueue, Open, QueueHandler, Ring, ServeError, Served, address_error};
use paravane_dma::{Access, Door};
use paravane_ring::Segment;
use paravane_ring::device::{Batch, Chain};
use paravane_spec::net::F_MRG_RXBUF;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

/// Most frames in one serve.
const FRAMES: usize = 64;

pub(super) struct Receive<R> {
    receiver: R,
    filling: Filling,
    /// Buffers for frames that are there; empty between two serves.
    batch: Batch,
    waits_for_buffers: bool,
    counters: Arc<Counters>,
    counts: Totals,
}

/// The frame at hand, as far as it has been placed.
struct Filling {
    features: u64,
    /// Chains that have a part of it, and the bytes written to each.
    heads: Vec<(u16, u32)>,
    /// Bytes placed, without the header.
    placed: usize,
    /// Where the header goes. No segment is empty, so this many are enough.
    header: [Segment; HEADER],
}

/// What became of the frame at hand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Delivered,
    Dropped,
    /// It takes more buffers.
    Unfinished,
}

impl Filling {
    fn new(features: u64, size: u16) -> Self {
        Self {
            features,
            heads: Vec::with_capacity(usize::from(size)),
            placed: 0,
            header: [Segment::default(); HEADER],
        }
    }

    /// Places a frame, or goes on with it, in one more buffer.
    fn fill(
        &mut self,
        ring: &mut Ring,
        memory: &Door<'_>,
        (chain, readable, writable): (&Chain, &[Segment], &[Segment]),
        frame: Incoming<'_>,
        served: &mut Served,
        counts: &mut Totals,
    ) -> Result<Outcome, ServeError> {
        let mergeable = self.features & F_MRG_RXBUF != 0;
        let first = self.heads.is_empty();
        let before = if first { HEADER } else { 0 };
        let room = chain.writable_len() as usize;
        if !readable.is_empty() || room < before.max(1) {
            ring.complete(chain.head, 0)?;
            served.completed += 1;
            counts.unusable += 1;
            return Ok(Outcome::Unfinished);
        }
        let rest = &frame.bytes[self.placed..];
        if !mergeable && room - before < rest.len() {
            ring.complete(chain.head, 0)?;
            served.completed += 1;
            counts.no_room += 1;
            return Ok(Outcome::Dropped);
        }
        if first {
            for (to, from) in self.header.iter_mut().zip(writable) {
                *to = *from;
            }
        }
        let now = &rest[..rest.len().min(room - before)];
        // Relaxed, here and below: the publication of the used index releases all of it.
        let access = Access::WRITE | Access::RELAXED;
        memory.write_segments(writable, before as u64, now, access).map_err(address_error)?;
        self.placed += now.len();
        self.heads.push((chain.head, (before + now.len()) as u32));
        let finished = self.placed == frame.bytes.len();
        if !finished && self.heads.len() < usize::from(ring.size()) {
            return Ok(Outcome::Unfinished);
        }
        if finished {
            let buffers = self.heads.len() as u16;
            let header = header::encode(header::to_driver(frame.header, self.features, buffers));
            memory.write_segments(&self.header, 0, &header, access).map_err(address_error)?;
        }
        self.complete(ring, finished, served, counts, frame.bytes.len())
    }

    /// Where the header of a frame that has been begun goes, no segment more.
    fn header_place(&self) -> &[Segment] {
        let mut left = HEADER;
        let has_part = |segment: &&Segment| {
            let has_part = left > 0;
            left = left.saturating_sub(segment.len as usize);
            has_part
        };
        let count = self.header.iter().take_while(has_part).count();
        &self.header[..count]
    }

    /// Gives all buffers of the frame back: with it, or empty because the whole queue has no room for it.
    fn complete(
        &mut self,
        ring: &mut Ring,
        finished: bool,
        served: &mut Served,
        counts: &mut Totals,
        len: usize,
    ) -> Result<Outcome, ServeError> {
        served.completed += self.heads.len() as u32;
        self.placed = 0;
        ring.complete_all(self.heads.drain(..).map(|(head, len)| (head, if finished { len } else { 0 })))?;
        if finished {
            counts.received += 1;
            counts.received_bytes += len as u64;
            return Ok(Outcome::Delivered);
        }
        counts.no_room += 1;
        Ok(Outcome::Dropped)
    }
}

impl<R: Receiver> Receive<R> {
    pub(super) fn new(receiver: R, features: u64, size: u16, counters: Arc<Counters>) -> Self {
        let filling = Filling::new(features, size);
        let batch = Batch::new(FRAMES);
        Self { receiver, filling, batch, waits_for_buffers: false, counters, counts: Totals::default() }
    }

    fn serve_open(&mut self, open: Open<'_>) -> Result<Served, ServeError> {
        let Open { ring, memory, .. } = open;
        let mut served = Served::default();
        self.waits_for_buffers = false;
        if !self.filling.heads.is_empty() && !ring.reaches(&memory, &[], self.filling.header_place()) {
            // The header of a frame that has been begun is written last.
            self.waits_for_buffers = true;
            return Ok(served);
        }
        // Chains, of which each frame takes one at least. The driver may make unusable ones available for as long as we look.
        let mut left = FRAMES + usize::from(ring.size());
        let mut frames = 0;
        while frames < FRAMES && left > 0 && self.receiver.next()?.is_some() {
            // As many buffers as there are frames for, so that all are used.
            self.batch.limit(self.receiver.at_hand().min(FRAMES - frames).min(left));
            let taken = ring.pop(&mut self.batch, &memory)?;
            if taken == 0 {
                self.waits_for_buffers = true;
                break;
            }
            served.taken += taken as u32;
            left -= taken;
            for segment in self.batch.iter().filter_map(|(_, _, writable)| writable.first()) {
                memory.expect_write(segment.addr);
            }
            for chain in self.batch.iter() {
                let Some(frame) = self.receiver.next()? else {
                    return Err(std::io::Error::other("the network has fewer frames than it said").into());
                };
                match self.filling.fill(ring, &memory, chain, frame, &mut served, &mut self.counts)? {
                    Outcome::Delivered | Outcome::Dropped => {
                        self.receiver.done();
                        frames += 1;
                    }
                    Outcome::Unfinished => {}
                }
            }
        }
        self.receiver.flush();
        served.interrupt = ring.publish()?;
        Ok(served)
    }
}

impl<R: Receiver> QueueHandler for Receive<R> {
    fn serve(&mut self, queue: &mut LiveQueue) -> Result<Served, ServeError> {
        let served = self.serve_open(queue.open());
        self.counters.add(&mut self.counts);
        match served {
            Err(ServeError::Queue(error)) => Err(queue.open().ring.fail(error).into()),
            served => served,
        }
    }

    fn completion_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.receiver.fd())
    }

    fn listen(&mut self) -> bool {
        !self.waits_for_buffers && self.receiver.listen()
    }

    fn has_news(&mut self) -> Option<bool> {
        if self.waits_for_buffers { Some(false) } else { self.receiver.has_frame() }
    }

    fn wants_kicks(&self) -> bool {
        self.waits_for_buffers
    }

    fn tap(&self) -> Option<BorrowedFd<'_>> {
        self.receiver.tap()
    }

    fn at_rest(&self) -> bool {
        self.filling.heads.is_empty()
    }

    fn drain(&mut self, queue: &mut LiveQueue, complete: bool) -> Served {
        let mut served = Served::default();
        if !self.filling.heads.is_empty() {
            // Half a frame is none.
            self.receiver.done();
            self.receiver.flush();
            self.counts.no_room += 1;
        }
        self.filling.placed = 0;
        let heads = self.filling.heads.drain(..);
        if complete {
            let (ring, count) = (queue.open().ring, heads.len());
            // A queue that has latched has nothing more to say.
            if ring.complete_all(heads.map(|(head, _)| (head, 0))).is_ok() {
                served.completed = count as u32;
                served.interrupt = ring.publish().unwrap_or(false);
            }
        }
        self.counters.add(&mut self.counts);
        served
    }
}
