//! A network of a test's own.
use crate::skip;
use rustix::thread::{UnshareFlags, unshare_unsafe};
use std::fs::File;
use std::process::Command;

/// Runs `test` in a thread with a network namespace of its own, or reports why not.
///
/// Needs root, /dev/net/tun and the program `ip`.
///
/// # Panics
/// The test has panicked.
pub fn in_own_network(name: &str, test: impl FnOnce() + Send) {
    if !rustix::process::geteuid().is_root() {
        return skip(name, "not root");
    }
    if let Err(error) = File::open("/dev/net/tun") {
        return skip(name, format!("/dev/net/tun: {error}"));
    }
    if Command::new("ip").arg("-V").output().is_err() {
        return skip(name, "there is no program ip");
    }
    let in_thread = || {
        // SAFETY: the thread leaves its network behind. No table of descriptors is divided.
        match unsafe { unshare_unsafe(UnshareFlags::NEWNET) } {
            Ok(()) => test(),
            Err(error) => skip(name, format!("no network namespace: {error}")),
        }
    };
    let tested = std::thread::scope(|scope| scope.spawn(in_thread).join());
    tested.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
}

/// Runs `ip` with these arguments, divided by blanks.
///
/// # Panics
/// It fails.
pub fn ip(arguments: &str) {
    let done = Command::new("ip").args(arguments.split(' ')).output().expect("the program ip");
    assert!(done.status.success(), "ip {arguments}: {}", String::from_utf8_lossy(&done.stderr));
}
