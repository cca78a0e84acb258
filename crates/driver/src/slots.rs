//! Slots of memory, and which of them are with the device, by buffer identifier.
use crate::{DmaArea, DriverError, Pool};
use alloc::vec::Vec;
use paravane_ring::driver::BufferId;
use paravane_ring::{QueueError, Segment};

/// Slots begin at a cache line, so that they do not disturb one another.
pub(crate) const ALIGN: usize = 64;

/// The slots of a queue, all of one size.
#[derive(Debug)]
pub(crate) struct Slots {
    pub(crate) memory: Vec<DmaArea>,
    pub(crate) in_flight: SlotTable,
}

impl Slots {
    /// `count` slots of `bytes`, for a queue of `size` descriptors.
    ///
    /// # Errors
    /// There is too little memory.
    pub(crate) fn new(count: u16, bytes: usize, size: u16, pool: &mut Pool) -> Result<Self, DriverError> {
        let mut memory = Vec::with_capacity(count.into());
        for _ in 0..count {
            memory.push(pool.take(bytes, ALIGN)?);
        }
        Ok(Self { memory, in_flight: SlotTable::new(size) })
    }

    /// The first `len` bytes of a slot.
    pub(crate) fn segment(&self, slot: u16, len: usize) -> Segment {
        Segment { addr: self.memory[usize::from(slot)].addr, len: len as u32 }
    }

    /// Bytes of a slot.
    pub(crate) fn len(&self, slot: u16) -> usize {
        self.memory[usize::from(slot)].area.len()
    }
}

/// The slot of each buffer in flight.
#[derive(Debug)]
pub(crate) struct SlotTable(Vec<Option<u16>>);

impl SlotTable {
    /// No slots in flight, for a queue of `size` descriptors.
    pub(crate) fn new(size: u16) -> Self {
        Self(alloc::vec![None; size.into()])
    }

    /// The buffer `id`, which was just added, is that of `slot`.
    ///
    /// # Errors
    /// The identifier is not below the queue's size.
    pub(crate) fn insert(&mut self, BufferId(id): BufferId, slot: u16) -> Result<(), QueueError> {
        *self.0.get_mut(usize::from(id)).ok_or(QueueError::NotInFlight { id: id.into() })? = Some(slot);
        Ok(())
    }

    /// The slot of the buffer `id`, which the device has used.
    ///
    /// # Errors
    /// It is not in flight.
    pub(crate) fn remove(&mut self, BufferId(id): BufferId) -> Result<u16, QueueError> {
        let slot = self.0.get_mut(usize::from(id)).and_then(Option::take);
        slot.ok_or(QueueError::NotInFlight { id: id.into() })
    }
}
