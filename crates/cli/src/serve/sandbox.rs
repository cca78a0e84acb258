//! The sandbox: which privileges the daemon drops, and when.
//!
//! ```text
//!  one thread, all privileges  ports bound, users looked up
//!     | enter                  Landlock (paths.rs), no new privileges, seccomp (calls.rs): inherited by later threads
//!     v
//!  images, TAP devices opened  as the user that started the daemon, by a thread that then ends
//!     | drop_privileges        change of user (user.rs), capabilities (capabilities.rs)
//!     v
//!  sockets bound, threads
//!     | seal                   without --config: all threads lose the calls that open files and create sockets
//!     v
//!  guests are served
//! ```
//! A thread inherits Landlock rules and capabilities from its creator, and each thread can drop
//! only its own. So Landlock comes before the second thread, and capabilities after the thread that
//! opened the devices has ended. A device starts no thread before it is served.
pub(crate) mod calls;
pub(crate) mod capabilities;
mod error;
pub(crate) mod helpers;
pub(crate) mod paths;
pub(crate) mod probe;
pub(crate) mod user;
pub(crate) mod writable;

use error::SandboxError;
use paths::AllowedPaths;
use rustix::thread::CapabilitySet;
use user::Target;

/// Restricts files and system calls of this thread and its future threads.
///
/// # Errors
/// The kernel lacks Landlock or seccomp, or a path does not exist. The process must not continue.
pub(crate) fn enter(allowed: &AllowedPaths) -> Result<(), SandboxError> {
    // Some libraries initialize once, by calls that the sandbox denies: rustix reads the auxiliary
    // vector.
    let _ = rustix::param::page_size();
    paths::restrict(allowed)?;
    let calls = if allowed.connects() { &calls::DAEMON_WITH_CEPH } else { &calls::DAEMON };
    calls::restrict(calls)
}

/// Drops the capabilities of the calling thread except `kept`.
///
/// With `user`, becomes that user and keeps none.
///
/// # Errors
/// The process may not become the user, or the kernel refuses. The process must not continue.
pub(crate) fn drop_privileges(user: Option<&Target>, kept: CapabilitySet) -> Result<(), SandboxError> {
    capabilities::empty_bounding_set()?;
    if let Some(user) = user {
        user.become_user()?;
    }
    capabilities::keep(if user.is_some() { CapabilitySet::empty() } else { kept })
}
