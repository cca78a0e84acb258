//! The served devices and their life cycle.
//!
//! Devices start and stop in groups: a group is one device, or the two cards of a link.
//!
//! ```text
//!   wanted:   Waiting --no stopping group holds ---> Opening --> Served
//!              ^ ^      a resource that it needs     (a thread)    |
//!              | '-----------after 1, 2, 4 ... 30 s---- Failed <---'          its session stays kept (begin)
//!              |          locks the image when no dead process has requests in flight (lock_wait)
//!   reload:      '-- new or changed in the file; or failed or panicked before (see `plan`)
//!                    unchanged in the file: left alone; or settings that change in place
//!                    changed, and its session goes on: see `exchange`
//!                    removed from the file, or changed: -----------.
//!                                                                  v
//!   leaving:                                    Opening --> Stopping --> gone
//!                                            (stopped as    (sockets are removed at once; requests
//!                                             soon as open)  in flight are finished, without a limit)
//! ```
//! No call here blocks. Images are opened by a thread for each group, as storage may hang, and
//! devices stop in the background. One thread calls [`Exports::advance`] whenever
//! [`Exports::changed`] is signalled, which takes each group one step further. So one thread makes
//! all changes of state, and the lock is held briefly. After half of the stop timeout, a stopping
//! device does not continue requests of several parts.
mod arrival;
mod begin;
mod change;
mod context;
mod exchange;
mod failed;
mod group;
mod lock_wait;
mod next;
mod plan;
mod reloading;
mod served;
mod shown;
mod snapshots;
mod state;

pub(crate) use arrival::Arrivals;
pub(crate) use begin::earlier;
pub(crate) use context::ExportContext;
pub(crate) use plan::Restarts;
pub(crate) use reloading::Reloaded;
pub(crate) use shown::Startup;
pub(crate) use snapshots::{SnapshotBase, SnapshotTurn};
pub(crate) use state::Exports;

use super::network_events::Changed;
use super::open;
use super::report;
use super::shelf::KeptSession;
use super::spec::DeviceSpec;
use super::trace::RequestTrace;
use super::trace::lines::Answer;
use crate::kinds::opening::{Earlier, LinkEnds, Opening};
use failed::{failed_by, log_failed};
use group::{Group, Leaving, State, groups};
use paravane_device::blk::Snapshot;
use paravane_notify::Notifier;
use parking_lot::Mutex;
use plan::Reload;
use served::{ServedDevice, Sessions};
use state::{Inner, Shared};
use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What [`Exports::advance`] has found; [`Exports::changed`] was cleared before.
pub(crate) struct Turn {
    /// Time until the next turn, unless [`Exports::changed`] is readable before.
    pub(crate) time: Option<Duration>,
    /// The outcome of a reload was reported.
    pub(crate) told: bool,
}

impl Exports {
    /// Serves opened devices, and starts with [`Exports::advance`] those that wait for their image.
    ///
    /// # Errors
    /// A device cannot be served; then none is.
    pub(crate) fn start(
        opened: Vec<(DeviceSpec, Opening)>,
        context: ExportContext,
    ) -> Result<Self, anyhow::Error> {
        let changed = Arc::new(Notifier::new(false)?);
        let specs: Vec<DeviceSpec> = opened.iter().map(|(spec, _)| spec.clone()).collect();
        let mut members: HashMap<String, ServedDevice> = HashMap::new();
        // Every device gets its share before the first VMM can connect.
        let quotas: Vec<_> = opened.iter().map(|_| context.pool.quota()).collect();
        let mut unlocked: HashMap<String, Opening> = HashMap::new();
        for ((spec, opening), quota) in opened.into_iter().zip(quotas) {
            let device = match opening {
                Opening::Device(device) => device,
                // Both of a take-over only.
                Opening::Ahead(disk) => disk.open()?,
                Opening::Late(_) => {
                    open::open(&spec, &mut LinkEnds::default(), &context.opening, Earlier::default())?
                        .opened()?
                }
                Opening::Unlocked(disk) => {
                    unlocked.insert(spec.name, Opening::Unlocked(disk));
                    continue;
                }
            };
            match ServedDevice::start(spec, device, quota, &context, &changed, None) {
                Ok(member) => drop(members.insert(member.spec.name.clone(), member)),
                Err(error) => {
                    members.into_values().for_each(ServedDevice::stop);
                    return Err(error);
                }
            }
        }
        let mut inner = Inner::default();
        for specs in groups(specs) {
            let served = specs.iter().filter_map(|spec| members.remove(&spec.name)).collect();
            let mut group = Group::new(inner.id(), specs);
            // A group with a disk has no other device.
            group.ahead.extend(unlocked.remove_entry(&group.specs[0].name));
            if group.ahead.is_empty() {
                group.enter(State::Served(served));
            }
            inner.groups.push(group);
        }
        let inner = Mutex::new(inner);
        Ok(Self(Arc::new(Shared { inner, context, changed, started: Instant::now() })))
    }

    /// Serves the devices of a file, each as soon as it can be, with the sessions that were kept.
    ///
    /// What cannot be opened is tried again. [`Exports::advance`] does all of it.
    ///
    /// # Errors
    /// The host is out of descriptors.
    pub(crate) fn begin(
        opened: Vec<(DeviceSpec, Result<Opening, anyhow::Error>)>,
        context: ExportContext,
        kept: HashMap<String, KeptSession>,
    ) -> Result<Self, anyhow::Error> {
        let exports = Self::start(Vec::new(), context)?;
        let specs: Vec<DeviceSpec> = opened.iter().map(|(spec, _)| spec.clone()).collect();
        let mut opened: HashMap<String, _> =
            opened.into_iter().map(|(spec, opening)| (spec.name, opening)).collect();
        let mut inner = exports.inner();
        inner.kept = kept;
        for specs in groups(specs) {
            let mut group = Group::new(inner.id(), specs.clone());
            let mut failed = None;
            for spec in &specs {
                match opened.remove(&spec.name) {
                    Some(Ok(opening)) => drop(group.ahead.insert(spec.name.clone(), opening)),
                    Some(Err(error)) => failed = Some(failed_by(&specs, spec, &error)),
                    None => {}
                }
            }
            if let Some(failed) = failed {
                group.ahead.clear();
                log_failed(&failed);
                group.enter(State::Failed(failed));
            }
            inner.groups.push(group);
        }
        drop(inner);
        exports.advance();
        Ok(exports)
    }

    /// Records that the new list is invalid; the devices stay.
    pub(crate) fn refused(&self, why: &str) {
        tracing::error!("reload failed, devices unchanged: {why}");
        let mut inner = self.inner();
        inner.report_outcome();
        inner.last_reload = format!("failed, devices unchanged: {why}");
        inner.outcome = Some(report::Reload::now(false));
    }

    /// Has all devices check the host's side again.
    ///
    /// Drivers learn of new image sizes. Disks try again what waits for room.
    pub(crate) fn refresh(&self) {
        for member in self.inner().served() {
            member.refresh();
            member.retry();
        }
    }

    /// Has cards on TAP devices look at those that have changed.
    pub(crate) fn network_changed(&self, changed: &Changed) {
        let concerns = |tap: &str| match changed {
            Changed::Named(names) => names.contains(tap),
            Changed::Unknown => true,
        };
        for member in self.inner().served().filter(|member| member.spec.kind.tap().is_some_and(concerns)) {
            member.refresh();
        }
    }

    /// Takes all groups one step further.
    ///
    /// Clears [`Exports::changed`] first: what others hand over is looked at afterwards.
    pub(crate) fn advance(&self) -> Turn {
        let _ = self.0.changed.take();
        let mut inner = self.inner();
        inner.take_opened();
        inner.send_drained();
        inner.forget_ended();
        inner.groups.iter_mut().for_each(Group::try_again);
        self.exchange(&mut inner);
        self.open_waiting(&mut inner);
        let told = inner.is_outcome_due() && inner.report_outcome();
        let patience = self.0.context.stop_timeout / 2;
        let expedite = inner.stopping().filter_map(|member| member.expedite(patience));
        let reload = inner.reload.as_ref().and_then(Reload::time_to_report);
        let retry = inner.groups.iter().filter_map(Group::time_to_retry);
        Turn { time: expedite.chain(reload).chain(retry).min(), told }
    }

    /// Starts threads that open the waiting groups that no stopping group blocks.
    fn open_waiting(&self, inner: &mut Inner) {
        let Inner { groups, leaving, .. } = inner;
        for group in groups.iter_mut().filter(|group| matches!(group.state, State::Waiting)) {
            if leaving.iter().any(|leaving| leaving.holds_up(&group.specs).is_some()) {
                continue;
            }
            let (id, specs, ahead) = (group.id, group.specs.clone(), std::mem::take(&mut group.ahead));
            group.enter(self.opening(id, specs.clone(), move |exports, wait| {
                exports.begin_group(id, &specs, ahead, wait)
            }));
        }
    }

    /// The trace of a device that is served.
    ///
    /// # Errors
    /// There is no such device, or its requests are not observed.
    pub(crate) fn trace(&self, name: &str) -> Result<Arc<RequestTrace>, Answer> {
        let inner = self.inner();
        let member = inner.served().find(|member| member.spec.name == name);
        let member = member.ok_or_else(|| Answer::NoDevice(format!("no device is named {name:?}")))?;
        member.trace().map_err(Answer::Error)
    }

    /// Notes that a disk writes to `overlay` since a snapshot.
    ///
    /// A reload of a file that says so leaves it alone.
    fn replaced(&self, name: &str, overlay: &Path, snapshot: &Snapshot) {
        let mut inner = self.inner();
        let Inner { groups, leaving, .. } = &mut *inner;
        for group in groups {
            if let Some(spec) = group.specs.iter_mut().find(|spec| spec.name == name)
                && let State::Served(members) = &mut group.state
                && let Some(member) = members.iter_mut().find(|member| member.spec.name == name)
            {
                *spec = spec.on_overlay(overlay, &snapshot.serial, &member.facts());
                return member.replaced(overlay, snapshot);
            }
        }
        // It has begun to stop.
        let mut stopping = leaving.iter_mut().filter_map(|leaving| leaving.members.as_mut()).flatten();
        if let Some(member) = stopping.find(|member| member.spec.name == name) {
            member.replaced(overlay, snapshot);
        }
    }

    /// Whether every device has ended: the only client of each has disconnected.
    pub(crate) fn has_run_out(&self) -> bool {
        let inner = self.inner();
        let mut served = inner.served().peekable();
        served.peek().is_some()
            && served.all(|member| member.export.has_ended() && !member.export.has_failed())
    }

    /// Begins to stop all devices; see [`Exports::is_gone`].
    ///
    /// Sessions that are kept stay so, for the next daemon.
    pub(crate) fn begin_stop(&self) {
        let mut inner = self.inner();
        (inner.reload, inner.is_stopping) = (None, true);
        let groups = std::mem::take(&mut inner.groups);
        for group in groups {
            inner.leave(group, Sessions::Stay);
        }
    }

    /// Has all devices try the descriptor store again.
    pub(crate) fn keep(&self) {
        for member in self.inner().served() {
            member.export.keep();
        }
    }

    /// Whether all devices have stopped.
    ///
    /// Devices still being opened do not count: they have no requests.
    pub(crate) fn is_gone(&self) -> bool {
        let inner = self.inner();
        let is_none = |leaving: &Leaving| leaving.members.is_none() && !leaving.has_session;
        inner.groups.is_empty() && inner.leaving.iter().all(is_none)
    }

    /// Logs the requests that the daemon leaves unfinished.
    pub(crate) fn log_unfinished(&self) {
        let inner = self.inner();
        inner.stopping().filter(|member| !member.export.has_ended()).for_each(ServedDevice::log_unfinished);
    }
}

impl Inner {
    /// Why the list cannot be served: a device would write to an image that a snapshot has frozen.
    ///
    /// The disk would lose what its guest has written since.
    fn frozen(&self, wanted: &[DeviceSpec]) -> Option<String> {
        let frozen = |spec: &DeviceSpec| {
            let image = spec.writable_image()?;
            let member = self.served().find(|member| member.overlay_of(&image).is_some())?;
            let overlay = member.overlay_of(&image)?.display();
            Some(format!(
                "device {}: {} is the backing file of {overlay} since a snapshot; write image = \"{overlay}\", \
                 format and backing into the file, as `paravane disk snapshot` has printed",
                spec.name, image
            ))
        };
        wanted.iter().find_map(frozen)
    }

    fn take_opened(&mut self) {
        self.take_notes();
        for (id, start) in std::mem::take(&mut self.opened) {
            if let Some(group) = self.groups.iter_mut().find(|group| group.id == id) {
                if let Ok(members) = &start {
                    // It may have gone back to what it was.
                    group.specs = members.iter().map(|member| member.spec.clone()).collect();
                }
                group.enter(match start {
                    Ok(members) => State::Served(members),
                    Err(failed) => {
                        if !group.is_known(&failed) {
                            log_failed(&failed);
                        }
                        State::Failed(failed)
                    }
                });
            } else if let Some(at) = self.leaving.iter().position(|leaving| leaving.id == id) {
                // Removed from the file meanwhile.
                match start {
                    Ok(mut members) => {
                        let sessions = if self.is_stopping { Sessions::Stay } else { Sessions::End };
                        members.iter_mut().for_each(|member| member.begin_stop(sessions));
                        self.leaving[at].members = Some(members);
                        self.leaving[at].has_session = false;
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
        let stopped = ended.iter().filter(|leaving| leaving.exchange.is_none());
        for spec in stopped.flat_map(|leaving| &leaving.specs) {
            tracing::info!(device = spec.name, "device stopped");
        }
        if let Some(handed) = &mut self.handed {
            handed.extend(ended);
        }
    }
}

#[cfg(test)]
mod tests;
