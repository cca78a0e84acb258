//! Network card (virtio specification, section 5.1).
//!
//! ```text
//! NetConfig, BackEnd (Tap, LinkEnd, Generator) --new--> Net
//!    | start_queue
//!    v
//! Receive, one a pair       back end -> buffers of the driver          receive.rs
//! Transmit, one a pair      frames of the driver -> back end           transmit.rs
//!    checked before anyone computes with what the driver says          header.rs
//! Control                   how many pairs are in use                  control.rs
//! ```
//! What a hostile driver sends as a frame is dropped and counted ([`Counters`]); what it does to a queue latches that.
mod back_end;
mod control;
mod counters;
mod echo_peer;
mod extension;
mod generator;
mod header;
mod limited;
mod link;
mod receive;
mod tap;
#[cfg(test)]
mod tests;
mod transmit;
mod wakeup;

pub use back_end::{BackEnd, Incoming, Outgoing, Receiver, Sender, Sent};
pub use counters::{Counters, Totals};
pub use extension::{NetDevice, NetQueue};
pub use generator::Generator;
pub use limited::{Limited, LimitedReceiver, LimitedSender};
pub use link::LinkEnd;
pub use tap::{Tap, TapError};

use crate::{Device, QueueHandler};
use control::Control;
use paravane_ring::device::QueueConfig;
use paravane_spec::net::{
    self, Config, F_CTRL_VQ, F_GUEST_ANNOUNCE, F_MAC, F_MQ, F_MRG_RXBUF, F_MTU, F_STATUS, MIN_MTU, RECEIVE,
    S_LINK_UP, TRANSMIT,
};
use paravane_spec::{feature, queue};
use receive::Receive;
use std::io;
use std::sync::Arc;
use thiserror::Error;
use transmit::Transmit;
use zerocopy::IntoBytes;

/// The control queue is no smaller than this, and else as large as the others: some VMMs make all queues of one size (User Mode
/// Linux 256, crosvm 1024).
const CONTROL_SIZE: u16 = 64;

/// How a card is to look to its driver.
#[derive(Clone, Debug)]
pub struct NetConfig {
    /// Its address.
    pub mac: [u8; 6],
    /// Largest packet in bytes, without the Ethernet header; not offered if `None`.
    pub mtu: Option<u16>,
    /// Offer what the back end can do of checksums and segmentation.
    pub offloads: bool,
    /// Offer to the driver that it announces itself where its machine has moved, and for that a control queue. Who moves the
    /// machine asks it to (QEMU, which keeps that queue for itself).
    pub announce: bool,
    /// Largest size of each queue; rounded down to a power of two, from 2 to 32768.
    pub queue_size: u16,
}

impl NetConfig {
    /// Queues of 256, all offloads, no word on the MTU, and no announcements.
    #[must_use]
    pub fn new(mac: [u8; 6]) -> Self {
        Self { mac, mtu: None, offloads: true, announce: false, queue_size: 256 }
    }
}

/// Why there cannot be such a card.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum NetError {
    /// the address {0:02x?} is no card's: it is all zeroes, or a group's
    #[error("the address {0:02x?} is no card's: it is all zeroes, or a group's")]
    Mac([u8; 6]),
    /// an MTU of {0} bytes is less than 68
    #[error("an MTU of {0} bytes is less than 68")]
    Mtu(u16),
    /// {0} pairs of queues are not from 1 to 32768
    #[error("{0} pairs of queues are not from 1 to 32768")]
    Pairs(u16),
}

/// A network card.
#[derive(Debug)]
pub struct Net<B> {
    config: NetConfig,
    back_end: Arc<B>,
    queue_sizes: Vec<u16>,
    counters: Arc<Counters>,
    /// The back end knows what the driver has accepted.
    agreed: bool,
    /// Pairs that are in use, where the driver does not say so in a control queue of ours.
    enabled: u16,
}

impl<B: BackEnd> Net<B> {
    /// A card that is connected to `back_end`.
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
            tracing::warn!(mtu, network, "the network's MTU is below the card's: larger packets are lost");
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
        })
    }

    /// What it counts, also while it is in use.
    #[must_use]
    pub fn counters(&self) -> Arc<Counters> {
        Arc::clone(&self.counters)
    }

    fn pairs(&self) -> u16 {
        self.back_end.pairs()
    }

    /// Tells the back end what the driver has accepted, once a life. A driver that knows of more pairs than one starts
    /// with one all the same (section 5.1.6.5.6).
    fn agree(&mut self, features: u64) -> io::Result<()> {
        if !self.agreed {
            self.back_end.accept(features)?;
            self.back_end.use_pairs(self.enabled)?;
            self.agreed = true;
        }
        Ok(())
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
            status: S_LINK_UP.to_le(),
            max_virtqueue_pairs: self.pairs().to_le(),
            mtu: self.config.mtu.unwrap_or(0).to_le(),
        };
        crate::read_config(config.as_bytes(), offset, out);
    }

    fn start_queue(&mut self, index: u16, features: u64) -> io::Result<Box<dyn QueueHandler>> {
        let Some(&size) = self.queue_sizes.get(usize::from(index)) else {
            let what = format!("the network card has no queue {index}");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        };
        self.agree(features)?;
        // Section 5.1.2: the control queue comes after the pairs that a driver knows of.
        let pairs = if features & F_MQ != 0 { self.pairs() } else { 1 };
        if index >= pairs * net::PAIR {
            return Ok(Box::new(Control::new(Arc::clone(&self.back_end), features)));
        }
        let (pair, counters) = (index / net::PAIR, self.counters());
        const { assert!(RECEIVE == 0 && TRANSMIT == 1) };
        Ok(if index % net::PAIR == RECEIVE {
            Box::new(Receive::new(self.back_end.receiver(pair)?, features, size, counters))
        } else {
            Box::new(Transmit::new(self.back_end.sender(pair)?, features, counters))
        })
    }

    fn net(&mut self) -> Option<&mut dyn NetDevice> {
        Some(self)
    }

    fn reset(&mut self) {
        (self.agreed, self.enabled) = (false, 1);
        if let Err(error) = self.back_end.accept(0).and_then(|()| self.back_end.use_pairs(1)) {
            tracing::warn!(%error, "the network's back end does not go back to its beginning");
        }
    }
}

impl<B: BackEnd> NetDevice for Net<B> {
    fn enable_queues(&mut self, count: u16) {
        let pairs = count / net::PAIR;
        // With the control queue, it is there that the driver says so.
        let pairs = if usize::from(count) > usize::from(self.pairs() * net::PAIR) { 1 } else { pairs.max(1) };
        if pairs == self.enabled {
            return;
        }
        self.enabled = pairs;
        if self.agreed
            && let Err(error) = self.back_end.use_pairs(pairs)
        {
            tracing::warn!(pairs, %error, "the network's back end does not change its queues");
        }
    }

    fn announce(&mut self, mac: [u8; 6]) {
        if let Err(error) = self.back_end.inject(&rarp(mac)) {
            tracing::warn!(%error, "the network was not told that the machine has moved");
        }
    }
}

/// A question for the address of protocols that belongs to `mac` (RFC 903), to all: switches on its way learn where that is, and
/// nobody answers.
fn rarp(mac: [u8; 6]) -> [u8; 60] {
    let mut frame = [0; 60];
    frame[..6].fill(0xff);
    frame[6..12].copy_from_slice(&mac);
    // Ethertype; Ethernet, IPv4, their lengths, and the question; sender and target, whose IPv4 addresses are not known.
    frame[12..22].copy_from_slice(&[0x80, 0x35, 0, 1, 8, 0, 6, 4, 0, 3]);
    frame[22..28].copy_from_slice(&mac);
    frame[32..38].copy_from_slice(&mac);
    frame
}
