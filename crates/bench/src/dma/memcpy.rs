//! Copying without asking anyone: what an access costs at least.
use super::timing::{Reach, Target};
use super::world::{SIZE, World};
use crate::BenchError;
use paravane_dma::Region;
use std::ptr::NonNull;
use std::sync::Arc;

/// The memory of one region.
pub(super) struct Memcpy {
    host: NonNull<u8>,
    _region: Arc<Region>,
}

// SAFETY: the pointer is to memory that the region keeps mapped in this process; a race between two copies of it is one
// between threads of a benchmark that use different parts.
unsafe impl Send for Memcpy {}

impl Memcpy {
    /// None if memory is in several pieces.
    pub(super) fn new(world: &World) -> Option<Self> {
        match world.regions.as_slice() {
            [region] => Some(Self { host: region.host(), _region: Arc::clone(region) }),
            _ => None,
        }
    }
}

/// Nothing to open.
pub(super) struct Raw(NonNull<u8>);

impl Raw {
    #[inline(always)]
    fn at(&self, addr: u64, len: usize) -> *mut u8 {
        debug_assert!(addr + len as u64 <= SIZE);
        self.0.as_ptr().wrapping_add(addr as usize)
    }
}

impl Target for Memcpy {
    type Door<'a> = Raw;

    #[inline(always)]
    fn open(&mut self) -> Raw {
        Raw(self.host)
    }
}

impl Reach for Raw {
    #[inline(always)]
    fn read(&self, addr: u64, out: &mut [u8]) -> Result<(), BenchError> {
        // SAFETY: the benchmark's addresses are inside the one region, which is mapped; nobody writes there meanwhile.
        unsafe { self.at(addr, out.len()).copy_to_nonoverlapping(out.as_mut_ptr(), out.len()) };
        Ok(())
    }

    #[inline(always)]
    fn write(&self, addr: u64, data: &[u8]) -> Result<(), BenchError> {
        // SAFETY: as above.
        unsafe { self.at(addr, data.len()).copy_from_nonoverlapping(data.as_ptr(), data.len()) };
        Ok(())
    }

    #[inline(always)]
    fn read4(&self, addr: u64) -> Result<u32, BenchError> {
        // SAFETY: as above.
        Ok(unsafe { self.at(addr, 4).cast::<u32>().read_unaligned() })
    }

    #[inline(always)]
    fn write4(&self, addr: u64, value: u32) -> Result<(), BenchError> {
        // SAFETY: as above.
        unsafe { self.at(addr, 4).cast::<u32>().write_unaligned(value) };
        Ok(())
    }
}
