//! Moving bytes between guest memory and memory of our own.
//!
//! Guest memory changes under our hands, so it is never behind a Rust reference, and never the operand of a plain
//! Rust copy: a racing plain access is undefined in Rust's model even when the hardware shrugs. Two means are left:
//!
//! - **Atomic words**, relaxed. An access is cut into naturally aligned pieces of 8, 4, 2 and 1 bytes, as large as
//!   alignment allows. It follows that an aligned object of 1, 2, 4 or 8 bytes is moved in *one* access and is never torn;
//!   the specification needs that of the rings' 16-bit indices, and drivers expect it of their 32- and 64-bit fields.
//!   Strictly, Rust leaves races between atomics of different sizes undefined; no compiler makes use of that, the
//!   hardware defines it, and no object that both sides touch at the same time is accessed in different sizes by us.
//! - **A string instruction** (`rep movsb`, `rep stosb`) on x86-64 from [`STRING_MIN`] bytes on. Inline assembly is
//!   opaque to the compiler, so that it is an access "by the hardware", like a system call's. Its stores may become
//!   visible in any order among themselves, but not after a store that follows the instruction, so that the fences
//!   of [`Access`](crate::Access) hold around it as around the words.
//!
//! Miri knows neither assembly nor atomics that overlap in different sizes; for it, every word is moved as atomic bytes.
//!
//! Orders are not made here: see [`Access`](crate::Access).
use std::sync::atomic::{AtomicU8, Ordering};
#[cfg(not(miri))]
use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64};

/// From this length on the string instruction is at least as fast as the word loop on processors with fast
/// short strings; its start-up cost dominates below.
#[cfg(all(target_arch = "x86_64", not(miri)))]
const STRING_MIN: usize = 256;

/// A word that is moved in one relaxed atomic access on the guest's side and in an unaligned one on ours.
trait Word: Sized {
    /// One word out of guest memory.
    ///
    /// # Safety
    /// `guest` is valid for atomic reads and aligned; `own` is valid for writes and not shared.
    unsafe fn load(guest: *const u8, own: *mut u8);

    /// One word into guest memory.
    ///
    /// # Safety
    /// `guest` is valid for atomic writes and aligned; `own` is valid for reads and does not change.
    unsafe fn store(guest: *mut u8, own: *const u8);
}

macro_rules! word {
    ($int:ty, $atomic:ty) => {
        impl Word for $int {
            #[inline(always)]
            unsafe fn load(guest: *const u8, own: *mut u8) {
                debug_assert!(guest.cast::<$int>().is_aligned());
                // SAFETY: the caller promises validity and alignment; an atomic may be shared with anyone.
                // Relaxed: the order is made by the fences in `Access`.
                #[cfg(not(miri))]
                unsafe {
                    let value = <$atomic>::from_ptr(guest.cast_mut().cast()).load(Ordering::Relaxed);
                    own.cast::<$int>().write_unaligned(value);
                }
                #[cfg(miri)]
                for i in 0..size_of::<$int>() {
                    // SAFETY: as above.
                    unsafe {
                        *own.add(i) = AtomicU8::from_ptr(guest.cast_mut().add(i)).load(Ordering::Relaxed)
                    };
                }
            }

            #[inline(always)]
            unsafe fn store(guest: *mut u8, own: *const u8) {
                debug_assert!(guest.cast::<$int>().is_aligned());
                // SAFETY: as above, with the directions exchanged.
                #[cfg(not(miri))]
                unsafe {
                    let value = own.cast::<$int>().read_unaligned();
                    <$atomic>::from_ptr(guest.cast()).store(value, Ordering::Relaxed);
                }
                #[cfg(miri)]
                for i in 0..size_of::<$int>() {
                    // SAFETY: as above.
                    unsafe { AtomicU8::from_ptr(guest.add(i)).store(*own.add(i), Ordering::Relaxed) };
                }
            }
        }
    };
}
word!(u8, AtomicU8);
word!(u16, AtomicU16);
word!(u32, AtomicU32);
word!(u64, AtomicU64);

/// Copies `len` bytes out of guest memory.
///
/// # Safety
/// `guest .. guest + len` is mapped guest memory that stays mapped during the call, `own .. own + len` is
/// memory of our own that nobody else touches.
#[inline(always)]
pub(crate) unsafe fn load(guest: *const u8, own: *mut u8, len: usize) {
    // SAFETY: each arm stays within `len` bytes, which the caller vouches for, and checks alignment first.
    // With a constant length, as for objects, one arm remains.
    unsafe {
        match len {
            1 => u8::load(guest, own),
            2 if guest.cast::<u16>().is_aligned() => u16::load(guest, own),
            4 if guest.cast::<u32>().is_aligned() => u32::load(guest, own),
            8 if guest.cast::<u64>().is_aligned() => u64::load(guest, own),
            _ => load_many(guest, own, len),
        }
    }
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
            _ => store_many(guest, own, len),
        }
    }
}

/// Sets `len` bytes of guest memory to `byte`.
///
/// # Safety
/// `guest .. guest + len` is mapped guest memory that stays mapped during the call.
#[inline]
pub(crate) unsafe fn fill(guest: *mut u8, byte: u8, len: usize) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    if len >= STRING_MIN {
        // SAFETY: the caller's promise; the instruction writes `len` bytes from `guest` on, and the ABI
        // keeps the direction flag clear.
        unsafe {
            std::arch::asm!(
                "rep stosb",
                inout("rcx") len => _,
                inout("rdi") guest => _,
                in("al") byte,
                options(nostack, preserves_flags),
            );
        }
        return;
    }
    let pattern = [byte; 8];
    // The pattern is as long as the largest word, so its start serves every piece.
    // SAFETY: the caller's promise; `pieces` stays within `len` and aligns what it hands out.
    unsafe {
        pieces(guest.addr(), len, |at, size| {
            let guest = guest.add(at);
            match size {
                8 => u64::store(guest, pattern.as_ptr()),
                4 => u32::store(guest, pattern.as_ptr()),
                2 => u16::store(guest, pattern.as_ptr()),
                _ => u8::store(guest, pattern.as_ptr()),
            }
        });
    }
}

/// The general case of [`load`].
///
/// # Safety
/// As [`load`].
#[inline]
unsafe fn load_many(guest: *const u8, own: *mut u8, len: usize) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    if len >= STRING_MIN {
        // SAFETY: the caller's promise; `own` is not guest memory, so that the two do not overlap.
        unsafe { move_string(own, guest, len) };
        return;
    }
    // SAFETY: the caller's promise; `pieces` stays within `len` and aligns what it hands out.
    unsafe {
        pieces(guest.addr(), len, |at, size| {
            let (guest, own) = (guest.add(at), own.add(at));
            match size {
                8 => u64::load(guest, own),
                4 => u32::load(guest, own),
                2 => u16::load(guest, own),
                _ => u8::load(guest, own),
            }
        });
    }
}

/// The general case of [`store`].
///
/// # Safety
/// As [`store`].
#[inline]
unsafe fn store_many(guest: *mut u8, own: *const u8, len: usize) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    if len >= STRING_MIN {
        // SAFETY: as in `load_many`.
        unsafe { move_string(guest, own, len) };
        return;
    }
    // SAFETY: as in `load_many`.
    unsafe {
        pieces(guest.addr(), len, |at, size| {
            let (guest, own) = (guest.add(at), own.add(at));
            match size {
                8 => u64::store(guest, own),
                4 => u32::store(guest, own),
                2 => u16::store(guest, own),
                _ => u8::store(guest, own),
            }
        });
    }
}

/// Cuts `len` bytes at address `start` into naturally aligned pieces of 1, 2, 4 and 8 bytes: small ones up to a
/// multiple of 8, then words, then small ones. `each` gets offset and size; sizes are literals so that, inlined,
/// each call is one access.
#[inline(always)]
fn pieces(start: usize, len: usize, mut each: impl FnMut(usize, usize)) {
    let mut at = 0;
    // Up to a multiple of 2, of 4, of 8. A piece that does not fit is left to the tail, where what remains
    // is shorter than the alignment that has been reached.
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

/// `rep movsb`.
///
/// # Safety
/// `from .. from + len` may be read and `to .. to + len` written, and the two do not overlap.
#[cfg(all(target_arch = "x86_64", not(miri)))]
#[inline(always)]
unsafe fn move_string(to: *mut u8, from: *const u8, len: usize) {
    // SAFETY: the caller's promise; the ABI keeps the direction flag clear.
    unsafe {
        std::arch::asm!(
            "rep movsb",
            inout("rcx") len => _,
            inout("rdi") to => _,
            inout("rsi") from => _,
            options(nostack, preserves_flags),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: usize = if cfg!(miri) { 48 } else { 640 };

    #[repr(align(8))]
    struct Own([u8; SIZE]);

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

    #[test]
    fn every_length_and_alignment_copies_exactly() {
        // Miri, which is slow, gets every way through the word loop once.
        let small = if cfg!(miri) { 20 } else { 40 };
        let large: &[usize] = if cfg!(miri) { &[37] } else { &[63, 64, 65, 255, 256, 257, 300, 512, 600] };
        for len in (0..small).chain(large.iter().copied()) {
            for shift in 0..8 {
                let source: Vec<u8> = (0..len).map(|i| (i * 7 + 1) as u8).collect();
                let mut guest = Own([0xee; SIZE]);
                let at = guest.0.as_mut_ptr();
                // SAFETY: `shift + len` is below the size of `guest`, and nothing else uses it.
                unsafe { store(at.add(shift), source.as_ptr(), len) };
                let mut back = vec![0; len];
                // SAFETY: as above.
                unsafe { load(at.add(shift), back.as_mut_ptr(), len) };
                assert_eq!(back, source);
                assert!(guest.0[..shift].iter().all(|&b| b == 0xee));
                assert!(guest.0[shift + len..].iter().all(|&b| b == 0xee));

                let at = guest.0.as_mut_ptr();
                // SAFETY: as above.
                unsafe { fill(at.add(shift), 0x5a, len) };
                assert!(guest.0[..shift].iter().all(|&b| b == 0xee));
                assert!(guest.0[shift..shift + len].iter().all(|&b| b == 0x5a));
                assert!(guest.0[shift + len..].iter().all(|&b| b == 0xee));
            }
        }
    }
}
