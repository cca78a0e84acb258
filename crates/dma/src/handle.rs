//! A queue's door to guest memory.
use crate::memory::{Pin, Published};
use crate::snapshot::Span;
use crate::{Access, DmaError, Hold, HostSlice, Mapping, Segment, copy};
use std::ptr::NonNull;
use std::sync::Arc;
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// Access to guest memory for one holder. It pins one snapshot of the map; [`Handle::refresh`], called at
/// batch boundaries, pins the newest. No access takes a lock.
///
/// An access may cross from one region into the next where they adjoin; it ends at the first byte that is not
/// there or not allowed, and the error tells how many bytes had been moved. An access of no bytes succeeds at any
/// address. What each [`Access`] flag promises is said there.
#[derive(Debug)]
pub struct Handle {
    /// Copy of the pinned snapshot's lowest span: with one region, the only look-up there is.
    first: Span,
    pin: Arc<Pin>,
    /// Of the pinned snapshot.
    generation: u64,
    published: Arc<Published>,
}

/// The contiguous pieces of host memory behind an access.
type Piece = (*mut u8, usize);

impl Handle {
    pub(crate) fn new(published: Arc<Published>) -> Self {
        let (pin, generation) = published.pin();
        Self { first: pin.snapshot.first(), pin, generation, published }
    }

    /// Pins the newest map, if it has changed. `true` if it had. A change that happened before the call is seen.
    #[inline]
    pub fn refresh(&mut self) -> bool {
        if self.published.generation() == self.generation {
            return false;
        }
        (self.pin, self.generation) = self.published.pin();
        self.first = self.pin.snapshot.first();
        true
    }

    /// Copies guest memory at `addr` into `out`.
    ///
    /// # Errors
    /// Part of it is not there; `done` bytes of `out` have been filled.
    #[inline]
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
    #[inline]
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
    /// As [`Handle::read`].
    #[inline]
    pub fn read_obj<T: FromBytes + IntoBytes>(&self, addr: u64, access: Access) -> Result<T, DmaError> {
        let mut value = T::new_zeroed();
        self.read(addr, value.as_mut_bytes(), access)?;
        Ok(value)
    }

    /// Writes a value. Aligned values of 1, 2, 4 or 8 bytes are written in one access.
    ///
    /// # Errors
    /// As [`Handle::write`].
    #[inline]
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
    /// As [`Handle::write`].
    pub fn fill(&self, addr: u64, byte: u8, len: usize, access: Access) -> Result<(), DmaError> {
        let access = access | Access::WRITE;
        access.begin();
        let result = self.each_piece(addr, len, access, |_, (host, n)| {
            // SAFETY: `each_piece` hands out mapped guest memory of the pinned snapshot.
            unsafe { copy::fill(host, byte, n) };
        });
        access.end();
        result
    }

    /// Reads `out.len()` bytes, starting `skip` bytes into the buffer that `segments` make up.
    ///
    /// # Errors
    /// As [`Handle::read`]; a buffer that is too short is [`DmaError::Unmapped`] at its end.
    pub fn read_segments(
        &self,
        segments: &[Segment],
        skip: u64,
        out: &mut [u8],
        access: Access,
    ) -> Result<(), DmaError> {
        let access = access | Access::READ;
        access.begin();
        let result = each_segment(segments, skip, out.len() as u64, |addr, done, n| {
            self.load(addr, &mut out[done..done + n], access)
        });
        access.end();
        result
    }

    /// Writes `data`, starting `skip` bytes into the buffer that `segments` make up.
    ///
    /// # Errors
    /// As [`Handle::write`]; a buffer that is too short is [`DmaError::Unmapped`] at its end.
    pub fn write_segments(
        &self,
        segments: &[Segment],
        skip: u64,
        data: &[u8],
        access: Access,
    ) -> Result<(), DmaError> {
        let access = access | Access::WRITE;
        access.begin();
        let result = each_segment(segments, skip, data.len() as u64, |addr, done, n| {
            self.store(addr, &data[done..done + n], access)
        });
        access.end();
        result
    }

    /// Maps one piece that is contiguous in host memory. Adjoining regions are not; an empty piece is mapped
    /// nowhere in particular.
    ///
    /// # Errors
    /// As [`Handle::read`], for `WRITE` as [`Handle::write`], and [`DmaError::NotContiguous`].
    pub fn map(&self, addr: u64, len: usize, access: Access) -> Result<Mapping, DmaError> {
        let access = with_direction(access);
        let mut piece = None;
        let mut pieces = 0;
        self.each_piece(addr, len, access, |_, (host, _)| {
            piece.get_or_insert(host);
            pieces += 1;
        })?;
        if pieces > 1 {
            return Err(DmaError::NotContiguous { addr, len });
        }
        let host = piece.and_then(NonNull::new).unwrap_or(NonNull::dangling());
        Ok(Mapping::new(host, len, Hold::new(&self.pin, access)))
    }

    /// Appends to `out` the host memory behind bytes `skip .. skip + len` of the buffer that `segments` make
    /// up, and returns what keeps it mapped. Nothing is appended on an error. No piece is empty.
    ///
    /// # Errors
    /// As [`Handle::read`], for `WRITE` as [`Handle::write`]; `done` is what could have been mapped. A buffer that is
    /// too short is [`DmaError::Unmapped`] at its end.
    pub fn map_segments(
        &self,
        segments: &[Segment],
        skip: u64,
        len: u64,
        access: Access,
        out: &mut Vec<HostSlice>,
    ) -> Result<Hold, DmaError> {
        let access = with_direction(access);
        let before = out.len();
        each_segment(segments, skip, len, |addr, _, n| {
            self.each_piece(addr, n, access, |_, (ptr, len)| out.push(HostSlice { ptr, len }))
        })
        .inspect_err(|_| out.truncate(before))?;
        Ok(Hold::new(&self.pin, access))
    }

    /// [`Handle::read`] without the order.
    #[inline]
    fn load(&self, addr: u64, out: &mut [u8], access: Access) -> Result<(), DmaError> {
        let own = out.as_mut_ptr();
        self.each_piece(addr, out.len(), access, |done, (host, n)| {
            // SAFETY: `each_piece` hands out mapped guest memory of the pinned snapshot, and `done + n` is at
            // most the length of `out`, which is ours alone.
            unsafe { copy::load(host, own.add(done), n) };
        })
    }

    /// [`Handle::write`] without the order.
    #[inline]
    fn store(&self, addr: u64, data: &[u8], access: Access) -> Result<(), DmaError> {
        let own = data.as_ptr();
        self.each_piece(addr, data.len(), access, |done, (host, n)| {
            // SAFETY: as in `load`; `data` cannot change while it is borrowed.
            unsafe { copy::store(host, own.add(done), n) };
        })
    }

    /// Finds what is behind `addr .. addr + len` and hands it out in order: bytes done before, then the piece.
    #[inline(always)]
    fn each_piece(
        &self,
        addr: u64,
        len: usize,
        access: Access,
        mut each: impl FnMut(usize, Piece),
    ) -> Result<(), DmaError> {
        // Nearly every access is inside the first region; the rest is out of line.
        if let Some(offset) = self.first.offset(addr)
            && len as u64 <= self.first.left(offset)
            && (self.first.writable() || !access.contains(Access::WRITE))
        {
            if len > 0 {
                each(0, (self.first.host(offset), len));
            }
            return Ok(());
        }
        self.each_piece_anywhere(addr, len, access, each)
    }

    /// [`Handle::each_piece`] in the general case.
    #[inline(never)]
    fn each_piece_anywhere(
        &self,
        addr: u64,
        len: usize,
        access: Access,
        mut each: impl FnMut(usize, Piece),
    ) -> Result<(), DmaError> {
        if len == 0 {
            return Ok(());
        }
        if addr.checked_add(len as u64 - 1).is_none() {
            return Err(DmaError::Wraps { addr, len, done: 0 });
        }
        let mut done = 0;
        // Each turn moves at least one byte, and the last address does not wrap, so the sum below does not.
        while done < len {
            let at = addr + done as u64;
            let Some((span, offset)) =
                self.pin.snapshot.find(at).and_then(|span| Some((span, span.offset(at)?)))
            else {
                return Err(DmaError::Unmapped { addr: at, len, done });
            };
            if access.contains(Access::WRITE) && !span.writable() {
                return Err(DmaError::Denied { addr: at, access: Access::WRITE, len, done });
            }
            let n = span.left(offset).min((len - done) as u64) as usize;
            each(done, (span.host(offset), n));
            done += n;
        }
        Ok(())
    }
}

/// A mapping without a direction is one for reading.
fn with_direction(access: Access) -> Access {
    if access.intersects(Access::READ | Access::WRITE) { access } else { access | Access::READ }
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
