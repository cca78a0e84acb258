//! One device on the bus: registers, device and queues, and what happens when the one asks for the other.
//!
//! ```text
//! register write -> Mmio (pure) -> Effect -> carried out here, before the access returns:
//!    Activate, StartQueue   LiveQueue::start, Device::start_queue, handed to an I/O thread
//!    ResetQueue, Reset      I/O thread gives the queue back, then the transport is told
//!    Notify                 HostNotifier::kick: the eventfd's one owner does the work
//! ```
//! Order of locks: `control`, then `mmio`. The I/O thread takes only `mmio` (to mark a failed queue), and
//! `mmio` is never held while one waits for the I/O thread.
use crate::guard::lock;
use crate::io_thread::{IoThread, QueueKey, QueueStart};
use crate::tally::Tally;
use paravane_device::{Device, LiveQueue};
use paravane_dma::Memory;
use paravane_notify::{HostNotifier, InterruptLine, InterruptSink, IoEventFds, NotifyError};
use paravane_spec::mmio::{CONFIG, QUEUE_NOTIFY};
use paravane_spec::queue::QueueAddresses;
use paravane_transport::mmio::Mmio;
use paravane_transport::{DeviceDescription, Effect};
use std::sync::{Arc, Mutex};

/// What a slot shares with the rest of its machine.
#[derive(Clone)]
pub(crate) struct Surroundings {
    /// Guest memory.
    pub(crate) memory: Memory,
    /// The thread that serves its queues.
    pub(crate) io: Arc<IoThread>,
    /// Counters.
    pub(crate) tally: Arc<Tally>,
    /// What gives out ioeventfds.
    pub(crate) fds: Arc<dyn IoEventFds>,
    /// Whether to ask for them.
    pub(crate) ioeventfd: bool,
}

/// What only one register access at a time may touch.
struct Control {
    /// `None` when the machine has stopped.
    device: Option<Box<dyn Device>>,
    live: Vec<bool>,
}

/// One device.
pub(crate) struct Slot {
    number: usize,
    surroundings: Surroundings,
    queue_sizes: Vec<u16>,
    mmio: Arc<Mutex<Mmio>>,
    line: Arc<InterruptLine>,
    notifiers: Vec<Arc<HostNotifier>>,
    control: Mutex<Control>,
}

impl Slot {
    /// Puts `device` at guest-physical `base`.
    ///
    /// # Errors
    /// The process has no file descriptors left.
    pub(crate) fn new(
        number: usize,
        base: u64,
        device: Box<dyn Device>,
        sink: Arc<dyn InterruptSink>,
        surroundings: Surroundings,
    ) -> Result<Self, NotifyError> {
        let line = Arc::new(InterruptLine::new(sink));
        let queue_sizes = device.queue_sizes().to_vec();
        let mmio = Mmio::new(
            DeviceDescription {
                device_id: device.device_id(),
                features: device.features(),
                queue_sizes: queue_sizes.clone(),
            },
            Arc::clone(&line),
        );
        let mut notifiers = Vec::with_capacity(queue_sizes.len());
        for queue in 0..queue_sizes.len() {
            let datamatch = u32::try_from(queue).ok();
            let fds = Arc::clone(&surroundings.fds);
            notifiers.push(Arc::new(HostNotifier::new(fds, base + QUEUE_NOTIFY, datamatch)?));
        }
        Ok(Self {
            number,
            surroundings,
            mmio: Arc::new(Mutex::new(mmio)),
            line,
            notifiers,
            control: Mutex::new(Control { device: Some(device), live: vec![false; queue_sizes.len()] }),
            queue_sizes,
        })
    }

    /// The guest reads at `offset`.
    pub(crate) fn read(&self, offset: u64, data: &mut [u8]) {
        if offset < CONFIG {
            lock(&self.mmio).read(offset, data, |_, out| out.fill(0));
        } else {
            let control = lock(&self.control);
            lock(&self.mmio).read(offset, data, |offset, out| match &control.device {
                Some(device) => device.read_config(offset, out),
                None => out.fill(0),
            });
        }
    }

    /// The guest writes at `offset`.
    pub(crate) fn write(&self, offset: u64, data: &[u8]) {
        let mut control = lock(&self.control);
        let effect = lock(&self.mmio).write(offset, data);
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
                lock(&self.mmio).queue_reset_done(queue);
            }
            Effect::Reset => {
                self.stop_queues(control, false);
                if let Some(device) = &mut control.device {
                    device.reset();
                }
                lock(&self.mmio).reset_done();
            }
            Effect::Notify { queue } => {
                if let Some(notifier) = self.notifiers.get(usize::from(queue)) {
                    notifier.kick();
                }
            }
            Effect::WriteConfig { offset, data } => {
                if let Some(device) = &mut control.device {
                    device.write_config(offset, &data);
                }
            }
        }
    }

    fn start_queue(&self, control: &mut Control, features: u64, queue: u16, addresses: QueueAddresses) {
        if let Err(what) = self.try_start_queue(control, features, queue, addresses) {
            tracing::warn!(device = self.number, queue, "queue not started: {what}");
            self.surroundings.tally.fault(self.number, what);
            lock(&self.mmio).needs_reset();
        }
    }

    fn try_start_queue(
        &self,
        control: &mut Control,
        features: u64,
        queue: u16,
        addresses: QueueAddresses,
    ) -> Result<(), String> {
        let index = usize::from(queue);
        let (Some(&max_size), Some(notifier), Some(live)) =
            (self.queue_sizes.get(index), self.notifiers.get(index), control.live.get_mut(index))
        else {
            return Err("there is no such queue".into());
        };
        let Some(device) = &mut control.device else {
            return Err("the machine has stopped".into());
        };
        if *live {
            return Err("it is running already".into());
        }
        let ring = LiveQueue::start(addresses, max_size, features, self.surroundings.memory.handle())
            .map_err(|error| error.to_string())?;
        let handler = device.start_queue(queue, features).map_err(|error| error.to_string())?;
        self.surroundings
            .io
            .start(QueueStart {
                key: QueueKey { device: self.number, queue },
                live: ring,
                handler,
                notifier: Arc::clone(notifier),
                ioeventfd: self.surroundings.ioeventfd,
                line: Arc::clone(&self.line),
                mmio: Arc::clone(&self.mmio),
            })
            .map_err(|error| error.to_string())?;
        *live = true;
        Ok(())
    }

    fn stop_queue(&self, control: &mut Control, queue: u16, complete: bool) {
        if let Some(live) = control.live.get_mut(usize::from(queue))
            && std::mem::take(live)
        {
            self.surroundings.io.stop(QueueKey { device: self.number, queue }, complete);
        }
    }

    fn stop_queues(&self, control: &mut Control, complete: bool) {
        for queue in 0..self.queue_sizes.len() {
            self.stop_queue(control, u16::try_from(queue).unwrap_or(u16::MAX), complete);
        }
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
        self.line.raised()
    }

    /// Kicks that came by an exit.
    pub(crate) fn exit_kicks(&self) -> u64 {
        self.notifiers.iter().map(|notifier| notifier.exit_kicks()).sum()
    }
}
