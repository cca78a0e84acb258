//! IN_ORDER, device side: holds completions back until they are next in order.
//!
//! Sections 2.7.9 and 2.8.9.
//!
//! ```text
//!   pop ---> [ waiting | waiting | done | waiting | ... ]     complete marks, in any order
//!              |
//!              v  the done ones at the front
//!            run: buffers that one used entry stands for ---> used ring
//! ```
//!
//! One used entry may stand for a batch: it names the last buffer and lies where the entry of the
//! first would lie. The driver then takes those before the last as used completely, so a buffer
//! whose writable part was not filled can only be the last of its batch.
use crate::batch::Chain;
use alloc::boxed::Box;
use alloc::vec;
use core::hint::cold_path;

/// A buffer that was popped.
#[derive(Clone, Copy, Debug, Default)]
struct Waiting {
    id: u16,
    /// Places in the ring that it takes: entries or descriptors.
    places: u16,
    /// Bytes that the device may write.
    writable: u32,
}

/// A used entry, to be written at the device's position in the used ring.
///
/// The position then moves on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    /// The last buffer of the batch.
    pub(crate) id: u16,
    /// Bytes written to it.
    pub(crate) written: u32,
    /// By how many places the position moves on.
    pub(crate) places: u16,
    /// Whether the last buffer was used completely, so that more may join.
    full: bool,
}

/// The chains of a queue with IN_ORDER, in the order in which they were popped.
///
/// The first of them is never done: it would have been staged.
#[derive(Debug)]
pub(crate) struct InOrder {
    /// Chains popped and not staged: `count` from `first` on.
    ///
    /// As long as the queue.
    waiting: Box<[Waiting]>,
    first: u16,
    count: u16,
    /// For each of `waiting` the bytes written, once it is done.
    done: Box<[Option<u32>]>,
    /// For each identifier its place in `waiting`, while it is there.
    place: Box<[u16]>,
    /// Those popped and not done.
    in_flight: u16,
    /// What the next used entry stands for so far.
    run: Option<Entry>,
}

impl InOrder {
    /// Nothing popped, of a queue of `size`.
    pub(crate) fn new(size: u16) -> Self {
        Self {
            waiting: vec![Waiting::default(); size.into()].into_boxed_slice(),
            first: 0,
            count: 0,
            done: vec![None; size.into()].into_boxed_slice(),
            place: vec![0; size.into()].into_boxed_slice(),
            in_flight: 0,
            run: None,
        }
    }

    /// Takes note of the buffers of a batch; `places` says how many of the ring's one takes.
    ///
    /// No more are in flight than the queue's size, and their identifiers are below it.
    #[inline(always)]
    pub(crate) fn popped(&mut self, chains: &[Chain], places: impl Fn(u16) -> u16) {
        let (size, mut at) = (self.waiting.len(), usize::from(self.first) + usize::from(self.count));
        at -= if at < size { 0 } else { size };
        let (waiting, place) = (self.waiting.as_mut_ptr(), self.place.as_mut_ptr());
        for chain in chains {
            let (id, places, writable) = (chain.head, places(chain.head), chain.writable_len());
            // SAFETY: `at` is below the size, of which both are as long, and so are identifiers that
            // were popped.
            unsafe {
                waiting.add(at).write(Waiting { id, places, writable });
                place.add(id.into()).write(at as u16);
            }
            at += 1;
            if at == size {
                at = 0;
            }
        }
        self.count += chains.len() as u16;
        self.in_flight += chains.len() as u16;
    }

    /// Completes buffers as long as they come in order, each used completely but the last.
    ///
    /// Returns the next one. `remove` takes a buffer from those in flight, and says whether it was
    /// there; it is only asked about identifiers below the queue's size.
    #[inline(always)]
    pub(crate) fn complete_run(
        &mut self,
        chains: &mut impl Iterator<Item = (u16, u32)>,
        mut remove: impl FnMut(u16) -> bool,
    ) -> Option<(u16, u32)> {
        let mut run = self.run.unwrap_or(Entry { id: 0, written: 0, places: 0, full: true });
        if !run.full {
            return chains.next();
        }
        let (size, waiting) = (self.waiting.len(), self.waiting.as_ptr());
        let mut first = usize::from(self.first);
        let mut taken = 0;
        let other = loop {
            let Some((id, written)) = chains.next() else { break None };
            // SAFETY: `first` is below the size, as long as `waiting` is.
            let waiting = unsafe { &*waiting.add(first) };
            // Identifiers in `waiting` are below the size. One in flight is waiting, not done; so the
            // first one is not a leftover of an earlier lap, and not done.
            if waiting.id != id || !remove(id) {
                break Some((id, written));
            }
            let places = run.places + waiting.places;
            run = Entry { id, written, places, full: written >= waiting.writable };
            taken += 1;
            first += 1;
            if first == size {
                first = 0;
            }
            if !run.full {
                cold_path();
                break chains.next();
            }
        };
        if taken > 0 {
            self.run = Some(run);
            self.first = first as u16;
            self.count -= taken;
            self.in_flight -= taken;
        }
        other
    }

    /// Marks `id`, which is in flight, as done.
    pub(crate) fn completed(&mut self, id: u16, written: u32) {
        self.done[usize::from(self.place[usize::from(id)])] = Some(written);
        self.in_flight -= 1;
    }

    /// Moves those at the front that are done into the run.
    ///
    /// An entry that cannot grow any more is returned, to be written; then this is to be called
    /// again.
    pub(crate) fn stage(&mut self) -> Option<Entry> {
        while self.count > 0 {
            let Some(written) = self.done[usize::from(self.first)].take() else { break };
            let Waiting { id, places, writable } = self.waiting[usize::from(self.first)];
            let closed = self.run.take_if(|run| !run.full);
            // The run starts with this one, or goes on: no more places than the queue has.
            let places = places + self.run.map_or(0, |run| run.places);
            self.run = Some(Entry { id, written, places, full: written >= writable });
            self.first = self.wrap(u32::from(self.first) + 1);
            self.count -= 1;
            if closed.is_some() {
                return closed;
            }
        }
        None
    }

    /// The last entry before a publish, to be written.
    pub(crate) fn flush(&mut self) -> Option<Entry> {
        self.run.take()
    }

    /// Buffers popped and not completed.
    pub(crate) fn in_flight(&self) -> u16 {
        self.in_flight
    }

    fn wrap(&self, place: u32) -> u16 {
        let size = self.waiting.len() as u32;
        (if place < size { place } else { place - size }) as u16
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec::Vec;

    fn entries(order: &mut InOrder) -> Vec<(u16, u32, u16)> {
        let mut entries: Vec<_> = core::iter::from_fn(|| order.stage()).collect();
        entries.extend(order.flush());
        entries.into_iter().map(|entry| (entry.id, entry.written, entry.places)).collect()
    }

    fn popped(order: &mut InOrder, ids: &[u16], places: u16, writable: u32) {
        let chain = |id: &u16| Chain::parts(*id, [0, 16], [0, writable]);
        order.popped(&ids.iter().map(chain).collect::<Vec<_>>(), |_| places);
    }

    #[test]
    fn a_run_ends_where_the_order_does() {
        let mut order = InOrder::new(4);
        popped(&mut order, &[2, 1, 3, 0], 1, 10);
        let mut live = [true; 4];
        let mut run = |order: &mut InOrder, chains: &[(u16, u32)]| {
            let mut chains = chains.iter().copied();
            let other = order.complete_run(&mut chains, |id| core::mem::take(&mut live[usize::from(id)]));
            (other, chains.count())
        };
        // Not the first one; not in flight; after one that was not filled.
        assert_eq!(run(&mut order, &[(1, 10), (2, 10)]), (Some((1, 10)), 1));
        assert_eq!(run(&mut order, &[(2, 10), (2, 10)]), (Some((2, 10)), 0));
        assert_eq!(run(&mut order, &[(1, 9), (3, 10), (0, 10)]), (Some((3, 10)), 1));
        assert_eq!((order.in_flight(), entries(&mut order)), (2, vec![(1, 9, 2)]));
        // Around the end of the list, and the one behind was done before.
        popped(&mut order, &[2], 1, 10);
        order.completed(0, 10);
        assert_eq!(run(&mut order, &[(3, 10)]), (None, 0));
        assert_eq!((order.in_flight(), entries(&mut order)), (1, vec![(0, 10, 2)]));
    }

    #[test]
    fn those_behind_wait_for_those_in_front() {
        let mut order = InOrder::new(4);
        popped(&mut order, &[3, 0, 1], 2, 10);
        order.completed(1, 10);
        order.completed(0, 10);
        assert_eq!((entries(&mut order), order.in_flight()), (vec![], 1));
        order.completed(3, 10);
        assert_eq!((entries(&mut order), order.in_flight()), (vec![(1, 10, 6)], 0));
    }

    #[test]
    fn a_batch_ends_with_a_buffer_that_was_not_filled() {
        let mut order = InOrder::new(5);
        for (id, written) in [(0, 10), (1, 9), (2, 10), (3, 0), (4, 11)] {
            popped(&mut order, &[id], 1, 10);
            order.completed(id, written);
        }
        assert_eq!(entries(&mut order), [(1, 9, 2), (3, 0, 2), (4, 11, 1)]);
        // Around the end of the device's list, and with nothing to write.
        for id in [4, 2, 0] {
            popped(&mut order, &[id], 1, 0);
            order.completed(id, 0);
        }
        assert_eq!(entries(&mut order), [(0, 0, 3)]);
    }
}
