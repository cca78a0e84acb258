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
use alloc::boxed::Box;
use alloc::vec;

/// A buffer that was popped.
#[derive(Clone, Copy, Debug, Default)]
struct Waiting {
    id: u16,
    /// Places in the ring that it takes: entries or descriptors.
    places: u16,
    /// Bytes that the device may write.
    writable: u32,
    /// Bytes that it has written, once it is done.
    written: u32,
    done: bool,
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
#[derive(Debug)]
pub(crate) struct InOrder {
    /// Chains popped and not staged: `count` from `first` on.
    ///
    /// As long as the queue.
    waiting: Box<[Waiting]>,
    first: u16,
    count: u16,
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
            place: vec![0; size.into()].into_boxed_slice(),
            in_flight: 0,
            run: None,
        }
    }

    /// Takes note of the next buffer that was popped.
    ///
    /// No more are in flight than the queue's size, and `id` is below it.
    pub(crate) fn popped(&mut self, id: u16, places: u16, writable: u32) {
        let place = self.wrap(u32::from(self.first) + u32::from(self.count));
        self.waiting[usize::from(place)] = Waiting { id, places, writable, written: 0, done: false };
        self.place[usize::from(id)] = place;
        self.count += 1;
        self.in_flight += 1;
    }

    /// Marks `id`, which is in flight, as done.
    pub(crate) fn completed(&mut self, id: u16, written: u32) {
        let waiting = &mut self.waiting[usize::from(self.place[usize::from(id)])];
        waiting.written = written;
        waiting.done = true;
        self.in_flight -= 1;
    }

    /// Moves those at the front that are done into the run.
    ///
    /// An entry that cannot grow any more is returned, to be written; then this is to be called
    /// again.
    pub(crate) fn stage(&mut self) -> Option<Entry> {
        while self.count > 0 {
            let Waiting { id, places, writable, written, done } = self.waiting[usize::from(self.first)];
            if !done {
                break;
            }
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

    #[test]
    fn those_behind_wait_for_those_in_front() {
        let mut order = InOrder::new(4);
        for id in [3, 0, 1] {
            order.popped(id, 2, 10);
        }
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
            order.popped(id, 1, 10);
            order.completed(id, written);
        }
        assert_eq!(entries(&mut order), [(1, 9, 2), (3, 0, 2), (4, 11, 1)]);
        // Around the end of the device's list, and with nothing to write.
        for id in [4, 2, 0] {
            order.popped(id, 1, 0);
            order.completed(id, 0);
        }
        assert_eq!(entries(&mut order), [(0, 0, 3)]);
    }
}
