//! The other side of the queue, reduced to the fewest stores that keep the subject busy.
//!
//! The same scripted side drives every subject of a case. It is never inlined, so what it costs alone
//! (measured in the same rounds, as a subject of its own) is what it costs inside a subject's loop, and
//! the difference is the subject's.
use super::case::{BUFFER, Case, QUARTER, QUEUE_SIZE, Side};
use super::subject::Subject;
use crate::BenchError;
use crate::memory::{Pages, Place, Slots, SlotsU16, SlotsU32};
use paravane_spec::split;

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

/// The driver of a device-side subject. Descriptors and available ring are filled once; as a chain's head
/// repeats with the ring, making the next batch available is one store of the index.
#[derive(Debug)]
pub(crate) struct ScriptedDriver {
    avail: Place,
    batch: u16,
    index: u16,
}

impl ScriptedDriver {
    /// Fills the queue of `case` in `memory`, whose first byte has the guest-physical address 0.
    pub(crate) fn new(case: Case, memory: Place) -> Self {
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
        Self { avail: memory.from(map::AVAIL), batch: case.batch, index: 0 }
    }

    /// Makes the next batch available.
    #[inline(never)]
    pub(crate) fn offer(&mut self) {
        self.index = self.index.wrapping_add(self.batch);
        self.avail.store_u16(split::AVAIL_IDX, self.index);
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
/// nothing but the head in the available ring, and publishes once a batch.
#[derive(Debug)]
pub(crate) struct ScriptedDevice {
    avail: Place,
    used: Place,
    heads: SlotsU16,
    ids: SlotsU32,
    lens: SlotsU32,
    batch: u16,
    written: u32,
    index: u16,
}

impl ScriptedDevice {
    /// Serves the queue of `case` whose rings lie at `avail` and `used`.
    pub(crate) fn new(case: Case, avail: Place, used: Place) -> Self {
        Self {
            avail,
            used,
            heads: Slots::of_u16(avail, split::AVAIL_RING, split::AVAIL_ENTRY, QUEUE_SIZE),
            ids: Slots::of_u32(used, split::USED_RING, split::USED_ENTRY, QUEUE_SIZE),
            lens: Slots::of_u32(used, split::USED_RING + 4, split::USED_ENTRY, QUEUE_SIZE),
            batch: case.batch,
            written: case.written(),
            index: 0,
        }
    }

    /// Uses the next batch.
    #[inline(never)]
    pub(crate) fn serve(&mut self) {
        let Self { heads, ids, lens, written, mut index, .. } = *self;
        for _ in 0..self.batch {
            ids.store(index, heads.load(index).into());
            lens.store(index, written);
            index = index.wrapping_add(1);
        }
        self.index = index;
        self.used.store_u16(split::USED_IDX, index);
    }

    /// The available index, as the subject has published it.
    pub(crate) fn available(&self) -> u16 {
        self.avail.load_u16(split::AVAIL_IDX)
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
                // The available ring that a driver-side subject would have written.
                let _ = ScriptedDriver::new(case, place);
                Self::Device(ScriptedDevice::new(case, place.from(map::AVAIL), place.from(map::USED)), pages)
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
