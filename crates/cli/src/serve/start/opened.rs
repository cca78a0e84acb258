//! The third stage: the devices are open, and privileges are dropped.
//!
//! A take-over and a recovery differ here only: each device must match what the guest of the other daemon,
//! or of the daemon that has ended, has read.
use super::claimed::KeptSessions;
use super::sandboxed::Sandboxed;
use super::setup::Setup;
use crate::failure::{self, Failure};
use crate::kinds::opening::{Earlier, LinkEnds, OpenContext, Opening};
use crate::log;
use crate::serve::shelf::KeptSession;
use crate::serve::signals::{Request, Signals};
use crate::serve::spec::{self, DeviceSpec};
use crate::serve::take_over::Taker;
use crate::serve::told::{self, Told};
use crate::serve::{open, sandbox};
use anyhow::{Context, anyhow};
use paravane_notify::Notifier;
use paravane_vhost::KnownToDriver;
use std::collections::HashMap;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::mpsc::{TryRecvError, channel};

pub(super) struct Opened {
    pub(super) sandboxed: Sandboxed,
    pub(super) devices: Vec<OpenedDevice>,
    /// Sessions of a daemon that has ended, by device.
    pub(super) sessions: HashMap<String, KeptSession>,
    /// The daemon that hands its sessions over.
    pub(super) taker: Option<Taker>,
}

impl Opened {
    /// Opens the devices, checks that guests would find them as they were, and drops privileges.
    ///
    /// `None`: a signal ended the wait.
    ///
    /// # Errors
    /// A device cannot be opened or differs, the other daemon refuses, or the host fails.
    pub(super) fn open(
        mut sandboxed: Sandboxed,
        setup: &Setup<'_>,
        devices: Vec<DeviceSpec>,
    ) -> Result<Option<Self>, Failure> {
        let KeptSessions { shelf, found, .. } = &mut sandboxed.claimed.kept;
        let specs = devices.clone();
        let sessions = match shelf {
            Some(shelf) => {
                shelf.divide(devices.len());
                shelf.sessions(std::mem::take(found), &specs)
            }
            None => HashMap::new(),
        };
        let is_kept = shelf.is_some();
        let mut told = recorded(&sessions, &specs);
        let copy = |(name, session): (&String, &KeptSession)| {
            let told = told.get(name).cloned().unwrap_or_default();
            Ok((name.clone(), Earlier { fds: session.kept.device_fds()?, told }))
        };
        let earlier = sessions.iter().map(copy).collect::<io::Result<_>>()?;
        let each = setup.each();
        let how = match (setup.args.take_over, each) {
            (true, _) => How::TakeOver,
            (false, true) => How::Each {
                unusable: std::mem::take(&mut sandboxed.unusable),
                changes_user: sandboxed.claimed.user.is_some(),
            },
            (false, false) => How::All,
        };
        let context = sandboxed.opening.clone();
        let Some(opened) = open_all(devices, context, &sandboxed.claimed.signals, how, earlier)? else {
            return Ok(None);
        };
        let mut devices = match each {
            true => at_least_one(opened, &sessions)?,
            false => all(opened)?.into_iter().map(|(spec, opening)| (spec, Ok(opening))).collect(),
        };
        // Before privileges are dropped, which the socket may need.
        let taker = ask(&sandboxed, &devices)?;
        let what = match &taker {
            Some(taker) => {
                told = taker.told();
                told::NOT_TAKEN
            }
            None => told::NOT_RESUMED,
        };
        check_told(&mut devices, &told, is_kept, what, each)?;
        match &sandboxed.claimed.user {
            user if sandboxed.opening.allowed.is_some() => {
                sandbox::drop_privileges(user.as_ref(), sandboxed.capabilities)?;
            }
            Some(user) => user.become_user()?,
            None => {}
        }
        // From here on no thread waits for stderr.
        log::start_writing();
        Ok(Some(Self { sandboxed, devices, sessions, taker }))
    }
}

/// Asks the daemon that is to be taken over from, if there is one.
fn ask(sandboxed: &Sandboxed, devices: &[OpenedDevice]) -> Result<Option<Taker>, Failure> {
    let Some(old) = &sandboxed.claimed.old else { return Ok(None) };
    // From `begin` on clients wait.
    paravane_device::latency::calibrate();
    let open = devices.iter().filter_map(|(spec, opening)| Some((spec, opening.as_ref().ok()?)));
    let wanted: Vec<_> = open.map(|(spec, opening)| opening.wanted(spec)).collect();
    let taker = Taker::ask(&old.control, &wanted).map_err(Failure::request)?;
    if let Some(address) = old.port.filter(|address| !taker.has_metrics(*address)) {
        return Err(Failure::request(anyhow!("metrics: {address} is in use by another process")));
    }
    Ok(Some(taker))
}

/// What the guests of sessions that are kept were told, by device.
fn recorded(sessions: &HashMap<String, KeptSession>, specs: &[DeviceSpec]) -> HashMap<String, Told> {
    let told = |spec: &DeviceSpec| {
        // A record that cannot be read is refused when it is resumed.
        let known = KnownToDriver::recorded(sessions.get(&spec.name)?.kept.handover()).ok()??;
        Some((spec.name.clone(), spec::told_recorded(spec.kind.kind(), &known)))
    };
    specs.iter().filter_map(told).collect()
}

/// Opens all devices in a separate thread, as storage may hang.
///
/// `earlier`: what an earlier one had of devices.
/// `None`: a signal ended the wait.
fn open_all(
    devices: Vec<DeviceSpec>,
    context: OpenContext,
    signals: &Signals,
    mut how: How,
    mut earlier: HashMap<String, Earlier>,
) -> Result<Option<Vec<OpenedDevice>>, Failure> {
    let (sender, receiver) = channel();
    let done = Arc::new(Notifier::new(false).context("cannot create an eventfd")?);
    let signal = Arc::clone(&done);
    let open = move || {
        let mut link_ends = LinkEnds::default();
        // Without one of them, there are none.
        let needs_all = !matches!(how, How::Each { .. });
        let mut open = |spec: &DeviceSpec| {
            let kept = earlier.remove(&spec.name).unwrap_or_default();
            match &mut how {
                How::TakeOver => open::prepare(spec, &mut link_ends, &context),
                How::All => open::open(spec, &mut link_ends, &context, kept),
                How::Each { unusable, changes_user } => match unusable.remove(&spec.name) {
                    Some(error) => Err(error),
                    None => match open::without_servers(spec, *changes_user)? {
                        Some(opening) => Ok(opening),
                        None => open::open(spec, &mut link_ends, &context, kept),
                    },
                },
            }
        };
        let mut opened = Vec::new();
        for spec in devices {
            let opening = open(&spec);
            let ends = opening.is_err() && needs_all;
            opened.push((spec, opening));
            if ends {
                break;
            }
        }
        // After a signal the receiver is gone.
        drop(sender.send(opened));
        signal.signal();
    };
    let thread = std::thread::Builder::new().name("open".into()).spawn(open)?;
    loop {
        match receiver.try_recv() {
            Ok(opened) => {
                // The thread must have ended before privileges are dropped: see `sandbox`.
                let _ = thread.join();
                return Ok(Some(opened));
            }
            // The thread panicked.
            Err(TryRecvError::Disconnected) => {
                let panic = thread.join().err();
                return Err(anyhow!(
                    "cannot open the devices: {}",
                    panic.map_or("internal error", |_| "a thread panicked")
                )
                .into());
            }
            Err(TryRecvError::Empty) => {}
        }
        if signals.wait(&[done.as_fd()], None)? == Some(Request::End) {
            return Ok(None);
        }
    }
}

/// How devices are opened at the start.
enum How {
    /// As far as the daemon allows that serves them.
    TakeOver,
    All,
    /// Each for itself.
    Each {
        /// Devices that are known to be unusable, and why.
        unusable: HashMap<String, anyhow::Error>,
        /// The process becomes another user later.
        changes_user: bool,
    },
}

/// A device that is open, or why it is not.
pub(super) type OpenedDevice = (DeviceSpec, Result<Opening, anyhow::Error>);

/// The devices, if all of them are open.
pub(super) fn all(opened: Vec<OpenedDevice>) -> Result<Vec<(DeviceSpec, Opening)>, Failure> {
    let one = |(spec, opening): OpenedDevice| {
        let opening = opening.with_context(|| format!("device {}", spec.name)).map_err(Failure::request)?;
        Ok((spec, opening))
    };
    opened.into_iter().map(one).collect()
}

/// The devices, if one of them is open or a session waits for one.
fn at_least_one(
    opened: Vec<OpenedDevice>,
    sessions: &HashMap<String, KeptSession>,
) -> Result<Vec<OpenedDevice>, Failure> {
    match sessions.is_empty() && !opened.is_empty() && opened.iter().all(|(_, opening)| opening.is_err()) {
        true => Err(none_open(&opened)),
        false => Ok(opened),
    }
}

/// Why none of these devices is open.
fn none_open(opened: &[OpenedDevice]) -> Failure {
    let why = |(spec, opening): &OpenedDevice| {
        opening.as_ref().err().map(|error| format!("device {}: {}", spec.name, failure::one_line(error)))
    };
    let why: Vec<_> = opened.iter().filter_map(why).collect();
    Failure::request(anyhow!(why.join("; ")))
}

/// Checks that guests would be told of their devices what they were `told`.
///
/// `each`: one that differs is not served, and its session stays kept. `what`: what cannot be done.
///
/// # Errors
/// A device differs, and none is left.
fn check_told(
    opened: &mut [OpenedDevice],
    told: &HashMap<String, Told>,
    is_kept: bool,
    what: &'static str,
    each: bool,
) -> Result<(), Failure> {
    let mut differs = false;
    for (spec, opening) in &mut *opened {
        let (Ok(open), Some(told)) = (&mut *opening, told.get(&spec.name)) else { continue };
        match open.check_told(spec, told, is_kept) {
            Ok(()) => {}
            Err(error) if each => {
                *opening = Err(error.context(what));
                differs = true;
            }
            Err(error) => {
                return Err(Failure::request(error.context(format!("device {}", spec.name)).context(what)));
            }
        }
    }
    match differs && opened.iter().all(|(_, opening)| opening.is_err()) {
        true => Err(none_open(opened)),
        false => Ok(()),
    }
}
