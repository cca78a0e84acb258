//! Network card (virtio specification, section 5.1).
//!
//! ```text
//! NetConfig, BackEnd (Tap, LinkEnd, Generator) --new--> Net
//!    | start_queue
//!    v
//! Receive, one a pair       back end -> buffers of the driver          receive.rs
//! Transmit, one a pair      frames of the driver -> back end           transmit.rs
//!    checks the driver's header before its values are used             header.rs
//! Control                   number of pairs in use                     control.rs
//! ```
//! An invalid frame of the driver is dropped and counted ([`Counters`]); an invalid chain latches
//! its queue.
//!
//! ```no_run
//! use paravane_device::net::{Net, NetConfig, Tap};
//!
//! let tap = Tap::open("tap0", 1)?;
//! let card = Net::new(NetConfig { mtu: Some(1500), ..NetConfig::new([2, 0, 0, 0, 0, 1]) }, tap)?;
//! let counters = card.counters();
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
mod back_end;
mod control;
mod counters;
mod echo_peer;
mod generator;
mod header;
mod lane;
mod limited;
mod link;
pub mod operation;
mod receive;
mod tap;
#[cfg(test)]
mod tests;
mod transmit;

pub use back_end::{BackEnd, Incoming, Outgoing, Receiver, Sender, Sent};
pub use counters::{Counters, Totals};
pub use generator::Generator;
pub use header::EncodedHeader;
pub use limited::{Limited, LimitedReceiver, LimitedSender};
pub use link::{LinkEnd, LinkHold};
pub use tap::{Tap, TapError};

use crate::{Device, HostSide, QueueHandler};
use control::{Commanded, Control, use_pairs};
use paravane_ring::device::QueueConfig;
use paravane_spec::net::{
    self, Config, F_CTRL_VQ, F_GUEST_ANNOUNCE, F_MAC, F_MQ, F_MRG_RXBUF, F_MTU, F_STATUS, MIN_MTU, RECEIVE,
    S_LINK_UP, TRANSMIT,
};
use paravane_spec::{feature, queue};
use receive::Receive;
use std::fmt;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use thiserror::Error;
use transmit::Transmit;
use zerocopy::IntoBytes;

/// Least size of the control queue, which is otherwise as large as the others.
///
/// Some VMMs make all queues of one size: User Mode Linux 256, crosvm 1024.
const CONTROL_SIZE: u16 = 64;

/// Configuration of a network card.
///
/// Start from [`NetConfig::new`], and change fields by struct update.
#[derive(Clone, Debug)]
pub struct NetConfig {
    /// MAC address.
    pub mac: [u8; 6],
    /// MTU in bytes, without the Ethernet header, at least 68 [not offered].
    pub mtu: Option<u16>,
    /// Offers the checksum and segmentation offloads of the back end [`true`].
    pub offloads: bool,
    /// Offers GUEST_ANNOUNCE, and the control queue that it needs [`false`].
    ///
    /// A VMM that handles the control queue itself (QEMU) asks the driver to announce itself after
    /// a migration.
    pub announce: bool,
    /// Largest queue size in descriptors \[256\].
    ///
    /// Rounded down to a power of two, from 2 to 32768.
    pub queue_size: u16,
}

impl NetConfig {
    /// The defaults, with the address `mac`.
    #[must_use]
    pub fn new(mac: [u8; 6]) -> Self {
        Self { mac, mtu: None, offloads: true, announce: false, queue_size: 256 }
    }
}

/// The configuration of a card is invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum NetError {
    /// The MAC address.
    #[error("invalid MAC address {}: all zeroes or multicast; use 02:xx:xx:xx:xx:xx", MacAddress(*.0))]
    Mac([u8; 6]),
    /// The MTU.
    #[error("invalid MTU of {0} bytes: the minimum is 68")]
    Mtu(u16),
    /// The number of queue pairs of the back end.
    #[error("invalid number of queue pairs {0}: the range is 1 to 32767")]
    Pairs(u16),
}

/// Shows a MAC address with colons.
struct MacAddress([u8; 6]);

impl fmt::Display for MacAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

/// A network card.
#[derive(Debug)]
pub struct Net<B> {
    config: NetConfig,
    back_end: Arc<B>,
    queue_sizes: Vec<u16>,
    counters: Arc<Counters>,
    /// The back end knows the features that the driver has accepted.
    agreed: bool,
    /// Pairs in use, where the driver does not report them through our control queue.
    enabled: u16,
    /// Pairs that the driver has set through our control queue; 0: none.
    commanded: Arc<Commanded>,
    /// The driver's link follows the carrier of the network.
    follows: bool,
}

impl<B: BackEnd> Net<B> {
    /// Creates a card that is connected to `back_end`.
    ///
    /// # Errors
    /// See [`NetError`].
    pub fn new(config: NetConfig, back_end: B) -> Result<Self, NetError> {
        if config.mac == [0; 6] || config.mac[0] & 1 != 0 {
            return Err(NetError::Mac(config.mac));
        }
        if let Some(mtu) = config.mtu
            && mtu < MIN_MTU
        {
            return Err(NetError::Mtu(mtu));
        }
        if let (Some(mtu), Some(network)) = (config.mtu, back_end.mtu())
            && u32::from(mtu) > network
        {
            tracing::warn!(
                mtu,
                network,
                "the MTU of the network is below the card's: larger packets are lost"
            );
        }
        let pairs = back_end.pairs();
        if pairs == 0 || pairs > net::MAX_PAIRS - 1 {
            return Err(NetError::Pairs(pairs));
        }
        let size = 1 << config.queue_size.clamp(2, queue::MAX_SIZE).ilog2();
        let mut queue_sizes = vec![size; usize::from(pairs * net::PAIR)];
        if pairs > 1 || config.announce {
            queue_sizes.push(CONTROL_SIZE.max(size));
        }
        Ok(Self {
            config,
            back_end: Arc::new(back_end),
            queue_sizes,
            counters: Arc::default(),
            agreed: false,
            enabled: 1,
            commanded: Arc::default(),
            follows: false,
        })
    }

    /// Counters of the card, live.
    #[must_use]
    pub fn counters(&self) -> Arc<Counters> {
        Arc::clone(&self.counters)
    }

    fn pairs(&self) -> u16 {
        self.back_end.pairs()
    }

    /// Tells the back end the accepted features, once between two resets.
    ///
    /// A driver with MQ starts with one pair, too (section 5.1.6.5.6).
    fn agree(&mut self, features: u64) -> io::Result<()> {
        if !self.agreed {
            self.back_end.accept(features)?;
            self.back_end.use_pairs(if features & F_MQ != 0 { self.enabled } else { 1 })?;
            self.agreed = true;
        }
        Ok(())
    }
}

impl<B: BackEnd> Net<B> {
    /// Number of queue pairs that the driver has set through the control queue; 0 if none.
    fn commanded_pairs(&self) -> u16 {
        // Acquire: pairs with the store of the control queue's handler.
        self.commanded.pairs.load(Ordering::Acquire)
    }

    /// Sets the number of queue pairs as the driver did.
    ///
    /// 0: it has set none. Ignores a number that the driver could not have set.
    fn restore_pairs(&mut self, pairs: u16) {
        // Relaxed: a change tells the session, which calls this.
        let unchanged = pairs == self.commanded.pairs.load(Ordering::Relaxed);
        // A driver sets them after its queues have started.
        if unchanged || pairs > self.pairs() || !self.agreed {
            return;
        }
        if use_pairs(&*self.back_end, if pairs == 0 { self.enabled } else { pairs }) {
            self.commanded.pairs.store(pairs, Ordering::Relaxed);
        }
    }
}

impl<B: BackEnd> Device for Net<B> {
    fn device_id(&self) -> u32 {
        paravane_spec::device_id::NET
    }

    fn features(&self) -> u64 {
        let mut features = feature::VERSION_1
            | feature::RING_RESET
            | QueueConfig::SPLIT_FEATURES
            | F_MAC
            | F_STATUS
            | F_MRG_RXBUF;
        if self.config.offloads {
            features |= self.back_end.offloads();
        }
        if self.config.mtu.is_some() {
            features |= F_MTU;
        }
        if self.pairs() > 1 {
            features |= F_CTRL_VQ | F_MQ;
        }
        if self.config.announce {
            features |= F_CTRL_VQ | F_GUEST_ANNOUNCE;
        }
        features
    }

    fn queue_sizes(&self) -> &[u16] {
        &self.queue_sizes
    }

    fn read_config(&self, offset: u32, out: &mut [u8]) {
        let config = Config {
            mac: self.config.mac,
            status: if self.link_is_up() == Some(true) { S_LINK_UP.to_le() } else { 0 },
            max_virtqueue_pairs: self.pairs().to_le(),
            mtu: self.config.mtu.unwrap_or(0).to_le(),
        };
        crate::read_config(config.as_bytes(), offset, out);
    }

    fn start_queue(&mut self, index: u16, features: u64) -> io::Result<Box<dyn QueueHandler>> {
        let Some(&size) = self.queue_sizes.get(usize::from(index)) else {
            let what = format!("the network card has no queue {index}; it has {}", self.queue_sizes.len());
            return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        };
        self.agree(features)?;
        // Section 5.1.2: the control queue follows the pairs, of which a driver without MQ has one.
        let pairs = if features & F_MQ != 0 { self.pairs() } else { 1 };
        if index >= pairs * net::PAIR {
            return Ok(Box::new(Control::new(
                Arc::clone(&self.back_end),
                features,
                Arc::clone(&self.commanded),
            )));
        }
        let (pair, counters) = (index / net::PAIR, self.counters());
        const { assert!(RECEIVE == 0 && TRANSMIT == 1) };
        Ok(if index % net::PAIR == RECEIVE {
            Box::new(Receive::new(self.back_end.receiver(pair)?, features, size, counters))
        } else {
            Box::new(Transmit::new(self.back_end.sender(pair)?, features, counters))
        })
    }

    fn enable_queues(&mut self, count: u16) {
        let pairs = count / net::PAIR;
        // If the control queue is enabled, the driver sets the number of pairs there.
        let pairs = if usize::from(count) > usize::from(self.pairs() * net::PAIR) { 1 } else { pairs.max(1) };
        if pairs == self.enabled {
            return;
        }
        self.enabled = pairs;
        // Relaxed: a statement of one side, which the other replaces.
        self.commanded.pairs.store(0, Ordering::Relaxed);
        if self.agreed {
            use_pairs(&*self.back_end, pairs);
        }
    }

    fn waits_for_host(&self, index: u16) -> bool {
        index % net::PAIR == RECEIVE
    }

    fn announce(&mut self, mac: [u8; 6]) {
        if let Err(error) = self.back_end.inject(&rarp(mac)) {
            tracing::warn!(%error, "cannot announce the migrated machine to the network; switches may send its frames to the old host");
        }
    }

    fn frames(&self) -> Option<Totals> {
        Some(self.counters.totals())
    }

    fn host_fds(&self) -> Vec<BorrowedFd<'_>> {
        self.back_end.fds()
    }

    fn state(&self) -> Vec<u8> {
        match self.commanded_pairs() {
            0 => Vec::new(),
            pairs => pairs.to_le_bytes().to_vec(),
        }
    }

    fn restore_state(&mut self, state: &[u8]) {
        match state {
            [] => self.restore_pairs(0),
            &[low, high] => self.restore_pairs(u16::from_le_bytes([low, high])),
            _ => {}
        }
    }

    fn tell_state(&mut self, told: Box<dyn Fn() + Send + Sync>) {
        // Fails if it was called before.
        self.commanded.told.set(told);
    }

    fn look(&mut self) -> HostSide {
        self.back_end.look()
    }

    fn tell_change(&mut self, told: Box<dyn Fn() + Send + Sync>) {
        self.back_end.tell_change(told);
    }

    fn follow_carrier(&mut self, is_told: bool) {
        self.follows = is_told;
    }

    fn link_is_up(&self) -> Option<bool> {
        Some(self.back_end.is_up() && (!self.follows || self.back_end.has_carrier()))
    }

    fn reset(&mut self) {
        (self.agreed, self.enabled) = (false, 1);
        // Relaxed: no control queue is served.
        self.commanded.pairs.store(0, Ordering::Relaxed);
        if let Err(error) = self.back_end.accept(0).and_then(|()| self.back_end.use_pairs(1)) {
            tracing::warn!(%error, "cannot reset the back end");
        }
    }
}

/// A broadcast RARP request of `mac` (RFC 903), which nobody answers.
///
/// Switches on its way learn the new port.
fn rarp(mac: [u8; 6]) -> [u8; 60] {
    let mut frame = [0; 60];
    frame[..6].fill(0xff);
    frame[6..12].copy_from_slice(&mac);
    // Ethertype; Ethernet, IPv4, their lengths, and the request; sender and target, with unknown
    // IPv4 addresses.
    frame[12..22].copy_from_slice(&[0x80, 0x35, 0, 1, 8, 0, 6, 4, 0, 3]);
    frame[22..28].copy_from_slice(&mac);
    frame[32..38].copy_from_slice(&mac);
    frame
}
