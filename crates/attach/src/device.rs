//! A device behind its transport: what happens when the one asks for the other.
use crate::control::{Control, ControlLock};
use crate::counters::Counters;
use crate::events::DeviceEvents;
use crate::queue::Started;
use crate::status::{KickPath, QueueStatus};
use paravane_device::Device;
use paravane_dma::{Domain, Memory};
use paravane_io::{DeviceThreads, InFlightMemory, MoveError, QueueBackend, QueueSet};
use paravane_notify::{IoEventFds, NotifierState};
use paravane_transport::{AccessKind, Effect};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// In place of a window's address: there is none.
pub(crate) const NO_WINDOW: u64 = u64::MAX;

/// Makes the back end of a queue that is started.
pub(crate) type MakeBackend = Box<dyn Fn(u16) -> Box<dyn QueueBackend> + Send + Sync>;

/// What a device is attached to.
pub(crate) struct Settings {
    pub(crate) memory: Memory,
    pub(crate) domain: Option<Domain>,
    pub(crate) ioeventfds: Option<Arc<dyn IoEventFds>>,
    pub(crate) backend: Option<MakeBackend>,
    pub(crate) tracking: Option<InFlightMemory>,
}

/// A device behind a transport. Any thread may call any method.
///
/// Dropping it stops the device as [`AttachedDevice::stop`] does.
pub struct AttachedDevice {
    pub(crate) events: Arc<DeviceEvents>,
    pub(crate) settings: Settings,
    pub(crate) control: Arc<ControlLock>,
    features: u64,
    /// The driver polls for the end of a reset.
    polls_reset: bool,
    /// Guest-physical address of the window, or [`NO_WINDOW`].
    pub(crate) window: AtomicU64,
    window_size: u64,
}

impl AttachedDevice {
    pub(crate) fn new(
        device: Box<dyn Device>,
        events: DeviceEvents,
        settings: Settings,
        threads: DeviceThreads,
        features: u64,
        (window, window_size): (Option<u64>, u64),
    ) -> Self {
        let queues = QueueSet::new(Arc::new(threads), device.queue_sizes().len());
        let polls_reset = events.transport.lock().polls_reset();
        Self {
            events: Arc::new(events),
            settings,
            control: Arc::new(ControlLock::new(Control::new(device, queues))),
            features,
            polls_reset,
            window: AtomicU64::new(window.unwrap_or(NO_WINDOW)),
            window_size,
        }
    }

    /// Number in log lines and faults.
    #[must_use]
    pub fn number(&self) -> usize {
        self.events.number
    }

    /// Feature bits that are offered to the driver; the transport adds nothing.
    #[must_use]
    pub fn features(&self) -> u64 {
        self.features
    }

    /// Size of the transport's window in bytes.
    #[must_use]
    pub fn window_size(&self) -> u64 {
        self.window_size
    }

    /// Offset of guest-physical `addr` in the transport's window; `None`: outside.
    ///
    /// A PCI device has no window before its driver enables the BAR, and may move it.
    #[must_use]
    pub fn offset(&self, addr: u64) -> Option<u64> {
        // Relaxed: an access that races with a move of the window may see either.
        let base = self.window.load(Ordering::Relaxed);
        addr.checked_sub(base).filter(|&offset| base != NO_WINDOW && offset < self.window_size)
    }

    /// The guest reads at `offset` in the window. Whatever it does, `data` is filled.
    pub fn read(&self, offset: u64, data: &mut [u8]) {
        let kind = self.events.transport.lock().access(offset, false);
        self.events.counters.access(kind);
        if kind == AccessKind::Config {
            let control = self.control.lock();
            self.events.transport.lock().read(offset, data, &mut |offset, out| match &control.device {
                Some(device) => device.read_config(offset, out),
                None => out.fill(0),
            });
        } else {
            self.events.transport.lock().read(offset, data, &mut |_, out| out.fill(0));
        }
    }

    /// The guest writes at `offset` in the window.
    ///
    /// What that asks for is done when this returns, but for a reset with version 3 of virtio-mmio
    /// ([`Builder::mmio_version_3`](crate::Builder::mmio_version_3)): the driver polls for its end.
    pub fn write(&self, offset: u64, data: &[u8]) {
        let mut control = self.control.lock();
        let mut transport = self.events.transport.lock();
        self.events.counters.access(transport.access(offset, true));
        let effect = transport.write(offset, data);
        drop(transport);
        if let Some(effect) = effect {
            self.carry_out(&mut control, effect);
        }
    }

    /// Resets the device, as a driver does by writing 0 to the device status.
    ///
    /// What is in flight is waited for and forgotten. The driver may set the device up again.
    pub fn reset(&self) {
        let mut control = self.control.lock_settled();
        let reset = self.events.transport.lock().reset();
        if reset.is_some() {
            self.begin_reset(&mut control, false);
        }
    }

    /// Looks at the host's side again: a disk's size, for instance.
    ///
    /// Interrupts the driver if the configuration has changed.
    ///
    /// If the device is suspended, this happens when it is resumed.
    ///
    /// # Errors
    /// The host does not answer; nothing has changed.
    pub fn refresh(&self) -> std::io::Result<bool> {
        let mut control = self.control.lock();
        if control.suspended {
            control.refresh = true;
            return Ok(false);
        }
        self.refresh_device(&mut control)
    }

    /// Refreshes the device, and tells the transport of a change.
    pub(crate) fn refresh_device(&self, control: &mut Control) -> std::io::Result<bool> {
        let Some(device) = &mut control.device else { return Ok(false) };
        let changed = device.refresh()?;
        if changed {
            self.events.transport.lock().config_changed();
        }
        Ok(changed)
    }

    /// Stops the device: completes what the guest has asked for, and serves no more.
    ///
    /// Returns the device, which may hold locks and interfaces of the host; `None`: it was stopped
    /// before. The registers stay, for a guest that still runs.
    pub fn stop(&self) -> Option<Box<dyn Device>> {
        let mut control = self.control.lock_settled();
        let all = control.queues.all();
        control.queues.stop(all, true);
        control.device.take()
    }

    /// Moves `queue` to I/O thread `thread` of the pool, with all that is in flight.
    ///
    /// The driver notices nothing.
    ///
    /// # Errors
    /// See [`MoveError`]. After [`MoveError::Lost`] the driver has to reset the device; else
    /// nothing has changed.
    pub fn move_queue(&self, queue: u16, thread: usize) -> Result<(), MoveError> {
        let moved = self.control.lock().queues.move_to(queue, thread);
        moved.inspect_err(|error| {
            if let MoveError::Lost { source, .. } = error {
                self.events
                    .fault(format!("queue {queue} was lost on its way to I/O thread {thread}: {source}"));
            }
        })
    }

    /// The queues that were started at least once.
    #[must_use]
    pub fn queues(&self) -> Vec<QueueStatus> {
        let control = self.control.lock();
        (0..).zip(&control.slots).filter_map(|(index, slot)| slot.status(index, &control.queues)).collect()
    }

    /// Counters, shared with other devices if the builder was told so.
    #[must_use]
    pub fn counters(&self) -> &Counters {
        &self.events.counters
    }

    /// Interrupts raised, wired ones and messages.
    #[must_use]
    pub fn interrupts(&self) -> u64 {
        self.events.interrupts.raised()
    }

    /// Messages sent.
    #[must_use]
    pub fn messages(&self) -> u64 {
        self.events.interrupts.msi().map_or(0, |table| table.sent())
    }

    /// Register accesses that the specification forbids the driver. They had no effect.
    #[must_use]
    pub fn violations(&self) -> u64 {
        self.events.transport.lock().violations()
    }

    /// Kicks that came as exits.
    #[must_use]
    pub fn exit_kicks(&self) -> u64 {
        self.queues().iter().map(|queue| queue.exit_kicks).sum()
    }

    fn carry_out(&self, control: &mut Control, effect: Effect) {
        match effect {
            Effect::Activate { features, queues } => {
                for (queue, addresses) in queues {
                    self.start_queue(control, queue, Started { features, addresses });
                }
            }
            Effect::StartQueue { features, queue, addresses } => {
                self.start_queue(control, queue, Started { features, addresses });
            }
            Effect::ResetQueue { queue } => {
                control.queues.stop([queue], false);
                self.events.transport.lock().queue_reset_done(queue);
            }
            Effect::Suspend => self.suspend(control),
            Effect::Resume => self.resume_from_suspend(control),
            Effect::Reset => self.begin_reset(control, self.polls_reset),
            Effect::Notify { queue } => {
                let slot = control.slots.get(usize::from(queue));
                if let Some(notifier) = slot.and_then(|slot| slot.notifier.as_ref())
                    && !control.queues.kick(queue)
                {
                    notifier.kick();
                }
            }
            Effect::Move { window } => self.relocate(control, window),
            Effect::WriteConfig { offset, data } => {
                if let Some(device) = &mut control.device {
                    device.write_config(offset, &data);
                }
            }
        }
    }

    /// The window has moved: the ioeventfds follow.
    fn relocate(&self, control: &mut Control, window: Option<u64>) {
        // Relaxed: as in `offset`.
        self.window.store(window.unwrap_or(NO_WINDOW), Ordering::Relaxed);
        let Control { queues, slots, .. } = control;
        for (index, queue) in (0..).zip(slots) {
            let Some(notifier) = queue.notifier.as_ref().filter(|_| queues.is_live(index)) else { continue };
            let address = self.events.transport.lock().notify_address(index);
            let addr = window.zip(address).map(|(base, at)| base.wrapping_add(at.offset));
            if let Err(error) = notifier.relocate(addr) {
                tracing::debug!(device = self.events.number, queue = index, "kicks exit: {error}");
                queue.kicks_by = KickPath::Refused;
            } else if notifier.state() == NotifierState::Assigned {
                queue.kicks_by = KickPath::IoEventFd;
            }
        }
    }
}

impl Drop for AttachedDevice {
    fn drop(&mut self) {
        self.stop();
    }
}

impl std::fmt::Debug for AttachedDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AttachedDevice")
            .field("number", &self.events.number)
            .field("features", &format_args!("{:#x}", self.features))
            .finish_non_exhaustive()
    }
}
