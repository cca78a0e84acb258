//! The lanes of a link: frames on their way to one end, and their buffers.
//!
//! ```text
//!   free --sender fills it--> frames --receiver empties it--> free
//! ```
//! A lane belongs to one pair of queues. It is bounded and lock-free.
//!
//! It allocates a buffer when a frame finds none free, up to [`LANE`], and frees all when its
//! receiver is dropped. So an unused card has none, and one in use allocates nothing once it has
//! enough for its traffic.
use super::header::complete_checksum;
use super::wakeup::Wakeup;
use crossbeam_queue::ArrayQueue;
use paravane_spec::net::{Header, MAX_FRAME};
use std::collections::TryReserveError;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, AtomicUsize, Ordering};

/// Frames in flight in a lane.
pub(super) const LANE: usize = 128;

/// Least size of a buffer in bytes: any Ethernet frame without segmentation.
const SMALL: usize = 2048;

/// Storage for one frame.
#[derive(Debug)]
pub(super) struct Buffer {
    pub(super) header: Header,
    pub(super) len: usize,
    /// At least `len` bytes, rounded up for reuse by frames of similar length.
    pub(super) bytes: Vec<u8>,
}

impl Buffer {
    /// Storage without room for a frame.
    fn empty() -> Self {
        Self { header: Header::default(), len: 0, bytes: Vec::new() }
    }

    /// Makes room for a frame of `len` bytes, at most [`MAX_FRAME`].
    fn fit(&mut self, len: usize) -> Result<(), TryReserveError> {
        if self.bytes.len() < len {
            let size = len.next_power_of_two().clamp(SMALL, MAX_FRAME.max(len));
            self.bytes = Vec::new();
            self.bytes.try_reserve_exact(size)?;
            self.bytes.resize(size, 0);
        }
        Ok(())
    }

    /// Turns the frame into its answer of `len` bytes.
    ///
    /// Addresses are swapped; the frame is cut, or padded with 0.
    pub(super) fn answer(&mut self, len: usize) {
        complete_checksum(&mut self.header, &mut self.bytes[..self.len]);
        self.swap_addresses();
        // The rest of the buffer has bytes of another frame.
        self.bytes[self.len.min(len)..len].fill(0);
        self.len = len;
    }

    pub(super) fn swap_addresses(&mut self) {
        let (to, from) = self.bytes[..12].split_at_mut(6);
        to.swap_with_slice(from);
    }
}

/// The frames on their way to one receive queue.
#[derive(Debug)]
pub(super) struct Lane {
    pub(super) frames: ArrayQueue<Buffer>,
    pub(super) free: ArrayQueue<Buffer>,
    /// Wakes the receiver.
    pub(super) arrived: Wakeup,
    /// There is a receiver.
    pub(super) open: AtomicBool,
    /// Existing buffers: free, with a frame, or held by a sender or the receiver.
    ///
    /// At most `LANE`.
    pub(super) made: AtomicUsize,
}

impl Lane {
    /// A lane without buffers and receiver.
    fn new() -> io::Result<Self> {
        Ok(Self {
            frames: ArrayQueue::new(LANE),
            free: ArrayQueue::new(LANE),
            arrived: Wakeup::new()?,
            open: AtomicBool::new(false),
            made: AtomicUsize::new(0),
        })
    }

    /// A buffer for a frame of `len` bytes; `None`: the lane is full.
    ///
    /// # Errors
    /// The host has no memory.
    #[inline]
    pub(super) fn buffer(&self, len: usize) -> Result<Option<Buffer>, TryReserveError> {
        match self.free.pop() {
            Some(buffer) if buffer.bytes.len() >= len => Ok(Some(buffer)),
            other => self.make_room(other, len),
        }
    }

    /// As [`Lane::buffer`], with the free buffer that is too small.
    #[cold]
    fn make_room(&self, free: Option<Buffer>, len: usize) -> Result<Option<Buffer>, TryReserveError> {
        let Some(mut buffer) = free.or_else(|| self.make()) else { return Ok(None) };
        match buffer.fit(len) {
            Ok(()) => Ok(Some(buffer)),
            Err(error) => {
                // Both queues have room for every buffer.
                let _ = self.free.push(buffer);
                Err(error)
            }
        }
    }

    fn make(&self) -> Option<Buffer> {
        // Relaxed: a count that orders nothing else.
        let count = |made| (made < LANE).then_some(made + 1);
        self.made.fetch_update(Ordering::Relaxed, Ordering::Relaxed, count).ok()?;
        Some(Buffer::empty())
    }

    /// Whether a sender would get a buffer.
    pub(super) fn has_room(&self) -> bool {
        // Relaxed: as above; buffers that exist come back through `free`.
        !self.free.is_empty() || self.made.load(Ordering::Relaxed) < LANE
    }

    /// Frees all buffers except those that a sender or the receiver holds.
    pub(super) fn clear(&self) {
        while self.frames.pop().or_else(|| self.free.pop()).is_some() {
            // Relaxed: as above.
            self.made.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// The receiving side of one end.
#[derive(Debug)]
pub(super) struct Port {
    pub(super) lanes: Box<[Lane]>,
    /// Wake the senders to this port, one for each pair.
    pub(super) room: Box<[Wakeup]>,
    /// Lanes in use.
    pub(super) pairs: AtomicU16,
    /// Features that the receiving driver has accepted.
    pub(super) features: AtomicU64,
}

impl Port {
    pub(super) fn new(pairs: u16) -> io::Result<Arc<Self>> {
        Ok(Arc::new(Self {
            lanes: (0..pairs).map(|_| Lane::new()).collect::<io::Result<_>>()?,
            room: (0..pairs).map(|_| Wakeup::new()).collect::<io::Result<_>>()?,
            pairs: AtomicU16::new(1),
            features: AtomicU64::new(0),
        }))
    }

    /// The lane for frames of the far side's `pair`.
    pub(super) fn lane(&self, pair: u16) -> usize {
        // Relaxed: any answer is a lane, and a change wakes all waiting senders.
        usize::from(pair % self.pairs.load(Ordering::Relaxed).max(1))
    }

    /// Wakes all senders that wait for room.
    pub(super) fn wake_for_room(&self) {
        self.room.iter().for_each(Wakeup::wake);
    }
}
