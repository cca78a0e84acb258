//! The script: the other side of a queue, reduced to its necessary stores.
//!
//! The same script drives every subject of a case. It is never inlined, so it costs the same alone
//! as in the loop of a subject. It is measured alone in the same rounds, and subtracted.
use super::case::{BUFFER, Case, QUARTER, QUEUE_SIZE, SegmentShape, Side};
use crate::BenchError;
use crate::memory::{Pages, SharedMemory, Strided, StridedU16, StridedU32, StridedU64};
use crate::subject::Subject;
use paravane_ring::QueueAddresses;
use paravane_spec::{packed, split};

/// Name of the script when measured alone. It has no row.
pub(crate) const SCRIPT: &str = "script";

/// Offsets of a device-side queue in the subject's memory.
///
/// They equal guest-physical addresses.
pub(crate) mod map {
    use super::{BUFFER, QUEUE_SIZE};
    use paravane_spec::split::DESC_SIZE;

    /// Descriptor table.
    pub(crate) const DESC: usize = 0x1000;
    /// Available ring.
    pub(crate) const AVAIL: usize = 0x2000;
    /// Used ring.
    pub(crate) const USED: usize = 0x3000;
    /// Buffers, one per chain. Nothing is read from them or written to them, so they may overlap.
    pub(crate) const BUFFERS: usize = 0x4000;
    /// Indirect tables, one behind the other.
    pub(crate) const TABLES: usize = 0x8000;
    /// Most descriptors of a table.
    const LONGEST: usize = 18;
    /// Bytes of all parts.
    pub(crate) const SIZE: usize = 0x1a000;

    const _: () = assert!(DESC + QUEUE_SIZE as usize * DESC_SIZE <= AVAIL);
    const _: () = assert!(BUFFERS + QUEUE_SIZE as usize * BUFFER <= TABLES);
    const _: () = assert!(TABLES + QUEUE_SIZE as usize * LONGEST * DESC_SIZE <= SIZE);
}

/// The driver of a device-side subject.
///
/// It writes the descriptors of each buffer and, in a split queue, the entry of the available ring.
/// Indirect tables are filled once.
#[derive(Debug)]
pub(crate) struct ScriptedDriver {
    ring: DriverRing,
    chain: Vec<DescriptorTemplate>,
    addrs: StridedU64,
    words: StridedU64,
    batch: u16,
    /// The next chain's first descriptor.
    slot: u16,
    index: u16,
}

/// A descriptor of a chain, as a function of the chain's first descriptor.
#[derive(Clone, Copy, Debug)]
struct DescriptorTemplate {
    /// Address in the chain of descriptor 0, and its increment per descriptor.
    addr: u64,
    step: u64,
    /// Second word in the chain of descriptor 0, and its increment per descriptor.
    word: u64,
    grows: u64,
}

/// How a batch becomes available.
#[derive(Debug)]
enum DriverRing {
    /// Entries of the available ring, then its index.
    Split { avail: SharedMemory, heads: StridedU16, used: SharedMemory },
    /// The flags of the first descriptor, stored last.
    Packed { wrap: bool },
}

/// The second word of a packed descriptor.
const fn meta(len: u32, id: u16, flags: u16) -> u64 {
    len as u64 | (id as u64) << 32 | (flags as u64) << FLAGS
}

/// The second word of a split descriptor.
const fn split_word(len: u32, flags: u16, next: u16) -> u64 {
    len as u64 | (flags as u64) << 32 | (next as u64) << 48
}

/// Position of the flags in the second word of a packed descriptor.
const FLAGS: u32 = 48;
/// Flags of an available descriptor while the driver's wrap counter is 1.
const AVAILABLE: u16 = packed::DESC_F_AVAIL;
/// Flags that change with the wrap counter; set in a used descriptor while it is 1.
const WRAPS: u16 = packed::DESC_F_AVAIL | packed::DESC_F_USED;

impl ScriptedDriver {
    /// Serves the queue of `case` in `memory`, whose guest-physical address is 0.
    pub(crate) fn new(case: Case, memory: SharedMemory) -> Self {
        if case.indirect {
            Self::tables(case, memory);
        }
        let ring = if case.packed {
            DriverRing::Packed { wrap: true }
        } else {
            let avail = memory.from(map::AVAIL);
            let heads = Strided::of_u16(avail, split::AVAIL_RING, split::AVAIL_ENTRY, QUEUE_SIZE);
            DriverRing::Split { avail, heads, used: memory.from(map::USED) }
        };
        // In either layout, a descriptor is an address and a second word of 8 bytes.
        let slots = |offset| Strided::of_u64(memory, map::DESC + offset, packed::DESC_SIZE, QUEUE_SIZE);
        Self {
            ring,
            chain: Self::chain(case),
            addrs: slots(0),
            words: slots(packed::DESC_LEN),
            batch: case.batch,
            slot: 0,
            index: 0,
        }
    }

    /// Bytes of an indirect table.
    fn table(case: Case) -> usize {
        usize::from(case.descriptors()) * split::DESC_SIZE
    }

    /// Fills the indirect tables.
    fn tables(case: Case, memory: SharedMemory) {
        for chain in 0..usize::from(QUEUE_SIZE) {
            let mut addr = (map::BUFFERS + chain * BUFFER) as u64;
            for (position, segment) in (0u16..).zip(case.segments()) {
                let flags = if segment.writable { split::DESC_F_WRITE } else { 0 };
                let word = if case.packed {
                    // Of the flags in a table only WRITE counts (section 2.8.7).
                    meta(segment.len, 0, flags)
                } else if position + 1 == case.descriptors() {
                    split_word(segment.len, flags, 0)
                } else {
                    split_word(segment.len, flags | split::DESC_F_NEXT, position + 1)
                };
                let at = map::TABLES + chain * Self::table(case) + usize::from(position) * split::DESC_SIZE;
                memory.store_u64(at, addr);
                memory.store_u64(at + packed::DESC_LEN, word);
                addr += u64::from(segment.len);
            }
        }
    }

    /// The descriptors of a chain in the ring.
    fn chain(case: Case) -> Vec<DescriptorTemplate> {
        let ring_descriptors = u64::from(case.ring_descriptors());
        let whole = SegmentShape { len: Self::table(case) as u32, writable: false };
        let (segments, first, step) = if case.indirect {
            (std::slice::from_ref(&whole), map::TABLES as u64, Self::table(case) as u64)
        } else {
            (case.segments(), map::BUFFERS as u64, BUFFER as u64 / ring_descriptors)
        };
        let mut addr = first;
        let words = segments.iter().enumerate().map(|(position, segment)| {
            let last = position + 1 == segments.len();
            let flags = if segment.writable { split::DESC_F_WRITE } else { 0 }
                | if last { 0 } else { split::DESC_F_NEXT }
                | if case.indirect { split::DESC_F_INDIRECT } else { 0 };
            let (word, grows) = if case.packed {
                (meta(segment.len, 0, flags | AVAILABLE), meta(0, 1, 0))
            } else if last {
                (split_word(segment.len, flags, 0), 0)
            } else {
                (split_word(segment.len, flags, position as u16 + 1), split_word(0, 0, 1))
            };
            let word = DescriptorTemplate { addr, step, word, grows };
            addr += u64::from(segment.len);
            word
        });
        words.collect()
    }

    /// Makes the next batch available.
    #[inline(never)]
    pub(crate) fn offer(&mut self) {
        let Self { ring, chain, addrs, words, batch, slot, index } = self;
        let (start, mut first) = (*slot, None);
        for _ in 0..*batch {
            let head = *slot;
            let flip = match ring {
                DriverRing::Split { heads, .. } => {
                    heads.store(*index, head);
                    0
                }
                DriverRing::Packed { wrap: true } => 0,
                DriverRing::Packed { wrap: false } => meta(0, 0, WRAPS),
            };
            for DescriptorTemplate { addr, step, word, grows } in &*chain {
                addrs.store(*slot, addr + u64::from(head) * step);
                let word = (word + u64::from(head) * grows) ^ flip;
                // In a packed queue, the first descriptor makes the batch available.
                if first.is_none() {
                    first = Some(word);
                } else {
                    words.store(*slot, word);
                }
                *slot += 1;
            }
            *index = index.wrapping_add(1);
            // The ring holds a whole number of chains.
            if *slot == QUEUE_SIZE {
                *slot = 0;
                if let DriverRing::Packed { wrap } = ring {
                    *wrap = !*wrap;
                }
            }
        }
        if let Some(word) = first {
            words.publish(start, word);
        }
        if let DriverRing::Split { avail, .. } = ring {
            avail.store_u16(split::AVAIL_IDX, *index);
        }
    }

    /// The used index.
    ///
    /// A packed ring has none: the number of chains offered, or one less.
    ///
    /// Only the last descriptor of a packed ring is read.
    pub(crate) fn used(&self) -> u16 {
        match &self.ring {
            DriverRing::Split { used, .. } => used.load_u16(split::USED_IDX),
            DriverRing::Packed { .. } if self.index == 0 => 0,
            DriverRing::Packed { wrap } => {
                let wrap = *wrap ^ (self.slot == 0);
                let end = if self.slot == 0 { QUEUE_SIZE } else { self.slot };
                let flags = (self.words.load(end - self.chain.len() as u16) >> FLAGS) as u16 & WRAPS;
                // With IN_ORDER, a device may write only the first descriptor of a batch, which is
                // not read here.
                let pending = flags == AVAILABLE ^ if wrap { 0 } else { WRAPS };
                self.index.wrapping_sub(u16::from(pending && self.batch == 1))
            }
        }
    }
}

/// The device of a driver-side subject: uses each chain at once and in order.
///
/// It reads only the identifier of a chain, and publishes once per batch. With IN_ORDER it writes
/// one used entry per batch.
#[derive(Debug)]
pub(crate) struct ScriptedDevice {
    ring: DeviceRing,
    batch: u16,
    in_order: bool,
    written: u32,
    index: u16,
}

/// How a batch is used.
#[derive(Debug)]
enum DeviceRing {
    Split { avail: SharedMemory, used: SharedMemory, heads: StridedU16, ids: StridedU32, lens: StridedU32 },
    Packed { metas: StridedU64, step: u16, slot: u16, wrap: bool },
}

impl ScriptedDevice {
    /// Serves the queue of `case` at `addresses`.
    ///
    /// `memory` starts at device address `base`.
    pub(crate) fn at(case: Case, memory: SharedMemory, base: u64, addresses: QueueAddresses) -> Self {
        let area_at = |addr: u64| memory.from((addr - base) as usize);
        if case.packed {
            Self::packed(case, area_at(addresses.desc))
        } else {
            Self::split(case, area_at(addresses.driver), area_at(addresses.device))
        }
    }

    /// Serves the split queue of `case` with rings at `avail` and `used`.
    pub(crate) fn split(case: Case, avail: SharedMemory, used: SharedMemory) -> Self {
        let heads = Strided::of_u16(avail, split::AVAIL_RING, split::AVAIL_ENTRY, QUEUE_SIZE);
        let ids = Strided::of_u32(used, split::USED_RING, split::USED_ENTRY, QUEUE_SIZE);
        let lens = Strided::of_u32(used, split::USED_RING + 4, split::USED_ENTRY, QUEUE_SIZE);
        Self::new(case, DeviceRing::Split { avail, used, heads, ids, lens })
    }

    /// Serves the packed queue of `case` with descriptors at `desc`.
    fn packed(case: Case, desc: SharedMemory) -> Self {
        let metas = Strided::of_u64(desc, packed::DESC_LEN, packed::DESC_SIZE, QUEUE_SIZE);
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
                    // The entry names the last chain of the batch (section 2.7.9).
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
                        // One entry, in the place of the first chain, names the last one (section
                        // 2.8.9).
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

    /// The available index that the subject has published.
    ///
    /// A packed ring has none: the number of chains served.
    pub(crate) fn available(&self) -> u16 {
        match &self.ring {
            DeviceRing::Split { avail, .. } => avail.load_u16(split::AVAIL_IDX),
            DeviceRing::Packed { .. } => self.index,
        }
    }
}

/// A script without a subject.
pub(crate) enum ScriptAlone {
    /// The driver of a device-side subject.
    Driver(ScriptedDriver, #[expect(dead_code, reason = "keeps the memory")] Pages),
    /// The device of a driver-side subject.
    Device(ScriptedDevice, #[expect(dead_code, reason = "keeps the memory")] Pages),
}

impl ScriptAlone {
    /// The script of `case`.
    pub(crate) fn new(case: Case) -> Self {
        let pages = Pages::new(map::SIZE);
        let memory = pages.shared();
        match case.side {
            Side::Device => Self::Driver(ScriptedDriver::new(case, memory), pages),
            Side::Driver => {
                // A driver-side subject would have made these chains available.
                let mut driver = ScriptedDriver::new(case, memory);
                driver.offer();
                let addresses = QueueAddresses {
                    size: QUEUE_SIZE,
                    desc: map::DESC as u64,
                    driver: map::AVAIL as u64,
                    device: map::USED as u64,
                };
                Self::Device(ScriptedDevice::at(case, memory, 0, addresses), pages)
            }
        }
    }
}

impl Subject for ScriptAlone {
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
