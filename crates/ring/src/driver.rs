//! The driver's side of a queue, whatever its layout.
//!
//! ```text
//!   DriverConfig --Queue::new(memory)--> Queue, laid out ---- ready (or the first publish) ----> in use
//!                                    |  poller()                                             |
//!                                    v                                                       v
//!                                  Poller: asks from anywhere           into_memory, after a reset
//! ```
mod buffer;
mod config;
pub(crate) mod memory;
pub mod poll;
pub(crate) mod shadow;
pub(crate) mod state;

use crate::order::Order;
use crate::{ConfigError, DmaArea, QueueAddresses, QueueError, Segment, Smp, packed, split};
use memory::Memory;
use paravane_spec::feature;
use poll::{Counting, PollError, Poller, Position, RingView};
use state::DriverState;

pub use buffer::{BufferId, Full, Used};
pub use config::DriverConfig;
pub use poll::PollToken;

/// A queue, driver side.
///
/// The device is hostile: descriptors have a private shadow, identifiers are checked, used lengths
/// are clamped. The first error latches the queue.
///
/// `O` selects the strength of the barriers, `C` the width of the counter in poll tokens.
#[derive(Debug)]
pub struct Queue<O: Order = Smp, C: Counting = Position> {
    ring: Ring<O, C>,
    ready: bool,
}

/// The two layouts.
#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "they are of about one size")]
pub(crate) enum Ring<O: Order, C: Counting> {
    Split(split::driver::Ring<O, C>),
    Packed(packed::driver::Ring<O, C>),
}

/// Runs the same expression for either layout: one branch a call, and none within.
macro_rules! either {
    ($ring:expr, $name:ident => $does:expr) => {
        match $ring {
            Ring::Split($name) => $does,
            Ring::Packed($name) => $does,
        }
    };
}

impl<O: Order, C: Counting> Ring<O, C> {
    /// The state that does not depend on the layout.
    fn state(&self) -> &DriverState<C> {
        either!(self, ring => &ring.state)
    }

    /// For pollers.
    pub(crate) fn view(&self) -> RingView {
        either!(self, ring => ring.view())
    }

    /// For pollers.
    pub(crate) fn count(&mut self) -> &mut C {
        either!(self, ring => &mut ring.state.count)
    }
}

impl Queue {
    /// Lays out the queue in `memory`, which it zeroes.
    ///
    /// Returns the queue, and its addresses for the transport.
    ///
    /// The memory must not be used for anything else until the device has been reset.
    ///
    /// # Errors
    /// `memory` is shorter than [`DriverConfig::memory`], misaligned, or wraps around the device's
    /// address space; or the layout asks for ORDER_PLATFORM, see [`Queue::lay_out`].
    pub fn new(layout: DriverConfig, memory: DmaArea) -> Result<(Self, QueueAddresses), ConfigError> {
        Self::lay_out(layout, memory)
    }
}

impl<O: Order, C: Counting> Queue<O, C> {
    /// As [`Queue::new`], with any barriers and counter.
    ///
    /// # Errors
    /// As [`Queue::new`]. A layout with ORDER_PLATFORM needs barriers that order what a device sees
    /// ([`crate::Platform`]).
    pub fn lay_out(layout: DriverConfig, memory: DmaArea) -> Result<(Self, QueueAddresses), ConfigError> {
        Self::lay_out_at(layout, memory, 0)
    }

    /// As [`Queue::lay_out`], with the ring at position `start`.
    ///
    /// Counted in buffers (split) or descriptors (packed).
    pub(crate) fn lay_out_at(
        layout: DriverConfig,
        memory: DmaArea,
        start: u16,
    ) -> Result<(Self, QueueAddresses), ConfigError> {
        if layout.order_platform && !O::PLATFORM {
            return Err(ConfigError::Features(feature::ORDER_PLATFORM));
        }
        let (memory, addresses) = Memory::take(&layout, memory)?;
        let state = DriverState::open(&layout, &memory, start);
        let ring = if layout.packed {
            Ring::Packed(packed::driver::Ring::new(state, memory))
        } else {
            Ring::Split(split::driver::Ring::new(state, memory))
        };
        Ok((Self { ring, ready: false }, addresses))
    }

    /// Returns a [`Poller`]: any thread or interrupt handler can ask it for news.
    ///
    /// It shares the queue's memory, which must stay mapped while a poller is used
    /// ([`crate::Area::new`]).
    ///
    /// It is asked for while the device cannot use the queue yet: whatever
    /// counts then counts from the beginning.
    ///
    /// # Errors
    /// The queue is in use already, or has latched.
    pub fn poller(&mut self) -> Result<Poller<O, C>, PollError> {
        if let Some(error) = self.error() {
            return Err(PollError::Stopped(error));
        }
        if self.ready || self.ring.state().in_use() {
            return Err(PollError::Ready);
        }
        let shared = self.ring.count().opt_in();
        Ok(Poller::new(self.ring.view(), shared))
    }

    /// The transport has made the queue ready: from now on there are no new pollers.
    pub fn ready(&mut self) {
        self.ready = true;
    }

    /// Gives the queue up and its memory back, after a reset.
    ///
    /// The device was reset; with RING_RESET, this queue. A new queue can be laid out in the
    /// memory. Tokens of this one have news for ever, if the counting is [`Position`].
    #[must_use]
    pub fn into_memory(self) -> DmaArea {
        self.ring.state().memory()
    }

    /// Adds one buffer: segments that the device reads, then segments that it writes.
    ///
    /// The device sees it after [`Queue::publish`].
    ///
    /// # Errors
    /// Too few free descriptors, or the queue has latched; nothing was added.
    ///
    /// # Panics
    /// There is no segment, one has length 0, or they have more than 2^32 - 1 bytes together: the
    /// specification has no such buffers.
    #[inline]
    pub fn add(&mut self, readable: &[Segment], writable: &[Segment]) -> Result<BufferId, Full> {
        either!(&mut self.ring, ring => ring.add(readable, writable))
    }

    /// Publishes what was added, and returns whether the device wants a kick.
    ///
    /// This is [`Queue::publish_unasked`] and [`Queue::wants_kick`] at once, with one store.
    #[inline(always)]
    pub fn publish(&mut self) -> bool {
        either!(&mut self.ring, ring => match ring.publish() {
            Some(last) => {
                let since = ring.state.ask(last);
                ring.wants_kick(since)
            }
            None => self.wants_kick(),
        })
    }

    /// Publishes what was added with one store.
    ///
    /// Without anything new, or in a queue that has latched, it does nothing.
    ///
    /// It may be all that is needed for a device that polls. A device that sleeps misses what was
    /// published until [`Queue::wants_kick`] has been asked: once after many publications is
    /// enough, before the driver itself waits.
    #[inline]
    pub fn publish_unasked(&mut self) {
        either!(&mut self.ring, ring => {
            if let Some(last) = ring.publish() {
                ring.state.postpone(last);
            }
        });
    }

    /// Whether the device wants a kick for anything published since the last call.
    ///
    /// `false` without anything new, or in a queue that has latched.
    ///
    /// To ask takes a full barrier, which waits until the device could have seen what was
    /// published. That is most of what publishing costs when both sides are at work.
    pub fn wants_kick(&mut self) -> bool {
        either!(&mut self.ring, ring => match ring.state.ask_late() {
            Some(since) => ring.wants_kick(since),
            None => false,
        })
    }

    /// Value of a kick of this queue with NOTIFICATION_DATA (section 2.9).
    ///
    /// The device's queue index `index`, and where the next buffer will be made available.
    #[must_use]
    pub fn kick_data(&self, index: u16) -> u32 {
        u32::from(index) | u32::from(either!(&self.ring, ring => ring.kick_data())) << 16
    }

    /// The next buffer that the device has used.
    ///
    /// # Errors
    /// The device named a buffer that is not in flight, or its index is impossible; the queue has
    /// latched.
    #[inline]
    pub fn pop_used(&mut self) -> Result<Option<Used>, QueueError> {
        either!(&mut self.ring, ring => ring.pop_used())
    }

    /// Takes back up to `out.len()` used buffers, and returns their number.
    ///
    /// It is 0 if, and only if, there is none; otherwise perhaps fewer than there are, so ask again
    /// before sleeping. It costs less than as many calls of [`Queue::pop_used`].
    ///
    /// # Errors
    /// As [`Queue::pop_used`]. Buffers before the error come first: it is returned by the call
    /// after that.
    #[inline]
    pub fn take_used(&mut self, out: &mut [Used]) -> Result<usize, QueueError> {
        either!(&mut self.ring, ring => ring.take_used(out))
    }

    /// Asks for an interrupt at the next used buffer; returns the position.
    ///
    /// The caller must [`Queue::poll`] (or pop) once more before it sleeps.
    #[inline]
    pub fn enable_interrupts(&mut self) -> C::Token {
        either!(&mut self.ring, ring => ring.enable_interrupts())
    }

    /// Asks the device for no interrupts. A hint.
    #[inline]
    pub fn disable_interrupts(&mut self) {
        either!(&mut self.ring, ring => ring.disable_interrupts());
    }

    /// Whether the device has used anything since `token`.
    ///
    /// Other threads ask a [`Poller`].
    #[must_use]
    #[inline]
    pub fn poll(&self, token: C::Token) -> bool {
        either!(&self.ring, ring => ring.poll(token))
    }

    /// The latched error.
    #[must_use]
    pub fn error(&self) -> Option<QueueError> {
        self.ring.state().error()
    }

    /// Number of descriptors.
    #[must_use]
    pub fn size(&self) -> u16 {
        self.ring.state().size()
    }

    /// Buffers added and not yet returned.
    #[must_use]
    pub fn in_flight(&self) -> u16 {
        either!(&self.ring, ring => ring.in_flight())
    }

    /// The longest chain that [`Queue::add`] would take now.
    #[must_use]
    pub fn room(&self) -> usize {
        match either!(&self.ring, ring => ring.free()) {
            0 => 0,
            free => free.max(either!(&self.ring, ring => ring.tables.segments())),
        }
    }
}
