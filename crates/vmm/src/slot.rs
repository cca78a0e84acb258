//! One device on the bus: transport, device and queues, and what happens when the one asks for the other.
//!
//! ```text
//! register write -> Transport (pure) -> Effect -> carried out here, before the access returns:
//!    Activate, StartQueue   MappedQueue::start, Device::start_queue, put on an I/O thread
//!    ResetQueue, Reset      queue taken off its I/O thread and stopped, then the transport is told
//!    Notify                 HostNotifier::kick: the eventfd's one owner does the work
//!    Move                   the window is elsewhere, and the queues' ioeventfds follow
//! ```
//! A queue that runs may be moved to another I/O thread, or lent to an owner that is none of ours (`lending`).
//!
//! Order of locks: `control`, then `transport`. The I/O thread takes only `transport` (to mark a failed queue), and
//! `transport` is never held while one waits for the I/O thread.
//!
//! Any transport will do: the slot asks it what a register access means, where a queue's kicks arrive
//! ([`Transport::notify_address`], when the queue starts), and shares the device's [`Interrupts`] with it.
mod lending;

#[cfg(test)]
pub(crate) use lending::LendError;

use crate::balance::Load;
use crate::crew::{Crew, Elsewhere};
use crate::guard::lock;
use crate::process::QueueToStart;
use crate::report::{KickPath, QueueResult};
use crate::site::MachineSite;
use crate::tally::Tally;
use lending::{LentQueue, Started};
use paravane_device::{Device, MappedQueue, QueueHandler};
use paravane_dma::{Domain, Memory};
use paravane_io::{HostQueue, NotPutOn, QueueKey, QueueWork};
use paravane_notify::{HostNotifier, Interrupts, IoEventFds, NoIoEventFds, NotifierState, NotifyError};
use paravane_spec::queue::QueueAddresses;
use paravane_transport::{AccessKind, DeviceDescription, Effect, NotifyAddress, Transport};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use thiserror::Error;

/// What a slot shares with the rest of its machine.
#[derive(Clone)]
pub(crate) struct Surroundings {
    /// Guest memory.
    pub(crate) memory: Memory,
    /// The address space that the device sees it through; `None`: addresses are guest-physical.
    pub(crate) domain: Option<Domain>,
    /// The threads that serve its queues.
    pub(crate) crew: Crew,
    /// Counters.
    pub(crate) tally: Arc<Tally>,
    /// What gives out ioeventfds.
    pub(crate) fds: Arc<dyn IoEventFds>,
    /// Whether to ask for them.
    pub(crate) ioeventfd: bool,
    /// Feature bits offered for the rings, beside the device's own.
    pub(crate) ring_features: u64,
    /// Whether the kernel's vhost-net is to serve the queues that it can serve.
    pub(crate) vhost_net: bool,
}

/// How a device is attached to the machine.
pub(crate) struct Attachment {
    /// Guest-physical address of the transport's window; [`NOWHERE`] until the guest switches it on.
    pub(crate) base: u64,
    /// Bytes of the window.
    pub(crate) size: u64,
    /// The registers.
    pub(crate) transport: Box<dyn Transport>,
    /// The interrupts; the transport has the same ones.
    pub(crate) interrupts: Arc<Interrupts>,
}

/// Why a queue is where it was.
#[derive(Debug, Error)]
pub(crate) enum MoveError {
    /// queue {queue} is not running
    #[error("queue {queue} is not running")]
    NotLive {
        /// Which.
        queue: u16,
    },
    /// there is no I/O thread {number}
    #[error("there is no I/O thread {number}")]
    NoThread {
        /// Which.
        number: usize,
    },
    /// the other thread does not take the queue: {source}
    #[error("the other thread does not take the queue: {source}")]
    Refused {
        /// Why.
        source: std::io::Error,
    },
    /// no thread takes the queue any more: {source}
    #[error("no thread takes the queue any more: {source}")]
    Lost {
        /// Why.
        source: std::io::Error,
    },
}

/// In place of a window's address: it has none.
pub(crate) const NOWHERE: u64 = u64::MAX;

/// What the transport of `device` offers.
pub(crate) fn describe(device: &dyn Device, surroundings: &Surroundings) -> DeviceDescription {
    DeviceDescription {
        device_id: device.device_id(),
        features: device.features() | surroundings.ring_features,
        queue_sizes: device.queue_sizes().to_vec(),
    }
}

/// What only one register access at a time may touch.
struct Control {
    /// `None` when the machine has stopped.
    device: Option<Box<dyn Device>>,
    queues: Vec<Queue>,
}

/// One queue, as the slot knows it.
#[derive(Default)]
struct Queue {
    max_size: u16,
    /// It has been started, and not stopped since.
    live: bool,
    /// Number of the I/O thread that has it, or had it last.
    thread: usize,
    /// How often it changed threads.
    moves: u64,
    /// Chains taken and chains completed, since it was started for the first time.
    work: Arc<QueueWork>,
    /// How its kicks come, since it was started last.
    kicks_by: KickPath,
    /// Where its kicks arrive, since it was started for the first time.
    notifier: Option<Arc<HostNotifier>>,
    /// Kicks that came by an exit to earlier notifiers.
    exit_kicks: u64,
    /// What it was started with last.
    started: Option<Started>,
    /// An owner outside our threads has it.
    lent: Option<LentQueue>,
}

/// One device.
pub(crate) struct Slot {
    /// The device as its I/O threads see it: number, registers, interrupts.
    site: Arc<MachineSite>,
    surroundings: Surroundings,
    /// Guest-physical address of the window, or [`NOWHERE`].
    base: AtomicU64,
    size: u64,
    control: Mutex<Control>,
}

impl Slot {
    /// Puts `device` behind the transport of `attachment`.
    pub(crate) fn new(
        number: usize,
        attachment: Attachment,
        device: Box<dyn Device>,
        surroundings: Surroundings,
    ) -> Self {
        let queue = |&max_size: &u16| Queue { max_size, ..Queue::default() };
        let queues = device.queue_sizes().iter().map(queue).collect();
        let site = MachineSite {
            number,
            interrupts: attachment.interrupts,
            transport: Mutex::new(attachment.transport),
            tally: Arc::clone(&surroundings.tally),
        };
        Self {
            site: Arc::new(site),
            surroundings,
            base: AtomicU64::new(attachment.base),
            size: attachment.size,
            control: Mutex::new(Control { device: Some(device), queues }),
        }
    }

    /// What guest-physical `addr` is in the window, if it lies there.
    pub(crate) fn offset(&self, addr: u64) -> Option<u64> {
        // Relaxed: whoever moves a window while another accesses it has to expect either.
        let base = self.base.load(Ordering::Relaxed);
        addr.checked_sub(base).filter(|&offset| base != NOWHERE && offset < self.size)
    }

    /// The window has moved: the ioeventfds follow.
    fn relocate(&self, control: &mut Control, window: Option<u64>) {
        // Relaxed: as in `offset`.
        self.base.store(window.unwrap_or(NOWHERE), Ordering::Relaxed);
        for (queue, slot) in (0..).zip(&mut control.queues) {
            let Some(notifier) = slot.notifier.as_ref().filter(|_| slot.live) else { continue };
            let address = lock(&self.site.transport).notify_address(queue);
            let addr = window.zip(address).map(|(base, at)| base.wrapping_add(at.offset));
            if let Err(error) = notifier.relocate(addr) {
                tracing::debug!(device = self.site.number, queue, "kicks exit: {error}");
                slot.kicks_by = KickPath::Refused;
            } else if notifier.state() == NotifierState::Assigned {
                slot.kicks_by = KickPath::IoEventFd;
            }
        }
    }

    /// The guest reads at `offset`.
    pub(crate) fn read(&self, offset: u64, data: &mut [u8]) {
        let kind = lock(&self.site.transport).access(offset, false);
        self.surroundings.tally.access(kind);
        if kind == AccessKind::Config {
            let control = lock(&self.control);
            lock(&self.site.transport).read(offset, data, &mut |offset, out| match &control.device {
                Some(device) => device.read_config(offset, out),
                None => out.fill(0),
            });
        } else {
            lock(&self.site.transport).read(offset, data, &mut |_, out| out.fill(0));
        }
    }

    /// The guest writes at `offset`.
    pub(crate) fn write(&self, offset: u64, data: &[u8]) {
        let mut control = lock(&self.control);
        let mut transport = lock(&self.site.transport);
        self.surroundings.tally.access(transport.access(offset, true));
        let effect = transport.write(offset, data);
        drop(transport);
        if let Some(effect) = effect {
            self.carry_out(&mut control, effect);
        }
    }

    fn carry_out(&self, control: &mut Control, effect: Effect) {
        match effect {
            Effect::Activate { features, queues } => {
                for (queue, addresses) in queues {
                    self.start_queue(control, features, queue, addresses);
                }
            }
            Effect::StartQueue { features, queue, addresses } => {
                self.start_queue(control, features, queue, addresses);
            }
            Effect::ResetQueue { queue } => {
                self.stop_queue(control, queue, false);
                lock(&self.site.transport).queue_reset_done(queue);
            }
            Effect::Reset => {
                self.stop_queues(control, false);
                if let Some(device) = &mut control.device {
                    device.reset();
                }
                lock(&self.site.transport).reset_done();
            }
            Effect::Notify { queue: index } => {
                if let Some(Elsewhere::Inline(inline)) = self.surroundings.crew.elsewhere() {
                    return inline.kick(QueueKey { device: self.site.number, queue: index });
                }
                let queue = control.queues.get(usize::from(index));
                if let Some(notifier) = queue.and_then(|queue| queue.notifier.as_ref()) {
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

    fn start_queue(&self, control: &mut Control, features: u64, queue: u16, addresses: QueueAddresses) {
        match self.try_start_queue(control, features, queue, addresses) {
            Ok(()) if self.surroundings.vhost_net => self.lend_to_kernel(control, queue),
            Ok(()) => {}
            Err(what) => {
                tracing::warn!(device = self.site.number, queue, "queue not started: {what}");
                self.site.fault(what);
            }
        }
    }

    fn try_start_queue(
        &self,
        control: &mut Control,
        features: u64,
        queue: u16,
        addresses: QueueAddresses,
    ) -> Result<(), String> {
        let Some(slot) = control.queues.get_mut(usize::from(queue)) else {
            return Err("there is no such queue".into());
        };
        let Some(device) = &mut control.device else {
            return Err("the machine has stopped".into());
        };
        if slot.live {
            return Err("it is running already".into());
        }
        if let Some(Elsewhere::Process(process)) = self.surroundings.crew.elsewhere() {
            let (notifier, ioeventfd) = self.notifier(queue).map_err(|error| error.to_string())?;
            if ioeventfd && let Err(error) = notifier.assign() {
                tracing::warn!(device = self.site.number, queue, "kicks will exit: {error}");
            }
            let call = self.site.interrupts.msi().and_then(|table| table.queue_eventfd(queue));
            let call = call.ok_or("its interrupts have no eventfd for another process")?;
            let (kick, max_size) = (notifier.notifier(), slot.max_size);
            let start = QueueToStart { device: self.site.number, queue, max_size, features, addresses };
            process.start(&start, kick, &call).map_err(|error| error.to_string())?;
            slot.notifier = Some(Arc::new(notifier));
            slot.live = true;
            return Ok(());
        }
        let Surroundings { memory, domain, .. } = &self.surroundings;
        let handle = domain.as_ref().map_or_else(|| memory.handle(), Domain::handle);
        let handle = handle.named(format!("device {}, queue {queue}", self.site.number));
        let ring = MappedQueue::start(addresses, slot.max_size, features, handle)
            .map_err(|error| error.to_string())?;
        let handler = device.start_queue(queue, features).map_err(|error| error.to_string())?;
        let (notifier, ioeventfd) = self.notifier(queue).map_err(|error| error.to_string())?;
        let notifier = Arc::new(notifier);
        if let Some(earlier) = slot.notifier.replace(Arc::clone(&notifier)) {
            slot.exit_kicks += earlier.exit_kicks();
        }
        let mut started = self.host_queue(queue, ring, handler, notifier, &slot.work);
        slot.kicks_by = match ioeventfd.then(|| started.assign()) {
            None => KickPath::Exits,
            Some(Ok(())) => KickPath::IoEventFd,
            Some(Err(error)) => {
                if self.surroundings.tally.refused() {
                    tracing::warn!(device = self.site.number, queue, "kicks will exit: {error}");
                }
                KickPath::Refused
            }
        };
        slot.thread = self.surroundings.crew.first(self.site.number, queue);
        if let Err(NotPutOn { queue, source }) = self.put_on(slot.thread, started) {
            // Its ioeventfd goes with it.
            queue.into_iter().for_each(|queue| queue.abandon());
            return Err(source.to_string());
        }
        slot.live = true;
        slot.started = Some(Started { features, addresses });
        Ok(())
    }

    /// A queue of this device, and all that serving it takes.
    fn host_queue(
        &self,
        queue: u16,
        live: MappedQueue,
        handler: Box<dyn QueueHandler>,
        notifier: Arc<HostNotifier>,
        work: &Arc<QueueWork>,
    ) -> Box<HostQueue> {
        let key = QueueKey { device: self.site.number, queue };
        let site = Arc::<MachineSite>::clone(&self.site);
        Box::new(HostQueue::new(key, live, handler, notifier.into(), site, Arc::clone(work)))
    }

    fn put_on(&self, number: usize, queue: Box<HostQueue>) -> Result<(), NotPutOn> {
        if let Some(Elsewhere::Inline(inline)) = self.surroundings.crew.elsewhere() {
            return inline.put_on(queue).map_err(|source| NotPutOn { queue: None, source });
        }
        match self.surroundings.crew.thread(number) {
            Some(thread) => thread.put_on(queue),
            None => {
                let source = std::io::Error::other(format!("there is no I/O thread {number}"));
                Err(NotPutOn { queue: Some(queue), source })
            }
        }
    }

    /// Where the kicks of `queue` arrive from now on, and whether an ioeventfd is worth asking for.
    fn notifier(&self, queue: u16) -> Result<(HostNotifier, bool), NotifyError> {
        let address = lock(&self.site.transport).notify_address(queue);
        // Relaxed: this is the thread that moves windows, or it holds the same lock.
        let base = self.base.load(Ordering::Relaxed);
        Ok(match address {
            Some(NotifyAddress { offset, datamatch }) if base != NOWHERE => {
                let fds = Arc::clone(&self.surroundings.fds);
                let addr = base.wrapping_add(offset);
                (HostNotifier::new(fds, addr, datamatch)?, self.surroundings.ioeventfd)
            }
            _ => (HostNotifier::new(Arc::new(NoIoEventFds), 0, None)?, false),
        })
    }

    fn stop_queue(&self, control: &mut Control, queue: u16, complete: bool) {
        if let Some(slot) = control.queues.get_mut(usize::from(queue))
            && std::mem::take(&mut slot.live)
        {
            let key = QueueKey { device: self.site.number, queue };
            let stopping = match self.surroundings.crew.elsewhere() {
                None => {
                    let thread = self.surroundings.crew.thread(slot.thread);
                    thread.and_then(|thread| thread.take_off(key))
                }
                Some(Elsewhere::Inline(inline)) => inline.take_off(key),
                Some(Elsewhere::Process(process)) => {
                    // Its ioeventfd first, as everywhere.
                    slot.notifier = None;
                    process.stop(key, complete);
                    None
                }
            };
            match stopping {
                Some(stopping) => stopping.stop(complete),
                None => slot.stop_lent(),
            }
        }
    }

    fn stop_queues(&self, control: &mut Control, complete: bool) {
        for queue in 0..control.queues.len() {
            self.stop_queue(control, u16::try_from(queue).unwrap_or(u16::MAX), complete);
        }
    }

    /// Moves `queue` to I/O thread `number`, with all that is in flight. The driver notices nothing.
    ///
    /// # Errors
    /// See [`MoveError`]. After [`MoveError::Lost`] the driver has to reset the device; else nothing has changed.
    pub(crate) fn move_queue(&self, queue: u16, number: usize) -> Result<(), MoveError> {
        let crew = &self.surroundings.crew;
        let mut control = lock(&self.control);
        let slot = control.queues.get_mut(usize::from(queue)).filter(|slot| slot.live);
        let slot = slot.ok_or(MoveError::NotLive { queue })?;
        if crew.thread(number).is_none() {
            return Err(MoveError::NoThread { number });
        }
        let key = QueueKey { device: self.site.number, queue };
        let taken = crew.thread(slot.thread).and_then(|thread| thread.take_off(key));
        let moving = taken.ok_or(MoveError::NotLive { queue })?;
        let Err(NotPutOn { queue: moving, source }) = self.put_on(number, moving) else {
            slot.thread = number;
            slot.moves += 1;
            return Ok(());
        };
        if let Some(moving) = moving
            && self.put_on(slot.thread, moving).is_ok()
        {
            return Err(MoveError::Refused { source });
        }
        self.site.fault(format!("queue {queue} was lost on its way to I/O thread {number}: {source}"));
        Err(MoveError::Lost { source })
    }

    /// The machine stops: what the guest has asked for is finished, and nothing is served afterwards. Takes
    /// the device out, for it holds a lock that is to end with the run, even if a guest that cannot be
    /// stopped keeps the bus.
    pub(crate) fn stop(&self) -> Option<Box<dyn Device>> {
        let mut control = lock(&self.control);
        self.stop_queues(&mut control, true);
        control.device.take()
    }

    /// Interrupts raised.
    pub(crate) fn interrupts(&self) -> u64 {
        self.site.interrupts.raised()
    }

    /// Of those, messages.
    pub(crate) fn messages(&self) -> u64 {
        self.site.interrupts.msi().map_or(0, |table| table.sent())
    }

    /// What each live queue has done since it was started for the first time.
    pub(crate) fn loads(&self) -> Vec<Load> {
        let of_queue = |(queue, slot): (u16, &Queue)| {
            let key = QueueKey { device: self.site.number, queue };
            slot.live.then(|| Load { key, thread: slot.thread, work: slot.work.total() })
        };
        (0..).zip(&lock(&self.control).queues).filter_map(of_queue).collect()
    }

    /// The queues that have been started.
    pub(crate) fn queues(&self) -> Vec<QueueResult> {
        let of_queue = |(queue, slot): (u16, &Queue)| {
            let exit_kicks = slot.exit_kicks + slot.notifier.as_ref()?.exit_kicks();
            let &Queue { thread: io_thread, moves, kicks_by, .. } = slot;
            Some(QueueResult { device: self.site.number, queue, io_thread, moves, kicks_by, exit_kicks })
        };
        (0..).zip(&lock(&self.control).queues).filter_map(of_queue).collect()
    }

    /// Accesses to its registers that the specification forbids.
    pub(crate) fn violations(&self) -> u64 {
        lock(&self.site.transport).violations()
    }

    /// Kicks that came by an exit.
    pub(crate) fn exit_kicks(&self) -> u64 {
        self.queues().iter().map(|queue| queue.exit_kicks).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::thread::Doorbells;
    use paravane_device::rng::Rng;
    use paravane_dma::{Access, Backing, Handle, Region, RegionConfig};
    use paravane_notify::InterruptSink;
    use paravane_notify::msi::{MsiController, MsiMessage, MsiSink, MsiTable};
    use paravane_spec::feature;
    use paravane_spec::mmio::{
        CONFIG, CONFIG_GENERATION, DRIVER_FEATURES, DRIVER_FEATURES_SEL, INT_CONFIG_CHANGE, INT_USED_BUFFER,
        INTERRUPT_ACK, INTERRUPT_STATUS, QUEUE_DESC_LOW, QUEUE_DEVICE_LOW, QUEUE_DRIVER_LOW, QUEUE_NOTIFY,
        QUEUE_READY, QUEUE_RESET, QUEUE_SEL, QUEUE_SIZE, STATUS, WINDOW,
    };
    use paravane_spec::mmio_msi::{
        self, MSI_ADDRESS_LOW, MSI_COMMAND, MSI_DATA, NOTIFY_PAGE, SELECT_CONFIGURATION, command,
    };
    use paravane_spec::status::{ACKNOWLEDGE, DEVICE_NEEDS_RESET, DRIVER, DRIVER_OK, FEATURES_OK};
    use paravane_transport::mmio::Mmio;
    use std::collections::BTreeMap;
    use std::time::{Duration, Instant};

    const BASE: u64 = 0xd000_0000;
    const DESC: u64 = 0x1000;
    const AVAIL: u64 = 0x2000;
    const USED: u64 = 0x3000;
    const BUFFER: u64 = 0x4000;
    const FEATURES_HIGH: u32 = ((feature::VERSION_1 | feature::RING_RESET) >> 32) as u32;

    #[derive(Default)]
    struct NoLine;

    impl InterruptSink for NoLine {
        fn raise(&self) {}
    }

    /// Counts messages by their data.
    #[derive(Clone, Default)]
    struct Apic(Arc<Mutex<BTreeMap<u8, u64>>>);

    impl MsiController for Apic {
        fn sink(&self) -> Result<Box<dyn MsiSink>, NotifyError> {
            Ok(Box::new(self.clone()))
        }
    }

    impl MsiSink for Apic {
        fn route(&self, message: MsiMessage) -> Result<(), NotifyError> {
            message.check_apic().map(|_| ())
        }

        fn fire(&self, message: MsiMessage) {
            *lock(&self.0).entry(message.apic_vector().unwrap()).or_default() += 1;
        }
    }

    impl Apic {
        /// The vectors that had messages, and how many.
        fn taken(&self) -> Vec<(u8, u64)> {
            lock(&self.0).iter().map(|(&vector, &count)| (vector, count)).collect()
        }
    }

    /// An entropy device with one queue of 4, and a driver made of register writes.
    struct Rig {
        slot: Slot,
        memory: Handle,
        tally: Arc<Tally>,
        crew: Crew,
        available: u16,
    }

    impl Rig {
        fn new(fds: Arc<dyn IoEventFds>) -> Self {
            Self::interrupting_by(Interrupts::wired(Arc::new(NoLine)), fds, 0)
        }

        /// With two vectors, for the queue and for the configuration change.
        fn with_messages(fds: Arc<dyn IoEventFds>) -> (Self, Apic) {
            let apic = Apic::default();
            let table = MsiTable::new(&apic, 2, 1).unwrap();
            let interrupts = Interrupts::with_msi(Arc::new(NoLine), table);
            (Self::interrupting_by(interrupts, fds, mmio_msi::F_MSI | mmio_msi::F_NOTIFICATION), apic)
        }

        fn interrupting_by(interrupts: Interrupts, fds: Arc<dyn IoEventFds>, extension: u64) -> Self {
            let config = RegionConfig { gpa: 0, size: 1 << 20, backing: Backing::Pages, writable: true };
            let memory = Memory::new(vec![Region::new(config).unwrap()]).unwrap();
            let tally = Arc::new(Tally::default());
            let crew = Crew::spawn(0..1, false, Duration::ZERO).unwrap();
            let surroundings = Surroundings {
                memory: memory.clone(),
                domain: None,
                crew: crew.clone(),
                tally: Arc::clone(&tally),
                fds,
                ioeventfd: true,
                ring_features: extension,
                vhost_net: false,
            };
            let device = Box::new(Rng::new());
            let interrupts = Arc::new(interrupts);
            let transport = Mmio::new(describe(&*device, &surroundings), Arc::clone(&interrupts));
            let attachment =
                Attachment { base: BASE, size: mmio_msi::WINDOW, transport: Box::new(transport), interrupts };
            let slot = Slot::new(0, attachment, device, surroundings);
            Self { slot, memory: memory.handle(), tally, crew, available: 0 }
        }

        fn write(&self, offset: u64, value: u32) {
            self.slot.write(offset, &value.to_le_bytes());
        }

        fn read(&self, offset: u64) -> u32 {
            let mut data = [0; 4];
            self.slot.read(offset, &mut data);
            u32::from_le_bytes(data)
        }

        /// Up to DRIVER_OK, with the descriptor area at `desc`.
        fn start(&mut self, desc: u32) {
            self.set_up(desc);
            self.driver_ok();
        }

        fn driver_ok(&self) {
            self.write(STATUS, ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK);
        }

        fn set_up(&mut self, desc: u32) {
            self.write(STATUS, ACKNOWLEDGE | DRIVER);
            self.write(DRIVER_FEATURES_SEL, 1);
            let extension = (self.slot.surroundings.ring_features >> 32) as u32;
            self.write(DRIVER_FEATURES, FEATURES_HIGH | extension);
            self.write(STATUS, ACKNOWLEDGE | DRIVER | FEATURES_OK);
            self.set_up_queue(desc);
        }

        fn set_up_queue(&mut self, desc: u32) {
            self.available = 0;
            for area in [DESC, AVAIL, USED] {
                self.memory.enter().fill(area, 0, 0x1000, Access::WRITE).unwrap();
            }
            self.write(QUEUE_SEL, 0);
            self.write(QUEUE_SIZE, 4);
            self.write(QUEUE_DESC_LOW, desc);
            self.write(QUEUE_DRIVER_LOW, AVAIL as u32);
            self.write(QUEUE_DEVICE_LOW, USED as u32);
            self.write(QUEUE_READY, 1);
        }

        /// Makes a buffer of 64 bytes available.
        fn offer(&mut self) {
            let at = u64::from(self.available % 4);
            self.memory.enter().write_obj(DESC, &BUFFER, Access::WRITE).unwrap();
            self.memory.enter().write_obj(DESC + 8, &64_u32, Access::WRITE).unwrap();
            // WRITE, no next one.
            self.memory.enter().write_obj(DESC + 12, &2_u32, Access::WRITE).unwrap();
            self.memory.enter().write_obj(AVAIL + 4 + 2 * at, &0_u16, Access::WRITE).unwrap();
            self.available += 1;
            self.memory.enter().write_obj(AVAIL + 2, &self.available, Access::FULL | Access::WRITE).unwrap();
        }

        /// From now on the source sends this.
        fn configure(&self, source: u32, vector: u8) {
            self.write(QUEUE_SEL, source);
            self.write(MSI_ADDRESS_LOW, 0xfee0_0000);
            self.write(MSI_DATA, vector.into());
            self.write(MSI_COMMAND, command::CONFIGURE);
        }

        /// Negotiated and running, with MSI on: vector 0x40 for the queue, 0x41 for the configuration change.
        fn start_with_messages(&mut self) {
            self.set_up(DESC as u32);
            self.write(MSI_COMMAND, command::ENABLE);
            self.configure(0, 0x40);
            self.configure(SELECT_CONFIGURATION, 0x41);
            self.driver_ok();
        }

        fn kick(&self) {
            self.write(QUEUE_NOTIFY, 0);
        }

        fn used(&mut self) -> u16 {
            self.memory.enter().read_obj(USED + 2, Access::READ).unwrap()
        }

        fn wait_for(&mut self, what: &str, condition: impl Fn(&mut Self) -> bool) {
            let start = Instant::now();
            while !condition(self) {
                assert!(start.elapsed() < Duration::from_secs(20), "{what} does not come");
                std::thread::sleep(Duration::from_millis(1));
            }
        }

        fn needs_reset(&self) -> bool {
            self.read(STATUS) & DEVICE_NEEDS_RESET != 0
        }

        fn served(&mut self) {
            self.offer();
            self.kick();
            let available = self.available;
            self.wait_for("a used buffer", |rig| rig.used() == available);
        }
    }

    #[test]
    fn a_kick_by_ioeventfd_is_served() {
        let bells = Arc::new(Doorbells::default());
        let mut rig = Rig::new(Arc::clone(&bells) as Arc<dyn IoEventFds>);
        assert!(!bells.ring(BASE + QUEUE_NOTIFY, &[0; 4]));
        rig.start(DESC as u32);
        rig.offer();
        assert!(bells.ring(BASE + QUEUE_NOTIFY, &[0; 4]));
        rig.wait_for("a used buffer", |rig| rig.used() == 1);
        rig.wait_for("an interrupt", |rig| rig.read(INTERRUPT_STATUS) == INT_USED_BUFFER);
        rig.write(INTERRUPT_ACK, INT_USED_BUFFER);
        assert_eq!(rig.read(INTERRUPT_STATUS), 0);
        assert_eq!((rig.tally.kicks(), rig.slot.exit_kicks(), rig.slot.interrupts()), (1, 0, 1));
    }

    #[test]
    fn a_kick_at_the_queues_own_address_is_answered_by_a_message() {
        let bells = Arc::new(Doorbells::default());
        let (mut rig, apic) = Rig::with_messages(Arc::clone(&bells) as Arc<dyn IoEventFds>);
        rig.start_with_messages();
        assert!(!bells.ring(BASE + QUEUE_NOTIFY, &[0; 4]), "the register goes the long way");
        rig.offer();
        assert!(bells.ring(BASE + NOTIFY_PAGE, &[0x34, 0x12, 0, 0]), "whatever is written");
        rig.wait_for("a message", |_| apic.taken() == [(0x40, 1)]);
        assert_eq!((rig.used(), rig.read(INTERRUPT_STATUS)), (1, 0));
        rig.served();
        rig.wait_for("another message", |_| apic.taken() == [(0x40, 2)]);
        assert_eq!((rig.tally.kicks(), rig.slot.exit_kicks(), rig.slot.messages()), (2, 1, 2));
        // A broken queue is a configuration change.
        rig.memory.enter().write_obj(AVAIL + 2, &1000_u16, Access::WRITE).unwrap();
        assert!(bells.ring(BASE + NOTIFY_PAGE, &[0; 4]));
        rig.wait_for("DEVICE_NEEDS_RESET", |rig| rig.needs_reset());
        rig.wait_for("its message", |_| apic.taken() == [(0x40, 2), (0x41, 1)]);
    }

    #[test]
    fn no_interrupt_is_lost_or_goes_astray_while_its_message_is_rewritten() {
        let bells = Arc::new(Doorbells::default());
        let (mut rig, apic) = Rig::with_messages(Arc::clone(&bells) as Arc<dyn IoEventFds>);
        rig.start_with_messages();
        let mut before = apic.taken();
        for round in 0..500 {
            let (old, new) = if round % 2 == 0 { (0x50, 0x51) } else { (0x51, 0x50) };
            rig.configure(0, old);
            rig.offer();
            assert!(bells.ring(BASE + NOTIFY_PAGE, &[0; 4]));
            // While the buffer is served; in every third round masked, so that it may wait.
            if round % 3 == 0 {
                rig.write(MSI_COMMAND, command::MASK);
            }
            rig.configure(0, new);
            rig.write(MSI_COMMAND, command::UNMASK);
            let in_force = apic.taken();
            rig.wait_for("the interrupt", |_| count(&apic.taken()) == count(&before) + 1);
            // What came after the change came to the new message.
            assert_eq!(of(&apic.taken(), old), of(&in_force, old), "round {round}: astray");
            before = apic.taken();
        }
        assert_eq!(count(&before), 500);
        assert!(before.iter().all(|(vector, _)| matches!(vector, 0x50 | 0x51)), "{before:?}");
    }

    fn count(taken: &[(u8, u64)]) -> u64 {
        taken.iter().map(|(_, count)| count).sum()
    }

    fn of(taken: &[(u8, u64)], vector: u8) -> u64 {
        taken.iter().find(|(number, _)| *number == vector).map_or(0, |(_, count)| *count)
    }

    #[test]
    fn where_the_host_refuses_kicks_exit_and_are_served() {
        let mut rig = Rig::new(Arc::new(NoIoEventFds));
        rig.start(DESC as u32);
        rig.served();
        rig.served();
        assert!(!rig.needs_reset());
        rig.wait_for("the count", |rig| rig.tally.kicks() == 2);
        assert_eq!(rig.slot.exit_kicks(), 2);
    }

    #[test]
    fn a_queue_that_the_kernel_cannot_serve_stays_ours() {
        let bells = Arc::new(Doorbells::default());
        let mut rig = Rig::new(Arc::clone(&bells) as Arc<dyn IoEventFds>);
        rig.slot.surroundings.vhost_net = true;
        rig.start(DESC as u32);
        rig.offer();
        assert!(bells.ring(BASE + QUEUE_NOTIFY, &[0; 4]), "its ioeventfd is where it was");
        rig.wait_for("a used buffer", |rig| rig.used() == 1);
        rig.served();
        assert!(!rig.needs_reset());
    }

    #[test]
    fn a_buffer_offered_before_the_start_needs_no_kick() {
        let mut rig = Rig::new(Arc::new(Doorbells::default()));
        rig.set_up(DESC as u32);
        rig.offer();
        rig.driver_ok();
        rig.wait_for("a used buffer", |rig| rig.used() == 1);
        assert_eq!(rig.tally.kicks(), 0);
    }

    #[test]
    fn after_a_reset_nothing_is_used_until_the_next_start() {
        let bells = Arc::new(Doorbells::default());
        let mut rig = Rig::new(Arc::clone(&bells) as Arc<dyn IoEventFds>);
        for _ in 0..3 {
            rig.start(DESC as u32);
            rig.served();
            rig.write(STATUS, 0);
            assert_eq!(rig.read(STATUS), 0);
            assert_eq!(rig.read(INTERRUPT_STATUS), 0);
            assert!(!bells.ring(BASE + QUEUE_NOTIFY, &[0; 4]), "the ioeventfd is gone");
            rig.offer();
            rig.kick();
            std::thread::sleep(Duration::from_millis(5));
            assert_eq!(rig.used(), 1);
        }
    }

    #[test]
    fn a_broken_queue_asks_for_a_reset_and_works_after_it() {
        let mut rig = Rig::new(Arc::new(Doorbells::default()));
        rig.start(DESC as u32);
        rig.memory.enter().write_obj(AVAIL + 2, &1000_u16, Access::WRITE).unwrap();
        rig.kick();
        rig.wait_for("DEVICE_NEEDS_RESET", |rig| rig.needs_reset());
        assert_eq!(rig.read(INTERRUPT_STATUS), INT_CONFIG_CHANGE);
        assert!(rig.tally.fault_of(0).unwrap().contains("available index"));
        rig.kick();
        rig.write(STATUS, 0);
        assert_eq!(rig.read(STATUS), 0);
        rig.start(DESC as u32);
        rig.served();
    }

    #[test]
    fn a_queue_outside_memory_asks_for_a_reset() {
        let mut rig = Rig::new(Arc::new(Doorbells::default()));
        rig.start(0xf000_0000);
        assert!(rig.needs_reset());
        assert!(rig.tally.fault_of(0).unwrap().contains("no memory there"));
        rig.write(STATUS, 0);
        rig.start(DESC as u32);
        rig.served();
    }

    #[test]
    fn no_access_of_any_width_anywhere_is_fatal() {
        let mut rig = Rig::new(Arc::new(Doorbells::default()));
        rig.start(DESC as u32);
        for offset in (0..WINDOW + 16).chain([mmio_msi::WINDOW - 1, u64::from(u32::MAX), u64::MAX]) {
            for len in [0, 1, 2, 3, 4, 8] {
                rig.slot.read(offset, &mut [0; 8][..len]);
                rig.slot.write(offset, &[0xff; 8][..len]);
                rig.slot.write(offset, &[0; 8][..len]);
            }
        }
        rig.write(STATUS, 0);
        assert_eq!(rig.read(CONFIG_GENERATION), rig.read(CONFIG_GENERATION));
        rig.start(DESC as u32);
        rig.served();
    }

    #[test]
    fn one_queue_is_reset_and_started_again() {
        let bells = Arc::new(Doorbells::default());
        let mut rig = Rig::new(Arc::clone(&bells) as Arc<dyn IoEventFds>);
        rig.start(DESC as u32);
        for _ in 0..3 {
            rig.served();
            rig.write(QUEUE_RESET, 1);
            assert_eq!(rig.read(QUEUE_RESET), 0);
            assert!(!bells.ring(BASE + QUEUE_NOTIFY, &[0; 4]), "the ioeventfd is gone");
            rig.offer();
            rig.kick();
            std::thread::sleep(Duration::from_millis(5));
            assert_eq!(rig.used(), 1);
            rig.set_up_queue(DESC as u32);
        }
        rig.served();
        assert!(!rig.needs_reset());
    }

    #[test]
    fn a_stopped_slot_has_given_its_device_up() {
        let mut rig = Rig::new(Arc::new(Doorbells::default()));
        rig.start(DESC as u32);
        rig.served();
        assert!(rig.slot.stop().is_some());
        assert!(rig.slot.stop().is_none());
        rig.crew.quit();
        rig.kick();
        rig.write(STATUS, 0);
        rig.start(DESC as u32);
        assert!(rig.needs_reset());
        rig.slot.read(CONFIG, &mut [0; 4]);
    }

    #[test]
    fn a_device_behind_a_domain_takes_its_own_addresses_and_no_others() {
        let mut rig = Rig::new(Arc::new(NoIoEventFds));
        // Rings and buffer, nothing else, each at its address of before.
        let domain = rig.slot.surroundings.domain.insert(Domain::new(&rig.slot.surroundings.memory)).clone();
        for page in [DESC, AVAIL, USED, BUFFER & !0xfff] {
            domain.map(page, page, 0x1000, Access::READ | Access::WRITE).unwrap();
        }
        rig.start(DESC as u32);
        rig.served();
        assert!(!rig.needs_reset());
        let busy = domain.unmap(USED, 0x1000, Duration::from_millis(10)).unwrap_err();
        assert!(busy.to_string().contains("device 0, queue 0"), "{busy}");
        rig.write(STATUS, 0);
        domain.clear(Duration::from_secs(20)).unwrap();
        rig.start(DESC as u32);
        rig.wait_for("a reset request", |rig| rig.needs_reset());
        assert!(rig.tally.fault_of(0).unwrap().contains("maps nothing there"));
    }
}
