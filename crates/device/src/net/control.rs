//! Serves the control queue: pairs in use, announcements (section 5.1.6.5).
use super::back_end::BackEnd;
use super::operation::OTHER;
use crate::callback::Callback;
use crate::{MappedQueue, QueueBatch, QueueHandler, ServeError, Served, address_error};
use paravane_dma::{Access, AccessGuard};
use paravane_ring::device::Chain;
use paravane_ring::{QueueError, Segment};
use paravane_spec::net::{
    ANNOUNCE_ACK, CLASS_ANNOUNCE, CLASS_MQ, CTRL_ERR, CTRL_OK, Command, F_GUEST_ANNOUNCE, F_MQ,
    MQ_VQ_PAIRS_SET,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};

/// Bytes before a command's data.
const COMMAND: u32 = size_of::<Command>() as u32;

pub(super) struct Control<B> {
    back_end: Arc<B>,
    multiqueue: bool,
    announce: bool,
    commanded: Arc<Commanded>,
}

/// What the driver has set.
#[derive(Debug, Default)]
pub(super) struct Commanded {
    /// Number of pairs; 0: none.
    pub(super) pairs: AtomicU16,
    /// Called when it changes.
    pub(super) told: Callback<dyn Fn() + Send + Sync>,
}

/// Has the back end use so many queue pairs. Returns whether it does.
pub(super) fn use_pairs(back_end: &impl BackEnd, pairs: u16) -> bool {
    let done = back_end.use_pairs(pairs);
    if let Err(error) = &done {
        tracing::warn!(pairs, %error, "the back end cannot change its number of queue pairs");
    }
    done.is_ok()
}

impl<B: BackEnd> Control<B> {
    pub(super) fn new(back_end: Arc<B>, features: u64, commanded: Arc<Commanded>) -> Self {
        let has = |feature| features & feature != 0;
        Self { back_end, multiqueue: has(F_MQ), announce: has(F_GUEST_ANNOUNCE), commanded }
    }

    /// Executes one command and returns its answer.
    fn execute(
        &self,
        memory: &AccessGuard<'_>,
        (chain, readable, writable): (&Chain, &[Segment], &[Segment]),
    ) -> Result<u8, QueueError> {
        let malformed = |what| QueueError::Request { head: chain.head, what };
        if chain.readable_len() < COMMAND {
            return Err(malformed("the readable part is shorter than a command"));
        }
        if writable.is_empty() {
            return Err(malformed("there is no writable byte for the answer"));
        }
        let mut bytes = [0; COMMAND as usize];
        memory.read_segments(readable, 0, &mut bytes, Access::READ).map_err(address_error)?;
        let Command { class, command } = zerocopy::transmute!(bytes);
        if (class, command) == (CLASS_ANNOUNCE, ANNOUNCE_ACK) && self.announce {
            return Ok(CTRL_OK);
        }
        let mut pairs = [0; 2];
        if (class, command) != (CLASS_MQ, MQ_VQ_PAIRS_SET)
            || !self.multiqueue
            || chain.readable_len() < COMMAND + pairs.len() as u32
        {
            return Ok(CTRL_ERR);
        }
        memory.read_segments(readable, COMMAND.into(), &mut pairs, Access::READ).map_err(address_error)?;
        let pairs = u16::from_le_bytes(pairs);
        if pairs == 0 || pairs > self.back_end.pairs() {
            return Ok(CTRL_ERR);
        }
        if !use_pairs(&*self.back_end, pairs) {
            return Ok(CTRL_ERR);
        }
        // Release: `told` has another thread load it (Acquire, in `Net::commanded_pairs`).
        self.commanded.pairs.store(pairs, Ordering::Release);
        if let Some(told) = self.commanded.told.get() {
            told();
        }
        Ok(CTRL_OK)
    }
}

impl<B: BackEnd> QueueHandler for Control<B> {
    fn serve(&mut self, queue: &mut MappedQueue) -> Result<Served, ServeError> {
        let QueueBatch { queue, memory, chains, latency } = queue.begin_batch();
        let taken = memory.pop(queue, chains)?;
        let measured = latency.take_batch(taken, queue.in_flight().into());
        for (chain, readable, writable) in chains.iter() {
            let answered = self.execute(&memory, (chain, readable, writable)).and_then(|answer| {
                memory.write_segments(writable, 0, &[answer], Access::WRITE).map_err(address_error)?;
                queue.complete(chain.head, 1)
            });
            answered.map_err(|error| queue.fail(error))?;
        }
        latency.complete_now(&OTHER, measured, taken);
        Ok(Served { taken: taken as u32, completed: taken as u32, interrupt: queue.publish()? })
    }

    fn drain(&mut self, _queue: &mut MappedQueue, _complete: bool) -> Served {
        Served::default()
    }
}
