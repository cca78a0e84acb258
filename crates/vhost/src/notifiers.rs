//! What the I/O threads tell a client: interrupts, and failures of queues.
//!
//! A client's descriptors share their file descriptions with it, so their flags are not ours to change. An eventfd is
//! written to as it is, by one system call. That blocks only if the client has filled its counter, and only an I/O thread may be
//! blocked so: other threads have it signal the client ([`Relay`]), and whoever waits for an I/O thread calls
//! [`ClientNotifiers::unblock`] meanwhile. A pipe, or one end of a socket pair (User Mode Linux), fills up when its reader sleeps, and is
//! written to only if that does not block: a full one signals already.
use crate::pair;
use paravane_device::ServeError;
use paravane_io::{QueueEvents, Tasks, is_eventfd};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::FileType;
use rustix::io::{Errno, IoSlice, IoSliceMut, ReadWriteFlags};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

const ONE: [u8; 8] = 1_u64.to_ne_bytes();

/// A descriptor of the client's that we signal.
#[derive(Debug)]
pub(crate) struct Signal {
    fd: OwnedFd,
    /// It is an eventfd.
    counts: bool,
}

impl Signal {
    /// Takes the descriptor.
    pub(crate) fn new(fd: OwnedFd) -> io::Result<Self> {
        if FileType::from_raw_mode(rustix::fs::fstat(&fd)?.st_mode) == FileType::Socket {
            pair::write_only(&fd)?;
            return Ok(Self { fd, counts: false });
        }
        let counts = is_eventfd(&fd)?;
        Ok(Self { fd, counts })
    }

    fn send(&self) {
        // Whatever comes of it: a client that has made its descriptor useless hears nothing.
        if self.counts {
            let _ = rustix::io::write(&self.fd, &ONE);
            return;
        }
        let slices = [IoSlice::new(&ONE)];
        // No offset is -1: a pipe has none.
        match rustix::io::pwritev2(&self.fd, &slices, u64::MAX, ReadWriteFlags::NOWAIT) {
            // Older hosts cannot do that.
            Err(Errno::OPNOTSUPP) if self.is_ready(PollFlags::OUT) => {
                let _ = rustix::io::write(&self.fd, &ONE);
            }
            _ => {}
        }
    }

    fn is_ready(&self, what: PollFlags) -> bool {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let mut fds = [PollFd::new(&self.fd, what)];
        poll(&mut fds, Some(&now)).is_ok() && fds[0].revents().contains(what)
    }

    /// Whoever waits in [`Signal::send`] goes on.
    fn unblock(&self) {
        if self.counts && !self.is_ready(PollFlags::OUT) {
            let mut count = [0; 8];
            let mut slices = [IoSliceMut::new(&mut count)];
            let _ = rustix::io::preadv2(&self.fd, &mut slices, u64::MAX, ReadWriteFlags::NOWAIT);
        }
    }
}

/// One queue's.
#[derive(Debug, Default)]
struct QueueNotifiers {
    // Who rings takes a reference first, and holds no lock while it may wait.
    call: Mutex<Option<Arc<Signal>>>,
    err: Mutex<Option<Arc<Signal>>>,
    kicks: AtomicU64,
    failure: Mutex<Option<String>>,
}

/// All of a device.
#[derive(Debug)]
pub(crate) struct ClientNotifiers {
    name: String,
    queues: Box<[QueueNotifiers]>,
    /// Descriptors that others have taken the place of. An I/O thread may still be blocked in one.
    replaced: Mutex<Vec<Weak<Signal>>>,
}

/// Has an I/O thread signal the client, for a queue that is on no thread.
#[derive(Debug)]
pub(crate) struct Relay {
    pub(crate) notifiers: Arc<ClientNotifiers>,
    pub(crate) tasks: Tasks,
}

impl QueueEvents for Relay {
    fn used_buffer(&self, queue: u16) {
        let notifiers = Arc::clone(&self.notifiers);
        self.tasks.run(move || notifiers.interrupt(queue));
    }

    fn kicked(&self, queue: u16, count: u64) {
        self.notifiers.kicked(queue, count);
    }

    fn failed(&self, queue: u16, error: &ServeError) {
        self.notifiers.remember(queue, error);
        let notifiers = Arc::clone(&self.notifiers);
        self.tasks.run(move || notifiers.signal_error(queue));
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Each change is one assignment.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn send(signal: &Mutex<Option<Arc<Signal>>>) {
    let signal = lock(signal).clone();
    if let Some(signal) = signal {
        signal.send();
    }
}

impl ClientNotifiers {
    pub(crate) fn new(name: &str, queues: usize) -> Self {
        let notifiers = std::iter::repeat_with(QueueNotifiers::default).take(queues).collect();
        Self { name: name.to_owned(), queues: notifiers, replaced: Mutex::default() }
    }

    /// Puts a descriptor, or none, in the place of another.
    fn replace(&self, place: &Mutex<Option<Arc<Signal>>>, signal: Option<Signal>) {
        let old = std::mem::replace(&mut *lock(place), signal.map(Arc::new));
        if let Some(old) = old {
            let mut replaced = lock(&self.replaced);
            // Those in use, one a thread at most.
            replaced.retain(|other| other.strong_count() > 0);
            replaced.push(Arc::downgrade(&old));
        }
    }

    fn queue_notifiers(&self, queue: u16) -> Option<&QueueNotifiers> {
        self.queues.get(usize::from(queue))
    }

    /// Interrupts go there from now on. What the old one, or none, was told meanwhile may have been heard by nobody.
    pub(crate) fn set_call(&self, queue: u16, call: Option<Signal>) {
        if let Some(queue_notifiers) = self.queue_notifiers(queue) {
            self.replace(&queue_notifiers.call, call);
        }
    }

    /// Failures are told there from now on.
    pub(crate) fn set_err(&self, queue: u16, err: Option<Signal>) {
        if let Some(queue_notifiers) = self.queue_notifiers(queue) {
            self.replace(&queue_notifiers.err, err);
        }
    }

    /// An interrupt, perhaps one too many.
    pub(crate) fn interrupt(&self, queue: u16) {
        if let Some(queue_notifiers) = self.queue_notifiers(queue) {
            send(&queue_notifiers.call);
        }
    }

    /// Why the queue has failed, if it has.
    pub(crate) fn failure(&self, queue: u16) -> Option<String> {
        lock(&self.queue_notifiers(queue)?.failure).clone()
    }

    /// The queue begins anew.
    pub(crate) fn forget_failure(&self, queue: u16) {
        if let Some(queue_notifiers) = self.queue_notifiers(queue) {
            *lock(&queue_notifiers.failure) = None;
        }
    }

    /// Kicks so far, of all clients.
    pub(crate) fn kicks(&self, queue: u16) -> u64 {
        // Relaxed: a statistic.
        self.queue_notifiers(queue).map_or(0, |queue_notifiers| queue_notifiers.kicks.load(Ordering::Relaxed))
    }

    /// The client is gone: its descriptors go, and nothing is remembered of its queues but what was counted.
    pub(crate) fn clear(&self) {
        for queue_notifiers in &self.queues {
            self.replace(&queue_notifiers.call, None);
            self.replace(&queue_notifiers.err, None);
            *lock(&queue_notifiers.failure) = None;
        }
    }

    /// Frees an I/O thread that is blocked since the client has filled an eventfd; the client loses what was in it.
    pub(crate) fn unblock(&self) {
        for queue_notifiers in &self.queues {
            for signal in [&queue_notifiers.call, &queue_notifiers.err] {
                let signal = lock(signal).clone();
                if let Some(signal) = signal {
                    signal.unblock();
                }
            }
        }
        let replaced: Vec<_> = lock(&self.replaced).iter().filter_map(Weak::upgrade).collect();
        replaced.iter().for_each(|signal| signal.unblock());
    }

    fn remember(&self, queue: u16, error: &ServeError) {
        tracing::warn!(device = self.name, queue, "queue stopped until its driver resets it: {error}");
        if let Some(queue_notifiers) = self.queue_notifiers(queue) {
            *lock(&queue_notifiers.failure) = Some(error.to_string());
        }
    }

    fn signal_error(&self, queue: u16) {
        if let Some(queue_notifiers) = self.queue_notifiers(queue) {
            send(&queue_notifiers.err);
        }
    }
}

impl QueueEvents for ClientNotifiers {
    fn used_buffer(&self, queue: u16) {
        self.interrupt(queue);
    }

    fn kicked(&self, queue: u16, count: u64) {
        if let Some(queue_notifiers) = self.queue_notifiers(queue) {
            // Relaxed: a statistic.
            queue_notifiers.kicks.fetch_add(count, Ordering::Relaxed);
        }
    }

    fn failed(&self, queue: u16, error: &ServeError) {
        self.remember(queue, error);
        self.signal_error(queue);
    }
}
