//! The guest program's platform when it is a thread of this process.
use super::lines::Lines;
use super::processors;
use crate::machine::bus::Bus;
use paravane_attach::LocalIoEventFds;
use paravane_dma::Region;
use paravane_guest::Platform;
use paravane_ring::{Area, DmaArea};
use std::sync::Arc;
use std::time::Instant;

/// What unwinds a guest that was asked to stop.
pub(super) struct Stopped;

/// The machine as its guest sees it.
pub(super) struct HostThread {
    region: Arc<Region>,
    lines: Arc<Lines>,
    fds: Arc<LocalIoEventFds>,
    bus: Arc<Bus>,
    start: Instant,
}

impl HostThread {
    /// On this machine.
    pub(super) fn new(
        region: Arc<Region>,
        lines: Arc<Lines>,
        fds: Arc<LocalIoEventFds>,
        bus: Arc<Bus>,
    ) -> Self {
        Self { region, lines, fds, bus, start: Instant::now() }
    }

    fn mmio_read<const N: usize>(&self, addr: u64) -> [u8; N] {
        self.check_stop();
        self.bus.console().counters().exit(processors::current());
        let mut data = [0; N];
        self.bus.read(addr, &mut data);
        data
    }

    fn mmio_write<const N: usize>(&self, addr: u64, data: [u8; N]) {
        self.check_stop();
        if self.fds.signal(addr, &data) {
            return;
        }
        self.bus.console().counters().exit(processors::current());
        // The guest's end arrives as the return value of its program.
        let _ = self.bus.write(addr, &data);
    }

    /// Ends the guest here if that was asked for.
    ///
    /// No lock is held: every call of the platform starts or ends with this.
    fn check_stop(&self) {
        if self.lines.stopping() {
            std::panic::resume_unwind(Box::new(Stopped));
        }
    }
}

impl Platform for HostThread {
    fn mmio_read32(&self, addr: u64) -> u32 {
        u32::from_le_bytes(self.mmio_read(addr))
    }

    fn mmio_write32(&self, addr: u64, value: u32) {
        self.mmio_write(addr, value.to_le_bytes());
    }

    fn mmio_write16(&self, addr: u64, value: u16) {
        self.mmio_write(addr, value.to_le_bytes());
    }

    fn mmio_write8(&self, addr: u64, value: u8) {
        self.mmio_write(addr, value.to_le_bytes());
    }

    fn mmio_read16(&self, addr: u64) -> u16 {
        u16::from_le_bytes(self.mmio_read(addr))
    }

    fn mmio_read8(&self, addr: u64) -> u8 {
        let [value] = self.mmio_read(addr);
        value
    }

    fn ram(&self, addr: u64, len: usize) -> Option<DmaArea> {
        let end = addr.checked_add(u64::try_from(len).ok()?)?;
        if addr < self.region.gpa() || end > self.region.gpa() + self.region.size() {
            return None;
        }
        let offset = usize::try_from(addr - self.region.gpa()).ok()?;
        // SAFETY: the sum above shows that offset and length lie in the region, which is one
        // mapping.
        let ptr = unsafe { self.region.host().add(offset) };
        // SAFETY: the region stays mapped while this platform holds its Arc, and the platform
        // outlives the guest program, which is the only user of the area: `run` borrows it, and a
        // guest thread that is abandoned never drops it. Nothing in this process makes Rust
        // references to guest memory.
        let area = unsafe { Area::new(ptr, len) };
        Some(DmaArea { area, addr })
    }

    fn now_ns(&self) -> u64 {
        self.check_stop();
        u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    fn interrupts(&self, cpu: usize) -> u64 {
        self.lines.taken(cpu)
    }

    fn interrupts_on(&self, cpu: usize, number: u32) -> u64 {
        self.lines.taken_on(cpu, number)
    }

    fn enable_line(&self, gsi: u32, cpu: usize) {
        self.lines.enable(gsi, cpu);
    }

    fn interrupt(&self, cpu: usize, number: u32) {
        self.lines.deliver(cpu, number as usize);
    }

    fn on_each_cpu<W: Send>(&self, work: &mut [W], run: &(dyn Fn(usize, &mut W) + Sync)) {
        processors::on_each(work, run, &self.lines, self.bus.console().counters());
        self.check_stop();
    }

    fn wait(&self, cpu: usize, seen: u64) {
        self.lines.wait(cpu, seen);
        self.check_stop();
    }

    fn relax(&self) {
        std::thread::yield_now();
    }

    fn crash(&self) -> ! {
        panic!("an undefined instruction, injected");
    }
}
