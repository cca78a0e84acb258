//! Host notifier of one queue: decides where its kicks arrive.
use crate::sync::{AtomicU64, Mutex, MutexGuard};
use crate::{IoEventFds, NoIoEventFds, Notifier, NotifyError};
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

/// Owner of a queue's kicks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotifierState {
    /// Kicks exit, and the exit path signals the notifier.
    ///
    /// The VMM's event loop owns it.
    Deassigned,
    /// Kicks signal the notifier without an exit. The VMM's event loop owns it.
    Assigned,
    /// A vhost back end owns the notifier.
    OffLimits,
}

/// Notifier of one queue, with its address and its state.
///
/// The eventfd always exists, and an event loop always waits on it: without an ioeventfd the exit
/// path writes it, so the queue has one owner either way.
///
/// # States
///
/// ```text
///             assign                      grab
/// Deassigned ---------> Assigned ---------------------> OffLimits, counted
///   ^    ^ <---------             (signalled)             |  ^      |  ^
///   |    |   deassign            <-----------------       +--+      +--+
///   +----+                        last release            grab      release
///    assign, refused              (signalled)
///
/// On a host that refused: Deassigned -- grab --> OffLimits -- last release --> Deassigned
/// ```
///
/// **Deassigned**: no ioeventfd. A kick is an exit, and the exit path signals the eventfd
/// ([`HostNotifier::kick`]). **Assigned**: the host signals the eventfd without an exit. A kick
/// that still exits (it began before the change of state) signals the eventfd too. **`OffLimits`**:
/// a vhost back end waits on the eventfd, and the VMM's event loop does not touch it; the ioeventfd
/// stays as it was.
///
/// In every state kicks arrive in the eventfd only, and exactly one owner of the queue waits on it.
/// So no transition has a window in which a kick is lost. The remaining case is a signal whose
/// owner is gone: it stays in the eventfd, and the following rules handle it. They come from QEMU's
/// patch "virtio: Use ioeventfd for virtqueue notify" (2010) and the bugs that were fixed after it:
///
/// - A notifier is signalled when it is made.
/// - Each start, resume or change of owner signals the queue once: [`HostNotifier::assign`],
///   refused or not, the first [`HostNotifier::grab`], and the last [`HostNotifier::release`]. The
///   new owner then looks at the ring, whatever was missed: the old one may have taken a signal,
///   disabled kicks, and ended before it looked.
/// - To stop: first the owner removes its handler (so that nothing runs concurrently), then
///   [`HostNotifier::deassign`] removes the ioeventfd (so that only exits can signal), then the
///   owner tests the notifier ([`Notifier::take`]) and serves the queue if it was signalled, and
///   only then drops it.
pub struct HostNotifier {
    fds: Arc<dyn IoEventFds>,
    datamatch: Option<u32>,
    notifier: Notifier,
    /// Changed by the control path only; a kick never takes the lock.
    ownership: Mutex<Ownership>,
    exit_kicks: AtomicU64,
}

#[derive(Clone, Copy, Debug)]
struct Ownership {
    /// Guest-physical address of the kicks; `None` if they arrive nowhere.
    addr: Option<u64>,
    /// Whether an ioeventfd is wanted wherever kicks arrive.
    wanted: bool,
    /// Whether the ioeventfd is registered, at `addr`.
    registered: bool,
    /// Number of grabs that are not released.
    grabs: u32,
}

impl Ownership {
    fn state(self) -> NotifierState {
        match (self.grabs, self.registered) {
            (1.., _) => NotifierState::OffLimits,
            (0, true) => NotifierState::Assigned,
            (0, false) => NotifierState::Deassigned,
        }
    }

    /// Returns an error unless the state is `needed`.
    fn expect(self, needed: NotifierState, wanted: &'static str) -> Result<(), NotifyError> {
        let state = self.state();
        if state == needed { Ok(()) } else { Err(NotifyError::State { state, wanted }) }
    }
}

impl HostNotifier {
    /// Makes a deassigned, signalled notifier.
    ///
    /// Kicks are writes of `datamatch` (any value if `None`) to guest-physical `addr`.
    ///
    /// # Errors
    /// The process has no file descriptors left.
    pub fn new(fds: Arc<dyn IoEventFds>, addr: u64, datamatch: Option<u32>) -> Result<Self, NotifyError> {
        Ok(Self::with(Notifier::new(true)?, fds, addr, datamatch))
    }

    fn with(notifier: Notifier, fds: Arc<dyn IoEventFds>, addr: u64, datamatch: Option<u32>) -> Self {
        Self {
            fds,
            datamatch,
            notifier,
            ownership: Mutex::new(Ownership { addr: Some(addr), wanted: false, registered: false, grabs: 0 }),
            exit_kicks: AtomicU64::new(0),
        }
    }

    /// Makes a deassigned notifier whose kicks another process manages.
    ///
    /// Only its eventfd is used.
    #[must_use]
    pub fn of(notifier: Notifier) -> Self {
        Self::with(notifier, Arc::new(NoIoEventFds), 0, None)
    }

    /// Eventfd for the owner to wait on.
    #[must_use]
    pub fn notifier(&self) -> &Notifier {
        &self.notifier
    }

    /// Registers the ioeventfd, and signals once.
    ///
    /// On refusal the state stays `Deassigned` and kicks exit; the notifier is signalled too,
    /// because the queue starts either way. While kicks arrive nowhere, there is nothing to
    /// register; [`HostNotifier::relocate`] registers it later.
    ///
    /// # Errors
    /// The host refuses; or the notifier is not deassigned, and then it is not signalled.
    pub fn assign(&self) -> Result<(), NotifyError> {
        let mut ownership = self.lock();
        ownership.expect(NotifierState::Deassigned, "assigned")?;
        let result = self.register(&mut ownership);
        self.notifier.signal();
        result
    }

    /// Removes the ioeventfd, or the request for one while kicks arrive nowhere.
    ///
    /// Remove the handler before, and test the notifier once more afterwards: a kick may have
    /// arrived in between.
    ///
    /// # Errors
    /// The notifier is not assigned; or the host refuses, and the state stays `Assigned`, because
    /// the host may still signal the eventfd.
    pub fn deassign(&self) -> Result<(), NotifyError> {
        let mut ownership = self.lock();
        if ownership.state() == NotifierState::Deassigned && std::mem::take(&mut ownership.wanted) {
            return Ok(());
        }
        ownership.expect(NotifierState::Assigned, "deassigned")?;
        self.unregister(&mut ownership)?;
        ownership.wanted = false;
        Ok(())
    }

    /// Requests the ioeventfd, wherever kicks arrive.
    fn register(&self, ownership: &mut Ownership) -> Result<(), NotifyError> {
        let result = match ownership.addr {
            Some(addr) => self.fds.assign(addr, self.datamatch, &self.notifier),
            None => Ok(()),
        };
        ownership.wanted = result.is_ok();
        ownership.registered = result.is_ok() && ownership.addr.is_some();
        result
    }

    /// Removes the ioeventfd if there is one.
    fn unregister(&self, ownership: &mut Ownership) -> Result<(), NotifyError> {
        if let Some(addr) = ownership.addr.filter(|_| ownership.registered) {
            self.fds.deassign(addr, self.datamatch, &self.notifier)?;
            ownership.registered = false;
        }
        Ok(())
    }

    /// Sets the address of kicks; `None` for nowhere.
    ///
    /// Call it when the guest moves or disables the device.
    ///
    /// An ioeventfd moves along, and returns when there is an address again. Signals once, for
    /// kicks in between. The owner of the eventfd is not affected.
    ///
    /// # Errors
    /// The host refuses the new address, and kicks exit; or it refuses to release the old one, and
    /// nothing changes.
    pub fn relocate(&self, addr: Option<u64>) -> Result<(), NotifyError> {
        let mut ownership = self.lock();
        self.unregister(&mut ownership)?;
        ownership.addr = addr;
        let result = if ownership.wanted { self.register(&mut ownership) } else { Ok(()) };
        self.notifier.signal();
        result
    }

    /// Hands the notifier to a vhost back end.
    ///
    /// Counted: each grab needs a [`HostNotifier::release`].
    ///
    /// Remove the handler before. The first grab signals once, so the back end may begin to wait
    /// before or after.
    ///
    /// # Errors
    /// The count overflows.
    pub fn grab(&self) -> Result<(), NotifyError> {
        let mut ownership = self.lock();
        let state = ownership.state();
        ownership.grabs = ownership
            .grabs
            .checked_add(1)
            .ok_or(NotifyError::State { state, wanted: "grabbed once more" })?;
        if ownership.grabs == 1 {
            self.notifier.signal();
        }
        Ok(())
    }

    /// Ends one [`HostNotifier::grab`].
    ///
    /// The last release returns the notifier to the VMM's event loop, and signals once. The back
    /// end must have stopped before; the handler may be installed before or after.
    ///
    /// # Errors
    /// The notifier is not grabbed.
    pub fn release(&self) -> Result<(), NotifyError> {
        let mut ownership = self.lock();
        ownership.expect(NotifierState::OffLimits, "released")?;
        ownership.grabs -= 1;
        if ownership.grabs == 0 {
            self.notifier.signal();
        }
        Ok(())
    }

    /// Current state.
    #[must_use]
    pub fn state(&self) -> NotifierState {
        self.lock().state()
    }

    /// Forwards a kick that came by an exit to the owner. Takes no lock.
    pub fn kick(&self) {
        // Relaxed: a statistic, which orders nothing.
        self.exit_kicks.fetch_add(1, Ordering::Relaxed);
        // A release, as the notifier promises: the owner that takes the signal sees the driver's
        // available index, which this thread saw (or made) before.
        self.notifier.signal();
    }

    /// Number of kicks that came by an exit.
    #[must_use]
    pub fn exit_kicks(&self) -> u64 {
        // Relaxed: a statistic.
        self.exit_kicks.load(Ordering::Relaxed)
    }

    fn lock(&self) -> MutexGuard<'_, Ownership> {
        // Each change under the lock is one assignment, so a poisoned value is valid.
        self.ownership.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for HostNotifier {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let ownership = *self.lock();
        f.debug_struct("HostNotifier")
            .field("addr", &format_args!("{:x?}", ownership.addr))
            .field("datamatch", &self.datamatch)
            .field("notifier", &self.notifier)
            .field("state", &ownership.state())
            .field("exit_kicks", &self.exit_kicks())
            .finish_non_exhaustive()
    }
}

impl Drop for HostNotifier {
    /// Unregisters, because the host keeps the eventfd of a registration.
    ///
    /// It would refuse the address to the next notifier.
    fn drop(&mut self) {
        let mut ownership = *self.lock();
        // There is no caller to report a refusal to.
        let _ = self.unregister(&mut ownership);
    }
}
