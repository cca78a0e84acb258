//! The sandboxes of the processes beside the daemon, and of `paravane hold`.
//!
//! | process | files | network | system calls |
//! |---|---|---|---|
//! | broker | what resolves names: libraries, and files of /etc by name | TCP to the servers and to name servers, Unix sockets | its own list |
//! | reader | the folder of the file of devices, to read | none | its own list |
//! | holder | none, but it may remove its socket | none | its own list |
//! | inspector | none | none | its own list |
//!
//! Neither has a key: the environment is empty, and keys are in other files. The calling thread must
//! be the only one of its process.
use super::calls::{self, Calls, helpers};
use super::error::SandboxError;
use super::paths::{self, AllowedPaths};
use super::user::Target;
use crate::kinds::checked::directory_of;
use landlock::AccessFs;
use rustix::thread::CapabilitySet;
use std::path::Path;

/// Directories with libraries of the resolver, and with what its files may be links to.
const RESOLVER_FOLDERS: [&str; 6] =
    ["/usr", "/lib", "/lib64", "/run/systemd/resolve", "/run/NetworkManager", "/run/resolvconf"];
/// Files that name resolution reads.
const RESOLVER_FILES: [&str; 8] = [
    RESOLV_CONF,
    "/etc/hosts",
    "/etc/nsswitch.conf",
    "/etc/host.conf",
    "/etc/gai.conf",
    "/etc/ld.so.cache",
    "/etc/services",
    "/etc/protocols",
];
const RESOLV_CONF: &str = "/etc/resolv.conf";
/// Port of name servers.
const DNS: u16 = 53;

/// Options of the resolver of the broker, in the form of RES_OPTIONS of resolv.conf(5).
///
/// It asks name servers by TCP. A file in /etc that is replaced is out of reach: the resolver keeps
/// what it has read.
pub(crate) fn resolver_options() -> &'static str {
    let is_link = Path::new(RESOLV_CONF).canonicalize().is_ok_and(|real| !real.starts_with("/etc"));
    if is_link { "use-vc" } else { "use-vc no-reload" }
}

/// The sandbox of the broker: it reads what resolves names, and connects to servers.
///
/// `ports`: those of the servers. `None`: all, as a file of devices may get more servers.
///
/// # Errors
/// The kernel lacks Landlock or seccomp. The process must not continue.
pub(crate) fn enter_broker(
    ports: Option<impl Iterator<Item = u16>>,
    user: Option<&Target>,
) -> Result<(), SandboxError> {
    let mut allowed = AllowedPaths::default();
    RESOLVER_FOLDERS.iter().chain(&RESOLVER_FILES).for_each(|path| allowed.read(Path::new(path)));
    match ports {
        Some(ports) => ports.chain([DNS]).for_each(|port| allowed.port(port)),
        None => allowed.all_ports = true,
    }
    // Sockets of other users.
    enter(&allowed, user, CapabilitySet::DAC_OVERRIDE, &helpers::BROKER)
}

/// The sandbox of the reader: it reads files in the folder of `file`.
///
/// Another file may take its place, as editors do. So the folder is allowed, and not the file.
///
/// # Errors
/// The kernel lacks Landlock or seccomp. The process must not continue.
pub(crate) fn enter_reader(file: &Path, user: Option<&Target>) -> Result<(), SandboxError> {
    let mut allowed = AllowedPaths::default();
    allowed.config(file);
    // A file of another user.
    enter(&allowed, user, CapabilitySet::DAC_READ_SEARCH, &helpers::READER)
}

/// The sandbox of `paravane hold`, which may still remove the socket at `path`.
///
/// # Errors
/// The kernel lacks Landlock or seccomp. The process must not continue.
pub(crate) fn enter_holder(path: &Path) -> Result<(), SandboxError> {
    let mut allowed = AllowedPaths::default();
    allowed.allow(directory_of(path), AccessFs::RemoveFile.into());
    enter(&allowed, None, CapabilitySet::empty(), &calls::HOLDER)
}

/// The sandbox of the inspector.
///
/// # Errors
/// The kernel lacks Landlock or seccomp. The process must not continue.
pub(crate) fn enter_inspector() -> Result<(), SandboxError> {
    enter(&AllowedPaths::default(), None, CapabilitySet::empty(), &calls::INSPECTOR)
}

fn enter(
    allowed: &AllowedPaths,
    user: Option<&Target>,
    kept: CapabilitySet,
    calls: &Calls,
) -> Result<(), SandboxError> {
    // Some libraries initialize once, by calls that the sandbox denies.
    let _ = rustix::param::page_size();
    paths::restrict(allowed)?;
    super::drop_privileges(user, kept)?;
    calls::restrict(calls)
}
