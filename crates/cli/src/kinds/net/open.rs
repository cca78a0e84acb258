//! Opens network cards.
use super::spec::{Net, Network};
use crate::kinds::observe::Observe;
use crate::kinds::opening::{LinkEnds, Opened};
use crate::serve::report;
use anyhow::Context;
use paravane_device::Limiter;
use paravane_device::net::{self, BackEnd, Counters, Generator, Limited, LinkEnd, Tap};
use paravane_export::ExportStatus;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// Opens a card, with the queues of its TAP device that were kept for it.
///
/// # Errors
/// Its network cannot be opened.
pub(super) fn card(net: &Net, link_ends: &mut LinkEnds, kept: Vec<OwnedFd>) -> Result<Opened, anyhow::Error> {
    match &net.network {
        Network::Tap(name) => {
            let resumed = (kept.len() == usize::from(net.queues)).then(|| Tap::resume(name, kept));
            let tap = match resumed {
                Some(Ok(tap)) => tap,
                Some(Err(error)) => {
                    tracing::warn!("TAP device opened anew, and frames in its queues are lost: {error}");
                    Tap::open(name, net.queues)?
                }
                None => Tap::open(name, net.queues)?,
            };
            over(net, tap, format!("tap {name}"))
        }
        Network::Link(name) => {
            let end = match link_ends.0.remove(name) {
                Some(end) => end,
                None => {
                    let (near, far) = LinkEnd::pair(net.queues).context("cannot create a link")?;
                    link_ends.0.insert(name.clone(), far);
                    near
                }
            };
            let hold = end.hold();
            Ok(Opened { hold: Some(Box::new(hold)), ..over(net, end, format!("link {name}"))? })
        }
        Network::TapFds(numbers) => over(net, Tap::inherited(numbers)?, "tap".to_owned()),
        Network::Echo(len) => {
            let end = match len {
                None => LinkEnd::echo(net.queues),
                Some(len) => LinkEnd::echo_of_len(net.queues, *len as usize),
            };
            over(net, end.context("cannot create an echo")?, "echo".to_owned())
        }
        Network::Sink => over(net, Generator::new(net.queues, 0, 64)?, "sink".to_owned()),
        Network::Source(len) => {
            over(net, Generator::new(net.queues, u64::MAX, *len as usize)?, format!("source of {len} bytes"))
        }
    }
}

/// A card over this network.
fn over<B: BackEnd>(net: &Net, end: B, back_end: String) -> Result<Opened, anyhow::Error> {
    // Without limits they hold nothing, and a reload can set some.
    let limiters = [Limiter::new(net.limit), Limiter::new(net.limit)];
    let [transmit, receive] = limiters.clone();
    let end = Limited::new(end, transmit, receive);
    let config = net::NetConfig {
        mtu: net.mtu,
        offloads: net.offloads,
        queue_size: net.queue_size,
        announce: net.announce,
        ..net::NetConfig::new(net.mac)
    };
    let card = net::Net::new(config, end)?;
    let observer = Box::new(CardObserver { counters: card.counters(), limiters });
    Ok(Opened { device: Box::new(card), observer, back_end, hold: None })
}

/// A card while it is served.
pub(super) struct CardObserver {
    counters: Arc<Counters>,
    /// Of each direction.
    limiters: [Arc<Limiter>; 2],
}

impl CardObserver {
    /// Applies settings that change in place.
    pub(super) fn change(&self, net: &Net) {
        self.limiters.iter().for_each(|limiter| limiter.set(net.limit));
    }
}

impl Observe for CardObserver {
    fn report(&self, device: &mut report::Device, export: &ExportStatus) {
        device.throttled = self.limiters.iter().map(|limiter| limiter.times_held()).sum();
        let totals = self.counters.totals();
        device.net = Some(report::Net {
            transmitted_frames: totals.transmitted,
            transmitted_bytes: totals.transmitted_bytes,
            received_frames: totals.received,
            received_bytes: totals.received_bytes,
            dropped_frames: totals.malformed + totals.refused + totals.no_room,
            malformed_frames: totals.malformed,
            refused_frames: totals.refused,
            no_room_frames: totals.no_room,
            unusable_buffers: totals.unusable,
            link_up: export.link_is_up.unwrap_or_default(),
        });
    }
}
