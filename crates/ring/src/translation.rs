//! Chains behind an IOMMU whose translations are not known yet.
//!
//! ```text
//!   pop_translated:  next chain --walk--> its table: fetch --> Done | Never: an error | Later --+
//!                                        its segments: reaches --> yes: taken | no ------------+--> left in the ring
//! ```
//! A chain that is left is as if it had come later: no position moves, nothing is marked in flight
//! or tracked.
use crate::batch::Batch;
use crate::table_memory::TableMemory;
use crate::{Area, QueueError, Segment};

/// Result of copying an indirect table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fetched {
    /// It was copied.
    Done,
    /// Its translation is not known yet.
    Later,
    /// There is no such memory, or it may not be read: the queue latches.
    Never,
}

/// Access of a device to memory whose translations arrive over time.
pub trait TranslationCheck {
    /// Whether a translation can be missing. If not, chains are taken many at a time.
    const CHECKS: bool = true;

    /// As [`TableMemory::in_place`]; asked only if no translation can be missing.
    fn in_place(&mut self, _addr: u64, _len: u32) -> Option<Area> {
        None
    }

    /// Copies an indirect table out of the device's address space.
    fn fetch(&mut self, addr: u64, table: &mut [u8]) -> Fetched;

    /// Whether all segments of a chain are translated.
    ///
    /// `false`: it stays in the ring. The caller pops again once a missing translation has arrived.
    fn translates(&mut self, readable: &[Segment], writable: &[Segment]) -> bool;
}

/// All memory is translated all the time.
pub(crate) struct AllTranslated<M>(pub(crate) M);

impl<M: TableMemory> TranslationCheck for AllTranslated<M> {
    const CHECKS: bool = false;

    #[inline(always)]
    fn in_place(&mut self, addr: u64, len: u32) -> Option<Area> {
        self.0.in_place(addr, len)
    }

    fn fetch(&mut self, addr: u64, table: &mut [u8]) -> Fetched {
        if self.0.copy(addr, table) { Fetched::Done } else { Fetched::Never }
    }

    fn translates(&mut self, _readable: &[Segment], _writable: &[Segment]) -> bool {
        true
    }
}

/// Tables behind a check that never refuses.
pub(crate) struct Unchecked<'a, C>(pub(crate) &'a mut C);

impl<C: TranslationCheck> TableMemory for Unchecked<'_, C> {
    #[inline(always)]
    fn in_place(&mut self, addr: u64, len: u32) -> Option<Area> {
        self.0.in_place(addr, len)
    }

    #[inline(always)]
    fn copy(&mut self, addr: u64, table: &mut [u8]) -> bool {
        self.0.fetch(addr, table) == Fetched::Done
    }
}

/// Walks one chain into the batch, unless it is not translated.
///
/// `walk` is given a way to fetch tables. `None`: the chain stays in the ring.
pub(crate) fn walk_translated<T>(
    batch: &mut Batch,
    check: &mut impl TranslationCheck,
    walk: impl FnOnce(&mut Batch, &mut dyn FnMut(u64, &mut [u8]) -> bool) -> Result<Option<T>, QueueError>,
) -> Result<Option<T>, QueueError> {
    let mut later = false;
    let walked = walk(batch, &mut |addr, table| {
        let fetched = check.fetch(addr, table);
        later |= fetched == Fetched::Later;
        fetched == Fetched::Done
    });
    match walked {
        // Nothing was added.
        Err(_) if later => Ok(None),
        Ok(Some(walked)) => {
            let (readable, writable) = batch.last();
            if check.translates(readable, writable) {
                return Ok(Some(walked));
            }
            batch.remove_last();
            Ok(None)
        }
        other => other,
    }
}
