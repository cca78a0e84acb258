//! Entropy device (virtio specification, section 5.4): fills buffers.
//!
//! The bytes come from getrandom(2), by way of a buffer of the host. The device reads nothing from
//! the guest, and nothing is in flight when `serve` returns.
use crate::latency::Operation;
use crate::{Device, MappedQueue, QueueBatch, QueueHandler, ServeError, Served};
use paravane_dma::{Access, AccessGuard};
use paravane_ring::device::{Chain, QueueConfig};
use paravane_ring::{QueueError, Segment};
use paravane_spec::feature;
use rustix::rand::{GetRandomFlags, getrandom};
use std::io;

/// A request for entropy.
pub static ENTROPY: Operation = Operation::new(0, c"entropy", "Requests for entropy");

/// Most bytes for one request.
///
/// The specification allows a device to fill part of a buffer. Without a bound, a guest could keep
/// the host busy for as long as it likes with one descriptor.
pub const MAX_REQUEST: u32 = 64 * 1024;

/// Bytes for one call of getrandom(2).
const CHUNK: usize = 4096;

/// Largest queue size.
///
/// Drivers keep a few buffers in flight, but some VMMs make all queues of one size (User Mode Linux
/// and crosvm 256), and QEMU makes none larger than this.
const QUEUE_SIZE: u16 = 1024;

/// An entropy source that reads getrandom(2).
#[derive(Debug, Default)]
pub struct Rng {
    _private: (),
}

impl Rng {
    /// Creates the device.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }
}

impl Device for Rng {
    fn device_id(&self) -> u32 {
        paravane_spec::device_id::RNG
    }

    fn features(&self) -> u64 {
        feature::VERSION_1 | feature::RING_RESET | QueueConfig::SPLIT_FEATURES
    }

    fn queue_sizes(&self) -> &[u16] {
        &[QUEUE_SIZE]
    }

    fn read_config(&self, _offset: u32, out: &mut [u8]) {
        out.fill(0);
    }

    fn start_queue(&mut self, index: u16, _features: u64) -> io::Result<Box<dyn QueueHandler>> {
        if index != 0 {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("the entropy device has no queue {index}; it has 1"),
            ));
        }
        Ok(Box::new(Handler { bytes: Box::new([0; CHUNK]) }))
    }
}

struct Handler {
    bytes: Box<[u8; CHUNK]>,
}

impl Handler {
    /// Fills one buffer, and returns the number of bytes.
    fn fill(
        &mut self,
        memory: &AccessGuard<'_>,
        chain: &Chain,
        writable: &[Segment],
    ) -> Result<u32, ServeError> {
        if chain.readable_len() != 0 {
            let what = "an entropy request has a readable part";
            return Err(QueueError::Request { head: chain.head, what }.into());
        }
        let wanted = chain.writable_len().min(MAX_REQUEST);
        if wanted == 0 {
            return Err(QueueError::Request {
                head: chain.head,
                what: "an entropy request has no writable part",
            }
            .into());
        }
        let mut done = 0u32;
        while done < wanted {
            let room = CHUNK.min((wanted - done) as usize);
            let got = match getrandom(&mut self.bytes[..room], GetRandomFlags::empty()) {
                Ok(got) => got,
                Err(rustix::io::Errno::INTR) => continue,
                Err(error) => return Err(io::Error::from(error).into()),
            };
            // Ordered by the publication of the used index, which releases.
            memory.write_segments(
                writable,
                u64::from(done),
                &self.bytes[..got],
                Access::WRITE | Access::RELAXED,
            )?;
            done += got as u32;
        }
        Ok(wanted)
    }
}

impl QueueHandler for Handler {
    fn serve(&mut self, queue: &mut MappedQueue) -> Result<Served, ServeError> {
        let QueueBatch { queue, memory, chains, latency } = queue.begin_batch();
        let mut served = Served::default();
        let taken = memory.pop(queue, chains)?;
        served.taken = taken as u32;
        let measured = latency.take_batch(taken, queue.in_flight().into());
        for (chain, _, writable) in chains.iter() {
            match self.fill(&memory, chain, writable) {
                Ok(written) => queue.complete(chain.head, written)?,
                Err(ServeError::Queue(error)) => return Err(queue.fail(error).into()),
                Err(host) => return Err(host),
            }
            served.completed += 1;
        }
        latency.complete_now(&ENTROPY, measured, taken);
        served.interrupt = queue.publish()?;
        Ok(served)
    }

    fn drain(&mut self, _queue: &mut MappedQueue, _complete: bool) -> Served {
        Served::default()
    }
}

#[cfg(test)]
mod tests;
