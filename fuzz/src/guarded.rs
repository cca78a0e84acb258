//! Shared memory in which an invalid access is a segmentation fault.
use paravane_ring::Area;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::io;
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};
use std::ffi::c_void;
use std::os::fd::OwnedFd;
use std::ptr::{NonNull, null_mut};

const PAGE: usize = 4096;

/// A memory file mapped twice: read-write, and read-only.
///
/// An access beyond either end, or a write through the second mapping, is a segmentation fault and
/// thus a finding.
pub(crate) struct Guarded {
    len: usize,
    open: Mapping,
    sealed: Mapping,
}

impl Guarded {
    /// `len` zero bytes, rounded up to a multiple of 4096, before an inaccessible page.
    pub(crate) fn new(len: usize) -> io::Result<Self> {
        let len = len.max(1).next_multiple_of(PAGE);
        let file = memfd_create("hostile-peer", MemfdFlags::CLOEXEC)?;
        ftruncate(&file, len as u64)?;
        let open = Mapping::new(&file, len, ProtFlags::READ | ProtFlags::WRITE)?;
        let sealed = Mapping::new(&file, len, ProtFlags::READ)?;
        Ok(Self { len, open, sealed })
    }

    /// The memory, read-write. All its users must be dropped before `self`.
    pub(crate) fn area(&self) -> Area {
        // SAFETY: mapped until `self` is dropped, after its users; nothing makes references.
        unsafe { Area::new(self.open.memory, self.len) }
    }

    /// The same memory, read-only.
    pub(crate) fn sealed(&self) -> Area {
        // SAFETY: as above, except that a write faults. `Area` requires writable memory to exclude
        // faults; here a fault is the wanted result of a write.
        unsafe { Area::new(self.sealed.memory, self.len) }
    }
}

/// A mapping between two inaccessible pages.
struct Mapping {
    start: NonNull<c_void>,
    all: usize,
    memory: NonNull<u8>,
}

impl Mapping {
    fn new(file: &OwnedFd, len: usize, prot: ProtFlags) -> io::Result<Self> {
        let all = len + 2 * PAGE;
        // SAFETY: a new inaccessible mapping, at an address that the kernel chooses.
        let start = unsafe { mmap_anonymous(null_mut(), all, ProtFlags::empty(), MapFlags::PRIVATE) }?;
        // SAFETY: the range is inside the new mapping, which is unused.
        let memory =
            unsafe { mmap(start.byte_add(PAGE), len, prot, MapFlags::SHARED | MapFlags::FIXED, file, 0)? };
        match (NonNull::new(start), NonNull::new(memory.cast())) {
            (Some(start), Some(memory)) => Ok(Self { start, all, memory }),
            _ => Err(io::Errno::NOMEM),
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped in `new` with this length; users of the areas are dropped, as `Guarded`
        // requires. It cannot fail with these arguments.
        let _ = unsafe { munmap(self.start.as_ptr(), self.all) };
    }
}

// SAFETY: a mapping is only an address range; all accesses go through `Area`.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}
