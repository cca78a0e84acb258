//! The region of a packed queue.
//!
//! The ring overwrites what is in flight, so the region has a copy of every descriptor: its entries
//! are in chains, or in the list of free ones, which ends with the size as its link. Completions
//! stay ours until they are published; then:
//!
//! ```text
//!   chains linked into the list, free_head, used | first flags in the ring | marks cleared | old_free_head | old_used
//!   <---- used = old_used: nothing happened ---->|                                                         |
//!           <- unequal, ring says available: undo ->|<-- unequal, ring says used: finish it ------------->|<- equal
//! ```
//! The specification stores index and wrap counter apart, and compares only indices. A crash
//! between the two stores would then tear a position, and a batch of the whole ring would go
//! unnoticed. Here all four lie in one word, written by one store, and positions are compared
//! whole; so are the two heads of the list when a chain is taken. Who reads the region by the
//! letter finds nothing that he does not know.
use super::again::{in_order_of_taking, pop_again};
use super::region::{Region, corrupt};
use crate::batch::Batch;
use crate::chain::Descriptor as _;
use crate::device_ring::DeviceRing;
use crate::packed::device::Ring;
use crate::packed::{Descriptor, Position, available_flags, matches};
use crate::state::StateError;
use crate::translation::TranslationCheck;
use crate::{Order, QueueError};
use alloc::collections::VecDeque;
use alloc::vec;
use alloc::vec::Vec;
use paravane_spec::inflight::packed::{
    DESC, DESC_ADDR, DESC_COUNTER, DESC_ID, DESC_INFLIGHT, DESC_LAST, DESC_NEXT, DESC_NUM, DESC_SIZE,
    FREE_HEAD, OLD_FREE_HEAD, USED_IDX,
};
use paravane_spec::inflight::{DESC_NUM as REGION_DESC_NUM, VERSION};

/// Bytes of the region of a queue of `size` descriptors.
pub(super) fn bytes(size: u16) -> usize {
    DESC + DESC_SIZE * usize::from(size)
}

fn desc(entry: u16) -> usize {
    DESC + usize::from(entry) * DESC_SIZE
}

/// A chain as it was taken.
#[derive(Debug)]
struct Saved {
    id: u16,
    descriptors: Vec<Descriptor>,
    entry: u16,
}

/// Entries are below the size wherever they come from, but for the end of the list.
#[derive(Debug)]
pub(crate) struct Tracker {
    region: Region,
    /// The number of the next chain that is taken.
    counter: u64,
    /// The first free entry; the size if there is none.
    free_head: u16,
    /// Our own copy of the links: the region's owner may rewrite it at any time.
    next: Vec<u16>,
    /// Of each first entry in use the last one of its chain.
    last: Vec<u16>,
    /// The first entry of each identifier's chain.
    entries: Vec<u16>,
    /// First entries of chains completed since the last publication.
    batch: Vec<u16>,
    /// In flight when a process died, and not popped again yet.
    again: VecDeque<Saved>,
}

/// The positions in the region, as one word.
///
/// Used and old index, then used and old wrap counter.
fn positions(used: Position, old: Position, size: u16) -> u64 {
    let (wrap, old_wrap) = (u64::from(used.wrap(size)), u64::from(old.wrap(size)));
    u64::from(used.index(size)) | u64::from(old.index(size)) << 16 | wrap << 32 | old_wrap << 40
}

/// One of the positions: its index and its wrap counter.
fn position(index: u16, wrap: u8, size: u16) -> Result<Position, StateError> {
    match (index, wrap) {
        (_, 0 | 1) if index < size => Ok(Position::new(index, wrap == 1, size)),
        (_, 0 | 1) => corrupt("a used position", index),
        (_, wrap) => corrupt("a wrap counter", wrap),
    }
}

impl Tracker {
    /// For `ring`, which is moved to where the region says, unless that is new.
    pub(super) fn new<O: Order>(region: Region, ring: &mut Ring<O>, new: bool) -> Result<Self, StateError> {
        let size = region.size;
        let mut tracker = Self {
            region,
            counter: 0,
            free_head: 0,
            next: (1..=size).collect(),
            last: vec![0; size.into()],
            entries: vec![0; size.into()],
            batch: Vec::with_capacity(size.into()),
            again: VecDeque::new(),
        };
        if new {
            tracker.start(ring.published())
        } else {
            tracker.recover(ring)?
        }
        Ok(tracker)
    }

    fn start(&mut self, used: Position) {
        let size = self.region.size;
        for entry in 0..size {
            self.region.set_u16(desc(entry) + DESC_INFLIGHT, 0);
            self.region.set_u16(desc(entry) + DESC_NEXT, entry + 1);
        }
        self.region.set_u16(FREE_HEAD, 0);
        self.region.set_u16(OLD_FREE_HEAD, 0);
        self.region.commit_u64(USED_IDX, positions(used, used, size));
        self.region.started();
    }

    /// Takes up the region of another process, and finds chains in flight.
    ///
    /// Finishes its last publication or undoes it. A crash in the middle changes nothing: the next
    /// one does the same again.
    fn recover<O: Order>(&mut self, ring: &mut Ring<O>) -> Result<(), StateError> {
        let (region, size) = (&self.region, self.region.size);
        let [a, b, c, d, wrap, old_wrap, ..] = region.u64(USED_IDX).to_le_bytes();
        let new = position(u16::from_le_bytes([a, b]), wrap, size)?;
        let old = position(u16::from_le_bytes([c, d]), old_wrap, size)?;
        // The driver may have made the place of a used descriptor available again, but for the next
        // lap.
        let undo = new == old || matches(ring.descriptor(old).flags(), available_flags(old.wrap(size)));
        let used = if undo { old } else { new };
        self.free_head = region.u16(if undo { OLD_FREE_HEAD } else { FREE_HEAD });

        // Every entry is free or in one chain.
        let mut seen = vec![false; size.into()];
        let mut visit = |entry: u16, what| match seen.get_mut(usize::from(entry)) {
            Some(seen) if !*seen => {
                *seen = true;
                Ok(())
            }
            _ => corrupt(what, entry),
        };
        let mut free = vec![false; size.into()];
        let mut entry = self.free_head;
        while entry != size {
            visit(entry, "a link in the list of free entries")?;
            free[usize::from(entry)] = true;
            let next = region.u16(desc(entry) + DESC_NEXT);
            self.next[usize::from(entry)] = next;
            entry = next;
        }
        let mut again = Vec::new();
        let mut places = 0_u32;
        let mut known = vec![false; size.into()];
        for head in (0..size).filter(|head| !free[usize::from(*head)]) {
            if !region.mark(desc(head) + DESC_INFLIGHT)? {
                continue;
            }
            let (mut entry, last) = (head, region.u16(desc(head) + DESC_LAST));
            let mut descriptors = Vec::new();
            for left in (0..region.u16(desc(head) + DESC_NUM)).rev() {
                visit(entry, "a link in a chain")?;
                let at = desc(entry);
                // Identifier, flags and length stand in another order than in the ring.
                let (length, id_flags) = (region.u32(at + DESC_ID + 4), region.u32(at + DESC_ID));
                let (id, flags) = (id_flags as u16, (id_flags >> 16) as u16);
                descriptors.push(Descriptor::new(region.u64(at + DESC_ADDR), length, id, flags));
                if left > 0 {
                    let next = region.u16(at + DESC_NEXT);
                    self.next[usize::from(entry)] = next;
                    entry = next;
                }
            }
            let Some(id) = descriptors.last().map(|last| last.id()) else {
                return corrupt("the length of a chain", 0_u16);
            };
            if entry != last {
                return corrupt("the last entry of a chain", last);
            }
            match known.get_mut(usize::from(id)) {
                Some(known) if !*known => *known = true,
                _ => return corrupt("a buffer identifier", id),
            }
            places += descriptors.len() as u32;
            again.push((region.u64(desc(head) + DESC_COUNTER), Saved { id, descriptors, entry: head }));
        }
        if let Some(lost) = seen.iter().position(|seen| !seen) {
            return corrupt("an entry that is neither free nor in flight", lost as u64);
        }
        self.counter = in_order_of_taking(&mut again)?;

        // All is checked: now, and only now, it is changed. The ring first: what was completed and
        // not published may be marked as used already, and the driver would believe it some day.
        ring.move_to(used, used.advance(places, size), again.len() as u16)?;
        ring.disown();
        for entry in (0..size).filter(|entry| free[usize::from(*entry)]) {
            region.set_u16(desc(entry) + DESC_INFLIGHT, 0);
        }
        // Undone or finished, this way round: as long as the positions differ, the question above
        // is asked again, and only a list that both heads agree on may answer for equal ones.
        region.set_u16(if undo { FREE_HEAD } else { OLD_FREE_HEAD }, self.free_head);
        region.commit_u64(USED_IDX, positions(used, used, size));
        for (_, saved) in &again {
            self.entries[usize::from(saved.id)] = saved.entry;
            // Checked above, when it was still the region's.
            let steps = 1..saved.descriptors.len();
            let last = steps.fold(saved.entry, |entry, _| self.next[usize::from(entry)]);
            self.last[usize::from(saved.entry)] = last;
        }
        self.again = again.into_iter().map(|(_, saved)| saved).collect();
        Ok(())
    }

    /// See [`crate::device::Queue::pop`].
    pub(super) fn pop<O: Order>(
        &mut self,
        ring: &mut Ring<O>,
        batch: &mut Batch,
        check: &mut impl TranslationCheck,
    ) -> Result<usize, QueueError> {
        if self.again.is_empty() {
            let mut from = ring.next_avail();
            ring.pop_translated(batch, check)?;
            for chain in batch.chains() {
                from = self.take(ring, from, chain.head);
            }
            return Ok(batch.count());
        }
        pop_again(&mut self.again, batch, |saved, batch| {
            ring.pop_again(saved.id, &saved.descriptors, batch, check)
        })
    }

    /// Saves the chain `id`, and returns the position after its descriptors.
    ///
    /// They start at `from` in the ring. What the driver changes there meanwhile is its own harm:
    /// what is saved is checked like any other chain.
    fn take<O: Order>(&mut self, ring: &Ring<O>, mut from: Position, id: u16) -> Position {
        let (region, head, places) = (&self.region, self.free_head, ring.places(id));
        let mut last = head;
        let mut next = head;
        for _ in 0..places {
            // There are as many entries as places in the ring, so one is free.
            last = next;
            let Descriptor { addr, meta } = ring.descriptor(from);
            let (len, flags) = (meta as u32, (meta >> 48) as u16);
            let word = u64::from(id) | u64::from(flags) << 16 | u64::from(len) << 32;
            region.set_u64(desc(last) + DESC_ID, word);
            region.set_u64(desc(last) + DESC_ADDR, addr);
            from = from.advance(1, region.size);
            next = self.next[usize::from(last)];
        }
        region.set_u16(desc(head) + DESC_LAST, last);
        region.set_u16(desc(head) + DESC_NUM, places);
        region.set_u64(desc(head) + DESC_COUNTER, self.counter);
        region.set_u16(desc(head) + DESC_INFLIGHT, 1);
        // Both heads of the list move in one store, beside version and size: until then the chain
        // is not taken.
        let size = u64::from(region.size);
        region.commit_u64(
            VERSION,
            u64::from(region.u16(VERSION)) | size << 16 | u64::from(next) << 32 | u64::from(next) << 48,
        );
        const {
            assert!(
                REGION_DESC_NUM == VERSION + 2 && FREE_HEAD == VERSION + 4 && OLD_FREE_HEAD == VERSION + 6
            )
        };
        self.free_head = next;
        self.last[usize::from(head)] = last;
        self.counter += 1;
        self.entries[usize::from(id)] = head;
        from
    }

    /// After [`crate::device::Queue::complete`].
    pub(super) fn completed(&mut self, id: u16) {
        self.batch.push(self.entries[usize::from(id)]);
    }

    /// See [`crate::device::Queue::publish`].
    pub(super) fn publish<O: Order>(&mut self, ring: &mut Ring<O>) -> Result<bool, QueueError> {
        if self.batch.is_empty() || ring.error().is_some() {
            return ring.publish();
        }
        let (region, size) = (&self.region, self.region.size);
        for &head in &self.batch {
            // Nothing follows the link of a chain's last entry while it is in flight.
            let last = self.last[usize::from(head)];
            region.set_u16(desc(last) + DESC_NEXT, self.free_head);
            self.next[usize::from(last)] = self.free_head;
            self.free_head = head;
        }
        let (old, new) = (ring.published(), ring.next_used());
        region.set_u16(FREE_HEAD, self.free_head);
        region.commit_u64(USED_IDX, positions(new, old, size));
        let published = ring.publish();
        for head in self.batch.drain(..) {
            region.set_u16(desc(head) + DESC_INFLIGHT, 0);
        }
        region.set_u16(OLD_FREE_HEAD, self.free_head);
        region.commit_u64(USED_IDX, positions(new, new, size));
        published
    }
}
