//! The last stage: sessions begin, resume or arrive, until a signal or another daemon ends it.
use super::claimed::{Claimed, KeptSessions, OldDaemon};
use super::opened::{Opened, all};
use super::sandboxed::Sandboxed;
use super::setup::Setup;
use crate::failure::{self, Failure};
use crate::serve::control::Control;
use crate::serve::exports::{ExportContext, Exports, Turn};
use crate::serve::idle;
use crate::serve::metrics::Metrics;
use crate::serve::network_events::NetworkEvents;
use crate::serve::process::ProcessFiles;
use crate::serve::reader::ConfigFile;
use crate::serve::signals::{Request, Signals};
use crate::serve::systemd::Manager;
use crate::serve::take_over::Giver;
use crate::serve::threads::{self, Threads};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Default time that SIGTERM waits for requests in flight.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);

pub(crate) struct Serving {
    pub(crate) exports: Exports,
    pub(crate) signals: Signals,
    pub(crate) manager: Manager,
    pub(crate) control: Option<Control>,
    pub(crate) metrics: Option<Metrics>,
    pub(crate) giver: Option<Arc<Giver>>,
    pub(crate) process: Arc<ProcessFiles>,
    pub(crate) network: Option<NetworkEvents>,
    pub(crate) config: Option<Arc<ConfigFile>>,
    /// Number of take-overs before this daemon.
    pub(crate) take_overs: u64,
    stop_timeout: Duration,
    /// Deny opening files when it is ready, and if this is false also connecting.
    pub(crate) seal: Option<bool>,
    /// Keys that stay in reach of the sandbox, and the directories by which.
    readable: Vec<(PathBuf, PathBuf)>,
}

impl Serving {
    /// Begins to serve the devices.
    ///
    /// # Errors
    /// The other daemon fails or refuses, or the host fails.
    pub(super) fn begin(opened: Opened, setup: &Setup<'_>) -> Result<Self, Failure> {
        let Opened { sandboxed, devices, sessions, taker } = opened;
        let Sandboxed { claimed, config, inspector, network, opening, readable, connects, .. } = sandboxed;
        let Claimed { sockets, signals, pool, manager, mut metrics, mut control, old, kept, process, .. } =
            claimed;
        let KeptSessions { shelf, waiting, .. } = kept;
        let stop_timeout =
            setup.daemon.stop_timeout.map_or(STOP_TIMEOUT, |seconds| Duration::from_secs(seconds.into()));
        let seals = opening.allowed.is_some() && setup.args.config.is_none();
        let is_kept = shelf.is_some();
        let threads = Threads::start(threads::count(setup.daemon).map_err(Failure::request)?)?;
        let context =
            ExportContext { sockets, opening, stop_timeout, pool, shelf: shelf.clone(), threads, inspector };
        let mut take_overs = 0;
        let exports = match taker {
            Some(taker) => {
                let needs_port = old.is_some_and(|OldDaemon { port, .. }| port.is_some());
                let took = taker.begin(needs_port)?;
                control = Some(took.control);
                metrics = metrics.or(took.metrics);
                take_overs = took.take_overs;
                Exports::take_over(all(devices)?, context, took.arrivals)?
            }
            None if is_kept || setup.each() => Exports::begin(devices, context, sessions)?,
            None => Exports::start(all(devices)?, context)?,
        };
        if let (Some(shelf), Some(waiting)) = (&shelf, waiting) {
            let exports = exports.clone();
            shelf.await_holder(waiting, move || exports.keep())?;
        }
        // From here on the sockets exist, and must be removed on every path.
        let giver = match &control {
            Some(control) => {
                let listener = control.listener.try_clone()?;
                let port = metrics.as_ref().map(|metrics| metrics.listener.try_clone()).transpose()?;
                Some(Giver::new(exports.clone(), listener, port, stop_timeout, take_overs))
            }
            None => None,
        };
        let seal = seals.then_some(connects);
        Ok(Self {
            exports,
            signals,
            manager,
            control,
            metrics,
            giver,
            process,
            network,
            config,
            take_overs,
            stop_timeout,
            seal,
            readable,
        })
    }

    /// Serves until SIGTERM or SIGINT, or until another daemon has taken over.
    ///
    /// # Errors
    /// A device cannot be served, or the host fails.
    pub(super) fn run(mut self, setup: &Setup<'_>) -> Result<(), Failure> {
        for (key, way) in &self.readable {
            tracing::warn!(
                "a guest that takes over this process could read the keys in {}, as the daemon may read in {}: keep keys and \
                 images in different directories",
                key.display(),
                way.display()
            );
        }
        let result = self.until_end(setup);
        match self.giver.as_ref().and_then(|giver| giver.outcome()) {
            Some(outcome) => self.handed_over(outcome),
            None => self.end(result),
        }
    }

    /// Ends when another daemon has the devices, or some of them.
    fn handed_over(self, outcome: Result<usize, String>) -> Result<(), Failure> {
        // The new daemon owns the sockets.
        std::mem::forget(self.control);
        match outcome {
            Ok(count) => {
                tracing::info!(devices = count, "devices handed over: exiting");
                // The new daemon and the clients come first.
                idle::run_when_idle();
                self.exports.drop_handed();
                Ok(())
            }
            Err(why) => {
                tracing::error!("handover failed: {why}: exiting");
                self.exports.log_unfinished();
                failure::exit(1)
            }
        }
    }

    /// Stops the devices, and ends.
    fn end(self, result: Result<(), Failure>) -> Result<(), Failure> {
        let Self { exports, signals, stop_timeout, control, .. } = self;
        self.manager.stopping(stop_timeout);
        let (status, why) = match end(&exports, &signals, stop_timeout) {
            End::Finished => return result,
            End::Interrupted => {
                (130, "second signal: exiting without waiting for requests in flight".to_owned())
            }
            End::Late => (
                1,
                format!(
                    "requests in flight not finished within {} s (--stop-timeout): exiting",
                    stop_timeout.as_secs()
                ),
            ),
        };
        tracing::error!("{why}");
        exports.log_unfinished();
        // Removes the socket.
        drop(control);
        failure::exit(status)
    }
}

/// How the daemon ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// All requests in flight are finished.
    Finished,
    /// The stop timeout passed first.
    Late,
    /// A second signal arrived first.
    Interrupted,
}

/// Stops all devices, within the stop timeout.
fn end(exports: &Exports, signals: &Signals, timeout: Duration) -> End {
    exports.begin_stop();
    let deadline = Instant::now() + timeout;
    loop {
        let Turn { time, .. } = exports.advance();
        if exports.is_gone() {
            return End::Finished;
        }
        let rest = deadline.saturating_duration_since(Instant::now());
        if rest.is_zero() {
            return End::Late;
        }
        match signals.wait(&[exports.changed()], time.map_or(Some(rest), |time| Some(time.min(rest)))) {
            Ok(Some(Request::End)) => return End::Interrupted,
            Ok(_) => {}
            Err(error) => {
                tracing::error!(%error, "cannot wait for signals");
                return End::Late;
            }
        }
    }
}
