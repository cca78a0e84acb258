//! The thread that makes a lost connection again. It lives as long as the outage.
//!
//! ```text
//!   fence: end the old connection, wait until the server has closed it
//!     -> 5 s of peace, if the export is unusable
//!     -> connect, negotiate --ok--> resume: send again what was in flight
//!             ^   '--no--> pause: 50 ms, doubled up to 5 s
//!             '--------------'
//! ```
use super::channel::{Begin, Channel, Resumed};
use super::dial::Dialer;
use super::handshake::Purpose;
use super::shared::{NbdShared, OldSocket};
use super::socket::timespec;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{RecvFlags, Shutdown, recv, shutdown};
use std::io;
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

/// First pause between attempts; each one is twice as long.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
/// Longest pause between attempts.
const LAST_PAUSE: Duration = Duration::from_secs(5);
/// How long a server may take to close a connection that has ended.
const FENCE: Duration = Duration::from_secs(5);
/// Stack of the thread in bytes: name resolution and TLS need the most.
const STACK: usize = 1 << 20;

/// Starts the thread.
pub(super) fn launch(
    dialer: Arc<Dialer>,
    channel: &Arc<Channel>,
    old: Option<OldSocket>,
    begin: Begin,
) -> io::Result<()> {
    let (weak, shared) = (Arc::downgrade(channel), channel.shared.clone());
    let thread = thread::Builder::new().name("nbd-reconnect".into()).stack_size(STACK);
    thread.spawn(move || run(&dialer, &weak, &shared, old, begin))?;
    Ok(())
}

fn run(dialer: &Dialer, channel: &Weak<Channel>, shared: &NbdShared, old: Option<OldSocket>, begin: Begin) {
    if let Some(old) = old
        && !fence(&old)
    {
        shared.note(format!(
            "the server has not closed a lost connection in {FENCE:?}; what it got there may be done late"
        ));
    }
    // Not by a reference: it could be the last one, and its end wakes this thread.
    let is_wanted = || channel.strong_count() > 0 && !shared.gave_up();
    if begin == Begin::Later {
        shared.pause(LAST_PAUSE, is_wanted);
    }
    let mut pause = FIRST_PAUSE;
    let mut last = String::new();
    loop {
        if !is_wanted() {
            break;
        }
        match dialer.dial(Purpose::Transmit) {
            Ok((wire, export)) => {
                let Some(channel) = channel.upgrade() else { return };
                match channel.resume(wire, export) {
                    Resumed::Yes => return,
                    Resumed::Refused => pause = LAST_PAUSE,
                }
            }
            Err(error) => {
                let error = error.to_string();
                if error != last {
                    tracing::warn!(location = %dialer.location, error, "cannot connect again");
                    last.clone_from(&error);
                }
                shared.note(error);
            }
        }
        shared.pause(pause, is_wanted);
        pause = (pause * 2).min(LAST_PAUSE);
    }
    if let Some(channel) = channel.upgrade() {
        channel.helper_ends();
    }
}

/// Ends the old connection, and waits until the server has closed it, too.
///
/// Then nothing that it got there is done any more. `false`: it has not in time.
fn fence(old: &OldSocket) -> bool {
    let end = Instant::now() + FENCE;
    if shutdown(&old.0, Shutdown::Write).is_err() {
        // It is not connected any more.
        return true;
    }
    let mut scrap = vec![0; 64 << 10];
    loop {
        match recv(&old.0, &mut scrap[..], RecvFlags::DONTWAIT) {
            Ok((0, _)) => return true,
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(rustix::io::Errno::AGAIN) => {
                let left = end.saturating_duration_since(Instant::now());
                let mut fds = [PollFd::new(&old.0, PollFlags::IN)];
                let _ = poll(&mut fds, Some(&timespec(left)));
            }
            Err(_) => return true,
        }
        if Instant::now() >= end {
            return false;
        }
    }
}
