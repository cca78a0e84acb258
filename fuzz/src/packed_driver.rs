//! Driver side of a packed queue against a hostile device.
use crate::arena::Arena;
use crate::hostile::BASE;
use arbitrary::{Result, Unstructured};
use paravane_ring::driver::{BufferId, Layout, PollToken, Queue, Used};
use paravane_ring::{DmaArea, QueueAddresses, QueueError, Segment};
use paravane_spec::feature;
use paravane_spec::packed::{DESC_F_AVAIL, DESC_F_USED, DESC_F_WRITE, DESC_SIZE, EVENT_SIZE};

/// Runs one input.
pub fn packed_driver(data: &[u8]) {
    let mut u = Unstructured::new(data);
    let Ok(mut rig) = Rig::new(&mut u) else { return };
    while !u.is_empty() {
        if rig.step(&mut u).is_err() {
            return;
        }
    }
}

/// A buffer that was added.
struct Buffer {
    id: u16,
    writable: u32,
    descriptors: usize,
    published: bool,
    /// The honest device is done with it.
    used: bool,
}

struct Rig {
    // Dropped before the arena.
    queue: Queue,
    arena: Arena,
    addresses: QueueAddresses,
    indirect: usize,
    in_flight: Vec<Buffer>,
    /// Where an honest device writes its next used descriptor: descriptors ever.
    next_used: usize,
    token: Option<PollToken>,
    latched: Option<QueueError>,
}

impl Rig {
    fn new(u: &mut Unstructured<'_>) -> Result<Self> {
        let size = 1_u16 << (u.arbitrary::<u8>()? % 7);
        let bits = u.arbitrary::<u8>()?;
        let indirect = u16::from(u.arbitrary::<u8>()? % 20);
        let features = feature::RING_PACKED
            | if bits & 1 != 0 { feature::INDIRECT_DESC } else { 0 }
            | if bits & 2 != 0 { feature::EVENT_IDX } else { 0 }
            | if bits & 12 == 12 { feature::IN_ORDER } else { 0 };
        let layout = Layout::new(size, indirect, features).expect("a correct layout");
        let arena = Arena::new(layout.memory());
        let memory = DmaArea { area: arena.area(), addr: BASE };
        let (queue, addresses) = Queue::new(layout, memory).expect("memory as asked for");
        // As the documentation of `Layout::new` has it.
        let indirect = if bits & 1 != 0 && indirect > 1 { indirect.min(size) } else { 0 };
        let indirect = if indirect > 1 { indirect.into() } else { 0 };
        let mut rig = Self {
            queue,
            arena,
            addresses,
            indirect,
            in_flight: vec![],
            next_used: 0,
            token: None,
            latched: None,
        };
        rig.adopt();
        Ok(rig)
    }

    fn size(&self) -> usize {
        self.addresses.size.into()
    }

    /// The driver writes everywhere in its memory but to the device's event suppression.
    fn adopt(&mut self) {
        let device = (self.addresses.device - BASE) as usize;
        self.arena.adopt(&[0..device, device + EVENT_SIZE..self.arena.len()]);
    }

    fn step(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        match u.arbitrary::<u8>()? % 16 {
            0 | 1 => self.device_writes(u)?,
            2..5 => {
                // An honest device, but for the length: uses the oldest buffer that it could know of.
                let len = u.arbitrary::<u32>()?;
                if let Some(buffer) = self.in_flight.iter_mut().find(|b| b.published && !b.used) {
                    buffer.used = true;
                    let (id, places) = (buffer.id, buffer.descriptors);
                    self.use_buffer(id, len, places);
                }
            }
            5..9 => self.add(u)?,
            9 => {
                let news = self.in_flight.iter().any(|buffer| !buffer.published);
                let kick = self.queue.publish();
                assert!(!kick || news && self.latched.is_none());
                if self.latched.is_none() {
                    self.in_flight.iter_mut().for_each(|buffer| buffer.published = true);
                }
            }
            10 | 11 => {
                let used = self.queue.pop_used();
                self.taken(used.map(Option::into_iter));
            }
            12 => {
                let mut out = [Used { id: BufferId(0), len: 0 }; 5];
                let most = usize::from(u.arbitrary::<u8>()?) % 6;
                let used = self.queue.take_used(&mut out[..most]);
                self.taken(used.map(|count| out.into_iter().take(count)));
                // What comes before an error is returned first.
                self.latched = self.latched.or(self.queue.error());
            }
            13 => self.token = Some(self.queue.enable_notifications()),
            14 => self.queue.disable_notifications(),
            _ => {
                if let Some(token) = self.token {
                    let _ = self.queue.poll(token);
                }
            }
        }
        self.adopt();
        assert_eq!(self.queue.error(), self.latched);
        assert_eq!(usize::from(self.queue.in_flight()), self.in_flight.len());
        let free = self.size() - self.in_flight.iter().map(|buffer| buffer.descriptors).sum::<usize>();
        let room = match (self.latched, free) {
            (Some(_), _) | (_, 0) => 0,
            (None, free) => free.max(self.indirect),
        };
        assert_eq!(self.queue.room(), room);
        Ok(())
    }

    fn device_writes(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        match u.arbitrary::<u8>()? % 6 {
            0 => {
                let (id, len) = (u.arbitrary::<u8>()? % 70, u.arbitrary()?);
                self.use_buffer(id.into(), len, 1);
            }
            1 => self.use_buffer(u.arbitrary()?, u.arbitrary()?, 1),
            2 => {
                let event = (self.addresses.device - BASE) as usize;
                self.arena.poke(event, &u.arbitrary::<u32>()?.to_le_bytes());
            }
            3 => {
                // Flags of some descriptor.
                let at = usize::from(u.arbitrary::<u8>()?) % self.size() * DESC_SIZE + 14;
                self.arena.poke(at, &u.arbitrary::<u16>()?.to_le_bytes());
            }
            _ => {
                let at = usize::from(u.arbitrary::<u16>()?) % self.arena.len();
                self.arena.poke(at, &u.arbitrary::<u32>()?.to_le_bytes());
            }
        }
        Ok(())
    }

    /// The device marks a descriptor used where the next belongs, and goes on by `places`.
    fn use_buffer(&mut self, id: u16, len: u32, places: usize) {
        let at = self.next_used % self.size() * DESC_SIZE + 8;
        let lap = self.next_used / self.size();
        let state = if lap.is_multiple_of(2) { DESC_F_AVAIL | DESC_F_USED } else { 0 };
        let word = u64::from(len) | u64::from(id) << 32 | u64::from(state | DESC_F_WRITE) << 48;
        self.arena.poke(at, &word.to_le_bytes());
        self.next_used += places;
    }

    fn add(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        let counts = u.arbitrary::<u8>()?;
        let (readable, writable) = (usize::from(counts % 6), usize::from(counts / 6 % 6));
        let mut segments = vec![];
        for _ in 0..readable + writable {
            // No buffer without bytes, and none of more than 2^32 - 1: the caller's duty.
            let (addr, len) = (u64::from(u.arbitrary::<u16>()?), u32::from(u.arbitrary::<u16>()?) << 10 | 1);
            segments.push(Segment { addr, len });
        }
        if segments.is_empty() {
            return Ok(());
        }
        let (readable, writable) = segments.split_at(readable);
        let descriptors = if (2..=self.indirect).contains(&segments.len()) { 1 } else { segments.len() };
        match self.queue.add(readable, writable) {
            Ok(BufferId(id)) => {
                assert_eq!(self.latched, None);
                assert!(id < self.addresses.size);
                assert!(self.in_flight.iter().all(|buffer| buffer.id != id), "{id} twice");
                let writable = writable.iter().map(|segment| segment.len).sum();
                self.in_flight.push(Buffer { id, writable, descriptors, published: false, used: false });
            }
            Err(full) => assert!(full.needed == descriptors && full.free < descriptors),
        }
        Ok(())
    }

    /// What the queue has given back.
    fn taken(&mut self, used: std::result::Result<impl Iterator<Item = Used>, QueueError>) {
        match used {
            Ok(used) => {
                for Used { id, len } in used {
                    assert_eq!(self.latched, None);
                    let at = self.in_flight.iter().position(|buffer| buffer.id == id.0).expect("in flight");
                    let buffer = self.in_flight.remove(at);
                    assert!(buffer.published, "returned before the device could know of it");
                    assert!(len <= buffer.writable, "{len} bytes written to {}", buffer.writable);
                }
            }
            Err(error) => {
                let first = *self.latched.get_or_insert(error);
                assert_eq!(error, first, "another error than the one that latched");
            }
        }
    }
}
