//! Guest memory that is found once, for several accesses in one batch.
//!
//! ```text
//!   AccessGuard::read_span, write_span --(one look-up)--> span: expect, read, write: no look-up
//!                                                            '-- FileView: copy to and from a file
//! ```
//! For devices that have several things to do with one buffer: prefetch it, read a header, copy what
//! is behind it. A span orders nothing: what the queue or the device does before and after its batch
//! has to.
use crate::access_guard::inside_one;
use crate::handle::Handle;
use crate::{Access, AccessGuard, HostSlice, Segment, copy};
use std::marker::PhantomData;
use std::ptr::NonNull;
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// Most bytes that are prefetched: those that come first. A long copy prefetches the rest.
const EXPECTED: usize = 128;

/// Contiguous bytes that may be read while the [`AccessGuard`] lives.
///
/// The guest may change them at any time.
#[derive(Clone, Copy, Debug)]
pub struct ReadSpan<'a> {
    host: NonNull<u8>,
    len: usize,
    guard: PhantomData<&'a Handle>,
}

/// Contiguous bytes that may be written while the [`AccessGuard`] lives.
///
/// Other devices and the guest may change them at any time.
#[derive(Clone, Copy, Debug)]
pub struct WriteSpan<'a> {
    host: NonNull<u8>,
    len: usize,
    gpa: u64,
    handle: &'a Handle,
}

impl AccessGuard<'_> {
    /// Finds the `len` bytes (at least 1) at `addr`, to be read.
    ///
    /// `None` if they are in several pieces, missing or forbidden; [`AccessGuard::read`] says which.
    #[must_use]
    #[inline(always)]
    pub fn read_span(&self, addr: u64, len: usize) -> Option<ReadSpan<'_>> {
        let (_, host) = self.whole(addr, len, Access::READ)?;
        Some(ReadSpan { host: NonNull::new(host)?, len, guard: PhantomData })
    }

    /// As [`AccessGuard::read_span`], to be written.
    ///
    /// What is written is in the dirty log once the guard is dropped.
    #[must_use]
    #[inline(always)]
    pub fn write_span(&self, addr: u64, len: usize) -> Option<WriteSpan<'_>> {
        let (line, host) = self.whole(addr, len, Access::WRITE)?;
        let window = line.window();
        let gpa = window.gpa(window.offset(addr)?);
        Some(WriteSpan { host: NonNull::new(host)?, len, gpa, handle: self.handle() })
    }

    /// [`AccessGuard::read_span`] of bytes `skip .. skip + len` of the buffer in `segments`.
    #[must_use]
    #[inline(always)]
    pub fn read_span_of(&self, segments: &[Segment], skip: u64, len: usize) -> Option<ReadSpan<'_>> {
        self.read_span(inside_one(segments, skip, len)?, len)
    }

    /// [`AccessGuard::write_span`] of bytes `skip .. skip + len` of the buffer in `segments`.
    #[must_use]
    #[inline(always)]
    pub fn write_span_of(&self, segments: &[Segment], skip: u64, len: usize) -> Option<WriteSpan<'_>> {
        self.write_span(inside_one(segments, skip, len)?, len)
    }
}

/// Panics unless the `len` bytes from `from` on are in a span of `all` bytes.
#[inline(always)]
fn check(from: usize, len: usize, all: usize) {
    assert!(from <= all && len <= all - from, "an access exceeds its span");
}

impl ReadSpan<'_> {
    /// Host memory to read from.
    pub(crate) fn piece(&self) -> HostSlice {
        HostSlice { ptr: self.host.as_ptr(), len: self.len }
    }

    /// Prefetches the first bytes, up to 128. Never waits.
    #[inline(always)]
    pub fn expect(&self) {
        copy::expect_short::<false>(self.host.as_ptr(), self.len.min(EXPECTED));
    }

    /// Prefetches the first `BYTES` bytes, or all of a shorter span. Never waits.
    #[inline(always)]
    pub fn expect_first<const BYTES: usize>(&self) {
        copy::expect_first::<false, BYTES>(self.host.as_ptr(), self.len);
    }

    /// What lies from byte `from` on; `None` if that is nothing.
    #[must_use]
    #[inline(always)]
    pub fn from(&self, from: usize) -> Option<Self> {
        let len = self.len.checked_sub(from).filter(|&len| len > 0)?;
        // SAFETY: inside.
        Some(Self { host: unsafe { self.host.add(from) }, len, ..*self })
    }

    /// Copies the bytes from byte `from` on into `out`.
    ///
    /// # Panics
    /// The span has fewer.
    #[inline(always)]
    pub fn read(&self, from: usize, out: &mut [u8]) {
        check(from, out.len(), self.len);
        // The length is taken first: while bytes move, nothing else may look at `out`.
        let (own, len) = (out.as_mut_ptr(), out.len());
        // SAFETY: `whole` found this memory, and the guard that keeps it mapped is borrowed; the
        // bytes are inside; `out` is ours.
        unsafe { copy::load(self.host.add(from).as_ptr(), own, len) };
    }
}

impl ReadSpan<'_> {
    /// Reads a value. An aligned value of 1, 2, 4 or 8 bytes is read in one access.
    ///
    /// # Panics
    /// As [`ReadSpan::read`].
    #[must_use]
    #[inline(always)]
    pub fn read_obj<T: FromBytes + IntoBytes>(&self, from: usize) -> T {
        let mut value = T::new_zeroed();
        self.read(from, value.as_mut_bytes());
        value
    }
}

impl WriteSpan<'_> {
    /// Host memory to write to. Call [`WriteSpan::wrote`] afterwards.
    pub(crate) fn piece(&self) -> HostSlice {
        HostSlice { ptr: self.host.as_ptr(), len: self.len }
    }

    /// Notes all of it for the dirty log.
    #[inline(always)]
    pub(crate) fn wrote(&self) {
        self.handle.wrote(self.gpa, self.len);
    }

    /// As [`ReadSpan::expect`], for writing.
    #[inline(always)]
    pub fn expect(&self) {
        copy::expect_short::<true>(self.host.as_ptr(), self.len.min(EXPECTED));
    }

    /// As [`ReadSpan::expect_first`], for writing.
    #[inline(always)]
    pub fn expect_first<const BYTES: usize>(&self) {
        copy::expect_first::<true, BYTES>(self.host.as_ptr(), self.len);
    }

    /// Copies `data` to byte `from` and those behind it.
    ///
    /// # Panics
    /// The span has fewer bytes.
    #[inline(always)]
    pub fn write(&self, from: usize, data: &[u8]) {
        check(from, data.len(), self.len);
        // SAFETY: as in `ReadSpan::read`; `data` does not change while it is borrowed.
        unsafe { copy::store(self.host.add(from).as_ptr(), data.as_ptr(), data.len()) };
        // Behind the data: notes may be marked, and harvested, before the guard is dropped.
        self.handle.wrote(self.gpa + from as u64, data.len());
    }

    /// Writes a value. An aligned value of 1, 2, 4 or 8 bytes is written in one access.
    ///
    /// # Panics
    /// As [`WriteSpan::write`].
    #[inline(always)]
    pub fn write_obj<T: IntoBytes + Immutable>(&self, from: usize, value: &T) {
        self.write(from, value.as_bytes());
    }
}
