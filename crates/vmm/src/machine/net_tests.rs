//! Network cards at work: our driver and device, asleep when idle.
//!
//! Registers, I/O threads, kicks and interrupts are between them. A lost wake-up makes a test time
//! out.
mod lending;
mod link;
mod moving;
mod tap;
mod vhost_net;

use paravane_attach::{AttachedDevice, LocalIoEventFds, RingFeatures};
use paravane_device::net::{BackEnd, Counters, Net as Card, NetConfig, Totals};
use paravane_dma::{Backing, Memory, Region, RegionConfig};
use paravane_driver::mmio::{Mmio as Driven, Registers};
use paravane_driver::net::{Net, NetOptions};
use paravane_driver::{Area, DmaArea, Pool};
use paravane_io::{IoPool, Spread};
use paravane_notify::{InterruptSink, IoEventFds};
use paravane_spec::mmio::QUEUE_NOTIFY;
use paravane_test_support::patience;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

const BASE: u64 = 0xd000_0000;
/// Where guest memory begins, and its size.
const RAM: u64 = 0x10_0000;
const RAM_SIZE: u64 = 16 << 20;

/// Counts interrupts, and wakes the driver.
#[derive(Default)]
struct Line {
    count: Mutex<u64>,
    raised: Condvar,
}

impl InterruptSink for Line {
    fn raise(&self) {
        *self.count.lock().unwrap() += 1;
        self.raised.notify_all();
    }
}

impl Line {
    fn count(&self) -> u64 {
        *self.count.lock().unwrap()
    }

    /// Sleeps until the count is not `seen` any more.
    fn wait(&self, seen: u64, what: &str) {
        let count = self.count.lock().unwrap();
        let (_count, waited) =
            self.raised.wait_timeout_while(count, patience(), |count| *count == seen).unwrap();
        assert!(!waited.timed_out(), "{what}: no interrupt comes");
    }
}

/// One guest: memory, a card on its bus, and what serves that.
struct Guest {
    device: Arc<AttachedDevice>,
    fds: Arc<LocalIoEventFds>,
    line: Arc<Line>,
    counters: Arc<Counters>,
    pool: Arc<IoPool>,
    region: Arc<Region>,
    memory: Memory,
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.device.stop();
    }
}

/// The registers, as the guest's driver has them.
struct Window {
    device: Arc<AttachedDevice>,
    fds: Arc<LocalIoEventFds>,
}

impl Window {
    fn read<const N: usize>(&self, offset: u64) -> [u8; N] {
        let mut data = [0; N];
        self.device.read(offset, &mut data);
        data
    }
}

impl Registers for Window {
    fn read32(&self, offset: u64) -> u32 {
        u32::from_le_bytes(self.read(offset))
    }

    fn write32(&self, offset: u64, value: u32) {
        if offset != QUEUE_NOTIFY || !self.fds.signal(BASE + offset, &value.to_le_bytes()) {
            self.device.write(offset, &value.to_le_bytes());
        }
    }

    fn read16(&self, offset: u64) -> u16 {
        u16::from_le_bytes(self.read(offset))
    }

    fn read8(&self, offset: u64) -> u8 {
        let [value] = self.read(offset);
        value
    }
}

type Driver = Net<Driven<Window>>;

impl Guest {
    fn new<B: BackEnd>(back_end: B, mtu: u16, rings: RingFeatures) -> Self {
        Self::with_threads(back_end, mtu, rings, 1, Duration::ZERO)
    }

    /// Its queues are spread over `threads` I/O threads, which poll them.
    fn with_threads<B: BackEnd>(
        back_end: B,
        mtu: u16,
        rings: RingFeatures,
        threads: usize,
        longest_poll: Duration,
    ) -> Self {
        let config = RegionConfig { gpa: RAM, size: RAM_SIZE, backing: Backing::Pages, writable: true };
        let region = Region::new(config).unwrap();
        let fds = Arc::new(LocalIoEventFds::default());
        let pool = Arc::new(IoPool::fixed(threads, longest_poll, Spread::Queues).unwrap());
        let memory = Memory::new(vec![Arc::clone(&region)]).unwrap();
        let config = NetConfig { mtu: Some(mtu), ..NetConfig::new([2, 0, 0, 0, 0, 1]) };
        let card = Box::new(Card::new(config, back_end).unwrap());
        let counters = card.counters();
        let line = Arc::new(Line::default());
        let device = AttachedDevice::builder(card, &memory)
            .io_pool(&pool)
            .ioeventfds(Arc::clone(&fds) as Arc<dyn IoEventFds>)
            .rings(rings)
            .mmio(BASE, Arc::clone(&line) as Arc<dyn InterruptSink>)
            .unwrap();
        Self { device: Arc::new(device), fds, line, counters, pool, region, memory }
    }

    /// Starts the driver; the card is reset by that.
    fn driver(&self, options: NetOptions) -> Driver {
        // SAFETY: the region lives as long as the guest, which outlives its drivers; nobody makes
        // references to it.
        let area = unsafe { Area::new(self.region.host(), RAM_SIZE as usize) };
        let mut pool = Pool::new(DmaArea { area, addr: RAM });
        let window = Window { device: Arc::clone(&self.device), fds: Arc::clone(&self.fds) };
        Net::new(Driven::new(window).unwrap(), options, &mut pool).unwrap()
    }

    /// Sleeps until the driver may have something to do.
    fn sleep(&self, driver: &mut Driver, what: &str) {
        let seen = self.line.count();
        if !driver.enable_interrupts() {
            self.line.wait(seen, what);
        }
        driver.disable_interrupts();
        driver.interrupt().unwrap();
    }

    /// How often queues changed threads.
    fn moves(&self) -> u64 {
        self.device.queues().iter().map(|queue| queue.moves).sum()
    }

    fn totals(&self) -> Totals {
        self.counters.totals()
    }
}

/// Frame number `n` of a stream: addresses, number, and noise made of it.
fn frame(stream: u64, n: u64, longest: usize) -> Vec<u8> {
    let mut state = (stream << 40 | n).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    // Short ones, any, and the longest.
    let most = [60, longest, longest][n as usize % 3];
    let len = if n.is_multiple_of(16) { longest } else { 22 + next() as usize % (most - 21) };
    let mut frame = vec![0; len];
    frame.chunks_mut(8).for_each(|chunk| chunk.copy_from_slice(&next().to_le_bytes()[..chunk.len()]));
    frame[..14].copy_from_slice(&[2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 0x88, 0xb5]);
    frame[14..22].copy_from_slice(&n.to_le_bytes());
    frame
}
