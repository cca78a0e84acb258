//! Serves the receive queue: input of the port, into buffers of the guest.
//!
//! Buffers are popped only when there is input for them, so a waiting queue has nothing in flight.
use super::port::Port;
use crate::{MappedQueue, QueueBatch, QueueHandler, Rest, ServeError, Served, WakeSet, WakeSource};
use paravane_dma::Access;
use paravane_ring::QueueError;
use paravane_ring::device::Batch;
use std::io;
use std::sync::Arc;

/// Most buffers of one turn.
const BUFFERS: u32 = 64;
/// Bytes of one copy.
const CHUNK: usize = 4096;

pub(super) struct Receive {
    port: Arc<Port>,
    buffer: Batch,
    /// Input waits for buffers.
    starved: bool,
    wakes: Option<WakeSource>,
    bytes: Box<[u8; CHUNK]>,
}

impl Receive {
    pub(super) fn new(port: Arc<Port>) -> Self {
        Self { port, buffer: Batch::new(1), starved: false, wakes: None, bytes: Box::new([0; CHUNK]) }
    }

    fn serve_batch(&mut self, batch: QueueBatch<'_>) -> Result<Served, ServeError> {
        let QueueBatch { queue, memory, .. } = batch;
        let mut served = Served::default();
        self.starved = false;
        for _ in 0..BUFFERS {
            let waiting = self.port.peek_input(&mut self.bytes[..]);
            if waiting == 0 {
                break;
            }
            if memory.pop(queue, &mut self.buffer)? == 0 {
                self.starved = true;
                break;
            }
            served.taken += 1;
            let Some((buffer, readable, writable)) = self.buffer.iter().next() else { break };
            let room = buffer.writable_len();
            let what = match (readable.is_empty(), room) {
                (false, _) => Some("a buffer for input has a readable part"),
                (true, 0) => Some("a buffer for input has no writable part"),
                (true, _) => None,
            };
            if let Some(what) = what {
                return Err(QueueError::Request { head: buffer.head, what }.into());
            }
            let len = waiting.min(room as usize);
            // Relaxed: ordered by the publication of the used index, which releases.
            memory.write_segments(writable, 0, &self.bytes[..len], Access::WRITE | Access::RELAXED)?;
            queue.complete(buffer.head, len as u32)?;
            self.port.remove_input(len);
            served.completed += 1;
        }
        served.interrupt = queue.publish()?;
        Ok(served)
    }
}

impl QueueHandler for Receive {
    fn serve(&mut self, queue: &mut MappedQueue) -> Result<Served, ServeError> {
        match self.serve_batch(queue.begin_batch()) {
            Err(ServeError::Queue(error)) => Err(queue.begin_batch().queue.fail(error).into()),
            served => served,
        }
    }

    fn register(&mut self, wakes: Option<&WakeSet>) -> io::Result<()> {
        WakeSource::register(&mut self.wakes, &self.port.arrived.event, wakes)
    }

    fn rest(&mut self, arm: bool) -> Rest {
        if arm && !self.starved {
            self.port.arrived.arm();
            if self.port.has_input() {
                return Rest::Serve;
            }
        }
        Rest::Sleep { kicks: self.starved }
    }

    fn drain(&mut self, _queue: &mut MappedQueue, _complete: bool) -> Served {
        Served::default()
    }
}
