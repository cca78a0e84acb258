//! Memory shared with the side under test, and its expected contents.
use paravane_ring::Area;
use std::ops::Range;
use std::ptr::NonNull;

/// Zeroed heap memory of an exact length: a sanitizer sees access outside it.
pub(crate) struct Arena {
    memory: NonNull<[u64]>,
    area: Area,
    expected: Vec<u8>,
    seen: Vec<u8>,
}

impl Arena {
    /// `len` bytes, rounded up to a multiple of 16.
    pub(crate) fn new(len: usize) -> Self {
        let words = len.next_multiple_of(16) / 8;
        let memory = NonNull::from(Box::leak(vec![0_u64; words].into_boxed_slice()));
        let len = words * 8;
        // SAFETY: the memory has this length, is freed only when the arena is dropped, and no
        // reference to it exists: the box was leaked and only its raw pointer is kept.
        let area = unsafe { Area::new(memory.cast(), len) };
        Self { memory, area, expected: vec![0; len], seen: vec![0; len] }
    }

    /// The memory. All its users must be dropped before the arena.
    pub(crate) fn area(&self) -> Area {
        self.area
    }

    pub(crate) fn len(&self) -> usize {
        self.expected.len()
    }

    /// Writes as the hostile side. Truncates data at the end of the memory.
    pub(crate) fn poke(&mut self, offset: usize, data: &[u8]) {
        let offset = offset.min(self.len());
        let data = &data[..data.len().min(self.len() - offset)];
        assert!(self.area.write(offset, data));
        self.expected[offset..][..data.len()].copy_from_slice(data);
    }

    /// Expected contents: hostile writes, and adopted ones ([`Arena::adopt`]).
    pub(crate) fn expected(&self) -> &[u8] {
        &self.expected
    }

    /// A value of the expected contents; 0 outside.
    pub(crate) fn u16_at(&self, offset: usize) -> u16 {
        self.expected.get(offset..offset + 2).map_or(0, |b| u16::from_le_bytes([b[0], b[1]]))
    }

    /// Checks the memory outside `writable`, and adopts the writes inside.
    ///
    /// # Panics
    /// A byte outside `writable` differs from the expected contents.
    pub(crate) fn adopt(&mut self, writable: &[Range<usize>]) {
        assert!(self.area.read(0, &mut self.seen));
        for range in writable {
            self.expected[range.clone()].copy_from_slice(&self.seen[range.clone()]);
        }
        // Compare as a whole first: this runs at every step.
        if self.seen != self.expected {
            let at = (0..self.len()).find(|&at| self.seen[at] != self.expected[at]).unwrap_or_default();
            panic!("byte {at:#x} is {:#x} and was {:#x}", self.seen[at], self.expected[at]);
        }
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: the pointer came from a leaked box, and all users are dropped, as `Arena::area`
        // requires.
        drop(unsafe { Box::from_raw(self.memory.as_ptr()) });
    }
}
