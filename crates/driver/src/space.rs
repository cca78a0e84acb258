//! Device memory: registers by their address.
#![allow(unsafe_code, reason = "device memory is reached through raw pointers")]
use core::ops::Range;

/// Access to device memory, naturally aligned; addresses are the machine's.
pub trait Space {
    /// Reads 8 bits.
    fn read8(&self, addr: u64) -> u8;
    /// Reads 16 bits.
    fn read16(&self, addr: u64) -> u16;
    /// Reads 32 bits.
    fn read32(&self, addr: u64) -> u32;
    /// Writes 8 bits.
    fn write8(&self, addr: u64, value: u8);
    /// Writes 16 bits.
    fn write16(&self, addr: u64, value: u16);
    /// Writes 32 bits.
    fn write32(&self, addr: u64, value: u32);
}

/// Device memory that the processor reaches by loads and stores.
///
/// Each access is one plain load or store instruction, which every hypervisor can emulate, and is
/// never merged, repeated or left out. Values are little endian. Reads outside of the range, or
/// misaligned ones, return all ones; such writes do nothing. On aarch64 and riscv64 a write comes
/// after all earlier writes to memory, and a read before all later reads.
///
/// This is all that [`pci::Ecam`](crate::pci::Ecam) needs. For virtio-mmio, see
/// [`VolatileRegisters`](crate::mmio::VolatileRegisters).
#[derive(Clone, Copy, Debug)]
pub struct VolatileSpace {
    /// Where the first address is mapped.
    mapped_at: *mut u8,
    start: u64,
    end: u64,
}

// SAFETY: it is only a place, and the caller of `new` vouches that any access there, from any
// thread, is sound.
unsafe impl Send for VolatileSpace {}
// SAFETY: as above.
unsafe impl Sync for VolatileSpace {}

impl VolatileSpace {
    /// Device memory at `addresses`, mapped at `mapped_at`.
    ///
    /// Both are the same number where memory is mapped one to one.
    ///
    /// # Safety
    /// As long as the result or a copy of it is used:
    ///
    /// * The whole range is mapped, contiguous and as device memory (uncached), for reading and
    ///   writing.
    /// * No Rust object lies there, and no access to it, of any value and from any thread, breaks
    ///   memory safety: it holds devices, which reach RAM only as their drivers tell them, or
    ///   nothing at all.
    ///
    /// `mapped_at` and the first address are multiples of 4.
    #[must_use]
    pub const unsafe fn new(mapped_at: *mut u8, addresses: Range<u64>) -> Self {
        Self { mapped_at, start: addresses.start, end: addresses.end }
    }

    /// Where `len` bytes at `addr` are mapped, if inside and naturally aligned.
    #[inline]
    fn place(&self, addr: u64, len: u64) -> Option<*mut u8> {
        let inside = addr >= self.start && addr.checked_add(len)? <= self.end && addr.is_multiple_of(len);
        inside.then(|| self.mapped_at.wrapping_add((addr - self.start) as usize))
    }
}

macro_rules! space {
    ($($read:ident $write:ident $int:ty),*) => {
        impl Space for VolatileSpace {
            $(
                #[inline]
                fn $read(&self, addr: u64) -> $int {
                    let place = self.place(addr, size_of::<$int>() as u64);
                    // SAFETY: the place is mapped and aligned, and may be accessed; see
                    // `VolatileSpace::new`.
                    place.map_or(<$int>::MAX, |place| <$int>::from_le(unsafe { access::$read(place) }))
                }

                #[inline]
                fn $write(&self, addr: u64, value: $int) {
                    if let Some(place) = self.place(addr, size_of::<$int>() as u64) {
                        // SAFETY: as for reading.
                        unsafe { access::$write(place, value.to_le()) };
                    }
                }
            )*
        }
    };
}
space!(read8 write8 u8, read16 write16 u16, read32 write32 u32);

/// The accesses.
///
/// A compiler may turn volatile ones into instructions that take an operand from memory or write an
/// address back, which hypervisors cannot emulate (on aarch64 the processor does not tell them
/// enough). So the instruction is given, where that is a danger.
mod access {
    /// # Safety
    /// Of each function: the place is mapped device memory, aligned to the size of the access.
    #[allow(unused_macros, reason = "not every architecture needs instructions")]
    macro_rules! instructions {
        ($($read:ident $write:ident $int:ty, $class:ident: $load:literal, $store:literal;)*) => {$(
            #[inline(always)]
            pub(super) unsafe fn $read(at: *const u8) -> $int {
                let value;
                // SAFETY: the caller vouches for the place. The statement clobbers memory, so the
                // compiler moves no access to memory past it.
                unsafe {
                    core::arch::asm!($load, at = in(reg) at, value = out($class) value, options(nostack, preserves_flags));
                }
                value
            }

            #[inline(always)]
            pub(super) unsafe fn $write(at: *mut u8, value: $int) {
                // SAFETY: as for reading.
                unsafe {
                    core::arch::asm!($store, at = in(reg) at, value = in($class) value, options(nostack, preserves_flags));
                }
            }
        )*};
    }

    core::cfg_select! {
        all(target_arch = "x86_64", not(miri)) => {
            instructions! {
                read8 write8 u8, reg_byte: "mov {value}, byte ptr [{at}]", "mov byte ptr [{at}], {value}";
                read16 write16 u16, reg: "mov {value:x}, word ptr [{at}]", "mov word ptr [{at}], {value:x}";
                read32 write32 u32, reg: "mov {value:e}, dword ptr [{at}]", "mov dword ptr [{at}], {value:e}";
            }
        }
        all(target_arch = "aarch64", not(miri)) => {
            instructions! {
                read8 write8 u8, reg: "ldrb {value:w}, [{at}]\ndmb oshld", "dmb oshst\nstrb {value:w}, [{at}]";
                read16 write16 u16, reg: "ldrh {value:w}, [{at}]\ndmb oshld", "dmb oshst\nstrh {value:w}, [{at}]";
                read32 write32 u32, reg: "ldr {value:w}, [{at}]\ndmb oshld", "dmb oshst\nstr {value:w}, [{at}]";
            }
        }
        all(target_arch = "riscv64", not(miri)) => {
            instructions! {
                read8 write8 u8, reg: "lbu {value}, 0({at})\nfence i, ir", "fence w, o\nsb {value}, 0({at})";
                read16 write16 u16, reg: "lhu {value}, 0({at})\nfence i, ir", "fence w, o\nsh {value}, 0({at})";
                read32 write32 u32, reg: "lw {value}, 0({at})\nfence i, ir", "fence w, o\nsw {value}, 0({at})";
            }
        }
        _ => {
            macro_rules! volatile {
                ($($read:ident $write:ident $int:ty),*) => {$(
                    #[inline(always)]
                    pub(super) unsafe fn $read(at: *const u8) -> $int {
                        // SAFETY: the caller vouches for the place.
                        let value = unsafe { at.cast::<$int>().read_volatile() };
                        core::sync::atomic::fence(core::sync::atomic::Ordering::SeqCst);
                        value
                    }

                    #[inline(always)]
                    pub(super) unsafe fn $write(at: *mut u8, value: $int) {
                        core::sync::atomic::fence(core::sync::atomic::Ordering::SeqCst);
                        // SAFETY: as for reading.
                        unsafe { at.cast::<$int>().write_volatile(value) };
                    }
                )*};
            }
            volatile!(read8 write8 u8, read16 write16 u16, read32 write32 u32);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accesses_are_little_endian_aligned_and_inside() {
        let mut words = [0u32; 4];
        // SAFETY: the array outlives the space, and is looked at only when that is no longer used.
        let space = unsafe { VolatileSpace::new(words.as_mut_ptr().cast(), 0x1000..0x1010) };
        space.write32(0x1000, 0x4433_2211);
        space.write16(0x1004, 0x6655);
        space.write8(0x1006, 0x77);
        space.write32(0x100c, 0xffee_ddcc);
        assert_eq!((space.read8(0x1000), space.read8(0x1003), space.read8(0x1006)), (0x11, 0x44, 0x77));
        assert_eq!((space.read16(0x1002), space.read16(0x1004)), (0x4433, 0x6655));
        assert_eq!((space.read32(0x1004), space.read32(0x100c)), (0x0077_6655, 0xffee_ddcc));
        for outside in [0, 0xffc, 0x1010, u64::MAX - 3, 0x1002, 0x1005] {
            space.write32(outside, 0);
            assert_eq!(space.read32(outside), u32::MAX, "{outside:#x}");
        }
        assert_eq!((space.read16(0x1001), space.read16(0x1010), space.read8(0xfff)), (0xffff, 0xffff, 0xff));
        assert_eq!(words.map(u32::to_le), [0x4433_2211, 0x0077_6655, 0, 0xffee_ddcc]);
    }
}
