//! Changes to another user.
use super::error::SandboxError;
use nix::unistd::{Gid, Uid, User};
use std::ffi::CString;

/// The user to become.
#[derive(Clone, Debug)]
pub(crate) struct Target {
    name: String,
    uid: Uid,
    gid: Gid,
    groups: Vec<Gid>,
}

impl Target {
    /// Looks up a user by name or number, and its groups.
    ///
    /// # Errors
    /// There is no such user.
    pub(crate) fn find(name: &str) -> Result<Self, SandboxError> {
        let os = |source: nix::Error| SandboxError::User { name: name.to_owned(), source: source.into() };
        let found = match name.parse() {
            Ok(number) => User::from_uid(Uid::from_raw(number)),
            Err(_) => User::from_name(name),
        };
        let user = found.map_err(os)?.ok_or_else(|| SandboxError::NoUser(name.to_owned()))?;
        let account = CString::new(user.name).map_err(|_| SandboxError::NoUser(name.to_owned()))?;
        let groups = nix::unistd::getgrouplist(&account, user.gid).map_err(os)?;
        Ok(Self { name: name.to_owned(), uid: user.uid, gid: user.gid, groups })
    }

    /// The user's number, and those of its groups.
    pub(super) fn ids(&self) -> (Uid, Vec<Gid>) {
        let groups = self.groups.iter().copied().chain([self.gid]).collect();
        (self.uid, groups)
    }

    /// The user and group that own its files.
    pub(crate) fn owner(&self) -> (rustix::fs::Uid, rustix::fs::Gid) {
        let (uid, gid) = (self.uid.as_raw(), self.gid.as_raw());
        (rustix::fs::Uid::from_raw(uid), rustix::fs::Gid::from_raw(gid))
    }

    /// Makes all threads run as this user. Irreversible.
    ///
    /// # Errors
    /// The process lacks the privilege.
    pub(crate) fn become_user(&self) -> Result<(), SandboxError> {
        if Uid::current() == self.uid && Uid::effective() == self.uid {
            return Ok(());
        }
        let os = |source: nix::Error| SandboxError::User { name: self.name.clone(), source: source.into() };
        nix::unistd::setgroups(&self.groups).map_err(os)?;
        nix::unistd::setgid(self.gid).map_err(os)?;
        nix::unistd::setuid(self.uid).map_err(os)
    }
}
