//! For tests: a driver without a virtual machine.
//!
//! Guest memory is real, the driver's side of the ring is ours, and the handler is called as its
//! I/O thread would call it.
pub(crate) mod allocations;

use crate::{Device, MappedQueue, QueueHandler, Rest, ServeError, Served, WakeSet, latency};
use paravane_dma::{Access, Backing, Domain, Memory, Region, RegionConfig, Segment};
use paravane_ring::driver::{BufferId, DriverConfig, Queue, Used};
use paravane_ring::{Area, DmaArea, QueueAddresses};
use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

/// Where guest memory begins.
pub(crate) const BASE: u64 = 0x4000_0000;
/// Its size in bytes.
pub(crate) const SIZE: u64 = 8 << 20;
/// Where the queue ends and buffers may begin.
pub(crate) const DATA: u64 = BASE + (1 << 20);

pub(crate) use paravane_test_support::skip as skipped;

pub(crate) struct Rig<D> {
    pub(crate) handler: Box<dyn QueueHandler>,
    pub(crate) live: MappedQueue,
    pub(crate) driver: Queue,
    pub(crate) addresses: QueueAddresses,
    pub(crate) memory: Memory,
    /// Last, since the driver's side has raw pointers into it.
    pub(crate) region: Arc<Region>,
    pub(crate) device: D,
}

impl<D: Device> Rig<D> {
    /// Negotiates everything that the device offers.
    pub(crate) fn new(device: D) -> Self {
        let features = device.features();
        Self::with_features(device, features)
    }

    pub(crate) fn with_features(mut device: D, features: u64) -> Self {
        let handler = device.start_queue(0, features).unwrap();
        Self::with_handler(device, features, handler)
    }

    pub(crate) fn with_handler(device: D, features: u64, handler: Box<dyn QueueHandler>) -> Self {
        Self::behind(device, features, handler, 0)
    }

    /// Behind a domain that shows memory `offset` bytes further up.
    ///
    /// Without a domain if `offset` is 0.
    pub(crate) fn behind(device: D, features: u64, handler: Box<dyn QueueHandler>, offset: u64) -> Self {
        let region =
            Region::new(RegionConfig { gpa: BASE, size: SIZE, backing: Backing::Pages, writable: true })
                .unwrap();
        let memory = Memory::new(vec![region.clone()]).unwrap();
        let size = device.queue_sizes()[0];
        let layout = DriverConfig::new(size, 32, features).unwrap();
        assert!(layout.memory() as u64 <= DATA - BASE);
        // SAFETY: the region lives as long as the rig, which drops the driver's side first, and
        // nobody makes references to its bytes.
        let area = unsafe { Area::new(region.host(), layout.memory()) };
        let (driver, addresses) = Queue::new(layout, DmaArea { area, addr: BASE + offset }).unwrap();
        let domain = Domain::new(&memory);
        domain.map(BASE + offset, BASE, SIZE, Access::READ | Access::WRITE).unwrap();
        let handle = if offset == 0 { memory.handle() } else { domain.handle() };
        let live = MappedQueue::start(addresses, size, features, handle).unwrap();
        Self { handler, live, driver, addresses, memory, region, device }
    }

    pub(crate) fn poke(&self, addr: u64, data: &[u8]) {
        self.memory.handle().enter().write(addr, data, Access::FULL).unwrap();
    }

    pub(crate) fn peek(&self, addr: u64, len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        self.memory.handle().enter().read(addr, &mut out, Access::FULL).unwrap();
        out
    }

    pub(crate) fn add(&mut self, readable: &[Segment], writable: &[Segment]) -> BufferId {
        let id = self.driver.add(readable, writable).unwrap();
        self.driver.publish();
        id
    }

    pub(crate) fn serve(&mut self) -> Result<Served, ServeError> {
        self.live.latency().announce();
        self.live.latency().begin_turn();
        let served = self.handler.serve(&mut self.live)?;
        latency::rig::served(&mut self.live, &served);
        Ok(served)
    }

    /// Serves as an I/O thread would, until the driver has everything back.
    ///
    /// Sleeping for long means that a completion did not signal.
    pub(crate) fn run(&mut self) -> Result<Vec<Used>, ServeError> {
        let mut all = Vec::new();
        loop {
            let served = self.serve()?;
            while let Some(used) = self.driver.pop_used().unwrap() {
                all.push(used);
            }
            if served.taken > 0 || served.completed > 0 || self.handler.rest(true) == Rest::Serve {
                continue;
            }
            if self.driver.in_flight() == 0 {
                return Ok(all);
            }
            assert!(becomes_readable(registered(&mut *self.handler)), "a request was lost");
        }
    }
}

/// A set that the handler wakes, instead of an earlier one.
pub(crate) fn registered(handler: &mut dyn QueueHandler) -> Arc<OwnedFd> {
    let set = Arc::new(epoll::create(epoll::CreateFlags::CLOEXEC).unwrap());
    handler.register(Some(&WakeSet::new(&set, 0))).unwrap();
    set
}

/// Whether `fd` is readable now.
pub(crate) fn readable(fd: impl AsFd) -> bool {
    readable_within(fd, Duration::ZERO)
}

/// Waits until `fd` is readable. Returns `false` if that does not happen.
pub(crate) fn becomes_readable(fd: impl AsFd) -> bool {
    readable_within(fd, paravane_test_support::patience())
}

fn readable_within(fd: impl AsFd, limit: Duration) -> bool {
    let timeout = Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: 0 };
    poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&timeout)).unwrap() == 1
}

pub(crate) fn segment(addr: u64, len: usize) -> Segment {
    Segment { addr, len: len as u32 }
}
