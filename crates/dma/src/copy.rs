//! Copies between guest memory and memory of this process.
//!
//! Guest memory changes at any time, so it is never behind a Rust reference, and never the operand
//! of a plain Rust copy: a racing plain access is undefined in Rust's model, whatever the hardware
//! does. Two means remain:
//!
//! - **Atomic words**, relaxed. An access is cut into naturally aligned pieces of 8, 4, 2 and 1
//!   bytes, as large as alignment allows. Strictly, Rust leaves races between atomics of different
//!   sizes undefined; no compiler exploits that, the hardware defines it, and this crate never
//!   accesses an object that both sides touch at the same time in different sizes.
//! - **Assembly**, which is opaque to the compiler, so that it is an access "by the hardware", like
//!   that of a system call. On x86-64 it moves all but single words ([`x86_64`]).
//!
//! Either way an aligned object of 1, 2, 4 or 8 bytes is moved in *one* access and is never torn.
//! The specification requires that of the 16-bit indices of rings, and drivers expect it of their
//! 32- and 64-bit fields. Other architectures than x86-64 use words throughout. Miri knows neither
//! assembly nor atomics that overlap in different sizes; for it, every word is moved as atomic
//! bytes. For loom, memory is modelled, a cell for each object.
//!
//! These functions make no order: see [`Access`](crate::Access).
#[cfg(not(loom))]
mod atomic;
#[cfg(loom)]
mod modelled;
mod word;
#[cfg(any(test, miri, loom, not(target_arch = "x86_64")))]
mod words;
#[cfg(all(target_arch = "x86_64", not(any(miri, loom))))]
mod x86_64;

#[cfg(any(miri, loom, not(target_arch = "x86_64")))]
use words as many;
#[cfg(all(target_arch = "x86_64", not(any(miri, loom))))]
use x86_64 as many;

use word::Word;

/// Copies `len` bytes from guest memory.
///
/// # Safety
/// `guest .. guest + len` is mapped guest memory that stays mapped during the call, `own .. own +
/// len` is memory of our own that nothing else touches.
#[inline(always)]
pub(crate) unsafe fn load(guest: *const u8, own: *mut u8, len: usize) {
    // SAFETY: each arm stays within `len` bytes, which the caller vouches for, and checks alignment
    // first. With a constant length, as for objects, one arm remains.
    unsafe {
        match len {
            1 => u8::load(guest, own),
            2 if guest.cast::<u16>().is_aligned() => u16::load(guest, own),
            4 if guest.cast::<u32>().is_aligned() => u32::load(guest, own),
            8 if guest.cast::<u64>().is_aligned() => u64::load(guest, own),
            // As in `store`.
            12 if guest.cast::<u32>().is_aligned() => {
                u32::load(guest, own);
                u32::load(guest.add(4), own.add(4));
                u32::load(guest.add(8), own.add(8));
            }
            _ => many::load(guest, own, len),
        }
    }
}

/// [`load`] of a part of an access of `whole` bytes.
///
/// # Safety
/// As [`load`].
#[inline(always)]
pub(crate) unsafe fn load_part(guest: *const u8, own: *mut u8, len: usize, whole: usize) {
    // SAFETY: the caller's promise. A word is moved by `load`, in one access.
    unsafe { if len <= 8 { load(guest, own, len) } else { many::load_part(guest, own, len, whole) } }
}

/// Copies `len` bytes into guest memory.
///
/// # Safety
/// As [`load`]; `own` is only read.
#[inline(always)]
pub(crate) unsafe fn store(guest: *mut u8, own: *const u8, len: usize) {
    // SAFETY: as in `load`.
    unsafe {
        match len {
            1 => u8::store(guest, own),
            2 if guest.cast::<u16>().is_aligned() => u16::store(guest, own),
            4 if guest.cast::<u32>().is_aligned() => u32::store(guest, own),
            8 if guest.cast::<u64>().is_aligned() => u64::store(guest, own),
            // Size of the header of a network frame, which is built in registers. Stored to memory
            // and read back in pieces of other sizes, it would wait for all earlier stores.
            12 if guest.cast::<u32>().is_aligned() => {
                u32::store(guest, own);
                u32::store(guest.add(4), own.add(4));
                u32::store(guest.add(8), own.add(8));
            }
            _ => many::store(guest, own, len),
        }
    }
}

/// [`store`] of a part of an access of `whole` bytes.
///
/// # Safety
/// As [`store`].
#[inline(always)]
pub(crate) unsafe fn store_part(guest: *mut u8, own: *const u8, len: usize, whole: usize) {
    // SAFETY: as in `load_part`.
    unsafe { if len <= 8 { store(guest, own, len) } else { many::store_part(guest, own, len, whole) } }
}

/// [`store`] into memory that is not used soon; bypasses the caches if faster.
///
/// Later stores may be seen before it, unless [`flush_far`] comes in between.
///
/// # Safety
/// As [`store`].
#[cfg(not(miri))]
pub(crate) unsafe fn store_far(far: *mut u8, own: *const u8, len: usize) {
    // SAFETY: the caller's promise is the one that is required.
    unsafe {
        #[cfg(all(target_arch = "x86_64", not(loom)))]
        x86_64::store_far(far, own, len);
        #[cfg(not(all(target_arch = "x86_64", not(loom))))]
        store(far, own, len);
    }
}

/// Orders the stores of [`store_far`] before later stores.
///
/// A thread that sees those by an acquire sees it too.
#[cfg(not(miri))]
pub(crate) fn flush_far() {
    #[cfg(all(target_arch = "x86_64", not(loom)))]
    x86_64::flush_far();
}

/// Copies `len` bytes between two memories that others use.
///
/// # Safety
/// Both are mapped for `len` bytes, and stay so during the call.
#[cfg(not(miri))]
pub(crate) unsafe fn between(from: *const u8, to: *mut u8, len: usize) {
    #[cfg(all(target_arch = "x86_64", not(loom)))]
    // SAFETY: the caller's promise; assembly reads either memory as it does ours, and two mappings
    // do not overlap.
    unsafe {
        x86_64::store(to, from, len);
    }
    #[cfg(not(all(target_arch = "x86_64", not(loom))))]
    for done in (0..len).step_by(512) {
        let mut own = [0_u8; 512];
        let now = own.len().min(len - done);
        // SAFETY: the caller's promise, and no more than is left.
        unsafe {
            load(from.add(done), own.as_mut_ptr(), now);
            store(to.add(done), own.as_ptr(), now);
        }
    }
}

/// Sets `len` bytes of guest memory to `byte`.
///
/// # Safety
/// `guest .. guest + len` is mapped guest memory that stays mapped during the call.
#[inline]
pub(crate) unsafe fn fill(guest: *mut u8, byte: u8, len: usize) {
    // SAFETY: the caller's promise is the one that is required.
    unsafe { many::set(guest, byte, len) };
}

/// Size of a cache line in bytes on most machines.
///
/// On others the hint is worth less.
const LINE: usize = 64;

/// Prefetches the cache lines of `guest .. guest + len` for reading or writing.
///
/// A hint: any pointer is allowed.
#[inline(always)]
pub(crate) fn expect<const WRITE: bool>(guest: *mut u8, len: usize) {
    let mut at = guest.map_addr(|addr| addr & !(LINE - 1));
    let end = guest.addr().wrapping_add(len);
    while at.addr() < end {
        expect_line::<WRITE>(at);
        at = at.wrapping_add(LINE);
    }
}

/// Prefetches the first `BYTES` bytes of `guest .. guest + len`, or all of a shorter range.
///
/// Unrolled, except for a shorter range.
#[inline(always)]
pub(crate) fn expect_first<const WRITE: bool, const BYTES: usize>(guest: *mut u8, len: usize) {
    if len < BYTES {
        return expect::<WRITE>(guest, len);
    }
    for at in (0..BYTES).step_by(LINE) {
        expect_line::<WRITE>(guest.wrapping_add(at));
    }
}

/// [`expect`] of at least one byte and at most two lines' length, without a loop.
#[inline(always)]
pub(crate) fn expect_short<const WRITE: bool>(guest: *mut u8, len: usize) {
    debug_assert!((1..=2 * LINE).contains(&len));
    // No two of these are more than a line apart.
    expect_line::<WRITE>(guest);
    expect_line::<WRITE>(guest.wrapping_add(len / 2));
    expect_line::<WRITE>(guest.wrapping_add(len - 1));
}

/// Prefetches the cache line around a byte.
#[inline(always)]
fn expect_line<const WRITE: bool>(at: *mut u8) {
    #[cfg(all(target_arch = "x86_64", not(any(miri, loom))))]
    // SAFETY: a prefetch accesses nothing and never faults.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        if WRITE {
            // The intrinsic becomes a prefetch for reading unless the compiler is told that
            // every processor has this one. Processors that lack it treat it as no operation.
            std::arch::asm!("prefetchw [{at}]", at = in(reg) at.addr(), options(nomem, nostack, preserves_flags));
        } else {
            _mm_prefetch::<_MM_HINT_T0>(at.cast());
        }
    }
    #[cfg(not(all(target_arch = "x86_64", not(any(miri, loom)))))]
    let _ = at;
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: usize = if cfg!(miri) { 96 } else { 40_000 };

    #[repr(align(64))]
    struct Own([u8; SIZE]);

    type Load = unsafe fn(*const u8, *mut u8, usize);
    type Store = unsafe fn(*mut u8, *const u8, usize);
    type Fill = unsafe fn(*mut u8, u8, usize);

    /// Copies that the crate uses here, and those of other machines, in words.
    const WAYS: [(Load, Store, Fill); 2] = [(load, store, fill), (words::load, words::store, words::set)];

    #[cfg(not(miri))]
    #[test]
    fn what_is_far_is_copied_exactly() {
        let mut far = Box::new(Own([0xee; SIZE]));
        let source: Vec<u8> = (0..8192).map(|i| (i * 7 + i / 256 + 1) as u8).collect();
        for len in [0, 1, 100, 127, 128, 384, 4096, 4097, 8192] {
            for shift in [0, 1, 32, 64, 100, 512] {
                far.0.fill(0xee);
                // SAFETY: `shift + len` is below the size of `far`, and nothing else uses it.
                unsafe { store_far(far.0.as_mut_ptr().add(shift), source.as_ptr(), len) };
                flush_far();
                assert!(far.0[shift..shift + len] == source[..len], "{len} bytes at {shift}");
                assert!(far.0[..shift].iter().all(|&b| b == 0xee), "before {len} bytes at {shift}");
                assert!(far.0[shift + len..].iter().all(|&b| b == 0xee), "after {len} bytes at {shift}");
                far.0.fill(0x11);
                // SAFETY: as above; `source` is longer.
                unsafe { between(source.as_ptr(), far.0.as_mut_ptr().add(shift), len) };
                assert!(far.0[shift..shift + len] == source[..len], "{len} bytes at {shift}");
            }
        }
    }

    #[test]
    fn every_length_and_alignment_copies_exactly() {
        // Every path through each loop, and both sides of each length at which the path changes;
        // Miri, which is slow, gets every path through the word loop once.
        let small = if cfg!(miri) { 20 } else { 300 };
        let large: &[usize] = if cfg!(miri) {
            &[37]
        } else {
            &[511, 512, 1000, 1023, 1024, 1025, 4096, 16_383, 16_384, 33_333]
        };
        let mut guest = Box::new(Own([0xee; SIZE]));
        for len in (0..small).chain(large.iter().copied()) {
            let source: Vec<u8> = (0..len).map(|i| (i * 7 + i / 256 + 1) as u8).collect();
            let mut back = vec![0; len];
            for shift in 0..if cfg!(miri) { 8 } else { 33 } {
                for (load, store, fill) in WAYS {
                    let at = guest.0.as_mut_ptr();
                    // SAFETY: `shift + len` is below the size of `guest`, and nothing else uses it.
                    unsafe { store(at.add(shift), source.as_ptr(), len) };
                    back.fill(0);
                    // SAFETY: as above.
                    unsafe { load(at.add(shift), back.as_mut_ptr(), len) };
                    assert!(back == source, "{len} bytes at {shift}");
                    let window = &guest.0[..(shift + len + 64).min(SIZE)];
                    assert!(window[..shift].iter().all(|&b| b == 0xee), "before {len} bytes at {shift}");
                    assert!(window[shift + len..].iter().all(|&b| b == 0xee), "after {len} bytes at {shift}");

                    let at = guest.0.as_mut_ptr();
                    // SAFETY: as above.
                    unsafe { fill(at.add(shift), 0x5a, len) };
                    let window = &mut guest.0[..(shift + len + 64).min(SIZE)];
                    assert!(window[..shift].iter().all(|&b| b == 0xee));
                    assert!(window[shift..shift + len].iter().all(|&b| b == 0x5a));
                    assert!(window[shift + len..].iter().all(|&b| b == 0xee));
                    window.fill(0xee);
                }
            }
        }
    }
}
