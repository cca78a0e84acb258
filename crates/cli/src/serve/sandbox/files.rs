//! Which files the daemon reaches (Landlock).
//!
//! A single device reaches its image and its socket. A daemon with a file of devices reaches, beside what the file names, the
//! directories that these are in, so that SIGHUP can add others there; of devices below /dev only those that are named,
//! and /dev/net/tun.
use super::SandboxError;
use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible, PathBeneath, PathFd, Ruleset,
    RulesetAttr, RulesetCreatedAttr, RulesetStatus, Scope,
};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// What is refused is all that this version knows; what the kernel does not know of it is left out.
const KNOWN: ABI = ABI::V7;
/// Where TAP devices come from.
const TUN: &str = "/dev/net/tun";

/// What a disk does with its image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ImageAccess {
    /// Reads it.
    Read,
    /// Writes it, and leaves its length as it is.
    Write,
    /// Writes it, and changes its length: a qcow2 image grows by ftruncate(2).
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

/// The files that are reached.
#[derive(Clone, Debug, Default)]
pub(crate) struct Reach {
    rules: BTreeMap<PathBuf, BitFlags<AccessFs>>,
}

impl Reach {
    /// A disk's image; with `beside` all files in its directory, as images of either format.
    pub(crate) fn image(&mut self, path: &Path, access: ImageAccess, beside: bool) {
        let access = access.rights() | if beside { ImageAccess::Grow.rights() } else { BitFlags::EMPTY };
        self.allow(path, access);
        let real = path.canonicalize().unwrap_or_else(|_| path.to_owned());
        if beside
            && !real.starts_with("/dev")
            && let Some(directory) = real.parent()
        {
            self.allow(directory, access);
        }
    }

    /// A socket that is made, removed or connected to.
    pub(crate) fn socket(&mut self, path: &Path) {
        self.allow(directory_of(path), AccessFs::MakeSock | AccessFs::RemoveFile);
    }

    /// A directory in which there may be images and sockets.
    pub(crate) fn directory(&mut self, path: &Path) {
        self.allow(path, ImageAccess::Grow.rights() | AccessFs::MakeSock | AccessFs::RemoveFile);
    }

    /// The file of devices, which an editor may replace; and if it is a symbolic link, the file that it leads to.
    pub(crate) fn config(&mut self, path: &Path) {
        self.allow(directory_of(path), AccessFs::ReadFile.into());
        if let Ok(real) = path.canonicalize() {
            self.allow(directory_of(&real), AccessFs::ReadFile.into());
        }
    }

    /// New TAP devices.
    pub(crate) fn taps(&mut self) {
        if Path::new(TUN).exists() {
            self.allow(Path::new(TUN), AccessFs::ReadFile | AccessFs::WriteFile | AccessFs::IoctlDev);
        }
    }

    fn allow(&mut self, path: &Path, access: BitFlags<AccessFs>) {
        *self.rules.entry(path.to_owned()).or_default() |= access;
    }

    /// Says why a file was refused, if it is the sandbox that may have done it.
    pub(crate) fn remark(&self) -> String {
        let list: Vec<_> = self.rules.keys().map(|path| path.display().to_string()).collect();
        format!("the sandbox lets this daemon reach {} only; for more, restart it", list.join(", "))
    }
}

fn directory_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// Refuses all files but those that `reach` names; making TCP connections and ports; signals to other processes, and their
/// abstract sockets.
pub(super) fn restrict(reach: &Reach) -> Result<(), SandboxError> {
    let failed = |error: landlock::RulesetError| SandboxError::Landlock(error.to_string());
    let mut rules = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(KNOWN))
        .and_then(|rules| rules.handle_access(AccessNet::from_all(KNOWN)))
        .and_then(|rules| rules.scope(Scope::from_all(KNOWN)))
        .and_then(Ruleset::create)
        .map_err(failed)?;
    for (path, access) in &reach.rules {
        let file = PathFd::new(path).map_err(|error| SandboxError::Path {
            path: path.clone(),
            source: match error {
                landlock::PathFdError::OpenCall { source, .. } => source,
                other => std::io::Error::other(other.to_string()),
            },
        })?;
        let is_directory = path.is_dir();
        let access = if is_directory { *access } else { *access & AccessFs::from_file(KNOWN) };
        rules = rules.add_rule(PathBeneath::new(file, access)).map_err(failed)?;
    }
    let status = rules.restrict_self().map_err(failed)?;
    match status.ruleset {
        RulesetStatus::NotEnforced => Err(SandboxError::NoLandlock),
        RulesetStatus::FullyEnforced => Ok(()),
        // An older kernel: it refuses less, and what it knows it does refuse.
        RulesetStatus::PartiallyEnforced => {
            tracing::info!("this kernel's Landlock knows less than the sandbox could use");
            Ok(())
        }
    }
}
