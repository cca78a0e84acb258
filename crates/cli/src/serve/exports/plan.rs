//! What a reload does with each device: decided at once, under the lock of all devices.
//!
//! ```text
//!   file --groups--> the same devices as a group that is there?
//!     no difference ----------------------------------------------> left alone
//!     settings that apply to a device in use ----------------------> changed in place
//!     others, no client is connected ------------------------------> restarted
//!     others, and the guest would find the same device -----------> exchanged: its session goes on (`exchange`)
//!     others --may they restart? (Restarts)--yes------------------> restarted: its client has to reconnect
//!                                          '-no-------------------> refused: it goes on as it was
//!   in no group of the file: removed
//! ```
//! What needs a resource of a device that is refused is refused, too.
use super::super::reload::messages::{DeviceOutcome, Outcome};
use super::super::spec::DeviceSpec;
use super::group::{Group, State, collide};
use super::served::ServedDevice;
use crate::kinds::changes::{Change, Effect};
use std::collections::{BTreeSet, HashMap};
use std::time::{Duration, Instant};

/// Devices that may restart though their clients have to reconnect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Restarts {
    All,
    /// Those of these names.
    Named(BTreeSet<String>),
}

impl Restarts {
    fn allow(&self, name: &str) -> bool {
        match self {
            Self::All => true,
            Self::Named(names) => names.contains(name),
        }
    }
}

/// What a reload does with one device.
#[derive(Clone, Debug)]
pub(super) struct Step {
    pub(super) name: String,
    pub(super) goal: Outcome,
    pub(super) keys: Vec<&'static str>,
    pub(super) why: Option<String>,
    /// Number of the group that has to be served, or to be gone.
    pub(super) group: Option<u64>,
}

/// What happens to the devices of a group of the file.
pub(super) enum Fate {
    /// The group with this index stays.
    Stays(usize),
    /// It stays, with these settings.
    Changes(usize, Vec<DeviceSpec>),
    /// It is opened again, and keeps its sessions if it can; else it restarts, if it may.
    Exchanges { at: usize, specs: Vec<DeviceSpec>, may_restart: bool },
    /// They begin anew, when the groups that have their names have stopped.
    Begins(Vec<DeviceSpec>),
}

/// Devices of the file that start and stop together, with what a reload does.
struct Planned {
    specs: Vec<DeviceSpec>,
    steps: Vec<Step>,
    fate: Fate,
    /// Indices of groups that have devices of these names.
    old: Vec<usize>,
}

/// A whole reload.
pub(super) struct Plan {
    pub(super) fates: Vec<(Fate, Vec<Step>)>,
    /// Groups that stop, by their indices, with those of their devices that are removed.
    pub(super) removed: Vec<(usize, Vec<Step>)>,
}

/// A reload, the last one.
pub(super) struct Reload {
    /// Names it.
    pub(super) number: u64,
    pub(super) steps: Vec<Step>,
    /// Deadline for reporting the outcome.
    pub(super) until: Instant,
    pub(super) is_reported: bool,
}

impl Reload {
    /// Time until its outcome is reported at the latest.
    pub(super) fn time_to_report(&self) -> Option<Duration> {
        (!self.is_reported).then(|| self.until.saturating_duration_since(Instant::now()))
    }
}

impl Plan {
    /// What a file with these groups does to `old`.
    pub(super) fn new(old: &[Group], wanted: Vec<Vec<DeviceSpec>>, restarts: &Restarts) -> Self {
        let mut planned: Vec<_> =
            wanted.into_iter().map(|specs| Planned::new(old, specs, restarts)).collect();
        while refuse_what_collides(old, &mut planned) {}
        // Groups that stay, refused ones once.
        let mut staying = BTreeSet::new();
        let mut fates = Vec::new();
        for Planned { steps, fate, old, .. } in planned {
            match &fate {
                Fate::Stays(at) | Fate::Changes(at, _) | Fate::Exchanges { at, .. } => {
                    if staying.insert(*at) {
                        fates.push((fate, steps));
                    } else if let Some((_, others)) = fates.iter_mut().find(|(fate, _)| fate.is_of(*at)) {
                        others.extend(steps);
                    }
                    // Cards that were of two links, for example.
                    for at in old.into_iter().filter(|at| staying.insert(*at)) {
                        fates.push((Fate::Stays(at), Vec::new()));
                    }
                }
                Fate::Begins(_) => fates.push((fate, steps)),
            }
        }
        let named: BTreeSet<String> =
            fates.iter().flat_map(|(_, steps)| steps.iter().map(|step| step.name.clone())).collect();
        let removed = (0..old.len()).filter(|at| !staying.contains(at));
        let removed = removed.map(|at| {
            let gone = old[at].specs.iter().filter(|spec| !named.contains(&spec.name));
            let gone = gone.map(|spec| Step::new(&spec.name, Outcome::Removed).of(old[at].id)).collect();
            (at, gone)
        });
        let removed = removed.collect();
        Self { fates, removed }
    }

    /// Names of all devices that it has something to say of.
    pub(super) fn outcomes(&self) -> Vec<DeviceOutcome> {
        let steps = self.fates.iter().flat_map(|(_, steps)| steps);
        steps.chain(self.removed.iter().flat_map(|(_, steps)| steps)).map(Step::outcome).collect()
    }
}

impl Fate {
    fn is_of(&self, group: usize) -> bool {
        match self {
            Self::Stays(at) | Self::Changes(at, _) | Self::Exchanges { at, .. } => *at == group,
            Self::Begins(_) => false,
        }
    }
}

impl Step {
    pub(super) fn new(name: &str, goal: Outcome) -> Self {
        Self { name: name.to_owned(), goal, keys: Vec::new(), why: None, group: None }
    }

    fn of(self, group: u64) -> Self {
        Self { group: Some(group), ..self }
    }

    fn with(self, change: &Change) -> Self {
        Self { keys: change.keys.clone(), ..self }
    }

    /// As far as the plan knows.
    pub(super) fn outcome(&self) -> DeviceOutcome {
        let keys = self.keys.iter().map(|key| (*key).to_owned()).collect();
        DeviceOutcome { name: self.name.clone(), outcome: self.goal, keys, why: self.why.clone() }
    }

    /// Logs what happens to a device that is served.
    pub(super) fn log(&self) {
        let (device, keys) = (&self.name, self.keys.join(", "));
        match self.goal {
            Outcome::Changed => tracing::info!(device, "device changed in place: {keys}"),
            Outcome::Restarted => {
                let why = self.why.as_ref().map(|why| format!("; {why}")).unwrap_or_default();
                tracing::warn!(device, "device restarts, a client has to reconnect: changed: {keys}{why}");
            }
            Outcome::Refused => {
                tracing::warn!(device, "change refused: {keys}: {}", self.why.as_deref().unwrap_or_default());
            }
            _ => {}
        }
    }

    /// Leaves the device as it was.
    pub(super) fn refuse(&mut self, why: String) {
        (self.goal, self.why, self.group) = (Outcome::Refused, Some(why), None);
    }
}

/// Why a restart of a device is refused, and the way out.
pub(super) fn ends_session(name: &str, why: &str) -> String {
    format!("{why}: its client would have to reconnect; restart it with --restart {name}")
}

impl Planned {
    fn new(all: &[Group], specs: Vec<DeviceSpec>, restarts: &Restarts) -> Self {
        let has = |group: &Group| group.specs.iter().any(|old| specs.iter().any(|new| new.name == old.name));
        let old: Vec<usize> = (0..all.len()).filter(|&at| has(&all[at])).collect();
        let is_same = |group: &Group| {
            let names =
                |specs: &[DeviceSpec]| specs.iter().map(|spec| spec.name.clone()).collect::<BTreeSet<_>>();
            names(&group.specs) == names(&specs)
        };
        match old.as_slice() {
            [] => {
                let steps = specs.iter().map(|spec| Step::new(&spec.name, Outcome::Added)).collect();
                Self { fate: Fate::Begins(specs.clone()), specs, steps, old }
            }
            [at] if is_same(&all[*at]) => Self::of_group(*at, &all[*at], specs, restarts),
            _ => Self::of_groups(all, old, specs, restarts),
        }
    }

    /// For the devices of one group, in another order perhaps.
    fn of_group(at: usize, group: &Group, specs: Vec<DeviceSpec>, restarts: &Restarts) -> Self {
        let of = |name: &str| group.specs.iter().find(|old| old.name == name);
        let change =
            |new: &DeviceSpec| of(&new.name).map_or_else(Change::default, |old| Change::between(old, new));
        let changes: Vec<_> = specs.iter().map(change).collect();
        let members = match &group.state {
            State::Served(members) if group.is_good() => Some(members),
            _ => None,
        };
        let has_client = members.is_some_and(|members| members.iter().any(ServedDevice::has_client));
        let may_restart = members.is_some_and(|members| may_restart(members, restarts));
        let begins = || Fate::Begins(specs.clone());
        let effect = changes.iter().filter_map(|change| change.effect).max();
        let (goal, fate) = match (members, effect) {
            (None, Some(_)) if matches!(group.state, State::Opening(_)) && group.has_session => {
                (Outcome::Refused, Fate::Stays(at))
            }
            // On its way.
            (None, None) if group.is_good() => (Outcome::Added, Fate::Stays(at)),
            (None, None) => (Outcome::Added, begins()),
            (None, Some(_)) => (Outcome::Restarted, begins()),
            (Some(_), None) => (Outcome::Unchanged, Fate::Stays(at)),
            (Some(_), Some(Effect::InPlace)) => (Outcome::Changed, Fate::Changes(at, specs.clone())),
            (Some(_), Some(_)) if !has_client => (Outcome::Restarted, begins()),
            (Some(_), Some(Effect::Restart)) => {
                (Outcome::Exchanged, Fate::Exchanges { at, specs: specs.clone(), may_restart })
            }
            (Some(_), Some(Effect::Session)) if may_restart => (Outcome::Restarted, begins()),
            (Some(_), Some(Effect::Session)) => (Outcome::Refused, Fate::Stays(at)),
        };
        let step = |(spec, change): (&DeviceSpec, &Change)| match change.effect {
            None if goal == Outcome::Changed => Step::new(&spec.name, Outcome::Unchanged),
            _ => Step::new(&spec.name, goal).with(change),
        };
        let mut steps: Vec<_> = specs.iter().zip(&changes).map(step).collect();
        match (goal, &fate) {
            (Outcome::Added, Fate::Stays(_)) => {
                steps.iter_mut().for_each(|step| step.group = Some(group.id));
            }
            (Outcome::Refused, _) if members.is_some() => {
                refuse(&mut steps, "its guest would find another device, or none");
            }
            (Outcome::Refused, _) => {
                let why = "it is being opened again within its session; reload again";
                steps.iter_mut().for_each(|step| step.refuse(why.to_owned()));
            }
            _ => {}
        }
        Self { specs, steps, fate, old: vec![at] }
    }

    /// For devices that were in several groups, or with others: cards whose links have changed.
    fn of_groups(all: &[Group], old: Vec<usize>, specs: Vec<DeviceSpec>, restarts: &Restarts) -> Self {
        let before: HashMap<&str, &DeviceSpec> =
            old.iter().flat_map(|&at| &all[at].specs).map(|spec| (&*spec.name, spec)).collect();
        let step = |spec: &DeviceSpec| match before.get(&*spec.name) {
            Some(old) => Step::new(&spec.name, Outcome::Restarted).with(&Change::between(old, spec)),
            None => Step::new(&spec.name, Outcome::Added),
        };
        let mut steps: Vec<_> = specs.iter().map(step).collect();
        let is_allowed = old.iter().all(|&at| match &all[at].state {
            State::Served(members) => may_restart(members, restarts),
            _ => true,
        });
        let fate = match (is_allowed, old.first()) {
            (false, Some(&at)) => {
                refuse(&mut steps, "the other end of its link is another device");
                Fate::Stays(at)
            }
            _ => Fate::Begins(specs.clone()),
        };
        Self { specs, steps, fate, old }
    }
}

fn refuse(steps: &mut [Step], why: &str) {
    for step in steps {
        let words = ends_session(&step.name, why);
        step.refuse(words);
    }
}

/// Whether all clients of these devices may have to reconnect.
fn may_restart(members: &[ServedDevice], restarts: &Restarts) -> bool {
    members.iter().all(|member| !member.has_client() || restarts.allow(&member.spec.name))
}

/// Refuses devices that need what a refused one goes on to have. `true`: there was one.
fn refuse_what_collides(old: &[Group], planned: &mut [Planned]) -> bool {
    let is_refused = |planned: &Planned| planned.steps.iter().any(|step| step.goal == Outcome::Refused);
    let kept: Vec<(usize, DeviceSpec)> = planned
        .iter()
        .filter(|planned| is_refused(planned))
        .flat_map(|planned| {
            planned.old.iter().flat_map(|&at| old[at].specs.iter().map(move |spec| (at, spec.clone())))
        })
        .collect();
    let mut found = false;
    for planned in planned.iter_mut().filter(|planned| !is_refused(planned)) {
        let (Fate::Begins(_) | Fate::Exchanges { .. }) = planned.fate else { continue };
        let holder = kept.iter().find(|(at, kept)| {
            !planned.old.contains(at) && planned.specs.iter().any(|spec| collide(kept, spec))
        });
        let Some((_, holder)) = holder else { continue };
        for step in &mut planned.steps {
            step.refuse(format!("device {} keeps what it needs, as its change is refused", holder.name));
        }
        planned.fate = match planned.old.first() {
            Some(&at) => Fate::Stays(at),
            None => Fate::Begins(Vec::new()),
        };
        found = true;
    }
    found
}
