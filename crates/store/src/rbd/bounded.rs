//! Calls that may wait for a cluster without end, waited for with one.
use std::io;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

/// Runs `work` on a thread of its own and waits up to `timeout`.
///
/// Later it goes on, and its result is dropped there.
///
/// # Errors
/// The host refuses a thread; or `timeout` has passed ([`io::ErrorKind::TimedOut`]).
pub(super) fn bounded<T: Send + 'static>(
    timeout: Duration,
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<T> {
    let (sender, receiver) = mpsc::sync_channel(1);
    thread::Builder::new().name("rbd-call".into()).spawn(move || drop(sender.send(work())))?;
    receiver.recv_timeout(timeout).map_err(|error| match error {
        mpsc::RecvTimeoutError::Timeout => io::ErrorKind::TimedOut.into(),
        mpsc::RecvTimeoutError::Disconnected => io::Error::other("the call has panicked"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_that_does_not_end_is_given_up() {
        assert_eq!(bounded(Duration::from_secs(60), || 7).unwrap(), 7);
        let (end, wait) = mpsc::channel::<()>();
        let error = bounded(Duration::from_millis(1), move || wait.recv()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        drop(end);
    }
}
