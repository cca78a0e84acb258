//! Network card driver (section 5.1).
//!
//! ```text
//!  transmit: free slot --send--> added --kick--> with the device --(taken back when slots run out)--> free slot
//!  receive:  slot with the device --> gathered, until the frame is whole --receive--> added again --kick--> ...
//! ```
//! Both directions live on a bounded set of slots in shared memory, taken from the pool once. A
//! slot is a header and room behind it. Frames are copied out of and into them, so that the device
//! can change nothing of what the caller has.
//!
//! Frames are whole and plain: neither checksums nor segmentation are left to the device, nor taken
//! from it.
//!
//! [`Net`] is a card with one owner. [`NetDevice::new`] sets a card up whose pairs of queues have an
//! owner each:
//!
//! ```no_run
//! # use paravane_driver::{DriverError, Message, Pool, Transport};
//! use paravane_driver::net::{NetDevice, NetOptions, QueuePair};
//! # fn message(cpu: u16, number: u16) -> Message { Message { address: u64::from(cpu), data: number.into() } }
//! # fn start_on<T>(_cpu: u16, _pair: QueuePair<T>) {}
//!
//! /// Sets a card up with a pair for each processor, whose interrupts come to that processor.
//! fn set_up<T: Transport>(transport: T, cpus: u16, pool: &mut Pool) -> Result<NetDevice<T>, DriverError> {
//!     let options = NetOptions { pairs: cpus, ..NetOptions::default() };
//!     let (mut card, pairs) = NetDevice::new(transport, options, pool)?;
//!     if pairs.len() > 1 {
//!         card.ask_for_pairs(card.pairs_set_up())?;
//!         // With a bound, and without one pair is in use.
//!         while card.answer()?.is_none() {}
//!     }
//!     for pair in pairs {
//!         let cpu = pair.number();
//!         for number in pair.messages() {
//!             card.device().set_message(number, message(cpu, number))?;
//!         }
//!         start_on(cpu, pair); // sends and receives there, without a lock
//!     }
//!     Ok(card) // for whom takes the interrupts of configuration changes
//! }
//! ```
mod device;
mod pair;

pub use device::NetDevice;
pub use pair::QueuePair;

use crate::latch::Latch;
use crate::{DriverError, Pool, Transport, Virtio};
use alloc::vec::Vec;
use paravane_ring::driver::PollToken;
use paravane_ring::driver::poll::Poller;
use paravane_spec::net::Header;

/// Bytes before each frame.
const HEADER: usize = size_of::<Header>();
/// A VLAN tag, which an MTU does not count.
const VLAN: usize = 4;
/// The pair is not set up, or not in use.
const NOT_IN_USE: DriverError = DriverError::Request("the pair is not in use");

/// Size of a card's queues and frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NetOptions {
    /// Most pairs of queues to set up. One is in use until [`Net::ask_for_pairs`].
    pub pairs: u16,
    /// Slots a receive queue.
    pub receive_slots: u16,
    /// Slots a transmit queue.
    pub transmit_slots: u16,
    /// Bytes of the largest frame, with its Ethernet header: from 14 to [`MAX_FRAME`](paravane_spec::net::MAX_FRAME).
    pub frame: usize,
    /// Bytes of a receive slot, if the device spreads a frame over several (MRG_RXBUF).
    ///
    /// Else, and at most, a slot has room for one frame.
    pub receive_slot: usize,
}

impl Default for NetOptions {
    /// One pair, 64 slots each way, frames for an MTU of 1500.
    fn default() -> Self {
        Self { pairs: 1, receive_slots: 64, transmit_slots: 64, frame: 1518, receive_slot: 2048 }
    }
}

/// Counters of received buffers that were dropped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Dropped {
    /// Buffers that came back with less than a header in them.
    pub runts: u64,
}

/// A network card with one owner.
#[derive(Debug)]
pub struct Net<T> {
    card: NetDevice<T>,
    pairs: Vec<QueuePair<T>>,
    failed: Latch,
}

impl<T: Transport> Net<T> {
    /// Sets the card up, with all its receive slots on offer, and sets DRIVER_OK.
    ///
    /// The device may limit the number of pairs and slots.
    ///
    /// # Errors
    /// No such device, or too little memory: the device is then told FAILED. Or the options are
    /// impossible.
    pub fn new(transport: T, options: NetOptions, pool: &mut Pool) -> Result<Self, DriverError> {
        let (card, pairs) = NetDevice::new(transport, options, pool)?;
        Ok(Self { card, pairs, failed: Latch::default() })
    }

    /// MAC address, if the card has one.
    pub fn mac(&self) -> Option<[u8; 6]> {
        self.card.mac()
    }

    /// Largest packet in bytes, without the Ethernet header, if the device reports it.
    pub fn mtu(&self) -> Option<u16> {
        self.card.mtu()
    }

    /// Whether the link is up. Changes only in [`Net::interrupt`].
    pub fn link_up(&self) -> bool {
        self.card.link_up()
    }

    /// Negotiated features.
    pub fn features(&self) -> u64 {
        self.card.features()
    }

    /// Bytes of the largest frame that can be sent.
    pub fn largest_frame(&self) -> usize {
        self.card.largest_frame()
    }

    /// Pairs that are set up; those from [`Net::pairs`] on are not in use.
    pub fn pairs_set_up(&self) -> u16 {
        self.card.pairs_set_up()
    }

    /// Pairs in use, from 0 on.
    pub fn pairs(&self) -> u16 {
        self.card.pairs()
    }

    /// Counters of dropped buffers.
    pub fn dropped(&self) -> Dropped {
        Dropped { runts: self.pairs.iter().map(|pair| pair.dropped().runts).sum() }
    }

    /// Adds a frame to be sent on a pair; the device sees it after [`Net::kick`].
    ///
    /// `false` if no slot is free.
    ///
    /// # Errors
    /// The frame is shorter than an Ethernet header or longer than [`Net::largest_frame`], the pair
    /// is not in use, or the driver has failed.
    pub fn send(&mut self, pair: u16, frame: &[u8]) -> Result<bool, DriverError> {
        self.on(pair, |pair| pair.send(frame))
    }

    /// Frames sent on a pair that the device has not given back yet.
    ///
    /// If there are any, [`Net::enable_interrupts`] asks for an interrupt when that changes.
    ///
    /// # Errors
    /// There is no such pair. Or the device broke the protocol, and the driver has latched.
    pub fn in_flight(&mut self, pair: u16) -> Result<usize, DriverError> {
        self.on(pair, QueuePair::in_flight)
    }

    /// Copies the next frame of a pair into `out` and returns its length.
    ///
    /// Bytes without room are lost.
    ///
    /// # Errors
    /// There is no such pair. Or the device broke the protocol, and the driver has latched.
    pub fn receive(&mut self, pair: u16, out: &mut [u8]) -> Result<Option<usize>, DriverError> {
        self.on(pair, |pair| pair.receive(out))
    }

    /// Calls `work` on a pair. An error of the device latches the driver.
    fn on<V>(
        &mut self,
        pair: u16,
        work: impl FnOnce(&mut QueuePair<T>) -> Result<V, DriverError>,
    ) -> Result<V, DriverError> {
        self.failed.check()?;
        let done = work(self.pairs.get_mut(usize::from(pair)).ok_or(NOT_IN_USE)?);
        done.map_err(|error| self.latch(error))
    }

    /// Latches an error, but for a refused request.
    fn latch(&mut self, error: DriverError) -> DriverError {
        if matches!(error, DriverError::Request(_)) { error } else { self.failed.set(error) }
    }

    /// Publishes all that was added and kicks where the device wants it.
    ///
    /// Returns the number of kicks.
    pub fn kick(&mut self) -> u32 {
        if self.failed.is_set() {
            return 0;
        }
        self.pairs.iter_mut().map(QueuePair::kick).sum()
    }

    /// Asks the device to use `pairs` pairs. The answer comes by [`Net::answer`].
    ///
    /// # Errors
    /// Fewer pairs are set up, an earlier request is not answered yet, or the driver has failed.
    pub fn ask_for_pairs(&mut self, pairs: u16) -> Result<(), DriverError> {
        self.failed.check()?;
        self.card.ask_for_pairs(pairs).map_err(|error| self.latch(error))
    }

    /// The answer to [`Net::ask_for_pairs`]: whether they are in use now.
    ///
    /// `None` while there is none.
    ///
    /// # Errors
    /// The device broke the protocol. The driver has latched.
    pub fn answer(&mut self) -> Result<Option<bool>, DriverError> {
        self.failed.check()?;
        self.card.answer().map_err(|error| self.latch(error))
    }

    /// Asks for interrupts; `true`: something is there, and the caller must not sleep.
    ///
    /// It asks for one at received frames. It asks for one at sent frames, too, if [`Net::send`]
    /// found no free slot or [`Net::in_flight`] frames are not back.
    #[must_use = "`true` means that no interrupt comes for what is there"]
    pub fn enable_interrupts(&mut self) -> bool {
        let mut news = self.card.enable_interrupts() || self.failed.is_set();
        // All of them, so that each interrupts.
        for pair in &mut self.pairs {
            news |= pair.enable_interrupts();
        }
        news
    }

    /// Suppresses interrupts.
    pub fn disable_interrupts(&mut self) {
        self.pairs.iter_mut().for_each(QueuePair::disable_interrupts);
        self.card.disable_interrupts();
    }

    /// Position of a pair's receive queue; asks for an interrupt at the next buffer.
    ///
    /// For [`Net::has_news`] and [`Net::poller`].
    pub fn position(&mut self, pair: u16) -> Option<PollToken> {
        Some(self.pairs.get_mut(usize::from(pair))?.position())
    }

    /// Whether anything was received on a pair since `token`, or the driver has failed.
    pub fn has_news(&self, pair: u16, token: PollToken) -> bool {
        self.failed.is_set() || self.pairs.get(usize::from(pair)).is_some_and(|pair| pair.has_news(token))
    }

    /// Answers as [`Net::has_news`] does, from any thread or interrupt handler.
    pub fn poller(&self, pair: u16) -> Option<Poller> {
        self.pairs.get(usize::from(pair)).map(QueuePair::poller)
    }

    /// The device, for what is the same with every driver.
    pub fn device(&self) -> &Virtio<T> {
        self.card.device()
    }

    /// Reads and acknowledges the causes of an interrupt of this device.
    ///
    /// Call it after an interrupt, before you look for frames.
    ///
    /// # Errors
    /// The device needs a reset, or its configuration keeps changing. The driver has latched.
    pub fn interrupt(&mut self) -> Result<u32, DriverError> {
        self.failed.check()?;
        self.card.interrupt().map_err(|error| self.latch(error))
    }
}
