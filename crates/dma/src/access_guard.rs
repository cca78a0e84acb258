//! Access guard: every access of a device to guest memory in one batch.
use crate::cache::CacheLine;
use crate::pin_table::{PinList, Run};
use crate::table::{Near, PAGE_SHIFT};
use crate::window::Window;
use crate::{
    Access, DmaError, DmaFault, GuestRange, Handle, HostSlice, Mapping, MappingGuard, Segment, copy,
};
use std::ptr::NonNull;
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// Access to guest memory for one batch; a read-side critical section.
///
/// No access takes a lock, counts a reference, or writes state that another thread writes.
///
/// An access may cross from one region or translation into the next if they are adjacent. It ends
/// at the first byte that is missing or forbidden, and the error says how many bytes were moved.
/// All bytes written, including those before a fault, are in the dirty log once the guard is
/// dropped. An access of 0 bytes succeeds at any address. [`Access`] states what each flag
/// promises.
///
/// Changes of the memory map wait for live guards, so drop the guard at the end of the batch.
#[derive(Debug)]
pub struct AccessGuard<'a> {
    handle: &'a Handle,
    inside: u64,
}

/// Contiguous piece of host memory in an access.
#[derive(Clone, Copy)]
struct Piece {
    host: *mut u8,
    len: usize,
    gpa: u64,
    region: u32,
}

impl Piece {
    /// `len` bytes of a window from `offset` on; they must be inside.
    #[inline(always)]
    fn of(window: &Window, offset: u64, len: usize) -> Self {
        let (host, gpa) = (window.host(offset), window.gpa(offset));
        Self { host, len, gpa, region: window.region() }
    }

    /// Whether `next` follows directly in the same region.
    ///
    /// The sum wraps at the end of the address space only, and no region is at both ends.
    #[inline(always)]
    fn adjoins(&self, next: &Self) -> bool {
        self.region == next.region && self.gpa.wrapping_add(self.len as u64) == next.gpa
    }
}

impl Handle {
    /// Begins a batch: enters the read-side critical section.
    ///
    /// The batch sees every earlier publication. The next batch sees later ones. New translations
    /// of a [`Domain`](crate::Domain) are seen at once.
    ///
    /// Costs a full fence (about 5 ns) and two loads while nothing changes. A thread that changes
    /// the map may wait until the guard is dropped, so keep slow work out of a batch.
    #[inline]
    pub fn enter(&mut self) -> AccessGuard<'_> {
        let inside = self.begin();
        AccessGuard { handle: self, inside }
    }
}

impl Drop for AccessGuard<'_> {
    #[inline]
    fn drop(&mut self) {
        self.handle.leave(self.inside);
    }
}

impl AccessGuard<'_> {
    // The accessors are always inlined: with constant flags and a constant length, a third of their
    // instructions remains.

    /// Copies guest memory at `addr` into `out`.
    ///
    /// # Errors
    /// A part is not there or must not be read; `done` bytes of `out` have been filled.
    #[inline(always)]
    pub fn read(&self, addr: u64, out: &mut [u8], access: Access) -> Result<(), DmaError> {
        let access = access | Access::READ;
        access.begin();
        let result = self.load(addr, out, access);
        access.end();
        result
    }

    /// Copies `data` into guest memory at `addr`.
    ///
    /// # Errors
    /// A part is not there or must not be written; `done` bytes have been written.
    #[inline(always)]
    pub fn write(&self, addr: u64, data: &[u8], access: Access) -> Result<(), DmaError> {
        let access = access | Access::WRITE;
        access.begin();
        let result = self.store(addr, data, access);
        access.end();
        result
    }

    /// Reads a value. An aligned value of 1, 2, 4 or 8 bytes is read in one access.
    ///
    /// # Errors
    /// As [`AccessGuard::read`].
    #[inline(always)]
    pub fn read_obj<T: FromBytes + IntoBytes>(&self, addr: u64, access: Access) -> Result<T, DmaError> {
        let mut value = T::new_zeroed();
        self.read(addr, value.as_mut_bytes(), access)?;
        Ok(value)
    }

    /// Writes a value. An aligned value of 1, 2, 4 or 8 bytes is written in one access.
    ///
    /// # Errors
    /// As [`AccessGuard::write`].
    #[inline(always)]
    pub fn write_obj<T: IntoBytes + Immutable>(
        &self,
        addr: u64,
        value: &T,
        access: Access,
    ) -> Result<(), DmaError> {
        self.write(addr, value.as_bytes(), access)
    }

    /// Sets `len` bytes at `addr` to `byte`.
    ///
    /// # Errors
    /// As [`AccessGuard::write`].
    pub fn fill(&self, addr: u64, byte: u8, len: usize, access: Access) -> Result<(), DmaError> {
        let access = access | Access::WRITE;
        access.begin();
        let result = self.each_piece(addr, len, access, |_, piece| {
            // SAFETY: `each_piece` yields mapped guest memory of the pinned snapshot.
            unsafe { copy::fill(piece.host, byte, piece.len) };
            self.handle.wrote(piece.gpa, piece.len);
        });
        access.end();
        result
    }

    /// Reads `out.len()` bytes from offset `skip` of the buffer in `segments`.
    ///
    /// # Errors
    /// As [`AccessGuard::read`]; a buffer that is too short is [`DmaFault::Unmapped`] at its end.
    #[inline(always)]
    pub fn read_segments(
        &self,
        segments: &[Segment],
        skip: u64,
        out: &mut [u8],
        access: Access,
    ) -> Result<(), DmaError> {
        match inside_one(segments, skip, out.len()) {
            Some(addr) => self.read(addr, out, access),
            None => self.read_several(segments, skip, out, access | Access::READ),
        }
    }

    /// [`AccessGuard::read_segments`] from several.
    #[inline(never)]
    fn read_several(
        &self,
        segments: &[Segment],
        skip: u64,
        out: &mut [u8],
        access: Access,
    ) -> Result<(), DmaError> {
        access.begin();
        let result = each_segment(segments, skip, out.len() as u64, |addr, done, n| {
            self.load(addr, &mut out[done..done + n], access)
        });
        access.end();
        result
    }

    /// Writes `data` at offset `skip` of the buffer that consists of `segments`.
    ///
    /// # Errors
    /// As [`AccessGuard::write`]; a buffer that is too short is [`DmaFault::Unmapped`] at its end.
    #[inline(always)]
    pub fn write_segments(
        &self,
        segments: &[Segment],
        skip: u64,
        data: &[u8],
        access: Access,
    ) -> Result<(), DmaError> {
        match inside_one(segments, skip, data.len()) {
            Some(addr) => self.write(addr, data, access),
            None => self.write_several(segments, skip, data, access | Access::WRITE),
        }
    }

    /// [`AccessGuard::write_segments`] to several.
    #[inline(never)]
    fn write_several(
        &self,
        segments: &[Segment],
        skip: u64,
        data: &[u8],
        access: Access,
    ) -> Result<(), DmaError> {
        access.begin();
        let result = each_segment(segments, skip, data.len() as u64, |addr, done, n| {
            self.store(addr, &data[done..done + n], access)
        });
        access.end();
        result
    }

    /// Prefetches `len` bytes at `addr` that will be read soon. Any address is allowed.
    ///
    /// Has an effect where an earlier look-up found the address. Never waits.
    #[inline]
    pub fn expect_read(&self, addr: u64, len: usize) {
        self.expect::<false>(addr, len);
    }

    /// As [`AccessGuard::expect_read`], for bytes that will be written.
    #[inline]
    pub fn expect_write(&self, addr: u64, len: usize) {
        self.expect::<true>(addr, len);
    }

    #[inline(always)]
    fn expect<const WRITE: bool>(&self, addr: u64, len: usize) {
        let window = self.handle.line(addr).window();
        if let Some(offset) = window.offset(addr) {
            // Not beyond the window: the memory behind it is unrelated.
            let len = (len as u64).min(window.left(offset)) as usize;
            crate::copy::expect::<WRITE>(window.host(offset), len);
        }
    }

    /// Whether accesses go through a [`Domain`](crate::Domain).
    #[must_use]
    #[inline(always)]
    pub fn is_translated(&self) -> bool {
        self.handle.is_translated()
    }

    /// Whether the domain translates all of these bytes.
    ///
    /// Reports the first miss to the domain.
    ///
    /// Permissions do not matter, nor whether there is memory. No translation arrives unnoticed: a
    /// thread that first maps a missing range and then looks for reported misses either finds the
    /// report of this one, or has its translation found here.
    #[must_use]
    pub fn translates(&self, addr: u64, len: usize, access: Access) -> bool {
        if len == 0 || !self.is_translated() || addr.checked_add(len as u64 - 1).is_none() {
            return true;
        }
        let mut reported = None;
        loop {
            let (done, fault) = self.walk(addr, len, access, |_, _| ());
            if fault != Some(DmaFault::Untranslated) {
                return true;
            }
            if reported == Some(done) {
                return false;
            }
            self.handle.missed(addr + done as u64, access, false);
            reported = Some(done);
        }
    }

    /// The holder.
    #[inline(always)]
    pub(crate) fn handle(&self) -> &Handle {
        self.handle
    }

    /// The window where most addresses of an untranslated handle are; empty if it is translated.
    #[inline(always)]
    pub(crate) fn home(&self) -> Window {
        if self.is_translated() { Window::EMPTY } else { self.handle.home() }
    }

    /// Maps bytes that are contiguous in host memory, for use in place.
    ///
    /// Adjacent regions are not contiguous. The address of an empty mapping is arbitrary.
    ///
    /// # Errors
    /// As [`AccessGuard::read`], for `WRITE` as [`AccessGuard::write`];
    /// [`DmaFault::NotContiguous`]; [`DmaFault::TooMany`].
    pub fn map(&self, addr: u64, len: usize, access: Access) -> Result<Mapping, DmaError> {
        let access = with_direction(access);
        let mut found: Option<Piece> = None;
        let mut pieces = 0;
        self.each_mapped(addr, len, access, |_, piece| {
            found.get_or_insert(piece);
            pieces += 1;
            Ok(())
        })?;
        if pieces > 1 {
            return Err(DmaError { addr, len, done: 0, fault: DmaFault::NotContiguous });
        }
        let Some(piece) = found else {
            let range = GuestRange { gpa: 0, len: 0 };
            return Ok(Mapping::new(
                NonNull::dangling(),
                range,
                MappingGuard::new(self.handle.pin(), access, PinList::NONE),
            ));
        };
        let mut list = PinList::NONE;
        if !self.take(&mut list, addr, piece, access) {
            return Err(DmaError { addr, len, done: 0, fault: DmaFault::TooMany });
        }
        let range = GuestRange { gpa: piece.gpa, len };
        let host = NonNull::new(piece.host).unwrap_or(NonNull::dangling());
        Ok(Mapping::new(host, range, MappingGuard::new(self.handle.pin(), access, list)))
    }

    /// Maps bytes `skip .. skip + len` of the buffer in `segments`, for use in place.
    ///
    /// Appends their host memory to `out`, and returns the guard that keeps it mapped. Appends
    /// nothing on an error. No piece is empty.
    ///
    /// # Errors
    /// As [`AccessGuard::read`], for `WRITE` as [`AccessGuard::write`]; `done` is the number of
    /// bytes that could have been mapped. A buffer that is too short is [`DmaFault::Unmapped`] at
    /// its end.
    pub fn map_segments(
        &self,
        segments: &[Segment],
        skip: u64,
        len: u64,
        access: Access,
        out: &mut Vec<HostSlice>,
    ) -> Result<MappingGuard, DmaError> {
        let access = with_direction(access);
        let mut list = PinList::NONE;
        // The common case: one piece.
        if let Ok(len) = usize::try_from(len)
            && let Some(addr) = inside_one(segments, skip, len)
            && let Some((line, host)) = self.whole(addr, len, access)
            && let window = line.window()
            && let Some(offset) = window.offset(addr)
        {
            if !self.take(&mut list, addr, Piece::of(&window, offset, len), access) {
                return Err(DmaError { addr, len, done: 0, fault: DmaFault::TooMany });
            }
            out.push(HostSlice { ptr: host, len });
            return Ok(MappingGuard::new(self.handle.pin(), access, list));
        }
        let before = out.len();
        each_segment(segments, skip, len, |addr, _, n| {
            self.each_mapped(addr, n, access, |done, piece| {
                let at = addr + done as u64;
                if !self.take(&mut list, at, piece, access) {
                    return Err(DmaError { addr: at, len: piece.len, done: 0, fault: DmaFault::TooMany });
                }
                out.push(HostSlice { ptr: piece.host, len: piece.len });
                Ok(())
            })
        })
        .inspect_err(|_| {
            out.truncate(before);
            self.handle.reader().pins().release(list);
        })?;
        Ok(MappingGuard::new(self.handle.pin(), access, list))
    }

    /// Marks memory that was written through a [`Mapping`] that stays alive.
    ///
    /// Take the range from [`Mapping::range`].
    ///
    /// It is in the dirty log once this access guard is dropped.
    #[inline]
    pub fn mark(&self, range: GuestRange) {
        self.handle.wrote(range.gpa, range.len);
    }

    /// Records the range of a mapping, for unmapping and for the log.
    ///
    /// `false` if the table is full.
    fn take(&self, list: &mut PinList, addr: u64, piece: Piece, access: Access) -> bool {
        if !self.handle.is_translated() && !access.contains(Access::WRITE) {
            return true;
        }
        let run = Run { addr, gpa: piece.gpa, len: piece.len as u64 };
        match self.handle.reader().pins().add(*list, run, self.handle.change()) {
            Some(more) => {
                *list = more;
                true
            }
            None => false,
        }
    }

    /// [`AccessGuard::read`] without the order.
    #[inline(always)]
    fn load(&self, addr: u64, out: &mut [u8], access: Access) -> Result<(), DmaError> {
        // The length is taken first: while bytes move, nothing else may look at `out`.
        let (own, len) = (out.as_mut_ptr(), out.len());
        if let Some((_, host)) = self.whole(addr, len, access) {
            // SAFETY: `whole` is mapped guest memory of the pinned snapshot, as long as `out`,
            // which is ours.
            unsafe { copy::load(host, own, len) };
            return Ok(());
        }
        self.load_pieces(addr, out, access)
    }

    /// [`AccessGuard::load`], if the bytes are in several pieces or partly missing.
    #[inline(never)]
    fn load_pieces(&self, addr: u64, out: &mut [u8], access: Access) -> Result<(), DmaError> {
        let (own, len) = (out.as_mut_ptr(), out.len());
        self.each_piece(addr, len, access, |done, piece| {
            // SAFETY: `each_piece` yields mapped guest memory of the pinned snapshot, and `done +
            // len` is at most the length of `out`, which is ours alone.
            unsafe { copy::load_part(piece.host, own.add(done), piece.len, len) };
        })
    }

    /// [`AccessGuard::write`] without the order.
    #[inline(always)]
    fn store(&self, addr: u64, data: &[u8], access: Access) -> Result<(), DmaError> {
        if let Some((line, host)) = self.whole(addr, data.len(), access) {
            // SAFETY: as in `load`; `data` cannot change while it is borrowed.
            unsafe { copy::store(host, data.as_ptr(), data.len()) };
            self.handle.wrote_inside(line, addr, data.len());
            return Ok(());
        }
        self.store_pieces(addr, data, access)
    }

    /// [`AccessGuard::store`], if the bytes are in several pieces or partly missing.
    #[inline(never)]
    fn store_pieces(&self, addr: u64, data: &[u8], access: Access) -> Result<(), DmaError> {
        let own = data.as_ptr();
        self.each_piece(addr, data.len(), access, |done, piece| {
            // SAFETY: as in `load`; `data` cannot change while it is borrowed.
            unsafe { copy::store_part(piece.host, own.add(done), piece.len, data.len()) };
            self.handle.wrote(piece.gpa, piece.len);
        })
    }

    /// [`AccessGuard::each_piece`] with a fallible closure.
    ///
    /// A fault of the access takes precedence.
    fn each_mapped(
        &self,
        addr: u64,
        len: usize,
        access: Access,
        mut each: impl FnMut(usize, Piece) -> Result<(), DmaError>,
    ) -> Result<(), DmaError> {
        let mut result = Ok(());
        self.each_piece(addr, len, access, |done, piece| {
            if result.is_ok() {
                result = each(done, piece);
            }
        })?;
        result
    }

    /// Host memory of `addr .. addr + len`, if one window has it all.
    ///
    /// Also returns the cache line of the window.
    ///
    /// This is the common case. `None` if it does not apply, if there is nothing to do, or on a
    /// fault.
    #[inline(always)]
    pub(crate) fn whole(&self, addr: u64, len: usize, access: Access) -> Option<(&CacheLine, *mut u8)> {
        let line = self.handle.line(addr);
        if line.window().offset(addr).is_none() && !self.handle.find(addr, line) {
            return None;
        }
        let window = line.window();
        let offset = window.offset(addr)?;
        let whole = len > 0 && len as u64 <= window.left(offset) && window.forbidden(access).is_empty();
        whole.then(|| (line, window.host(offset)))
    }

    /// Finds the memory of `addr .. addr + len` and yields it in order.
    ///
    /// Yields the number of bytes before each piece, and the piece.
    ///
    /// Adjacent memory in one region is one piece. The next piece is found before a piece is
    /// yielded, so that look-up and copy overlap.
    #[inline(never)]
    fn each_piece(
        &self,
        addr: u64,
        len: usize,
        access: Access,
        each: impl FnMut(usize, Piece),
    ) -> Result<(), DmaError> {
        if len == 0 {
            return Ok(());
        }
        if addr.checked_add(len as u64 - 1).is_none() {
            return Err(DmaError { addr, len, done: 0, fault: DmaFault::Wraps });
        }
        let (done, fault) = self.walk(addr, len, access, each);
        fault.map_or(Ok(()), |fault| Err(self.failed(fault, addr, len, done, access)))
    }

    /// [`AccessGuard::each_piece`] without reporting faults.
    ///
    /// Returns the number of bytes before the fault, and the fault.
    ///
    /// There must be at least one byte, and the last address must not wrap.
    #[inline(always)]
    fn walk(
        &self,
        addr: u64,
        len: usize,
        access: Access,
        mut each: impl FnMut(usize, Piece),
    ) -> (usize, Option<DmaFault>) {
        let mut near = Near::nowhere();
        let mut last: Option<(usize, Piece)> = None;
        let mut done = 0;
        // Each turn finds at least one byte, and the last address does not wrap, so the sum below
        // does not.
        let fault = loop {
            if done == len {
                break None;
            }
            let at = addr + done as u64;
            let window = match self.next_window(at, done, len - done, &mut near) {
                Ok(window) => window,
                Err(fault) => break Some(fault),
            };
            let Some(offset) = window.offset(at) else { break Some(DmaFault::Unmapped) };
            let forbidden = window.forbidden(access);
            if !forbidden.is_empty() {
                break Some(DmaFault::Denied(forbidden));
            }
            let n = window.left(offset).min((len - done) as u64) as usize;
            let piece = Piece::of(&window, offset, n);
            match &mut last {
                Some((_, last)) if last.adjoins(&piece) => last.len += n,
                _ => {
                    if let Some((before, piece)) = last.replace((done, piece)) {
                        each(before, piece);
                    }
                }
            }
            done += n;
        };
        if let Some((before, piece)) = last {
            each(before, piece);
        }
        (done, fault)
    }

    /// Window around `at`.
    ///
    /// `at` is `done` bytes into an access with `left` bytes to go.
    ///
    /// Starts of accesses and partial pages are often used again, so they go through the cache.
    /// Whole pages behind the start would evict more than they add: they are found beside the ones
    /// before.
    #[inline(always)]
    fn next_window(&self, at: u64, done: usize, left: usize, near: &mut Near) -> Result<Window, DmaFault> {
        if done > 0 && left >= 1 << PAGE_SHIFT {
            return self.handle.find_near(at, near);
        }
        let line = self.handle.line(at);
        let window = line.window();
        if window.offset(at).is_some() { Ok(window) } else { self.handle.look_up(at, line) }
    }

    /// Error of an access that ends at `addr + done`. Reports a miss to the domain.
    #[cold]
    fn failed(&self, fault: DmaFault, addr: u64, len: usize, done: usize, access: Access) -> DmaError {
        let addr = addr + done as u64;
        match fault {
            DmaFault::Untranslated => self.handle.missed(addr, access, false),
            DmaFault::Denied(_) => self.handle.missed(addr, access, true),
            _ => {}
        }
        DmaError { addr, len, done, fault }
    }
}

/// Adds READ to a mapping without a direction.
fn with_direction(access: Access) -> Access {
    if access.intersects(Access::READ | Access::WRITE) { access } else { access | Access::READ }
}

/// Address of bytes `skip .. skip + len` of a buffer, if one of its segments has them all.
#[inline(always)]
pub(crate) fn inside_one(segments: &[Segment], mut skip: u64, len: usize) -> Option<u64> {
    for segment in segments {
        let size = u64::from(segment.len);
        if skip < size {
            return if len as u64 <= size - skip { segment.addr.checked_add(skip) } else { None };
        }
        skip -= size;
    }
    None
}

/// Cuts bytes `skip .. skip + len` of a buffer into runs of guest addresses.
///
/// Yields each run: address, bytes before, length. Errors of `each` are converted to the whole
/// access.
#[inline]
fn each_segment(
    segments: &[Segment],
    mut skip: u64,
    len: u64,
    mut each: impl FnMut(u64, usize, usize) -> Result<(), DmaError>,
) -> Result<(), DmaError> {
    // A length that does not fit is longer than any buffer in memory, so it ends as too short.
    let whole = usize::try_from(len).unwrap_or(usize::MAX);
    let mut done = 0;
    for segment in segments {
        if done == whole {
            return Ok(());
        }
        let size = u64::from(segment.len);
        if skip >= size {
            skip -= size;
            continue;
        }
        let n = (size - skip).min((whole - done) as u64) as usize;
        let Some(addr) = segment.addr.checked_add(skip) else {
            return Err(DmaError { addr: segment.addr, len: whole, done, fault: DmaFault::Wraps });
        };
        each(addr, done, n).map_err(|error| error.within(whole, done))?;
        skip = 0;
        done += n;
    }
    if done == whole {
        return Ok(());
    }
    // End of the buffer, which the driver may have put at the end of the address space.
    let addr = segments.last().map_or(0, |last| last.addr.wrapping_add(u64::from(last.len)));
    Err(DmaError { addr, len: whole, done, fault: DmaFault::Unmapped })
}
