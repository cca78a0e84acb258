//! Parts of the tests on a real KVM: a VM, and pages of its memory.
#![allow(dead_code, reason = "each test uses a part of it")]
use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::{Kvm, VmFd};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use std::ffi::c_void;

/// Makes a VM; or reports why there is none.
pub(crate) fn vm(test: &str) -> Option<(Kvm, VmFd)> {
    match Kvm::new().and_then(|kvm| kvm.create_vm().map(|vm| (kvm, vm))) {
        Ok(both) => Some(both),
        Err(why) => {
            paravane_test_support::skip(test, format_args!("no KVM here: {why}"));
            None
        }
    }
}

/// One page of guest memory.
pub(crate) struct Page(*mut c_void);

impl Page {
    pub(crate) const SIZE: usize = 4096;

    pub(crate) fn with(code: &[u8]) -> Self {
        // SAFETY: a new anonymous mapping replaces nothing.
        let page = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                Self::SIZE,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
            )
        }
        .expect("a page");
        assert!(code.len() <= Self::SIZE);
        // SAFETY: the page is new and ours, and the code fits.
        unsafe { page.cast::<u8>().copy_from_nonoverlapping(code.as_ptr(), code.len()) };
        Self(page)
    }

    /// Maps it at guest-physical `gpa`, where the VM has no other page.
    ///
    /// The VM must be dropped before it.
    pub(crate) fn map(&self, vm: &VmFd, gpa: u64) {
        let region = kvm_userspace_memory_region {
            slot: (gpa >> 12) as u32,
            guest_phys_addr: gpa,
            memory_size: Self::SIZE as u64,
            userspace_addr: self.0 as u64,
            flags: 0,
        };
        // SAFETY: the page is mapped as long as the VM lives (see `Page::drop`).
        unsafe { vm.set_user_memory_region(region) }.expect("guest memory");
    }

    /// Address of the page in this process.
    pub(crate) fn host(&self) -> *mut u8 {
        self.0.cast()
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        // SAFETY: the mapping that `with` made. Each test's last reference to the VM is
        // declared after the page, and so dropped before it.
        let _ = unsafe { munmap(self.0, Self::SIZE) };
    }
}
