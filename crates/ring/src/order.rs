//! How strong the barriers of a queue are: a choice of type, so that nobody pays for what he does not need.
//!
//! Two programs that share cache-coherent memory need the ordering that CPUs give each other ([`Smp`]). A
//! device that is hardware, or a driver of one, needs what the platform asks for towards devices
//! ([`Platform`]); that is what ORDER_PLATFORM negotiates (section 6.4). Every place in this crate that is
//! ordered names one of the three points below, beside the acquire or release of the access itself.
use crate::area::fence;
use core::sync::atomic::Ordering::SeqCst;

mod sealed {
    pub trait Sealed {}
    impl Sealed for super::Smp {}
    impl Sealed for super::Platform {}
}

/// The barriers of a queue.
pub trait Order: sealed::Sealed + Copy + Default + core::fmt::Debug + Send + Sync + 'static {
    /// Whether this is what ORDER_PLATFORM asks for.
    const PLATFORM: bool;

    /// After an acquire load of an index or of flags, before what it makes readable is read.
    fn after_acquire();

    /// Before a release store of an index or of flags, after what it publishes was written.
    fn before_release();

    /// Between a store and a later load: the only point where order costs something everywhere.
    fn full();
}

/// Ordering between CPUs.
#[derive(Clone, Copy, Debug, Default)]
pub struct Smp;

impl Order for Smp {
    const PLATFORM: bool = false;

    // The acquire load itself is enough.
    #[inline(always)]
    fn after_acquire() {}

    // The release store itself is enough.
    #[inline(always)]
    fn before_release() {}

    #[inline(always)]
    fn full() {
        // The pairs are named where this is called.
        fence(SeqCst);
    }
}

/// Ordering towards hardware.
#[derive(Clone, Copy, Debug, Default)]
pub struct Platform;

impl Order for Platform {
    const PLATFORM: bool = true;

    #[inline(always)]
    fn after_acquire() {
        barrier::read();
    }

    #[inline(always)]
    fn before_release() {
        barrier::write();
    }

    #[inline(always)]
    fn full() {
        fence(SeqCst);
        barrier::full();
    }
}

/// Barriers towards coherent devices, as the architecture has them.
#[cfg(not(any(miri, loom)))]
mod barrier {
    /// Earlier loads before later ones.
    #[inline(always)]
    pub(super) fn read() {
        #[cfg(target_arch = "aarch64")]
        // SAFETY: a barrier has no operands and no effect but order.
        unsafe {
            core::arch::asm!("dmb oshld", options(nostack, preserves_flags))
        }
        #[cfg(any(target_arch = "riscv64", target_arch = "riscv32"))]
        // SAFETY: a barrier has no operands and no effect but order.
        unsafe {
            core::arch::asm!("fence ir, ir", options(nostack, preserves_flags))
        }
        // On x86 the processor keeps loads in order towards coherent devices as well: order for the
        // compiler is all that is left. Other architectures take the strongest fence there is.
        #[cfg(any(target_arch = "x86_64", target_arch = "x86"))]
        core::sync::atomic::compiler_fence(core::sync::atomic::Ordering::Acquire);
        #[cfg(not(any(
            target_arch = "aarch64",
            target_arch = "riscv64",
            target_arch = "riscv32",
            target_arch = "x86_64",
            target_arch = "x86"
        )))]
        core::sync::atomic::fence(core::sync::atomic::Ordering::SeqCst);
    }

    /// Earlier stores before later ones.
    #[inline(always)]
    pub(super) fn write() {
        #[cfg(target_arch = "aarch64")]
        // SAFETY: a barrier has no operands and no effect but order.
        unsafe {
            core::arch::asm!("dmb oshst", options(nostack, preserves_flags))
        }
        #[cfg(any(target_arch = "riscv64", target_arch = "riscv32"))]
        // SAFETY: a barrier has no operands and no effect but order.
        unsafe {
            core::arch::asm!("fence ow, ow", options(nostack, preserves_flags))
        }
        // As above: x86 keeps stores to ordinary memory in order.
        #[cfg(any(target_arch = "x86_64", target_arch = "x86"))]
        core::sync::atomic::compiler_fence(core::sync::atomic::Ordering::Release);
        #[cfg(not(any(
            target_arch = "aarch64",
            target_arch = "riscv64",
            target_arch = "riscv32",
            target_arch = "x86_64",
            target_arch = "x86"
        )))]
        core::sync::atomic::fence(core::sync::atomic::Ordering::SeqCst);
    }

    /// Everything earlier before everything later; beside a sequentially consistent fence.
    #[inline(always)]
    pub(super) fn full() {
        #[cfg(target_arch = "aarch64")]
        // SAFETY: a barrier has no operands and no effect but order.
        unsafe {
            core::arch::asm!("dmb osh", options(nostack, preserves_flags))
        }
        #[cfg(any(target_arch = "riscv64", target_arch = "riscv32"))]
        // SAFETY: a barrier has no operands and no effect but order.
        unsafe {
            core::arch::asm!("fence iorw, iorw", options(nostack, preserves_flags))
        }
        // On x86 the locked instruction of the fence orders ordinary memory towards devices too.
    }
}

/// Under miri and loom there is no hardware: the accesses' own order is what is checked.
#[cfg(any(miri, loom))]
mod barrier {
    pub(super) fn read() {}
    pub(super) fn write() {}
    pub(super) fn full() {}
}
