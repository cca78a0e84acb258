//! Poll tokens: ask from any thread whether a queue has moved since a position.
//!
//! [`WrapCount`] is the counter of "Introduce optional VirtIO ring wrap counters" (C. Marussi,
//! patches to Linux, February 2022), which was not merged; [`Position`] goes further.
//!
//! ```text
//!   laid out --- Queue::poller ---> Poller (clone it, send it)
//!      |                               |
//!      | ready, or the first publish   | poll(token): has anything been used since?
//!      v                               |
//!   in use ---- enable_interrupts --> token
//! ```
//!
//! A token is a position in the used ring. A position that is compared as the ring has it repeats
//! itself: a split ring's index after 2^16 buffers, a packed ring's index and wrap counter after
//! two laps, and a packed ring's flags as soon as a slot was consumed and filled again. A thread
//! that polls at such a moment is told that nothing has come. So the queue counts what has come,
//! and the count is part of the answer. How far it counts is a choice of type:
//!
//! | [`Counting`] | token | split: repeats after | packed: repeats after |
//! |---|---|---|---|
//! | [`NoCount`] | [`IndexToken`], 16 bits | 2^16 buffers | the slot is filled again |
//! | [`WrapCount`] | [`WrapToken`], 16 + 16 bits | 2^32 buffers | 2^16 laps, and within a lap: see there |
//! | [`Position`] | [`PollToken`], 64 bits | never | never |
//!
//! # Why one look is enough
//! [`Poller::poll`] runs while another thread consumes, so two loads must tell one story: the ring
//! first, with acquire, then the count. Say that the device had used a buffer beyond the token, in
//! the order that the memory model gives, before the load of the ring.
//!
//! * Split: used.idx was moved beyond the token's index. The load sees that, and differs from the
//!   token; or it sees an index a whole number of turns on. Between two turns this side took
//!   buffers back, stored the count *before* it published the buffers of the next turn, and the
//!   device used those before it stored the index: release and acquire each time. A thread that
//!   sees the index therefore sees the count.
//! * Packed: what is used next after a position is told of in the slot of that position. The load
//!   sees the used flags, or something later in that slot. Later there can only be our filling it
//!   again, whose release store comes after that of a count beyond the token; or what came of that.
//!
//! The other way round (count, then ring) both could change in between, and the count would have to
//! be read again.
//!
//! # When the count is stored
//! The ring goes on showing what was used, taken back or not, until it is written again. The count
//! is needed from then on and no earlier, so taking a buffer back does not touch it.
//!
//! * Split: with each new index that is read from used.idx, which is before the buffers that it
//!   tells of can be published again.
//! * Packed: in `add`, when it needs slots that were taken back since the last time (`reclaim`). A
//!   position `p` is filled only below `limit`, which is a ring beyond some `next_used` that was
//!   stored before `limit` moved. A token of the same slot in an earlier lap is `p - size` at most,
//!   and `p - size < limit - size`, so the count is beyond it. The slot's flags are stored after
//!   that, by `add` itself or, for the first descriptor since a publication, by `publish`: either
//!   with release. Together with the publication the count would come too late for what `add`
//!   stores, after it for everything: the models in `tests/loom_poll.rs` fail, and without it the
//!   tests of what fools a token.
//! * Packed, in order, in the middle of a batch that one used descriptor told of: the slot of such
//!   a token shows nothing. So the count, which has all of the batch then, is stored with each
//!   token.
//!
//! The question is whether the count is beyond the token, not whether it differs: a thread that has
//! the token need not have the count that was stored with it.
use crate::area::Cells;
use crate::order::Order;
use crate::packed::{self, used_flags};
use crate::{QueueError, Smp};
use alloc::sync::Arc;
use core::fmt::Debug;
use core::marker::PhantomData;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use paravane_spec::packed::{DESC_LEN, DESC_SIZE, EVENT_WRAP};
use paravane_spec::split::USED_IDX;
use sealed::Count;

#[cfg(not(loom))]
use core::sync::atomic::{AtomicU16, AtomicU64};
#[cfg(loom)]
use loom::sync::atomic::{AtomicU16, AtomicU64};

pub(crate) mod sealed {
    use super::RingView;
    use crate::order::Order;
    use core::fmt::Debug;
    use core::sync::atomic::Ordering;

    /// What the rings call.
    pub trait Count: Sized + Debug + Send + 'static {
        /// What a poller shares with the queue.
        type Shared: Clone + Debug + Send + Sync + 'static;
        /// What a token holds.
        type Raw: Copy;

        /// Ordering of a refill: release where a count must be seen before.
        const REFILL: Ordering;

        /// Both rings start at `position`.
        fn new(position: u64) -> Self;

        /// Everything before `position` has been used.
        ///
        /// Called before the ring ceases to show that: see the module's text.
        fn seen(&mut self, position: u64);

        /// One more buffer was taken back.
        ///
        /// `wrapped` returns whether the ring's index began again with it.
        fn taken(&mut self, wrapped: impl FnOnce() -> bool);

        /// Someone will poll from elsewhere.
        fn opt_in(&mut self) -> Self::Shared;

        /// The token of `position`.
        fn raw(&self, position: u64, view: RingView) -> Self::Raw;

        /// Whether anything came after the token.
        fn news<O: Order>(&self, token: Self::Raw, view: RingView) -> bool;

        /// As [`Count::news`], from elsewhere.
        fn shared_news<O: Order>(shared: &Self::Shared, token: Self::Raw, view: RingView) -> bool;

        /// Ends the counting of a queue that is gone or broken.
        ///
        /// Every token has news from now on, so that the owner looks at the queue.
        fn close(&mut self);
    }
}

/// How a queue counts used buffers for [`Poller`]s \[[`Position`]\].
pub trait Counting: Count {
    /// The token of [`super::Queue::enable_interrupts`].
    type Token: Copy + Debug + PartialEq + Eq + Send + Sync + 'static + From<Self::Raw> + Into<Self::Raw>;
}

/// A poller's view of the ring: the form of tokens, and memory to compare.
#[derive(Clone, Copy, Debug)]
pub struct RingView(View);

#[derive(Clone, Copy, Debug)]
enum View {
    /// A split ring's used ring.
    Split {
        /// The used ring.
        used: Cells,
    },
    /// A packed ring.
    Packed {
        /// The descriptors.
        desc: Cells,
        /// Their number, a power of two.
        size: u16,
    },
}

impl RingView {
    /// In a split ring, with this used ring.
    pub(crate) fn split(used: Cells) -> Self {
        Self(View::Split { used })
    }

    /// In a packed ring of `size` descriptors.
    pub(crate) fn packed(desc: Cells, size: u16) -> Self {
        Self(View::Packed { desc, size })
    }

    /// A position in the ring's form.
    ///
    /// The index; in a packed ring the slot, with the wrap counter in bit 15.
    #[inline(always)]
    fn index(self, position: u64) -> u16 {
        match self.0 {
            View::Split { .. } => position as u16,
            View::Packed { size, .. } => {
                let wrap = if position & u64::from(size) == 0 { EVENT_WRAP } else { 0 };
                position as u16 & (size - 1) | wrap
            }
        }
    }

    /// Whether the ring itself shows that something was used at `index` or after it.
    ///
    /// Acquire: pairs with the device's release store, so that a thread that is told of a buffer
    /// sees what was written before it; and with our own release stores, as the module's text says.
    #[inline(always)]
    fn moved<O: Order>(self, index: u16) -> bool {
        let moved = match self.0 {
            // SAFETY: the ring vouched for its memory, and the caller of `Area::new` promised that
            // it stays mapped while a poller is used (`Area::new`).
            View::Split { used } => unsafe { used.load_u16(USED_IDX, Acquire) != index },
            View::Packed { desc, size } => {
                // A token may come from anywhere; in the ring it is.
                let slot = usize::from(index & (size - 1));
                // SAFETY: as above, and the slot is less than the size.
                let meta = unsafe { desc.load_u64_acquire(slot * DESC_SIZE + DESC_LEN) };
                packed::matches(packed::flags(meta), used_flags(index & EVENT_WRAP != 0))
            }
        };
        O::after_acquire();
        moved
    }
}

/// No count: the ring's index alone, as Linux has it.
///
/// A token is wrong as soon as the index repeats.
#[derive(Clone, Copy, Debug)]
pub struct NoCount;

/// A position in 16 bits.
///
/// A split ring's index; a packed ring's slot, with the wrap counter in bit 15.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IndexToken(u16);

impl IndexToken {
    /// As a number.
    #[must_use]
    pub const fn into_raw(self) -> u16 {
        self.0
    }

    /// From [`IndexToken::into_raw`].
    #[must_use]
    pub const fn from_raw(raw: u16) -> Self {
        Self(raw)
    }
}

impl Counting for NoCount {
    type Token = IndexToken;
}

impl Count for NoCount {
    type Shared = ();
    type Raw = u16;
    const REFILL: core::sync::atomic::Ordering = Relaxed;

    fn new(_position: u64) -> Self {
        Self
    }

    #[inline(always)]
    fn seen(&mut self, _position: u64) {}

    #[inline(always)]
    fn taken(&mut self, _wrapped: impl FnOnce() -> bool) {}

    fn opt_in(&mut self) {}

    #[inline(always)]
    fn raw(&self, position: u64, view: RingView) -> u16 {
        view.index(position)
    }

    #[inline(always)]
    fn news<O: Order>(&self, token: u16, view: RingView) -> bool {
        view.moved::<O>(token)
    }

    #[inline(always)]
    fn shared_news<O: Order>((): &(), token: u16, view: RingView) -> bool {
        view.moved::<O>(token)
    }

    fn close(&mut self) {}
}

/// A wrap counter: 16 bits that count the rounds of the ring's index.
///
/// It counts from the creation of a [`Poller`] on. A split ring's token repeats after 2^32 buffers,
/// a packed ring's after 2^16 laps. A packed ring's slot that was consumed and filled again within
/// the same count is not noticed.
#[derive(Debug)]
pub struct WrapCount {
    on: bool,
    wraps: Arc<CacheAligned<AtomicU16>>,
}

/// A token of [`WrapCount`].
///
/// Bits 31 to 16: how often the index began again. Bits 15 to 0: the index of [`IndexToken`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WrapToken(u32);

impl WrapToken {
    /// As a number.
    #[must_use]
    pub const fn into_raw(self) -> u32 {
        self.0
    }

    /// From [`WrapToken::into_raw`].
    #[must_use]
    pub const fn from_raw(raw: u32) -> Self {
        Self(raw)
    }
}

impl Counting for WrapCount {
    type Token = WrapToken;
}

impl Count for WrapCount {
    type Shared = Arc<CacheAligned<AtomicU16>>;
    type Raw = u32;
    const REFILL: core::sync::atomic::Ordering = Release;

    fn new(_position: u64) -> Self {
        Self { on: false, wraps: Arc::new(CacheAligned(AtomicU16::new(0))) }
    }

    #[inline(always)]
    fn seen(&mut self, _position: u64) {}

    #[inline(always)]
    fn taken(&mut self, wrapped: impl FnOnce() -> bool) {
        if self.on && wrapped() {
            // Relaxed: this side alone writes it.
            let next = self.wraps.0.load(Relaxed).wrapping_add(1);
            // Release: pairs with the acquire load in `shared_news`.
            self.wraps.0.store(next, Release);
        }
    }

    fn opt_in(&mut self) -> Self::Shared {
        self.on = true;
        Arc::clone(&self.wraps)
    }

    #[inline(always)]
    fn raw(&self, position: u64, view: RingView) -> u32 {
        // Relaxed: this side alone writes it.
        u32::from(self.wraps.0.load(Relaxed)) << 16 | u32::from(view.index(position))
    }

    #[inline(always)]
    fn news<O: Order>(&self, token: u32, view: RingView) -> bool {
        Self::shared_news::<O>(&self.wraps, token, view)
    }

    #[inline(always)]
    fn shared_news<O: Order>(wraps: &Self::Shared, token: u32, view: RingView) -> bool {
        // Acquire: pairs with the release store in `taken`; after the ring, see the module's text.
        view.moved::<O>(token as u16) || wraps.0.load(Acquire) != (token >> 16) as u16
    }

    // 16 bits have no value that stands for this.
    fn close(&mut self) {}
}

/// The default: a position in 64 bits.
///
/// It counts a split ring's buffers and a packed ring's descriptors, and does not come back to
/// where it was.
#[derive(Debug)]
pub struct Position {
    /// Everything before it has been used, as far as the ring does not show it.
    seen: Arc<CacheAligned<AtomicU64>>,
}

/// A position in the used ring. It counts in 64 bits, so it does not repeat.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PollToken(u64);

impl Drop for Position {
    fn drop(&mut self) {
        self.close();
    }
}

impl Counting for Position {
    type Token = PollToken;
}

impl Count for Position {
    type Shared = Arc<CacheAligned<AtomicU64>>;
    type Raw = u64;
    const REFILL: core::sync::atomic::Ordering = Release;

    fn new(position: u64) -> Self {
        Self { seen: Arc::new(CacheAligned(AtomicU64::new(position))) }
    }

    #[inline(always)]
    fn seen(&mut self, position: u64) {
        // Release: pairs with the acquire load in `shared_news`. One writer, so no
        // read-modify-write.
        self.seen.0.store(position, Release);
    }

    #[inline(always)]
    fn taken(&mut self, _wrapped: impl FnOnce() -> bool) {}

    fn opt_in(&mut self) -> Self::Shared {
        Arc::clone(&self.seen)
    }

    #[inline(always)]
    fn raw(&self, position: u64, _view: RingView) -> u64 {
        position
    }

    #[inline(always)]
    fn news<O: Order>(&self, token: u64, view: RingView) -> bool {
        Self::shared_news::<O>(&self.seen, token, view)
    }

    #[inline(always)]
    fn shared_news<O: Order>(seen: &Self::Shared, token: u64, view: RingView) -> bool {
        // Acquire: pairs with the release store in `seen`; after the ring, see the module's text.
        view.moved::<O>(view.index(token)) || seen.0.load(Acquire) > token
    }

    fn close(&mut self) {
        // No position: 2^64 - 1 descriptors are never used. Release: as in `seen`.
        self.seen.0.store(u64::MAX, Release);
    }
}

macro_rules! raw {
    ($($token:ident($raw:ty)),*) => {$(
        impl From<$raw> for $token {
            #[inline(always)]
            fn from(raw: $raw) -> Self {
                Self(raw)
            }
        }

        impl From<$token> for $raw {
            #[inline(always)]
            fn from(token: $token) -> Self {
                token.0
            }
        }
    )*};
}
raw!(IndexToken(u16), WrapToken(u32), PollToken(u64));

/// A value alone on its cache line, so that polling disturbs nothing else.
#[derive(Debug)]
#[repr(align(64))]
pub struct CacheAligned<T>(T);

/// Reason why a queue gives no [`Poller`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PollError {
    /// The device may use the queue already.
    #[error("the queue is in use: create pollers before it is made ready")]
    Ready,
    /// The queue has latched.
    #[error("the queue has stopped: {0}")]
    Stopped(#[from] QueueError),
}

/// Asks for news of a queue while its owner goes on consuming.
///
/// See [`super::Queue::poller`].
#[derive(Debug)]
pub struct Poller<O: Order = Smp, C: Counting = Position> {
    count: C::Shared,
    view: RingView,
    order: PhantomData<O>,
}

impl<O: Order, C: Counting> Clone for Poller<O, C> {
    fn clone(&self) -> Self {
        Self { count: self.count.clone(), view: self.view, order: PhantomData }
    }
}

impl<O: Order, C: Counting> Poller<O, C> {
    pub(super) fn new(view: RingView, count: C::Shared) -> Self {
        Self { count, view, order: PhantomData }
    }

    /// Whether anything was used since `token`, taken back by now or not.
    ///
    /// Also `true` when the queue has stopped or is gone, if the counting is [`Position`]: the
    /// owner has something to see.
    ///
    /// A device that lies can make the answer wrong, but nothing else.
    #[must_use]
    #[inline]
    pub fn poll(&self, token: C::Token) -> bool {
        C::shared_news::<O>(&self.count, token.into(), self.view)
    }
}
