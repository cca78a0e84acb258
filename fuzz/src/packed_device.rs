//! Device side of a packed queue against a hostile driver.
use crate::arena::Arena;
use crate::device_rig::{Flight, Layout, Rig, Staged};
use crate::hostile::BASE;
use arbitrary::{Result, Unstructured};
use paravane_ring::{QueueAddresses, Segment};
use paravane_spec::feature;
use paravane_spec::packed::{
    DESC_F_AVAIL, DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_USED, DESC_F_WRITE, DESC_SIZE, EVENT_F_DESC,
    EVENT_F_DISABLE, EVENT_FLAGS, EVENT_SIZE, EVENT_WRAP,
};
use std::ops::Range;

/// Descriptors in the area of indirect tables.
const TABLES: usize = 64;
/// Unused bytes between two parts.
const GAP: usize = 32;

/// Runs one input.
pub fn packed_device(data: &[u8]) {
    let mut u = Unstructured::new(data);
    let Ok(rig) = start(&mut u) else { return };
    rig.run(&mut u);
}

/// A position in the ring: index and wrap counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct RingPosition {
    index: u16,
    wrap: bool,
}

impl RingPosition {
    const START: Self = Self { index: 0, wrap: true };

    fn step(self, size: u16) -> Self {
        match self.index + 1 {
            end if end == size => Self { index: 0, wrap: !self.wrap },
            index => Self { index, ..self },
        }
    }

    fn steps(self, count: usize, size: u16) -> Self {
        (0..count).fold(self, |position, _| position.step(size))
    }

    fn available(self) -> u16 {
        if self.wrap { DESC_F_AVAIL } else { DESC_F_USED }
    }

    fn used(self) -> u16 {
        if self.wrap { DESC_F_AVAIL | DESC_F_USED } else { 0 }
    }
}

struct Packed {
    size: u16,
    driver_event: usize,
    device_event: usize,
    tables: usize,
    data: usize,
    /// End of the memory.
    end: usize,
    indirect: bool,
    event_idx: bool,
    in_order: bool,
    /// Position of the next descriptor that the driver makes available.
    offer: RingPosition,
    /// Position of the device.
    next_avail: RingPosition,
    published: RingPosition,
    /// Whether the driver has written since the last publication.
    ///
    /// It may have changed staged descriptors.
    touched: bool,
}

fn start(u: &mut Unstructured<'_>) -> Result<Rig<Packed>> {
    let size = 1 + u16::from(u.arbitrary::<u8>()? % 128);
    let bits = u.arbitrary::<u8>()?;
    let slots = 1 + usize::from(u.arbitrary::<u8>()? % 64);
    let (indirect, event_idx, in_order) = (bits & 1 != 0, bits & 2 != 0, bits & 12 == 12);
    let driver_event = GAP + usize::from(size) * DESC_SIZE + GAP;
    let device_event = driver_event + GAP;
    let tables = device_event + GAP;
    let data = tables + TABLES * DESC_SIZE;
    let arena = Arena::new(data + 256);
    let at = |offset: usize| BASE + offset as u64;
    let addresses =
        QueueAddresses { size, desc: at(GAP), driver: at(driver_event), device: at(device_event) };
    let features = feature::RING_PACKED
        | if indirect { feature::INDIRECT_DESC } else { 0 }
        | if event_idx { feature::EVENT_IDX } else { 0 }
        | if in_order { feature::IN_ORDER } else { 0 };
    let packed = Packed {
        size,
        driver_event,
        device_event,
        tables,
        data,
        end: arena.len(),
        indirect,
        event_idx,
        in_order,
        offer: RingPosition::START,
        next_avail: RingPosition::START,
        published: RingPosition::START,
        touched: false,
    };
    Ok(Rig::new(arena, addresses, features, slots, packed))
}

impl Packed {
    /// Makes a chain available at the device's position, with the first flags last.
    fn offer(&mut self, arena: &mut Arena, u: &mut Unstructured<'_>) -> Result<()> {
        let count = 1 + usize::from(u.arbitrary::<u8>()? % 4);
        let id = self.number(u)?;
        let mut descs = vec![];
        let mut position = self.offer;
        for left in (0..count).rev() {
            let next = if left > 0 { DESC_F_NEXT } else { 0 };
            let kind = u16::from(u.arbitrary::<u8>()?) & (DESC_F_WRITE | DESC_F_INDIRECT);
            descs.push((position, self.descriptor(u, id, position.available() | next | kind)?));
            position = position.step(self.size);
        }
        for (position, desc) in descs.iter().rev() {
            arena.poke(GAP + usize::from(position.index) * DESC_SIZE, desc);
        }
        self.offer = position;
        Ok(())
    }

    /// A number that is mostly below the size.
    fn number(&self, u: &mut Unstructured<'_>) -> Result<u16> {
        let byte = u.arbitrary::<u8>()?;
        if byte == u8::MAX { u.arbitrary() } else { Ok(u16::from(byte) % (self.size + 1)) }
    }

    fn descriptor(&self, u: &mut Unstructured<'_>, id: u16, flags: u16) -> Result<[u8; DESC_SIZE]> {
        let addr = match u.arbitrary::<u8>()? % 8 {
            0..5 => BASE + self.data as u64 + u64::from(u.arbitrary::<u8>()?),
            5 => BASE + (self.tables + usize::from(u.arbitrary::<u8>()?) % TABLES * DESC_SIZE) as u64,
            6 => u64::MAX - u64::from(u.arbitrary::<u8>()?),
            _ => u.arbitrary()?,
        };
        // An indirect descriptor mostly refers to a table.
        let table = BASE + (self.tables + usize::from(id) % TABLES * DESC_SIZE) as u64;
        let indirect = flags & DESC_F_INDIRECT != 0 && addr < BASE + self.end as u64;
        let (addr, unit) = if indirect { (table, DESC_SIZE as u32) } else { (addr, 1) };
        let len = match u.arbitrary::<u8>()? % 8 {
            0..5 => u32::from(u.arbitrary::<u8>()? % 8) * unit,
            5 => u32::from(u.arbitrary::<u8>()?),
            6 => u32::MAX - u32::from(u.arbitrary::<u8>()?),
            _ => u.arbitrary()?,
        };
        let mut bytes = [0; DESC_SIZE];
        bytes[..8].copy_from_slice(&addr.to_le_bytes());
        bytes[8..12].copy_from_slice(&len.to_le_bytes());
        bytes[12..14].copy_from_slice(&id.to_le_bytes());
        bytes[14..].copy_from_slice(&flags.to_le_bytes());
        Ok(bytes)
    }

    /// Walks the chain at `position` in `memory`: identifier, descriptors, segments.
    fn walk(&self, memory: &[u8], position: RingPosition) -> Option<(u16, usize, Vec<Segment>)> {
        let (mut segments, mut position, mut descriptors) = (vec![], position, 0);
        let desc = |at: usize| {
            let bytes: &[u8] = memory.get(at..at + DESC_SIZE)?;
            let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap_or_default());
            let (addr, meta) = (word(0), word(8));
            Some((Segment { addr, len: meta as u32 }, (meta >> 32) as u16, (meta >> 48) as u16))
        };
        let first = desc(GAP + usize::from(position.index) * DESC_SIZE)?.2;
        if first & (DESC_F_AVAIL | DESC_F_USED) != position.available() {
            return None;
        }
        loop {
            let (segment, id, flags) = desc(GAP + usize::from(position.index) * DESC_SIZE)?;
            descriptors += 1;
            position = position.step(self.size);
            if flags & DESC_F_INDIRECT != 0 {
                let table = usize::try_from(segment.addr.checked_sub(BASE)?).ok()?;
                for entry in 0..segment.len as usize / DESC_SIZE {
                    segments.push(desc(table + entry * DESC_SIZE)?.0);
                }
                return self.indirect.then_some((id, descriptors, segments));
            }
            segments.push(segment);
            if flags & DESC_F_NEXT == 0 {
                return Some((id, descriptors, segments));
            }
            if descriptors == usize::from(self.size) {
                return None;
            }
        }
    }
}

impl Layout for Packed {
    fn writable(&self) -> Vec<Range<usize>> {
        let ring = GAP..GAP + usize::from(self.size) * DESC_SIZE;
        vec![ring, self.device_event..self.device_event + EVENT_SIZE]
    }

    fn drive(&mut self, what: u8, arena: &mut Arena, u: &mut Unstructured<'_>) -> Result<()> {
        self.touched = true;
        if what < 4 {
            return self.offer(arena, u);
        }
        let (at, data) = self.poke(arena, u)?;
        arena.poke(at, &data);
        Ok(())
    }

    fn poke(&self, arena: &Arena, u: &mut Unstructured<'_>) -> Result<(usize, Vec<u8>)> {
        Ok(match u.arbitrary::<u8>()? % 6 {
            0 => {
                let at = GAP + usize::from(u.arbitrary::<u8>()?) % usize::from(self.size) * DESC_SIZE;
                let flags = u.arbitrary()?;
                let id = self.number(u)?;
                (at, self.descriptor(u, id, flags)?.to_vec())
            }
            1 | 2 => {
                let at = self.tables + usize::from(u.arbitrary::<u8>()?) % TABLES * DESC_SIZE;
                let flags = u16::from(u.arbitrary::<u8>()? % 8);
                let id = self.number(u)?;
                (at, self.descriptor(u, id, flags)?.to_vec())
            }
            3 => {
                let off = self.number(u)? | if u.arbitrary()? { EVENT_WRAP } else { 0 };
                let flags = u16::from(u.arbitrary::<u8>()? % 4);
                (self.driver_event, [off.to_le_bytes(), flags.to_le_bytes()].concat())
            }
            4 => (self.driver_event, u.arbitrary::<u32>()?.to_le_bytes().to_vec()),
            _ => {
                let at = usize::from(u.arbitrary::<u16>()?) % arena.len();
                (at, u.arbitrary::<u16>()?.to_le_bytes().to_vec())
            }
        })
    }

    fn looks(&mut self, _arena: &Arena) {
        // The driver may write while the device reads.
        self.touched = true;
    }

    fn popped(&mut self, id: u16, segments: &[Segment], memory: Option<&[u8]>) -> Option<usize> {
        // If the driver writes meanwhile, the length of the chain is unknown.
        let (there, descriptors, walked) = self.walk(memory?, self.next_avail).expect("an available chain");
        assert_eq!((there, &*walked), (id, segments));
        self.next_avail = self.next_avail.steps(descriptors, self.size);
        Some(descriptors)
    }

    fn looked(&self, _count: usize, in_flight: &[Flight], staged: &[Staged]) {
        let descriptors = in_flight.iter().map(|flight| flight.descriptors).sum::<usize>();
        // With IN_ORDER, only the queue knows what is published.
        let staged = if self.in_order { &[][..] } else { staged };
        let staged = staged.iter().map(|staged| staged.descriptors).sum::<usize>();
        assert!(descriptors + staged <= self.size.into(), "more descriptors than the ring has");
    }

    fn published(&mut self, staged: &[Staged], interrupt: bool, arena: &Arena) {
        // With IN_ORDER, the queue chooses what to publish; its unit tests cover that.
        if self.in_order {
            return;
        }
        let mut positions = vec![];
        for staged in staged {
            let at = GAP + usize::from(self.published.index) * DESC_SIZE;
            let bytes = &arena.expected()[at..at + DESC_SIZE];
            // The first one is written now, the others at completion.
            if !self.touched || positions.is_empty() {
                assert_eq!(bytes[8..12], staged.written.to_le_bytes());
                assert_eq!(bytes[12..14], staged.id.to_le_bytes());
                let flags = u16::from_le_bytes([bytes[14], bytes[15]]);
                assert_eq!(flags & (DESC_F_AVAIL | DESC_F_USED), self.published.used());
            }
            for _ in 0..staged.descriptors {
                positions.push(self.published);
                self.published = self.published.step(self.size);
            }
        }
        self.touched = false;
        if positions.is_empty() {
            return;
        }
        let (off, flags) = (arena.u16_at(self.driver_event), arena.u16_at(self.driver_event + EVENT_FLAGS));
        let event = RingPosition { index: off & !EVENT_WRAP, wrap: off & EVENT_WRAP != 0 };
        let wanted = match flags & 3 {
            EVENT_F_DISABLE => false,
            // As specified: an interrupt if one of the positions is the requested one.
            EVENT_F_DESC if self.event_idx && event.index < self.size => positions.contains(&event),
            _ => true,
        };
        assert_eq!(interrupt, wanted);
    }

    fn armed(&self, more: bool, arena: &Arena) {
        let flags = arena.u16_at(GAP + usize::from(self.next_avail.index) * DESC_SIZE + 14);
        assert_eq!(more, flags & (DESC_F_AVAIL | DESC_F_USED) == self.next_avail.available());
        if self.event_idx {
            let wrap = if self.next_avail.wrap { EVENT_WRAP } else { 0 };
            assert_eq!(arena.u16_at(self.device_event), self.next_avail.index | wrap);
            assert_eq!(arena.u16_at(self.device_event + EVENT_FLAGS), EVENT_F_DESC);
        }
    }
}
