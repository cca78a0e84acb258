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
//! Each popped chain is noted at its place in the ring, so whether a completion is the next one is
//! one comparison with what was popped there. Others are held, by identifier.
//!
//! One used entry may stand for a run: it names the last buffer and lies where the entry of the
//! first would lie. The driver then takes those before the last as used completely, so a buffer
//! whose writable part was not filled can only be the last of its run. The driver does not look at
//! the entry before it is published, so the last buffer may change until then.
use alloc::boxed::Box;
use alloc::vec;

/// A chain that was popped, at its place.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct Popped {
    /// Bytes: readable ones, writable ones.
    pub(crate) lens: [u32; 2],
    /// Its identifier; more than any if nothing was popped here.
    pub(crate) id: u32,
    _padding: u32,
}

/// Bytes of a note: those of a descriptor, so that both lie equally far from their ends.
pub(crate) const NOTE: usize = size_of::<Popped>();
const _: () = assert!(NOTE == 16);

/// A chain that is completed, and not the next one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Held {
    /// Bytes written to it.
    pub(crate) written: u32,
    /// Places in the ring that it takes: entries or descriptors.
    pub(crate) places: u16,
}

/// The order of the chains of a queue with IN_ORDER.
#[derive(Debug)]
pub(crate) struct InOrder {
    /// For each place, what was popped there last.
    popped: Box<[Popped]>,
    /// Chains that wait for those in front, by identifier.
    held: Box<[Option<Held>]>,
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
        let nothing = Popped { lens: [0; 2], id: u32::MAX, _padding: 0 };
        Self {
            popped: vec![nothing; size.into()].into_boxed_slice(),
            held: vec![None; size.into()].into_boxed_slice(),
            count: 0,
            start: 0,
            published: 0,
        }
    }

    /// What was popped, as bytes from the first place on.
    #[inline(always)]
    pub(crate) fn notes(&mut self) -> Notes {
        Notes(self.popped.as_mut_ptr().cast())
    }

    /// What was popped, as bytes back from the end of the ring.
    #[inline(always)]
    pub(crate) fn notes_from_end(&mut self) -> Notes {
        Notes(self.popped.as_mut_ptr_range().end.cast())
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

    /// Holds back the chain `id`, which is less than the size. `false`: one of that name is held.
    #[inline(never)]
    pub(crate) fn hold(&mut self, id: u16, chain: Held) -> bool {
        let place = &mut self.held[usize::from(id)];
        if place.is_some() {
            return false;
        }
        *place = Some(chain);
        self.count += 1;
        true
    }

    /// Releases the chain `id`, if it is held.
    pub(crate) fn release(&mut self, id: u32) -> Option<Held> {
        let held = self.held.get_mut(id as usize)?.take()?;
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
    /// Chain `id` of `lens` bytes was popped, and its note is `at` bytes from the first or the last.
    ///
    /// # Safety
    /// There is a note.
    unsafe fn note(self, at: isize, id: u16, lens: [u32; 2]);
}

/// Nothing is noted.
impl Note for () {
    #[inline(always)]
    unsafe fn note(self, _at: isize, _id: u16, _lens: [u32; 2]) {}
}

/// See [`InOrder::notes`] and [`InOrder::notes_from_end`].
#[derive(Clone, Copy)]
pub(crate) struct Notes(*mut u8);

impl Notes {
    /// What was popped `at` bytes from the first place or the end.
    ///
    /// # Safety
    /// There is a note, and nothing else writes it meanwhile.
    #[inline(always)]
    pub(crate) unsafe fn at(&self, at: isize) -> &Popped {
        // SAFETY: the caller vouches for the place.
        unsafe { &*self.0.offset(at).cast() }
    }
}

/// Notes, if there are any.
impl Note for Option<Notes> {
    #[inline(always)]
    unsafe fn note(self, at: isize, id: u16, lens: [u32; 2]) {
        if let Some(notes) = self {
            // SAFETY: the caller vouches for the place.
            unsafe { notes.note(at, id, lens) };
        }
    }
}

impl Note for Notes {
    #[inline(always)]
    unsafe fn note(self, at: isize, id: u16, lens: [u32; 2]) {
        // SAFETY: the caller vouches for the place.
        unsafe {
            let popped = self.0.offset(at).cast::<Popped>();
            (&raw mut (*popped).lens).write(lens);
            (&raw mut (*popped).id).write(id.into());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Held, InOrder, NOTE, Note as _};

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
    fn chains_are_noted_at_their_places() {
        let mut order = InOrder::new(4);
        let note = NOTE as isize;
        // SAFETY: there are four notes.
        unsafe {
            assert_eq!(order.notes().at(2 * note).id, u32::MAX);
            order.notes().note(2 * note, 3, [5, 10]);
            let popped = *order.notes_from_end().at(-2 * note);
            assert_eq!((popped.id, popped.lens), (3, [5, 10]));
            order.notes_from_end().note(-4 * note, 1, [0, 1]);
            assert_eq!(order.notes().at(0).id, 1);
        }
    }

    #[test]
    fn held_chains_are_released_once() {
        let mut order = InOrder::new(4);
        let held = [(0, 0), (3, 9), (1, 10)].map(|(id, written)| (id, Held { written, places: 2 }));
        assert!(held.iter().all(|&(id, held)| order.hold(id, held)));
        assert!(!order.hold(3, held[0].1));
        assert_eq!((order.held(), order.release(2), order.release(u32::MAX)), (3, None, None));
        for (id, held) in held {
            assert_eq!(order.release(id.into()), Some(held));
            assert_eq!(order.release(id.into()), None);
        }
        assert_eq!(order.held(), 0);
    }
}
