//! Copies in atomic words, where [`super`] has no assembly.
use super::word::Word;

/// Copies `len` bytes from guest memory.
///
/// # Safety
/// As [`super::load`].
pub(super) unsafe fn load(guest: *const u8, own: *mut u8, len: usize) {
    pieces(guest.addr(), len, |at, size| {
        // SAFETY: the caller's promise; `pieces` stays within `len` and aligns what it yields.
        unsafe {
            let (guest, own) = (guest.add(at), own.add(at));
            match size {
                8 => u64::load(guest, own),
                4 => u32::load(guest, own),
                2 => u16::load(guest, own),
                _ => u8::load(guest, own),
            }
        }
    });
}

/// Copies `len` bytes into guest memory.
///
/// # Safety
/// As [`super::store`].
pub(super) unsafe fn store(guest: *mut u8, own: *const u8, len: usize) {
    pieces(guest.addr(), len, |at, size| {
        // SAFETY: as in `load`.
        unsafe { store_piece(guest.add(at), own.add(at), size) };
    });
}

/// [`load`] of a part, which is the same here.
///
/// # Safety
/// As [`load`].
#[cfg(any(miri, loom, not(target_arch = "x86_64")))]
pub(super) unsafe fn load_part(guest: *const u8, own: *mut u8, len: usize, _whole: usize) {
    // SAFETY: the caller's promise.
    unsafe { load(guest, own, len) };
}

/// [`store`] of a part, which is the same here.
///
/// # Safety
/// As [`store`].
#[cfg(any(miri, loom, not(target_arch = "x86_64")))]
pub(super) unsafe fn store_part(guest: *mut u8, own: *const u8, len: usize, _whole: usize) {
    // SAFETY: the caller's promise.
    unsafe { store(guest, own, len) };
}

/// Sets `len` bytes of guest memory to `byte`.
///
/// # Safety
/// As [`super::fill`].
pub(super) unsafe fn set(guest: *mut u8, byte: u8, len: usize) {
    // As long as the largest word, so that its start serves every piece.
    let pattern = [byte; 8];
    pieces(guest.addr(), len, |at, size| {
        // SAFETY: as in `load`.
        unsafe { store_piece(guest.add(at), pattern.as_ptr(), size) };
    });
}

/// Stores one of the pieces that [`pieces`] yields.
///
/// # Safety
/// As [`Word::store`] for a word of `size` bytes.
#[inline(always)]
unsafe fn store_piece(guest: *mut u8, own: *const u8, size: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        match size {
            8 => u64::store(guest, own),
            4 => u32::store(guest, own),
            2 => u16::store(guest, own),
            _ => u8::store(guest, own),
        }
    }
}

/// Cuts `len` bytes at address `start` into aligned pieces of 1, 2, 4 and 8 bytes.
///
/// Small pieces up to a multiple of 8 come first, then words, then small pieces. `each` gets offset
/// and size; sizes are literals so that, inlined, each call is one access.
#[inline(always)]
fn pieces(start: usize, len: usize, mut each: impl FnMut(usize, usize)) {
    let mut at = 0;
    // Up to a multiple of 2, of 4, of 8. A piece that does not fit is left to the tail, where the
    // rest is shorter than the alignment that was reached.
    if start & 1 != 0 && len >= 1 {
        each(at, 1);
        at += 1;
    }
    if (start + at) & 2 != 0 && len - at >= 2 {
        each(at, 2);
        at += 2;
    }
    if (start + at) & 4 != 0 && len - at >= 4 {
        each(at, 4);
        at += 4;
    }
    while len - at >= 8 {
        each(at, 8);
        at += 8;
    }
    let rest = len - at;
    if rest & 4 != 0 {
        each(at, 4);
        at += 4;
    }
    if rest & 2 != 0 {
        each(at, 2);
        at += 2;
    }
    if rest & 1 != 0 {
        each(at, 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_everything_once_and_are_aligned() {
        for start in 0..16 {
            for len in 0..70 {
                let mut next = 0;
                pieces(start, len, |at, size| {
                    assert_eq!(at, next);
                    assert_eq!((start + at) % size, 0, "start {start} len {len}: {size} bytes at {at}");
                    next = at + size;
                });
                assert_eq!(next, len);
            }
        }
    }

    #[test]
    fn an_aligned_object_is_one_piece() {
        for size in [1, 2, 4, 8] {
            for start in (0..32).step_by(size) {
                let mut count = 0;
                pieces(start, size, |_, _| count += 1);
                assert_eq!(count, 1, "{size} bytes at {start}");
            }
        }
    }
}
