//! The main loop of a daemon that serves.
use super::args::ServeArgs;
use super::control::Control;
use super::exports::{Exports, Startup};
use super::metrics::Metrics;
use super::network_events::NetworkEvents;
use super::process::{self, ProcessFiles};
use super::reloader::{Configuration, Reloader};
use super::report::{self, Report};
use super::sandbox;
use super::signals::{Request, Signals};
use super::snapshot::SnapshotServer;
use super::snapshot::messages::SnapshotRequest;
use super::systemd::Manager;
use super::take_over::Giver;
use super::trace::lines::{Ask, HandOverRequest};
use crate::failure::Failure;
use anyhow::anyhow;
use sd_notify::NotifyState;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Longest wait for the images of a file's devices before the daemon is ready.
const START_PATIENCE: Duration = Duration::from_secs(2);
/// Time between two looks at devices that wait for their images at the start.
const STARTUP_INTERVAL: Duration = Duration::from_secs(1);

/// Where the daemon's report is served.
pub(super) struct Observers<'a> {
    pub(super) control: Option<&'a Control>,
    pub(super) metrics: Option<Metrics>,
    pub(super) process: Arc<ProcessFiles>,
    pub(super) giver: Option<Arc<Giver>>,
    /// Number of take-overs before this daemon.
    pub(super) take_overs: u64,
    /// Tells of changes of the host's network, if cards on TAP devices may be served.
    pub(super) network: Option<NetworkEvents>,
}

/// The loop, and what it looks at.
pub(super) struct Run<'a> {
    configuration: &'a Configuration<'a>,
    exports: &'a Exports,
    signals: &'a Signals,
    manager: &'a Manager,
    /// Deny opening files when it is ready, and if this is false also connecting.
    seal: Option<bool>,
    reloader: Reloader<'a>,
    start: Instant,
    is_ready: bool,
}

impl<'a> Run<'a> {
    pub(super) fn new(
        configuration: &'a Configuration<'a>,
        exports: &'a Exports,
        signals: &'a Signals,
        manager: &'a Manager,
        seal: Option<bool>,
    ) -> Self {
        let reloader = Reloader::new(configuration, exports);
        Self {
            configuration,
            exports,
            signals,
            manager,
            seal,
            reloader,
            start: Instant::now(),
            is_ready: false,
        }
    }

    /// Serves until SIGTERM or SIGINT, or until another daemon has the devices.
    ///
    /// # Errors
    /// The devices cannot be served, or the host fails.
    pub(super) fn until_end(mut self, observers: Observers<'_>) -> Result<(), Failure> {
        let (giver, network) = (observers.giver.clone(), self.observe(observers)?);
        let has_begun = || giver.as_ref().is_some_and(|giver| giver.has_begun());
        loop {
            let turn = self.exports.advance();
            if giver.as_ref().is_some_and(|giver| giver.outcome().is_some()) {
                return Ok(());
            }
            if turn.told {
                self.manager.tell(&[NotifyState::Ready]);
            }
            self.reloader.step(&turn, self.manager, &has_begun);
            match self.is_ready {
                true => self.manager.status(status_line(self.exports)),
                false => self.start_up()?,
            }
            let time = match self.is_ready {
                true => turn.time,
                false => Some(turn.time.map_or(STARTUP_INTERVAL, |time| time.min(STARTUP_INTERVAL))),
            };
            if self.exports.has_run_out() {
                tracing::info!("the VMM has disconnected from the inherited socket: exiting");
                return Ok(());
            }
            let network = network.as_ref();
            let others: Vec<_> =
                [self.exports.changed()].into_iter().chain(network.map(AsFd::as_fd)).collect();
            let signal = self.signals.wait(&others, time)?;
            if let Some(network) = network {
                self.exports.network_changed(&network.take());
            }
            match signal {
                None => {}
                Some(_) if has_begun() => {
                    tracing::warn!("signal ignored: the devices are being handed over");
                }
                Some(Request::End) => return Ok(()),
                Some(Request::Reload) => self.reload(),
            }
        }
    }

    /// Has reports, traces and requests answered. Returns what tells of changes of the network.
    fn observe(&self, observers: Observers<'_>) -> Result<Option<NetworkEvents>, Failure> {
        let Observers { control, metrics, process, giver, take_overs, network } = observers;
        let report = || {
            let (exports, process) = (self.exports.clone(), process.clone());
            move || Report {
                open_files: process.count(),
                max_open_files: process::limit(),
                process: process.report(),
                log: report::Log::now(),
                take_overs,
                ..exports.report()
            }
        };
        let [control_moved, metrics_moved] =
            giver.as_ref().map_or_else(Default::default, |giver| giver.moved.clone());
        if let (Some(control), Some(giver)) = (control, giver) {
            let traced = self.exports.clone();
            let snapshots = SnapshotServer::new(self.exports.clone());
            let reloads = self.reloader.server.clone();
            let give = move |stream, ask| match ask {
                Ask::HandOver(HandOverRequest { version }) => giver.answer(stream, version),
                Ask::Snapshot(SnapshotRequest { device }) => snapshots.answer(stream, device),
                Ask::Reload(_) => reloads.answer(stream),
                // Answered by the control thread itself.
                Ask::Trace(_) => Ok(()),
            };
            control.serve(report(), move |device| traced.trace(device), give, control_moved)?;
        }
        if let Some(metrics) = metrics {
            metrics.serve(report(), metrics_moved)?;
        }
        Ok(network)
    }

    /// Becomes ready once the devices are served, as far as they can be.
    fn start_up(&mut self) -> Result<(), Failure> {
        let Configuration { args, file, .. } = *self.configuration;
        let has_file = args.config.is_some();
        self.is_ready = match self.exports.startup() {
            Startup::Complete => true,
            Startup::Failed { why, is_settled: true } if has_file && !self.exports.is_of_use() => {
                return Err(Failure::request(anyhow!(why)));
            }
            // The daemon of a file serves the others meanwhile.
            Startup::Failed { is_settled: true, .. } if has_file => true,
            _ if has_file => self.start.elapsed() >= START_PATIENCE,
            Startup::Waiting => false,
            // The others have clients of the old daemon.
            Startup::Failed { .. } if args.take_over && self.exports.serves_any() => true,
            Startup::Failed { why, .. } => return Err(anyhow!(why).into()),
        };
        match self.is_ready {
            true => {
                file.iter().for_each(|file| file.warn());
                become_ready(args, self.manager, self.seal)?;
                self.manager.status(status_line(self.exports));
            }
            // Most devices begin at once.
            false if self.start.elapsed() >= STARTUP_INTERVAL => self.manager.starting(STARTUP_INTERVAL * 10),
            false => {}
        }
        Ok(())
    }

    /// SIGHUP: reads the file again, or checks the host's side of the device.
    fn reload(&mut self) {
        if self.configuration.file.is_some() {
            self.reloader.is_signalled = true;
            return;
        }
        self.manager.reloading();
        self.exports.refresh();
        self.manager.tell(&[NotifyState::Ready]);
    }
}

/// What a service manager shows while a device is not served.
fn status_line(exports: &Exports) -> String {
    exports.not_served().map_or_else(String::new, |why| {
        let (served, all) = exports.count();
        format!("serving {served} of {all} devices; not served: {why}")
    })
}

/// Drops the last rights, and reports readiness.
fn become_ready(args: &ServeArgs, manager: &Manager, seal: Option<bool>) -> Result<(), anyhow::Error> {
    if let Some(connects) = seal {
        sandbox::calls::seal(connects)?;
    }
    if let Some(file) = &args.try_sandbox {
        sandbox::probe::run(file);
    }
    tracing::info!("ready");
    manager.ready();
    Ok(())
}
