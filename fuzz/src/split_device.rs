//! Device side of a split queue against a hostile driver.
use crate::arena::Arena;
use crate::hostile::{BASE, Rings};
use arbitrary::{Result, Unstructured};
use paravane_ring::device::{Batch, Chain, MAX_CHAIN, Queue, QueueConfig};
use paravane_ring::{QueueAddresses, QueueError, Segment};
use paravane_spec::feature;
use paravane_spec::split::{
    AVAIL_F_NO_INTERRUPT, AVAIL_FLAGS, AVAIL_IDX, AVAIL_RING, DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE,
    DESC_SIZE, USED_ENTRY, USED_FLAGS, USED_IDX, USED_RING,
};

/// Runs one input.
pub fn split_device(data: &[u8]) {
    let mut u = Unstructured::new(data);
    let Ok(mut rig) = Rig::new(&mut u) else { return };
    while !u.is_empty() {
        if rig.step(&mut u).is_err() {
            return;
        }
    }
}

struct Rig {
    // Dropped before the arena.
    queue: Queue,
    arena: Arena,
    rings: Rings,
    indirect: bool,
    event_idx: bool,
    batch: Batch,
    slots: usize,
    /// Heads popped and not completed.
    in_flight: Vec<u16>,
    /// Completions since the last publish.
    staged: Vec<(u16, u32)>,
    next_avail: u16,
    published: u16,
    latched: Option<QueueError>,
}

impl Rig {
    fn new(u: &mut Unstructured<'_>) -> Result<Self> {
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
        let features =
            u64::from(indirect) * feature::INDIRECT_DESC + u64::from(event_idx) * feature::EVENT_IDX;
        let config = QueueConfig::new(addresses, size, features).expect("a correct configuration");
        let [desc, avail, used] = config.areas().map(|part| {
            let offset = (part.addr - BASE) as usize;
            arena.area().slice(offset, part.len).expect("the arena holds the queue")
        });
        // SAFETY: the areas are the ones asked for, and the arena outlives the queue.
        let queue = unsafe { config.activate(desc, avail, used) }.expect("areas as asked for");
        let mut rig = Self {
            queue,
            arena,
            rings,
            indirect,
            event_idx,
            batch: Batch::new(slots),
            slots,
            in_flight: vec![],
            staged: vec![],
            next_avail: 0,
            published: 0,
            latched: None,
        };
        // It takes its time, so few inputs do it.
        if spin {
            rig.spin(u.arbitrary()?);
        }
        Ok(rig)
    }

    fn avail_idx(&self) -> u16 {
        self.arena.u16_at(self.rings.avail + AVAIL_IDX)
    }

    fn step(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        match u.arbitrary::<u8>()? % 16 {
            0..7 => {
                let (at, data) = self.rings.poke(self.avail_idx(), u)?;
                self.arena.poke(at, &data);
            }
            7..10 => self.pop(u)?,
            10 | 11 => {
                let (which, written) = (usize::from(u.arbitrary::<u8>()?), u.arbitrary()?);
                if !self.in_flight.is_empty() {
                    self.complete(self.in_flight[which % self.in_flight.len()], written);
                }
            }
            12 => self.publish(),
            13 => self.arm(),
            14 => match u.arbitrary::<u8>()? % 8 {
                0 => self.complete(u.arbitrary()?, u.arbitrary()?),
                1 => self.fail(QueueError::Request { head: u.arbitrary()?, what: "the device says so" }),
                _ => self.queue.disable_kicks(),
            },
            _ => {
                while let Some(&head) = self.in_flight.first() {
                    self.complete(head, 0);
                }
                self.publish();
            }
        }
        self.arena.adopt(&[self.rings.used_ring()]);
        assert_eq!(self.queue.error(), self.latched);
        if self.latched.is_none() {
            assert_eq!(usize::from(self.queue.in_flight()), self.in_flight.len());
        }
        Ok(())
    }

    /// The queue has said that it latched: with the first error, and for ever.
    fn latch(&mut self, error: QueueError) {
        let first = *self.latched.get_or_insert(error);
        assert_eq!(error, first, "another error than the one that latched");
        self.in_flight.clear();
        self.staged.clear();
    }

    fn pop(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        let avail_idx = self.avail_idx();
        let available = avail_idx.wrapping_sub(self.next_avail);
        let before = self.arena.expected().to_vec();
        // What the driver does to its memory while the device looks at an indirect table.
        let mut pokes = vec![];
        for _ in 0..u.arbitrary::<u8>()? % 3 {
            pokes.push(self.rings.poke(avail_idx, u)?);
        }
        let (queue, batch, arena) = (&mut self.queue, &mut self.batch, &mut self.arena);
        let mut tampered = false;
        let popped = queue.pop(batch, |addr, out| {
            assert!(out.len() <= MAX_CHAIN * DESC_SIZE && out.len().is_multiple_of(DESC_SIZE));
            let offset = usize::try_from(addr.wrapping_sub(BASE)).unwrap_or(usize::MAX);
            let there = arena.area().read(offset, out);
            for (at, data) in pokes.drain(..) {
                tampered = true;
                arena.poke(at, &data);
            }
            there
        });
        let count = match popped {
            Ok(count) => count,
            Err(error) => {
                assert!(batch.chains().is_empty());
                self.latch(error);
                return Ok(());
            }
        };
        assert_eq!(self.latched, None, "a latched queue gave chains");
        assert!(available <= self.rings.size, "an impossible index was followed");
        assert_eq!(count, self.batch.chains().len());
        assert!(count <= self.slots.min(available.into()));
        assert!(count > 0 || available == 0, "no progress");
        for chain in self.batch.chains() {
            assert!(chain.head < self.rings.size);
            assert!(!self.in_flight.contains(&chain.head), "head {} twice", chain.head);
            self.in_flight.push(chain.head);
            let (readable, writable) = (self.batch.readable(chain), self.batch.writable(chain));
            check_chain(chain, readable, writable);
            if !tampered {
                let slot = usize::from(self.next_avail & (self.rings.size - 1));
                assert_eq!(chain.head, read_u16(&before, self.rings.avail + AVAIL_RING + slot * 2));
                assert_eq!(
                    Some([readable, writable].concat()),
                    walk(&before, &self.rings, self.indirect, chain.head)
                );
            }
            self.next_avail = self.next_avail.wrapping_add(1);
        }
        Ok(())
    }

    fn complete(&mut self, head: u16, written: u32) {
        let known = self.in_flight.iter().position(|&h| h == head);
        match self.queue.complete(head, written) {
            Ok(()) => {
                self.in_flight.remove(known.expect("only what is in flight is completed"));
                self.staged.push((head, written));
            }
            Err(error) => {
                assert!(known.is_none(), "head {head} is in flight, and {error}");
                if self.latched.is_none() {
                    assert_eq!(error, QueueError::NotInFlight { id: head.into() });
                }
                self.latch(error);
            }
        }
    }

    fn publish(&mut self) {
        let old = self.published;
        self.arena.adopt(&[self.rings.used_ring()]);
        let idx_before = self.arena.u16_at(self.rings.used + USED_IDX);
        let result = self.queue.publish();
        self.arena.adopt(&[self.rings.used_ring()]);
        let idx = self.arena.u16_at(self.rings.used + USED_IDX);
        let interrupt = match result {
            Ok(interrupt) => interrupt,
            Err(error) => {
                assert_eq!(idx, idx_before, "a latched queue publishes nothing");
                self.latch(error);
                return;
            }
        };
        assert_eq!(self.latched, None);
        if self.staged.is_empty() {
            assert!(!interrupt);
            assert_eq!(idx, idx_before);
            return;
        }
        self.published = old.wrapping_add(self.staged.len() as u16);
        assert_eq!(idx, self.published);
        let wanted = match self.event_idx {
            // By the letter: one of the entries is the one that the driver asked for (section 2.7.7.2).
            true => {
                let event = self.arena.u16_at(self.rings.used_event());
                (0..self.staged.len()).any(|entry| old.wrapping_add(entry as u16) == event)
            }
            false => self.arena.u16_at(self.rings.avail + AVAIL_FLAGS) & AVAIL_F_NO_INTERRUPT == 0,
        };
        assert_eq!(interrupt, wanted);
        // The newest entry cannot have been overwritten by a later one, or by the driver: only we ran.
        self.staged.clear();
    }

    fn arm(&mut self) {
        let avail_idx = self.avail_idx();
        match self.queue.arm_kicks() {
            Ok(more) => {
                assert_eq!(self.latched, None);
                assert!(avail_idx.wrapping_sub(self.next_avail) <= self.rings.size);
                assert_eq!(more, avail_idx != self.next_avail);
                self.arena.adopt(&[self.rings.used_ring()]);
                match self.event_idx {
                    true => assert_eq!(self.arena.u16_at(self.rings.avail_event()), self.next_avail),
                    false => assert_eq!(self.arena.u16_at(self.rings.used + USED_FLAGS), 0),
                }
            }
            Err(error) => self.latch(error),
        }
    }

    fn fail(&mut self, error: QueueError) {
        let now = self.queue.fail(error);
        self.latch(now);
    }

    /// Moves the positions on by `rounds` honest requests, so that inputs get to the wrap at 2^16.
    fn spin(&mut self, rounds: u16) {
        let size = self.rings.size;
        let mut desc = [0; DESC_SIZE];
        desc[..8].copy_from_slice(&BASE.to_le_bytes());
        desc[8] = 1;
        for head in 0..size {
            self.arena.poke(self.rings.desc + usize::from(head) * DESC_SIZE, &desc);
            self.arena.poke(self.rings.avail + AVAIL_RING + usize::from(head) * 2, &head.to_le_bytes());
        }
        let most = self.slots.min(size.into()) as u16;
        while self.next_avail < rounds {
            let count = most.min(rounds - self.next_avail);
            let first = self.next_avail;
            self.next_avail += count;
            self.arena.poke(self.rings.avail + AVAIL_IDX, &self.next_avail.to_le_bytes());
            assert_eq!(self.queue.pop(&mut self.batch, |_, _| false), Ok(count.into()));
            for position in first..self.next_avail {
                assert_eq!(self.queue.complete(position & (size - 1), position.into()), Ok(()));
            }
            assert!(self.queue.publish().is_ok());
            let at = self.rings.used + USED_RING + usize::from(first & (size - 1)) * USED_ENTRY;
            let mut entry = [0; 8];
            assert!(self.arena.area().read(at, &mut entry));
            assert_eq!(u64::from_le_bytes(entry), u64::from(first) << 32 | u64::from(first & (size - 1)));
        }
        self.published = rounds;
    }
}

/// What every chain keeps, whatever the driver wrote.
pub(crate) fn check_chain(chain: &Chain, readable: &[Segment], writable: &[Segment]) {
    let count = readable.len() + writable.len();
    assert!((1..=MAX_CHAIN).contains(&count), "{count} segments");
    let total = |part: &[Segment]| part.iter().map(|segment| u64::from(segment.len)).sum::<u64>();
    assert_eq!(total(readable), chain.readable_len().into());
    assert_eq!(total(writable), chain.writable_len().into());
    assert!(total(readable) + total(writable) <= u32::MAX.into());
    for segment in readable.iter().chain(writable) {
        assert_ne!(segment.len, 0);
        assert!(segment.addr.checked_add(segment.len.into()).is_some());
    }
}

fn read_u16(memory: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([memory[at], memory[at + 1]])
}

/// The segments of the chain at `head`, as a straightforward reading of `memory` finds them; `None` if it
/// leads nowhere.
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
