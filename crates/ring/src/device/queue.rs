//! A live queue.
use super::config::QueueConfig;
use super::layout::Layout;
use crate::batch::Batch;
use crate::device_ring::{DeviceRing, Paths};
use crate::table_memory::{Copied, TableMemory};
use crate::tracking::Tracking;
use crate::translation::{AllTranslated, TranslationCheck};
use crate::{Area, ConfigError, Order, QueueError, Smp, packed, split};
use alloc::boxed::Box;
use core::any::Any;
use paravane_spec::feature;

impl QueueConfig {
    /// Takes the queue into use. From here on nothing of the configuration can change.
    ///
    /// # Errors
    /// An area is shorter than [`QueueConfig::areas`] asked for, or misaligned in host memory; or
    /// ORDER_PLATFORM was negotiated, which needs [`QueueConfig::activate_as`].
    ///
    /// # Safety
    /// Each area must be the memory that [`QueueConfig::areas`] asked for and stay mapped until the
    /// queue has been dropped.
    pub unsafe fn activate(self, desc: Area, driver: Area, device: Area) -> Result<Queue, ConfigError> {
        // SAFETY: the caller's promise is the same.
        unsafe { self.activate_as(desc, driver, device) }
    }

    /// As [`QueueConfig::activate`], with barriers of the caller's choice.
    ///
    /// # Errors
    /// As [`QueueConfig::activate`], and ORDER_PLATFORM is refused unless `O` is
    /// [`crate::Platform`].
    ///
    /// # Safety
    /// As [`QueueConfig::activate`].
    pub unsafe fn activate_as<O: Order>(
        self,
        desc: Area,
        driver: Area,
        device: Area,
    ) -> Result<Queue<O>, ConfigError> {
        // SAFETY: the caller's promise is the same.
        unsafe { self.activate_at(desc, driver, device, 0) }
    }

    /// As [`QueueConfig::activate_as`], with both sides at position `start`.
    ///
    /// Counted in buffers of a split queue; in descriptors of a packed one, less than twice its
    /// size.
    ///
    /// # Safety
    /// As [`QueueConfig::activate`].
    pub(crate) unsafe fn activate_at<O: Order>(
        self,
        desc: Area,
        driver: Area,
        device: Area,
        start: u16,
    ) -> Result<Queue<O>, ConfigError> {
        if self.has(feature::ORDER_PLATFORM) && !O::PLATFORM {
            return Err(ConfigError::Features(feature::ORDER_PLATFORM));
        }
        let areas = [desc, driver, device];
        self.check(&areas)?;
        let size = self.size();
        let indirect = self.has(feature::INDIRECT_DESC);
        let event_idx = self.has(feature::EVENT_IDX);
        let in_order = self.has(feature::IN_ORDER);
        // SAFETY: the caller promises the mapping; `new` checked the size, `check` lengths and
        // alignment.
        let layout = unsafe {
            if self.packed() {
                let start = packed::Position::START.advance(start.into(), size);
                Layout::Packed(packed::device::Ring::new(areas, size, indirect, event_idx, in_order, start))
            } else {
                Layout::Split(split::device::Ring::new(areas, size, indirect, event_idx, in_order, start))
            }
        };
        Ok(Queue { layout, tracking: None, owner: None })
    }
}

/// A live queue, device side. `O` is how strong its barriers are.
///
/// With IN_ORDER completions may come in any order: the queue holds them back until they are in
/// order.
#[derive(Debug)]
pub struct Queue<O: Order = Smp> {
    pub(super) layout: Layout<O>,
    /// In-flight tracking, if it was asked for.
    pub(super) tracking: Option<Box<Tracking>>,
    /// Keeps the areas mapped.
    ///
    /// Dropped last: fields are dropped in the order of their declaration.
    owner: Option<Box<dyn Any + Send + Sync>>,
}

/// Calls the ring, whatever its layout.
macro_rules! ring {
    ($queue:expr, $ring:ident => $call:expr) => {
        match $queue.layout {
            Layout::Split(ref $ring) => $call,
            Layout::Packed(ref $ring) => $call,
        }
    };
    (mut $queue:expr, $ring:ident => $call:expr) => {
        match $queue.layout {
            Layout::Split(ref mut $ring) => $call,
            Layout::Packed(ref mut $ring) => $call,
        }
    };
}

impl<O: Order> Queue<O> {
    /// Keeps `owner` while the queue lives; dropped after the last access.
    ///
    /// With an owner that keeps the areas mapped, the promise of [`QueueConfig::activate`] holds
    /// wherever the queue goes: `&mut Queue` may be handed to safe code, which can move and swap
    /// queues. A second owner is kept beside the first.
    #[must_use]
    pub fn keeping(mut self, owner: impl Send + Sync + 'static) -> Self {
        self.owner = Some(match self.owner.take() {
            Some(first) => Box::new((first, owner)),
            None => Box::new(owner),
        });
        self
    }

    /// Whether in-flight tracking is on; see [`QueueConfig::resume_tracked`].
    #[must_use]
    pub fn is_tracked(&self) -> bool {
        self.tracking.is_some()
    }

    /// Clears `batch`, takes available chains into it, and returns their number.
    ///
    /// It takes as many as there are, up to the room of the batch. `fetch` copies an indirect table
    /// out of the device's address space: address and destination, `false` if that memory cannot be
    /// read. A chain whose segments do not fit in the rest of the batch is left for the next call;
    /// an empty batch has room for any chain.
    ///
    /// Where tables need not be copied, [`Queue::pop_in_place`] takes a third of the time.
    ///
    /// # Errors
    /// The first malformed chain or index latches the queue. Chains before it in the same call are
    /// lost with the queue.
    #[inline]
    pub fn pop(
        &mut self,
        batch: &mut Batch,
        fetch: impl FnMut(u64, &mut [u8]) -> bool,
    ) -> Result<usize, QueueError> {
        self.pop_in_place(batch, Copied(fetch))
    }

    /// As [`Queue::pop`]; indirect tables are read in place, where `memory` knows the place.
    ///
    /// # Errors
    /// As [`Queue::pop`].
    #[inline]
    pub fn pop_in_place(
        &mut self,
        batch: &mut Batch,
        mut memory: impl TableMemory,
    ) -> Result<usize, QueueError> {
        ring!(mut self, ring => if ring.paths() < Paths::Slow {
            ring.pop_any(batch, &mut memory)?;
            return Ok(batch.count());
        });
        self.pop_slowly(batch, memory)
    }

    /// [`Queue::pop_in_place`] off the fast paths.
    #[inline(never)]
    fn pop_slowly(&mut self, batch: &mut Batch, mut memory: impl TableMemory) -> Result<usize, QueueError> {
        if self.tracking.is_some() {
            return self.pop_tracked(batch, &mut AllTranslated(memory));
        }
        ring!(mut self, ring => ring.pop(batch, &mut memory))
    }

    /// As [`Queue::pop`], for a device behind an IOMMU.
    ///
    /// Stops before the first chain that `check` refuses. That chain and those after it stay in the
    /// ring; the next call begins with it.
    ///
    /// # Errors
    /// As [`Queue::pop`].
    pub fn pop_translated(
        &mut self,
        batch: &mut Batch,
        check: &mut impl TranslationCheck,
    ) -> Result<usize, QueueError> {
        if self.tracking.is_some() {
            return self.pop_tracked(batch, check);
        }
        ring!(mut self, ring => ring.pop_translated(batch, check))
    }

    /// Stages the completion of a chain; the driver sees it after [`Queue::publish`].
    ///
    /// `written` is the number of bytes that the device has written to the chain's writable part.
    ///
    /// # Errors
    /// `head` is not in flight, or the queue has latched.
    #[inline(always)]
    pub fn complete(&mut self, head: u16, written: u32) -> Result<(), QueueError> {
        ring!(mut self, ring => match ring.paths() {
            Paths::Fast => return ring.complete(head, written),
            Paths::InOrder => return ring.complete_one_in_order(head, written),
            Paths::Slow => {}
        });
        self.complete_slowly(head, written)
    }

    /// [`Queue::complete`] off the fast paths.
    #[inline(never)]
    fn complete_slowly(&mut self, head: u16, written: u32) -> Result<(), QueueError> {
        ring!(mut self, ring => ring.complete(head, written)?);
        if let Some(tracking) = &mut self.tracking {
            tracking.completed(head);
        }
        Ok(())
    }

    /// [`Queue::complete`] for many: chains and the bytes written to each.
    ///
    /// Cheaper than one call a chain.
    ///
    /// # Errors
    /// One is not in flight (those before it were staged), or the queue has latched.
    #[inline]
    pub fn complete_all(&mut self, chains: impl IntoIterator<Item = (u16, u32)>) -> Result<(), QueueError> {
        ring!(mut self, ring => match ring.paths() {
            Paths::Fast => return ring.complete_all(chains),
            Paths::InOrder => return ring.complete_in_order(chains),
            Paths::Slow => {}
        });
        chains.into_iter().try_for_each(|(head, written)| self.complete_slowly(head, written))
    }

    /// Prefetches the cache lines for the next `chains` completions, without waiting.
    ///
    /// This pays for a device that works on memory meanwhile, with a driver on another processor.
    #[inline]
    pub fn expect_completions(&self, chains: usize) {
        ring!(self, ring => ring.expect_completions(chains));
    }

    /// Publishes all staged completions with one store.
    ///
    /// Returns whether the driver wants an interrupt. Without staged completions it does nothing
    /// and returns `false`.
    ///
    /// # Errors
    /// The queue has latched.
    #[inline(always)]
    pub fn publish(&mut self) -> Result<bool, QueueError> {
        ring!(mut self, ring => if ring.paths() < Paths::Slow {
            return ring.publish();
        });
        self.publish_slowly()
    }

    /// Asks the driver not to kick while the device is at work.
    ///
    /// A hint; kicks may still come.
    #[inline]
    pub fn disable_kicks(&mut self) {
        ring!(mut self, ring => ring.disable_kicks());
    }

    /// Asks the driver to kick at the next available buffer, then looks once more.
    ///
    /// `true`: more is available, do not sleep (kicks stay armed). `false`: the next buffer brings
    /// a kick.
    ///
    /// # Errors
    /// The available index is impossible, or the queue has latched.
    #[inline]
    pub fn arm_kicks(&mut self) -> Result<bool, QueueError> {
        ring!(mut self, ring => ring.arm_kicks())
    }

    /// Whether a buffer seems available, for a device that polls.
    ///
    /// `false` if the queue has latched.
    ///
    /// It changes nothing and asks for no kick, so a device must not sleep on the answer: see
    /// [`Queue::arm_kicks`].
    #[inline]
    #[must_use]
    pub fn has_available(&self) -> bool {
        ring!(self, ring => ring.has_available())
    }

    /// Latches an error that the device found in a chain.
    ///
    /// Returns the error that the queue now has (the first).
    pub fn fail(&mut self, error: QueueError) -> QueueError {
        ring!(mut self, ring => ring.latch(error))
    }

    /// The latched error.
    #[must_use]
    pub fn error(&self) -> Option<QueueError> {
        ring!(self, ring => ring.error())
    }

    /// Number of descriptors.
    #[must_use]
    pub fn size(&self) -> u16 {
        ring!(self, ring => ring.size())
    }

    /// Chains popped and not yet completed.
    #[must_use]
    pub fn in_flight(&self) -> u16 {
        ring!(self, ring => ring.in_flight())
    }
}
