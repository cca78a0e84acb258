//! Network cards.
pub(crate) mod args;
mod checks;
mod doctor;
mod metrics;
mod open;
pub(crate) mod spec;
mod texts;
mod together;
mod told;

use super::changes::{Change, Effect, differences};
use super::checked::OptionError;
use super::endpoint::EndpointArgs;
use super::kind::{Arguments, Claim, Descriptors, Kind, Resource, Spec};
use super::observe::Observe;
use super::opening::{Earlier, LinkEnds, OpenContext, Opening};
use crate::doctor::finding::Finding;
use crate::doctor::negotiated::QueueUse;
use crate::mac;
use crate::serve::report::Settings;
use crate::serve::sandbox::paths::AllowedPaths;
use crate::serve::told::{MISSING, QUEUES, Told};
use args::NetArgs;
use open::CardObserver;
use rustix::thread::CapabilitySet;
use spec::{Net, Network};
use std::any::Any;
use std::sync::Arc;
use told::{MAC, MTU, OFFLOADS};

pub(crate) static NET: Kind = Kind {
    check_together: together::check,
    recorded: told::recorded,
    accepted: told::accepted,
    checks: checks::CHECKS,
    metrics: metrics::METRICS,
    queue_use: QueueUse::Pairs,
    // Buffers for frames that have not come yet are left in the ring.
    takes_at_once: |queue| queue % 2 == 1,
    ..Kind::new::<NetArgs>("net", texts::TEXTS, texts::FEATURES)
};

impl Arguments for NetArgs {
    fn check(&self, name: &str, endpoint: &EndpointArgs) -> Result<Arc<dyn Spec>, OptionError> {
        Ok(Arc::new(Net::new(self, name, endpoint)?))
    }
}

impl Spec for Net {
    fn kind(&self) -> &'static Kind {
        &NET
    }

    fn is(&self, other: &dyn Spec) -> bool {
        (other as &dyn Any).downcast_ref() == Some(self)
    }

    fn claims(&self) -> Vec<Claim> {
        let claim = |name: &str| Claim {
            option: "tap",
            resource: Resource::Interface(name.to_owned()),
            shares: false,
            writes: true,
        };
        self.tap().map(claim).into_iter().collect()
    }

    fn tap(&self) -> Option<&str> {
        match &self.network {
            Network::Tap(name) => Some(name),
            _ => None,
        }
    }

    fn link(&self) -> Option<&str> {
        match &self.network {
            Network::Link(name) => Some(name),
            _ => None,
        }
    }

    fn allow(&self, allowed: &mut AllowedPaths, _: bool) {
        if self.tap().is_some() {
            allowed.taps();
            allowed.net_admin = true;
        }
    }

    fn capabilities(&self, reload: bool) -> CapabilitySet {
        match reload && self.tap().is_some() {
            true => CapabilitySet::NET_ADMIN,
            false => CapabilitySet::empty(),
        }
    }

    fn descriptors(&self) -> Descriptors {
        Descriptors { own: 0, queues: 2 * u64::from(self.queues) + 1 }
    }

    fn examine(&self) -> Vec<Finding> {
        self.tap().map(|tap| doctor::tap(tap, self.queues)).into_iter().collect()
    }

    fn open(
        &self,
        _: &str,
        _: &OpenContext,
        link_ends: &mut LinkEnds,
        earlier: Earlier,
    ) -> Result<Opening, anyhow::Error> {
        open::card(self, link_ends, earlier.fds).map(Into::into)
    }

    fn prepare(&self, _: &str, _: &OpenContext) -> Result<Option<Opening>, anyhow::Error> {
        // Claimed by the daemon that serves it.
        Ok(self.tap().map(|_| Opening::Late(Told::default())))
    }

    fn in_order(&self) -> bool {
        true
    }

    fn told(&self, told: &mut Told) {
        told.put(MAC, mac::text(&self.mac));
        told.put(QUEUES, self.queues);
        if let Some(mtu) = self.mtu {
            told.put(MTU, mtu);
        }
    }

    fn missing(&self, told: &mut Told) {
        if !self.offloads {
            told.put(OFFLOADS, MISSING);
        }
        if self.mtu.is_none() {
            told.put(MTU, MISSING);
        }
    }

    fn changes(&self, wanted: &dyn Spec, all: &mut Change) {
        let Some(wanted) = (wanted as &dyn Any).downcast_ref::<Self>() else { return };
        let network_key = match &wanted.network {
            Network::Tap(_) | Network::TapFds(_) => "tap",
            Network::Link(_) => "link",
            Network::Echo(_) => "echo",
            Network::Sink => "sink",
            Network::Source(_) => "source",
        };
        all.add(network_key, Effect::Session, self.network != wanted.network);
        differences!(
            all, Net, self, wanted,
            mac "mac" Restart,
            queues "queues" Restart,
            queue_size "queue-size" Restart,
            mtu "mtu" Restart,
            offloads "no-offloads" Restart;
            but network announce limit
        );
        all.limit(self.limit, wanted.limit);
    }

    fn with_settings(&self, wanted: &dyn Spec) -> Option<Arc<dyn Spec>> {
        let &Self { limit, .. } = (wanted as &dyn Any).downcast_ref()?;
        Some(Arc::new(Self { limit, ..self.clone() }))
    }

    fn apply(&self, observer: &dyn Observe) {
        if let Some(card) = (observer as &dyn Any).downcast_ref::<CardObserver>() {
            card.change(self);
        }
    }

    fn settings(&self, settings: &mut Settings) {
        settings.limit(self.limit);
    }
}
