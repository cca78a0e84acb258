//! Models of kicks: a host, a driver, and owners of a queue.
//!
//! An owner looks at the ring only when signalled.
use loom::sync::Mutex;
use loom::sync::atomic::Ordering::{Relaxed, SeqCst};
use loom::sync::atomic::{AtomicU32, fence};
use paravane_notify::{HostNotifier, IoEventFds, Notifier, NotifyError};
use std::sync::Arc;

/// Host that registers ioeventfds as KVM does.
///
/// A write is delivered while its registration exists. A removal waits for writes under way.
#[derive(Default)]
pub(crate) struct Host {
    registered: Mutex<Option<Notifier>>,
    /// Number of kicks through the registration. Written under its lock.
    delivered: Mutex<u32>,
    refuse: std::sync::atomic::AtomicBool,
}

impl Host {
    /// Refuses ioeventfds from now on.
    pub(crate) fn refuse(&self) {
        self.refuse.store(true, Relaxed);
    }

    pub(crate) fn delivered(&self) -> u32 {
        *self.delivered.lock().unwrap()
    }

    /// A write to a notification address; returns whether an ioeventfd took it.
    fn write(&self) -> bool {
        let registered = self.registered.lock().unwrap();
        if let Some(notifier) = &*registered {
            notifier.signal();
            *self.delivered.lock().unwrap() += 1;
        }
        registered.is_some()
    }
}

impl IoEventFds for Host {
    fn assign(&self, _addr: u64, _datamatch: Option<u32>, notifier: &Notifier) -> Result<(), NotifyError> {
        if self.refuse.load(Relaxed) {
            return Err(NotifyError::Os { what: "register", source: std::io::ErrorKind::StorageFull.into() });
        }
        let before = self.registered.lock().unwrap().replace(notifier.try_clone()?);
        assert!(before.is_none(), "registered twice");
        Ok(())
    }

    fn deassign(&self, _addr: u64, _datamatch: Option<u32>, _notifier: &Notifier) -> Result<(), NotifyError> {
        assert!(self.registered.lock().unwrap().take().is_some());
        Ok(())
    }
}

/// One queue of a machine.
///
/// Its "ring" is a count of available buffers that is accessed without order, so that only the path
/// of the kick, or the fence around the request for it, can make it visible.
pub(crate) struct Scene {
    pub(crate) host: Arc<Host>,
    /// Current notifier of the queue.
    ///
    /// An exit finds it under the lock of the control path.
    current: Mutex<Arc<HostNotifier>>,
    available: AtomicU32,
    /// Whether the driver must kick.
    asked: AtomicU32,
}

impl Scene {
    /// Makes a scene with a deassigned notifier without its initial signal.
    ///
    /// That signal would hide the errors that the models look for.
    pub(crate) fn new() -> Arc<Self> {
        let host = Arc::new(Host::default());
        let scene = Self {
            current: Mutex::new(Self::notifier(&host)),
            host,
            available: AtomicU32::new(0),
            asked: AtomicU32::new(1),
        };
        assert_eq!(scene.queue().notifier().take(), 1);
        Arc::new(scene)
    }

    fn notifier(host: &Arc<Host>) -> Arc<HostNotifier> {
        let fds: Arc<dyn IoEventFds> = Arc::<Host>::clone(host);
        Arc::new(HostNotifier::new(fds, 0x50, None).expect("an eventfd"))
    }

    pub(crate) fn queue(&self) -> Arc<HostNotifier> {
        Arc::clone(&self.current.lock().unwrap())
    }

    /// Replaces the notifier, as a restored or restarted machine does.
    ///
    /// The old one is dropped.
    pub(crate) fn renew(&self) {
        *self.current.lock().unwrap() = Self::notifier(&self.host);
    }

    /// A buffer and a kick, with no order but the kick's own.
    pub(crate) fn drive_unasked(&self) {
        self.available.fetch_add(1, Relaxed);
        if !self.host.write() {
            self.current.lock().unwrap().kick();
        }
    }

    /// Driver: adds a buffer, and kicks if the device requests it.
    ///
    /// The kick is an ioeventfd or an exit.
    pub(crate) fn drive(&self) {
        self.available.fetch_add(1, Relaxed);
        // Pairs with the fence in `look`: the driver sees the request, or the owner the buffer.
        fence(SeqCst);
        if self.asked.load(Relaxed) == 1 && !self.host.write() {
            self.current.lock().unwrap().kick();
        }
    }
}

/// Owner of the queue's signals.
///
/// It hands over its position in the ring.
#[derive(Default)]
pub(crate) struct Owner {
    pub(crate) seen: u32,
}

impl Owner {
    /// Takes the signals; looks at the ring if there were any.
    pub(crate) fn serve(&mut self, scene: &Scene) -> bool {
        let signalled = scene.queue().notifier().take() > 0;
        if signalled {
            self.look(scene);
        }
        signalled
    }

    /// Takes the signals; looks once, with no order but theirs, if there were any.
    pub(crate) fn glance(&mut self, scene: &Scene) -> bool {
        let signalled = scene.queue().notifier().take() > 0;
        if signalled {
            self.seen = scene.available.load(Relaxed);
        }
        signalled
    }

    /// Takes the signals, disables kicks, and is stopped before it looks.
    pub(crate) fn start_to_serve(&mut self, scene: &Scene) -> bool {
        let signalled = scene.queue().notifier().take() > 0;
        if signalled {
            scene.asked.store(0, Relaxed);
        }
        signalled
    }

    /// Serves the ring until it is empty, and requests kicks before it rests.
    fn look(&mut self, scene: &Scene) {
        scene.asked.store(0, Relaxed);
        loop {
            self.seen = scene.available.load(Relaxed);
            scene.asked.store(1, Relaxed);
            // Pairs with the fence in `drive`.
            fence(SeqCst);
            if scene.available.load(Relaxed) == self.seen {
                return;
            }
        }
    }
}
