//! Pipes of other processes.
use nix::sys::signal::{SigSet, Signal};

/// Blocks SIGPIPE in this thread: a write to a pipe without reader is an error.
///
/// For threads that write to descriptors of other processes. SIGPIPE ends a process that does not
/// ignore it, a C program for instance.
pub fn outlive_pipes() {
    // A signal that arises stays pending, and ends with the thread.
    let blocked = SigSet::from(Signal::SIGPIPE).thread_block();
    debug_assert!(blocked.is_ok(), "the set is a valid one");
}
