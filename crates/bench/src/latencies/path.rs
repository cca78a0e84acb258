//! The device's side of a queue, from the ring to the used buffer, on one thread.
//!
//! ```text
//!   script: descriptors and available ring, filled once; per batch it stores the index
//!   owner:  announce -> serve -> finish, then idle, as an I/O thread does
//! ```
//! The driver wants no interrupts. Nothing makes a system call.
use super::case::{Case, Pace, Work};
use crate::BenchError;
use crate::error::{broken, miscounted};
use crate::memory::SharedMemory;
use crate::subject::{PARAVANE, Subject};
use nix::sys::memfd::{MFdFlags, memfd_create};
use paravane_device::blk::{Blk, BlkConfig};
use paravane_device::latency::{LatencyRecorder, QueueLatency};
use paravane_device::net::{Generator, Net, NetConfig};
use paravane_device::{Device, MappedQueue, QueueHandler};
use paravane_dma::{Backing, Memory, Region, RegionConfig};
use paravane_ring::QueueAddresses;
use paravane_spec::net::{F_MRG_RXBUF, RECEIVE, TRANSMIT};
use paravane_spec::{blk, feature, split};
use std::fs::File;
use std::io::Write;
use std::mem::swap;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::Duration;

/// Subject whose latencies are recorded.
pub(super) const ON: &str = "on";
/// Subject whose latencies are not.
pub(super) const OFF: &str = "off";

/// Descriptors of the queue.
const QUEUE_SIZE: u16 = 256;
/// Descriptors set aside for a chain.
const CHAIN: u16 = 4;
/// Chains, used in turn.
const CHAINS: u16 = QUEUE_SIZE / CHAIN;
/// Bytes of a read.
const READ: u32 = 4096;
/// Bytes of a frame, without the header.
const FRAME: u32 = 64;
/// Bytes of the header of a frame.
const FRAME_HEADER: u32 = 12;
/// Bytes of a buffer for a frame.
const FRAME_BUFFER: u32 = 2048;

/// Guest-physical addresses, which are offsets in the region.
mod map {
    pub(super) const DESC: usize = 0x1000;
    pub(super) const AVAIL: usize = 0x2000;
    pub(super) const USED: usize = 0x3000;
    /// Headers and statuses of disk requests.
    pub(super) const FRAMES: usize = 0x4000;
    /// Bytes of each.
    pub(super) const FRAME: usize = 64;
    /// Data.
    pub(super) const BUFFERS: usize = 0x1_0000;
    pub(super) const SIZE: usize = 0x8_0000;
}

/// A queue with its device, and a script for a driver.
///
/// Fields drop in order, the memory last.
pub(super) struct DevicePath {
    handler: Box<dyn QueueHandler>,
    live: MappedQueue,
    /// The recorder of the other setting.
    other: LatencyRecorder,
    latency: Arc<QueueLatency>,
    is_on: bool,
    /// Requests while latencies were on.
    recorded: u64,
    case: Case,
    memory: SharedMemory,
    /// Available index.
    index: u16,
    _device: Box<dyn Device>,
    _guest: Memory,
    _region: Arc<Region>,
}

/// A segment of a chain: address, length, whether the device writes it.
type Segment = (usize, u32, bool);

impl DevicePath {
    /// Makes the path of `case`, with latencies off.
    pub(super) fn new(case: Case) -> Result<Self, BenchError> {
        let region = RegionConfig { gpa: 0, size: map::SIZE as u64, backing: Backing::Pages, writable: true };
        let region = Region::new(region).map_err(failed)?;
        let guest = Memory::new(vec![Arc::clone(&region)]).map_err(failed)?;
        // SAFETY: the region is mapped for as long as it is held, which is longer than the queue
        // and this copy; nothing makes references to it.
        let memory = unsafe { SharedMemory::new(region.host(), map::SIZE) };
        fill(case.work, memory);
        let (mut device, queue, features) = device(case.work)?;
        let features = device.features() & (feature::VERSION_1 | features);
        let handler = device.start_queue(queue, features).map_err(failed)?;
        let addresses = QueueAddresses {
            size: QUEUE_SIZE,
            desc: map::DESC as u64,
            driver: map::AVAIL as u64,
            device: map::USED as u64,
        };
        let latency = Arc::new(QueueLatency::default());
        let mut live = MappedQueue::start(addresses, QUEUE_SIZE, features, guest.handle()).map_err(failed)?;
        live.record_into(Some(Arc::clone(&latency)), "", 0);
        let mut other = LatencyRecorder::default();
        swap(live.latency(), &mut other);
        Ok(Self {
            handler,
            live,
            other,
            latency,
            is_on: false,
            recorded: 0,
            case,
            memory,
            index: 0,
            _device: device,
            _guest: guest,
            _region: region,
        })
    }

    /// Records latencies from now on, or not.
    pub(super) fn record(&mut self, on: bool) {
        if self.is_on != on {
            swap(self.live.latency(), &mut self.other);
            self.is_on = on;
        }
    }

    /// Checks that each request was recorded, and none while latencies were off.
    ///
    /// # Errors
    /// The counts differ.
    pub(super) fn check(&self) -> Result<(), BenchError> {
        let operations = self.latency.snapshot().operations;
        let count: u64 = operations.iter().map(|(_, latencies)| latencies.count).sum();
        match count == self.recorded {
            true => Ok(()),
            false => Err(failed(format_args!("recorded {count} of {} requests", self.recorded))),
        }
    }

    /// Serves the queue once, as an I/O thread does.
    fn serve(&mut self) -> Result<u32, BenchError> {
        let served = self.handler.serve(&mut self.live).map_err(failed)?;
        self.live.latency().finish();
        Ok(served.completed)
    }
}

impl Subject for DevicePath {
    fn run(&mut self, batches: u32) -> Result<u64, BenchError> {
        let Case { batch, pace, .. } = self.case;
        let mut sum = 0;
        self.live.latency().idle();
        self.live.latency().announce();
        for _ in 0..batches {
            self.index = self.index.wrapping_add(batch);
            self.memory.store_u16(map::AVAIL + split::AVAIL_IDX, self.index);
            let mut completed = 0;
            match pace {
                Pace::Busy => completed += self.serve()?,
                Pace::Polled => {
                    self.live.latency().announce_since(Duration::from_nanos(200));
                    self.live.latency().begin_turn();
                    self.live.disable_kicks();
                    completed += self.serve()?;
                    completed += self.serve()?;
                    self.live.latency().idle();
                }
            }
            if completed != u32::from(batch) {
                return Err(miscounted(PARAVANE, completed as usize, batch));
            }
            sum += u64::from(completed);
        }
        if self.is_on {
            self.recorded += sum;
        }
        Ok(sum)
    }

    fn position(&self) -> u16 {
        self.memory.load_u16(map::USED + split::USED_IDX)
    }
}

/// The device, the index of its queue, and features beside VERSION_1.
fn device(work: Work) -> Result<(Box<dyn Device>, u16, u64), BenchError> {
    let queue = match work {
        Work::Disk => {
            let image = memfd_create(c"paravane-bench", MFdFlags::MFD_CLOEXEC)
                .map_err(|error| BenchError::Os { what: "make an image in memory", source: error.into() })?;
            let mut image = File::from(image);
            image.write_all(&vec![0x5a; usize::from(CHAINS) * READ as usize]).map_err(failed)?;
            let path = format!("/proc/self/fd/{}", image.as_raw_fd());
            // It opens the file again; without a lock, since `image` has it open, too.
            let config = BlkConfig { queue_size: QUEUE_SIZE, lock: false, ..BlkConfig::new(path) };
            return Ok((Box::new(Blk::open(config).map_err(failed)?), 0, blk::F_FLUSH));
        }
        Work::FramesOut => TRANSMIT,
        Work::FramesIn => RECEIVE,
    };
    let generator = Generator::new(1, u64::MAX, FRAME as usize).map_err(failed)?;
    let config = NetConfig { queue_size: QUEUE_SIZE, ..NetConfig::new([2, 0, 0, 0, 0, 1]) };
    Ok((Box::new(Net::new(config, generator).map_err(failed)?), queue, F_MRG_RXBUF))
}

/// Writes all descriptors, the available ring, and the headers of disk requests.
fn fill(work: Work, memory: SharedMemory) {
    memory.store_u16(map::AVAIL + split::AVAIL_FLAGS, split::AVAIL_F_NO_INTERRUPT);
    for entry in 0..QUEUE_SIZE {
        let at = map::AVAIL + split::AVAIL_RING + usize::from(entry) * split::AVAIL_ENTRY;
        memory.store_u16(at, entry % CHAINS * CHAIN);
    }
    for chain in 0..CHAINS {
        let number = usize::from(chain);
        // Frames begin in different sets of the cache.
        let buffer = |stride: usize| map::BUFFERS + number * stride;
        let frame_buffer = buffer(FRAME_BUFFER as usize + 128);
        let header = map::FRAMES + number * map::FRAME;
        match work {
            Work::Disk => {
                memory.store_u64(header, blk::T_IN.into());
                memory.store_u64(header + 8, number as u64 * u64::from(READ) / blk::SECTOR);
                let data = buffer(READ as usize);
                describe(memory, chain, &[(header, 16, false), (data, READ, true), (header + 16, 1, true)]);
            }
            Work::FramesOut => describe(memory, chain, &[(frame_buffer, FRAME_HEADER + FRAME, false)]),
            Work::FramesIn => describe(memory, chain, &[(frame_buffer, FRAME_BUFFER, true)]),
        }
    }
}

/// Writes the descriptors of chain number `chain`.
fn describe(memory: SharedMemory, chain: u16, segments: &[Segment]) {
    for (place, &(addr, len, writable)) in (chain * CHAIN..).zip(segments) {
        let at = map::DESC + usize::from(place) * split::DESC_SIZE;
        let is_last = usize::from(place - chain * CHAIN) + 1 == segments.len();
        let mut flags = if writable { split::DESC_F_WRITE } else { 0 };
        if !is_last {
            flags |= split::DESC_F_NEXT;
        }
        memory.store_u64(at, addr as u64);
        memory.store_u64(at + 8, u64::from(len) | u64::from(flags) << 32 | u64::from(place + 1) << 48);
    }
}

/// The path cannot be set up, or its queue has failed.
#[cold]
fn failed(error: impl std::fmt::Display) -> BenchError {
    broken(PARAVANE, error)
}
