//! What the guest needs of the machine that it runs on.
use paravane_driver::DmaArea;

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
