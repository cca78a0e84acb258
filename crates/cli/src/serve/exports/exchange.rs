//! Devices that are opened again while their clients stay connected: a take-over within the daemon.
//!
//! ```text
//!   Served + Next::Begins --a thread--> Next::Opens: images open, not locked, would the guest be told the same?
//!      ^                                     |
//!      |   no: refused, or restarted <-------+-- yes: Next::Ready --no snapshot is being taken--.
//!      |                                                                                        v
//!   old device:  Served --------------------> Stopping (drained) --its state, when it is dropped--> gone
//!   new device:  Opening (waits for that state) --> image locked --> resumed --> Served
//!                                                        '-- a failure: the old device, resumed with a copy
//! ```
//! What a holder keeps of a session stays through all of it: if the daemon dies, the next one resumes the
//! session from the record of the old device or of the new one. Without either, it has ended.
use super::super::open;
use super::super::reload::messages::Outcome;
use super::super::spec::DeviceSpec;
use super::super::take_over::Offered;
use super::group::{Group, Leaving, State};
use super::lock_wait::LockWait;
use super::next::{Next, Note, Stage};
use super::plan::ends_session;
use super::served::{ServedDevice, Session, Sessions};
use super::state::{Exports, Inner, Start, all_or_none};
use crate::failure::one_line;
use crate::kinds::opening::{LinkEnds, Opening};
use anyhow::{Context, anyhow};
use paravane_device::LogDevice;
use paravane_dma::MappingQuota;
use paravane_export::Exchanged;
use paravane_io::caught;
use std::collections::HashMap;
use std::sync::mpsc::{Receiver, channel};

/// A device that takes the place of another one.
struct Successor {
    old: DeviceSpec,
    opening: Opening,
    quota: MappingQuota,
}

impl Exports {
    /// Takes each group that needs it one step towards its new settings.
    pub(super) fn exchange(&self, inner: &mut Inner) {
        inner.take_prepared();
        for at in 0..inner.groups.len() {
            let Some(next) = &inner.groups[at].next else { continue };
            match next.stage {
                Stage::Begins => self.prepare(inner, at),
                Stage::Opens => {}
                // The image may be another one afterwards.
                Stage::Ready(_) if inner.taking().is_some() => {}
                Stage::Ready(_) => self.begin_exchange(inner, at),
            }
        }
    }

    /// Starts a thread that opens the devices of a group again, as far as those that are served allow.
    fn prepare(&self, inner: &mut Inner, at: usize) {
        let group = &mut inner.groups[at];
        let (Some(next), State::Served(members)) = (&mut group.next, &group.state) else { return };
        next.stage = Stage::Opens;
        let offered = |spec: &DeviceSpec| {
            let member = members.iter().find(|member| member.spec.name == spec.name);
            (spec.clone(), member.map(ServedDevice::offered))
        };
        let wanted: Vec<_> = next.specs.iter().map(offered).collect();
        let (exports, number) = (self.clone(), next.number);
        let name = format!("open-{}", group.specs[0].name);
        let open = move || {
            let opened = caught(|| exports.open_again(wanted))
                .unwrap_or_else(|words| Err(format!("internal error: a thread panicked: {words}")));
            exports.inner().prepared.push((number, opened));
            exports.0.changed.signal();
        };
        if let Err(error) = std::thread::Builder::new().name(name).spawn(open) {
            let why = format!("cannot start a thread to open it: {error}");
            inner.prepared.push((number, Err(why)));
            self.0.changed.signal();
        }
    }

    /// Opens devices again, and compares them with what is served.
    fn open_again(&self, wanted: Vec<(DeviceSpec, Option<Offered>)>) -> Result<Vec<Opening>, String> {
        let context = &self.0.context;
        let mut link_ends = LinkEnds::default();
        let mut open = |(spec, offered): (DeviceSpec, Option<Offered>)| {
            let _named = LogDevice::enter(Some(spec.name.as_str().into()));
            let offered = offered.context("it is not served any more")?;
            let mut opening = open::prepare(&spec, &mut link_ends, &context.opening)?;
            let image = opening.wanted(&spec).image;
            if let (Some(now), Some(then)) = (&image, &offered.image)
                && !now.is(then)
            {
                return Err(anyhow!("its image is another one, {}", now.location));
            }
            opening
                .check_told(&spec, &offered.told, context.shelf.is_some())
                .context("its guest would find another device")?;
            Ok(opening)
        };
        wanted.into_iter().map(|device| open(device).map_err(|error| one_line(&error))).collect()
    }

    /// Has the devices of a group hand over to those that are open for its new settings.
    fn begin_exchange(&self, inner: &mut Inner, at: usize) {
        let id = inner.id();
        let group = &mut inner.groups[at];
        let Some(Next { specs, stage: Stage::Ready(openings), .. }) = group.next.take() else { return };
        let new = Group::new(id, specs.clone());
        let Group { id: old_id, specs: old, state, .. } = std::mem::replace(group, new);
        let State::Served(mut members) = state else { return };
        for member in &mut members {
            let device = &member.spec.name;
            tracing::info!(device, "opening the device again; its session goes on");
            member.begin_exchange();
        }
        let of = |spec: &DeviceSpec| old.iter().find(|old| old.name == spec.name).cloned();
        let successors = specs.iter().zip(openings).filter_map(|(spec, opening)| {
            let quota = self.0.context.pool.quota();
            Some(Successor { old: of(spec)?, opening, quota })
        });
        let (successors, (sender, receiver)) = (successors.collect(), channel());
        let leaving = Leaving::new(old_id, old, Some(members));
        inner.leaving.push(Leaving { exchange: Some(sender), ..leaving });
        inner.retarget(old_id, id);
        let devices = specs.clone();
        // If the thread does not start, the sessions that are handed over end, and clients have to reconnect.
        let state = self.opening(id, specs, move |exports, wait| {
            exports.succeed(id, &devices, successors, &receiver, wait)
        });
        let group = &mut inner.groups[at];
        group.has_session = true;
        group.enter(state);
    }

    /// Serves the devices that take the place of others, as their sessions arrive.
    fn succeed(
        &self,
        id: u64,
        specs: &[DeviceSpec],
        successors: Vec<Successor>,
        receiver: &Receiver<(String, Result<Exchanged, String>)>,
        wait: &LockWait,
    ) -> Start {
        let mut handed: HashMap<String, Result<Exchanged, String>> = HashMap::new();
        // All of them: a link has two ends.
        while handed.len() < successors.len() {
            let Ok((name, state)) = receiver.recv() else { break };
            handed.insert(name, state);
        }
        // A link that is half old cannot be made.
        let may_go_back = successors.len() == 1;
        all_or_none(specs, successors, |spec, successor| {
            let state = handed.remove(&spec.name);
            let state = state.unwrap_or_else(|| Err("the device has stopped".to_owned()));
            self.succeed_one(id, spec, successor, state, wait, may_go_back)
        })
    }

    fn succeed_one(
        &self,
        id: u64,
        spec: &DeviceSpec,
        successor: Successor,
        state: Result<Exchanged, String>,
        wait: &LockWait,
        may_go_back: bool,
    ) -> Result<ServedDevice, anyhow::Error> {
        let Successor { old, opening, quota } = successor;
        let resumed = state.map_err(|why| anyhow!(why)).and_then(|state| {
            // The client stays connected as long as there is a copy.
            let copy = if may_go_back { state.try_clone().ok() } else { None };
            let session = Some(Session::Exchanged(state));
            let error = match self.serve(spec, opening, quota, wait, session) {
                Ok(device) => return Ok(device),
                Err(error) => error,
            };
            let Some(copy) = copy else { return Err(error) };
            let why = one_line(&error);
            tracing::error!(device = spec.name, "cannot serve device with its new settings: {why}");
            let device = self.go_back(&old, copy, wait)?;
            self.note(id, Note::Back(why));
            Ok(device)
        });
        resumed.or_else(|error| {
            self.not_resumed(spec, &error);
            self.note(id, Note::Ended(one_line(&error)));
            self.start_anew(spec, wait)
        })
    }

    /// Serves a device with the settings that it had.
    fn go_back(
        &self,
        old: &DeviceSpec,
        state: Exchanged,
        wait: &LockWait,
    ) -> Result<ServedDevice, anyhow::Error> {
        let context = &self.0.context;
        let opening = open::prepare(old, &mut LinkEnds::default(), &context.opening)?;
        self.serve(old, opening, context.pool.quota(), wait, Some(Session::Exchanged(state)))
    }

    fn note(&self, group: u64, note: Note) {
        self.inner().notes.push((group, note));
    }
}

impl Inner {
    /// Looks at what threads have opened for groups that are served.
    fn take_prepared(&mut self) {
        for (number, opened) in std::mem::take(&mut self.prepared) {
            let is_of = |group: &Group| group.next.as_ref().is_some_and(|next| next.number == number);
            // Another reload may have come.
            let Some(at) = self.groups.iter().position(is_of) else { continue };
            let Group { next: Some(next), specs, .. } = &mut self.groups[at] else { continue };
            match opened {
                Ok(openings) if next.of == *specs => next.stage = Stage::Ready(openings),
                Ok(_) => self.cannot_exchange(at, "a snapshot was taken meanwhile; reload again"),
                Err(why) => self.cannot_exchange(at, &why),
            }
        }
    }

    /// Restarts a group whose sessions cannot go on, or leaves it as it is.
    fn cannot_exchange(&mut self, at: usize, why: &str) {
        let Some(Next { specs, may_restart, .. }) = self.groups[at].next.take() else { return };
        let old = self.groups[at].id;
        if !may_restart {
            for step in self.steps_of(old) {
                let words = ends_session(&step.name, why);
                step.refuse(words);
                step.log();
            }
            return;
        }
        let id = self.id();
        let group = std::mem::replace(&mut self.groups[at], Group::new(id, specs));
        for step in self.steps_of(old) {
            (step.goal, step.why) = (Outcome::Restarted, Some(format!("its session ended: {why}")));
            step.log();
        }
        self.retarget(old, id);
        self.leave(group, Sessions::End);
    }
}
