//! The main loop of a daemon that serves.
use super::args::ServeArgs;
use super::exports::{Exports, Startup};
use super::metrics::Metrics;
use super::process;
use super::reloader::Reloader;
use super::report::{self, Report};
use super::sandbox;
use super::signals::Request;
use super::snapshot::SnapshotServer;
use super::snapshot::messages::SnapshotRequest;
use super::start::{Serving, Setup};
use super::systemd::Manager;
use super::trace::lines::{Ask, HandOverRequest};
use crate::failure::Failure;
use anyhow::anyhow;
use sd_notify::NotifyState;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

/// Longest wait for the images of a file's devices before the daemon is ready.
const START_PATIENCE: Duration = Duration::from_secs(2);
/// Time between two looks at devices that wait for their images at the start.
const STARTUP_INTERVAL: Duration = Duration::from_secs(1);

impl Serving {
    /// Serves until SIGTERM or SIGINT, or until another daemon has the devices.
    ///
    /// # Errors
    /// The devices cannot be served, or the host fails.
    pub(super) fn until_end(&mut self, setup: &Setup<'_>) -> Result<(), Failure> {
        let (metrics, network) = (self.metrics.take(), self.network.take());
        let Self { exports, signals, manager, giver, config, .. } = &*self;
        let mut reloader = Reloader::new(setup, config.as_ref(), exports);
        self.observe(metrics, &reloader)?;
        let (start, mut is_ready) = (Instant::now(), false);
        let has_begun = || giver.as_ref().is_some_and(|giver| giver.has_begun());
        loop {
            let turn = exports.advance();
            if giver.as_ref().is_some_and(|giver| giver.outcome().is_some()) {
                return Ok(());
            }
            if turn.told {
                manager.tell(&[NotifyState::Ready]);
            }
            reloader.step(&turn, manager, &has_begun);
            match is_ready {
                true => manager.status(status_line(exports)),
                false => is_ready = self.start_up(setup, start)?,
            }
            let time = match is_ready {
                true => turn.time,
                false => Some(turn.time.map_or(STARTUP_INTERVAL, |time| time.min(STARTUP_INTERVAL))),
            };
            if exports.has_run_out() {
                tracing::info!("the VMM has disconnected from the inherited socket: exiting");
                return Ok(());
            }
            let others: Vec<_> =
                [exports.changed()].into_iter().chain(network.as_ref().map(AsFd::as_fd)).collect();
            let signal = signals.wait(&others, time)?;
            if let Some(network) = &network {
                exports.network_changed(&network.take());
            }
            match signal {
                None => {}
                Some(_) if has_begun() => {
                    tracing::warn!("signal ignored: the devices are being handed over");
                }
                Some(Request::End) => return Ok(()),
                Some(Request::Reload) if config.is_some() => reloader.is_signalled = true,
                // There is no file to read again: the host's side of the device is checked.
                Some(Request::Reload) => {
                    manager.reloading();
                    exports.refresh();
                    manager.tell(&[NotifyState::Ready]);
                }
            }
        }
    }

    /// Has reports, traces and requests answered.
    fn observe(&self, metrics: Option<Metrics>, reloader: &Reloader<'_>) -> Result<(), Failure> {
        let report = || {
            let (exports, process) = (self.exports.clone(), self.process.clone());
            let take_overs = self.take_overs;
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
            self.giver.as_ref().map_or_else(Default::default, |giver| giver.moved.clone());
        if let (Some(control), Some(giver)) = (&self.control, self.giver.clone()) {
            let traced = self.exports.clone();
            let snapshots = SnapshotServer::new(self.exports.clone());
            let reloads = reloader.server.clone();
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
        Ok(())
    }

    /// Becomes ready once the devices are served, as far as they can be. Returns whether it is.
    fn start_up(&self, Setup { args, .. }: &Setup<'_>, start: Instant) -> Result<bool, Failure> {
        let has_file = args.config.is_some();
        let is_ready = match self.exports.startup() {
            Startup::Complete => true,
            Startup::Failed { why, is_settled: true } if has_file && !self.exports.is_of_use() => {
                return Err(Failure::request(anyhow!(why)));
            }
            // The daemon of a file serves the others meanwhile.
            Startup::Failed { is_settled: true, .. } if has_file => true,
            _ if has_file => start.elapsed() >= START_PATIENCE,
            Startup::Waiting => false,
            // The others have clients of the old daemon.
            Startup::Failed { .. } if args.take_over && self.exports.serves_any() => true,
            Startup::Failed { why, .. } => return Err(anyhow!(why).into()),
        };
        if is_ready {
            self.config.iter().for_each(|file| file.warn());
            become_ready(args, &self.manager, self.seal)?;
            self.manager.status(status_line(&self.exports));
        } else if start.elapsed() >= STARTUP_INTERVAL {
            // Most devices begin at once.
            self.manager.starting(STARTUP_INTERVAL * 10);
        }
        Ok(is_ready)
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
