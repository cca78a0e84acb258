//! Restricts the daemon to allowed paths (Landlock).
//!
//! A single device allows its image and socket. A file of devices also allows the directories of
//! its images and sockets, so that SIGHUP can add devices there. Below /dev only named devices and
//! /dev/net/tun are allowed.
use super::error::SandboxError;
use crate::kinds::checked::directory_of;
use crate::serve::process::TASKS;
use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible, NetPort, PathBeneath, PathFd,
    Ruleset, RulesetAttr, RulesetCreatedAttr, RulesetStatus, Scope,
};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// All rights of this version are restricted, as far as the kernel supports them.
const KNOWN: ABI = ABI::V7;
/// Opens TAP devices.
const TUN: &str = "/dev/net/tun";

/// Ports of the monitors of a Ceph cluster.
const CEPH_MONITORS: [u16; 2] = [3300, 6789];
/// Ports of its OSDs (`ms bind port min`, `max`).
const CEPH_OSDS: std::ops::RangeInclusive<u16> = 6800..=7568;
/// Where its configuration is by default.
const CEPH_FOLDER: &str = "/etc/ceph";
/// Read by the C library.
const CPUS: &str = "/sys/devices/system/cpu";

/// How a disk accesses its image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ImageAccess {
    /// Reads.
    Read,
    /// Reads and writes; the length stays.
    Write,
    /// Reads, writes and changes the length: qcow2 images grow by ftruncate(2).
    Grow,
}

impl ImageAccess {
    fn rights(self) -> BitFlags<AccessFs> {
        let read = AccessFs::ReadFile | AccessFs::IoctlDev;
        match self {
            Self::Read => read,
            Self::Write => read | AccessFs::WriteFile,
            Self::Grow => read | AccessFs::WriteFile | AccessFs::Truncate,
        }
    }
}

/// The version of Landlock of this kernel.
///
/// # Errors
/// The kernel has no Landlock (ENOSYS), or it is off (EOPNOTSUPP).
pub(crate) fn landlock_version() -> std::io::Result<u32> {
    /// LANDLOCK_CREATE_RULESET_VERSION of linux/landlock.h.
    const VERSION: libc::c_uint = 1;
    // SAFETY: with this flag, the kernel takes no attributes and only returns a number.
    let version = unsafe {
        libc::syscall(libc::SYS_landlock_create_ruleset, std::ptr::null::<libc::c_void>(), 0_usize, VERSION)
    };
    u32::try_from(version).map_err(|_| std::io::Error::last_os_error())
}

/// Paths that the sandbox allows, with their access rights.
#[derive(Clone, Debug, Default)]
pub(crate) struct AllowedPaths {
    rules: BTreeMap<PathBuf, BitFlags<AccessFs>>,
    /// TCP ports of servers.
    ports: BTreeSet<u16>,
    /// Connections to all TCP ports are allowed.
    pub(super) all_ports: bool,
    /// A device needs CAP_NET_ADMIN, also later. The daemon keeps it, if it was started with it.
    pub(crate) net_admin: bool,
}

impl AllowedPaths {
    /// Whether the sandbox allows all that another one would allow.
    pub(crate) fn covers(&self, other: &Self) -> bool {
        let rules: Vec<_> = self.rules.iter().map(|(path, access)| (real(path), *access)).collect();
        other.rules.iter().all(|(path, access)| {
            let path = real(path);
            let above = rules.iter().filter(|(rule, _)| path.starts_with(rule));
            above.fold(BitFlags::EMPTY, |sum, (_, access)| sum | *access).contains(*access)
        })
    }

    /// Allows a disk's image.
    ///
    /// With `beside`, also all files in its directory as images of any format.
    pub(crate) fn image(&mut self, path: &Path, access: ImageAccess, beside: bool) {
        let access = access.rights() | if beside { ImageAccess::Grow.rights() } else { BitFlags::EMPTY };
        self.allow(path, access);
        let real = real(path);
        if beside
            && !real.starts_with("/dev")
            && let Some(directory) = real.parent()
        {
            self.allow(directory, access);
        }
    }

    /// Allows to create, remove and connect to a socket.
    pub(crate) fn socket(&mut self, path: &Path) {
        self.allow(directory_of(path), AccessFs::MakeSock | AccessFs::RemoveFile);
    }

    /// Allows to keep files in a directory.
    pub(crate) fn cache(&mut self, path: &Path) {
        let files = AccessFs::MakeReg | AccessFs::RemoveFile | AccessFs::ReadDir;
        self.allow(path, ImageAccess::Grow.rights() | files);
    }

    /// Allows images and sockets in a directory.
    pub(crate) fn directory(&mut self, path: &Path) {
        self.allow(path, ImageAccess::Grow.rights() | AccessFs::MakeSock | AccessFs::RemoveFile);
    }

    /// Allows to read the file of devices.
    ///
    /// Also after an editor replaced it, and the target of a symbolic link.
    pub(crate) fn config(&mut self, path: &Path) {
        self.allow(directory_of(path), AccessFs::ReadFile.into());
        if let Ok(real) = path.canonicalize() {
            self.allow(directory_of(&real), AccessFs::ReadFile.into());
        }
    }

    /// Allows to read files in a directory.
    pub(crate) fn read(&mut self, path: &Path) {
        if path.exists() {
            self.allow(path, AccessFs::from_read(KNOWN));
        }
    }

    /// Allows connections to a TCP port.
    pub(crate) fn port(&mut self, port: u16) {
        self.ports.insert(port);
    }

    /// The path of a rule with this right, for `path` itself or a directory above it.
    pub(crate) fn above(&self, path: &Path, right: AccessFs) -> Option<&Path> {
        let path = real(path);
        let gives = |(there, access): &(&PathBuf, &BitFlags<AccessFs>)| {
            access.contains(right) && path.starts_with(real(there))
        };
        self.rules.iter().find(gives).map(|(there, _)| &**there)
    }

    /// Whether connections to a TCP port are allowed.
    pub(super) fn connects(&self) -> bool {
        self.all_ports || !self.ports.is_empty()
    }

    /// Allows what librbd needs: the cluster's ports, its configuration, and keyrings beside that.
    ///
    /// Monitors may have ports of their own, which the configuration names.
    pub(crate) fn ceph(&mut self, conf: Option<&Path>) {
        let default = Path::new(CEPH_FOLDER).join("ceph.conf");
        // Without a file, librados says so.
        let text = std::fs::read_to_string(conf.unwrap_or(&default)).unwrap_or_default();
        for port in CEPH_MONITORS.into_iter().chain(CEPH_OSDS).chain(monitor_ports(&text)) {
            self.port(port);
        }
        self.read(conf.map_or(Path::new(CEPH_FOLDER), directory_of));
        self.read(Path::new(CPUS));
    }

    /// Allows to open TAP devices.
    pub(crate) fn taps(&mut self) {
        if Path::new(TUN).exists() {
            self.allow(Path::new(TUN), AccessFs::ReadFile | AccessFs::WriteFile | AccessFs::IoctlDev);
        }
    }

    /// Allows to read figures of the threads of this process.
    pub(crate) fn threads(&mut self) {
        if Path::new(TASKS).exists() {
            self.allow(Path::new(TASKS), AccessFs::ReadFile.into());
        }
    }

    /// Allows this access to a path, and to what is below it.
    pub(crate) fn allow(&mut self, path: &Path, access: BitFlags<AccessFs>) {
        *self.rules.entry(path.to_owned()).or_default() |= access;
    }

    /// Hint for an error that the sandbox may have caused.
    pub(crate) fn remark(&self) -> String {
        let paths = self.rules.keys().filter(|path| *path != Path::new(TASKS));
        let list: Vec<_> = paths.map(|path| path.display().to_string()).collect();
        format!("the sandbox allows only {}: for other paths, restart the daemon", list.join(", "))
    }
}

/// The ports in `mon host` of a configuration of Ceph.
///
/// Addresses are HOST, HOST:PORT or \[v2:HOST:PORT/NONCE,v1:...\], an IPv6 HOST in brackets.
fn monitor_ports(conf: &str) -> Vec<u16> {
    let settings = conf.lines().filter_map(|line| line.split_once('='));
    let monitors = settings
        .filter(|(name, _)| name.trim().replace(['_', '-'], " ").split_whitespace().eq(["mon", "host"]));
    let addresses = monitors.flat_map(|(_, value)| value.split([',', ';', ' ', '\t']));
    let port = |address: &str| {
        let address = address.trim_start_matches("[v").split('/').next()?;
        let port = match address.rsplit_once("]:") {
            Some((_, port)) => port,
            None if address.contains('[') => return None,
            None => address.trim_end_matches(']').rsplit_once(':')?.1,
        };
        port.trim_end_matches(']').parse().ok()
    };
    addresses.filter_map(port).collect()
}

/// The path without links; as it is, if nothing is there.
pub(super) fn real(path: &Path) -> PathBuf {
    path.canonicalize().unwrap_or_else(|_| path.to_owned())
}

/// Denies files except `allowed`, TCP, signals and abstract sockets.
///
/// TCP: connections and ports. The last two: those of other processes.
pub(super) fn restrict(allowed: &AllowedPaths) -> Result<(), SandboxError> {
    let failed = |error: landlock::RulesetError| SandboxError::Landlock(error.to_string());
    let mut rules = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(KNOWN))
        .and_then(|rules| match allowed.all_ports {
            false => rules.handle_access(AccessNet::from_all(KNOWN)),
            true => rules.handle_access(AccessNet::BindTcp),
        })
        .and_then(|rules| rules.scope(Scope::from_all(KNOWN)))
        .and_then(Ruleset::create)
        .map_err(failed)?;
    for (path, access) in &allowed.rules {
        let file = match PathFd::new(path) {
            Ok(file) => file,
            Err(error) => {
                let source = match error {
                    landlock::PathFdError::OpenCall { source, .. } => source,
                    other => std::io::Error::other(other.to_string()),
                };
                if source.kind() != std::io::ErrorKind::NotFound {
                    return Err(SandboxError::Path { path: path.clone(), source });
                }
                // The device that needs it is not served, and says so.
                tracing::debug!(path = %path.display(), "is not there: the sandbox does not allow it");
                continue;
            }
        };
        let access = if path.is_dir() { *access } else { *access & AccessFs::from_file(KNOWN) };
        rules = rules.add_rule(PathBeneath::new(file, access)).map_err(failed)?;
    }
    for port in allowed.ports.iter().filter(|_| !allowed.all_ports) {
        rules = rules.add_rule(NetPort::new(*port, AccessNet::ConnectTcp)).map_err(failed)?;
    }
    let status = rules.restrict_self().map_err(failed)?;
    match status.ruleset {
        RulesetStatus::NotEnforced => Err(SandboxError::NoLandlock),
        RulesetStatus::FullyEnforced => Ok(()),
        // An older kernel enforces the rights that it knows.
        RulesetStatus::PartiallyEnforced => {
            tracing::info!("Landlock is partially enforced: a newer kernel restricts more");
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_lies_below_an_allowed_path_is_covered() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        std::fs::create_dir(path("images")).unwrap();
        for name in ["images/a", "images/b", "other"] {
            std::fs::write(path(name), "").unwrap();
        }
        std::os::unix::fs::symlink("images/a", path("link")).unwrap();
        let of = |name: &str, access, beside| {
            let mut allowed = AllowedPaths::default();
            allowed.image(&path(name), access, beside);
            allowed
        };
        let covers = |allowed: &AllowedPaths, name, access| allowed.covers(&of(name, access, false));
        let one = of("images/a", ImageAccess::Write, false);
        assert!(covers(&one, "images/a", ImageAccess::Write) && covers(&one, "link", ImageAccess::Read));
        assert!(!covers(&one, "images/a", ImageAccess::Grow) && !covers(&one, "images/b", ImageAccess::Read));
        let all = of("images/a", ImageAccess::Read, true);
        assert!(covers(&all, "images/b", ImageAccess::Grow) && covers(&all, "images/new", ImageAccess::Read));
        assert!(!covers(&all, "other", ImageAccess::Read));
        // Two rules together.
        let mut both = of("images/a", ImageAccess::Read, false);
        both.socket(&path("images/s"));
        let mut socket = AllowedPaths::default();
        socket.socket(&path("images/t"));
        assert!(both.covers(&socket) && !one.covers(&socket));
    }

    #[test]
    fn ports_of_monitors_are_found_in_their_addresses() {
        for (conf, ports) in [
            ("mon host = 10.0.0.1, mon.example\n", vec![]),
            ("[global]\nmon_host = 10.0.0.1:3301,10.0.0.2:3302\n", vec![3301, 3302]),
            ("mon-host=[v2:10.0.0.1:40000/0,v1:10.0.0.1:40001/0] [v1:10.0.0.2:5]\n", vec![40000, 40001, 5]),
            ("mon host = [::1]:77 [v2:[fe80::2]:78/0] [fe80::79]\n", vec![77, 78]),
            ("mon host = v2:127.0.0.1:13300/0\nmon data = 1:2\n", vec![13300]),
            ("mon host = a:99999, b:\n", vec![]),
        ] {
            assert_eq!(monitor_ports(conf), ports, "{conf}");
        }
    }
}
