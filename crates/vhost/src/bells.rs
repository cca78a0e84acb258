//! What the I/O threads tell a client: interrupts, and failures of queues.
//!
//! A client's descriptors share their file descriptions with it, so their flags are not ours to change. An eventfd is
//! written to as it is: that waits only if the client has made its counter overflow, and [`Bells::unblock`] ends that. A pipe
//! (User Mode Linux) fills up when its reader sleeps, and is written to only if that does not wait: a full one rings
//! already.
use paravane_device::ServeError;
use paravane_io::Site;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::FileType;
use rustix::io::{Errno, IoSlice, IoSliceMut, ReadWriteFlags};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

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
        let mode = rustix::fs::fstat(&fd)?.st_mode;
        match FileType::from_raw_mode(mode) {
            // What has no file, an eventfd above all, has no type either.
            FileType::Unknown => Ok(Self { fd, counts: true }),
            FileType::Fifo | FileType::Socket => Ok(Self { fd, counts: false }),
            _ => Err(io::Error::new(io::ErrorKind::InvalidInput, "it is neither an eventfd nor a pipe")),
        }
    }

    fn ring(&self) {
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

    /// Whoever waits in [`Signal::ring`] goes on.
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
struct Bell {
    // Who rings takes a reference first, and holds no lock while it may wait.
    call: Mutex<Option<Arc<Signal>>>,
    err: Mutex<Option<Arc<Signal>>>,
    kicks: AtomicU64,
    failure: Mutex<Option<String>>,
}

/// All of a device.
#[derive(Debug)]
pub(crate) struct Bells {
    name: String,
    queues: Box<[Bell]>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Each change is one assignment.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn ring(signal: &Mutex<Option<Arc<Signal>>>) {
    let signal = lock(signal).clone();
    if let Some(signal) = signal {
        signal.ring();
    }
}

impl Bells {
    pub(crate) fn new(name: &str, queues: usize) -> Self {
        Self { name: name.to_owned(), queues: std::iter::repeat_with(Bell::default).take(queues).collect() }
    }

    fn bell(&self, queue: u16) -> Option<&Bell> {
        self.queues.get(usize::from(queue))
    }

    /// Interrupts go there from now on. What the old one, or none, was told meanwhile may have been heard by nobody.
    pub(crate) fn set_call(&self, queue: u16, call: Option<Signal>) {
        if let Some(bell) = self.bell(queue) {
            *lock(&bell.call) = call.map(Arc::new);
        }
    }

    /// Failures are told there from now on.
    pub(crate) fn set_err(&self, queue: u16, err: Option<Signal>) {
        if let Some(bell) = self.bell(queue) {
            *lock(&bell.err) = err.map(Arc::new);
        }
    }

    /// An interrupt, perhaps one too many.
    pub(crate) fn interrupt(&self, queue: u16) {
        if let Some(bell) = self.bell(queue) {
            ring(&bell.call);
        }
    }

    /// Why the queue has failed, if it has.
    pub(crate) fn failure(&self, queue: u16) -> Option<String> {
        lock(&self.bell(queue)?.failure).clone()
    }

    /// The queue begins anew.
    pub(crate) fn forget_failure(&self, queue: u16) {
        if let Some(bell) = self.bell(queue) {
            *lock(&bell.failure) = None;
        }
    }

    /// Kicks so far, of all clients.
    pub(crate) fn kicks(&self, queue: u16) -> u64 {
        // Relaxed: a statistic.
        self.bell(queue).map_or(0, |bell| bell.kicks.load(Ordering::Relaxed))
    }

    /// The client is gone: its descriptors go, and nothing is remembered of its queues but what was counted.
    pub(crate) fn clear(&self) {
        for bell in &self.queues {
            *lock(&bell.call) = None;
            *lock(&bell.err) = None;
            *lock(&bell.failure) = None;
        }
    }

    /// Frees those who wait for a client that does not read; it misses signals.
    pub(crate) fn unblock(&self) {
        for bell in &self.queues {
            for signal in [&bell.call, &bell.err] {
                let signal = lock(signal).clone();
                if let Some(signal) = signal {
                    signal.unblock();
                }
            }
        }
    }
}

impl Site for Bells {
    fn used_buffer(&self, queue: u16) {
        self.interrupt(queue);
    }

    fn kicked(&self, queue: u16, count: u64) {
        if let Some(bell) = self.bell(queue) {
            // Relaxed: a statistic.
            bell.kicks.fetch_add(count, Ordering::Relaxed);
        }
    }

    fn failed(&self, queue: u16, error: &ServeError) {
        tracing::warn!(device = self.name, queue, "queue stopped until its driver resets it: {error}");
        if let Some(bell) = self.bell(queue) {
            *lock(&bell.failure) = Some(error.to_string());
            ring(&bell.err);
        }
    }
}
