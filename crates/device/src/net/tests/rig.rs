//! A card with all its queues and a driver's side made of rings.
//!
//! There are no threads: tests call the handlers as their I/O thread would.
use crate::net::{BackEnd, Net, NetConfig, Totals};
use crate::rig::{registered, segment};
use crate::{Device, InvalidationLock, MappedQueue, QueueHandler, Rest, ServeError, Served, latency};
use paravane_dma::{Access, Backing, Domain, Memory, Region, RegionConfig, Segment};
use paravane_ring::driver::{DriverConfig, Queue, Used};
use paravane_ring::{Area, DmaArea, QueueAddresses};
use paravane_spec::feature;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// Where guest memory begins, and its size in bytes.
pub(super) const BASE: u64 = 0x4000_0000;
pub(super) const SIZE: u64 = 16 << 20;
/// Bytes set aside for each queue.
const QUEUE: u64 = 256 << 10;
/// Where buffers may begin.
pub(super) const DATA: u64 = BASE + 8 * QUEUE;
/// A card's address.
pub(super) const MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];
/// Bytes of the header before each frame.
pub(super) const HEADER: usize = 12;

pub(super) struct Lane {
    pub(super) handler: Box<dyn QueueHandler>,
    pub(super) live: MappedQueue,
    pub(super) driver: Queue,
    pub(super) addresses: QueueAddresses,
    /// What wakes the thread of the queue.
    pub(super) wakes: Arc<OwnedFd>,
}

pub(super) struct Card<B> {
    pub(super) lanes: Vec<Lane>,
    pub(super) memory: Memory,
    pub(super) net: Net<B>,
    pub(super) features: u64,
    /// What its queues go through to reach memory, if not at once.
    pub(super) translation: Option<(Domain, InvalidationLock)>,
    /// Last, since the driver's side has raw pointers into it.
    region: Arc<Region>,
}

impl<B: BackEnd> Card<B> {
    /// Negotiates everything that is offered.
    pub(super) fn new(back_end: B) -> Self {
        Self::without(back_end, 0)
    }

    /// Negotiates everything but `refused`.
    pub(super) fn without(back_end: B, refused: u64) -> Self {
        let config = NetConfig { queue_size: 64, ..NetConfig::new(MAC) };
        let net = Net::new(config, back_end).unwrap();
        let features = net.features() & !refused;
        Self::with(net, features)
    }

    pub(super) fn with(net: Net<B>, features: u64) -> Self {
        Self::behind(net, features, false)
    }

    /// Behind a domain that maps only the queues.
    pub(super) fn translated(back_end: B) -> Self {
        let config = NetConfig { queue_size: 64, ..NetConfig::new(MAC) };
        let net = Net::new(config, back_end).unwrap();
        let features = net.features();
        Self::behind(net, features, true)
    }

    fn behind(net: Net<B>, features: u64, translated: bool) -> Self {
        let region =
            Region::new(RegionConfig { gpa: BASE, size: SIZE, backing: Backing::Pages, writable: true })
                .unwrap();
        let memory = Memory::new(vec![region.clone()]).unwrap();
        let translation = translated.then(|| {
            let domain = Domain::new(&memory);
            domain.map(BASE, BASE, DATA - BASE, Access::READ | Access::WRITE).unwrap();
            (domain, InvalidationLock::default())
        });
        let mut card = Self { lanes: Vec::new(), memory, net, features, translation, region };
        card.start();
        card
    }

    /// Starts all queues that the driver uses.
    fn start(&mut self) {
        let mq = self.features & paravane_spec::net::F_MQ != 0;
        let count = if mq { self.net.queue_sizes().len() } else { 2 };
        for index in 0..count as u16 {
            let lane = self.start_queue(index);
            self.lanes.push(lane);
        }
    }

    pub(super) fn start_queue(&mut self, index: u16) -> Lane {
        let size = self.net.queue_sizes()[usize::from(index)];
        let layout = DriverConfig::new(size, 32, self.features).unwrap();
        assert!(layout.memory() as u64 <= QUEUE);
        let at = u64::from(index) * QUEUE;
        // SAFETY: the region lives as long as the card, which drops the driver's side first, and
        // nobody makes references to its bytes.
        let area = unsafe { Area::new(self.region.host().add(at as usize), layout.memory()) };
        let (driver, addresses) = Queue::new(layout, DmaArea { area, addr: BASE + at }).unwrap();
        let start = |handle| MappedQueue::start(addresses, size, self.features, handle).unwrap();
        let live = match &self.translation {
            None => start(self.memory.handle()),
            Some((domain, lock)) => start(domain.handle()).with_invalidation_lock(lock.clone()),
        };
        let mut handler = self.net.start_queue(index, self.features).unwrap();
        let wakes = registered(&mut *handler);
        Lane { handler, live, driver, addresses, wakes }
    }

    /// The driver resets the card and starts it anew.
    pub(super) fn restart(&mut self) {
        for mut lane in self.lanes.drain(..) {
            lane.handler.drain(&mut lane.live, false);
        }
        self.net.reset();
        self.start();
    }

    pub(super) fn poke(&self, addr: u64, data: &[u8]) {
        self.memory.handle().enter().write(addr, data, Access::FULL).unwrap();
    }

    pub(super) fn peek(&self, addr: u64, len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        self.memory.handle().enter().read(addr, &mut out, Access::FULL).unwrap();
        out
    }

    pub(super) fn add(&mut self, lane: usize, readable: &[Segment], writable: &[Segment]) {
        let driver = &mut self.lanes[lane].driver;
        driver.add(readable, writable).unwrap();
        driver.publish();
    }

    /// Makes a frame available, with a header before it, in one piece at `at`.
    pub(super) fn send_at(&mut self, lane: usize, at: u64, header: [u8; HEADER], frame: &[u8]) {
        self.poke(at, &[header.as_slice(), frame].concat());
        self.add(lane, &[segment(at, HEADER + frame.len())], &[]);
    }

    pub(super) fn serve(&mut self, lane: usize) -> Result<Served, ServeError> {
        let Lane { handler, live, .. } = &mut self.lanes[lane];
        live.latency().announce();
        live.latency().begin_turn();
        let served = handler.serve(live)?;
        latency::rig::served(live, &served);
        Ok(served)
    }

    /// Serves until nothing is left, listens, and returns the used buffers.
    pub(super) fn settle(&mut self, lane: usize) -> Vec<Used> {
        let mut all = Vec::new();
        loop {
            let served = self.serve(lane).unwrap();
            while let Some(used) = self.lanes[lane].driver.pop_used().unwrap() {
                all.push(used);
            }
            if served.taken == 0
                && served.completed == 0
                && self.lanes[lane].handler.rest(true) != Rest::Serve
            {
                return all;
            }
        }
    }

    pub(super) fn totals(&self) -> Totals {
        self.net.counters().totals()
    }
}

/// Both layouts of the rings, in order or not.
pub(super) fn layouts() -> [u64; 3] {
    [0, feature::RING_PACKED, feature::RING_PACKED | feature::IN_ORDER]
}

/// A frame of `len` bytes to an unused address, with a pattern as payload.
pub(super) fn frame(len: usize, seed: u8) -> Vec<u8> {
    let mut frame: Vec<u8> = (0..len).map(|at| (at as u8).wrapping_mul(7).wrapping_add(seed)).collect();
    frame[..6].copy_from_slice(&[2, 0, 0, 0, 0, 9]);
    frame[6..12].copy_from_slice(&MAC);
    frame
}
