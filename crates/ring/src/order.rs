//! Strength of the barriers of a queue, as a type: unused strength costs nothing.
//!
//! Two programs that share cache-coherent memory need the ordering that CPUs give each other
//! ([`Smp`]). A device that is hardware, or a driver of one, needs what the platform asks for
//! towards devices ([`Platform`]); that is what ORDER_PLATFORM negotiates (section 6.4). Every
//! place in this crate that is ordered names one of the three points below, beside the acquire or
//! release of the access itself.
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

    /// After an acquire load of an index or flags, before reading the data.
    fn after_acquire();

    /// Before a release store of an index or flags, after writing the data.
    fn before_release();

    /// Between a store and a later load, the only order that costs everywhere.
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

/// Defines the functions of [`barrier`].
macro_rules! barriers {
    ($($name:ident => $does:expr),*) => {$(
        #[inline(always)]
        pub(super) fn $name() {
            $does
        }
    )*};
}

/// An instruction that orders.
#[allow(unused_macros, reason = "not every architecture needs one")]
macro_rules! instruction {
    ($instruction:literal) => {
        // SAFETY: a barrier has no operands and no effect but order.
        unsafe { core::arch::asm!($instruction, options(nostack, preserves_flags)) }
    };
}

/// Barriers towards coherent devices, by architecture.
///
/// `read` puts earlier loads before later ones, `write` earlier stores before later ones, and
/// `full` everything before everything, beside a sequentially consistent fence.
mod barrier {
    core::cfg_select! {
        loom => {
            use crate::area::fence;
            use core::sync::atomic::Ordering::{Acquire, Release};
            // Hardware is modelled as a thread in memory where only barriers order
            // (`Area::barriers_only`).
            barriers!(read => fence(Acquire), write => fence(Release), full => {});
        }
        miri => {
            // There is no hardware: the accesses' own order is what is checked.
            barriers!(read => {}, write => {}, full => {});
        }
        target_arch = "aarch64" => {
            barriers!(
                read => instruction!("dmb oshld"),
                write => instruction!("dmb oshst"),
                full => instruction!("dmb osh")
            );
        }
        target_arch = "riscv64" => {
            barriers!(
                read => instruction!("fence ir, ir"),
                write => instruction!("fence ow, ow"),
                full => instruction!("fence iorw, iorw")
            );
        }
        any(target_arch = "x86_64", target_arch = "x86") => {
            use core::sync::atomic::Ordering::{Acquire, Release};
            use core::sync::atomic::compiler_fence;
            // The processor keeps loads in order, and stores to ordinary memory, towards coherent
            // devices as well: order for the compiler is all that is left. The locked instruction
            // of the fence is a full barrier towards them too.
            barriers!(read => compiler_fence(Acquire), write => compiler_fence(Release), full => {});
        }
        _ => {
            use core::sync::atomic::Ordering::SeqCst;
            use core::sync::atomic::fence;
            // The strongest fence there is.
            barriers!(read => fence(SeqCst), write => fence(SeqCst), full => {});
        }
    }
}
