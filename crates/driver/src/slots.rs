//! Slots that are with the device, by buffer identifier.
use alloc::vec::Vec;
use paravane_ring::QueueError;
use paravane_ring::driver::BufferId;

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
