//! The first stage: descriptors, signals, sockets and kept sessions are claimed.
use super::setup::Setup;
use crate::failure::Failure;
use crate::serve::control::Control;
use crate::serve::metrics::Metrics;
use crate::serve::process::ProcessFiles;
use crate::serve::sandbox::user::Target;
use crate::serve::shelf::{Found, Place, Shelf};
use crate::serve::signals::Signals;
use crate::serve::sockets::Sockets;
use crate::serve::store::{Held, WaitingHolder};
use crate::serve::systemd::Manager;
use crate::serve::{limits, take_over};
use anyhow::Context;
use paravane_dma::MappingPool;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub(super) struct Claimed {
    pub(super) sockets: Sockets,
    pub(super) signals: Signals,
    pub(super) pool: Arc<MappingPool>,
    pub(super) manager: Manager,
    pub(super) user: Option<Target>,
    pub(super) metrics: Option<Metrics>,
    /// `None`: switched off, or the other daemon has it.
    pub(super) control: Option<Control>,
    pub(super) old: Option<OldDaemon>,
    pub(super) kept: KeptSessions,
    pub(super) process: Arc<ProcessFiles>,
}

/// The daemon that is taken over from.
pub(super) struct OldDaemon {
    /// Its control socket.
    pub(super) control: PathBuf,
    /// Address of the metrics, if it may have the port.
    pub(super) port: Option<SocketAddr>,
}

/// Where sessions are kept, and those that were.
#[derive(Default)]
pub(super) struct KeptSessions {
    pub(super) shelf: Option<Shelf>,
    pub(super) found: Found,
    /// A holder that another daemon uses.
    pub(super) waiting: Option<WaitingHolder>,
}

impl Claimed {
    /// Claims descriptors, signals, sockets, and sessions that were kept.
    ///
    /// # Errors
    /// Another process has one of them, or the host fails.
    pub(super) fn claim(setup: &Setup<'_>) -> Result<Self, Failure> {
        let Setup { args, daemon, .. } = setup;
        let fd = args.device.as_ref().and_then(|device| device.endpoint.fd);
        // Before this process opens a descriptor that could have that number.
        // A daemon that takes over gets that of the old one.
        let fd = fd.filter(|_| !args.take_over);
        let (sockets, passed) = Sockets::take(fd).map_err(|error| match fd {
            Some(_) => Failure::request(error),
            None => error.into(),
        })?;
        let signals = Signals::take().context("cannot block signals")?;
        raise_descriptor_limit();
        // Before the sandbox, which hides the host's limits.
        let pool = MappingPool::new(limits::mapping(daemon).map_err(Failure::request)?);
        let manager = Manager::from_environment()?;
        let user = daemon.user.as_deref().map(Target::find).transpose().map_err(Failure::request)?;
        let mut metrics = daemon.metrics.map(Metrics::bind).transpose();
        // The old daemon may have the port.
        let port = daemon.metrics.filter(|_| args.take_over && metrics.is_err());
        if port.is_some() {
            metrics = Ok(None);
        }
        let metrics = metrics?;
        let old = match args.take_over {
            true => {
                let control = take_over::find(daemon.control.as_deref()).map_err(Failure::request)?;
                Some(OldDaemon { control, port })
            }
            false => None,
        };
        let control = match old {
            Some(_) => None,
            None => Control::open(daemon.control.as_deref())?,
        };
        if let (Some(control), Some(user)) = (&control, &user) {
            control.give_to(user)?;
        }
        let kept = KeptSessions::claim(setup, passed)?;
        let process = Arc::new(ProcessFiles::open());
        Ok(Self { sockets, signals, pool, manager, user, metrics, control, old, kept, process })
    }

    /// The control socket, also that of the other daemon.
    pub(super) fn control_path(&self) -> Option<&Path> {
        let own = self.control.as_ref().map(|control| &*control.path);
        own.or(self.old.as_ref().map(|old| &*old.control))
    }
}

impl KeptSessions {
    fn claim(setup: &Setup<'_>, passed: Vec<Held>) -> Result<Self, Failure> {
        Ok(match setup.daemon.holder.as_deref().map(Place::new) {
            // The old daemon uses it.
            Some(place) if setup.args.take_over => {
                let (shelf, waiting) = Shelf::open_later(place).map_err(Failure::request)?;
                Self { shelf: Some(shelf), found: Found::default(), waiting }
            }
            Some(place) => {
                let (shelf, found) = Shelf::open(place, passed)?;
                Self { shelf: Some(shelf), found, waiting: None }
            }
            None => Self::default(),
        })
    }
}

/// Raises the soft limit of descriptors.
///
/// A queue takes four or five, and the usual limit is 1024.
fn raise_descriptor_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current != maximum
        && let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })
    {
        let current = current.unwrap_or(u64::MAX);
        tracing::warn!(%error, "cannot raise RLIMIT_NOFILE above {current}: raise LimitNOFILE=");
    }
}
