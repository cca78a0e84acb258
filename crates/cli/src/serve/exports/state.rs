//! All devices with their states, behind one lock.
use super::super::report;
use super::super::shelf::KeptSession;
use super::super::spec::DeviceSpec;
use super::context::ExportContext;
use super::failed::{all_failed, failed_by};
use super::group::{Group, Leaving, State};
use super::lock_wait::LockWait;
use super::next::{Note, Prepared};
use super::plan::Reload;
use super::served::{ServedDevice, Sessions};
use paravane_device::LogDevice;
use paravane_export::Handover;
use paravane_io::caught;
use paravane_notify::Notifier;
use parking_lot::{Mutex, MutexGuard};
use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Instant;

/// Devices of a group that were opened, or why not.
pub(super) type Start = Result<Vec<ServedDevice>, Vec<report::Failed>>;

/// A snapshot that is on its way.
pub(super) struct Turn {
    pub(super) device: String,
    /// The image is being replaced.
    pub(super) is_taking: bool,
}

#[derive(Default)]
pub(super) struct Inner {
    /// In the order of the file.
    pub(super) groups: Vec<Group>,
    pub(super) leaving: Vec<Leaving>,
    /// Results of opening threads since the last step.
    pub(super) opened: Vec<(u64, Start)>,
    /// The last one.
    pub(super) reload: Option<Reload>,
    pub(super) last_reload: String,
    /// Time and success of the last reload.
    pub(super) outcome: Option<report::Reload>,
    pub(super) next_id: u64,
    /// Takes the devices that are drained for another daemon.
    pub(super) handing_over: Option<Sender<(String, Result<Handover, String>)>>,
    /// Groups that are handed over, of which mappings are left; `None`: the daemon hands nothing over.
    pub(super) handed: Option<Vec<Leaving>>,
    /// Snapshots on their way, at most one for a device.
    pub(super) turns: Vec<Turn>,
    /// Sessions of earlier daemons whose devices are not served yet.
    pub(super) kept: HashMap<String, KeptSession>,
    /// Devices that were opened for groups that are served.
    pub(super) prepared: Vec<Prepared>,
    /// What has become of sessions of groups that were exchanged.
    pub(super) notes: Vec<(u64, Note)>,
    /// All devices stop.
    pub(super) is_stopping: bool,
}

pub(super) struct Shared {
    pub(super) inner: Mutex<Inner>,
    pub(super) context: ExportContext,
    pub(super) changed: Arc<Notifier>,
    pub(super) started: Instant,
}

/// Handle of all served devices; clones share them.
#[derive(Clone)]
pub(crate) struct Exports(pub(super) Arc<Shared>);

impl Exports {
    pub(super) fn inner(&self) -> MutexGuard<'_, Inner> {
        self.0.inner.lock()
    }

    /// Readable when [`Exports::advance`] has something to do.
    pub(crate) fn changed(&self) -> BorrowedFd<'_> {
        self.0.changed.as_fd()
    }

    /// The notifier behind [`Exports::changed`].
    pub(crate) fn notifier(&self) -> Arc<Notifier> {
        Arc::clone(&self.0.changed)
    }

    /// Starts a thread that opens the devices of a group. Returns the new state of the group.
    ///
    /// [`Exports::advance`] takes the devices over when the thread has ended.
    pub(super) fn opening(
        &self,
        id: u64,
        specs: Vec<DeviceSpec>,
        open: impl FnOnce(&Self, &LockWait) -> Start + Send + 'static,
    ) -> State {
        let (exports, wait, devices) = (self.clone(), Arc::new(LockWait::default()), specs.clone());
        let (state, name) = (State::Opening(wait.clone()), format!("open-{}", specs[0].name));
        let open = move || {
            let start = caught(|| open(&exports, &wait)).unwrap_or_else(|words| {
                Err(all_failed(&specs, |_| format!("internal error: a thread panicked: {words}")))
            });
            exports.inner().opened.push((id, start));
            exports.0.changed.signal();
        };
        match std::thread::Builder::new().name(name).spawn(open) {
            Ok(_) => state,
            Err(error) => {
                State::Failed(all_failed(&devices, |_| format!("cannot start a thread to open it: {error}")))
            }
        }
    }
}

/// Serves all devices of a group, or none. `members`: one for each of `specs`.
pub(super) fn all_or_none<T>(
    specs: &[DeviceSpec],
    members: Vec<T>,
    mut serve: impl FnMut(&DeviceSpec, T) -> Result<ServedDevice, anyhow::Error>,
) -> Start {
    let mut served = Vec::new();
    for (spec, member) in specs.iter().zip(members) {
        let _named = LogDevice::enter(Some(spec.name.as_str().into()));
        match serve(spec, member) {
            Ok(device) => served.push(device),
            Err(error) => {
                served.into_iter().for_each(ServedDevice::stop);
                return Err(failed_by(specs, spec, &error));
            }
        }
    }
    Ok(served)
}

impl Inner {
    pub(super) fn id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    pub(super) fn served(&self) -> impl Iterator<Item = &ServedDevice> {
        let members = self.groups.iter().filter_map(|group| match &group.state {
            State::Served(members) => Some(members),
            _ => None,
        });
        members.flatten()
    }

    /// Devices that stop, as far as they are open.
    pub(super) fn stopping(&self) -> impl Iterator<Item = &ServedDevice> {
        self.leaving.iter().filter_map(|leaving| leaving.members.as_ref()).flatten()
    }

    /// Begins to stop a group.
    pub(super) fn leave(&mut self, group: Group, sessions: Sessions) {
        let Group { id, specs, state, has_session, .. } = group;
        let members = match state {
            State::Waiting | State::Failed(_) => return,
            State::Opening(wait) => {
                wait.cancel();
                None
            }
            State::Served(mut members) => {
                members.iter_mut().for_each(|member| member.begin_stop(sessions));
                Some(members)
            }
        };
        self.leaving.push(Leaving { has_session, ..Leaving::new(id, specs, members) });
    }

    /// Whether no group is opening, waiting or stopping.
    pub(super) fn is_settled(&self) -> bool {
        let rests = |group: &Group| {
            group.next.is_none() && (group.has_failed() || matches!(group.state, State::Served(_)))
        };
        self.leaving.is_empty() && self.groups.iter().all(rests)
    }
}
