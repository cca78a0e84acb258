//! Device side of a split queue against a hostile driver.
use crate::arena::Arena;
use crate::device_rig::{Flight, Layout, Rig, Staged};
use crate::hostile::{BASE, Rings};
use arbitrary::{Result, Unstructured};
use paravane_ring::device::MAX_CHAIN;
use paravane_ring::{QueueAddresses, Segment};
use paravane_spec::feature;
use paravane_spec::split::{
    AVAIL_F_NO_INTERRUPT, AVAIL_FLAGS, AVAIL_IDX, AVAIL_RING, DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE,
    DESC_SIZE, USED_ENTRY, USED_FLAGS, USED_IDX, USED_RING,
};
use std::ops::Range;

/// Runs one input.
pub fn split_device(data: &[u8]) {
    let mut u = Unstructured::new(data);
    let Ok(rig) = start(&mut u) else { return };
    rig.run(&mut u);
}

struct Split {
    rings: Rings,
    indirect: bool,
    event_idx: bool,
    next_avail: u16,
    published: u16,
    /// What was available before the last pop.
    available: u16,
}

fn start(u: &mut Unstructured<'_>) -> Result<Rig<Split>> {
    let size = 1 << (u.arbitrary::<u8>()? % 8);
    let bits = u.arbitrary::<u8>()?;
    let slots = u.arbitrary::<u8>()?;
    let spin = bits >> 4 == 15 && slots >> 6 == 3;
    let slots = 1 + usize::from(slots % 64);
    let (indirect, event_idx) = (bits & 1 != 0, bits & 2 != 0);
    let rings = Rings::new(size, 256);
    let arena = Arena::new(rings.end);
    let at = |offset| BASE + offset as u64;
    let addresses =
        QueueAddresses { size, desc: at(rings.desc), driver: at(rings.avail), device: at(rings.used) };
    let features = u64::from(indirect) * feature::INDIRECT_DESC + u64::from(event_idx) * feature::EVENT_IDX;
    let split = Split { rings, indirect, event_idx, next_avail: 0, published: 0, available: 0 };
    let mut rig = Rig::new(arena, addresses, features, slots, split);
    // It takes its time, so few inputs do it.
    if spin {
        rig.spin(u.arbitrary()?);
    }
    Ok(rig)
}

impl Split {
    fn avail_idx(&self, arena: &Arena) -> u16 {
        arena.u16_at(self.rings.avail + AVAIL_IDX)
    }
}

impl Layout for Split {
    fn writable(&self) -> Vec<Range<usize>> {
        vec![self.rings.used_ring()]
    }

    fn drive(&mut self, _what: u8, arena: &mut Arena, u: &mut Unstructured<'_>) -> Result<()> {
        let (at, data) = self.poke(arena, u)?;
        arena.poke(at, &data);
        Ok(())
    }

    fn poke(&self, arena: &Arena, u: &mut Unstructured<'_>) -> Result<(usize, Vec<u8>)> {
        self.rings.poke(self.avail_idx(arena), u)
    }

    fn looks(&mut self, arena: &Arena) {
        self.available = self.avail_idx(arena).wrapping_sub(self.next_avail);
    }

    fn popped(&mut self, head: u16, segments: &[Segment], memory: Option<&[u8]>) -> Option<usize> {
        if let Some(memory) = memory {
            let slot = usize::from(self.next_avail & (self.rings.size - 1));
            assert_eq!(head, read_u16(memory, self.rings.avail + AVAIL_RING + slot * 2));
            assert_eq!(Some(segments), walk(memory, &self.rings, self.indirect, head).as_deref());
        }
        self.next_avail = self.next_avail.wrapping_add(1);
        Some(1)
    }

    fn looked(&self, count: usize, _in_flight: &[Flight], _staged: &[Staged]) {
        assert!(self.available <= self.rings.size, "an impossible index was followed");
        assert!(count <= self.available.into());
        assert!(count > 0 || self.available == 0, "no progress");
    }

    fn published(&mut self, staged: &[Staged], interrupt: bool, arena: &Arena) {
        let old = self.published;
        self.published = old.wrapping_add(staged.len() as u16);
        assert_eq!(arena.u16_at(self.rings.used + USED_IDX), self.published);
        let wanted = match self.event_idx {
            // By the letter: one of the entries is the one that the driver asked for (section
            // 2.7.7.2).
            true => {
                let event = arena.u16_at(self.rings.used_event());
                (0..staged.len()).any(|entry| old.wrapping_add(entry as u16) == event)
            }
            false => arena.u16_at(self.rings.avail + AVAIL_FLAGS) & AVAIL_F_NO_INTERRUPT == 0,
        };
        assert_eq!(interrupt, wanted && !staged.is_empty());
    }

    fn armed(&self, more: bool, arena: &Arena) {
        let avail_idx = self.avail_idx(arena);
        assert!(avail_idx.wrapping_sub(self.next_avail) <= self.rings.size);
        assert_eq!(more, avail_idx != self.next_avail);
        match self.event_idx {
            true => assert_eq!(arena.u16_at(self.rings.avail_event()), self.next_avail),
            false => assert_eq!(arena.u16_at(self.rings.used + USED_FLAGS), 0),
        }
    }
}

impl Rig<Split> {
    /// Advances by `rounds` honest requests: inputs reach the wrap at 2^16.
    fn spin(&mut self, rounds: u16) {
        let size = self.layout.rings.size;
        let mut desc = [0; DESC_SIZE];
        desc[..8].copy_from_slice(&BASE.to_le_bytes());
        desc[8] = 1;
        for head in 0..size {
            self.arena.poke(self.layout.rings.desc + usize::from(head) * DESC_SIZE, &desc);
            self.arena
                .poke(self.layout.rings.avail + AVAIL_RING + usize::from(head) * 2, &head.to_le_bytes());
        }
        let most = self.slots.min(size.into()) as u16;
        while self.layout.next_avail < rounds {
            let count = most.min(rounds - self.layout.next_avail);
            let first = self.layout.next_avail;
            self.layout.next_avail += count;
            self.arena.poke(self.layout.rings.avail + AVAIL_IDX, &self.layout.next_avail.to_le_bytes());
            assert_eq!(self.queue.pop(&mut self.batch, |_, _| false), Ok(count.into()));
            for position in first..self.layout.next_avail {
                assert_eq!(self.queue.complete(position & (size - 1), position.into()), Ok(()));
            }
            assert!(self.queue.publish().is_ok());
            let at = self.layout.rings.used + USED_RING + usize::from(first & (size - 1)) * USED_ENTRY;
            let mut entry = [0; 8];
            assert!(self.arena.area().read(at, &mut entry));
            assert_eq!(u64::from_le_bytes(entry), u64::from(first) << 32 | u64::from(first & (size - 1)));
        }
        self.layout.published = rounds;
    }
}

fn read_u16(memory: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([memory[at], memory[at + 1]])
}

/// The segments of the chain at `head`, by a simple reading of `memory`.
///
/// `None` if it leads nowhere.
fn walk(memory: &[u8], rings: &Rings, indirect: bool, head: u16) -> Option<Vec<Segment>> {
    let (mut table, mut entries) = (rings.desc, usize::from(rings.size));
    let mut index = usize::from(head);
    let (mut segments, mut written) = (vec![], false);
    for _ in 0..2 * MAX_CHAIN {
        let desc = memory.get(table + index * DESC_SIZE..)?.get(..DESC_SIZE).filter(|_| index < entries)?;
        let addr = u64::from_le_bytes(desc[..8].try_into().ok()?);
        let len = u32::from_le_bytes(desc[8..12].try_into().ok()?);
        let (flags, next) = (read_u16(desc, 12), read_u16(desc, 14));
        if flags & DESC_F_INDIRECT != 0 {
            // Once, last, and only where it was negotiated.
            if !indirect || table != rings.desc || flags & DESC_F_NEXT != 0 {
                return None;
            }
            table = usize::try_from(addr.checked_sub(BASE)?).ok()?;
            (entries, index) = (len as usize / DESC_SIZE, 0);
            continue;
        }
        if flags & DESC_F_WRITE != 0 {
            written = true;
        } else if written {
            return None;
        }
        segments.push(Segment { addr, len });
        if flags & DESC_F_NEXT == 0 {
            return Some(segments);
        }
        index = next.into();
    }
    None
}
