//! The second stage: helper processes run, files outside the sandbox are read, the sandbox is closed.
use super::claimed::Claimed;
use super::setup::Setup;
use crate::failure::Failure;
use crate::fds;
use crate::kinds::endpoint::Endpoint;
use crate::kinds::opening::OpenContext;
use crate::serve::args::DaemonArgs;
use crate::serve::broker::Broker;
use crate::serve::check::check_length;
use crate::serve::inspector::InspectorProcess;
use crate::serve::network_events::NetworkEvents;
use crate::serve::reader::ConfigFile;
use crate::serve::sandbox;
use crate::serve::sandbox::paths::AllowedPaths;
use crate::serve::sandbox::user::Target;
use crate::serve::spec::DeviceSpec;
use crate::size::Size;
use anyhow::{Context, anyhow};
use landlock::AccessFs;
use paravane_store::{CacheFolder, Connector, Direct, Location, NamedFiles};
use rustix::thread::CapabilitySet;
use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Default of --cache-size.
const CACHE_SIZE: u64 = 10 << 30;

pub(super) struct Sandboxed {
    pub(super) claimed: Claimed,
    /// The file of devices.
    pub(super) config: Option<Arc<ConfigFile>>,
    pub(super) inspector: Option<Arc<InspectorProcess>>,
    pub(super) network: Option<NetworkEvents>,
    /// What devices are opened with.
    pub(super) opening: OpenContext,
    /// Devices that are known to be unusable, and why.
    pub(super) unusable: HashMap<String, anyhow::Error>,
    /// Capabilities that it keeps when privileges are dropped.
    pub(super) capabilities: CapabilitySet,
    /// Keys that stay in reach, and the directories by which.
    pub(super) readable: Vec<(PathBuf, PathBuf)>,
    /// It connects to others later.
    pub(super) connects: bool,
}

impl Sandboxed {
    /// Starts the helper processes, reads what the sandbox hides, and closes it.
    ///
    /// # Errors
    /// A file that a device names cannot be read, or the host fails.
    pub(super) fn enter(
        claimed: Claimed,
        setup: &Setup<'_>,
        devices: &[DeviceSpec],
    ) -> Result<Self, Failure> {
        let Setup { args, daemon, .. } = setup;
        let mut locations = devices.iter().flat_map(|device| device.kind.locations());
        let uses_ceph = locations.any(|at| matches!(at, Location::Rbd(_)));
        #[cfg(feature = "rbd")]
        if uses_ceph {
            // The sandbox allows no more code in memory.
            paravane_store::rbd::load().map_err(Failure::request)?;
        }
        let allowed = (!daemon.no_sandbox).then(|| allowed_paths(setup, devices, claimed.control_path()));
        let readable = allowed.as_ref().map(|allowed| readable_keys(allowed, devices)).unwrap_or_default();
        let (connector, config) = helpers(setup, devices, allowed.as_ref(), claimed.user.as_ref())?;
        let inspector = match daemon.any_memory_file {
            true => None,
            false => Some(InspectorProcess::start(!daemon.no_sandbox)?),
        };
        let (files, unusable) = named_files(setup, devices)?;
        // The sandbox allows no such socket.
        let network = network_events(setup, devices);
        match &allowed {
            Some(allowed) => sandbox::enter(allowed)?,
            None => tracing::warn!(
                "running without a sandbox: a guest that takes over this process has all rights of its user"
            ),
        }
        let later = args.config.is_some() || args.take_over;
        let connects = devices.iter().any(|spec| matches!(spec.endpoint, Endpoint::Connect(_)));
        Ok(Self {
            claimed,
            config,
            inspector,
            network,
            opening: OpenContext { allowed: allowed.map(Arc::new), connector, cache: cache(daemon), files },
            unusable,
            capabilities: sandbox::capabilities::needed(devices, later),
            readable,
            connects: connects || uses_ceph,
        })
    }
}

/// Files that locations name, and devices that cannot be used, by their names.
type NamedAndUnusable = (NamedFiles, HashMap<String, anyhow::Error>);

/// Reads the files that locations name.
///
/// # Errors
/// One cannot be read, and the devices do not start each for itself.
fn named_files(setup: &Setup<'_>, devices: &[DeviceSpec]) -> Result<NamedAndUnusable, Failure> {
    let (files, each) = (NamedFiles::default(), setup.each());
    let mut unusable = HashMap::new();
    for device in devices {
        if each && let Some(Err(why)) = device.socket().map(check_length) {
            unusable.insert(device.name.clone(), why);
        }
        for location in device.kind.locations() {
            match files.read(location) {
                Ok(()) => {}
                Err(why) if each => drop(unusable.insert(device.name.clone(), anyhow!("{location}: {why}"))),
                Err(why) => {
                    return Err(Failure::request(anyhow!("device {}: {location}: {why}", device.name)));
                }
            }
        }
    }
    Ok((files, unusable))
}

/// What tells of changes of the host's network, if there may be cards on TAP devices.
fn network_events(setup: &Setup<'_>, devices: &[DeviceSpec]) -> Option<NetworkEvents> {
    let may_have_taps = setup.args.config.is_some() || devices.iter().any(|spec| spec.kind.tap().is_some());
    may_have_taps.then(NetworkEvents::open).transpose().unwrap_or_else(|error| {
        tracing::warn!("a TAP device that is deleted is noticed by traffic only: no netlink socket: {error}");
        None
    })
}

/// What makes the connections to the servers of images, and the file of devices.
type Helpers = (Arc<dyn Connector>, Option<Arc<ConfigFile>>);

/// Starts the processes that connect and read files for a daemon in a sandbox.
fn helpers(
    setup: &Setup<'_>,
    devices: &[DeviceSpec],
    allowed: Option<&AllowedPaths>,
    user: Option<&Target>,
) -> Result<Helpers, anyhow::Error> {
    let Setup { args, daemon, .. } = setup;
    let file = args.config.as_deref();
    let Some(allowed) = allowed else {
        return Ok((Arc::new(Direct), file.map(|file| Arc::new(ConfigFile::direct(file)))));
    };
    let locations = devices.iter().flat_map(|device| device.kind.locations());
    let targets: Vec<_> = locations.filter_map(paravane_store::target).collect();
    let way = file.and_then(|file| sandbox::writable::way_to_write(allowed, file, user));
    let name = daemon.user.as_deref();
    let has_broker = !targets.is_empty();
    let (broker, reader) = match file.is_some() && way.is_none() && has_broker {
        true => {
            let (broker, reader) = fds::pair().context("cannot create a socket")?;
            rustix::io::ioctl_fionbio(&broker, true).context("cannot create a socket")?;
            (Some(broker), Some(reader))
        }
        false => (None, None),
    };
    let connector: Arc<dyn Connector> = match has_broker {
        true => Arc::new(Broker::start(&targets, broker, name)?),
        false => Arc::new(Direct),
    };
    let file = file.map(|file| ConfigFile::start(file, name, reader, way)).transpose()?;
    Ok((connector, file.map(Arc::new)))
}

/// Keys that stay in reach of the sandbox, and the directories by which.
fn readable_keys(allowed: &AllowedPaths, devices: &[DeviceSpec]) -> Vec<(PathBuf, PathBuf)> {
    let keys = devices.iter().flat_map(|device| device.kind.locations()).flat_map(Location::keys);
    let found =
        keys.filter_map(|key| Some((key.to_owned(), allowed.above(key, AccessFs::ReadFile)?.to_owned())));
    found.collect::<BTreeSet<_>>().into_iter().collect()
}

/// Where chunks of objects are kept.
fn cache(daemon: &DaemonArgs) -> Option<CacheFolder> {
    let limit_bytes = daemon.cache_size.map_or(CACHE_SIZE, |Size(bytes)| bytes);
    daemon.cache.clone().map(|folder| CacheFolder { folder, limit_bytes })
}

/// The files and directories that the daemon needs.
fn allowed_paths(setup: &Setup<'_>, devices: &[DeviceSpec], control: Option<&Path>) -> AllowedPaths {
    let Setup { args, daemon, .. } = setup;
    let mut allowed = AllowedPaths::default();
    allowed.threads();
    let more = args.config.is_some();
    if args.config.is_some() {
        allowed.taps();
        daemon.allow.iter().for_each(|directory| allowed.directory(directory));
    }
    if let Some(cache) = &daemon.cache {
        allowed.cache(cache);
    }
    if let Some(control) = control {
        allowed.socket(control);
    }
    for device in devices {
        device.allow(&mut allowed, more);
    }
    allowed
}
