//! Copies without checks: least cost of an access to a region or to pages.
use super::fixture::Fixture;
use super::ops::PAGE;
use super::shape::{IOVA, SIZE};
use super::timing::{MemoryAccess, Target};
use crate::BenchError;
use paravane_dma::Region;
use std::ptr::NonNull;
use std::sync::Arc;

/// Copies from and to the memory of one region.
pub(super) struct Memcpy {
    host: NonNull<u8>,
    _region: Arc<Region>,
}

// SAFETY: the region keeps the memory mapped. Threads of a benchmark use different parts of it.
unsafe impl Send for Memcpy {}

impl Memcpy {
    /// `None` if guest memory has several regions.
    pub(super) fn new(fixture: &Fixture) -> Option<Self> {
        match fixture.regions.as_slice() {
            [region] => Some(Self { host: region.host(), _region: Arc::clone(region) }),
            _ => None,
        }
    }
}

/// Direct access to a region.
pub(super) struct Raw(NonNull<u8>);

impl Raw {
    #[inline(always)]
    fn at(&self, addr: u64, len: usize) -> *mut u8 {
        debug_assert!(addr + len as u64 <= SIZE);
        self.0.as_ptr().wrapping_add(addr as usize)
    }
}

impl Target for Memcpy {
    type AccessGuard<'a> = Raw;

    #[inline(always)]
    fn enter(&mut self) -> Raw {
        Raw(self.host)
    }
}

impl MemoryAccess for Raw {
    #[inline(always)]
    fn read(&self, addr: u64, out: &mut [u8]) -> Result<(), BenchError> {
        // SAFETY: the addresses are inside the one region, which is mapped; no other thread writes
        // there meanwhile.
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

/// The pages of an address space that is scattered over one region, by number.
///
/// A translation without permissions, faults, changes or a log.
pub(super) struct Scattered {
    pages: Vec<*mut u8>,
    _region: Arc<Region>,
}

// SAFETY: as for `Memcpy`.
unsafe impl Send for Scattered {}

impl Scattered {
    /// `None` if guest memory has several regions.
    pub(super) fn new(fixture: &Fixture) -> Option<Self> {
        let Memcpy { host, _region } = Memcpy::new(fixture)?;
        let page = |gpa: u64| host.as_ptr().wrapping_add(gpa as usize);
        let pages = fixture
            .shape
            .map()
            .flat_map(|(_, gpa, size)| (0..size / PAGE).map(move |n| page(gpa + n * PAGE)))
            .collect();
        Some(Self { pages, _region })
    }
}

/// Access by page number.
pub(super) struct Pages<'a>(&'a [*mut u8]);

impl Target for Scattered {
    type AccessGuard<'a> = Pages<'a>;

    #[inline(always)]
    fn enter(&mut self) -> Pages<'_> {
        Pages(&self.pages)
    }
}

impl Pages<'_> {
    #[inline(always)]
    fn at(&self, addr: u64) -> *mut u8 {
        let offset = addr - IOVA;
        self.0[(offset / PAGE) as usize].wrapping_add((offset % PAGE) as usize)
    }

    /// Splits an access at page boundaries: host memory, bytes before, bytes.
    #[inline(always)]
    fn each(&self, addr: u64, len: usize, mut each: impl FnMut(*mut u8, usize, usize)) {
        let mut done = 0;
        while done < len {
            let at = addr + done as u64;
            let n = ((PAGE - at % PAGE) as usize).min(len - done);
            each(self.at(at), done, n);
            done += n;
        }
    }
}

impl MemoryAccess for Pages<'_> {
    #[inline(always)]
    fn read(&self, addr: u64, out: &mut [u8]) -> Result<(), BenchError> {
        let own = out.as_mut_ptr();
        // SAFETY: whole pages of the one region, which is mapped, and `done + n` is at most the
        // length of `out`.
        self.each(addr, out.len(), |host, done, n| unsafe {
            host.copy_to_nonoverlapping(own.add(done), n);
        });
        Ok(())
    }

    #[inline(always)]
    fn write(&self, addr: u64, data: &[u8]) -> Result<(), BenchError> {
        let own = data.as_ptr();
        // SAFETY: as above.
        self.each(addr, data.len(), |host, done, n| unsafe {
            host.copy_from_nonoverlapping(own.add(done), n);
        });
        Ok(())
    }

    #[inline(always)]
    fn read4(&self, addr: u64) -> Result<u32, BenchError> {
        // SAFETY: four bytes inside one page.
        Ok(unsafe { self.at(addr).cast::<u32>().read_unaligned() })
    }

    #[inline(always)]
    fn write4(&self, addr: u64, value: u32) -> Result<(), BenchError> {
        // SAFETY: as above.
        unsafe { self.at(addr).cast::<u32>().write_unaligned(value) };
        Ok(())
    }
}
