//! Devices that start and stop together: one device, or the two cards of a link.
use super::super::report;
use super::super::spec::DeviceSpec;
use super::lock_wait::LockWait;
use super::next::{Handing, Next};
use super::served::ServedDevice;
use crate::kinds::kind::Claim;
use crate::kinds::opening::Opening;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Devices of the file that start and stop together.
pub(super) struct Group {
    pub(super) id: u64,
    /// In the order of the file.
    pub(super) specs: Vec<DeviceSpec>,
    pub(super) state: State,
    /// Devices that were opened when the daemon started, by name.
    pub(super) ahead: HashMap<String, Opening>,
    /// When it entered this state.
    pub(super) since: Instant,
    /// Why it failed, while it tries again.
    retried: Vec<report::Failed>,
    /// Number of failures in a row.
    failures: u32,
    /// Settings for which its devices have to be opened again, while it is served.
    pub(super) next: Option<Next>,
    /// It opens devices for sessions of others, which hand over.
    pub(super) has_session: bool,
}

/// Time until a group that has failed tries again: the first one, and the longest.
const RETRY: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(30)];

/// See the module `exports`.
pub(super) enum State {
    Waiting,
    Opening(Arc<LockWait>),
    Served(Vec<ServedDevice>),
    Failed(Vec<report::Failed>),
}

/// A removed group whose devices have not ended.
pub(super) struct Leaving {
    pub(super) id: u64,
    pub(super) specs: Vec<DeviceSpec>,
    pub(super) since: Instant,
    /// `None`: a thread is still opening them.
    pub(super) members: Option<Vec<ServedDevice>>,
    /// Where it hands over to, within this daemon.
    pub(super) exchange: Option<Handing>,
    /// The thread opens them for sessions that were handed over.
    pub(super) has_session: bool,
}

impl Group {
    pub(super) fn new(id: u64, specs: Vec<DeviceSpec>) -> Self {
        let (ahead, retried) = (HashMap::new(), Vec::new());
        Self {
            id,
            specs,
            state: State::Waiting,
            ahead,
            since: Instant::now(),
            retried,
            failures: 0,
            next: None,
            has_session: false,
        }
    }

    pub(super) fn enter(&mut self, state: State) {
        match &state {
            State::Failed(_) => self.failures = self.failures.saturating_add(1),
            State::Served(_) => (self.failures, self.retried) = (0, Vec::new()),
            State::Waiting | State::Opening(_) => {}
        }
        self.has_session &= !matches!(state, State::Served(_) | State::Failed(_));
        (self.state, self.since) = (state, Instant::now());
    }

    /// Time until it tries again; `None`: it has not failed.
    pub(super) fn time_to_retry(&self) -> Option<Duration> {
        let State::Failed(_) = self.state else { return None };
        let delay = RETRY[0].saturating_mul(1 << (self.failures.clamp(1, 10) - 1)).min(RETRY[1]);
        Some(delay.saturating_sub(self.since.elapsed()))
    }

    /// Tries again, if its time has come.
    pub(super) fn try_again(&mut self) {
        if self.time_to_retry().is_some_and(|time| time.is_zero())
            && let State::Failed(failed) = std::mem::replace(&mut self.state, State::Waiting)
        {
            (self.retried, self.since) = (failed, Instant::now());
        }
    }

    /// Why its devices are not served, also while it tries again.
    pub(super) fn failures(&self) -> &[report::Failed] {
        match &self.state {
            State::Failed(failed) => failed,
            State::Waiting | State::Opening(_) => &self.retried,
            State::Served(_) => &[],
        }
    }

    /// Whether it has failed, and is not served since.
    pub(super) fn has_failed(&self) -> bool {
        !self.failures().is_empty()
    }

    /// Whether these failures are known already.
    pub(super) fn is_known(&self, failed: &[report::Failed]) -> bool {
        self.retried == failed
    }

    /// Whether a reload with the same specifications leaves the group alone.
    pub(super) fn is_good(&self) -> bool {
        match &self.state {
            State::Waiting | State::Opening(_) => true,
            State::Served(members) => !members.iter().any(|member| member.export.has_failed()),
            State::Failed(_) => false,
        }
    }
}

impl Leaving {
    pub(super) fn new(id: u64, specs: Vec<DeviceSpec>, members: Option<Vec<ServedDevice>>) -> Self {
        Self { id, specs, since: Instant::now(), members, exchange: None, has_session: false }
    }

    pub(super) fn has_ended(&self) -> bool {
        self.members.as_ref().is_some_and(|members| {
            members.iter().all(|member| member.export.has_ended() && !member.handing_over)
        })
    }

    /// Hands its devices over to their successors, when they are gone.
    pub(super) fn hand_on(&mut self) {
        let (Some(sender), Some(members)) = (&self.exchange, &mut self.members) else { return };
        // A successor needs the image, or the TAP device.
        let drained = members.iter_mut().filter(|member| member.handing_over && member.export.has_ended());
        for member in drained {
            if let Some(state) = member.take_exchange() {
                drop(sender.send((member.spec.name.clone(), state)));
            }
        }
    }

    /// A device of this group that holds a resource which one of `specs` needs.
    pub(super) fn holds_up(&self, specs: &[DeviceSpec]) -> Option<&DeviceSpec> {
        self.specs.iter().find(|old| specs.iter().any(|new| collide(old, new)))
    }
}

/// Divides devices into groups, in the order of the file.
pub(super) fn groups(devices: Vec<DeviceSpec>) -> Vec<Vec<DeviceSpec>> {
    let mut groups: Vec<Vec<DeviceSpec>> = Vec::new();
    let mut links: HashMap<String, usize> = HashMap::new();
    for device in devices {
        let link = device.kind.link().map(|link| *links.entry(link.to_owned()).or_insert(groups.len()));
        match link.and_then(|group| groups.get_mut(group)) {
            Some(group) => group.push(device),
            None => groups.push(vec![device]),
        }
    }
    groups
}

/// Whether two devices exclude each other.
///
/// They do with the same name, or with something of the host that one of them changes.
pub(super) fn collide(one: &DeviceSpec, other: &DeviceSpec) -> bool {
    let claims = other.claims();
    let excludes = |claim: &Claim| {
        claims.iter().any(|other| claim.resource == other.resource && (claim.writes || other.writes))
    };
    one.name == other.name || one.claims().iter().any(excludes)
}
