//! The network card against a hostile driver: all three queues, and an echo.
use crate::hostile::{BASE, Rings};
use arbitrary::{Result, Unstructured};
use paravane_device::net::{LinkEnd, Net, NetConfig, Totals};
use paravane_device::{Device, MappedQueue, QueueHandler, ServeError};
use paravane_dma::{Access, Backing, Handle, Memory, Region, RegionConfig};
use paravane_ring::{QueueAddresses, QueueError};
use paravane_spec::feature;
use paravane_spec::net::F_MQ;
use paravane_spec::split::{AVAIL_IDX, AVAIL_RING, DESC_F_NEXT, DESC_F_WRITE, DESC_SIZE};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

/// Bytes of guest memory per queue, buffers included. They adjoin.
const MEMORY: usize = 64 * 1024;
/// Largest queue.
const QUEUE: u16 = 16;
/// Receive, transmit, control.
const QUEUES: usize = 3;
const TX: usize = 1;
const CONTROL: usize = 2;
/// Most calls until an idle driver is served: each call makes progress.
const PATIENCE: usize = 10_000;

/// Runs one input.
pub fn net_request(data: &[u8]) {
    let mut u = Unstructured::new(data);
    let mut card = card();
    card.reset();
    let before = card.counters().totals();
    let Ok(mut rig) = Rig::new(&mut card, &mut u) else { return };
    let mut going = true;
    while going && !u.is_empty() {
        going = rig.step(&mut u).is_ok();
    }
    rig.end(data.len().is_multiple_of(2), before);
}

/// A card, made once. Each input finds it reset.
fn card() -> MutexGuard<'static, Net<LinkEnd>> {
    static CARD: OnceLock<Mutex<Net<LinkEnd>>> = OnceLock::new();
    let card = CARD.get_or_init(|| {
        let config = NetConfig { queue_size: QUEUE, mtu: Some(1500), ..NetConfig::new([2, 0, 0, 0, 0, 1]) };
        Mutex::new(Net::new(config, LinkEnd::echo(2).expect("descriptors")).expect("a card"))
    });
    // A panic ends a fuzzer. In a test, the next input still finds a valid card.
    card.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One queue.
struct Lane {
    handler: Box<dyn QueueHandler>,
    queue: MappedQueue,
    rings: Rings,
    /// Offset of its memory.
    at: usize,
    /// Descriptors of the chains built so far.
    descriptors: u16,
    taken: u64,
    completed: u64,
    latched: Option<QueueError>,
}

struct Rig<'a> {
    card: &'a Net<LinkEnd>,
    lanes: Vec<Lane>,
    /// Guest memory, as the driver accesses it.
    memory: Handle,
}

impl<'a> Rig<'a> {
    fn new(card: &'a mut Net<LinkEnd>, u: &mut Unstructured<'_>) -> Result<Self> {
        let refused = match u.arbitrary::<u8>()? % 4 {
            0 => u.arbitrary::<u64>()?,
            _ => 0,
        };
        let features = card.features() & (!refused | feature::VERSION_1);
        let size = (MEMORY * QUEUES) as u64;
        let region = RegionConfig { gpa: BASE, size, backing: Backing::Pages, writable: true };
        let memory = Memory::new(vec![Region::new(region).expect("memory")]).expect("one region");
        let control = if features & F_MQ != 0 { 4 } else { 2 };
        let mut lanes = Vec::new();
        for (number, index) in [0, 1, control].into_iter().enumerate() {
            let size = 1 << (u.arbitrary::<u8>()? % (QUEUE.ilog2() as u8 + 1));
            let (rings, at) = (Rings::new(size, 0), number * MEMORY);
            let addr = |offset| BASE + (at + offset) as u64;
            let addresses = QueueAddresses {
                size,
                desc: addr(rings.desc),
                driver: addr(rings.avail),
                device: addr(rings.used),
            };
            let max = card.queue_sizes()[usize::from(index)];
            let queue = MappedQueue::start(addresses, max, features, memory.handle())
                .expect("a correct configuration");
            let handler = card.start_queue(index, features).expect("a handler");
            lanes.push(Lane {
                handler,
                queue,
                rings,
                at,
                descriptors: 0,
                taken: 0,
                completed: 0,
                latched: None,
            });
        }
        Ok(Self { card, lanes, memory: memory.handle() })
    }

    fn poke(&mut self, offset: usize, data: &[u8]) {
        let data = &data[..data.len().min(MEMORY * QUEUES - offset)];
        self.memory.enter().write(BASE + offset as u64, data, Access::WRITE).expect("inside the memory");
    }

    fn u16_at(&mut self, offset: usize) -> u16 {
        self.memory.enter().read_obj(BASE + offset as u64, Access::READ).expect("inside the memory")
    }

    fn step(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        match u.arbitrary::<u8>()? % 16 {
            0..4 => self.frame(u)?,
            4..7 => {
                let pieces = self.pieces(u, DESC_F_WRITE)?;
                self.offer(0, &pieces);
            }
            7 => self.command(u)?,
            8..10 => {
                let lane = usize::from(u.arbitrary::<u8>()?) % QUEUES;
                let (rings, at) = (self.lanes[lane].rings, self.lanes[lane].at);
                let avail_idx = self.u16_at(at + rings.avail + AVAIL_IDX);
                let (offset, data) = rings.poke(avail_idx, u)?;
                self.poke(at + offset, &data);
            }
            10..14 => {
                let lane = usize::from(u.arbitrary::<u8>()?) % QUEUES;
                self.lanes[lane].serve();
            }
            14 => self.settle(),
            _ => {
                for lane in &mut self.lanes {
                    if let Err(error) = lane.queue.arm_kicks() {
                        lane.latch(error);
                    }
                }
            }
        }
        Ok(())
    }

    /// Up to four segments: offset, length, flags.
    fn pieces(&mut self, u: &mut Unstructured<'_>, flags: u16) -> Result<Vec<(usize, u32, u16)>> {
        let mut pieces = Vec::new();
        for _ in 0..=u.arbitrary::<u8>()? % 4 {
            let len = match u.arbitrary::<u8>()? % 4 {
                0..2 => u32::from(u.arbitrary::<u8>()?),
                2 => u32::from(u.arbitrary::<u8>()? % 32) * 128,
                _ => u.arbitrary::<u16>()?.into(),
            };
            let place = usize::from(u.arbitrary::<u16>()?) * QUEUES % (MEMORY * QUEUES);
            let flags = if u.arbitrary::<u8>()? == u8::MAX { flags ^ DESC_F_WRITE } else { flags };
            pieces.push((place, len, flags));
        }
        Ok(pieces)
    }

    /// A frame with a mostly valid header.
    fn frame(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        let mut header: [u8; 12] = [0; 12];
        if u.arbitrary::<u8>()? % 2 == 0 {
            header = u.arbitrary()?;
            header[0] &= 3;
            // Numbers that are mostly inside the frame.
            for high in [7, 9] {
                header[high] = if header[high] < 0xf0 { 0 } else { header[high] };
            }
        }
        let mut pieces = self.pieces(u, 0)?;
        let at =
            self.lanes[TX].at + self.lanes[TX].rings.data + usize::from(self.lanes[TX].descriptors % 64) * 16;
        self.poke(at, &header);
        pieces.insert(0, (at, 12, 0));
        self.offer(TX, &pieces);
        Ok(())
    }

    fn command(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        let lane = &self.lanes[CONTROL];
        let at = lane.at + lane.rings.data + usize::from(lane.descriptors % 64) * 16;
        let mut command = [4, 0, u.arbitrary::<u8>()? % 4, 0];
        if u.arbitrary::<u8>()? % 4 == 0 {
            command = u.arbitrary()?;
        }
        self.poke(at, &command);
        let len = u32::from(u.arbitrary::<u8>()? % 8);
        let pieces = [(at, if len < 4 { 4 } else { len }, 0), (at + 8, 1, DESC_F_WRITE)];
        self.offer(CONTROL, &pieces);
        Ok(())
    }

    /// Makes a chain available.
    fn offer(&mut self, lane: usize, pieces: &[(usize, u32, u16)]) {
        let Lane { rings, at, descriptors, .. } = &mut self.lanes[lane];
        let (rings, at, size) = (*rings, *at, rings.size);
        let head = *descriptors % size;
        *descriptors = descriptors.wrapping_add(pieces.len() as u16);
        let last = pieces.len() - 1;
        for (i, &(place, len, flags)) in pieces.iter().enumerate() {
            let index = (head + i as u16) % size;
            let flags = if i < last { flags | DESC_F_NEXT } else { flags };
            let mut desc = [0; DESC_SIZE];
            desc[..8].copy_from_slice(&(BASE + place as u64).to_le_bytes());
            desc[8..12].copy_from_slice(&len.to_le_bytes());
            desc[12..14].copy_from_slice(&flags.to_le_bytes());
            desc[14..].copy_from_slice(&((index + 1) % size).to_le_bytes());
            self.poke(at + rings.desc + usize::from(index) * DESC_SIZE, &desc);
        }
        let idx = self.u16_at(at + rings.avail + AVAIL_IDX);
        self.poke(at + rings.avail + AVAIL_RING + usize::from(idx % size) * 2, &head.to_le_bytes());
        self.poke(at + rings.avail + AVAIL_IDX, &idx.wrapping_add(1).to_le_bytes());
    }

    /// Serves until idle, as the loops of owners do.
    fn settle(&mut self) {
        for _ in 0..PATIENCE {
            let mut busy = false;
            for lane in &mut self.lanes {
                busy |= lane.serve();
            }
            if !busy {
                return;
            }
        }
        panic!("the card does not come to rest");
    }

    /// Stops the queues, or resets the card.
    fn end(mut self, complete: bool, before: Totals) {
        if complete {
            self.settle();
        }
        for lane in &mut self.lanes {
            let served = lane.handler.drain(&mut lane.queue, complete);
            lane.completed += u64::from(served.completed);
            if complete && lane.queue.queue().error().is_none() {
                assert_eq!(lane.taken, lane.completed);
                assert_eq!(lane.queue.queue().in_flight(), 0);
            }
        }
        let now = self.card.counters().totals();
        let counted = |totals: Totals| totals.transmitted + totals.refused + totals.malformed;
        if self.lanes[TX].latched.is_none() {
            assert_eq!(counted(now) - counted(before), self.lanes[TX].taken, "a frame was not counted");
        }
        let received = (now.received + now.no_room) - (before.received + before.no_room);
        assert!(received <= now.transmitted - before.transmitted, "frames from nowhere");
    }
}

impl Lane {
    fn latch(&mut self, error: QueueError) {
        let first = *self.latched.get_or_insert(error);
        assert_eq!(error, first, "another error than the one that latched");
        assert_eq!(self.queue.queue().error(), Some(first));
    }

    /// Serves once; returns whether it made progress.
    fn serve(&mut self) -> bool {
        match self.handler.serve(&mut self.queue) {
            Ok(served) => {
                assert_eq!(self.latched, None, "a latched queue was served");
                self.taken += u64::from(served.taken);
                self.completed += u64::from(served.completed);
                assert!(!served.interrupt || served.completed > 0);
                assert_eq!(u64::from(self.queue.queue().in_flight()), self.taken - self.completed);
                served.taken + served.completed > 0
            }
            Err(ServeError::Queue(error)) => {
                self.latch(error);
                false
            }
            Err(ServeError::Host(error)) => panic!("the host failed: {error}"),
        }
    }
}
