//! The memory that a driver's indirect tables lie in.
use crate::{Area, DmaArea};

/// Gives a queue access to indirect tables, by device address.
///
/// A table that lies in one piece of host memory is read in place, each descriptor once. Any other
/// is copied.
pub trait TableMemory {
    /// Host memory of the `len` bytes at `addr`.
    ///
    /// `None`: they do not lie in one piece, or cannot be read; [`TableMemory::copy`] is asked then.
    /// The queue uses the result only until it returns.
    fn in_place(&mut self, addr: u64, len: u32) -> Option<Area>;

    /// Copies the bytes at `addr`; `false` if they cannot be read.
    fn copy(&mut self, addr: u64, table: &mut [u8]) -> bool;
}

impl<M: TableMemory> TableMemory for &mut M {
    #[inline(always)]
    fn in_place(&mut self, addr: u64, len: u32) -> Option<Area> {
        M::in_place(self, addr, len)
    }

    #[inline(always)]
    fn copy(&mut self, addr: u64, table: &mut [u8]) -> bool {
        M::copy(self, addr, table)
    }
}

/// Tables in this area; its address is the first one.
impl TableMemory for DmaArea {
    #[inline(always)]
    fn in_place(&mut self, addr: u64, len: u32) -> Option<Area> {
        let offset = usize::try_from(addr.checked_sub(self.addr)?).ok()?;
        self.area.slice(offset, len as usize)
    }

    fn copy(&mut self, addr: u64, table: &mut [u8]) -> bool {
        // Those that do not lie inside cannot be read.
        let offset = addr.checked_sub(self.addr).and_then(|offset| usize::try_from(offset).ok());
        offset.is_some_and(|offset| self.area.read(offset, table))
    }
}

/// There are no tables.
pub(crate) struct NoTables;

impl TableMemory for NoTables {
    fn in_place(&mut self, _addr: u64, _len: u32) -> Option<Area> {
        None
    }

    fn copy(&mut self, _addr: u64, _table: &mut [u8]) -> bool {
        false
    }
}

/// Tables are copied, by a closure.
pub(crate) struct Copied<F>(pub(crate) F);

impl<F: FnMut(u64, &mut [u8]) -> bool> TableMemory for Copied<F> {
    #[inline(always)]
    fn in_place(&mut self, _addr: u64, _len: u32) -> Option<Area> {
        None
    }

    #[inline(always)]
    fn copy(&mut self, addr: u64, table: &mut [u8]) -> bool {
        (self.0)(addr, table)
    }
}
