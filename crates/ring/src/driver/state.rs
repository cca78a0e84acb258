//! The private state of a queue's driver side that does not depend on the layout.
//!
//! ```text
//!   add ---> next_avail ---- publish ---> published        (used buffers: see each layout)
//! ```
use super::buffer::Used;
use super::config::DriverConfig;
use super::memory::Memory;
use super::poll::Counting;
use super::shadow::{OrderedBatch, Shadow};
use crate::{DmaArea, QueueError};

/// State of a driver's queue.
///
/// Positions count in 64 bits: entries of the rings (split) or descriptors (packed).
///
/// Invariant, made by [`DriverState::open`] and relied on by every access to the shadow: `mask` is
/// one less than the size, which is a power of two; the shadow has `size` entries, and every
/// identifier in it is below `size`.
#[derive(Debug)]
pub(crate) struct DriverState<C> {
    pub(crate) mask: u16,
    pub(crate) event_idx: bool,
    pub(crate) in_order: bool,
    /// Whether the device knows that no interrupts are wanted.
    pub(crate) interrupts_off: bool,
    pub(crate) shadow: Shadow,
    /// Position of the next buffer or descriptor to make available.
    pub(crate) next_avail: u64,
    /// Everything before this position is visible to the device.
    pub(crate) published: u64,
    /// In order: the buffers that are coming back.
    pub(crate) batch: OrderedBatch,
    /// For pollers.
    pub(crate) count: C,
    /// First position for which the device was not asked about a kick.
    ///
    /// 2^64 - 1 if it was asked for all.
    unasked: u64,
    error: Option<QueueError>,
    /// Position at which both rings began.
    start: u64,
    memory: DmaArea,
}

impl<C: Counting> DriverState<C> {
    /// Nothing in flight, everything before `start` used.
    pub(super) fn open(layout: &DriverConfig, memory: &Memory, start: u16) -> Self {
        let start = u64::from(start);
        Self {
            mask: layout.size - 1,
            event_idx: layout.event_idx,
            in_order: layout.in_order,
            interrupts_off: false,
            shadow: Shadow::new(layout.size),
            next_avail: start,
            published: start,
            batch: OrderedBatch { end: start, ..OrderedBatch::default() },
            count: C::new(start),
            unasked: u64::MAX,
            error: None,
            start,
            memory: memory.whole,
        }
    }

    /// Number of descriptors.
    #[inline(always)]
    pub(crate) fn size(&self) -> u16 {
        self.mask + 1
    }

    /// The latched error.
    #[inline(always)]
    pub(crate) fn error(&self) -> Option<QueueError> {
        self.error
    }

    /// Position at which both rings began.
    pub(crate) fn start(&self) -> u64 {
        self.start
    }

    /// Whether anything was published.
    pub(super) fn in_use(&self) -> bool {
        self.published != self.start
    }

    /// The queue's memory.
    pub(super) fn memory(&self) -> DmaArea {
        self.memory
    }

    /// First position for which to ask the device now whether it wants a kick.
    ///
    /// The positions from `last` on were just published.
    #[inline(always)]
    pub(crate) fn ask(&mut self, last: u64) -> u64 {
        if self.unasked == u64::MAX { last } else { self.ask_late().unwrap_or(last) }
    }

    /// The device will be asked later for what was published from `last` on.
    #[inline(always)]
    pub(crate) fn postpone(&mut self, last: u64) {
        self.unasked = self.unasked.min(last);
    }

    /// From which position on the device was not asked; from now on it was.
    ///
    /// Not more than a ring: a device that wants a kick for a position has seen nothing from there
    /// on, and not more than a ring can have been published that he has not seen.
    #[cold]
    #[inline(never)]
    pub(crate) fn ask_late(&mut self) -> Option<u64> {
        let since = core::mem::replace(&mut self.unasked, u64::MAX);
        let ring = self.published.saturating_sub(self.size().into());
        (since != u64::MAX && self.error.is_none()).then(|| since.max(ring))
    }

    /// Error for a used buffer that is not with the device.
    #[cold]
    pub(crate) fn unknown(&self, id: u32) -> QueueError {
        let size = self.size().into();
        if id < size { QueueError::NotInFlight { id } } else { QueueError::DescIndex { index: id, size } }
    }

    /// Latches the first error, and returns it.
    ///
    /// The layout sees to it that nothing fits any more.
    pub(crate) fn latch(&mut self, error: QueueError) -> QueueError {
        self.count.close();
        *self.error.get_or_insert(error)
    }
}

/// Fills `out` from its front with what `pop` has, and returns how many those are.
///
/// An error comes alone: after others it has latched, and comes again.
#[inline(always)]
pub(crate) fn take_each(
    out: &mut [Used],
    mut pop: impl FnMut() -> Result<Option<Used>, QueueError>,
) -> Result<usize, QueueError> {
    let mut taken = 0;
    for place in out {
        match pop() {
            Ok(Some(used)) => *place = used,
            Ok(None) => break,
            Err(error) if taken == 0 => return Err(error),
            Err(_) => break,
        }
        taken += 1;
    }
    Ok(taken)
}
