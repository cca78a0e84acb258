//! Private records of the driver's buffers, which the device cannot change.
use crate::Segment;
use alloc::boxed::Box;
use alloc::vec;

/// The record of one buffer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pending {
    /// Descriptors taken in the ring.
    pub(crate) descriptors: u16,
    /// Split: the last of its descriptors. Packed: the free identifier after this one.
    pub(crate) link: u16,
    /// Bytes that the device may write.
    pub(crate) writable: u32,
    /// Split: the position of its entry in the available ring.
    ///
    /// Packed: of its first descriptor. If there is no such buffer in flight, [`Pending::NOWHERE`].
    pub(crate) position: u64,
}

impl Pending {
    /// After every published position, so that one comparison shows ownership.
    ///
    /// It tells whether a buffer is with the device.
    pub(crate) const NOWHERE: u64 = u64::MAX;
}

/// The buffers of a queue, by identifier.
#[derive(Debug)]
pub(crate) struct Shadow {
    buffers: Box<[Pending]>,
}

impl Shadow {
    /// None in flight, each linked to the next, the last to the first.
    pub(crate) fn new(size: u16) -> Self {
        let none = Pending { descriptors: 0, link: 0, writable: 0, position: Pending::NOWHERE };
        let mut buffers = vec![none; usize::from(size)].into_boxed_slice();
        for (next, pending) in (1..=size).zip(&mut buffers) {
            pending.link = next & (size - 1);
        }
        Self { buffers }
    }

    /// The record of `id`.
    ///
    /// # Safety
    /// It is less than the size.
    #[inline(always)]
    pub(crate) unsafe fn get(&self, id: u16) -> Pending {
        debug_assert!(usize::from(id) < self.buffers.len());
        // SAFETY: the caller vouches for the index.
        unsafe { *self.buffers.get_unchecked(usize::from(id)) }
    }

    /// The same, to change it.
    ///
    /// # Safety
    /// It is less than the size.
    #[inline(always)]
    pub(crate) unsafe fn get_mut(&mut self, id: u16) -> &mut Pending {
        debug_assert!(usize::from(id) < self.buffers.len());
        // SAFETY: the caller vouches for the index.
        unsafe { self.buffers.get_unchecked_mut(usize::from(id)) }
    }
}

/// A batch of buffers that the device has used in order, told of by the last one.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct OrderedBatch {
    /// Position behind the last buffer. There is no batch if we are there.
    pub(crate) end: u64,
    /// Length that the device gave for the last buffer.
    ///
    /// Those before it were used completely.
    pub(crate) len: u32,
    /// The buffer that comes back next.
    pub(crate) oldest: u16,
}

impl OrderedBatch {
    /// Bytes written to the buffer that ends at position `end`.
    ///
    /// Buffers that the device has skipped count as used completely (sections 2.7.9 and 2.8.9).
    #[inline(always)]
    pub(crate) fn written(&self, end: u64, writable: u32) -> u32 {
        if end == self.end { self.len.min(writable) } else { writable }
    }
}

/// The lengths of a buffer's segments, as they are written down.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Lengths {
    total: u64,
}

impl Lengths {
    /// One more segment.
    ///
    /// # Panics
    /// It has no bytes.
    #[inline(always)]
    pub(crate) fn add(&mut self, len: u32) {
        assert!(len != 0, "a segment has no bytes");
        self.total += u64::from(len);
    }

    /// Bytes since `before`.
    ///
    /// # Panics
    /// There are none in all, or more than a buffer may have.
    #[inline(always)]
    pub(crate) fn since(self, before: Self) -> u32 {
        assert!(self.total != 0, "a buffer has no segments");
        assert!(self.total <= u32::MAX.into(), "a buffer has more than 2^32 - 1 bytes");
        (self.total - before.total) as u32
    }
}

/// Runs `write` for each segment, and returns the number of writable bytes.
///
/// `write` gets `flag` for segments that the device writes.
///
/// # Panics
/// The specification has no such buffer: see [`Lengths`]. The private state must not have been
/// changed by then.
#[inline(always)]
pub(crate) fn write_all(
    readable: &[Segment],
    writable: &[Segment],
    flag: u16,
    mut write: impl FnMut(&Segment, u16),
) -> u32 {
    let mut lengths = Lengths::default();
    for segment in readable {
        lengths.add(segment.len);
        write(segment, 0);
    }
    let before = lengths;
    for segment in writable {
        lengths.add(segment.len);
        write(segment, flag);
    }
    lengths.since(before)
}
