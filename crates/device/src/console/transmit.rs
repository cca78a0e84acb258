//! Serves the transmit queue: output of the guest, into the port.
//!
//! A chain that the port has no room for stays in flight with the number of its bytes that are taken, and no
//! other is popped before it is done.
use super::port::Port;
use crate::{
    MappedQueue, QueueBatch, QueueGuard, QueueHandler, Rest, ServeError, Served, WakeSet, WakeSource,
};
use paravane_dma::Access;
use paravane_ring::QueueError;
use paravane_ring::device::{Batch, Queue};
use std::io;
use std::sync::Arc;

/// Most chains of one turn.
const CHAINS: u32 = 64;
/// Most bytes of one turn.
const BYTES: usize = 256 << 10;
/// Bytes of one copy.
const CHUNK: usize = 4096;

pub(super) struct Transmit {
    port: Arc<Port>,
    /// The chain that is being taken.
    chain: Batch,
    /// How many of its bytes the port has; `None` while no chain is in flight.
    taken: Option<u64>,
    /// The turn was over before the output was.
    more: bool,
    wakes: Option<WakeSource>,
    bytes: Box<[u8; CHUNK]>,
}

/// Why a chain is left.
enum Left {
    /// All of it is taken.
    Done,
    /// The port has no room, or the turn is over.
    Waits,
}

impl Transmit {
    pub(super) fn new(port: Arc<Port>) -> Self {
        let bytes = Box::new([0; CHUNK]);
        Self { port, chain: Batch::new(1), taken: None, more: false, wakes: None, bytes }
    }

    /// Takes the rest of the chain, at most `left` bytes.
    fn take(&mut self, memory: &QueueGuard<'_>, left: &mut usize) -> Result<Left, ServeError> {
        let Some((chain, readable, writable)) = self.chain.iter().next() else { return Ok(Left::Done) };
        if !writable.is_empty() {
            let what = "output has a writable part";
            return Err(QueueError::Request { head: chain.head, what }.into());
        }
        let len = u64::from(chain.readable_len());
        let mut taken = self.taken.unwrap_or(0);
        while taken < len {
            let room = CHUNK.min(*left).min(usize::try_from(len - taken).unwrap_or(CHUNK));
            if room == 0 || !self.port.has_room() {
                break;
            }
            let bytes = &mut self.bytes[..room];
            memory.read_segments(readable, taken, bytes, Access::READ)?;
            let put = self.port.put_output(bytes);
            taken += put as u64;
            *left -= put;
        }
        self.taken = (taken < len).then_some(taken);
        self.more = self.taken.is_some() && *left == 0;
        Ok(if taken < len { Left::Waits } else { Left::Done })
    }

    fn serve_batch(&mut self, batch: QueueBatch<'_>) -> Result<Served, ServeError> {
        let QueueBatch { queue, memory, .. } = batch;
        let mut served = Served::default();
        let mut left = BYTES;
        self.more = false;
        for _ in 0..CHAINS {
            if self.taken.is_none() {
                if memory.pop(queue, &mut self.chain)? == 0 {
                    break;
                }
                served.taken += 1;
                self.taken = Some(0);
            } else if !self.is_translated(&memory) {
                break;
            }
            match self.take(&memory, &mut left)? {
                Left::Waits => break,
                Left::Done => self.complete(queue)?,
            }
            served.completed += 1;
        }
        served.interrupt = queue.publish()?;
        Ok(served)
    }

    fn is_translated(&self, memory: &QueueGuard<'_>) -> bool {
        self.chain.iter().all(|(_, readable, _)| memory.translates_chain(readable, &[]))
    }

    fn complete(&mut self, queue: &mut Queue) -> Result<(), QueueError> {
        self.taken = None;
        self.chain.chains().iter().try_for_each(|chain| queue.complete(chain.head, 0))
    }
}

impl QueueHandler for Transmit {
    fn serve(&mut self, queue: &mut MappedQueue) -> Result<Served, ServeError> {
        match self.serve_batch(queue.begin_batch()) {
            Err(ServeError::Queue(error)) => {
                self.taken = None;
                Err(queue.begin_batch().queue.fail(error).into())
            }
            served => served,
        }
    }

    fn register(&mut self, wakes: Option<&WakeSet>) -> io::Result<()> {
        WakeSource::register(&mut self.wakes, &self.port.room.event, wakes)
    }

    fn rest(&mut self, arm: bool) -> Rest {
        if arm && self.taken.is_some() {
            self.port.room.arm();
            if self.more || self.port.has_room() {
                return Rest::Serve;
            }
        }
        Rest::Sleep { kicks: self.taken.is_none() }
    }

    fn at_rest(&self) -> bool {
        self.taken.is_none()
    }

    /// Takes the rest of the output that is in flight, beyond the port's bound.
    fn drain(&mut self, queue: &mut MappedQueue, complete: bool) -> Served {
        let mut served = Served::default();
        let Some(taken) = self.taken.take() else { return served };
        if !complete {
            return served;
        }
        let QueueBatch { queue, memory, .. } = queue.begin_batch();
        if let Some((chain, readable, _)) = self.chain.iter().next() {
            let len = u64::from(chain.readable_len());
            let mut at = taken.max(len.saturating_sub(self.port.most() as u64));
            while at < len {
                let part = CHUNK.min(usize::try_from(len - at).unwrap_or(CHUNK));
                let bytes = &mut self.bytes[..part];
                // An address outside memory ends it.
                if memory.read_segments(readable, at, bytes, Access::READ).is_err() {
                    break;
                }
                self.port.force_output(bytes);
                at += part as u64;
            }
        }
        // A queue that has latched publishes nothing.
        if self.complete(queue).is_ok() {
            served.completed = 1;
            served.interrupt = queue.publish().unwrap_or(false);
        }
        served
    }
}
