//! Notifications to a client: interrupts, and errors of queues.
//!
//! A client's descriptors share their open file descriptions with the client, so their flags must
//! not change. An eventfd is written as it is, with one system call. The call blocks only if the
//! client has filled the counter. Only an I/O thread may block so: other threads have it signal the
//! client ([`Relay`]), and a thread that waits for an I/O thread calls [`ClientNotifiers::unblock`]
//! meanwhile. A pipe, or one end of a socket pair (User Mode Linux), fills up while its reader
//! sleeps. It is written only if that does not block: a full one is a signal already.
use crate::pair;
use paravane_device::ServeError;
use paravane_io::{QueueEvents, Tasks, is_eventfd, is_ready, write_now};
use parking_lot::Mutex;
use rustix::event::PollFlags;
use rustix::fs::FileType;
use rustix::io::{IoSliceMut, ReadWriteFlags};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

const ONE: [u8; 8] = 1_u64.to_ne_bytes();

/// Descriptor of the client that signals it.
#[derive(Debug)]
pub struct Signal {
    fd: OwnedFd,
    /// Whether it is an eventfd.
    has_counter: bool,
}

impl Signal {
    /// Takes the descriptor.
    ///
    /// # Errors
    /// It is a socket other than an end of a pair, or the host refuses.
    pub fn new(fd: OwnedFd) -> io::Result<Self> {
        if FileType::from_raw_mode(rustix::fs::fstat(&fd)?.st_mode) == FileType::Socket {
            pair::write_only(&fd)?;
            return Ok(Self { fd, has_counter: false });
        }
        let has_counter = is_eventfd(&fd)?;
        Ok(Self { fd, has_counter })
    }

    fn send(&self) {
        // Ignores errors: a client that breaks its descriptor receives nothing.
        if self.has_counter {
            let _ = rustix::io::write(&self.fd, &ONE);
        } else {
            let _ = write_now(&self.fd, &ONE);
        }
    }

    /// Frees a thread that blocks in [`Signal::send`]. Returns whether one would have blocked.
    fn unblock(&self) -> bool {
        let is_full = self.has_counter && !is_ready(&self.fd, PollFlags::OUT);
        if is_full {
            let mut count = [0; 8];
            let mut slices = [IoSliceMut::new(&mut count)];
            let _ = rustix::io::preadv2(&self.fd, &mut slices, u64::MAX, ReadWriteFlags::NOWAIT);
        }
        is_full
    }
}

impl AsFd for Signal {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Notifiers and counters of one queue.
#[derive(Debug, Default)]
struct QueueNotifiers {
    // Senders clone the reference first, so that they hold no lock while they block.
    call: Mutex<Option<Arc<Signal>>>,
    err: Mutex<Option<Arc<Signal>>>,
    kicks: AtomicU64,
    failure: Mutex<Option<String>>,
}

/// Notifiers of all queues of a device.
#[derive(Debug)]
pub struct ClientNotifiers {
    name: String,
    queues: Box<[QueueNotifiers]>,
    /// Replaced descriptors, in which an I/O thread may still block.
    replaced: Mutex<Vec<Weak<Signal>>>,
    panicked: OnceLock<Panicked>,
}

/// Is told of a panic of the code that serves a queue.
struct Panicked(Box<dyn Fn(&str) + Send + Sync>);

impl std::fmt::Debug for Panicked {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Panicked")
    }
}

/// Has an I/O thread signal the client for a queue that is on no thread.
#[derive(Debug)]
pub struct Relay {
    /// Notifiers of the device.
    pub notifiers: Arc<ClientNotifiers>,
    /// Where the I/O thread takes them.
    pub tasks: Tasks,
}

impl QueueEvents for Relay {
    fn used_buffer(&self, queue: u16) {
        let notifiers = Arc::clone(&self.notifiers);
        self.tasks.run(move || notifiers.used_buffer(queue));
    }

    fn kicked(&self, queue: u16, count: u64) {
        self.notifiers.kicked(queue, count);
    }

    fn failed(&self, queue: u16, error: &ServeError) {
        self.notifiers.record_failure(queue, error);
        let notifiers = Arc::clone(&self.notifiers);
        self.tasks.run(move || notifiers.signal_error(queue));
    }
}

fn send(signal: &Mutex<Option<Arc<Signal>>>) {
    let signal = signal.lock().clone();
    if let Some(signal) = signal {
        signal.send();
    }
}

impl ClientNotifiers {
    /// Makes the notifiers of a device with this name in logs.
    #[must_use]
    pub fn new(name: &str, queues: usize) -> Self {
        let notifiers = std::iter::repeat_with(QueueNotifiers::default).take(queues).collect();
        let (replaced, panicked) = (Mutex::default(), OnceLock::new());
        Self { name: name.to_owned(), queues: notifiers, replaced, panicked }
    }

    /// Calls `panicked` with the message when the code that serves a queue panics.
    ///
    /// Only the first call counts.
    pub fn watch_panics(&self, panicked: impl Fn(&str) + Send + Sync + 'static) {
        let _ = self.panicked.set(Panicked(Box::new(panicked)));
    }

    /// Replaces a descriptor.
    fn replace(&self, place: &Mutex<Option<Arc<Signal>>>, signal: Option<Signal>) {
        let old = std::mem::replace(&mut *place.lock(), signal.map(Arc::new));
        if let Some(old) = old {
            let mut replaced = self.replaced.lock();
            // Keep those in use: at most one per thread.
            replaced.retain(|other| other.strong_count() > 0);
            replaced.push(Arc::downgrade(&old));
        }
    }

    fn queue_notifiers(&self, queue: u16) -> Option<&QueueNotifiers> {
        self.queues.get(usize::from(queue))
    }

    /// Sets the call descriptor.
    ///
    /// The client may have missed an interrupt through the old one, or while there was none.
    pub fn set_call(&self, queue: u16, call: Option<Signal>) {
        if let Some(queue_notifiers) = self.queue_notifiers(queue) {
            self.replace(&queue_notifiers.call, call);
        }
    }

    /// Sets the error descriptor.
    pub fn set_err(&self, queue: u16, err: Option<Signal>) {
        if let Some(queue_notifiers) = self.queue_notifiers(queue) {
            self.replace(&queue_notifiers.err, err);
        }
    }

    /// Error that stopped the queue, if any.
    pub fn failure(&self, queue: u16) -> Option<String> {
        self.queue_notifiers(queue)?.failure.lock().clone()
    }

    /// Records the error of a queue that failed, perhaps in an earlier process; `None`: it starts over.
    pub fn set_failure(&self, queue: u16, error: Option<String>) {
        if let Some(queue_notifiers) = self.queue_notifiers(queue) {
            *queue_notifiers.failure.lock() = error;
        }
    }

    /// Number of kicks so far, over all clients.
    pub fn kicks(&self, queue: u16) -> u64 {
        // Relaxed: a statistic.
        self.queue_notifiers(queue).map_or(0, |queue_notifiers| queue_notifiers.kicks.load(Ordering::Relaxed))
    }

    /// The call and error descriptors of a queue.
    pub fn signals(&self, queue: u16) -> [Option<Arc<Signal>>; 2] {
        let Some(QueueNotifiers { call, err, .. }) = self.queue_notifiers(queue) else {
            return [None, None];
        };
        [call, err].map(|place| place.lock().clone())
    }

    /// Drops the client's descriptors and all errors. Counters stay.
    pub fn clear(&self) {
        for queue_notifiers in &self.queues {
            self.replace(&queue_notifiers.call, None);
            self.replace(&queue_notifiers.err, None);
            *queue_notifiers.failure.lock() = None;
        }
    }

    /// Frees an I/O thread that blocks because the client filled an eventfd.
    ///
    /// The client loses its count. Returns whether an eventfd was full.
    pub fn unblock(&self) -> bool {
        let mut was_full = false;
        for queue_notifiers in &self.queues {
            for signal in [&queue_notifiers.call, &queue_notifiers.err] {
                let signal = signal.lock().clone();
                if let Some(signal) = signal {
                    was_full |= signal.unblock();
                }
            }
        }
        let replaced: Vec<_> = self.replaced.lock().iter().filter_map(Weak::upgrade).collect();
        replaced.iter().for_each(|signal| was_full |= signal.unblock());
        was_full
    }

    fn record_failure(&self, queue: u16, error: &ServeError) {
        tracing::warn!(device = self.name, queue, "queue stopped until the driver resets it: {error}");
        self.set_failure(queue, Some(error.to_string()));
    }

    fn signal_error(&self, queue: u16) {
        if let Some(queue_notifiers) = self.queue_notifiers(queue) {
            send(&queue_notifiers.err);
        }
    }
}

impl QueueEvents for ClientNotifiers {
    fn used_buffer(&self, queue: u16) {
        if let Some(queue_notifiers) = self.queue_notifiers(queue) {
            send(&queue_notifiers.call);
        }
    }

    fn kicked(&self, queue: u16, count: u64) {
        if let Some(queue_notifiers) = self.queue_notifiers(queue) {
            // Relaxed: a statistic.
            queue_notifiers.kicks.fetch_add(count, Ordering::Relaxed);
        }
    }

    fn failed(&self, queue: u16, error: &ServeError) {
        self.record_failure(queue, error);
        self.signal_error(queue);
    }

    fn panicked(&self, _queue: u16, message: &str) {
        if let Some(panicked) = self.panicked.get() {
            (panicked.0)(message);
        }
    }
}
