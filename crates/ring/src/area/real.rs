//! Areas in real memory.
use core::ptr::NonNull;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};

pub(crate) use core::sync::atomic::fence;

/// Bytes of a cache line on most machines. On others a hint is worth less.
const LINE: usize = 64;

/// A range of shared memory. Copies name the same memory.
///
/// Every access is atomic, through a raw pointer, and checked against the length, so no data race
/// is undefined behaviour.
#[derive(Clone, Copy, Debug)]
pub struct Area {
    ptr: NonNull<u8>,
    len: usize,
}

// SAFETY: an Area is only a place; every access through it is atomic.
unsafe impl Send for Area {}
// SAFETY: as above.
unsafe impl Sync for Area {}

impl Area {
    /// Names `len` bytes at `ptr`.
    ///
    /// # Safety
    /// The bytes must stay mapped, readable and writable for as long as any copy of the result, or
    /// of a part of it, is used; Rust references to them must not exist in that time. Memory of a
    /// [`TableMemory`](crate::device::TableMemory) need not be writable: it is only read.
    pub const unsafe fn new(ptr: NonNull<u8>, len: usize) -> Self {
        Self { ptr, len }
    }

    /// Length in bytes.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether the area has no bytes.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// First byte.
    #[must_use]
    pub const fn as_ptr(&self) -> NonNull<u8> {
        self.ptr
    }

    /// A part of this area, or `None` if it does not lie inside.
    #[must_use]
    pub fn slice(&self, offset: usize, len: usize) -> Option<Self> {
        if !self.holds(offset, len) {
            return None;
        }
        // SAFETY: `offset` is at most the length of the area, which `Area::new`'s caller vouched
        // for.
        Some(Self { ptr: unsafe { self.ptr.add(offset) }, len })
    }

    /// Copies `out.len()` bytes at `offset` out of the area (relaxed).
    ///
    /// `false`, and nothing copied, if they do not lie inside.
    #[must_use]
    pub fn read(&self, offset: usize, out: &mut [u8]) -> bool {
        if !self.holds(offset, out.len()) {
            return false;
        }
        // SAFETY: the bytes lie inside, as just checked.
        let from = unsafe { self.ptr.as_ptr().add(offset) };
        let (head, words) = split(from, out.len());
        for (i, byte) in out[..head].iter_mut().enumerate() {
            // SAFETY: `i < out.len()`, and those bytes lie inside.
            *byte = unsafe { byte_at(from, i) }.load(Relaxed);
        }
        let (middle, tail) = out[head..].split_at_mut(words * 8);
        for (i, bytes) in middle.chunks_exact_mut(8).enumerate() {
            // SAFETY: the word's bytes lie inside, and `split` put it on an 8-byte boundary.
            let word = unsafe { word_at(from, head + i * 8) }.load(Relaxed);
            bytes.copy_from_slice(&word.to_ne_bytes());
        }
        for (i, byte) in tail.iter_mut().enumerate() {
            // SAFETY: as for the first bytes.
            *byte = unsafe { byte_at(from, head + words * 8 + i) }.load(Relaxed);
        }
        true
    }

    /// Copies `data` into the area at `offset` (relaxed).
    ///
    /// `false`, and nothing copied, if it does not fit.
    #[must_use]
    pub fn write(&self, offset: usize, data: &[u8]) -> bool {
        if !self.holds(offset, data.len()) {
            return false;
        }
        // SAFETY: the bytes lie inside, as just checked.
        let to = unsafe { self.ptr.as_ptr().add(offset) };
        let (head, words) = split(to, data.len());
        for (i, byte) in data[..head].iter().enumerate() {
            // SAFETY: `i < data.len()`, and those bytes lie inside.
            unsafe { byte_at(to, i) }.store(*byte, Relaxed);
        }
        let (middle, tail) = data[head..].split_at(words * 8);
        for (i, bytes) in middle.chunks_exact(8).enumerate() {
            let mut word = [0; 8];
            word.copy_from_slice(bytes);
            // SAFETY: the word's bytes lie inside, and `split` put it on an 8-byte boundary.
            unsafe { word_at(to, head + i * 8) }.store(u64::from_ne_bytes(word), Relaxed);
        }
        for (i, byte) in tail.iter().enumerate() {
            // SAFETY: as for the first bytes.
            unsafe { byte_at(to, head + words * 8 + i) }.store(*byte, Relaxed);
        }
        true
    }

    /// Reads a little-endian u64 (relaxed).
    ///
    /// `None` if it is outside or `offset` makes it misaligned.
    #[must_use]
    pub fn load_u64(&self, offset: usize) -> Option<u64> {
        self.word(offset).map(|word| u64::from_le(word.load(Relaxed)))
    }

    /// Stores a little-endian u64 (relaxed); `false` if it is outside or misaligned.
    #[must_use]
    pub fn store_u64(&self, offset: usize, value: u64) -> bool {
        self.word(offset).map(|word| word.store(value.to_le(), Relaxed)).is_some()
    }

    /// Zeroes everything (relaxed).
    pub(crate) fn zero(&self) {
        let from = self.ptr.as_ptr();
        let (head, words) = split(from, self.len);
        let tail = head + words * 8;
        for i in (0..head).chain(tail..self.len) {
            // SAFETY: `i < self.len`.
            unsafe { byte_at(from, i) }.store(0, Relaxed);
        }
        for i in 0..words {
            // SAFETY: the word's bytes lie inside, and `split` put it on an 8-byte boundary.
            unsafe { word_at(from, head + i * 8) }.store(0, Relaxed);
        }
    }

    /// Whether the first byte lies on a multiple of `align` (a power of two).
    pub(crate) fn is_aligned(&self, align: usize) -> bool {
        self.ptr.as_ptr().addr() & (align - 1) == 0
    }

    /// The memory without its length, for code that has checked its offsets.
    pub(crate) fn cells(&self) -> Cells {
        Cells { ptr: self.ptr }
    }

    fn holds(&self, offset: usize, len: usize) -> bool {
        offset.checked_add(len).is_some_and(|end| end <= self.len)
    }

    fn word(&self, offset: usize) -> Option<&AtomicU64> {
        if !self.holds(offset, 8) {
            return None;
        }
        // SAFETY: the offset lies inside, as just checked.
        let at = unsafe { self.ptr.as_ptr().add(offset) };
        if at.addr() & 7 != 0 {
            return None;
        }
        // SAFETY: inside, aligned, and only accessed atomically, which `Area::new`'s caller vouched
        // for.
        Some(unsafe { AtomicU64::from_ptr(at.cast()) })
    }
}

/// Cuts memory at the first 8-byte boundary: bytes before, whole words after.
fn split(ptr: *mut u8, len: usize) -> (usize, usize) {
    let head = (ptr.addr().wrapping_neg() & 7).min(len);
    (head, (len - head) / 8)
}

/// The byte `offset` after `ptr`.
///
/// # Safety
/// It lies in an [`Area`].
unsafe fn byte_at<'a>(ptr: *mut u8, offset: usize) -> &'a AtomicU8 {
    // SAFETY: the caller vouches for the place, `Area::new`'s caller for its being accessed
    // atomically.
    unsafe { AtomicU8::from_ptr(ptr.add(offset)) }
}

/// The word `offset` bytes after `ptr`.
///
/// # Safety
/// It lies in an [`Area`], on an 8-byte boundary.
unsafe fn word_at<'a>(ptr: *mut u8, offset: usize) -> &'a AtomicU64 {
    // SAFETY: the caller vouches for the place, `Area::new`'s caller for its being accessed
    // atomically.
    unsafe { AtomicU64::from_ptr(ptr.add(offset).cast()) }
}

/// Little-endian cells at offsets that were checked when the queue was made.
///
/// There is no check for each access.
///
/// Every function here asks of its caller that the cell lies in the [`Area`] that the cells came
/// from, on a multiple of its size.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cells {
    ptr: NonNull<u8>,
}

// SAFETY: cells are only a place; every access through them is atomic.
unsafe impl Send for Cells {}
// SAFETY: as above.
unsafe impl Sync for Cells {}

impl Cells {
    /// The cells from `offset` on.
    ///
    /// # Safety
    /// `offset` is at most the length of the [`Area`].
    #[inline(always)]
    pub(crate) unsafe fn offset(self, offset: usize) -> Self {
        // SAFETY: the caller vouches for the place.
        Self { ptr: unsafe { self.ptr.add(offset) } }
    }

    /// The cells from `offset` on, which is negative: cells before an end.
    ///
    /// # Safety
    /// At least `-offset` bytes of the [`Area`] lie before these cells.
    #[inline(always)]
    pub(crate) unsafe fn back(self, offset: isize) -> Self {
        // SAFETY: the caller vouches for the place.
        Self { ptr: unsafe { self.ptr.offset(offset) } }
    }

    /// Prefetches the cache lines of `len` bytes from `offset` on, to be written.
    ///
    /// A hint that waits for nothing: any place will do.
    #[inline(always)]
    pub(crate) fn expect_write(self, offset: isize, len: usize) {
        let from = self.ptr.as_ptr().wrapping_offset(offset);
        let mut at = from.map_addr(|addr| addr & !(LINE - 1));
        while at.addr() < from.addr() + len {
            // The intrinsic becomes a prefetch for reading unless the compiler is told that every
            // processor has this one; those that do not take it for no operation. SAFETY: a
            // prefetch accesses nothing and never faults.
            #[cfg(all(target_arch = "x86_64", not(miri)))]
            unsafe {
                core::arch::asm!("prefetchw [{at}]", at = in(reg) at.addr(), options(nomem, nostack, preserves_flags));
            }
            at = at.wrapping_add(LINE);
        }
    }

    /// # Safety
    /// See [`Cells`].
    #[inline(always)]
    pub(crate) unsafe fn load_u16(self, offset: usize, order: Ordering) -> u16 {
        // SAFETY: the caller vouches for place and alignment.
        u16::from_le(unsafe { AtomicU16::from_ptr(self.ptr.as_ptr().add(offset).cast()) }.load(order))
    }

    /// # Safety
    /// See [`Cells`].
    #[inline(always)]
    pub(crate) unsafe fn store_u16(self, offset: usize, value: u16, order: Ordering) {
        #[cfg(test)]
        super::fuse::burn();
        // SAFETY: the caller vouches for place and alignment.
        unsafe { AtomicU16::from_ptr(self.ptr.as_ptr().add(offset).cast()) }.store(value.to_le(), order);
    }

    /// Relaxed.
    ///
    /// # Safety
    /// See [`Cells`].
    #[inline(always)]
    pub(crate) unsafe fn load_u32(self, offset: usize) -> u32 {
        // SAFETY: the caller vouches for place and alignment.
        u32::from_le(unsafe { AtomicU32::from_ptr(self.ptr.as_ptr().add(offset).cast()) }.load(Relaxed))
    }

    /// Relaxed.
    ///
    /// # Safety
    /// See [`Cells`].
    #[inline(always)]
    pub(crate) unsafe fn store_u32(self, offset: usize, value: u32) {
        #[cfg(test)]
        super::fuse::burn();
        // SAFETY: the caller vouches for place and alignment.
        unsafe { AtomicU32::from_ptr(self.ptr.as_ptr().add(offset).cast()) }.store(value.to_le(), Relaxed);
    }

    /// Relaxed.
    ///
    /// # Safety
    /// See [`Cells`].
    #[inline(always)]
    pub(crate) unsafe fn load_u64(self, offset: usize) -> u64 {
        // SAFETY: the caller vouches for place and alignment.
        u64::from_le(unsafe { AtomicU64::from_ptr(self.ptr.as_ptr().add(offset).cast()) }.load(Relaxed))
    }

    /// Acquire, from the whole word.
    ///
    /// # Safety
    /// See [`Cells`].
    #[inline(always)]
    pub(crate) unsafe fn load_u64_acquire(self, offset: usize) -> u64 {
        // SAFETY: the caller vouches for place and alignment.
        u64::from_le(unsafe { AtomicU64::from_ptr(self.ptr.as_ptr().add(offset).cast()) }.load(Acquire))
    }

    /// Release, of the whole word.
    ///
    /// # Safety
    /// See [`Cells`].
    #[inline(always)]
    pub(crate) unsafe fn store_u64_release(self, offset: usize, value: u64) {
        #[cfg(test)]
        super::fuse::burn();
        // SAFETY: the caller vouches for place and alignment.
        unsafe { AtomicU64::from_ptr(self.ptr.as_ptr().add(offset).cast()) }.store(value.to_le(), Release);
    }

    /// Relaxed.
    ///
    /// # Safety
    /// See [`Cells`].
    #[inline(always)]
    pub(crate) unsafe fn store_u64(self, offset: usize, value: u64) {
        #[cfg(test)]
        super::fuse::burn();
        // SAFETY: the caller vouches for place and alignment.
        unsafe { AtomicU64::from_ptr(self.ptr.as_ptr().add(offset).cast()) }.store(value.to_le(), Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::Area;
    use alloc::vec;
    use alloc::vec::Vec;
    use core::ptr::NonNull;

    /// Runs `f` on 64 zero bytes on an 8-byte boundary, and returns the bytes.
    fn with_area(f: impl FnOnce(Area)) -> Vec<u8> {
        let mut words = vec![0u64; 8];
        // SAFETY: `words` outlives the area and is not touched while the area is.
        f(unsafe { Area::new(NonNull::new(words.as_mut_ptr().cast()).unwrap(), 64) });
        words.iter().flat_map(|word| word.to_ne_bytes()).collect()
    }

    #[test]
    fn every_offset_and_length_is_copied_exactly() {
        let data: Vec<u8> = (1..=64).collect();
        // The interpreter is slow: there, half as many words and every third length.
        let (offsets, step) = if cfg!(miri) { (9, 3) } else { (25, 1) };
        for offset in 0..offsets {
            for len in (0..=40).step_by(step) {
                let after = with_area(|area| {
                    assert!(area.write(offset, &data[..len]));
                    let mut back = vec![0xff; len];
                    assert!(area.read(offset, &mut back));
                    assert_eq!(back, &data[..len]);
                });
                let mut expected = vec![0; 64];
                expected[offset..offset + len].copy_from_slice(&data[..len]);
                assert_eq!(after, expected, "offset {offset}, length {len}");
            }
        }
    }

    #[test]
    fn what_does_not_lie_inside_is_refused_whole() {
        let after = with_area(|area| {
            let mut out = [7; 9];
            for offset in [56, 64, 65, usize::MAX - 3, usize::MAX] {
                assert!(!area.read(offset, &mut out));
                assert!(!area.write(offset, &[1; 9]));
                assert!(area.slice(offset, 9).is_none());
            }
            assert_eq!(out, [7; 9]);
            assert!(area.slice(64, 0).is_some_and(|empty| empty.is_empty()));
        });
        assert_eq!(after, vec![0; 64]);
    }

    #[test]
    fn words_are_little_endian_aligned_and_inside() {
        let after = with_area(|area| {
            assert!(area.store_u64(8, 0x0102_0304_0506_0708));
            assert_eq!(area.load_u64(8), Some(0x0102_0304_0506_0708));
            assert!(!area.store_u64(4, 1));
            assert!(!area.store_u64(60, 1));
            assert!(!area.store_u64(64, 1));
            assert_eq!(area.load_u64(1), None);
            assert_eq!(area.load_u64(usize::MAX), None);
            let part = area.slice(4, 12).unwrap();
            assert_eq!(part.load_u64(4), Some(0x0102_0304_0506_0708), "alignment is the memory's");
            assert_eq!(part.load_u64(0), None);
        });
        assert_eq!(&after[8..16], &[8, 7, 6, 5, 4, 3, 2, 1]);
    }

    #[test]
    fn zero_clears_odd_ends_too() {
        let after = with_area(|area| {
            assert!(area.write(0, &[0xee; 64]));
            area.slice(3, 50).unwrap().zero();
        });
        let mut expected = vec![0xee; 64];
        expected[3..53].fill(0);
        assert_eq!(after, expected);
    }
}
