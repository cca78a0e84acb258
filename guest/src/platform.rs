//! What the guest needs of the machine that it runs on.
use paravane_driver::DmaArea;

/// The machine under the guest program.
///
/// Processors have numbers from 0 on. The program begins on processor 0.
pub trait Platform: Sync {
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
    /// Monotonic nanoseconds, the same on all processors.
    fn now_ns(&self) -> u64;
    /// Interrupts that a processor has taken so far, all numbers together.
    fn interrupts(&self, cpu: usize) -> u64;
    /// Interrupts that a processor has taken so far on one number: a GSI, or one for messages.
    fn interrupts_on(&self, cpu: usize, number: u32) -> u64;
    /// Makes the line of `gsi` interrupt a processor (programs the interrupt controller).
    fn enable_line(&self, gsi: u32, cpu: usize);
    /// Interrupts a processor, whose [`Platform::wait`] then returns.
    ///
    /// A lower number is taken after higher ones that are pending.
    fn interrupt(&self, cpu: usize, number: u32);
    /// Runs `run` on each processor with its number and its work, and returns when all have returned.
    ///
    /// For processor 0. There are as many processors as pieces of work, or more.
    fn on_each_cpu<W: Send>(&self, work: &mut [W], run: &(dyn Fn(usize, &mut W) + Sync));
    /// Sleeps until the calling processor's count of interrupts is no longer `seen`. May return early.
    fn wait(&self, cpu: usize, seen: u64);
    /// Lets the host run other threads, for which the calling processor waits in a loop.
    fn relax(&self);
    /// Does what [`paravane_spec::builtin::inject::CRASH`] asks for.
    fn crash(&self) -> !;
}
