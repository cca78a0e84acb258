//! A driver and a served disk, without a virtual machine.
use super::stamp::SECTOR;
use paravane_device::blk::Blk;
use paravane_device::{Device, MappedQueue, QueueHandler, Rest, ServeError, WakeSet};
use paravane_dma::{Access, Backing, Memory, Region, RegionConfig, Segment};
use paravane_ring::driver::{BufferId, DriverConfig, Queue};
use paravane_ring::{Area, DmaArea};
use paravane_spec::blk::{self, DiscardRange, RequestHeader};
use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};
use rustix::io::retry_on_intr;
use std::sync::Arc;
use zerocopy::IntoBytes;

/// Where guest memory begins.
const BASE: u64 = 0x4000_0000;
/// Where the queue ends, and the places of requests begin.
const DATA: u64 = BASE + (1 << 20);
/// Requests in flight at most.
pub(super) const DEPTH: usize = 8;
/// Bytes of a transfer at most.
pub(super) const MOST: usize = 1 << 20;
/// A header and a status before the data.
const FRAME: u64 = 4096;
const PLACE: u64 = FRAME + MOST as u64;
const SIZE: u64 = (1 << 20) + DEPTH as u64 * PLACE;
/// Seconds without a completion after which a request is lost.
const PATIENCE: i64 = 60;

/// A request of the guest, in sectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Request {
    Read { first: u64, count: u64 },
    Write { first: u64, count: u64, stamp: u64 },
    Zeroes { first: u64, count: u64, unmap: bool },
    Discard { first: u64, count: u64 },
    Flush,
}

/// See the module.
pub(super) struct Machine {
    handler: Box<dyn QueueHandler>,
    live: MappedQueue,
    driver: Queue,
    memory: Memory,
    /// Dropped after the driver's side, which has raw pointers into it.
    _region: Arc<Region>,
    disk: Blk,
    in_flight: Vec<Option<(BufferId, Request)>>,
}

impl Machine {
    /// Starts the disk's queue.
    pub(super) fn start(mut disk: Blk, write_through: bool) -> Result<Self, String> {
        let refused = if write_through { blk::F_FLUSH } else { 0 };
        let features = disk.features() & !refused;
        let handler = disk.start_queue(0, features).map_err(|error| error.to_string())?;
        let config = RegionConfig { gpa: BASE, size: SIZE, backing: Backing::Pages, writable: true };
        let region = Region::new(config).map_err(|error| error.to_string())?;
        let memory = Memory::new(vec![region.clone()]).map_err(|error| error.to_string())?;
        let size = disk.queue_sizes()[0];
        let layout = DriverConfig::new(size, 32, features).map_err(|error| error.to_string())?;
        // SAFETY: the region lives as long as the machine, which drops the driver's side first, and
        // nobody makes references to its bytes.
        let area = unsafe { Area::new(region.host(), layout.memory()) };
        let (driver, addresses) =
            Queue::new(layout, DmaArea { area, addr: BASE }).map_err(|error| error.to_string())?;
        let live = MappedQueue::start(addresses, size, features, memory.handle())
            .map_err(|error| error.to_string())?;
        let in_flight = vec![None; DEPTH];
        Ok(Self { handler, live, driver, memory, _region: region, disk, in_flight })
    }

    /// Size of the disk in sectors.
    pub(super) fn sectors(&self) -> u64 {
        self.disk.size() / SECTOR as u64
    }

    /// Sets the size of the disk.
    pub(super) fn resize(&mut self, sectors: u64) -> Result<(), String> {
        let resized = self.disk.resizer().resize(sectors * SECTOR as u64);
        resized.map(drop).map_err(|error| error.to_string())
    }

    /// Puts a request into the ring. `data` is that of a write.
    pub(super) fn add(&mut self, place: usize, request: Request, data: &[u8]) {
        let at = DATA + place as u64 * PLACE;
        let status = at + 64;
        let segment = |addr, len: usize| Segment { addr, len: len as u32 };
        let (kind, sector, payload, room) = match request {
            Request::Read { first, count } => (blk::T_IN, first, vec![], count as usize * SECTOR),
            Request::Write { first, .. } => (blk::T_OUT, first, vec![], 0),
            Request::Flush => (blk::T_FLUSH, 0, vec![], 0),
            Request::Discard { first, count } => (blk::T_DISCARD, 0, range(first, count, 0), 0),
            Request::Zeroes { first, count, unmap } => {
                (blk::T_WRITE_ZEROES, 0, range(first, count, unmap.into()), 0)
            }
        };
        let header = RequestHeader { kind: kind.to_le(), reserved: 0, sector: sector.to_le() };
        let data = if payload.is_empty() { data } else { &payload };
        self.poke(at, header.as_bytes());
        self.poke(status, &[0xee]);
        self.poke(at + FRAME, data);
        let mut readable = vec![segment(at, 16)];
        if !data.is_empty() {
            readable.push(segment(at + FRAME, data.len()));
        }
        let mut writable = vec![segment(status, 1)];
        if room > 0 {
            writable.insert(0, segment(at + FRAME, room));
        }
        let id = self.driver.add(&readable, &writable).expect("a place in the ring");
        self.in_flight[place] = Some((id, request));
    }

    fn poke(&self, addr: u64, data: &[u8]) {
        self.memory.handle().enter().write(addr, data, Access::FULL).expect("inside the memory");
    }

    fn peek(&self, addr: u64, len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        self.memory.handle().enter().read(addr, &mut out, Access::FULL).expect("inside the memory");
        out
    }

    /// Serves what is in the ring until all is answered. Calls `done` with each request and what it read.
    pub(super) fn run(
        &mut self,
        done: &mut impl FnMut(Request, &[u8]) -> Result<(), String>,
    ) -> Result<(), String> {
        self.driver.publish();
        loop {
            let served = self.handler.serve(&mut self.live).map_err(|error| match error {
                ServeError::Queue(error) => format!("the queue latched: {error}"),
                ServeError::Host(error) => format!("the queue failed: {error}"),
            })?;
            while let Some(used) = self.driver.pop_used().map_err(|error| error.to_string())? {
                let (request, data) = self.take(used.id)?;
                done(request, &data)?;
            }
            if served.taken > 0 || served.completed > 0 || self.handler.rest(true) == Rest::Serve {
                continue;
            }
            if self.driver.in_flight() == 0 {
                return Ok(());
            }
            let set = Arc::new(epoll::create(epoll::CreateFlags::CLOEXEC).expect("a descriptor"));
            self.handler.register(Some(&WakeSet::new(&set, 0))).expect("room in the set");
            let patience = Timespec { tv_sec: PATIENCE, tv_nsec: 0 };
            let ready = retry_on_intr(|| poll(&mut [PollFd::new(&set, PollFlags::IN)], Some(&patience)));
            if ready != Ok(1) {
                return Err("a request hangs".into());
            }
        }
    }

    /// The request of an answer, and what it has read.
    fn take(&mut self, id: BufferId) -> Result<(Request, Vec<u8>), String> {
        let is_it = |one: &Option<(BufferId, Request)>| matches!(one, Some((of, _)) if *of == id);
        let place = self.in_flight.iter().position(is_it).ok_or("an answer without a request")?;
        let at = DATA + place as u64 * PLACE;
        let Some((_, request)) = self.in_flight[place].take() else { unreachable!() };
        if self.peek(at + 64, 1) != [blk::S_OK] {
            let last = self.disk.errors().totals().last.map_or(String::new(), |last| last.error);
            return Err(format!("a request fails: {request:?}: {last}"));
        }
        let data = match request {
            Request::Read { count, .. } => self.peek(at + FRAME, count as usize * SECTOR),
            _ => Vec::new(),
        };
        Ok((request, data))
    }

    /// Reads the whole disk.
    pub(super) fn read_all(&mut self) -> Result<Vec<u8>, String> {
        let end = self.sectors();
        let step = (MOST / SECTOR) as u64;
        let mut all = Vec::with_capacity(end as usize * SECTOR);
        let mut first = 0;
        while first < end {
            let count = step.min(end - first);
            self.add(0, Request::Read { first, count }, &[]);
            self.run(&mut |_, data| {
                all.extend_from_slice(data);
                Ok(())
            })?;
            first += count;
        }
        Ok(all)
    }

    /// Stops the queue and closes the disk.
    pub(super) fn stop(mut self) {
        self.handler.drain(&mut self.live, true);
    }
}

fn range(first: u64, count: u64, flags: u32) -> Vec<u8> {
    let (sector, num_sectors, flags) = (first.to_le(), (count as u32).to_le(), flags.to_le());
    DiscardRange { sector, num_sectors, flags }.as_bytes().to_vec()
}
