//! The heads in flight: a mark for each descriptor of the queue.
//!
//! A byte each, not a bit: in a queue at work neighbours change one after the other, and with bits
//! every change would wait for the store before it to the same word.
use alloc::boxed::Box;
use alloc::vec;

/// The chains in flight, for loops that do not look at the ring meanwhile.
pub(crate) trait Flight: Copy {
    /// Whether chain `id` is in flight.
    ///
    /// # Safety
    /// `id` is below the size of the queue, which lives, and nothing else looks at its chains in flight.
    unsafe fn contains(self, id: u16) -> bool;

    /// Adds chain `id`, its number of places in the ring, and its readable and writable bytes.
    ///
    /// With IN_ORDER, `note` says where it lies; see [`crate::device_ring::DeviceRing::note`].
    ///
    /// # Safety
    /// As [`Flight::contains`].
    unsafe fn insert(self, id: u16, places: u16, note: u64, lens: [u32; 2]);
}

/// The set of heads that were handed out and have not come back.
#[derive(Debug)]
pub(crate) struct InFlight {
    marks: Box<[bool]>,
}

impl InFlight {
    /// Nothing in flight, room for heads below `size`.
    pub(crate) fn new(size: u16) -> Self {
        Self { marks: vec![false; size.into()].into_boxed_slice() }
    }

    /// Whether `head` is in flight; what lies outside the queue never is.
    #[inline]
    pub(crate) fn contains(&self, head: u16) -> bool {
        self.marks.get(usize::from(head)).is_some_and(|mark| *mark)
    }

    /// Takes `head` in; `false` if it was in flight already, or lies outside the queue.
    #[inline]
    pub(crate) fn insert(&mut self, head: u16) -> bool {
        self.marks.get_mut(usize::from(head)).is_some_and(|mark| !core::mem::replace(mark, true))
    }

    /// Forgets all: after a queue has latched, nothing can be completed.
    pub(crate) fn clear(&mut self) {
        self.marks.fill(false);
    }

    /// The marks, for loops: one for each head below the size.
    #[inline]
    pub(crate) fn as_mut_ptr(&mut self) -> *mut bool {
        self.marks.as_mut_ptr()
    }

    /// As [`InFlight::as_mut_ptr`].
    #[inline(always)]
    pub(crate) fn flight(&mut self) -> Marks {
        Marks(self.as_mut_ptr())
    }
}

/// See [`InFlight::as_mut_ptr`].
#[derive(Clone, Copy)]
pub(crate) struct Marks(*mut bool);

impl Flight for Marks {
    #[inline(always)]
    unsafe fn contains(self, id: u16) -> bool {
        // SAFETY: the caller vouches for the identifier.
        unsafe { *self.0.add(id.into()) }
    }

    #[inline(always)]
    unsafe fn insert(self, id: u16, _places: u16, _note: u64, _lens: [u32; 2]) {
        // SAFETY: the caller vouches for the identifier.
        unsafe { *self.0.add(id.into()) = true };
    }
}

#[cfg(test)]
mod tests {
    use super::InFlight;

    #[test]
    fn a_head_is_in_at_most_once() {
        for size in [1, 2, 64, 128, 32768] {
            let mut set = InFlight::new(size);
            let mut heads = alloc::vec![0, size / 2, size - 1];
            heads.dedup();
            for head in heads {
                assert!(!set.contains(head));
                assert!(set.insert(head));
                assert!(!set.insert(head));
                assert!(set.contains(head));
                // SAFETY: the head is below the size.
                assert!(unsafe { set.as_mut_ptr().add(head.into()).replace(false) });
                assert!(!set.contains(head));
            }
        }
    }

    #[test]
    fn heads_outside_are_never_in() {
        let mut set = InFlight::new(128);
        assert!(!set.insert(128));
        assert!(!set.contains(u16::MAX));
    }

    #[test]
    fn clear_forgets_all() {
        let mut set = InFlight::new(256);
        assert!(set.insert(3) && set.insert(255));
        set.clear();
        assert!(!set.contains(3) && !set.contains(255));
    }
}
