//! The block device against a hostile driver, from the ring to the image and back.
use crate::hostile::{BASE, Rings};
use arbitrary::{Result, Unstructured};
use paravane_device::blk::{Blk, BlkConfig, EngineChoice};
use paravane_device::{Device, MappedQueue, QueueHandler, Rest, ServeError, WakeSet};
use paravane_dma::{Access, Backing, Handle, Memory, Region, RegionConfig};
use paravane_ring::{QueueAddresses, QueueError};
use paravane_spec::blk::{self, RequestHeader};
use paravane_spec::feature;
use paravane_spec::split::{AVAIL_IDX, AVAIL_RING, DESC_F_NEXT, DESC_F_WRITE, DESC_SIZE};
use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::io::retry_on_intr;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// Bytes of the image: a few sectors, so that requests run into its end.
const IMAGE: usize = 16 * 1024;
/// Bytes of guest memory.
const MEMORY: usize = 64 * 1024;
/// Largest queue.
const QUEUE: u16 = 16;

/// Runs one input, with an image in a file and with one in memory.
pub fn blk_request(data: &[u8]) {
    for in_memory in [false, true] {
        run(data, in_memory);
    }
}

fn run(data: &[u8], in_memory: bool) {
    let mut u = Unstructured::new(data);
    let Ok(read_only) = u.arbitrary::<u8>().map(|byte| byte % 4 == 0) else { return };
    let mut disk = disk(read_only, in_memory);
    let image = disk.blk.image().expect("a descriptor");
    if !read_only {
        image.write_all_at(&pattern(), 0).expect("the image");
    }
    let Ok(mut rig) = Rig::new(&mut disk.blk, &mut u) else { return };
    let mut going = true;
    while going && !u.is_empty() {
        going = rig.step(&mut u).is_ok();
    }
    rig.end(data.len().is_multiple_of(2));
    assert_eq!(image.metadata().expect("the image").len(), IMAGE as u64, "the image has another size");
    if read_only {
        let mut now = vec![0; IMAGE];
        image.read_exact_at(&mut now, 0).expect("the image");
        assert!(now == pattern(), "a read-only image was written");
    }
}

/// An open disk, opened once. Each input finds the same contents.
struct Disk {
    blk: Blk,
    _file: File,
}

/// With an image `in_memory`, which is mapped, or in a file.
fn disk(read_only: bool, in_memory: bool) -> MutexGuard<'static, Disk> {
    static DISKS: [OnceLock<Mutex<Disk>>; 4] = [const { OnceLock::new() }; 4];
    let disk = DISKS[usize::from(read_only) + 2 * usize::from(in_memory)].get_or_init(|| {
        let (file, engine) = match in_memory {
            true => (memfd_create(c"image", MemfdFlags::CLOEXEC).expect("memory").into(), EngineChoice::Auto),
            false => (tempfile::tempfile().expect("a temporary file"), EngineChoice::Threads),
        };
        file.write_all_at(&pattern(), 0).expect("room for the image");
        let mut config = BlkConfig::new(format!("/proc/self/fd/{}", file.as_raw_fd()));
        (config.read_only, config.queue_size, config.engine) = (read_only, QUEUE, engine);
        let blk = Blk::open(config).expect("a disk");
        assert_eq!(blk.engine().contains("mapped"), in_memory);
        Mutex::new(Disk { blk, _file: file })
    });
    // A panic ends a fuzzer. In a test, the next input still finds a valid disk.
    disk.lock().unwrap_or_else(PoisonError::into_inner)
}

fn pattern() -> Vec<u8> {
    (0..IMAGE).map(|at| (at / 512 + at) as u8).collect()
}

struct Rig {
    handler: Box<dyn QueueHandler>,
    queue: MappedQueue,
    /// Guest memory, as the driver accesses it.
    memory: Handle,
    rings: Rings,
    /// Descriptors of the requests built so far.
    descriptors: u16,
    taken: u64,
    completed: u64,
    latched: Option<QueueError>,
}

impl Rig {
    fn new(blk: &mut Blk, u: &mut Unstructured<'_>) -> Result<Self> {
        let size = 1 << (u.arbitrary::<u8>()? % (QUEUE.ilog2() as u8 + 1));
        let refused = match u.arbitrary::<u8>()? % 4 {
            0 => u.arbitrary::<u64>()?,
            _ => 0,
        };
        let features = blk.features() & (!refused | feature::VERSION_1);
        let region = RegionConfig { gpa: BASE, size: MEMORY as u64, backing: Backing::Pages, writable: true };
        let memory = Memory::new(vec![Region::new(region).expect("memory")]).expect("one region");
        let rings = Rings::new(size, 0);
        let at = |offset| BASE + offset as u64;
        let addresses =
            QueueAddresses { size, desc: at(rings.desc), driver: at(rings.avail), device: at(rings.used) };
        let max = blk.queue_sizes()[0];
        let queue =
            MappedQueue::start(addresses, max, features, memory.handle()).expect("a correct configuration");
        let handler = blk.start_queue(0, features).expect("a handler");
        Ok(Self {
            handler,
            queue,
            memory: memory.handle(),
            rings,
            descriptors: 0,
            taken: 0,
            completed: 0,
            latched: None,
        })
    }

    fn poke(&mut self, offset: usize, data: &[u8]) {
        let data = &data[..data.len().min(MEMORY - offset)];
        self.memory.enter().write(BASE + offset as u64, data, Access::WRITE).expect("inside the memory");
    }

    fn u16_at(&mut self, offset: usize) -> u16 {
        self.memory.enter().read_obj(BASE + offset as u64, Access::READ).expect("inside the memory")
    }

    fn step(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        match u.arbitrary::<u8>()? % 16 {
            0..8 => self.request(u)?,
            8..10 => {
                let avail_idx = self.u16_at(self.rings.avail + AVAIL_IDX);
                let (at, data) = self.rings.poke(avail_idx, u)?;
                self.poke(at, &data);
            }
            10 => {
                // A header at a random offset of the buffers.
                let (at, kind, sector) = (u.arbitrary::<u16>()?, u.arbitrary::<u8>()? % 16, u.arbitrary()?);
                self.header(usize::from(at) % (MEMORY - 16), kind.into(), sector);
            }
            11..14 => self.serve(),
            14 => self.settle(),
            _ => {
                if let Err(error) = self.queue.arm_kicks() {
                    self.latch(error);
                }
            }
        }
        Ok(())
    }

    fn header(&mut self, at: usize, kind: u32, sector: u64) {
        let header = RequestHeader { kind, reserved: 0, sector };
        self.memory.enter().write_obj(BASE + at as u64, &header, Access::WRITE).expect("inside the memory");
    }

    /// Builds a mostly valid request and makes it available.
    fn request(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        const KINDS: [u32; 8] = [
            blk::T_IN,
            blk::T_OUT,
            blk::T_FLUSH,
            blk::T_GET_ID,
            blk::T_DISCARD,
            blk::T_WRITE_ZEROES,
            2,
            u32::MAX,
        ];
        let kind = KINDS[usize::from(u.arbitrary::<u8>()? % 8)];
        let sector = match u.arbitrary::<u8>()? {
            byte @ 0..0xf0 => u64::from(byte) % (IMAGE / 512 + 2) as u64,
            _ => u.arbitrary()?,
        };
        let reads = matches!(kind, blk::T_OUT | blk::T_DISCARD | blk::T_WRITE_ZEROES);
        let size = self.rings.size;
        let head = self.descriptors % size;
        // Each descriptor has a fixed place for its header.
        let at = self.rings.data + usize::from(head) * 32;
        self.header(at, kind, sector);
        let pieces = u.arbitrary::<u8>()? % 4;
        let mut chain = vec![(at, 16, 0)];
        for _ in 0..pieces {
            let len = match u.arbitrary::<u8>()? % 4 {
                0..2 => u32::from(u.arbitrary::<u8>()? % 8) * 512,
                2 => u32::from(u.arbitrary::<u8>()? % 4) * 16,
                _ => u.arbitrary::<u16>()?.into(),
            };
            let place = usize::from(u.arbitrary::<u16>()?) % MEMORY;
            if reads && kind != blk::T_OUT {
                let range =
                    [sector.to_le_bytes(), u64::from(u.arbitrary::<u16>()? % 40).to_le_bytes()].concat();
                self.poke(place, &range);
            }
            chain.push((place, len, if reads { 0 } else { DESC_F_WRITE }));
        }
        chain.push((at + 16, 1, DESC_F_WRITE));
        let last = chain.len() - 1;
        for (i, (place, len, flags)) in chain.into_iter().enumerate() {
            let index = (head + i as u16) % size;
            let flags = if i < last { flags | DESC_F_NEXT } else { flags };
            let mut desc = [0; DESC_SIZE];
            desc[..8].copy_from_slice(&(BASE + place as u64).to_le_bytes());
            desc[8..12].copy_from_slice(&len.to_le_bytes());
            desc[12..14].copy_from_slice(&flags.to_le_bytes());
            desc[14..].copy_from_slice(&((index + 1) % size).to_le_bytes());
            self.poke(self.rings.desc + usize::from(index) * DESC_SIZE, &desc);
        }
        self.descriptors = self.descriptors.wrapping_add(last as u16 + 1);
        let idx = self.u16_at(self.rings.avail + AVAIL_IDX);
        self.poke(self.rings.avail + AVAIL_RING + usize::from(idx % size) * 2, &head.to_le_bytes());
        self.poke(self.rings.avail + AVAIL_IDX, &idx.wrapping_add(1).to_le_bytes());
        Ok(())
    }

    fn latch(&mut self, error: QueueError) {
        let first = *self.latched.get_or_insert(error);
        assert_eq!(error, first, "another error than the one that latched");
        assert_eq!(self.queue.queue().error(), Some(first));
    }

    fn serve(&mut self) {
        match self.handler.serve(&mut self.queue) {
            Ok(served) => {
                assert_eq!(self.latched, None, "a latched queue was served");
                self.taken += u64::from(served.taken);
                self.completed += u64::from(served.completed);
                assert!(!served.interrupt || served.completed > 0);
                assert_eq!(u64::from(self.queue.queue().in_flight()), self.taken - self.completed);
            }
            Err(ServeError::Queue(error)) => self.latch(error),
            Err(ServeError::Host(error)) => panic!("the host failed: {error}"),
        }
    }

    /// Serves until idle, as the loop of an owner does.
    fn settle(&mut self) {
        while self.latched.is_none() {
            let before = (self.taken, self.completed);
            self.serve();
            if self.latched.is_some()
                || (self.taken, self.completed) != before
                || self.handler.rest(true) == Rest::Serve
            {
                continue;
            }
            if self.queue.queue().in_flight() == 0 {
                return;
            }
            let set = Arc::new(epoll::create(epoll::CreateFlags::CLOEXEC).expect("a descriptor"));
            self.handler.register(Some(&WakeSet::new(&set, 0))).expect("room in the set");
            let patience = Timespec { tv_sec: 10, tv_nsec: 0 };
            // The timer of the fuzzer may interrupt.
            let ready = retry_on_intr(|| poll(&mut [PollFd::new(&set, PollFlags::IN)], Some(&patience)));
            assert_eq!(ready, Ok(1), "{} requests hang", self.queue.queue().in_flight());
        }
    }

    /// Stops the queue, or resets the device.
    fn end(mut self, complete: bool) {
        if complete {
            self.settle();
        }
        let served = self.handler.drain(&mut self.queue, complete);
        self.completed += u64::from(served.completed);
        if complete && self.queue.queue().error().is_none() {
            assert_eq!(self.taken, self.completed);
        }
    }
}
