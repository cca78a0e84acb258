//! Shared memory that kills whoever leaves it.
use paravane_ring::Area;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::io;
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};
use std::ffi::c_void;
use std::os::fd::OwnedFd;
use std::ptr::{NonNull, null_mut};

const PAGE: usize = 4096;

/// One file of memory, mapped twice: for all, and for reading only. An access beyond either end, and a write
/// through the second mapping, is a segmentation fault: the end of the process, and a finding.
pub(crate) struct Guarded {
    len: usize,
    open: Mapping,
    sealed: Mapping,
}

impl Guarded {
    /// `len` zero bytes, a multiple of 4096; they end at a page that is not there.
    pub(crate) fn new(len: usize) -> io::Result<Self> {
        let len = len.max(1).next_multiple_of(PAGE);
        let file = memfd_create("hostile-peer", MemfdFlags::CLOEXEC)?;
        ftruncate(&file, len as u64)?;
        let open = Mapping::new(&file, len, ProtFlags::READ | ProtFlags::WRITE)?;
        let sealed = Mapping::new(&file, len, ProtFlags::READ)?;
        Ok(Self { len, open, sealed })
    }

    /// Everything, for whoever may write. Whoever uses it must be gone before the memory is.
    pub(crate) fn area(&self) -> Area {
        // SAFETY: mapped so until `self` is dropped, which the caller waits with; nobody makes references.
        unsafe { Area::new(self.open.memory, self.len) }
    }

    /// The same memory for whoever must only read.
    pub(crate) fn sealed(&self) -> Area {
        // SAFETY: as above, but that a write is a fault: `Area` asks for writable memory so that there is none,
        // and here a fault is what a write of ours must end in.
        unsafe { Area::new(self.sealed.memory, self.len) }
    }
}

/// A mapping between two pages without access.
struct Mapping {
    start: NonNull<c_void>,
    all: usize,
    memory: NonNull<u8>,
}

impl Mapping {
    fn new(file: &OwnedFd, len: usize, prot: ProtFlags) -> io::Result<Self> {
        let all = len + 2 * PAGE;
        // SAFETY: a fresh mapping of nothing, at a place of the kernel's choice.
        let start = unsafe { mmap_anonymous(null_mut(), all, ProtFlags::empty(), MapFlags::PRIVATE) }?;
        // SAFETY: the place is inside the fresh mapping, which nobody uses yet.
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
        // SAFETY: mapped in `new` with this length; users of the areas are gone, as `Guarded` asks.
        // It cannot fail with these arguments.
        let _ = unsafe { munmap(self.start.as_ptr(), self.all) };
    }
}

// SAFETY: a mapping is only a place; all access to it goes through `Area`.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}
