//! What the daemon gives up.
//!
//! ```text
//!  one thread, all rights      ports are bound, names of users looked up
//!     | enter                  Landlock (files.rs), no new privileges, seccomp (calls.rs): every later thread has them, too
//!     v
//!  images, TAP devices opened  with the user's rights that the daemon was started with, by a thread that then ends
//!     | leave                  another user (user.rs), capabilities (capabilities.rs)
//!     v
//!  sockets bound, threads
//!     | seal                   only where no device will be added: all threads lose what opens files and makes sockets
//!     v
//!  guests are served
//! ```
//! A thread has what its maker had, and Landlock and capabilities can only be given up by one thread at a time. So Landlock comes
//! before the second thread, and capabilities when the one that opened the devices has ended: a device starts none of its own
//! before it is served.
pub(crate) mod calls;
pub(crate) mod capabilities;
pub(crate) mod files;
mod trial;
pub(crate) mod user;

pub(crate) use files::{ImageAccess, Reach};
pub(crate) use trial::try_out;

use rustix::thread::CapabilitySet;
use thiserror::Error;
use user::Target;

/// Why there is no sandbox.
#[derive(Debug, Error)]
pub(crate) enum SandboxError {
    /// {path}: {source}
    #[error("{}: {source}", path.display())]
    Path {
        /// What was to be reached.
        path: std::path::PathBuf,
        /// Why it cannot be named in a rule.
        source: std::io::Error,
    },
    /// this kernel has no Landlock, which the sandbox needs (Linux 5.13, and `landlock` in its list of LSMs);
    /// --no-sandbox does without
    #[error(
        "this kernel has no Landlock, which the sandbox needs (Linux 5.13, and `landlock` in its list of LSMs); \
         --no-sandbox does without"
    )]
    NoLandlock,
    /// Landlock: {0}
    #[error("Landlock: {0}")]
    Landlock(String),
    /// seccomp: {0}
    #[error("seccomp: {0}")]
    Seccomp(String),
    /// The kernel refuses to drop capabilities.
    #[error("cannot drop capabilities: {0}")]
    Capabilities(std::io::Error),
    /// there is no user {0}
    #[error("there is no user {0}")]
    NoUser(String),
    /// cannot become the user {name}: {source}
    #[error("cannot become the user {name}: {source}")]
    User {
        /// Who was asked for.
        name: String,
        /// Why not.
        source: std::io::Error,
    },
}

/// Takes from the calling thread, and from all that it will make, what serving devices does not need.
///
/// # Errors
/// The kernel lacks what it takes, or a path is not there. The process is not to go on then.
pub(crate) fn enter(reach: &Reach) -> Result<(), SandboxError> {
    // Libraries that ask once, by calls and files that will not be there: rustix for the auxiliary vector.
    let _ = rustix::param::page_size();
    files::restrict(reach)?;
    calls::restrict()
}

/// Drops all capabilities of the calling thread but those `kept`, and becomes another user, who has none, if there is one.
///
/// # Errors
/// This process may not become that user, or the kernel refuses. The process is not to go on then.
pub(crate) fn leave(user: Option<&Target>, kept: CapabilitySet) -> Result<(), SandboxError> {
    capabilities::empty_bounding_set()?;
    if let Some(user) = user {
        user.become_it()?;
    }
    capabilities::keep(if user.is_some() { CapabilitySet::empty() } else { kept })
}
