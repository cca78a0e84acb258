//! Driver side of a split queue against a hostile device.
use crate::arena::Arena;
use crate::hostile::BASE;
use arbitrary::{Result, Unstructured};
use paravane_ring::driver::{BufferId, Full, Layout, PollToken, Queue, Used};
use paravane_ring::{DmaArea, QueueAddresses, QueueError, Segment};
use paravane_spec::feature;
use paravane_spec::split::{
    AVAIL_ENTRY, AVAIL_IDX, AVAIL_RING, DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE, DESC_SIZE, USED_ENTRY,
    USED_FLAGS, USED_IDX, USED_RING,
};
use std::ops::Range;

/// Runs one input.
pub fn split_driver(data: &[u8]) {
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
    added: u16,
    consumed: u64,
    token: Option<(PollToken, u64)>,
    latched: Option<QueueError>,
}

impl Rig {
    fn new(u: &mut Unstructured<'_>) -> Result<Self> {
        let size = 1_u16 << (u.arbitrary::<u8>()? % 7);
        let bits = u.arbitrary::<u8>()?;
        let indirect = u16::from(u.arbitrary::<u8>()? % 20);
        let features =
            u64::from(bits & 1) * feature::INDIRECT_DESC + u64::from(bits >> 1 & 1) * feature::EVENT_IDX;
        let layout = Layout::new(size, indirect, features).expect("a correct layout");
        let arena = Arena::new(layout.memory());
        let memory = DmaArea { area: arena.area(), addr: BASE };
        let (queue, addresses) = Queue::new(layout, memory).expect("memory as asked for");
        // As the documentation of `Layout::new` has it.
        let indirect = if bits & 1 != 0 && indirect > 1 { indirect.min(size) } else { 0 };
        let indirect = if indirect > 1 { indirect.into() } else { 0 };
        Ok(Self {
            queue,
            arena,
            addresses,
            indirect,
            in_flight: vec![],
            added: 0,
            consumed: 0,
            token: None,
            latched: None,
        })
    }

    fn size(&self) -> usize {
        self.addresses.size.into()
    }

    fn offset(&self, addr: u64) -> usize {
        (addr - BASE) as usize
    }

    fn used(&self) -> usize {
        self.offset(self.addresses.device)
    }

    fn used_ring(&self) -> Range<usize> {
        self.used()..self.used() + USED_RING + self.size() * USED_ENTRY + 2
    }

    fn free(&self) -> usize {
        self.size() - self.in_flight.iter().map(|buffer| buffer.descriptors).sum::<usize>()
    }

    fn step(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        match u.arbitrary::<u8>()? % 16 {
            0..4 => self.device_writes(u)?,
            4 => {
                // An honest device: uses the oldest buffer that it could know of, and has not used.
                let len = u.arbitrary::<u32>()?;
                if let Some(buffer) = self.in_flight.iter_mut().find(|b| b.published && !b.used) {
                    buffer.used = true;
                    let id = buffer.id.into();
                    self.use_buffer(id, len);
                }
            }
            5..9 => self.add(u)?,
            9 => {
                let news = self.in_flight.iter().any(|buffer| !buffer.published);
                let kick = self.queue.publish();
                assert!(!kick || news && self.latched.is_none());
                if news && self.latched.is_none() {
                    let avail = self.offset(self.addresses.driver);
                    let mut idx = [0; 2];
                    assert!(self.arena.area().read(avail + AVAIL_IDX, &mut idx));
                    assert_eq!(u16::from_le_bytes(idx), self.added);
                    self.in_flight.iter_mut().for_each(|buffer| buffer.published = true);
                }
            }
            10..13 => self.pop_used(),
            13 => {
                self.token = Some((self.queue.enable_notifications(), self.consumed));
            }
            14 => self.queue.disable_notifications(),
            _ => self.poll(),
        }
        // The driver writes everywhere in its memory but where the device does.
        let used = self.used_ring();
        self.arena.adopt(&[0..used.start, used.end..self.arena.len()]);
        assert_eq!(self.queue.error(), self.latched);
        assert_eq!(usize::from(self.queue.in_flight()), self.in_flight.len());
        let room = match (self.latched, self.free()) {
            (Some(_), _) | (_, 0) => 0,
            (None, free) => free.max(self.indirect),
        };
        assert_eq!(self.queue.room(), room);
        Ok(())
    }

    fn device_writes(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        let used = self.used();
        match u.arbitrary::<u8>()? % 8 {
            0 => {
                let (id, len) = (u.arbitrary::<u8>()? % 70, u.arbitrary()?);
                self.use_buffer(id.into(), len);
            }
            1 => self.use_buffer(u.arbitrary()?, u.arbitrary()?),
            2 => {
                let idx = self.arena.u16_at(used + USED_IDX).wrapping_add(u.arbitrary::<u8>()?.into());
                self.arena.poke(used + USED_IDX, &idx.to_le_bytes());
            }
            3 => self.arena.poke(used + USED_IDX, &u.arbitrary::<u16>()?.to_le_bytes()),
            4 => self.arena.poke(used + USED_FLAGS, &[u.arbitrary()?, 0]),
            5 => {
                let event = used + USED_RING + self.size() * USED_ENTRY;
                self.arena.poke(event, &u.arbitrary::<u16>()?.to_le_bytes());
            }
            _ => {
                // Descriptors, the available ring, indirect tables: none of its business, all in its reach.
                let at = usize::from(u.arbitrary::<u16>()?) % self.arena.len();
                self.arena.poke(at, &u.arbitrary::<u32>()?.to_le_bytes());
            }
        }
        Ok(())
    }

    /// The device puts an entry where the next belongs and counts it.
    fn use_buffer(&mut self, id: u32, len: u32) {
        let used = self.used();
        let idx = self.arena.u16_at(used + USED_IDX);
        let at = used + USED_RING + usize::from(idx) % self.size() * USED_ENTRY;
        self.arena.poke(at, &(u64::from(len) << 32 | u64::from(id)).to_le_bytes());
        self.arena.poke(used + USED_IDX, &idx.wrapping_add(1).to_le_bytes());
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
        let needed = if (2..=self.indirect).contains(&segments.len()) { 1 } else { segments.len() };
        match self.queue.add(readable, writable) {
            Ok(BufferId(id)) => {
                assert_eq!(self.latched, None);
                assert!(needed <= self.free());
                assert!(id < self.addresses.size);
                assert!(self.in_flight.iter().all(|buffer| buffer.id != id), "{id} twice");
                let writable = writable.iter().map(|segment| segment.len).sum();
                self.check_written(id, readable, &segments);
                self.in_flight.push(Buffer {
                    id,
                    writable,
                    descriptors: needed,
                    published: false,
                    used: false,
                });
                self.added = self.added.wrapping_add(1);
            }
            Err(Full { needed: wants, free }) => {
                assert_eq!(wants, needed);
                assert_eq!(free, if self.latched.is_some() { 0 } else { self.free() });
                assert!(free < needed);
            }
        }
        Ok(())
    }

    /// What a device would find behind the newest entry of the available ring: before the index tells it.
    fn check_written(&mut self, id: u16, readable: &[Segment], segments: &[Segment]) {
        let used = self.used_ring();
        self.arena.adopt(&[0..used.start, used.end..self.arena.len()]);
        let avail = self.offset(self.addresses.driver);
        let slot = usize::from(self.added) % self.size();
        assert_eq!(self.arena.u16_at(avail + AVAIL_RING + slot * AVAIL_ENTRY), id);
        let memory = self.arena.expected();
        let (mut table, mut index) = (self.offset(self.addresses.desc), usize::from(id));
        for (i, segment) in segments.iter().enumerate() {
            let mut desc = &memory[table + index * DESC_SIZE..][..DESC_SIZE];
            let word = |desc: &[u8], at| u64::from_le_bytes(desc[at..at + 8].try_into().expect("8 bytes"));
            if i == 0 && word(desc, 8) >> 32 & u64::from(DESC_F_INDIRECT) != 0 {
                assert_eq!(word(desc, 8) as u32 as usize, segments.len() * DESC_SIZE);
                table = self.offset(word(desc, 0));
                desc = &memory[table..][..DESC_SIZE];
            }
            let flags = (word(desc, 8) >> 32) as u16;
            assert_eq!(word(desc, 0), segment.addr);
            assert_eq!(word(desc, 8) as u32, segment.len);
            assert_eq!(flags & DESC_F_WRITE != 0, i >= readable.len());
            assert_eq!(flags & DESC_F_NEXT != 0, i + 1 < segments.len());
            index = (word(desc, 8) >> 48) as usize;
        }
    }

    fn pop_used(&mut self) {
        match self.queue.pop_used() {
            Ok(Some(Used { id, len })) => {
                assert_eq!(self.latched, None);
                let at = self.in_flight.iter().position(|buffer| buffer.id == id.0).expect("in flight");
                let buffer = self.in_flight.remove(at);
                assert!(buffer.published, "returned before the device could know of it");
                assert!(len <= buffer.writable, "{len} bytes written to {}", buffer.writable);
                self.consumed += 1;
            }
            Ok(None) => {
                assert_eq!(self.latched, None);
                let idx = self.arena.u16_at(self.used() + USED_IDX);
                assert_eq!(idx, self.consumed as u16, "something is there");
            }
            Err(error) => {
                let first = *self.latched.get_or_insert(error);
                assert_eq!(error, first, "another error than the one that latched");
            }
        }
    }

    fn poll(&mut self) {
        if let Some((token, at)) = self.token {
            let idx = self.arena.u16_at(self.used() + USED_IDX);
            assert_eq!(self.queue.poll(token), self.consumed != at || idx != at as u16);
        }
    }
}
