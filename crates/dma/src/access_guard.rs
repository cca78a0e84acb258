//! The one guard: every access of a device to guest memory.
use crate::cache::CacheLine;
use crate::handle::{Fault, Handle};
use crate::pin_table::{PinList, Run};
use crate::snapshot::Window;
use crate::table::{Near, PAGE_SHIFT};
use crate::{Access, DmaError, GuestRange, HostSlice, Mapping, MappingGuard, Segment, copy};
use std::ptr::NonNull;
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// Access to guest memory for one batch of one holder. No access takes a lock, counts a reference or writes what
/// another thread writes.
///
/// An access may cross from one region or translation into the next where they adjoin; it ends at the first byte that
/// is not there or not allowed, and the error tells how many bytes had been moved. What was written is in the dirty
/// log by the time that the guard is shut, also what was written before a fault. An access of no bytes succeeds at any
/// address. What each [`Access`] flag promises is said there.
#[derive(Debug)]
pub struct AccessGuard<'a> {
    handle: &'a Handle,
    inside: u64,
}

/// A contiguous piece of host memory behind an access.
#[derive(Clone, Copy)]
struct Piece {
    host: *mut u8,
    len: usize,
    gpa: u64,
    region: u32,
}

impl Piece {
    /// `len` bytes of a window from `offset` on, which are inside.
    #[inline(always)]
    fn of(window: &Window, offset: u64, len: usize) -> Self {
        let (host, gpa) = (window.host(offset), window.gpa(offset));
        Self { host, len, gpa, region: window.region() }
    }

    /// Whether `next` lies behind it in the same region. (The sum wraps at the end of the address space only, and no
    /// region is at both ends.)
    #[inline(always)]
    fn adjoins(&self, next: &Self) -> bool {
        self.region == next.region && self.gpa.wrapping_add(self.len as u64) == next.gpa
    }
}

impl Drop for AccessGuard<'_> {
    #[inline]
    fn drop(&mut self) {
        self.handle.shut(self.inside);
    }
}

impl<'a> AccessGuard<'a> {
    /// `handle` has entered its reader with the number `inside`, and no other guard of it is open.
    #[inline(always)]
    pub(crate) fn new(handle: &'a Handle, inside: u64) -> Self {
        Self { handle, inside }
    }

    // The accessors are inlined whatever the compiler thinks of it: with flags that are constants, and a length that
    // is, a third of their instructions is left.

    /// Copies guest memory at `addr` into `out`.
    ///
    /// # Errors
    /// Part of it is not there; `done` bytes of `out` have been filled.
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
    /// Part of it is not there or not writable; `done` bytes have been written.
    #[inline(always)]
    pub fn write(&self, addr: u64, data: &[u8], access: Access) -> Result<(), DmaError> {
        let access = access | Access::WRITE;
        access.begin();
        let result = self.store(addr, data, access);
        access.end();
        result
    }

    /// Reads a value. Aligned values of 1, 2, 4 or 8 bytes are read in one access.
    ///
    /// # Errors
    /// As [`AccessGuard::read`].
    #[inline(always)]
    pub fn read_obj<T: FromBytes + IntoBytes>(&self, addr: u64, access: Access) -> Result<T, DmaError> {
        let mut value = T::new_zeroed();
        self.read(addr, value.as_mut_bytes(), access)?;
        Ok(value)
    }

    /// Writes a value. Aligned values of 1, 2, 4 or 8 bytes are written in one access.
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

    /// Writes `len` bytes of `byte`.
    ///
    /// # Errors
    /// As [`AccessGuard::write`].
    pub fn fill(&self, addr: u64, byte: u8, len: usize, access: Access) -> Result<(), DmaError> {
        let access = access | Access::WRITE;
        access.begin();
        let result = self.each_piece(addr, len, access, |_, piece| {
            // SAFETY: `each_piece` hands out mapped guest memory of the pinned snapshot.
            unsafe { copy::fill(piece.host, byte, piece.len) };
            self.handle.wrote(piece.gpa, piece.len);
        });
        access.end();
        result
    }

    /// Reads `out.len()` bytes, starting `skip` bytes into the buffer that `segments` make up.
    ///
    /// # Errors
    /// As [`AccessGuard::read`]; a buffer that is too short is [`DmaError::Unmapped`] at its end.
    pub fn read_segments(
        &self,
        segments: &[Segment],
        skip: u64,
        out: &mut [u8],
        access: Access,
    ) -> Result<(), DmaError> {
        let access = access | Access::READ;
        access.begin();
        let result = match inside_one(segments, skip, out.len()) {
            Some(addr) => self.load(addr, out, access),
            None => each_segment(segments, skip, out.len() as u64, |addr, done, n| {
                self.load(addr, &mut out[done..done + n], access)
            }),
        };
        access.end();
        result
    }

    /// Writes `data`, starting `skip` bytes into the buffer that `segments` make up.
    ///
    /// # Errors
    /// As [`AccessGuard::write`]; a buffer that is too short is [`DmaError::Unmapped`] at its end.
    pub fn write_segments(
        &self,
        segments: &[Segment],
        skip: u64,
        data: &[u8],
        access: Access,
    ) -> Result<(), DmaError> {
        let access = access | Access::WRITE;
        access.begin();
        let result = match inside_one(segments, skip, data.len()) {
            Some(addr) => self.store(addr, data, access),
            None => each_segment(segments, skip, data.len() as u64, |addr, done, n| {
                self.store(addr, &data[done..done + n], access)
            }),
        };
        access.end();
        result
    }

    /// The device will read `len` bytes at `addr` soon: where a look-up has found them before, the processor fetches their
    /// cache lines, and nobody waits. Any address will do.
    #[inline]
    pub fn expect_read(&self, addr: u64, len: usize) {
        self.expect::<false>(addr, len);
    }

    /// As [`AccessGuard::expect_read`], for what will be written.
    #[inline]
    pub fn expect_write(&self, addr: u64, len: usize) {
        self.expect::<true>(addr, len);
    }

    #[inline(always)]
    fn expect<const WRITE: bool>(&self, addr: u64, len: usize) {
        let window = self.handle.line(addr).window();
        if let Some(offset) = window.offset(addr) {
            // Not beyond the window: what is there is somebody else's.
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

    /// Whether the domain translates all of these bytes, whatever it allows and whether or not there is memory. If not, it
    /// is told what it misses, the first of it.
    ///
    /// No translation comes unnoticed: whoever maps what is missing, and asks then what was missed, either hears of this
    /// one, or has it found here.
    #[must_use]
    pub fn translates(&self, addr: u64, len: usize, access: Access) -> bool {
        if len == 0 || !self.is_translated() || addr.checked_add(len as u64 - 1).is_none() {
            return true;
        }
        let mut told = None;
        loop {
            let (done, fault) = self.walk(addr, len, access, |_, _| ());
            if fault != Some(Fault::Untranslated) {
                return true;
            }
            if told == Some(done) {
                return false;
            }
            self.handle.missed(addr + done as u64, access, false);
            told = Some(done);
        }
    }

    /// Maps one piece that is contiguous in host memory. Adjoining regions are not; an empty piece is mapped
    /// nowhere in particular.
    ///
    /// # Errors
    /// As [`AccessGuard::read`], for `WRITE` as [`AccessGuard::write`], and [`DmaError::NotContiguous`].
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
            return Err(DmaError::NotContiguous { addr, len });
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
            return Err(DmaError::TooMany { addr, len });
        }
        let range = GuestRange { gpa: piece.gpa, len };
        let host = NonNull::new(piece.host).unwrap_or(NonNull::dangling());
        Ok(Mapping::new(host, range, MappingGuard::new(self.handle.pin(), access, list)))
    }

    /// Appends to `out` the host memory behind bytes `skip .. skip + len` of the buffer that `segments` make
    /// up, and returns what keeps it mapped. Nothing is appended on an error. No piece is empty.
    ///
    /// # Errors
    /// As [`AccessGuard::read`], for `WRITE` as [`AccessGuard::write`]; `done` is what could have been mapped. A buffer that is
    /// too short is [`DmaError::Unmapped`] at its end.
    pub fn map_segments(
        &self,
        segments: &[Segment],
        skip: u64,
        len: u64,
        access: Access,
        out: &mut Vec<HostSlice>,
    ) -> Result<MappingGuard, DmaError> {
        let access = with_direction(access);
        let before = out.len();
        let mut list = PinList::NONE;
        each_segment(segments, skip, len, |addr, _, n| {
            self.each_mapped(addr, n, access, |done, piece| {
                let at = addr + done as u64;
                if !self.take(&mut list, at, piece, access) {
                    return Err(DmaError::TooMany { addr: at, len: piece.len });
                }
                out.push(HostSlice { ptr: piece.host, len: piece.len });
                Ok(())
            })
        })
        .inspect_err(|_| {
            out.truncate(before);
            self.handle.reader().pins().give_back(list);
        })?;
        Ok(MappingGuard::new(self.handle.pin(), access, list))
    }

    /// Guest memory was written by other means than this guard: through a [`Mapping`] that lives on
    /// ([`Mapping::range`]). It is in the log by the time that the guard is shut.
    #[inline]
    pub fn mark(&self, range: GuestRange) {
        self.handle.wrote(range.gpa, range.len);
    }

    /// Notes what a mapping covers: for those who unmap, and for the log. `false` if there is no room.
    fn take(&self, list: &mut PinList, addr: u64, piece: Piece, access: Access) -> bool {
        if !self.handle.is_translated() && !access.contains(Access::WRITE) {
            return true;
        }
        let run = Run { addr, gpa: piece.gpa, len: piece.len as u64 };
        match self.handle.reader().pins().take(*list, run, self.handle.change()) {
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
        // The length is list first: while bytes are moved nobody else may look at `out`.
        let (own, len) = (out.as_mut_ptr(), out.len());
        if let Some((_, host)) = self.whole(addr, len, access) {
            // SAFETY: `whole` is mapped guest memory of the pinned snapshot, as long as `out`, which is ours.
            unsafe { copy::load(host, own, len) };
            return Ok(());
        }
        self.load_pieces(addr, out, access)
    }

    /// [`AccessGuard::load`], of what lies in several pieces or is not all there.
    #[inline(never)]
    fn load_pieces(&self, addr: u64, out: &mut [u8], access: Access) -> Result<(), DmaError> {
        let (own, len) = (out.as_mut_ptr(), out.len());
        self.each_piece(addr, len, access, |done, piece| {
            // SAFETY: `each_piece` hands out mapped guest memory of the pinned snapshot, and `done + len` is at
            // most the length of `out`, which is ours alone.
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

    /// [`AccessGuard::store`], of what lies in several pieces or is not all there.
    #[inline(never)]
    fn store_pieces(&self, addr: u64, data: &[u8], access: Access) -> Result<(), DmaError> {
        let own = data.as_ptr();
        self.each_piece(addr, data.len(), access, |done, piece| {
            // SAFETY: as in `load`; `data` cannot change while it is borrowed.
            unsafe { copy::store_part(piece.host, own.add(done), piece.len, data.len()) };
            self.handle.wrote(piece.gpa, piece.len);
        })
    }

    /// [`AccessGuard::each_piece`] for what may fail itself; a fault of the access comes first.
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

    /// Host memory behind `addr .. addr + len`, and the line of the window that it is in, if one window has it all, that
    /// was found before or is found now; as nearly always. `None`: that is not so, or there is nothing to do, or a fault.
    #[inline(always)]
    fn whole(&self, addr: u64, len: usize, access: Access) -> Option<(&CacheLine, *mut u8)> {
        let line = self.handle.line(addr);
        if line.window().offset(addr).is_none() && !self.handle.find(addr, line) {
            return None;
        }
        let window = line.window();
        let offset = window.offset(addr)?;
        let whole = len > 0 && len as u64 <= window.left(offset) && window.forbidden(access).is_empty();
        whole.then(|| (line, window.host(offset)))
    }

    /// Finds what is behind `addr .. addr + len` and hands it out in order: bytes done before, then the piece. What lies
    /// side by side in one region is one piece. The one behind a piece is found before that piece is handed out, so that
    /// looking it up and moving bytes overlap.
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
            return Err(DmaError::Wraps { addr, len, done: 0 });
        }
        let (done, fault) = self.walk(addr, len, access, each);
        fault.map_or(Ok(()), |fault| Err(self.failed(fault, addr, len, done, access)))
    }

    /// The part of [`AccessGuard::each_piece`] that tells nobody of a fault: the bytes before it, and the fault. There is at least
    /// one byte, and the last address does not wrap.
    #[inline(always)]
    fn walk(
        &self,
        addr: u64,
        len: usize,
        access: Access,
        mut each: impl FnMut(usize, Piece),
    ) -> (usize, Option<Fault>) {
        let mut near = Near::nowhere();
        let mut last: Option<(usize, Piece)> = None;
        let mut done = 0;
        // Each turn finds at least one byte, and the last address does not wrap, so the sum below does not.
        let fault = loop {
            if done == len {
                break None;
            }
            let at = addr + done as u64;
            let window = match self.next_window(at, done, len - done, &mut near) {
                Ok(window) => window,
                Err(fault) => break Some(fault),
            };
            let Some(offset) = window.offset(at) else { break Some(Fault::Unmapped) };
            let forbidden = window.forbidden(access);
            if !forbidden.is_empty() {
                break Some(Fault::Denied(forbidden));
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

    /// The window around `at`, which is `done` bytes into an access with `left` bytes to go. Where one begins, and what
    /// ends inside a page, is often used again, and through the cache. Whole pages behind that would push out more than
    /// they bring: they are found beside the ones before.
    #[inline(always)]
    fn next_window(&self, at: u64, done: usize, left: usize, near: &mut Near) -> Result<Window, Fault> {
        if done > 0 && left >= 1 << PAGE_SHIFT {
            return self.handle.find_near(at, near);
        }
        let line = self.handle.line(at);
        let window = line.window();
        if window.offset(at).is_some() { Ok(window) } else { self.handle.look_up(at, line) }
    }

    /// The error of an access that ends at `addr + done`; the domain is told what it misses.
    #[cold]
    fn failed(&self, fault: Fault, addr: u64, len: usize, done: usize, access: Access) -> DmaError {
        let addr = addr + done as u64;
        match fault {
            Fault::Unmapped => DmaError::Unmapped { addr, len, done },
            Fault::Untranslated => {
                self.handle.missed(addr, access, false);
                DmaError::Untranslated { addr, len, done }
            }
            Fault::Denied(forbidden) => {
                self.handle.missed(addr, access, true);
                DmaError::Denied { addr, access: forbidden, len, done }
            }
        }
    }
}

/// A mapping without a direction is one for reading.
fn with_direction(access: Access) -> Access {
    if access.intersects(Access::READ | Access::WRITE) { access } else { access | Access::READ }
}

/// The address of bytes `skip .. skip + len` of the buffer that `segments` make up, if they lie in its only segment.
#[inline(always)]
fn inside_one(segments: &[Segment], skip: u64, len: usize) -> Option<u64> {
    let [only] = segments else { return None };
    let end = skip.checked_add(len as u64)?;
    if end <= only.len.into() { only.addr.checked_add(skip) } else { None }
}

/// Cuts bytes `skip .. skip + len` of the buffer that `segments` make up into runs of guest addresses, and hands
/// out each: address, bytes done before, bytes. The errors of `each` are put in terms of the whole access.
#[inline]
fn each_segment(
    segments: &[Segment],
    mut skip: u64,
    len: u64,
    mut each: impl FnMut(u64, usize, usize) -> Result<(), DmaError>,
) -> Result<(), DmaError> {
    // More than fits is more than any buffer in memory has: it ends as too short.
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
            return Err(DmaError::Wraps { addr: segment.addr, len: whole, done });
        };
        each(addr, done, n).map_err(|error| error.within(whole, done))?;
        skip = 0;
        done += n;
    }
    if done == whole {
        return Ok(());
    }
    // The end of the buffer, which the driver may have put at the end of the address space.
    let addr = segments.last().map_or(0, |last| last.addr.wrapping_add(u64::from(last.len)));
    Err(DmaError::Unmapped { addr, len: whole, done })
}
