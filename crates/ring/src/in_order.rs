//! IN_ORDER, device side: holds completions back until they are next in order.
//!
//! Sections 2.7.9 and 2.8.9.
//!
//! ```text
//!   place in the ring:   published    start       next_used              next_avail
//!                          | entries    | run       | in flight, or held     |
//!                                       ^ its used entry, written with each completion
//! ```
//!
//! A place is a position in the ring that does not repeat while a chain is there. A chain that is
//! popped is noted with its place, so whether its completion is the next one is one comparison.
//! Others are held, by place.
//!
//! One used entry may stand for a run: it names the last buffer and lies where the entry of the
//! first would lie. The driver then takes those before the last as used completely, so a buffer
//! whose writable part was not filled can only be the last of its run. The driver does not look at
//! the entry before it is published, so the last buffer may change until then.
use alloc::boxed::Box;
use alloc::vec;

/// A chain that was popped.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Noted {
    /// Bytes: readable ones, writable ones.
    pub(crate) lens: [u32; 2],
    /// Where it was popped.
    pub(crate) place: u64,
}

/// A chain that is completed, and not the next one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Held {
    /// Its identifier.
    pub(crate) id: u16,
    /// Bytes written to it.
    pub(crate) written: u32,
    /// Places in the ring that it takes: entries or descriptors.
    pub(crate) places: u16,
}

/// The order of the chains of a queue with IN_ORDER.
#[derive(Debug)]
pub(crate) struct InOrder {
    /// For each identifier in flight, what was noted.
    noted: Box<[Noted]>,
    /// Chains that wait for those in front, by index in the ring.
    held: Box<[Option<(Held, bool)>]>,
    /// Their number.
    count: u16,
    /// Where the run starts, unless something was published since.
    start: u64,
    /// What was published when the run started.
    published: u64,
}

impl InOrder {
    /// Nothing popped, of a queue of `size`.
    pub(crate) fn new(size: u16) -> Self {
        Self {
            noted: vec![Noted::default(); size.into()].into_boxed_slice(),
            held: vec![None; size.into()].into_boxed_slice(),
            count: 0,
            start: 0,
            published: 0,
        }
    }

    /// What is noted of the chains in flight: one for each identifier below the size.
    #[inline(always)]
    pub(crate) fn notes(&mut self) -> Notes {
        Notes(self.noted.as_mut_ptr())
    }

    /// Where the used entry of the next chain in order goes.
    #[inline(always)]
    pub(crate) fn start(&mut self, published: u64) -> u64 {
        if self.published != published {
            // What was staged is published, and the next run starts behind it.
            (self.published, self.start) = (published, published);
        }
        self.start
    }

    /// Keeps the start of a run for the next completions.
    #[inline(always)]
    pub(crate) fn set_start(&mut self, start: u64) {
        self.start = start;
    }

    /// Holds a chain back, which lies at `index` in the ring.
    #[inline(never)]
    pub(crate) fn hold(&mut self, index: usize, chain: Held) {
        let full = chain.written >= self.noted[usize::from(chain.id)].lens[1];
        self.held[index] = Some((chain, full));
        self.count += 1;
    }

    /// Releases the chain at `index` in the ring, if one is held there.
    ///
    /// Returns it, and whether it was used completely.
    pub(crate) fn release(&mut self, index: usize) -> Option<(Held, bool)> {
        let held = self.held[index].take()?;
        self.count -= 1;
        Some(held)
    }

    /// Chains that are held.
    #[inline(always)]
    pub(crate) fn held(&self) -> u16 {
        self.count
    }
}

/// Takes note of chains that are popped, if the queue has to know their order.
pub(crate) trait Note: Copy {
    /// Chain `id` of `lens` bytes was popped at `place`.
    ///
    /// # Safety
    /// `id` is below the queue's size.
    unsafe fn note(self, id: usize, lens: [u32; 2], place: u64);
}

/// Nothing is noted.
impl Note for () {
    #[inline(always)]
    unsafe fn note(self, _id: usize, _lens: [u32; 2], _place: u64) {}
}

/// See [`InOrder::notes`].
#[derive(Clone, Copy)]
pub(crate) struct Notes(*mut Noted);

impl Notes {
    /// What is noted of `id`.
    ///
    /// # Safety
    /// `id` is below the queue's size, and nothing else looks there meanwhile.
    #[inline(always)]
    pub(crate) unsafe fn of(&self, id: u16) -> &Noted {
        // SAFETY: the caller vouches for the place.
        unsafe { &*self.0.add(id.into()) }
    }
}

/// Notes, if there are any.
impl Note for Option<Notes> {
    #[inline(always)]
    unsafe fn note(self, id: usize, lens: [u32; 2], place: u64) {
        if let Some(notes) = self {
            // SAFETY: the caller vouches for the place.
            unsafe { notes.note(id, lens, place) };
        }
    }
}

impl Note for Notes {
    #[inline(always)]
    unsafe fn note(self, id: usize, lens: [u32; 2], place: u64) {
        // SAFETY: the caller vouches for the place.
        unsafe { self.0.add(id).write(Noted { lens, place }) };
    }
}

#[cfg(test)]
mod tests {
    use super::{Held, InOrder, Note as _};

    #[test]
    fn a_run_starts_behind_what_is_published() {
        let mut order = InOrder::new(4);
        assert_eq!(order.start(7), 7);
        // It goes on, or starts again behind a buffer that was not filled, until a publication.
        assert_eq!(order.start(7), 7);
        order.set_start(9);
        assert_eq!(order.start(7), 9);
        assert_eq!(order.start(12), 12);
    }

    #[test]
    fn held_chains_are_released_by_their_place_with_what_was_noted() {
        let mut order = InOrder::new(4);
        for (id, writable) in [(0, 0), (3, 10), (1, 10)] {
            // SAFETY: the identifiers are below the size.
            unsafe { order.notes().note(id, [5, writable], 40 + id as u64) };
        }
        // SAFETY: as above.
        let noted = unsafe { *order.notes().of(3) };
        assert_eq!((noted.place, noted.lens), (43, [5, 10]));
        let held = [(0, 0, true), (3, 9, false), (1, 10, true)];
        for (id, written, _) in held {
            order.hold(usize::from(id), Held { id, written, places: 2 });
        }
        assert_eq!((order.held(), order.release(2)), (3, None));
        for (id, written, full) in held {
            assert_eq!(order.release(id.into()), Some((Held { id, written, places: 2 }, full)));
            assert_eq!(order.release(id.into()), None);
        }
        assert_eq!(order.held(), 0);
    }
}
