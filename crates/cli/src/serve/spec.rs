//! Specifications of devices, validated without touching the host.
//!
//! What a reload does with a device that is served is decided by its old and new specifications: see
//! `exports::change`.
use super::sandbox::paths::AllowedPaths;
use super::told::{IN_ORDER, MISSING, PACKED, Told};
use crate::kinds::checked::{self, OptionError, real_location, real_path};
use crate::kinds::endpoint::Endpoint;
use crate::kinds::kind::{Claim, Resource, Spec};
use crate::kinds::observe::Observe;
use crate::kinds::{DeviceCommand, KINDS, Kind};
use paravane_store::Location;
use paravane_vhost::KnownToDriver;
use std::collections::HashMap;
use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// Maximum number of threads of a device.
const MAX_WORKERS: u16 = 64;

/// The specification of one device.
#[derive(Clone, Debug)]
pub(crate) struct DeviceSpec {
    pub(crate) name: String,
    pub(crate) endpoint: Endpoint,
    /// Threads of its own; `None`: it shares those of the daemon.
    pub(crate) workers: Option<u16>,
    pub(crate) longest_poll: Duration,
    pub(crate) latencies: bool,
    pub(crate) packed: bool,
    pub(crate) kind: Arc<dyn Spec>,
}

impl PartialEq for DeviceSpec {
    fn eq(&self, other: &Self) -> bool {
        let Self { name, endpoint, workers, longest_poll, latencies, packed, kind } = self;
        (name, endpoint, workers, longest_poll)
            == (&other.name, &other.endpoint, &other.workers, &other.longest_poll)
            && (*latencies, *packed) == (other.latencies, other.packed)
            && **kind == *other.kind
    }
}

impl Eq for DeviceSpec {}

/// An invalid option of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Fault {
    /// Index of the device.
    pub(crate) device: usize,
    /// Name of the option, without dashes.
    pub(crate) option: &'static str,
    pub(crate) what: String,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "--{}: {}", self.option, self.what)
    }
}

impl std::error::Error for Fault {}

impl DeviceSpec {
    /// Validates one device.
    ///
    /// # Errors
    /// An option is invalid.
    pub(crate) fn new(command: &DeviceCommand) -> Result<Self, OptionError> {
        let common = &command.endpoint;
        let name = common.name.clone().unwrap_or_else(|| command.kind.name.to_owned());
        // Names appear in tables, logs, metrics and systemd's list, which is separated by colons.
        let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        if name.is_empty() || name.len() > 64 || !name.chars().all(fits) {
            return Err(("name", format!("{name:?}: use 1 to 64 letters, digits, '-', '_' and '.'")));
        }
        let endpoint = Endpoint::from(common);
        let kind = command.arguments.check(&name, common)?;
        let workers =
            common.workers.map(|count| checked::within("workers", count, MAX_WORKERS)).transpose()?;
        let poll_us = common.poll_us.unwrap_or(kind.default_poll());
        let longest_poll = Duration::from_micros(poll_us.into());
        let latencies = common.latencies.unwrap_or(true);
        Ok(Self { name, endpoint, workers, longest_poll, latencies, packed: !common.no_packed, kind })
    }

    /// Makes paths relative to the folder of the file absolute.
    pub(crate) fn resolve(&mut self, base: &Path) {
        if let Endpoint::Listen(path) | Endpoint::Connect(path) = &mut self.endpoint {
            *path = base.join(&path);
        }
        if let Some(resolved) = self.kind.resolved(base) {
            self.kind = resolved;
        }
    }

    /// The socket in the file system, of either side.
    pub(crate) fn socket(&self) -> Option<&Path> {
        match &self.endpoint {
            Endpoint::Listen(path) | Endpoint::Connect(path) => Some(path),
            Endpoint::Activated | Endpoint::Inherited(_) => None,
        }
    }

    /// What of the host it keeps from other devices.
    pub(crate) fn claims(&self) -> Vec<Claim> {
        let option = if matches!(self.endpoint, Endpoint::Connect(_)) { "connect" } else { "socket" };
        let socket = |path: &Path| Claim {
            option,
            resource: Resource::Path(path.to_owned()),
            shares: false,
            writes: true,
        };
        self.socket().map(socket).into_iter().chain(self.kind.claims()).collect()
    }

    /// Its images that are files.
    pub(crate) fn images(&self) -> Vec<&Path> {
        self.kind.locations().into_iter().filter_map(Location::path).collect()
    }

    /// The specification after a snapshot: the disk's image is `overlay`, on the old one.
    ///
    /// Its guest keeps `serial` and the facts that it was `told`.
    pub(crate) fn on_overlay(&self, overlay: &Path, serial: &str, told: &Told) -> Self {
        let kind = self.kind.disk().map(|disk| disk.on_overlay(overlay, serial, told));
        Self { kind: kind.unwrap_or_else(|| Arc::clone(&self.kind)), ..self.clone() }
    }

    /// The image that the disk writes to, with a canonical path.
    pub(crate) fn writable_image(&self) -> Option<Location> {
        self.kind.disk()?.writable_image()
    }

    /// Allows what the device needs; with `beside`, what is in the directories of its files, too.
    pub(crate) fn allow(&self, allowed: &mut AllowedPaths, beside: bool) {
        if let Some(socket) = self.socket() {
            allowed.socket(socket);
        }
        self.kind.allow(allowed, beside);
    }

    /// What its guest has been told while it is served, with the features that its driver has accepted.
    pub(crate) fn told_running(&self, observer: &dyn Observe, accepted: u64) -> Told {
        let mut told = Told::default();
        self.kind.told(&mut told);
        observer.told(&mut told);
        accept(self.kind.kind(), accepted, &mut told);
        told
    }

    /// What its guest would be told, besides what is open. `is_kept`: by a daemon with a descriptor store.
    pub(crate) fn told_planned(&self, is_kept: bool) -> Told {
        let mut told = Told::default();
        self.kind.told(&mut told);
        if !self.packed {
            told.put(PACKED, MISSING);
        }
        if !self.kind.in_order() || is_kept {
            told.put(IN_ORDER, MISSING);
        }
        self.kind.missing(&mut told);
        told
    }
}

/// What the guest of a device was told whose daemon has ended, by what it has recorded.
pub(crate) fn told_recorded(kind: &Kind, known: &KnownToDriver) -> Told {
    let mut told = Told::default();
    (kind.recorded)(known, &mut told);
    accept(kind, known.features, &mut told);
    told
}

fn accept(kind: &Kind, features: u64, told: &mut Told) {
    told.accepted(features);
    (kind.accepted)(features, told);
}

/// Validates devices against each other.
///
/// # Errors
/// A device conflicts with one before it.
pub(crate) fn check_together(devices: &[DeviceSpec]) -> Result<(), Fault> {
    let mut names = HashMap::new();
    // The device that has it, and whether all of them can share it.
    let mut claimed: HashMap<Resource, (usize, bool)> = HashMap::new();
    for (device, spec) in devices.iter().enumerate() {
        let fault = |option, what| Err(Fault { device, option, what });
        let of = |other: usize| format!("already used by device {:?}", devices[other].name);
        if names.insert(&spec.name, device).is_some() {
            return fault("name", format!("two devices are named {:?}", spec.name));
        }
        for Claim { option, resource, shares, .. } in spec.claims() {
            let taken = claimed.insert(real(&resource), (device, shares));
            if let Some((other, others_share)) = taken
                && !(others_share && shares)
            {
                return fault(
                    option,
                    match &resource {
                        Resource::Image(location) => {
                            format!("{location} is used twice: images are shared read-only")
                        }
                        Resource::Interface(name) => format!("{name}: {}", of(other)),
                        Resource::Path(path) => format!("{}: {}", path.display(), of(other)),
                    },
                );
            }
        }
    }
    for kind in KINDS {
        let own = devices.iter().enumerate().filter(|(_, spec)| spec.kind.name() == kind.name);
        let own: Vec<_> = own.map(|(device, spec)| (device, &*spec.kind)).collect();
        (kind.check_together)(&own).map_err(|(device, (option, what))| Fault { device, option, what })?;
    }
    Ok(())
}

/// The resource, with canonical paths.
fn real(resource: &Resource) -> Resource {
    match resource {
        Resource::Image(location) => Resource::Image(real_location(location)),
        Resource::Interface(name) => Resource::Interface(name.clone()),
        Resource::Path(path) => Resource::Path(real_path(path)),
    }
}
