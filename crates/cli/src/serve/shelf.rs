//! Sessions in a descriptor store (`--holder`).
//!
//! ```text
//!   start:      store --all descriptors--> by device --> Kept --> sessions that are resumed
//!   serving:    export --DeviceKeeper--> store           kept.DEVICE.NUMBER
//!   take-over:  the old daemon ends --> the store serves this one --> exports keep their sessions
//! ```
mod shares;

use super::spec::DeviceSpec;
use super::store::{DescriptorStore, Held, HolderStore, ManagerStore, Name, StoreError, WaitingHolder};
use super::systemd;
use anyhow::{Context, bail};
use paravane_export::keeper::RECORD;
use paravane_export::{Keeper, Kept};
use parking_lot::Mutex;
use shares::Shares;
use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// First part of the names of stored descriptors.
const PREFIX: &str = "kept";
/// Longest wait for a daemon to end that has handed over its devices.
const MOVE_PATIENCE: Duration = Duration::from_secs(120);

/// Where `--holder` has the daemon's descriptors kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place<'a> {
    /// The service manager: `systemd`.
    Manager,
    /// `paravane hold` behind this socket.
    Holder(&'a Path),
}

impl<'a> Place<'a> {
    pub(crate) fn new(path: &'a Path) -> Self {
        if path == Path::new("systemd") { Self::Manager } else { Self::Holder(path) }
    }
}

/// The store of the daemon; clones share it.
#[derive(Clone, Debug)]
pub(crate) struct Shelf(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    /// `None`: the holder serves the daemon that hands over.
    store: Option<Box<dyn DescriptorStore>>,
    shares: Shares,
    /// Devices whose sessions are not kept, and why.
    refusals: HashMap<String, String>,
}

/// Descriptors of earlier daemons by device, each with its number.
pub(crate) type Found = HashMap<String, Vec<(u64, OwnedFd)>>;

/// A session that an earlier daemon has had kept.
pub(crate) struct KeptSession {
    pub(crate) kept: Box<Kept>,
    /// Numbers of its descriptors.
    pub(crate) numbers: Vec<u64>,
}

/// The name of a stored descriptor.
fn stored_name(device: &str, number: u64) -> Result<Name, StoreError> {
    Ok(format!("{PREFIX}.{device}.{number}").parse()?)
}

/// The device and number in a name.
fn parts_of(name: &str) -> Option<(&str, u64)> {
    let (device, number) = name.strip_prefix(PREFIX)?.strip_prefix('.')?.rsplit_once('.')?;
    Some((device, number.parse().ok()?))
}

/// Whether a descriptor of the service manager with this name is a stored one.
pub(crate) fn is_stored(name: &str) -> bool {
    parts_of(name).is_some()
}

/// Checks that the store can have the descriptors of a device of this name.
///
/// # Errors
/// It cannot: a character is not allowed, or the name is too long.
pub(crate) fn check_name(device: &str) -> Result<(), anyhow::Error> {
    stored_name(device, u64::MAX).map(drop).with_context(|| format!("device {device}: a name for --holder"))
}

impl Shelf {
    fn new(store: Option<Box<dyn DescriptorStore>>) -> Self {
        Self(Arc::new(Mutex::new(State { store, shares: Shares::default(), refusals: HashMap::new() })))
    }

    /// Opens the store, with what it has.
    ///
    /// `passed`: what the service manager passed.
    ///
    /// # Errors
    /// No holder listens, or it serves another daemon; there is no service manager.
    pub(crate) fn open(place: Place<'_>, passed: Vec<Held>) -> Result<(Self, Found), anyhow::Error> {
        let (mut store, held): (Box<dyn DescriptorStore>, _) = match place {
            Place::Manager => (Box::new(manager()?), passed),
            Place::Holder(path) => {
                let mut store = HolderStore::connect(path)
                    .with_context(|| format!("cannot reach the holder at {}", path.display()))?;
                let held = store.take()?;
                (Box::new(store), held)
            }
        };
        let mut found = Found::new();
        let limit = store.limit();
        let shelf = Self::new(Some(store));
        shelf.0.lock().shares.limit = limit;
        for Held { name, fd } in held {
            match parts_of(name.as_str()) {
                Some((device, number)) => {
                    shelf.0.lock().shares.found(device);
                    found.entry(device.to_owned()).or_default().push((number, fd));
                }
                // Of another program, or a later version.
                None => tracing::warn!(%name, "unknown descriptor in the descriptor store"),
            }
        }
        Ok((shelf, found))
    }

    /// Opens the store while another daemon uses it, which hands over its devices.
    ///
    /// `ready` is called when the store serves this daemon.
    ///
    /// # Errors
    /// As [`Shelf::open`].
    pub(crate) fn open_later(place: Place<'_>) -> Result<(Self, Option<WaitingHolder>), anyhow::Error> {
        Ok(match place {
            Place::Manager => {
                // The manager serves both.
                (Self::new(Some(Box::new(manager()?))), None)
            }
            Place::Holder(path) => {
                let waiting = WaitingHolder::connect(path)
                    .with_context(|| format!("cannot reach the holder at {}", path.display()))?;
                (Self::new(None), Some(waiting))
            }
        })
    }

    /// Waits in a thread until the holder serves this daemon; then calls `ready`.
    ///
    /// # Errors
    /// There can be no more threads.
    pub(crate) fn await_holder(
        &self,
        waiting: WaitingHolder,
        ready: impl FnOnce() + Send + 'static,
    ) -> io::Result<()> {
        let shelf = self.clone();
        let wait = move || {
            let store = waiting.wait(MOVE_PATIENCE).and_then(|mut store| {
                // Those of the old daemon: its sessions have moved.
                for Held { name, .. } in store.take()? {
                    store.remove(&name)?;
                }
                Ok(store)
            });
            match store {
                Ok(mut store) => {
                    let limit = store.limit();
                    let mut state = shelf.0.lock();
                    state.shares.limit = limit;
                    state.store = Some(Box::new(store));
                    drop(state);
                    ready();
                }
                Err(error) => tracing::error!("sessions are not kept for the next process: {error}"),
            }
        };
        std::thread::Builder::new().name("holder".into()).spawn(wait)?;
        Ok(())
    }

    /// Divides the room of the store between so many devices.
    pub(crate) fn divide(&self, devices: usize) {
        self.0.lock().shares.devices = devices;
    }

    /// Why the sessions of a device are not kept.
    pub(crate) fn refusal(&self, device: &str) -> Option<String> {
        self.0.lock().refusals.get(device).cloned()
    }

    /// The keeper of a device.
    pub(crate) fn keeper(&self, device: &str) -> Box<dyn Keeper> {
        Box::new(DeviceKeeper { shelf: self.clone(), device: device.to_owned() })
    }

    /// Forgets descriptors of a device.
    pub(crate) fn forget(&self, device: &str, numbers: &[u64]) {
        let State { store: Some(store), shares, .. } = &mut *self.0.lock() else { return };
        for number in numbers {
            shares.give_back(device);
            if let Err(error) = stored_name(device, *number).and_then(|name| store.remove(&name)) {
                tracing::warn!(device, "cannot remove a descriptor from the descriptor store: {error}");
                return;
            }
        }
    }

    /// The sessions of these devices, and forgets all others.
    pub(crate) fn sessions(&self, mut found: Found, devices: &[DeviceSpec]) -> HashMap<String, KeptSession> {
        let mut sessions = HashMap::new();
        for device in devices.iter().map(|spec| &spec.name) {
            let Some(fds) = found.remove(device) else { continue };
            let numbers: Vec<u64> = fds.iter().map(|(number, _)| *number).collect();
            match Kept::open(fds) {
                Ok(Some(kept)) => {
                    sessions.insert(device.clone(), KeptSession { kept: Box::new(kept), numbers });
                }
                Ok(None) => self.forget(device, &numbers),
                Err(error) => {
                    tracing::error!(device, "session not resumed, the client has to reconnect: {error}");
                    self.forget(device, &numbers);
                }
            }
        }
        for (device, fds) in found {
            tracing::warn!(device, "device is not configured any more: its session ends");
            self.forget(&device, &fds.iter().map(|(number, _)| *number).collect::<Vec<_>>());
        }
        sessions
    }
}

/// The store of the service manager.
fn manager() -> Result<ManagerStore, anyhow::Error> {
    let Some(name) = systemd::notify_socket() else {
        bail!("--holder systemd: NOTIFY_SOCKET is not set: start the daemon by a unit of Type=notify");
    };
    ManagerStore::connect(&name).with_context(|| format!("NOTIFY_SOCKET {name:?}"))
}

/// Keeps the descriptors of one device.
#[derive(Debug)]
struct DeviceKeeper {
    shelf: Shelf,
    device: String,
}

impl DeviceKeeper {
    fn with(
        &self,
        number: u64,
        act: impl FnOnce(&mut dyn DescriptorStore, &Name) -> Result<(), StoreError>,
    ) -> io::Result<()> {
        let State { store: Some(store), .. } = &mut *self.shelf.0.lock() else {
            return Err(io::ErrorKind::WouldBlock.into());
        };
        stored_name(&self.device, number)
            .and_then(|name| act(&mut **store, &name))
            .map_err(|error| io::Error::other(error.to_string()))
    }

    fn put_one(&self, number: u64, fd: BorrowedFd<'_>) -> io::Result<()> {
        {
            let State { store: Some(_), shares, .. } = &mut *self.shelf.0.lock() else {
                return Err(io::ErrorKind::WouldBlock.into());
            };
            shares.take(&self.device).map_err(io::Error::other)?;
        }
        let put = self.with(number, |store, name| store.put(name, &[fd.as_fd()]));
        if put.is_err() {
            self.shelf.0.lock().shares.give_back(&self.device);
        }
        put
    }
}

impl Keeper for DeviceKeeper {
    fn put(&mut self, number: u64, fd: BorrowedFd<'_>) -> io::Result<()> {
        let put = self.put_one(number, fd);
        let refusals = &mut self.shelf.0.lock().refusals;
        match &put {
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => {
                refusals.insert(self.device.clone(), error.to_string());
            }
            // A session is kept from its record on.
            Ok(()) if number == RECORD => drop(refusals.remove(&self.device)),
            _ => {}
        }
        put
    }

    fn remove(&mut self, number: u64) -> io::Result<()> {
        self.shelf.0.lock().shares.give_back(&self.device);
        self.with(number, |store, name| store.remove(name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_stored_descriptors_are_read_as_they_were_made() {
        for device in ["disk", "vm0.disk", "a.1", "."] {
            let name = stored_name(device, 17).unwrap();
            assert_eq!(parts_of(name.as_str()), Some((device, 17)));
        }
        for name in ["kept", "kept.", "kept.disk", "kept.disk.", "kept.disk.x", "disk.1", "keptdisk.1"] {
            assert_eq!(parts_of(name), None, "{name}");
        }
        check_name("vm0-disk").unwrap();
        for device in ["a:b", "ä", &"n".repeat(240)] {
            check_name(device).unwrap_err();
        }
    }

    #[test]
    fn places_are_told_apart() {
        assert_eq!(Place::new(Path::new("systemd")), Place::Manager);
        assert_eq!(Place::new(Path::new("./systemd")), Place::Holder(Path::new("./systemd")));
    }
}
