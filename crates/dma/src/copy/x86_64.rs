//! Copies on x86-64, in assembly throughout.
//!
//! The compiler takes them for accesses "by the hardware".
//!
//! ```text
//! len        1 ..= 63      general and 16-byte registers, a piece for each bit of the length
//!           64 ..          blocks of 64 bytes first
//!          384 ..          with AVX: up to a multiple of 64, blocks of 128 bytes, then as above
//!         3072 ..          with AVX-512 as well: blocks of 256 bytes
//!         1024 ..          without AVX, with ERMS: `rep movsb`
//!        16384 ..          with ERMS: `rep movsb`; into memory of our own, 32768
//! ```
//! A part of a longer access, such as a page of scattered guest memory, is moved by `rep movsb` if
//! the whole would be: the choice depends on whether the first-level cache will hold the data.
//!
//! No byte is accessed twice: if a guest answers to the first byte it sees, no second try
//! overwrites the answer. Every instruction here is an ordinary load or store in x86's memory
//! order: a later one, and a fence of [`Access`](crate::Access), which the compiler does not move
//! across assembly, keeps its place. Only within `rep movsb` may the stores become visible in any
//! order; those after it stay after it.
use std::arch::asm;
use std::arch::x86_64::{__m128i, _mm_set1_epi8};
use std::is_x86_feature_detected as detected;
use std::sync::atomic::{AtomicU8, Ordering};

/// Length from which 32-byte registers gain more than detecting them costs.
const AVX_MIN: usize = 384;
/// Bytes in one turn of the AVX loop.
const AVX_BLOCK: usize = 128;
/// Length from which storing whole cache lines at once pays, if the processor can.
const AVX512_MIN: usize = 3 << 10;
/// Length from which the string instruction beats 32-byte registers.
///
/// It takes over lines of the destination without reading them.
const STRING_STORE_MIN: usize = 16 << 10;
/// The same for memory of our own, which is used again and so mostly cached.
const STRING_LOAD_MIN: usize = 32 << 10;
/// Length from which the string instruction beats 16-byte registers.
///
/// Below, its start-up cost dominates.
const STRING_MIN_NO_AVX: usize = 1 << 10;

/// Features of the processor.
#[derive(Clone, Copy, Debug)]
struct CpuFeatures {
    /// Registers of 32 bytes.
    avx: bool,
    /// Registers of 64 bytes that do not slow the processor down (with VBMI2).
    avx512: bool,
    /// Fast string instructions.
    erms: bool,
}

/// Result of [`CpuFeatures::detect`] as bits; 0 before the first call.
static FOUND: AtomicU8 = AtomicU8::new(0);
const KNOWN: u8 = 1;
const AVX: u8 = 2;
const AVX512: u8 = 4;
const ERMS: u8 = 8;

impl CpuFeatures {
    /// Detects the features once; later calls test bits.
    #[inline(always)]
    fn detect() -> Self {
        // Relaxed: a thread that finds 0 detects them itself, with the same result.
        let mut found = FOUND.load(Ordering::Relaxed);
        if found == 0 {
            found = Self::find_out();
        }
        Self { avx: found & AVX != 0, avx512: found & AVX512 != 0, erms: found & ERMS != 0 }
    }

    #[cold]
    fn find_out() -> u8 {
        let mut found = KNOWN;
        if detected!("avx") {
            found |= AVX;
        }
        if detected!("avx512f") && detected!("avx512vbmi2") {
            found |= AVX512;
        }
        if detected!("ermsb") {
            found |= ERMS;
        }
        FOUND.store(found, Ordering::Relaxed);
        found
    }
}

/// Copies `$bytes` with one load and one store, and steps over them.
macro_rules! piece {
    ($to:ident, $from:ident, $bytes:literal, $class:ident, $load:literal, $store:literal) => {
        asm!(
            $load,
            $store,
            to = in(reg) $to,
            from = in(reg) $from,
            t = out($class) _,
            options(nostack, preserves_flags),
        );
        $to = $to.wrapping_add($bytes);
        $from = $from.wrapping_add($bytes);
    };
}

/// Copies blocks of [`AVX_BLOCK`] bytes while `$left` has one; at least one.
///
/// `$store` chooses the alignment of the store.
macro_rules! avx_blocks {
    ($store:literal, $to:ident, $from:ident, $left:ident) => {
        // The instruction clears the upper halves of all sixteen registers, not only of the four in
        // use: hence the clobbers of a whole call.
        asm!(
            "2:",
            "vmovdqu ymm0, [rsi]",
            "vmovdqu ymm1, [rsi + 32]",
            "vmovdqu ymm2, [rsi + 64]",
            "vmovdqu ymm3, [rsi + 96]",
            concat!($store, " [rdi], ymm0"),
            concat!($store, " [rdi + 32], ymm1"),
            concat!($store, " [rdi + 64], ymm2"),
            concat!($store, " [rdi + 96], ymm3"),
            "sub rsi, -128",
            "sub rdi, -128",
            "add rcx, -128",
            "cmp rcx, 128",
            "jae 2b",
            "vzeroupper",
            inout("rsi") $from => _,
            inout("rdi") $to => _,
            inout("rcx") $left,
            clobber_abi("sysv64"),
            options(nostack),
        );
    };
}

/// Copies `len` bytes from guest memory.
///
/// # Safety
/// As [`super::load`].
#[inline(always)]
pub(super) unsafe fn load(guest: *const u8, own: *mut u8, len: usize) {
    // SAFETY: the caller's promise; `own` is not guest memory, so that the two do not overlap.
    unsafe { copy::<STRING_LOAD_MIN>(own, guest, len) };
}

/// [`load`] of a part of an access of `whole` bytes.
///
/// # Safety
/// As [`super::load`].
pub(super) unsafe fn load_part(guest: *const u8, own: *mut u8, len: usize, whole: usize) {
    // SAFETY: as in `load`.
    unsafe { copy_part::<STRING_LOAD_MIN>(own, guest, len, whole) };
}

/// Copies `len` bytes into guest memory.
///
/// # Safety
/// As [`super::store`].
#[inline(always)]
pub(super) unsafe fn store(guest: *mut u8, own: *const u8, len: usize) {
    // SAFETY: as in `load`.
    unsafe { copy::<STRING_STORE_MIN>(guest, own, len) };
}

/// Copies `len` bytes of our own into memory that is not used soon.
///
/// Bypasses the caches.
///
/// Later stores may be seen before it, unless [`flush_far`] comes in between.
///
/// # Safety
/// As [`super::store`].
pub(super) unsafe fn store_far(far: *mut u8, own: *const u8, len: usize) {
    if !CpuFeatures::detect().avx || len < AVX_BLOCK || !far.addr().is_multiple_of(32) {
        // SAFETY: the caller's promise.
        return unsafe { store(far, own, len) };
    }
    let mut left = len;
    // SAFETY: the caller's promise; at least a block, to an address that the instructions
    // accept, and then the rest.
    unsafe {
        avx_blocks!("vmovntdq", far, own, left);
        let done = len - left;
        copy_short(far.wrapping_add(done), own.wrapping_add(done), left);
    }
}

/// Orders the stores of [`store_far`] before later stores.
pub(super) fn flush_far() {
    // SAFETY: orders stores, and does nothing else.
    unsafe { std::arch::x86_64::_mm_sfence() };
}

/// [`store`] of a part of an access of `whole` bytes.
///
/// # Safety
/// As [`super::store`].
pub(super) unsafe fn store_part(guest: *mut u8, own: *const u8, len: usize, whole: usize) {
    // SAFETY: as in `load`.
    unsafe { copy_part::<STRING_STORE_MIN>(guest, own, len, whole) };
}

/// Copies `len` bytes, by the string instruction from `MIN` on.
///
/// # Safety
/// `from .. from + len` may be read and `to .. to + len` written, and the two do not overlap.
#[inline(never)]
unsafe fn copy<const MIN: usize>(to: *mut u8, from: *const u8, len: usize) {
    // SAFETY: the caller's promise.
    unsafe { copy_part::<MIN>(to, from, len, len) };
}

/// [`copy`] of a part of `whole` bytes.
///
/// # Safety
/// As [`copy`].
#[inline(always)]
unsafe fn copy_part<const MIN: usize>(to: *mut u8, from: *const u8, len: usize, whole: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        // Separate functions, so that short copies save no registers that only long ones need.
        if len < AVX_MIN { copy_short(to, from, len) } else { copy_all(to, from, len, whole >= MIN) }
    }
}

/// [`copy`] for at least [`AVX_MIN`] bytes.
///
/// # Safety
/// As [`copy`].
#[inline(never)]
unsafe fn copy_all(to: *mut u8, from: *const u8, len: usize, string: bool) {
    // SAFETY: the caller's promise, and `copy_long` copies no more than `len`.
    unsafe {
        let done = copy_long(to, from, len, string, CpuFeatures::detect());
        copy_short(to.wrapping_add(done), from.wrapping_add(done), len - done);
    }
}

/// [`copy`] in blocks of 64 bytes and smaller pieces.
///
/// # Safety
/// As [`copy`].
#[inline(always)]
unsafe fn copy_short(mut to: *mut u8, mut from: *const u8, mut len: usize) {
    // SAFETY: the caller's promise; each step moves both pointers by what it has done and is taken
    // only while as many bytes are left.
    unsafe {
        while len >= 64 {
            asm!(
                "movdqu {a}, [{from}]",
                "movdqu {b}, [{from} + 16]",
                "movdqu {c}, [{from} + 32]",
                "movdqu {d}, [{from} + 48]",
                "movdqu [{to}], {a}",
                "movdqu [{to} + 16], {b}",
                "movdqu [{to} + 32], {c}",
                "movdqu [{to} + 48], {d}",
                from = in(reg) from,
                to = in(reg) to,
                a = out(xmm_reg) _,
                b = out(xmm_reg) _,
                c = out(xmm_reg) _,
                d = out(xmm_reg) _,
                options(nostack, preserves_flags),
            );
            (to, from, len) = (to.wrapping_add(64), from.wrapping_add(64), len - 64);
        }
        if len == 0 {
            return;
        }
        // Large pieces first: at an aligned address each of them is aligned.
        if len & 32 != 0 {
            piece!(to, from, 16, xmm_reg, "movdqu {t}, [{from}]", "movdqu [{to}], {t}");
            piece!(to, from, 16, xmm_reg, "movdqu {t}, [{from}]", "movdqu [{to}], {t}");
        }
        if len & 16 != 0 {
            piece!(to, from, 16, xmm_reg, "movdqu {t}, [{from}]", "movdqu [{to}], {t}");
        }
        if len & 8 != 0 {
            piece!(to, from, 8, reg, "mov {t}, [{from}]", "mov [{to}], {t}");
        }
        if len & 4 != 0 {
            piece!(to, from, 4, reg, "mov {t:e}, [{from}]", "mov [{to}], {t:e}");
        }
        if len & 2 != 0 {
            piece!(to, from, 2, reg, "movzx {t:e}, word ptr [{from}]", "mov [{to}], {t:x}");
        }
        if len & 1 != 0 {
            piece!(to, from, 1, reg_byte, "mov {t}, [{from}]", "mov [{to}], {t}");
        }
        let _ = (to, from);
    }
}

/// Copies the start of `len` bytes. Returns the number copied.
///
/// `len` is at least [`AVX_MIN`].
///
/// `string`: the access is long, or part of a long one, so that the string instruction is best.
///
/// # Safety
/// As [`copy`]; and the processor has the features in `has`.
#[inline]
unsafe fn copy_long(
    mut to: *mut u8,
    mut from: *const u8,
    len: usize,
    string: bool,
    has: CpuFeatures,
) -> usize {
    if has.erms && len >= STRING_MIN_NO_AVX && (string || !has.avx) {
        // SAFETY: the caller's promise; the ABI keeps the direction flag clear.
        unsafe {
            asm!(
                "rep movsb",
                inout("rcx") len => _,
                inout("rdi") to => _,
                inout("rsi") from => _,
                options(nostack, preserves_flags),
            );
        }
        return len;
    }
    if !has.avx {
        return 0;
    }
    let head = to.align_offset(64);
    let mut left = len - head;
    if left < AVX_BLOCK {
        return 0;
    }
    // SAFETY: the caller's promise; `head` is below 64, its pieces add up to it, and each grows the
    // alignment of `to`.
    unsafe {
        if head != 0 {
            if head & 1 != 0 {
                piece!(to, from, 1, reg_byte, "mov {t}, [{from}]", "mov [{to}], {t}");
            }
            if head & 2 != 0 {
                piece!(to, from, 2, reg, "movzx {t:e}, word ptr [{from}]", "mov [{to}], {t:x}");
            }
            if head & 4 != 0 {
                piece!(to, from, 4, reg, "mov {t:e}, [{from}]", "mov [{to}], {t:e}");
            }
            if head & 8 != 0 {
                piece!(to, from, 8, reg, "mov {t}, [{from}]", "mov [{to}], {t}");
            }
            if head & 16 != 0 {
                piece!(to, from, 16, xmm_reg, "movdqu {t}, [{from}]", "movdqu [{to}], {t}");
            }
            if head & 32 != 0 {
                piece!(to, from, 16, xmm_reg, "movdqu {t}, [{from}]", "movdqu [{to}], {t}");
                piece!(to, from, 16, xmm_reg, "movdqu {t}, [{from}]", "movdqu [{to}], {t}");
            }
        }
        if has.avx512 && left >= AVX512_MIN {
            asm!(
                "2:",
                "vmovdqu64 zmm0, [rsi]",
                "vmovdqu64 zmm1, [rsi + 64]",
                "vmovdqu64 zmm2, [rsi + 128]",
                "vmovdqu64 zmm3, [rsi + 192]",
                "vmovdqa64 [rdi], zmm0",
                "vmovdqa64 [rdi + 64], zmm1",
                "vmovdqa64 [rdi + 128], zmm2",
                "vmovdqa64 [rdi + 192], zmm3",
                "add rsi, 256",
                "add rdi, 256",
                "sub rcx, 256",
                "cmp rcx, 256",
                "jae 2b",
                "vzeroupper",
                inout("rsi") from => _,
                inout("rdi") to => _,
                inout("rcx") left,
                clobber_abi("sysv64"),
                options(nostack),
            );
            return len - left;
        }
        avx_blocks!("vmovdqa", to, from, left);
    }
    len - left
}

/// Sets `len` bytes of guest memory to `byte`.
///
/// # Safety
/// As [`super::fill`].
pub(super) unsafe fn set(mut to: *mut u8, byte: u8, mut len: usize) {
    // SAFETY: SSE2 is part of x86-64. Then the caller's promise; each step moves the pointer by
    // what it has done and is taken only while as many bytes are left; the ABI keeps the direction
    // flag clear.
    unsafe {
        if len >= STRING_MIN_NO_AVX && CpuFeatures::detect().erms {
            asm!(
                "rep stosb",
                inout("rcx") len => _,
                inout("rdi") to => _,
                in("al") byte,
                options(nostack, preserves_flags),
            );
            return;
        }
        let sixteen: __m128i = _mm_set1_epi8(byte.cast_signed());
        let eight = u64::from_ne_bytes([byte; 8]);
        while len >= 16 {
            asm!("movdqu [{to}], {v}", to = in(reg) to, v = in(xmm_reg) sixteen, options(nostack, preserves_flags));
            (to, len) = (to.wrapping_add(16), len - 16);
        }
        if len & 8 != 0 {
            asm!("mov [{to}], {v}", to = in(reg) to, v = in(reg) eight, options(nostack, preserves_flags));
            to = to.wrapping_add(8);
        }
        if len & 4 != 0 {
            asm!("mov [{to}], {v:e}", to = in(reg) to, v = in(reg) eight, options(nostack, preserves_flags));
            to = to.wrapping_add(4);
        }
        if len & 2 != 0 {
            asm!("mov [{to}], {v:x}", to = in(reg) to, v = in(reg) eight, options(nostack, preserves_flags));
            to = to.wrapping_add(2);
        }
        if len & 1 != 0 {
            asm!("mov [{to}], {v}", to = in(reg) to, v = in(reg_byte) byte, options(nostack, preserves_flags));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Copies with fewer processor features than this machine has.
    ///
    /// The test in [`super::super`] copies with all of them.
    #[test]
    fn every_processor_copies_a_prefix() {
        let here = CpuFeatures::detect();
        let source: Vec<u8> = (0..20_000).map(|i| (i * 7 + i / 256 + 1) as u8).collect();
        let mut target = vec![0; source.len() + 64];
        let none = CpuFeatures { avx: false, avx512: false, erms: false };
        let lesser = [
            none,
            CpuFeatures { erms: here.erms, ..none },
            CpuFeatures { avx: here.avx, ..none },
            CpuFeatures { erms: false, ..here },
        ];
        for has in lesser {
            for len in (AVX_MIN..600).chain([1023, 1024, 4096, 16_384, 20_000]) {
                for (shift, string) in [(0, false), (1, true), (8, false), (31, true)] {
                    target.fill(0xee);
                    let to = target[shift..].as_mut_ptr();
                    // SAFETY: both are `len` bytes long, and this processor has the features.
                    let done = unsafe { copy_long(to, source.as_ptr(), len, string, has) };
                    assert!(done <= len);
                    assert!(target[..shift].iter().all(|&b| b == 0xee));
                    assert!(target[shift..shift + done] == source[..done], "{done} of {len} at {shift}");
                    assert!(target[shift + done..].iter().all(|&b| b == 0xee), "after {done} of {len}");
                    if !has.avx {
                        assert_eq!(done, if has.erms && len >= STRING_MIN_NO_AVX { len } else { 0 });
                    }
                }
            }
        }
    }
}
