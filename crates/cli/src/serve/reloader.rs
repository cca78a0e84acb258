//! Reads the file of devices again, and begins reloads, one after the other.
//!
//! ```text
//!   SIGHUP, or a client (`paravane reload`) --> file is read, by a thread --> Exports::reload
//!                                                    '-- invalid: refused        |  ^ a snapshot is being taken
//!                                                                                '--'
//! ```
//! | | SIGHUP | `paravane reload` |
//! |---|---|---|
//! | a change for which a client has to reconnect | restarts the device, with a warning | is refused, unless the device is named |
//! | outcome | log, status | also printed, for each device |
use super::args::DaemonArgs;
use super::config::Config;
use super::exports::{Exports, Reloaded, Restarts, Turn};
use super::reader::ConfigFile;
use super::reload::{Answer, Asked, DaemonChange, ReloadServer};
use super::spec::DeviceSpec;
use super::start::Setup;
use super::systemd::Manager;
use paravane_io::caught;
use paravane_notify::Notifier;
use sd_notify::NotifyState;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};

/// A file of devices that is being read.
type Reading = Receiver<Result<Config, String>>;

/// Why a client gets no reload.
const HANDED_OVER: &str = "the devices are being handed over to another daemon: reload that one";

/// See the module.
pub(super) struct Reloader<'a> {
    setup: &'a Setup<'a>,
    file: Option<&'a Arc<ConfigFile>>,
    exports: &'a Exports,
    pub(super) server: Arc<ReloadServer>,
    /// SIGHUP has arrived.
    pub(super) is_signalled: bool,
    reading: Option<(Reading, Option<Asked>)>,
    /// A list that waits for the end of a snapshot.
    wanted: Option<(Vec<DeviceSpec>, Option<Asked>)>,
    /// Options of the daemon, as far as reloads have changed them.
    daemon: DaemonArgs,
    /// The change of these by the reload that waits.
    change: Option<DaemonChange>,
}

impl<'a> Reloader<'a> {
    pub(super) fn new(setup: &'a Setup<'a>, file: Option<&'a Arc<ConfigFile>>, exports: &'a Exports) -> Self {
        Self {
            setup,
            file,
            exports,
            server: ReloadServer::new(exports.clone()),
            is_signalled: false,
            reading: None,
            wanted: None,
            daemon: setup.daemon.clone(),
            change: None,
        }
    }

    /// Takes reloads one step further. `has_begun`: whether the devices are being handed over.
    ///
    /// After `_turn` has cleared the event that wakes the main thread: a client that asks from then on, or a
    /// file that has been read, signals it again.
    pub(super) fn step(&mut self, _turn: &Turn, manager: &Manager, has_begun: &dyn Fn() -> bool) {
        if let Some(read) = self.reading.as_ref().and_then(|(reading, _)| reading.try_recv().ok()) {
            let asked = self.reading.take().and_then(|(_, asked)| asked);
            self.read(read, asked, manager, has_begun());
        }
        if has_begun() {
            let waits = self.wanted.as_mut().and_then(|(_, asked)| asked.take());
            let asked = waits.into_iter().chain(std::iter::from_fn(|| self.server.next()));
            return asked.for_each(|asked| asked.failed(HANDED_OVER));
        }
        if let Some((devices, asked)) = self.wanted.take() {
            self.begin(devices, asked, manager);
        }
        while self.reading.is_none()
            && self.wanted.is_none()
            && let Some(asked) = self.next()
        {
            self.begin_reading(asked, manager);
        }
    }

    /// Who asks for a reload. `Some(None)`: a signal.
    fn next(&mut self) -> Option<Option<Asked>> {
        if std::mem::take(&mut self.is_signalled) {
            return Some(None);
        }
        // The outcome of the one before is known by then, mostly.
        self.exports.may_reload().then(|| self.server.next())?.map(Some)
    }

    /// Starts to read the file, or answers at once.
    fn begin_reading(&mut self, asked: Option<Asked>, manager: &Manager) {
        let refuse = |asked: Option<Asked>, why: &str| asked.into_iter().for_each(|asked| asked.failed(why));
        let Some(file) = self.file else {
            return refuse(asked, "the daemon has no file of devices (--config): there is nothing to reload");
        };
        if let Some(why) = asked.as_ref().and_then(|asked| other_file(asked, file)) {
            return refuse(asked, &why);
        }
        let is_plan = asked.as_ref().is_some_and(|asked| asked.wish.plan.is_some());
        if !is_plan {
            manager.reloading();
            self.exports.refresh();
        }
        match begin_to_read(file, self.exports.notifier()) {
            Ok(reading) => self.reading = Some((reading, asked)),
            Err(error) => {
                let why = format!("cannot start a thread to read the file: {error}");
                if !is_plan {
                    self.exports.refused(&why);
                    manager.tell(&[NotifyState::Ready]);
                }
                refuse(asked, &why);
            }
        }
    }

    /// Goes on with what was read.
    fn read(
        &mut self,
        read: Result<Config, String>,
        asked: Option<Asked>,
        manager: &Manager,
        has_begun: bool,
    ) {
        let is_plan = asked.as_ref().is_some_and(|asked| asked.wish.plan.is_some());
        let config = read.and_then(|config| {
            let is_known = |name: &str| config.devices.iter().any(|device| device.name == name);
            match asked.as_ref().and_then(|asked| asked.unknown(is_known)) {
                Some(name) => Err(format!("--restart {name}: the file has no device of this name")),
                None => Ok(config),
            }
        });
        let config = match config {
            // The new daemon has read it, too.
            Ok(_) if has_begun => {
                return asked.into_iter().for_each(|asked| asked.failed(HANDED_OVER));
            }
            Ok(config) => config,
            Err(why) => {
                if !is_plan {
                    self.exports.refused(&why);
                    manager.tell(&[NotifyState::Ready]);
                }
                return asked.into_iter().for_each(|asked| asked.failed(&why));
            }
        };
        let wanted = self.setup.args.daemon.clone().over(config.daemon);
        let change = DaemonChange::between(&self.daemon, &wanted);
        match asked {
            Some(asked) if is_plan => match self.exports.plan(config.devices, &asked.restarts()) {
                Ok(plan) => asked.answer(Answer::Plan(plan.into_iter().chain(change.outcome).collect())),
                Err(why) => asked.failed(&why),
            },
            asked => {
                self.wanted = Some((config.devices, asked));
                self.change = Some(change);
            }
        }
    }

    /// Begins a reload with a list of devices.
    fn begin(&mut self, devices: Vec<DeviceSpec>, asked: Option<Asked>, manager: &Manager) {
        let restarts = asked.as_ref().map_or(Restarts::All, Asked::restarts);
        match self.exports.reload(devices, &restarts) {
            Reloaded::Later(devices) => self.wanted = Some((devices, asked)),
            Reloaded::Refused(why) => {
                manager.tell(&[NotifyState::Ready]);
                asked.into_iter().for_each(|asked| asked.failed(&why));
            }
            Reloaded::Begun(number) => {
                let change = self.change.take();
                let outcome = change.and_then(|change| {
                    change.apply(self.setup.verbose);
                    self.daemon = change.now;
                    change.outcome
                });
                if let Some(asked) = asked {
                    let first = self.exports.outcomes(number).unwrap_or_default();
                    asked.answer(Answer::Begun(number, first, outcome));
                }
            }
        }
    }
}

/// Why a plan cannot be made: the daemon has another file than its client means.
fn other_file(asked: &Asked, file: &ConfigFile) -> Option<String> {
    let (wanted, own) = (Path::new(asked.wish.plan.as_ref()?), &*file.real);
    // The sandbox hides the file: its path was made absolute at the start.
    (wanted != own).then(|| format!("the daemon reloads {}, not {}", own.display(), wanted.display()))
}

/// Has a thread read the file of devices, as storage may hang; signals `done` at the end.
fn begin_to_read(file: &Arc<ConfigFile>, done: Arc<Notifier>) -> io::Result<Reading> {
    let file = file.clone();
    let (sender, result) = channel();
    let read = move || {
        let read = caught(|| file.read()).flatten();
        // The receiver is gone if the daemon ends.
        drop(sender.send(read));
        done.signal();
    };
    std::thread::Builder::new().name("reload".into()).spawn(read)?;
    Ok(result)
}
