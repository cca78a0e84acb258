//! A driver side against a hostile device, with checks for both layouts.
//!
//! ```text
//!   step: the device writes | add | publish | pop_used, take_used | enable, disable, poll
//!         each result is compared, and nothing is written to the device's areas
//! ```
use crate::arena::Arena;
use crate::hostile::BASE;
use arbitrary::{Result, Unstructured};
use paravane_ring::driver::{BufferId, DriverConfig, Full, PollToken, Queue, Used};
use paravane_ring::{DmaArea, QueueAddresses, QueueError, Segment};
use paravane_spec::feature;
use std::ops::Range;

/// An added buffer.
pub(crate) struct Buffer {
    id: u16,
    writable: u32,
    descriptors: usize,
    published: bool,
    /// Whether the honest device has used it.
    used: bool,
}

/// Addresses of a queue in its arena.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ring {
    pub(crate) addresses: QueueAddresses,
}

impl Ring {
    pub(crate) fn size(self) -> usize {
        self.addresses.size.into()
    }

    /// Offset of an address in the arena.
    pub(crate) fn offset(self, addr: u64) -> usize {
        (addr - BASE) as usize
    }

    /// Offset of the device's area.
    pub(crate) fn device(self) -> usize {
        self.offset(self.addresses.device)
    }
}

/// The parts that differ by layout: device's writes, driver's expectations.
pub(crate) trait Layout: Default {
    /// Feature bits of the layout, chosen by bits of the input.
    fn features(bits: u8) -> u64;

    /// Whether step `what`, one of 5, is that of an honest device.
    fn honest(what: u8) -> bool;

    /// The range that only the device writes.
    fn device(&self, ring: Ring) -> Range<usize>;

    /// A step of a dishonest device.
    fn write(&mut self, ring: Ring, arena: &mut Arena, u: &mut Unstructured<'_>) -> Result<()>;

    /// Uses a buffer with this many descriptors, as an honest device.
    fn use_buffer(&mut self, ring: Ring, arena: &mut Arena, id: u32, len: u32, descriptors: usize);

    /// Called for an added buffer; its first `readable` segments are readable.
    fn added(&mut self, _ring: Ring, _arena: &Arena, _id: u16, _readable: usize, _segments: &[Segment]) {}

    /// Called after a publication.
    fn published(&mut self, _ring: Ring, _arena: &Arena) {}

    /// Called if the queue reports no used buffer after it returned `consumed`.
    fn nothing(&self, _ring: Ring, _arena: &Arena, _consumed: u64) {}

    /// Called after a poll with a token that was taken after `then` returned buffers.
    fn polled(&self, _ring: Ring, _arena: &Arena, _news: bool, _then: u64, _consumed: u64) {}
}

pub(crate) struct Rig<L> {
    // Dropped before the arena.
    queue: Queue,
    arena: Arena,
    ring: Ring,
    layout: L,
    indirect: usize,
    in_flight: Vec<Buffer>,
    /// Buffers returned so far.
    consumed: u64,
    /// A token, and the number of buffers returned before it.
    token: Option<(PollToken, u64)>,
    latched: Option<QueueError>,
}

impl<L: Layout> Rig<L> {
    pub(crate) fn new(u: &mut Unstructured<'_>) -> Result<Self> {
        let size = 1_u16 << (u.arbitrary::<u8>()? % 7);
        let bits = u.arbitrary::<u8>()?;
        let indirect = u16::from(u.arbitrary::<u8>()? % 20);
        let features = L::features(bits)
            | if bits & 1 != 0 { feature::INDIRECT_DESC } else { 0 }
            | if bits & 2 != 0 { feature::EVENT_IDX } else { 0 };
        let layout = DriverConfig::new(size, indirect, features).expect("a correct layout");
        let arena = Arena::new(layout.memory());
        let memory = DmaArea { area: arena.area(), addr: BASE };
        let (queue, addresses) = Queue::new(layout, memory).expect("memory as asked for");
        // As `DriverConfig::new` documents.
        let indirect = if bits & 1 != 0 && indirect > 1 { indirect.min(size) } else { 0 };
        let indirect = if indirect > 1 { indirect.into() } else { 0 };
        let mut rig = Self {
            queue,
            arena,
            ring: Ring { addresses },
            layout: L::default(),
            indirect,
            in_flight: vec![],
            consumed: 0,
            token: None,
            latched: None,
        };
        rig.adopt();
        Ok(rig)
    }

    /// Runs steps until the bytes are used up.
    pub(crate) fn run(mut self, u: &mut Unstructured<'_>) {
        while !u.is_empty() {
            if self.step(u).is_err() {
                return;
            }
        }
    }

    /// Adopts writes of the driver outside the device's areas.
    fn adopt(&mut self) {
        let device = self.layout.device(self.ring);
        self.arena.adopt(&[0..device.start, device.end..self.arena.len()]);
    }

    fn free(&self) -> usize {
        self.ring.size() - self.in_flight.iter().map(|buffer| buffer.descriptors).sum::<usize>()
    }

    fn step(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        match u.arbitrary::<u8>()? % 16 {
            what @ 0..5 if L::honest(what) => {
                // Honest except for the length: uses the oldest buffer that it can know.
                let len = u.arbitrary::<u32>()?;
                if let Some(buffer) = self.in_flight.iter_mut().find(|b| b.published && !b.used) {
                    buffer.used = true;
                    let (id, descriptors) = (buffer.id.into(), buffer.descriptors);
                    self.layout.use_buffer(self.ring, &mut self.arena, id, len, descriptors);
                }
            }
            0..5 => self.layout.write(self.ring, &mut self.arena, u)?,
            5..9 => self.add(u)?,
            9 => self.publish(),
            10 | 11 => {
                let used = self.queue.pop_used();
                self.taken(1, used.map(|used| used.into_iter().collect()));
            }
            12 => {
                let mut out = [Used::default(); 5];
                let most = usize::from(u.arbitrary::<u8>()?) % 6;
                let used = self.queue.take_used(&mut out[..most]);
                self.taken(most, used.map(|count| out[..count].to_vec()));
                // Buffers before an error are returned first.
                self.latched = self.latched.or(self.queue.error());
            }
            13 => self.token = Some((self.queue.enable_interrupts(), self.consumed)),
            14 => self.queue.disable_interrupts(),
            _ => {
                if let Some((token, then)) = self.token {
                    match (self.queue.poll(token), self.latched) {
                        (news, None) => {
                            self.layout.polled(self.ring, &self.arena, news, then, self.consumed);
                        }
                        (news, Some(_)) => assert!(news, "the owner has something to see"),
                    }
                }
            }
        }
        self.adopt();
        assert_eq!(self.queue.error(), self.latched);
        assert_eq!(usize::from(self.queue.in_flight()), self.in_flight.len());
        let room = match (self.latched, self.free()) {
            (Some(_), _) | (_, 0) => 0,
            (None, free) => free.max(self.indirect),
        };
        assert_eq!(self.queue.room(), room);
        Ok(())
    }

    fn add(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        let counts = u.arbitrary::<u8>()?;
        let (readable, writable) = (usize::from(counts % 6), usize::from(counts / 6 % 6));
        let mut segments = vec![];
        for _ in 0..readable + writable {
            // The caller must not add empty buffers, or more than 2^32 - 1 bytes.
            let (addr, len) = (u64::from(u.arbitrary::<u16>()?), u32::from(u.arbitrary::<u16>()?) << 10 | 1);
            segments.push(Segment { addr, len });
        }
        if segments.is_empty() {
            return Ok(());
        }
        let descriptors = if (2..=self.indirect).contains(&segments.len()) { 1 } else { segments.len() };
        match self.queue.add(&segments[..readable], &segments[readable..]) {
            Ok(BufferId(id)) => {
                assert_eq!(self.latched, None);
                assert!(descriptors <= self.free());
                assert!(id < self.ring.addresses.size);
                assert!(self.in_flight.iter().all(|buffer| buffer.id != id), "{id} twice");
                self.adopt();
                self.layout.added(self.ring, &self.arena, id, readable, &segments);
                let writable = segments[readable..].iter().map(|segment| segment.len).sum();
                self.in_flight.push(Buffer { id, writable, descriptors, published: false, used: false });
            }
            Err(Full { needed, free }) => {
                assert_eq!(needed, descriptors);
                assert_eq!(free, if self.latched.is_some() { 0 } else { self.free() });
                assert!(free < needed);
            }
        }
        Ok(())
    }

    fn publish(&mut self) {
        let news = self.in_flight.iter().any(|buffer| !buffer.published) && self.latched.is_none();
        let kick = self.queue.publish();
        assert!(!kick || news);
        if news {
            self.adopt();
            self.layout.published(self.ring, &self.arena);
            self.in_flight.iter_mut().for_each(|buffer| buffer.published = true);
        }
    }

    /// Checks the returned buffers, at most `most`.
    fn taken(&mut self, most: usize, used: std::result::Result<Vec<Used>, QueueError>) {
        let used = match used {
            Ok(used) => used,
            Err(error) => {
                let first = *self.latched.get_or_insert(error);
                assert_eq!(error, first, "another error than the one that latched");
                return;
            }
        };
        if used.is_empty() && most > 0 {
            assert_eq!(self.latched, None);
            self.layout.nothing(self.ring, &self.arena, self.consumed);
        }
        for Used { id, len } in used {
            assert_eq!(self.latched, None);
            let at = self.in_flight.iter().position(|buffer| buffer.id == id.0).expect("in flight");
            let buffer = self.in_flight.remove(at);
            assert!(buffer.published, "returned before the device could know of it");
            assert!(len <= buffer.writable, "{len} bytes written to {}", buffer.writable);
            self.consumed += 1;
        }
    }
}
