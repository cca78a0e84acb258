//! The built-in guest of `paravane run`.
//!
//! Tests and measures devices through the drivers of `paravane-driver`.
//!
//! The same program runs in ring 3 of a KVM guest (the `image` binary, feature `image`) and as a
//! host thread, linked into the VMM. It is `no_std`; the machine under it is a [`Platform`].
//!
//! ```text
//! program   the loop over all devices, sleeping and waking
//!   disk    Lane: one disk's requests in flight; Hash and WriteTest decide what they are
//!   entropy draws from an entropy source
//!   ping    frames to an echo and back; mirror is such an echo, on another card
//!   stream  frames one way, as fast as they go
//!   report  figures for the VMM; console: messages; boot: the boot information; worker: the work on a device
//! ```
#![no_std]
// Tests make their own guest memory.
#![cfg_attr(not(test), forbid(unsafe_code))]
extern crate alloc;

#[cfg(not(target_arch = "x86_64"))]
compile_error!(
    "the built-in guest has no machine for this architecture in crates/spec/src/builtin and guest/src/image/arch; \
     `paravane serve` needs none: build without the feature `run`"
);

mod boot;
mod chance;
mod connection;
mod console;
mod disk;
mod entropy;
mod failure;
pub mod histogram;
mod mirror;
pub mod pattern;
mod ping;
mod program;
mod report;
mod space;
mod stream;
mod worker;

pub use paravane_driver::{Area, DmaArea, Space, VolatileSpace};
use paravane_spec::builtin::{CONTROL_BASE, control};

/// The machine under the guest program.
pub trait Platform {
    /// Reads 32 bits of device memory at a guest-physical address.
    fn mmio_read32(&self, addr: u64) -> u32;
    /// Writes 32 bits of device memory.
    fn mmio_write32(&self, addr: u64, value: u32);
    /// Reads 16 bits of device memory.
    fn mmio_read16(&self, addr: u64) -> u16;
    /// Reads 8 bits of device memory.
    fn mmio_read8(&self, addr: u64) -> u8;
    /// Writes 16 bits of device memory.
    fn mmio_write16(&self, addr: u64, value: u16);
    /// Writes 8 bits of device memory.
    fn mmio_write8(&self, addr: u64, value: u8);
    /// RAM from `addr` on, `None` if it is not all RAM.
    fn ram(&self, addr: u64, len: usize) -> Option<DmaArea>;
    /// Monotonic nanoseconds.
    fn now_ns(&self) -> u64;
    /// Interrupts taken so far, all numbers together.
    fn interrupts(&self) -> u64;
    /// Interrupts taken so far on one number: a GSI, or one for messages.
    fn interrupts_on(&self, number: u32) -> u64;
    /// Makes the line of `gsi` deliver interrupts (programs the interrupt controller).
    fn enable_line(&self, gsi: u32);
    /// Sleeps until the count of interrupts is no longer `seen`. May return early.
    fn wait(&self, seen: u64);
    /// Does what [`paravane_spec::builtin::inject::CRASH`] asks for.
    fn crash(&self) -> !;
}

/// Runs the guest to its end; returns a [`paravane_spec::builtin::exit`] code.
///
/// Its last act is to write the code to the control page's EXIT register.
pub fn run<P: Platform>(platform: &P) -> u32 {
    let code = program::run(platform);
    platform.mmio_write32(CONTROL_BASE + control::EXIT, code);
    code
}
