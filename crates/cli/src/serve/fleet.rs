//! The devices that are served, and what becomes of them.
//!
//! What starts and stops as one is a unit: a device, or the two cards of a link.
//!
//! ```text
//!   wanted:   Waiting --nothing it needs is held--> Opening --> Served        its devices are there
//!                ^     by one that is leaving       (a thread)    |
//!                |                                     '------> Failed        until the next reload
//!   a reload:    '-- the file has it, new or changed; or it has failed, or panicked
//!                    the file has it as it was: left alone, whatever else happens
//!                    the file has it not, or changed: -------------.
//!                                                                  v
//!   leaving:                                    Opening --> Stopping --> gone
//!                                            (stopped as    (sockets removed at once; requests in
//!                                             soon as open)  flight are finished, however long it takes)
//! ```
//! Nothing here waits: images are opened by a thread a unit, since storage may hang, and devices stop by themselves. One thread
//! calls [`Fleet::advance`] whenever [`Fleet::changed`] is signalled, which takes each unit one step further; so all changes of
//! state are made by one thread, and the lock is held for no longer than a look. A device that stops is given half of the stop
//! timeout; then requests of many parts are not continued.
mod member;
mod unit;

pub(crate) use member::open_one;

use super::open::{FarEnds, Opened};
use super::report::{self, Report};
use super::sandbox::Reach;
use super::spec::DeviceSpec;
use member::Member;
use paravane_vhost::{MappingPool, Notifier, caught};
use std::collections::{HashMap, HashSet};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixListener;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use unit::{Leaving, State, Unit, units};

/// Sockets that systemd has passed, by name. They are copied, so that a device can come back to its own.
pub(crate) type Sockets = HashMap<String, UnixListener>;

/// How long the outcome of a reload waits for devices to start and to stop.
const RELOAD: Duration = Duration::from_secs(1);

/// What devices are started with.
pub(crate) struct Surroundings {
    pub(crate) sockets: Sockets,
    /// `None`: there is no sandbox.
    pub(crate) reach: Option<Arc<Reach>>,
    /// How long a device may take to stop.
    pub(crate) stop_timeout: Duration,
    /// What VMMs may have mapped.
    pub(crate) pool: Arc<MappingPool>,
}

/// Members that were opened, or why they could not be.
type Start = Result<Vec<Member>, Vec<report::Failed>>;

struct Inner {
    /// In the order of the file.
    units: Vec<Unit>,
    leaving: Vec<Leaving>,
    /// What threads have opened since the last step.
    opened: Vec<(u64, Start)>,
    reload: Option<Reload>,
    last_reload: String,
    /// The same, with its time.
    outcome: Option<report::Reload>,
    next_id: u64,
}

/// A reload whose outcome is not known yet.
struct Reload {
    left_alone: usize,
    removed: usize,
    /// The units that it has added, or found on their way.
    added: HashSet<u64>,
    /// When its outcome is told at the latest.
    until: Instant,
}

struct Shared {
    inner: Mutex<Inner>,
    surroundings: Surroundings,
    changed: Arc<Notifier>,
    started: Instant,
}

/// All of them. Those who look on share it.
#[derive(Clone)]
pub(crate) struct Fleet(Arc<Shared>);

impl Fleet {
    /// Serves devices that are open.
    ///
    /// # Errors
    /// One cannot be served; then none is.
    pub(crate) fn start(
        opened: Vec<(DeviceSpec, Opened)>,
        surroundings: Surroundings,
    ) -> Result<Self, anyhow::Error> {
        let changed = Arc::new(Notifier::new(false)?);
        let specs: Vec<DeviceSpec> = opened.iter().map(|(spec, _)| spec.clone()).collect();
        let mut members: HashMap<String, Member> = HashMap::new();
        // Each has its share before the first VMM can take any.
        let quotas: Vec<_> = opened.iter().map(|_| surroundings.pool.quota()).collect();
        for ((spec, device), quota) in opened.into_iter().zip(quotas) {
            match Member::start(spec, device, quota, &surroundings.sockets, &changed) {
                Ok(member) => drop(members.insert(member.spec.name.clone(), member)),
                Err(error) => {
                    members.into_values().for_each(Member::stop);
                    return Err(error);
                }
            }
        }
        let mut inner = Inner {
            units: Vec::new(),
            leaving: Vec::new(),
            opened: Vec::new(),
            reload: None,
            last_reload: String::new(),
            outcome: None,
            next_id: 0,
        };
        for specs in units(specs) {
            let served = specs.iter().filter_map(|spec| members.remove(&spec.name)).collect();
            let mut unit = Unit::new(inner.id(), specs);
            unit.enter(State::Served(served));
            inner.units.push(unit);
        }
        let inner = Mutex::new(inner);
        Ok(Self(Arc::new(Shared { inner, surroundings, changed, started: Instant::now() })))
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.0.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Readable when [`Fleet::advance`] has something to do.
    pub(crate) fn changed(&self) -> BorrowedFd<'_> {
        self.0.changed.as_fd()
    }

    /// What makes [`Fleet::changed`] readable.
    pub(crate) fn notifier(&self) -> Arc<Notifier> {
        Arc::clone(&self.0.changed)
    }

    /// Makes the devices those of a new list. [`Fleet::advance`] carries it out, and tells the outcome.
    pub(crate) fn reload(&self, wanted: Vec<DeviceSpec>) {
        let mut inner = self.inner();
        inner.tell_outcome();
        let mut old = std::mem::take(&mut inner.units);
        let mut reload =
            Reload { left_alone: 0, removed: 0, added: HashSet::new(), until: Instant::now() + RELOAD };
        for specs in units(wanted) {
            let is_same = |unit: &Unit| unit.is_good() && unit.specs == specs;
            let unit = match old.iter().position(is_same) {
                Some(at) => {
                    let unit = old.remove(at);
                    match unit.state {
                        State::Served(_) => reload.left_alone += specs.len(),
                        _ => drop(reload.added.insert(unit.id)),
                    }
                    unit
                }
                None => {
                    let id = inner.id();
                    reload.added.insert(id);
                    Unit::new(id, specs)
                }
            };
            inner.units.push(unit);
        }
        reload.removed = old.into_iter().map(|unit| inner.leave(unit)).sum();
        inner.reload = Some(reload);
    }

    /// A new list could not be read; all stays as it is.
    pub(crate) fn refused(&self, why: &str) {
        tracing::error!("nothing was changed: {why}");
        let mut inner = self.inner();
        inner.last_reload = format!("nothing was changed: {why}");
        inner.outcome = Some(report::Reload::now(false));
    }

    /// Has all devices look at the host's side again, by their own threads: the drivers of disks whose images have another size
    /// are told.
    pub(crate) fn refresh(&self) {
        for member in self.inner().served() {
            member.export.refresh();
        }
    }

    /// Takes all units a step further, if they can go one. Returns for how long nothing is to be done unless [`Fleet::changed`]
    /// is readable, and whether the outcome of a reload was told.
    pub(crate) fn advance(&self) -> (Option<Duration>, bool) {
        let _ = self.0.changed.take();
        let mut inner = self.inner();
        inner.take_opened();
        inner.forget_ended();
        self.open_those_that_wait(&mut inner);
        let told =
            inner.reload.as_ref().is_some_and(|reload| inner.is_settled() || Instant::now() >= reload.until)
                && inner.tell_outcome();
        let patience = self.0.surroundings.stop_timeout / 2;
        let stopping = inner.leaving.iter().filter_map(|leaving| leaving.members.as_ref()).flatten();
        let hurry = stopping.filter_map(|member| member.hurry(patience));
        let reload =
            inner.reload.as_ref().map(|reload| reload.until.saturating_duration_since(Instant::now()));
        (hurry.chain(reload).min(), told)
    }

    /// Starts threads that open what is held up by nobody any more.
    fn open_those_that_wait(&self, inner: &mut Inner) {
        let Inner { units, leaving, .. } = inner;
        for unit in units.iter_mut().filter(|unit| matches!(unit.state, State::Waiting)) {
            if leaving.iter().any(|leaving| leaving.holds_up(&unit.specs).is_some()) {
                continue;
            }
            let (fleet, id, specs) = (self.clone(), unit.id, unit.specs.clone());
            let open = move || {
                let start = caught(|| fleet.open(&specs));
                let start = start.unwrap_or_else(|words| {
                    Err(all_failed(&specs, &format!("a thread of it panicked: {words}")))
                });
                fleet.inner().opened.push((id, start));
                fleet.0.changed.signal();
            };
            let name = format!("open-{}", unit.specs[0].name);
            unit.enter(match std::thread::Builder::new().name(name).spawn(open) {
                Ok(_) => State::Opening,
                Err(error) => {
                    State::Failed(all_failed(&unit.specs, &format!("no thread to open it: {error}")))
                }
            });
        }
    }

    /// Opens all devices of a unit, and serves them: all or none.
    fn open(&self, specs: &[DeviceSpec]) -> Start {
        let Surroundings { sockets, reach, pool, .. } = &self.0.surroundings;
        let quotas: Vec<_> = specs.iter().map(|_| pool.quota()).collect();
        let mut far_ends = FarEnds::default();
        let mut members = Vec::new();
        for (spec, quota) in specs.iter().zip(quotas) {
            let opened = open_one(spec, &mut far_ends, reach.as_deref());
            let member = opened
                .and_then(|device| Member::start(spec.clone(), device, quota, sockets, &self.0.changed));
            match member {
                Ok(member) => members.push(member),
                Err(error) => {
                    members.into_iter().for_each(Member::stop);
                    let why = |other: &DeviceSpec| match other.name == spec.name {
                        true => crate::one_line(&error),
                        false => "the other end of its link is not served".to_owned(),
                    };
                    let failed =
                        |spec: &DeviceSpec| report::Failed { name: spec.name.clone(), why: why(spec) };
                    return Err(specs.iter().map(failed).collect());
                }
            }
        }
        Ok(members)
    }

    /// How all are.
    pub(crate) fn report(&self) -> Report {
        let inner = self.inner();
        let stopping = inner.leaving.iter().filter_map(|leaving| leaving.members.as_ref()).flatten();
        let failed = inner.units.iter().filter_map(|unit| match &unit.state {
            State::Failed(failed) => Some(failed),
            _ => None,
        });
        Report {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            uptime_s: self.0.started.elapsed().as_secs_f64(),
            last_reload: inner.last_reload.clone(),
            reload: inner.outcome.clone(),
            devices: inner.served().chain(stopping).map(Member::report).collect(),
            failed: failed.flatten().cloned().collect(),
            waiting: inner.units.iter().flat_map(|unit| inner.waiting(unit)).collect(),
            ..Report::default()
        }
    }

    /// Tells all devices to stop. [`Fleet::is_gone`] says when they have.
    pub(crate) fn begin_stop(&self) {
        let mut inner = self.inner();
        inner.reload = None;
        let units = std::mem::take(&mut inner.units);
        for unit in units {
            inner.leave(unit);
        }
    }

    /// Whether nothing is served any more. What a thread still opens does not count: no request is in flight there.
    pub(crate) fn is_gone(&self) -> bool {
        let inner = self.inner();
        inner.units.is_empty() && inner.leaving.iter().all(|leaving| leaving.members.is_none())
    }

    /// Logs what is not done when the daemon ends without waiting for it.
    pub(crate) fn log_what_is_left(&self) {
        let inner = self.inner();
        let members = inner.leaving.iter().filter_map(|leaving| leaving.members.as_ref()).flatten();
        members.filter(|member| !member.export.has_ended()).for_each(Member::log_what_is_left);
    }
}

impl Inner {
    fn id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    fn served(&self) -> impl Iterator<Item = &Member> {
        let members = self.units.iter().filter_map(|unit| match &unit.state {
            State::Served(members) => Some(members),
            _ => None,
        });
        members.flatten()
    }

    /// A unit is not wanted any more. Says how many devices are to stop for that.
    fn leave(&mut self, unit: Unit) -> usize {
        let Unit { id, specs, state, .. } = unit;
        let members = match state {
            State::Waiting | State::Failed(_) => return 0,
            State::Opening => None,
            State::Served(mut members) => {
                members.iter_mut().for_each(Member::begin_stop);
                Some(members)
            }
        };
        let count = specs.len();
        self.leaving.push(Leaving { id, specs, since: Instant::now(), members });
        count
    }

    fn take_opened(&mut self) {
        for (id, start) in std::mem::take(&mut self.opened) {
            if let Some(unit) = self.units.iter_mut().find(|unit| unit.id == id) {
                unit.enter(match start {
                    Ok(members) => State::Served(members),
                    Err(failed) => {
                        for report::Failed { name, why } in &failed {
                            tracing::error!(device = name, "not served: {why}");
                        }
                        State::Failed(failed)
                    }
                });
            } else if let Some(at) = self.leaving.iter().position(|leaving| leaving.id == id) {
                // Nobody wants it any more.
                match start {
                    Ok(mut members) => {
                        members.iter_mut().for_each(Member::begin_stop);
                        self.leaving[at].members = Some(members);
                    }
                    Err(_) => drop(self.leaving.remove(at)),
                }
            }
        }
    }

    fn forget_ended(&mut self) {
        let (ended, leaving): (Vec<_>, _) =
            std::mem::take(&mut self.leaving).into_iter().partition(Leaving::has_ended);
        self.leaving = leaving;
        for spec in ended.iter().flat_map(|leaving| &leaving.specs) {
            tracing::info!(device = spec.name, "stopped");
        }
    }

    /// Whether nothing is on its way.
    fn is_settled(&self) -> bool {
        let rests = |unit: &Unit| matches!(unit.state, State::Served(_) | State::Failed(_));
        self.leaving.is_empty() && self.units.iter().all(rests)
    }

    /// What came of a reload, if there is one: it was told.
    fn tell_outcome(&mut self) -> bool {
        let Some(Reload { left_alone, removed, added, .. }) = self.reload.take() else { return false };
        let count = |wanted: fn(&State) -> bool| -> usize {
            let units = self.units.iter().filter(|unit| added.contains(&unit.id) && wanted(&unit.state));
            units.map(|unit| unit.specs.len()).sum()
        };
        let there = count(|state| matches!(state, State::Served(_)));
        let failed = count(|state| matches!(state, State::Failed(_)));
        let mut outcome =
            format!("{left_alone} devices left alone, {removed} removed, {there} added, {failed} failed");
        let waiting = count(|state| matches!(state, State::Waiting | State::Opening));
        let stopping: usize = self.leaving.iter().map(|leaving| leaving.specs.len()).sum();
        for (count, what) in [(stopping, "still stopping"), (waiting, "not started yet")] {
            if count > 0 {
                outcome += &format!(", {count} {what}");
            }
        }
        tracing::info!("{outcome}");
        self.last_reload = outcome;
        self.outcome = Some(report::Reload::now(failed == 0));
        true
    }

    /// What the devices of a unit wait for, if they do.
    fn waiting(&self, unit: &Unit) -> Vec<report::Waiting> {
        let why = match unit.state {
            State::Waiting => {
                let holder = self
                    .leaving
                    .iter()
                    .find_map(|leaving| leaving.holds_up(&unit.specs).map(|device| (device, leaving)));
                match holder {
                    Some((device, Leaving { members: Some(members), since, .. })) => {
                        let in_flight: u64 = members.iter().map(Member::in_flight).sum();
                        let seconds = since.elapsed().as_secs();
                        format!(
                            "device {} to stop, for {seconds} s ({in_flight} requests in flight)",
                            device.name
                        )
                    }
                    Some((device, _)) => format!("device {} to be opened, and to stop", device.name),
                    None => "its turn".to_owned(),
                }
            }
            State::Opening => "the host, to open what it needs".to_owned(),
            State::Served(_) | State::Failed(_) => return Vec::new(),
        };
        let seconds = unit.since.elapsed().as_secs_f64();
        let waiting =
            |spec: &DeviceSpec| report::Waiting { name: spec.name.clone(), why: why.clone(), seconds };
        unit.specs.iter().map(waiting).collect()
    }
}

fn all_failed(specs: &[DeviceSpec], why: &str) -> Vec<report::Failed> {
    let failed = |spec: &DeviceSpec| report::Failed { name: spec.name.clone(), why: why.to_owned() };
    specs.iter().map(failed).collect()
}

#[cfg(test)]
mod tests;
