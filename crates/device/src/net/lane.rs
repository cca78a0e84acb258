//! The lanes of a link: frames on their way to one end, and their buffers.
//!
//! ```text
//!   free --sender fills it--> frames --receiver empties it--> free
//! ```
//! A lane belongs to one pair of queues, and is bounded. Both sides move buffers in groups: a lock
//! is taken once for each, and held while pointers are moved.
//!
//! It allocates a buffer when a frame finds none free, up to [`LANE`], and frees all when its
//! receiver is dropped. So an unused card has none, and one in use allocates nothing once it has
//! enough for its traffic.
use super::header::{EncodedHeader, complete_checksum};
use crate::callback::Callback;
use crate::lock;
use crate::wakeup::Wakeup;
use paravane_spec::net::MAX_FRAME;
use std::collections::TryReserveError;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::vec::Drain;

/// Frames in flight in a lane.
pub(super) const LANE: usize = 128;

/// Most free buffers that a sender gets at once.
///
/// It returns the rest at the end of its batch, so that none is kept from other senders.
pub(super) const OWN: usize = 32;

/// Least size of a buffer in bytes: any Ethernet frame without segmentation.
const SMALL: usize = 2048;

/// Storage for one frame.
#[derive(Debug)]
pub(super) struct Buffer {
    pub(super) header: EncodedHeader,
    pub(super) len: usize,
    /// At least `len` bytes, rounded up for reuse by frames of similar length.
    pub(super) bytes: Vec<u8>,
}

impl Buffer {
    /// Storage without room for a frame.
    fn empty() -> Self {
        Self { header: EncodedHeader::default(), len: 0, bytes: Vec::new() }
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

/// Buffers that pass from one side of a lane to the other.
#[derive(Debug)]
pub(super) struct Buffers {
    list: Mutex<Vec<Buffer>>,
    /// Length of the list, for those that only look.
    count: AtomicUsize,
}

/// Moves all buffers behind those in `to`.
///
/// Two lists of the same capacity are exchanged where that does it.
fn move_all(from: &mut Vec<Buffer>, to: &mut Vec<Buffer>) {
    if to.is_empty() && to.capacity() == from.capacity() {
        std::mem::swap(from, to);
    } else {
        to.append(from);
    }
}

impl Buffers {
    fn new() -> Self {
        Self { list: Mutex::new(Vec::with_capacity(LANE)), count: AtomicUsize::new(0) }
    }

    /// Number of buffers, a moment ago.
    #[inline]
    pub(super) fn count(&self) -> usize {
        // Relaxed: who finds some takes the lock; before a sleep the wakeup orders it.
        self.count.load(Ordering::Relaxed)
    }

    /// Changes the list.
    fn change<T>(&self, change: impl FnOnce(&mut Vec<Buffer>) -> T) -> T {
        // Nothing below panics halfway.
        let mut list = lock(&self.list);
        let result = change(&mut list);
        // Relaxed: see `count`.
        self.count.store(list.len(), Ordering::Relaxed);
        result
    }

    /// Adds a buffer.
    pub(super) fn push(&self, buffer: Buffer) {
        self.change(|list| list.push(buffer));
    }

    /// Adds all of `buffers`, in order.
    pub(super) fn push_all(&self, buffers: &mut Vec<Buffer>) {
        if !buffers.is_empty() {
            self.change(|list| move_all(buffers, list));
        }
    }

    /// Adds `buffers`, in order.
    pub(super) fn push_some(&self, buffers: Drain<'_, Buffer>) {
        if buffers.len() > 0 {
            self.change(|list| list.extend(buffers));
        }
    }

    /// Takes all buffers, in order, behind those in `into`.
    pub(super) fn take_all(&self, into: &mut Vec<Buffer>) {
        if self.count() > 0 {
            self.change(|list| move_all(list, into));
        }
    }

    /// Takes up to `most` of the buffers that came last, whose memory is likely in a cache.
    fn take_last(&self, most: usize, into: &mut Vec<Buffer>) {
        if self.count() > 0 {
            self.change(|list| match list.len().checked_sub(most) {
                Some(rest) if rest > 0 => into.extend(list.drain(rest..)),
                _ => move_all(list, into),
            });
        }
    }
}

/// The frames on their way to one receive queue.
#[derive(Debug)]
pub(super) struct Lane {
    /// In order.
    pub(super) frames: Buffers,
    pub(super) free: Buffers,
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
            frames: Buffers::new(),
            free: Buffers::new(),
            arrived: Wakeup::new()?,
            open: AtomicBool::new(false),
            made: AtomicUsize::new(0),
        })
    }

    /// Makes number `at` of `own` a buffer for a frame of `len` bytes; `false`: the lane is full.
    ///
    /// `own` has at least `at` buffers, and from there on free ones of this lane. It gets some more
    /// if it has none.
    ///
    /// # Errors
    /// The host has no memory.
    #[inline(never)]
    pub(super) fn make_room(
        &self,
        own: &mut Vec<Buffer>,
        at: usize,
        len: usize,
    ) -> Result<bool, TryReserveError> {
        if own.len() == at {
            self.free.take_last(OWN, own);
        }
        if own.len() == at {
            own.extend(self.make());
        }
        own.get_mut(at).map_or(Ok(false), |buffer| buffer.fit(len).map(|()| true))
    }

    /// A buffer for one frame of `len` bytes; `None`: the lane is full.
    ///
    /// # Errors
    /// The host has no memory.
    pub(super) fn one_buffer(&self, len: usize) -> Result<Option<Buffer>, TryReserveError> {
        let mut own = Vec::new();
        let has_room = self.make_room(&mut own, 0, len);
        let buffer = if has_room == Ok(true) { Some(own.swap_remove(0)) } else { None };
        self.free.push_all(&mut own);
        has_room.map(|_| buffer)
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
        self.free.count() > 0 || self.made.load(Ordering::Relaxed) < LANE
    }

    /// Frees all buffers except those that a sender or the receiver holds.
    pub(super) fn clear(&self) {
        let mut freed = Vec::new();
        self.frames.take_all(&mut freed);
        self.free.take_all(&mut freed);
        // Relaxed: as above.
        self.made.fetch_sub(freed.len(), Ordering::Relaxed);
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
    /// Frames for a lane without a receiver wait: there will be one.
    pub(super) held: AtomicBool,
    /// Called when the far side's receivers come or go.
    pub(super) carrier_change: Callback<dyn Fn() + Send + Sync>,
}

impl Port {
    pub(super) fn new(pairs: u16) -> io::Result<Arc<Self>> {
        Ok(Arc::new(Self {
            lanes: (0..pairs).map(|_| Lane::new()).collect::<io::Result<_>>()?,
            room: (0..pairs).map(|_| Wakeup::new()).collect::<io::Result<_>>()?,
            pairs: AtomicU16::new(1),
            features: AtomicU64::new(0),
            held: AtomicBool::new(false),
            carrier_change: Callback::default(),
        }))
    }

    /// Whether a lane has a receiver.
    pub(super) fn is_open(&self) -> bool {
        // Relaxed: who is told of a change is woken after it.
        self.lanes.iter().any(|lane| lane.open.load(Ordering::Relaxed))
    }

    /// Tells this end that the receivers of the far side have changed.
    pub(super) fn tell_carrier_change(&self) {
        if let Some(told) = self.carrier_change.get() {
            told();
        }
    }

    pub(super) fn is_held(&self) -> bool {
        // Relaxed: a change wakes all waiting senders.
        self.held.load(Ordering::Relaxed)
    }

    /// The lane for frames of the far side's `pair`.
    pub(super) fn lane(&self, pair: u16) -> usize {
        // Relaxed: any answer is a lane, and a change wakes all waiting senders.
        match self.pairs.load(Ordering::Relaxed) {
            // No division for each frame.
            0 | 1 => 0,
            pairs => usize::from(pair % pairs),
        }
    }

    /// Wakes all senders that wait for room.
    pub(super) fn wake_for_room(&self) {
        self.room.iter().for_each(Wakeup::wake);
    }
}
