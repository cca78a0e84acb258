//! A reload: it is planned and begun at once, and its outcome is known device by device.
use super::super::reload::messages::{DeviceOutcome, Outcome};
use super::group::{Group, State, groups};
use super::next::{Next, Note, Stage};
use super::plan::{Fate, Plan, Reload, Restarts, Step};
use super::served::Sessions;
use super::state::{Exports, Inner};
use crate::kinds::changes::Change;
use crate::serve::report;
use crate::serve::spec::DeviceSpec;
use std::time::{Duration, Instant};

/// Longest wait of a reload for devices to start and stop before the log has its outcome.
const RELOAD_TIMEOUT: Duration = Duration::from_secs(1);

/// How a reload begins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Reloaded {
    /// It has this number.
    Begun(u64),
    /// An image is being replaced by an overlay: try again with this list when [`Exports::changed`] is
    /// signalled.
    Later(Vec<DeviceSpec>),
    /// Nothing has changed.
    Refused(String),
}

impl Exports {
    /// Replaces the list of devices.
    ///
    /// [`Exports::advance`] carries it out and reports the outcome.
    pub(crate) fn reload(&self, wanted: Vec<DeviceSpec>, restarts: &Restarts) -> Reloaded {
        let mut inner = self.inner();
        if inner.taking().is_some() {
            return Reloaded::Later(wanted);
        }
        if let Some(why) = inner.frozen(&wanted) {
            drop(inner);
            self.refused(&why);
            return Reloaded::Refused(why);
        }
        inner.report_outcome();
        if let Some(shelf) = &self.0.context.shelf {
            shelf.divide(wanted.len());
        }
        inner.groups.iter_mut().for_each(|group| group.next = None);
        let plan = Plan::new(&inner.groups, groups(wanted), restarts);
        let number = inner.carry_out(plan);
        let is_wanted =
            |name: &String| inner.groups.iter().flat_map(|group| &group.specs).any(|spec| spec.name == *name);
        let unwanted: Vec<_> = inner.kept.keys().filter(|name| !is_wanted(name)).cloned().collect();
        let unwanted: Vec<_> =
            unwanted.into_iter().filter_map(|name| inner.kept.remove_entry(&name)).collect();
        drop(inner);
        self.0.changed.signal();
        if let Some(shelf) = &self.0.context.shelf {
            for (device, session) in &unwanted {
                tracing::warn!(device, "device is not configured any more: its session ends");
                shelf.forget(device, &session.numbers);
            }
        }
        Reloaded::Begun(number)
    }

    /// What a reload of this list would do. Changes nothing.
    ///
    /// # Errors
    /// The list cannot be served.
    pub(crate) fn plan(
        &self,
        wanted: Vec<DeviceSpec>,
        restarts: &Restarts,
    ) -> Result<Vec<DeviceOutcome>, String> {
        let inner = self.inner();
        match inner.frozen(&wanted) {
            Some(why) => Err(why),
            None => Ok(Plan::new(&inner.groups, groups(wanted), restarts).outcomes()),
        }
    }

    /// The outcomes of the reload of this number so far; `None`: another one has come.
    pub(crate) fn outcomes(&self, number: u64) -> Option<Vec<DeviceOutcome>> {
        let inner = self.inner();
        let reload = inner.reload.as_ref().filter(|reload| reload.number == number)?;
        Some(reload.steps.iter().map(|step| inner.outcome_of(step)).collect())
    }

    /// Whether the last reload has had its time.
    pub(crate) fn may_reload(&self) -> bool {
        self.inner().reload.as_ref().is_none_or(|reload| reload.is_reported)
    }
}

impl Inner {
    /// Begins what is planned. Returns the number of the reload.
    fn carry_out(&mut self, plan: Plan) -> u64 {
        let mut old: Vec<Option<Group>> = std::mem::take(&mut self.groups).into_iter().map(Some).collect();
        let mut all = Vec::new();
        for (fate, mut steps) in plan.fates {
            let group = match fate {
                Fate::Stays(at) => old[at].take(),
                Fate::Changes(at, specs) => old[at].take().map(|mut group| {
                    group.change(&specs);
                    group
                }),
                Fate::Exchanges { at, specs, may_restart } => old[at].take().map(|mut group| {
                    let (number, of) = (self.id(), group.specs.clone());
                    group.next = Some(Next { number, specs, of, may_restart, stage: Stage::Begins });
                    steps.iter_mut().for_each(|step| step.group = Some(group.id));
                    group
                }),
                Fate::Begins(specs) if specs.is_empty() => None,
                Fate::Begins(specs) => {
                    let id = self.id();
                    steps.iter_mut().for_each(|step| step.group = Some(id));
                    Some(Group::new(id, specs))
                }
            };
            steps.iter().for_each(Step::log);
            self.groups.extend(group);
            all.extend(steps);
        }
        for (at, steps) in plan.removed {
            if let Some(group) = old[at].take() {
                self.leave(group, Sessions::End);
            }
            all.extend(steps);
        }
        let (number, until) = (self.id(), Instant::now() + RELOAD_TIMEOUT);
        self.reload = Some(Reload { number, steps: all, until, is_reported: false });
        number
    }

    /// What has become of a device so far.
    fn outcome_of(&self, step: &Step) -> DeviceOutcome {
        let mut outcome = step.outcome();
        let Some(id) = step.group else { return outcome };
        let (now, why) = match self.groups.iter().find(|group| group.id == id) {
            _ if step.goal == Outcome::Removed => match self.leaving.iter().any(|leaving| leaving.id == id) {
                true => (Outcome::Waiting, Some("requests in flight to end".to_owned())),
                false => return outcome,
            },
            None => (Outcome::Failed, Some("another reload has changed it".to_owned())),
            Some(group) if group.next.is_some() => {
                (Outcome::Waiting, Some("the host to open its files again".to_owned()))
            }
            Some(group) if matches!(group.state, State::Served(_)) => return outcome,
            Some(group) => match group.failures().iter().find(|failed| failed.name == step.name) {
                Some(report::Failed { why, .. }) => (Outcome::Failed, Some(why.clone())),
                None => {
                    let waiting = self.waiting(group).into_iter().find(|waiting| waiting.name == step.name);
                    (Outcome::Waiting, waiting.map(|waiting| waiting.why))
                }
            },
        };
        (outcome.outcome, outcome.why) = (now, why);
        outcome
    }

    /// Steps of the last reload that a group of this number is to take.
    pub(super) fn steps_of(&mut self, group: u64) -> impl Iterator<Item = &mut Step> {
        let steps = self.reload.iter_mut().flat_map(|reload| &mut reload.steps);
        steps.filter(move |step| step.group == Some(group))
    }

    /// A group has taken the place of another one.
    pub(super) fn retarget(&mut self, from: u64, to: u64) {
        self.steps_of(from).for_each(|step| step.group = Some(to));
    }

    /// Notes sessions that have not gone on.
    pub(super) fn take_notes(&mut self) {
        for (group, note) in std::mem::take(&mut self.notes) {
            for step in self.steps_of(group) {
                let (goal, why) = match &note {
                    Note::Ended(why) => (Outcome::Restarted, format!("its session ended: {why}")),
                    Note::Back(why) => (Outcome::Failed, format!("{why}; it goes on as it was")),
                };
                (step.goal, step.why) = (goal, Some(why));
            }
        }
    }

    /// Whether the outcome of a reload is to be reported now.
    pub(super) fn is_outcome_due(&self) -> bool {
        let Some(reload) = self.reload.as_ref().filter(|reload| !reload.is_reported) else { return false };
        self.is_settled() || Instant::now() >= reload.until
    }

    /// Reports the outcome of the reload in progress, if any.
    pub(super) fn report_outcome(&mut self) -> bool {
        let Some(reload) = self.reload.as_ref().filter(|reload| !reload.is_reported) else { return false };
        let outcomes: Vec<_> = reload.steps.iter().map(|step| self.outcome_of(step)).collect();
        let count = |wanted: Outcome| outcomes.iter().filter(|device| device.outcome == wanted).count();
        let stopping: usize = self.leaving.iter().map(|leaving| leaving.specs.len()).sum();
        let waits = |step: &&Step| step.goal != Outcome::Removed;
        let waiting = reload.steps.iter().filter(waits).map(|step| self.outcome_of(step));
        let waiting = waiting.filter(|device| device.outcome == Outcome::Waiting).count();
        let removed = reload.steps.iter().filter(|step| step.goal == Outcome::Removed).count();
        let failed = count(Outcome::Failed);
        let mut outcome = format!(
            "{} unchanged, {removed} removed, {} added, {failed} failed",
            count(Outcome::Unchanged),
            count(Outcome::Added)
        );
        for (count, what) in [
            (count(Outcome::Changed), "changed in place"),
            (count(Outcome::Exchanged), "restarted within their sessions"),
            (count(Outcome::Restarted), "restarted"),
            (count(Outcome::Refused), "refused"),
            (stopping, "still stopping"),
            (waiting, "not started yet"),
        ] {
            if count > 0 {
                outcome += &format!(", {count} {what}");
            }
        }
        let gone: Vec<_> = self
            .served()
            .filter(|member| member.has_lost_network())
            .map(|member| &*member.spec.name)
            .collect();
        if !gone.is_empty() {
            outcome += &format!(", {} without the TAP device: {}", gone.len(), gone.join(" "));
        }
        tracing::info!("reloaded: {outcome}");
        self.last_reload = outcome;
        self.outcome = Some(report::Reload::now(failed == 0 && count(Outcome::Refused) == 0));
        if let Some(reload) = &mut self.reload {
            reload.is_reported = true;
        }
        true
    }
}

impl Group {
    /// Applies settings that change in place.
    fn change(&mut self, wanted: &[DeviceSpec]) {
        let State::Served(members) = &mut self.state else { return };
        for (spec, member) in self.specs.iter_mut().zip(members) {
            let Some(wanted) = wanted.iter().find(|wanted| wanted.name == spec.name) else { continue };
            if Change::between(&member.spec, wanted).effect.is_some() {
                member.change(wanted);
                spec.clone_from(&member.spec);
            }
        }
    }
}
