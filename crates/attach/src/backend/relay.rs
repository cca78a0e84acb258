//! Passes the calls of a back end on to the device's interrupts.
//!
//! A back end has an eventfd and knows nothing of status register, mask and pending bits, which
//! stay the device's. The price is one wake-up of a thread an interrupt.
use paravane_notify::{Interrupts, Notifier, NotifyError};
use rustix::event::{PollFd, PollFlags, poll};
use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;

/// Stack of a relay's thread.
const STACK: usize = 64 << 10;

/// The way back from one queue's back end.
pub(crate) struct Relay {
    ends: Arc<Ends>,
    thread: Option<JoinHandle<()>>,
}

struct Ends {
    call: Notifier,
    error: Notifier,
    stop: Notifier,
}

impl Relay {
    /// Starts a thread for `queue`.
    ///
    /// It calls `broken` when the back end finds the queue broken, at most once.
    ///
    /// # Errors
    /// The host has no threads or descriptors left.
    pub(crate) fn new(
        queue: u16,
        interrupts: Arc<Interrupts>,
        broken: impl FnOnce() + Send + 'static,
    ) -> io::Result<Self> {
        let refused = |error: NotifyError| io::Error::other(error);
        let ends = Arc::new(Ends {
            call: Notifier::new(false).map_err(refused)?,
            error: Notifier::new(false).map_err(refused)?,
            stop: Notifier::new(false).map_err(refused)?,
        });
        let thread = {
            let ends = Arc::clone(&ends);
            let relay = move || ends.run(queue, &interrupts, broken);
            std::thread::Builder::new().name(format!("calls{queue}")).stack_size(STACK).spawn(relay)?
        };
        Ok(Self { ends, thread: Some(thread) })
    }

    /// Signalled for an interrupt.
    pub(crate) fn call(&self) -> &Notifier {
        &self.ends.call
    }

    /// Signalled when the queue is broken.
    pub(crate) fn error(&self) -> &Notifier {
        &self.ends.error
    }
}

impl Drop for Relay {
    /// Passes on the calls that have come.
    fn drop(&mut self) {
        self.ends.stop.signal();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("a relay of calls panicked");
        }
    }
}

impl Ends {
    fn run(&self, queue: u16, interrupts: &Interrupts, broken: impl FnOnce()) {
        let mut broken = Some(broken);
        loop {
            let mut fds = [&self.call, &self.error, &self.stop].map(|end| PollFd::new(end, PollFlags::IN));
            match poll(&mut fds, None) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return tracing::error!("poll: {error}"),
            }
            // Before the others are looked at: what was signalled before the stop is not left
            // behind.
            let stopped = self.stop.take() > 0;
            if self.call.take() > 0 {
                interrupts.used_buffer(queue);
            }
            if self.error.take() > 0
                && let Some(broken) = broken.take()
            {
                broken();
            }
            if stopped {
                return;
            }
        }
    }
}
