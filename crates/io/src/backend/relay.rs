//! Passes the calls of a back end on to the queue's events.
//!
//! A back end has an eventfd and knows nothing of status register, mask and pending bits, which
//! stay the device's. The price is one wake-up of a thread an interrupt.
use crate::QueueEvents;
use paravane_device::ServeError;
use paravane_notify::{Notifier, NotifyError};
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
    /// A queue that the back end finds broken has failed, once.
    ///
    /// # Errors
    /// The host has no threads or descriptors left.
    pub(crate) fn new(queue: u16, events: Arc<dyn QueueEvents>) -> io::Result<Self> {
        let refused = |error: NotifyError| io::Error::other(error);
        let ends = Arc::new(Ends {
            call: Notifier::new(false).map_err(refused)?,
            error: Notifier::new(false).map_err(refused)?,
            stop: Notifier::new(false).map_err(refused)?,
        });
        let thread = {
            let ends = Arc::clone(&ends);
            let relay = move || ends.run(queue, &*events);
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
    fn run(&self, queue: u16, events: &dyn QueueEvents) {
        let mut is_broken = false;
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
                events.used_buffer(queue);
            }
            if self.error.take() > 0 && !std::mem::replace(&mut is_broken, true) {
                events.failed(queue, &ServeError::Host(io::Error::other("its back end finds it broken")));
            }
            if stopped {
                return;
            }
        }
    }
}
