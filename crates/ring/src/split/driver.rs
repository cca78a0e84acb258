//! Driver side of a split queue.
//!
//! ```text
//!   add ---> next_avail ---- publish ---> avail.idx (ours)
//!                              ^ published
//!   pop_used <--- consumed <------------- used.idx (device)
//! ```
//!
//! The positions count in 64 bits; the rings hold their low 16. What a descriptor links to and how much of a
//! buffer is writable is kept in private memory: nothing that the device can write to is ever believed.
use super::{Descriptor, avail_bytes, avail_event, desc_bytes, used_bytes, used_event};
use crate::area::{Cells, fence};
use crate::driver::{BufferId, Full, PollToken, Used};
use crate::event::need_event;
use crate::{ConfigError, DmaArea, QueueAddresses, QueueError, Segment};
use alloc::boxed::Box;
use alloc::vec;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use paravane_spec::split::{
    AVAIL_ENTRY, AVAIL_F_NO_INTERRUPT, AVAIL_FLAGS, AVAIL_IDX, AVAIL_RING, DESC_F_INDIRECT, DESC_F_NEXT,
    DESC_F_WRITE, DESC_SIZE, USED_ENTRY, USED_F_NO_NOTIFY, USED_FLAGS, USED_IDX, USED_RING,
};

/// The device writes to the used ring only: it gets cache lines of its own.
const CACHE_LINE: usize = 64;

/// Where the parts of a queue lie in its memory, in bytes from its start.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Offsets {
    avail: usize,
    used: usize,
    tables: usize,
    /// Bytes in all.
    pub(crate) end: usize,
}

impl Offsets {
    /// A queue of `size` descriptors, each with an indirect table of `indirect` (or 0) descriptors.
    pub(crate) const fn new(size: u16, indirect: u16) -> Self {
        let avail = desc_bytes(size);
        let used = (avail + avail_bytes(size)).next_multiple_of(CACHE_LINE);
        let tables = (used + used_bytes(size)).next_multiple_of(CACHE_LINE);
        Self { avail, used, tables, end: tables + size as usize * desc_bytes(indirect) }
    }
}

/// What we know of the buffer that starts at a descriptor.
#[derive(Clone, Copy, Debug, Default)]
struct Pending {
    /// Descriptors taken in the table; 0 if no buffer in flight starts here.
    descriptors: u16,
    /// Bytes that the device may write.
    writable: u32,
    /// Position of its entry in the available ring.
    position: u64,
}

/// The driver's side, and its private shadow.
///
/// Invariant, made by [`Ring::new`] and relied on by every access to the cells: the memory is as long and as
/// aligned as [`Offsets`] says, `size` is a power of two, `mask` is one less, and every index that comes from
/// `free_head` or `next` is below `size` while `free` says that it is there.
#[derive(Debug)]
pub(crate) struct Ring {
    desc: Cells,
    avail: Cells,
    used: Cells,
    tables: Cells,
    tables_addr: u64,
    size: u16,
    mask: u16,
    /// Descriptors in the table of each head; 0 without indirect descriptors.
    indirect: u16,
    event_idx: bool,
    notifications_off: bool,
    /// For each descriptor the one after it, in its buffer or in the free list.
    next: Box<[u16]>,
    free_head: u16,
    free: u16,
    pending: Box<[Pending]>,
    /// The next entry of the available ring.
    next_avail: u64,
    /// What avail.idx says.
    published: u64,
    /// The next entry of the used ring: buffers taken back so far.
    consumed: u64,
    /// used.idx, when we last looked.
    seen: u16,
    error: Option<QueueError>,
}

impl Ring {
    /// See [`crate::driver::Queue::new`]. Both rings start at position `start`; `size` and `indirect` are a
    /// `Layout`'s.
    pub(crate) fn new(
        size: u16,
        indirect: u16,
        event_idx: bool,
        memory: DmaArea,
        start: u16,
    ) -> Result<(Self, QueueAddresses), ConfigError> {
        let offsets = Offsets::new(size, indirect);
        let part = "queue";
        let (area, addr) = (memory.area, memory.addr);
        if area.len() < offsets.end {
            return Err(ConfigError::Short { part, needed: offsets.end, given: area.len() });
        }
        if !area.is_aligned(DESC_SIZE) || !addr.is_multiple_of(DESC_SIZE as u64) {
            return Err(ConfigError::Misaligned { part, addr, align: DESC_SIZE as u64 });
        }
        if addr.checked_add(offsets.end as u64).is_none() {
            return Err(ConfigError::Wraps { part, addr });
        }
        area.zero();
        let cells = area.cells();
        // SAFETY: all four offsets lie inside the area, whose length was checked above.
        let (avail, used, tables) = unsafe {
            (cells.offset(offsets.avail), cells.offset(offsets.used), cells.offset(offsets.tables))
        };
        if start != 0 {
            // Relaxed: the device comes to know of the queue later, through the transport.
            // SAFETY: the areas were checked above.
            unsafe {
                avail.store_u16(AVAIL_IDX, start, Relaxed);
                used.store_u16(USED_IDX, start, Relaxed);
            }
        }
        let ring = Self {
            desc: cells,
            avail,
            used,
            tables,
            tables_addr: addr + offsets.tables as u64,
            size,
            mask: size - 1,
            indirect,
            event_idx,
            notifications_off: false,
            next: (1..=size).collect(),
            free_head: 0,
            free: size,
            pending: vec![Pending::default(); usize::from(size)].into_boxed_slice(),
            next_avail: start.into(),
            published: start.into(),
            consumed: start.into(),
            seen: start,
            error: None,
        };
        let addresses = QueueAddresses {
            size,
            desc: addr,
            driver: addr + offsets.avail as u64,
            device: addr + offsets.used as u64,
        };
        Ok((ring, addresses))
    }

    /// See [`crate::driver::Queue::add`].
    #[inline]
    pub(crate) fn add(&mut self, readable: &[Segment], writable: &[Segment]) -> Result<BufferId, Full> {
        let count = readable.len() + writable.len();
        let in_table = count > 1 && count <= usize::from(self.indirect);
        let needed = if in_table { 1 } else { count };
        if needed > usize::from(self.free) {
            return Err(Full { needed, free: self.free.into() });
        }
        let writable_len = check(readable, writable);
        let head = self.free_head;
        if in_table {
            self.fill_table(head, readable, writable);
            self.free_head = self.next[usize::from(head)];
        } else {
            self.fill_descriptors(readable, writable, count);
        }
        self.free -= needed as u16;
        self.pending[usize::from(head)] =
            Pending { descriptors: needed as u16, writable: writable_len, position: self.next_avail };
        let at = AVAIL_RING + usize::from(self.next_avail as u16 & self.mask) * AVAIL_ENTRY;
        // Relaxed: the release store of avail.idx orders it.
        // SAFETY: the entry is below the size; see the invariant of `Ring`.
        unsafe { self.avail.store_u16(at, head, Relaxed) };
        self.next_avail += 1;
        Ok(BufferId(head))
    }

    /// Writes the segments to descriptors from the free list, which has `count` of them.
    #[inline(always)]
    fn fill_descriptors(&mut self, readable: &[Segment], writable: &[Segment], count: usize) {
        let mut index = self.free_head;
        for (i, (segment, flag)) in flagged(readable, writable).enumerate() {
            let next = self.next[usize::from(index)];
            let desc = if i + 1 == count {
                Descriptor::new(segment.addr, segment.len, flag, 0)
            } else {
                Descriptor::new(segment.addr, segment.len, flag | DESC_F_NEXT, next)
            };
            // SAFETY: the free list had `count` descriptors, so `index` is one; see the invariant of `Ring`.
            unsafe { store(self.desc, index, desc) };
            index = next;
        }
        self.free_head = index;
    }

    /// Writes the segments to the table of `head`, and a descriptor that points to it. They fit.
    fn fill_table(&mut self, head: u16, readable: &[Segment], writable: &[Segment]) {
        let count = readable.len() + writable.len();
        let bytes = desc_bytes(self.indirect);
        let offset = usize::from(head) * bytes;
        // SAFETY: `head` is below the size, and each head has a table of `bytes`.
        let table = unsafe { self.tables.offset(offset) };
        for (i, (segment, flag)) in (0u16..).zip(flagged(readable, writable)) {
            let desc = if usize::from(i) + 1 == count {
                Descriptor::new(segment.addr, segment.len, flag, 0)
            } else {
                Descriptor::new(segment.addr, segment.len, flag | DESC_F_NEXT, i + 1)
            };
            // SAFETY: `i` is below `count`, which is at most what the table holds.
            unsafe { store(table, i, desc) };
        }
        let addr = self.tables_addr + offset as u64;
        let desc = Descriptor::new(addr, (count * DESC_SIZE) as u32, DESC_F_INDIRECT, 0);
        // SAFETY: `head` is below the size; see the invariant of `Ring`.
        unsafe { store(self.desc, head, desc) };
    }

    /// See [`crate::driver::Queue::publish`].
    #[inline]
    pub(crate) fn publish(&mut self) -> bool {
        let (old, new) = (self.published as u16, self.next_avail as u16);
        if self.published == self.next_avail || self.error.is_some() {
            return false;
        }
        // Release: pairs with the device's acquire load of avail.idx, after which it reads the entries,
        // descriptors and tables.
        // SAFETY: see the invariant of `Ring`.
        unsafe { self.avail.store_u16(AVAIL_IDX, new, Release) };
        self.published = self.next_avail;
        // Pairs with the device's fence between its store of avail_event (or flags) and its last look at
        // avail.idx: either we see its wish for a kick, or it sees our index.
        fence(SeqCst);
        // SAFETY: see the invariant of `Ring`.
        unsafe {
            if self.event_idx {
                need_event(self.used.load_u16(avail_event(self.size), Relaxed), new, old)
            } else {
                self.used.load_u16(USED_FLAGS, Relaxed) & USED_F_NO_NOTIFY == 0
            }
        }
    }

    /// See [`crate::driver::Queue::pop_used`].
    #[inline]
    pub(crate) fn pop_used(&mut self) -> Result<Option<Used>, QueueError> {
        if let Some(error) = self.error {
            return Err(error);
        }
        let old = self.consumed as u16;
        if self.seen == old && !self.look()? {
            return Ok(None);
        }
        let at = USED_RING + usize::from(old & self.mask) * USED_ENTRY;
        // Relaxed: the acquire load of used.idx in `look` has ordered them after the device's writing.
        // SAFETY: the entry is below the size; see the invariant of `Ring`.
        let (id, len) = unsafe { (self.used.load_u32(at), self.used.load_u32(at + 4)) };
        if id >= self.size.into() {
            return Err(self.latch(QueueError::DescIndex { index: id, size: self.size.into() }));
        }
        let head = id as u16;
        let pending = self.pending[usize::from(head)];
        // A buffer that was added and not published is unknown to an honest device.
        if pending.descriptors == 0 || pending.position >= self.published {
            return Err(self.latch(QueueError::NotInFlight { id }));
        }
        self.pending[usize::from(head)].descriptors = 0;
        let mut last = head;
        for _ in 1..pending.descriptors {
            last = self.next[usize::from(last)];
        }
        self.next[usize::from(last)] = self.free_head;
        self.free_head = head;
        self.free += pending.descriptors;
        self.consumed += 1;
        Ok(Some(Used { id: BufferId(head), len: len.min(pending.writable) }))
    }

    /// Looks at used.idx and says whether something new is there.
    #[inline(always)]
    fn look(&mut self) -> Result<bool, QueueError> {
        let old = self.consumed as u16;
        // Acquire: pairs with the device's release store, before which it wrote the entries and the data.
        // SAFETY: see the invariant of `Ring`.
        let new = unsafe { self.used.load_u16(USED_IDX, Acquire) };
        // No more than the size, so it fits.
        let in_flight = (self.published - self.consumed) as u16;
        if new.wrapping_sub(old) > in_flight {
            return Err(self.latch(QueueError::UsedIndex { old, new, in_flight }));
        }
        self.seen = new;
        Ok(new != old)
    }

    /// See [`crate::driver::Queue::enable_notifications`].
    #[inline]
    pub(crate) fn enable_notifications(&mut self) -> PollToken {
        // Relaxed: the fence below orders them before the look at used.idx.
        // SAFETY: see the invariant of `Ring`.
        unsafe {
            if self.event_idx {
                self.avail.store_u16(used_event(self.size), self.consumed as u16, Relaxed);
            } else {
                self.avail.store_u16(AVAIL_FLAGS, 0, Relaxed);
            }
        }
        self.notifications_off = false;
        // Pairs with the device's fence between its store of used.idx and its load of used_event (or flags):
        // either it sees our wish for an interrupt, or the `poll` that follows sees its index.
        fence(SeqCst);
        PollToken(self.consumed)
    }

    /// See [`crate::driver::Queue::disable_notifications`].
    #[inline]
    pub(crate) fn disable_notifications(&mut self) {
        if self.notifications_off {
            return;
        }
        // Relaxed: a hint, with nothing to order.
        // SAFETY: see the invariant of `Ring`.
        unsafe {
            if self.event_idx {
                // Just behind us: passed again only after 2^16 - 1 buffers.
                let behind = (self.consumed as u16).wrapping_sub(1);
                self.avail.store_u16(used_event(self.size), behind, Relaxed);
            } else {
                self.avail.store_u16(AVAIL_FLAGS, AVAIL_F_NO_INTERRUPT, Relaxed);
            }
        }
        self.notifications_off = true;
    }

    /// See [`crate::driver::Queue::poll`].
    #[inline]
    pub(crate) fn poll(&self, token: PollToken) -> bool {
        // Acquire: whoever is told of a buffer sees what the device wrote before it.
        // SAFETY: see the invariant of `Ring`.
        newer(token, self.consumed, unsafe { self.used.load_u16(USED_IDX, Acquire) })
    }

    /// Latches the first error, and returns it. From now on nothing fits.
    #[cold]
    fn latch(&mut self, error: QueueError) -> QueueError {
        self.free = 0;
        *self.error.get_or_insert(error)
    }

    /// The latched error.
    pub(crate) fn error(&self) -> Option<QueueError> {
        self.error
    }

    /// Number of descriptors.
    pub(crate) fn size(&self) -> u16 {
        self.size
    }

    /// Buffers added and not yet returned.
    pub(crate) fn in_flight(&self) -> u16 {
        (self.next_avail - self.consumed) as u16
    }

    /// The longest chain that fits now.
    pub(crate) fn room(&self) -> usize {
        match self.free {
            0 => 0,
            free => free.max(self.indirect).into(),
        }
    }
}

/// Whether something came after `token`: the count of buffers taken back is compared first, since the index
/// in the ring alone repeats itself every 2^16 buffers (the wrap counter seed).
fn newer(token: PollToken, consumed: u64, used_idx: u16) -> bool {
    consumed != token.0 || used_idx != token.0 as u16
}

/// Checks a buffer and returns how many bytes of it are writable.
#[inline(always)]
fn check(readable: &[Segment], writable: &[Segment]) -> u32 {
    let mut total = 0u64;
    for segment in readable {
        assert!(segment.len != 0, "a segment has no bytes");
        total += u64::from(segment.len);
    }
    let before = total;
    for segment in writable {
        assert!(segment.len != 0, "a segment has no bytes");
        total += u64::from(segment.len);
    }
    assert!(total != 0, "a buffer has no segments");
    assert!(total <= u32::MAX.into(), "a buffer has more than 2^32 - 1 bytes");
    (total - before) as u32
}

/// The segments in their order in a chain, each with its WRITE flag.
#[inline(always)]
fn flagged<'a>(readable: &'a [Segment], writable: &'a [Segment]) -> impl Iterator<Item = (&'a Segment, u16)> {
    let readable = readable.iter().map(|segment| (segment, 0));
    readable.chain(writable.iter().map(|segment| (segment, DESC_F_WRITE)))
}

/// Writes a descriptor (relaxed: the release store of avail.idx orders it).
///
/// # Safety
/// `table` has a descriptor `index`, on a multiple of 8 bytes.
#[inline(always)]
unsafe fn store(table: Cells, index: u16, desc: Descriptor) {
    let at = usize::from(index) * DESC_SIZE;
    // SAFETY: the caller vouches for the descriptor.
    unsafe {
        table.store_u64(at, desc.addr);
        table.store_u64(at + 8, desc.meta);
    }
}

#[cfg(test)]
mod tests {
    use super::{PollToken, newer};

    #[test]
    fn the_bare_index_is_fooled_after_a_whole_turn_and_the_token_is_not() {
        let token = PollToken(65_530);
        assert!(!newer(token, 65_530, 65_530));
        assert!(newer(token, 65_530, 65_531), "used, not taken back");
        assert!(newer(token, 65_531, 65_531), "used and taken back");
        let (consumed, used_idx) = (65_530 + (1 << 16), 65_530);
        assert_eq!(used_idx, token.0 as u16, "the index is what it was");
        assert!(newer(token, consumed, used_idx));
        assert!(newer(PollToken(0), 1 << 48, 0));
    }
}
