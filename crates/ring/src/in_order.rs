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
//! Each chain in flight is known by its place in the ring, so whether a completion is the next one is
//! one comparison. It takes the place of the mark that other queues have for a chain in flight. Those
//! that are not the next one are held, at their places.
//!
//! One used entry may stand for a run: it names the last buffer and lies where the entry of the
//! first would lie. The driver then takes those before the last as used completely, so a buffer
//! whose writable part was not filled can only be the last of its run. The driver does not look at
//! the entry before it is published, so the last buffer may change until then.
use crate::in_flight::Flight;
use alloc::boxed::Box;
use alloc::vec;
use paravane_spec::split::DESC_SIZE;

/// A chain that is completed, and not the next one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Held {
    /// Where it lies in the ring.
    pub(crate) note: u64,
    pub(crate) id: u16,
    /// Bytes written to it.
    pub(crate) written: u32,
    /// Whether those are all that could be written.
    pub(crate) is_filled: bool,
}

/// A chain in flight, known by its place.
///
/// As long as a descriptor, so that both lie equally far from the first.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct Placed {
    /// Where it lies in the ring; 0 if it is not in flight.
    note: u64,
    /// Bytes: readable ones, writable ones.
    lens: [u32; 2],
}
const _: () = assert!(size_of::<Placed>() == DESC_SIZE);

impl Placed {
    const NOTHING: Self = Self { note: 0, lens: [0; 2] };

    /// Where it lies in the ring, as it was noted; 0 if it is not in flight.
    #[inline(always)]
    pub(crate) fn note(&self) -> u64 {
        self.note
    }

    /// Removes it from those in flight, and returns its note.
    #[inline(always)]
    pub(crate) fn remove(&mut self) -> u64 {
        core::mem::take(&mut self.note)
    }

    /// Bytes that can be written.
    #[inline(always)]
    pub(crate) fn writable(&self) -> u32 {
        self.lens[1]
    }

    /// Whether `written` are all of them.
    #[inline(always)]
    pub(crate) fn is_filled_by(&self, written: u32) -> bool {
        self.lens[1] == written
    }
}

/// The order of the chains of a queue with IN_ORDER.
#[derive(Debug)]
pub(crate) struct InOrder {
    /// Each identifier's chain.
    chains: Box<[Placed]>,
    /// Chains that wait for those in front, by the index of their place in the ring.
    held: Box<[Option<Held>]>,
    /// Their number.
    count: u16,
    /// Where the run starts, unless something was published since.
    start: u64,
    /// What was published when the run started.
    published: u64,
}

impl InOrder {
    /// Nothing in flight, of a queue of `size`.
    pub(crate) fn new(size: u16) -> Self {
        let size = usize::from(size);
        Self {
            chains: vec![Placed::NOTHING; size].into_boxed_slice(),
            held: vec![None; size].into_boxed_slice(),
            count: 0,
            start: 0,
            published: 0,
        }
    }

    /// The chains in flight, for loops.
    #[inline(always)]
    pub(crate) fn flight(&mut self) -> Ordered {
        Ordered(self.chains.as_mut_ptr())
    }

    /// Whether chain `id` is in flight.
    pub(crate) fn contains(&self, id: u16) -> bool {
        self.chains.get(usize::from(id)).is_some_and(|chain| chain.note != 0)
    }

    /// Removes chain `id`. Returns its note, and whether `written` are all bytes that can be written.
    #[inline(always)]
    pub(crate) fn remove(&mut self, id: u16, written: u32) -> (u64, bool) {
        let Some(chain) = self.chains.get_mut(usize::from(id)) else { return (0, false) };
        let note = chain.remove();
        (note, chain.is_filled_by(written))
    }

    /// Forgets the chains in flight: after a queue has latched, nothing can be completed.
    pub(crate) fn clear(&mut self) {
        self.chains.iter_mut().for_each(|chain| chain.note = 0);
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

    /// Holds back the chain whose place has this index.
    #[inline(always)]
    pub(crate) fn hold(&mut self, index: usize, chain: Held) {
        if let Some(held) = self.held.get_mut(index) {
            *held = Some(chain);
            self.count += 1;
        }
    }

    /// Releases the chain whose place has this index, if it is held.
    pub(crate) fn release(&mut self, index: usize) -> Option<Held> {
        let held = self.held.get_mut(index)?.take()?;
        self.count -= 1;
        Some(held)
    }

    /// Chains that are held.
    #[inline(always)]
    pub(crate) fn held(&self) -> u16 {
        self.count
    }
}

/// See [`InOrder::flight`].
#[derive(Clone, Copy)]
pub(crate) struct Ordered(*mut Placed);

impl Ordered {
    /// What is noted for a chain.
    ///
    /// # Safety
    /// As [`Flight::contains`]; the result lives until something else looks there.
    #[inline(always)]
    pub(crate) unsafe fn chain<'a>(self, slot: Slot) -> &'a mut Placed {
        // SAFETY: the caller vouches for the identifier, and for the result's lifetime.
        unsafe { &mut *self.0.byte_add(slot.0) }
    }
}

/// An identifier, as the bytes before its chain: one number for loops to keep.
#[derive(Clone, Copy, Default, PartialEq, PartialOrd)]
pub(crate) struct Slot(usize);

impl Slot {
    #[inline(always)]
    pub(crate) fn of(id: u16) -> Self {
        Self(usize::from(id) * size_of::<Placed>())
    }

    #[inline(always)]
    pub(crate) fn id(self) -> u16 {
        (self.0 / size_of::<Placed>()) as u16
    }
}

impl Flight for Ordered {
    #[inline(always)]
    unsafe fn contains(self, id: u16) -> bool {
        // SAFETY: the caller vouches for the identifier.
        unsafe { self.chain(Slot::of(id)).note != 0 }
    }

    #[inline(always)]
    unsafe fn insert(self, id: u16, _places: u16, note: u64, lens: [u32; 2]) {
        // SAFETY: the caller vouches for the identifier.
        unsafe { *self.chain(Slot::of(id)) = Placed { note, lens } };
    }
}

#[cfg(test)]
mod tests {
    use super::{Held, InOrder, Slot};
    use crate::in_flight::Flight as _;

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
    fn chains_are_known_by_their_places() {
        let mut order = InOrder::new(4);
        let flight = order.flight();
        // SAFETY: the identifiers are below the size.
        unsafe {
            assert!(!flight.contains(3));
            flight.insert(3, 1, 9, [4, 10]);
            assert!(flight.contains(3) && !flight.contains(2));
            let chain = flight.chain(Slot::of(3));
            assert_eq!((chain.note(), chain.writable()), (9, 10));
            assert!(chain.is_filled_by(10) && !chain.is_filled_by(4));
            chain.remove();
            assert!(!flight.contains(3));
            flight.insert(0, 1, 1, [0, 0]);
        }
        assert!(order.contains(0) && !order.contains(3) && !order.contains(4));
        order.clear();
        assert!(!order.contains(0));
    }

    #[test]
    fn held_chains_are_released_once() {
        let mut order = InOrder::new(4);
        let held = [(0, 0), (3, 9), (1, 10)]
            .map(|(id, written)| (3 - id, Held { note: 7, id, written, is_filled: written > 9 }));
        for (index, chain) in held {
            order.hold(index.into(), chain);
        }
        assert_eq!((order.held(), order.release(1), order.release(4)), (3, None, None));
        for (index, chain) in held {
            assert_eq!(order.release(index.into()), Some(chain));
            assert_eq!(order.release(index.into()), None);
        }
        assert_eq!(order.held(), 0);
    }
}
