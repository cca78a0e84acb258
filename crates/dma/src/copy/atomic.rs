//! Words of guest memory as Rust atomics, relaxed.
//!
//! The fences in [`Access`](crate::Access) make the order.
use super::Word;
use std::sync::atomic::{AtomicU8, Ordering};
#[cfg(not(miri))]
use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64};

macro_rules! word {
    ($int:ty, $atomic:ty) => {
        impl Word for $int {
            #[inline(always)]
            unsafe fn load(guest: *const u8, own: *mut u8) {
                debug_assert!(guest.cast::<$int>().is_aligned());
                // SAFETY: the caller promises validity and alignment; any thread may share an
                // atomic.
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
