//! Guest memory that is read in place during one batch.
use crate::window::Window;
use crate::{Access, AccessGuard};
use std::ptr::NonNull;

/// Finds host memory of bytes that are read in place while an access guard lives.
///
/// It remembers the window that it found last (at first the largest region, without a domain), so
/// that the next bytes in it cost a comparison.
/// Nothing is ordered: the caller orders its accesses.
#[derive(Debug)]
pub struct InPlace<'a> {
    guard: &'a AccessGuard<'a>,
    start: u64,
    size: u64,
    host: NonNull<u8>,
}

impl AccessGuard<'_> {
    /// Reads in place, for accesses that are near each other.
    #[must_use]
    #[inline(always)]
    pub fn in_place(&self) -> InPlace<'_> {
        let window = self.home();
        let host = NonNull::new(window.host(0)).unwrap_or(NonNull::dangling());
        InPlace { guard: self, start: window.start(), size: window.size(), host }
    }
}

impl InPlace<'_> {
    /// Host memory of the `len` bytes (at least 1) at `addr`, valid while the access guard lives.
    ///
    /// The guest may change the bytes at any time. `None` if they are in several pieces, missing or
    /// forbidden; [`AccessGuard::read`] says which.
    #[must_use]
    #[inline(always)]
    pub fn find(&mut self, addr: u64, len: u32) -> Option<NonNull<u8>> {
        if let Some(last) = self.size.checked_sub(len.into()) {
            let offset = addr.wrapping_sub(self.start);
            if offset <= last {
                // SAFETY: the offset is at most the size of the window, which is mapped.
                return Some(unsafe { self.host.add(offset as usize) });
            }
        }
        self.find_window(addr, len)
    }

    /// [`InPlace::find`] in another window.
    #[inline(never)]
    fn find_window(&mut self, addr: u64, len: u32) -> Option<NonNull<u8>> {
        let (line, host) = self.guard.whole(addr, len as usize, Access::READ)?;
        let window: Window = line.window();
        let found = NonNull::new(host)?;
        (self.start, self.size, self.host) = (window.start(), window.size(), NonNull::new(window.host(0))?);
        Some(found)
    }
}
