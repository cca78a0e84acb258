//! The other side of the queue, reduced to the fewest stores that keep the subject busy.
//!
//! The same scripted side drives every subject of a case. It is never inlined, so what it costs alone
//! (measured in the same rounds, as a subject of its own) is what it costs inside a subject's loop, and
//! the difference is the subject's.
use super::case::{BUFFER, Case, Piece, QUARTER, QUEUE_SIZE, Side};
use super::subject::Subject;
use crate::BenchError;
use crate::memory::{Pages, Place, Slots, SlotsU16, SlotsU32, SlotsU64};
use paravane_ring::QueueAddresses;
use paravane_spec::{packed, split};

/// Name of the scripted side when it is measured alone. It has no row.
pub(crate) const SCRIPT: &str = "script";

/// Offsets of a device-side queue in the subject's memory, which are its guest-physical addresses too.
pub(crate) mod map {
    use super::{BUFFER, QUEUE_SIZE};
    use paravane_spec::split::DESC_SIZE;

    /// Descriptor table.
    pub(crate) const DESC: usize = 0x1000;
    /// Available ring.
    pub(crate) const AVAIL: usize = 0x2000;
    /// Used ring.
    pub(crate) const USED: usize = 0x3000;
    /// Indirect tables, [`TABLE`] apart.
    pub(crate) const TABLES: usize = 0x4000;
    /// Bytes set aside for one indirect table.
    pub(crate) const TABLE: usize = 4 * DESC_SIZE;
    /// Buffers, one a chain.
    pub(crate) const BUFFERS: usize = 0x8000;
    /// All of it.
    pub(crate) const SIZE: usize = 0x10000;

    const _: () = assert!(DESC + QUEUE_SIZE as usize * DESC_SIZE <= AVAIL);
    const _: () = assert!(TABLES + QUEUE_SIZE as usize * TABLE <= BUFFERS);
    const _: () = assert!(BUFFERS + QUEUE_SIZE as usize * BUFFER <= SIZE);
}

/// The driver of a device-side subject. Descriptors, and of a split queue the available ring, are filled once,
/// as a chain's head repeats with the ring.
#[derive(Debug)]
pub(crate) struct ScriptedDriver {
    ring: DriverRing,
    batch: u16,
    index: u16,
}

/// What making the next batch available takes.
#[derive(Debug)]
enum DriverRing {
    /// One store of the index.
    Split { avail: Place, used: Place },
    /// The word of each descriptor that the device overwrites: length, identifier, flags.
    Packed { metas: SlotsU64, chain: Vec<u64>, slot: u16, wrap: bool },
}

/// The second word of a packed descriptor.
fn meta(len: u32, id: u16, flags: u16) -> u64 {
    u64::from(len) | u64::from(id) << 32 | u64::from(flags) << 48
}

/// Where the flags are in that word.
const FLAGS: u32 = 48;
/// AVAIL and USED of a descriptor that is available while the driver's wrap counter is 1.
const AVAILABLE: u16 = packed::DESC_F_AVAIL;
/// Both of them: what changes with the wrap counter, and what is set in a used descriptor while it is 1.
const WRAPS: u16 = packed::DESC_F_AVAIL | packed::DESC_F_USED;

impl ScriptedDriver {
    /// Fills the queue of `case` in `memory`, whose first byte has the guest-physical address 0.
    pub(crate) fn new(case: Case, memory: Place) -> Self {
        let ring = if case.packed { Self::packed(case, memory) } else { Self::split(case, memory) };
        Self { ring, batch: case.batch, index: 0 }
    }

    fn split(case: Case, memory: Place) -> DriverRing {
        let chains = QUEUE_SIZE / case.ring_descriptors();
        for chain in 0..chains {
            let head = chain * case.ring_descriptors();
            let (table, first) = if case.indirect {
                let table = map::TABLES + usize::from(chain) * map::TABLE;
                let len = u32::from(case.descriptors) * split::DESC_SIZE as u32;
                descriptor(memory, map::DESC, head, table as u64, len, split::DESC_F_INDIRECT, 0);
                (table, 0)
            } else {
                (map::DESC, head)
            };
            let mut addr = map::BUFFERS + usize::from(chain) * BUFFER;
            for (position, piece) in (0..).zip(case.pieces()) {
                let last = position + 1 == case.descriptors;
                let flags = if piece.writable { split::DESC_F_WRITE } else { 0 }
                    | if last { 0 } else { split::DESC_F_NEXT };
                let next = if last { 0 } else { first + position + 1 };
                descriptor(memory, table, first + position, addr as u64, piece.len, flags, next);
                addr += piece.len as usize;
            }
        }
        for slot in 0..QUEUE_SIZE {
            let head = slot % chains * case.ring_descriptors();
            memory.store_u16(map::AVAIL + split::AVAIL_RING + usize::from(slot) * split::AVAIL_ENTRY, head);
        }
        DriverRing::Split { avail: memory.from(map::AVAIL), used: memory.from(map::USED) }
    }

    fn packed(case: Case, memory: Place) -> DriverRing {
        let ring_descriptors = case.ring_descriptors();
        for chain in 0..QUEUE_SIZE / ring_descriptors {
            let table = map::TABLES + usize::from(chain) * map::TABLE;
            let first = map::DESC + usize::from(chain * ring_descriptors) * packed::DESC_SIZE;
            let to = if case.indirect {
                memory.store_u64(first, table as u64);
                table
            } else {
                first
            };
            let mut addr = map::BUFFERS + usize::from(chain) * BUFFER;
            for (position, piece) in case.pieces().iter().enumerate() {
                let at = to + position * packed::DESC_SIZE;
                memory.store_u64(at, addr as u64);
                if case.indirect {
                    // Of the flags in a table only WRITE counts (section 2.8.7).
                    let flags = if piece.writable { packed::DESC_F_WRITE } else { 0 };
                    memory.store_u64(at + packed::DESC_LEN, meta(piece.len, 0, flags));
                }
                addr += piece.len as usize;
            }
        }
        let chain = if case.indirect {
            let len = u32::from(case.descriptors) * packed::DESC_SIZE as u32;
            vec![meta(len, 0, packed::DESC_F_INDIRECT | AVAILABLE)]
        } else {
            let pieces = case.pieces();
            let flags = |position: usize, piece: &Piece| {
                AVAILABLE
                    | if piece.writable { packed::DESC_F_WRITE } else { 0 }
                    | if position + 1 == pieces.len() { 0 } else { packed::DESC_F_NEXT }
            };
            pieces.iter().enumerate().map(|(at, piece)| meta(piece.len, 0, flags(at, piece))).collect()
        };
        let metas = Slots::of_u64(memory, map::DESC + packed::DESC_LEN, packed::DESC_SIZE, QUEUE_SIZE);
        DriverRing::Packed { metas, chain, slot: 0, wrap: true }
    }

    /// Makes the next batch available.
    #[inline(never)]
    pub(crate) fn offer(&mut self) {
        self.index = self.index.wrapping_add(self.batch);
        match &mut self.ring {
            DriverRing::Split { avail, .. } => avail.store_u16(split::AVAIL_IDX, self.index),
            DriverRing::Packed { metas, chain, slot, wrap } => {
                let (start, mut first) = (*slot, None);
                for _ in 0..self.batch {
                    let id = *slot;
                    for word in &*chain {
                        let flip = if *wrap { 0 } else { u64::from(WRAPS) << FLAGS };
                        let word = (word | u64::from(id) << 32) ^ flip;
                        // The first one of all makes them available.
                        if first.is_none() {
                            first = Some(word)
                        } else {
                            metas.store(*slot, word)
                        }
                        *slot += 1;
                    }
                    // As many chains fit as go into the ring without a rest.
                    if *slot == QUEUE_SIZE {
                        (*slot, *wrap) = (0, !*wrap);
                    }
                }
                if let Some(word) = first {
                    metas.publish(start, word);
                }
            }
        }
    }

    /// Up to where the device has used what was offered. Of a packed ring, which has no index, it is what was
    /// offered or one less: only the last descriptor is looked at.
    pub(crate) fn used(&self) -> u16 {
        match &self.ring {
            DriverRing::Split { used, .. } => used.load_u16(split::USED_IDX),
            DriverRing::Packed { .. } if self.index == 0 => 0,
            DriverRing::Packed { metas, chain, slot, wrap } => {
                let wrap = *wrap ^ (*slot == 0);
                let last = (if *slot == 0 { QUEUE_SIZE } else { *slot }) - chain.len() as u16;
                let flags = (metas.load(last) >> FLAGS) as u16 & WRAPS;
                // With IN_ORDER, a device may skip all but the first of a batch, which is not looked at then.
                let pending = flags == AVAILABLE ^ if wrap { 0 } else { WRAPS };
                self.index.wrapping_sub(u16::from(pending && self.batch == 1))
            }
        }
    }
}

/// Writes descriptor `index` of the table at `table`.
fn descriptor(memory: Place, table: usize, index: u16, addr: u64, len: u32, flags: u16, next: u16) {
    let at = table + usize::from(index) * split::DESC_SIZE;
    memory.store_u64(at, addr);
    memory.store_u32(at + 8, len);
    memory.store_u16(at + 12, flags);
    memory.store_u16(at + 14, next);
}

/// The device of a driver-side subject: uses each available chain at once and in order. It looks at
/// nothing but the chain's name, and publishes once a batch. With IN_ORDER it writes one used entry a batch.
#[derive(Debug)]
pub(crate) struct ScriptedDevice {
    ring: DeviceRing,
    batch: u16,
    in_order: bool,
    written: u32,
    index: u16,
}

/// What using a batch takes.
#[derive(Debug)]
enum DeviceRing {
    Split { avail: Place, used: Place, heads: SlotsU16, ids: SlotsU32, lens: SlotsU32 },
    Packed { metas: SlotsU64, step: u16, slot: u16, wrap: bool },
}

impl ScriptedDevice {
    /// Serves the queue of `case` at `addresses`, of which `base` is the first byte of `memory`.
    pub(crate) fn at(case: Case, memory: Place, base: u64, addresses: QueueAddresses) -> Self {
        let place = |addr: u64| memory.from((addr - base) as usize);
        if case.packed {
            Self::packed(case, place(addresses.desc))
        } else {
            Self::split(case, place(addresses.driver), place(addresses.device))
        }
    }

    /// Serves the split queue of `case` whose rings lie at `avail` and `used`.
    pub(crate) fn split(case: Case, avail: Place, used: Place) -> Self {
        let heads = Slots::of_u16(avail, split::AVAIL_RING, split::AVAIL_ENTRY, QUEUE_SIZE);
        let ids = Slots::of_u32(used, split::USED_RING, split::USED_ENTRY, QUEUE_SIZE);
        let lens = Slots::of_u32(used, split::USED_RING + 4, split::USED_ENTRY, QUEUE_SIZE);
        Self::new(case, DeviceRing::Split { avail, used, heads, ids, lens })
    }

    /// Serves the packed queue of `case` whose descriptors lie at `desc`.
    fn packed(case: Case, desc: Place) -> Self {
        let metas = Slots::of_u64(desc, packed::DESC_LEN, packed::DESC_SIZE, QUEUE_SIZE);
        Self::new(case, DeviceRing::Packed { metas, step: case.ring_descriptors(), slot: 0, wrap: true })
    }

    fn new(case: Case, ring: DeviceRing) -> Self {
        Self { ring, batch: case.batch, in_order: case.in_order, written: case.written(), index: 0 }
    }

    /// Uses the next batch.
    #[inline(never)]
    pub(crate) fn serve(&mut self) {
        let Self { written, in_order, mut index, .. } = *self;
        match &mut self.ring {
            DeviceRing::Split { used, heads, ids, lens, .. } => {
                if in_order {
                    // The entry names the last one of the batch (section 2.7.9).
                    ids.store(index, heads.load(index.wrapping_add(self.batch - 1)).into());
                    lens.store(index, written);
                    index = index.wrapping_add(self.batch);
                } else {
                    for _ in 0..self.batch {
                        ids.store(index, heads.load(index).into());
                        lens.store(index, written);
                        index = index.wrapping_add(1);
                    }
                }
                used.store_u16(split::USED_IDX, index);
            }
            DeviceRing::Packed { metas, step, slot, wrap } => {
                let (start, mut first) = (*slot, 0);
                for number in 0..self.batch {
                    // The identifier is in the last descriptor of the chain (section 2.8.6).
                    let id = (metas.load(*slot + *step - 1) >> 32) as u16;
                    let flags = packed::DESC_F_WRITE | if *wrap { WRAPS } else { 0 };
                    let word = meta(written, id, flags);
                    if in_order && number > 0 {
                        // One entry at the place of the first names the last (section 2.8.9).
                        first = first & !(0xffff << 32) | u64::from(id) << 32;
                    } else if number == 0 {
                        first = word;
                    } else {
                        metas.store(*slot, word);
                    }
                    *slot += *step;
                    if *slot == QUEUE_SIZE {
                        (*slot, *wrap) = (0, !*wrap);
                    }
                }
                index = index.wrapping_add(self.batch);
                metas.publish(start, first);
            }
        }
        self.index = index;
    }

    /// The available index, as the subject has published it; of a packed ring, which has none, the number of
    /// chains served.
    pub(crate) fn available(&self) -> u16 {
        match &self.ring {
            DeviceRing::Split { avail, .. } => avail.load_u16(split::AVAIL_IDX),
            DeviceRing::Packed { .. } => self.index,
        }
    }
}

/// A scripted side with no subject at the other end.
pub(crate) enum Alone {
    /// In front of a device-side subject.
    Driver(ScriptedDriver, #[expect(dead_code, reason = "keeps the memory")] Pages),
    /// Behind a driver-side subject.
    Device(ScriptedDevice, #[expect(dead_code, reason = "keeps the memory")] Pages),
}

impl Alone {
    /// The scripted side of `case`.
    pub(crate) fn new(case: Case) -> Self {
        let pages = Pages::new(map::SIZE);
        let place = pages.place();
        match case.side {
            Side::Device => Self::Driver(ScriptedDriver::new(case, place), pages),
            Side::Driver => {
                // What a driver-side subject would have made available.
                let mut driver = ScriptedDriver::new(case, place);
                driver.offer();
                let addresses = QueueAddresses {
                    size: QUEUE_SIZE,
                    desc: map::DESC as u64,
                    driver: map::AVAIL as u64,
                    device: map::USED as u64,
                };
                Self::Device(ScriptedDevice::at(case, place, 0, addresses), pages)
            }
        }
    }
}

impl Subject for Alone {
    fn run(&mut self, batches: u32) -> Result<u64, BenchError> {
        match self {
            Self::Driver(driver, _) => (0..batches).for_each(|_| driver.offer()),
            Self::Device(device, _) => (0..batches).for_each(|_| device.serve()),
        }
        Ok(0)
    }

    fn position(&self) -> u16 {
        match self {
            Self::Driver(driver, _) => driver.index,
            Self::Device(device, _) => device.index,
        }
    }
}

const _: () = assert!(QUARTER * 4 == BUFFER);
