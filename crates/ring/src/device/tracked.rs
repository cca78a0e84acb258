//! Queues with in-flight tracking; see [`crate::tracking`].
use super::config::QueueConfig;
use super::queue::Queue;
use crate::batch::Batch;
use crate::state::{State, StateError};
use crate::tracking::region::Region;
use crate::tracking::{Tracking, tracking_bytes};
use crate::translation::TranslationCheck;
use crate::{Area, ConfigError, Order, QueueError};
use alloc::boxed::Box;
use paravane_spec::feature;

impl QueueConfig {
    /// Bytes of the region for [`QueueConfig::resume_tracked`], aligned to 8.
    #[must_use]
    pub fn tracking_bytes(&self) -> usize {
        tracking_bytes(self.size(), self.packed())
    }

    /// As [`QueueConfig::resume`], with what is in flight tracked in `region`.
    ///
    /// In a region that is new (all zero) the tracking starts, at `state`. Else the queue takes up
    /// what the region and the ring tell, and `state` says no more than the layout: [`Queue::pop`]
    /// returns first what was in flight, and [`Queue::in_flight`] counts it from the start.
    ///
    /// # Errors
    /// As [`QueueConfig::resume`]; the region is too short, misaligned, corrupt, or contradicts the
    /// ring; or IN_ORDER is negotiated.
    ///
    /// # Safety
    /// As [`QueueConfig::activate`], and `region` must stay mapped as the areas do.
    pub unsafe fn resume_tracked<O: Order>(
        self,
        desc: Area,
        driver: Area,
        device: Area,
        state: State,
        region: Area,
    ) -> Result<Queue<O>, StateError> {
        let (part, needed, align) = ("tracking region", self.tracking_bytes(), 8);
        if region.len() < needed {
            return Err(ConfigError::Short { part, needed, given: region.len() }.into());
        }
        if !region.is_aligned(align) {
            return Err(ConfigError::Misaligned { part, addr: 0, align: align as u64 }.into());
        }
        if self.has(feature::IN_ORDER) {
            return Err(StateError::InOrder);
        }
        // SAFETY: the caller's promise is the same.
        let mut queue: Queue<O> = unsafe { self.activate_as(desc, driver, device) }?;
        // SAFETY: length and alignment were checked; the caller promises the mapping.
        let region = unsafe { Region::new(region, queue.size()) };
        let new = region.is_new()?;
        if new || state.layout() != queue.layout.name() {
            queue.move_to(state)?;
        }
        queue.tracking = Some(Box::new(Tracking::new(region, &mut queue.layout, new)?));
        queue.layout.close_fast_paths();
        Ok(queue)
    }
}

impl<O: Order> Queue<O> {
    /// [`Queue::pop`] and [`Queue::pop_translated`] with tracking.
    #[cold]
    pub(super) fn pop_tracked(
        &mut self,
        batch: &mut Batch,
        check: &mut impl TranslationCheck,
    ) -> Result<usize, QueueError> {
        match &mut self.tracking {
            Some(tracking) => tracking.pop(&mut self.layout, batch, check),
            None => Ok(0),
        }
    }

    /// [`Queue::publish`] off the fast paths.
    #[inline(never)]
    pub(super) fn publish_slowly(&mut self) -> Result<bool, QueueError> {
        if let Some(error) = self.error() {
            return Err(error);
        }
        match &mut self.tracking {
            Some(tracking) => tracking.publish(&mut self.layout),
            None => self.layout.publish(),
        }
    }
}
