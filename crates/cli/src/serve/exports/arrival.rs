//! Devices whose sessions come from another daemon, and devices that go to one.
//!
//! ```text
//!   new daemon:  Opening --session arrives--> image locked --> resumed --> Served
//!                   '----it does not--------> opened anew, and started -----^
//!   old daemon:  Served --> Stopping (drained) --> its state is sent --> gone
//! ```
//! A session that a dead daemon had kept does not arrive: see [`super::begin`].
use super::super::open;
use super::super::report;
use super::super::spec::DeviceSpec;
use super::super::take_over::Offered;
use super::super::told::Told;
use super::context::ExportContext;
use super::group::{Group, Leaving, State, groups};
use super::lock_wait::LockWait;
use super::served::{ServedDevice, Session};
use super::state::{Exports, Inner, Start, all_or_none};
use crate::failure::one_line;
use crate::kinds::opening::{Earlier, LinkEnds, Opening};
use anyhow::Context;
use paravane_dma::MappingQuota;
use paravane_export::Handover;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender};
use std::time::{Duration, Instant};

/// Longest wait for what a dying daemon still holds: images, TAP devices, sockets.
const RELEASE_PATIENCE: Duration = Duration::from_secs(20);
/// Longest wait for a TAP device that the old daemon has released.
const LATE_PATIENCE: Duration = Duration::from_secs(2);
/// Time between two attempts.
const RELEASE_INTERVAL: Duration = Duration::from_millis(1);

/// Tells another daemon whether the device of this name is resumed, or why not.
pub(crate) type AnswerFn = dyn Fn(&str, Result<(), String>) + Send + Sync;

/// Sessions that another daemon hands over.
pub(crate) struct Arrivals {
    /// By the name of the device. A closed channel: it does not arrive.
    pub(crate) receivers: HashMap<String, Receiver<Handover>>,
    /// Tells the other daemon whether a device is resumed.
    pub(crate) answer: Arc<AnswerFn>,
}

/// A device that waits for its session.
struct Arriving {
    opening: Opening,
    quota: MappingQuota,
    /// `None`: its session does not come. The running daemon still has the image.
    receiver: Option<Receiver<Handover>>,
}

/// Tries again until `patience` ends: another daemon may be about to release something.
fn until_released<T, E>(patience: Duration, attempt: impl Fn() -> Result<T, E>) -> Result<T, E> {
    let begun = Instant::now();
    loop {
        match attempt() {
            Err(_) if begun.elapsed() < patience => std::thread::sleep(RELEASE_INTERVAL),
            result => return result,
        }
    }
}

impl Exports {
    /// Serves devices as their sessions arrive.
    ///
    /// # Errors
    /// The host is out of descriptors.
    pub(crate) fn take_over(
        opened: Vec<(DeviceSpec, Opening)>,
        context: ExportContext,
        arrivals: Arrivals,
    ) -> Result<Self, anyhow::Error> {
        let Arrivals { mut receivers, answer } = arrivals;
        let exports = Self::start(Vec::new(), context)?;
        let specs: Vec<DeviceSpec> = opened.iter().map(|(spec, _)| spec.clone()).collect();
        let mut arriving: HashMap<String, Arriving> = HashMap::new();
        for (spec, opening) in opened {
            let quota = exports.0.context.pool.quota();
            let receiver = receivers.remove(&spec.name);
            arriving.insert(spec.name, Arriving { opening, quota, receiver });
        }
        let mut inner = exports.inner();
        for specs in groups(specs) {
            let members: Vec<_> = specs.iter().filter_map(|spec| arriving.remove(&spec.name)).collect();
            let mut group = Group::new(inner.id(), specs.clone());
            let (devices, answer) = (specs.clone(), answer.clone());
            group.enter(exports.opening(group.id, specs, move |exports, wait| {
                exports.take(&devices, members, wait, &*answer)
            }));
            inner.groups.push(group);
        }
        drop(inner);
        Ok(exports)
    }

    /// Resumes or starts all devices of a group, or none.
    fn take(
        &self,
        specs: &[DeviceSpec],
        mut members: Vec<Arriving>,
        wait: &LockWait,
        answer: &AnswerFn,
    ) -> Start {
        // Until the sessions of both cards of a link are resumed.
        let _holds: Vec<_> = members.iter_mut().map(|member| member.opening.hold()).collect();
        all_or_none(specs, members, |spec, Arriving { opening, quota, receiver }| {
            let Some(session) = receiver.and_then(|receiver| receiver.recv().ok()) else {
                return self.start_anew(spec, wait);
            };
            let result = self.serve(spec, opening, quota, wait, Some(Session::Handed(session)));
            answer(&spec.name, result.as_ref().map(drop).map_err(one_line));
            result.or_else(|error| {
                self.not_resumed(spec, &error);
                self.start_anew(spec, wait)
            })
        })
    }

    /// Serves a device that is open, with this session.
    pub(super) fn serve(
        &self,
        spec: &DeviceSpec,
        opening: Opening,
        quota: MappingQuota,
        wait: &LockWait,
        session: Option<Session>,
    ) -> Result<ServedDevice, anyhow::Error> {
        let context = &self.0.context;
        let ahead = matches!(opening, Opening::Ahead(_));
        let told = session.as_ref().map_or_else(Told::default, |session| session.told(spec.kind.kind()));
        let mut opening = opening;
        opening.keep(&told);
        let opening = match opening {
            Opening::Late(_) => {
                let open = || {
                    let fds = session.as_ref().map_or_else(|| Ok(Vec::new()), Session::device_fds)?;
                    let earlier = Earlier { fds, told: told.clone() };
                    open::open(spec, &mut LinkEnds::default(), &context.opening, earlier)
                };
                // A descriptor store may have a copy of the old daemon's for a moment.
                until_released(LATE_PATIENCE, open)?
            }
            // The old daemon has released it.
            opening => opening.go_on(&context.opening)?,
        };
        let device = wait.wait(&spec.name, opening)?;
        let device = ServedDevice::start(spec.clone(), device, quota, context, &self.0.changed, session)?;
        if ahead {
            // The store may have grown since.
            device.refresh();
        }
        Ok(device)
    }

    /// Opens and starts a device whose session is not resumed.
    pub(super) fn start_anew(
        &self,
        spec: &DeviceSpec,
        wait: &LockWait,
    ) -> Result<ServedDevice, anyhow::Error> {
        let context = &self.0.context;
        let start = || {
            let opening = open::open(spec, &mut LinkEnds::default(), &context.opening, Earlier::default())?;
            let device = wait.wait(&spec.name, opening)?;
            ServedDevice::start(spec.clone(), device, context.pool.quota(), context, &self.0.changed, None)
        };
        until_released(RELEASE_PATIENCE, start).context("cannot start it anew")
    }

    /// The devices that can be handed over.
    ///
    /// # Errors
    /// Devices start or stop at the moment.
    pub(crate) fn offered(&self) -> Result<Vec<Offered>, String> {
        self.inner().offered()
    }

    /// Begins to hand over all devices; [`Exports::advance`] sends each to `sender`.
    ///
    /// `offered`: what the other daemon was told.
    ///
    /// # Errors
    /// As [`Exports::offered`], or that is not true any more.
    pub(crate) fn begin_hand_over(
        &self,
        offered: &[Offered],
        sender: Sender<(String, Result<Handover, String>)>,
    ) -> Result<(), String> {
        let mut inner = self.inner();
        let now = inner.offered()?;
        if now.len() != offered.len() || now.iter().zip(offered).any(|(now, then)| !now.is(then)) {
            return Err("a device has changed since it was offered, by a snapshot for example".to_owned());
        }
        for group in std::mem::take(&mut inner.groups) {
            let failed = group.failures().to_vec();
            let Group { id, specs, state, .. } = group;
            match state {
                State::Served(mut members) => {
                    members.iter_mut().for_each(ServedDevice::begin_hand_over);
                    inner.leaving.push(Leaving::new(id, specs, Some(members)));
                }
                State::Opening(wait) => wait.cancel(),
                State::Failed(_) | State::Waiting => {}
            }
            for report::Failed { name, why, .. } in failed {
                drop(sender.send((name, Err(format!("not served: {why}")))));
            }
        }
        inner.handing_over = Some(sender);
        inner.handed = Some(Vec::new());
        drop(inner);
        self.0.changed.signal();
        Ok(())
    }

    /// Names of the devices that are not drained.
    pub(crate) fn not_handed_over(&self) -> Vec<String> {
        let inner = self.inner();
        inner.stopping().filter(|member| member.handing_over).map(|member| member.spec.name.clone()).collect()
    }

    /// Unmaps the memory of clients and images that another daemon serves now.
    pub(crate) fn drop_handed(&self) {
        let handed = self.inner().handed.take();
        drop(handed);
    }

    /// Whether a device is served, or will be.
    pub(crate) fn serves_any(&self) -> bool {
        self.inner().groups.iter().any(|group| !group.has_failed())
    }
}

impl Inner {
    /// As [`Exports::offered`].
    fn offered(&self) -> Result<Vec<Offered>, String> {
        if self.reload.as_ref().is_some_and(|reload| !reload.is_reported) || !self.is_settled() {
            return Err("devices are starting or stopping: try again later".to_owned());
        }
        if let Some(device) = self.taking() {
            return Err(format!("a snapshot of device {device} is being taken: try again later"));
        }
        if let Some(device) = self.kept.keys().next() {
            return Err(format!(
                "device {device} is not served, and its session is kept: wait until it is, or restart the daemon"
            ));
        }
        let offered = |group: &Group| match &group.state {
            State::Served(members) => members.iter().map(ServedDevice::offered).collect(),
            // It is opened anew.
            _ => {
                let offer =
                    |spec: &DeviceSpec| Offered { image: None, ..Offered::new(spec, None, Told::default()) };
                group.specs.iter().map(offer).collect::<Vec<_>>()
            }
        };
        Ok(self.groups.iter().flat_map(offered).collect())
    }

    /// Sends the devices that are drained.
    pub(super) fn send_drained(&mut self) {
        self.leaving.iter_mut().for_each(Leaving::hand_on);
        let Some(sender) = &self.handing_over else { return };
        let members = self.leaving.iter_mut().filter_map(|leaving| leaving.members.as_mut()).flatten();
        let mut left = false;
        for member in members.filter(|member| member.handing_over) {
            match member.take_handover() {
                Some(result) => drop(sender.send((member.spec.name.clone(), result))),
                None => left = true,
            }
        }
        if !left {
            self.handing_over = None;
        }
    }
}
