//! From a device to an attached one.
use crate::counters::Counters;
use crate::device::{AttachedDevice, MakeBackend, Settings};
use crate::error::AttachError;
use crate::events::DeviceEvents;
use crate::features::{RingFeatures, offered};
use crate::saved::SavedDevice;
use paravane_device::Device;
use paravane_dma::{Domain, Memory};
use paravane_io::{InFlightMemory, IoPool, QueueBackend, Spread};
use paravane_notify::msi::{MsiController, MsiTable};
use paravane_notify::{InterruptSink, Interrupts, IoEventFds};
use paravane_spec::pci::msix;
use paravane_spec::{mmio, mmio_msi};
use paravane_transport::mmio::Mmio;
use paravane_transport::pci::Pci;
use paravane_transport::{DeviceDescription, Transport};
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::Duration;

/// Where firmware puts a PCI function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PciPlace {
    /// Guest-physical address of BAR 0, a multiple of its size.
    ///
    /// It is decoded when the driver enables memory.
    pub bar: u64,
    /// Bus, device and function: the number of the device in its messages.
    pub requester: u16,
    /// Interrupt line register: the GSI of INTA.
    pub interrupt_line: u8,
}

/// Collects what a device is attached to.
///
/// The last call names the transport: [`Builder::mmio`], [`Builder::mmio_msi`] or [`Builder::pci`].
#[must_use]
pub struct Builder {
    device: Box<dyn Device>,
    memory: Memory,
    domain: Option<Domain>,
    pool: Option<Arc<IoPool>>,
    ioeventfds: Option<Arc<dyn IoEventFds>>,
    rings: RingFeatures,
    number: Option<usize>,
    counters: Arc<Counters>,
    backend: Option<MakeBackend>,
    tracking: Option<InFlightMemory>,
    saved: Option<SavedDevice>,
    suspendable: bool,
    is_version_3: bool,
}

impl AttachedDevice {
    /// Begins to attach `device` to a guest with this memory.
    pub fn builder(device: Box<dyn Device>, memory: &Memory) -> Builder {
        Builder {
            device,
            memory: memory.clone(),
            domain: None,
            pool: None,
            ioeventfds: None,
            rings: RingFeatures::default(),
            number: None,
            counters: Arc::default(),
            backend: None,
            tracking: None,
            saved: None,
            suspendable: false,
            is_version_3: false,
        }
    }
}

impl Builder {
    /// Translates the device's addresses by `domain` [they are guest-physical].
    ///
    /// Offers `VIRTIO_F_ACCESS_PLATFORM`.
    pub fn behind(self, domain: Domain) -> Self {
        Self { domain: Some(domain), ..self }
    }

    /// Serves the queues on the threads of `pool` [on one separate I/O thread, without polling].
    pub fn io_pool(self, pool: &Arc<IoPool>) -> Self {
        Self { pool: Some(Arc::clone(pool)), ..self }
    }

    /// Asks for an ioeventfd for each queue [kicks exit].
    ///
    /// Where the host refuses one, kicks exit.
    pub fn ioeventfds(self, fds: Arc<dyn IoEventFds>) -> Self {
        Self { ioeventfds: Some(fds), ..self }
    }

    /// Offers these ring features [split rings, indirect descriptors, event index].
    pub fn rings(self, rings: RingFeatures) -> Self {
        Self { rings, ..self }
    }

    /// Sets the number in log lines, faults and messages of virtio-mmio [in its pool; 0 in messages].
    pub fn number(self, number: usize) -> Self {
        Self { number: Some(number), ..self }
    }

    /// Adds to these counters, which other devices may share [the device's own].
    pub fn counters(self, counters: Arc<Counters>) -> Self {
        Self { counters, ..self }
    }

    /// Offers SUSPEND \[off\]: the driver may suspend and resume the device.
    ///
    /// A suspended device keeps its state.
    pub fn suspendable(self) -> Self {
        Self { suspendable: true, ..self }
    }

    /// Gives virtio-mmio register version 3 \[2\]: the driver polls Status until a reset is done.
    ///
    /// A reset then waits for requests in flight in a thread, not in the vCPU's write. Linux drives
    /// version 3 from 7.3 on; older kernels refuse the device. PCI does not change: though its drivers
    /// have to poll, too, some firmware does not.
    pub fn mmio_version_3(self) -> Self {
        Self { is_version_3: true, ..self }
    }

    /// Lends each queue to a back end at its start, if the back end takes it.
    ///
    /// No I/O thread has served it before.
    pub fn lend_to(self, make: impl Fn(u16) -> Box<dyn QueueBackend> + Send + Sync + 'static) -> Self {
        Self { backend: Some(Box::new(make)), ..self }
    }

    /// Records requests in flight in this memory \[none\]; the process that restores the device does them.
    ///
    /// The memory has room for queues of the device's sizes. With IN_ORDER nothing is recorded.
    pub fn track(self, memory: InFlightMemory) -> Self {
        Self { tracking: Some(memory), ..self }
    }

    /// Restores a device that another process has saved \[a new device\].
    ///
    /// Guest memory has the same content at the same addresses, in-flight memory is the same, and the
    /// other options are those of the saved device. Queues are served when the last call of the
    /// builder returns.
    pub fn restore(self, saved: SavedDevice) -> Self {
        Self { saved: Some(saved), ..self }
    }

    /// Puts the device behind virtio-mmio with a wired interrupt.
    ///
    /// Its registers are at guest-physical `base`.
    ///
    /// The window has [`mmio::WINDOW`] bytes. An irqfd works only while the VM's descriptor is
    /// open.
    ///
    /// # Errors
    /// See [`AttachError`].
    pub fn mmio(self, base: u64, line: Arc<dyn InterruptSink>) -> Result<AttachedDevice, AttachError> {
        let interrupts = Arc::new(Interrupts::wired(line));
        let description = self.description();
        let transport = self.registers(description.clone(), &interrupts);
        self.attach(description.features, transport, interrupts, (Some(base), mmio::WINDOW))
    }

    /// Puts the device behind virtio-mmio with messages.
    ///
    /// Each queue has a notification address.
    ///
    /// A driver that knows plain virtio-mmio only uses `line`. The window has [`mmio_msi::WINDOW`]
    /// bytes; `docs/reference/virtio-mmio-msi.md` specifies the extension.
    ///
    /// # Errors
    /// See [`AttachError`].
    pub fn mmio_msi(
        self,
        base: u64,
        line: Arc<dyn InterruptSink>,
        messages: &dyn MsiController,
    ) -> Result<AttachedDevice, AttachError> {
        let interrupts = self.with_messages(line, messages, self.number.unwrap_or_default() as u32)?;
        let mut description = self.description();
        description.features |= mmio_msi::F_MSI | mmio_msi::F_NOTIFICATION;
        let transport = self.registers(description.clone(), &interrupts);
        self.attach(description.features, transport, interrupts, (Some(base), mmio_msi::WINDOW))
    }

    /// Puts the device behind virtio-pci, with MSI-X if `messages` are given.
    ///
    /// The configuration space is at [`Pci::CONFIG_SPACE`] of the window: read and write register
    /// *r* of the function at `Pci::CONFIG_SPACE + r`.
    ///
    /// # Errors
    /// See [`AttachError`].
    pub fn pci(
        self,
        place: PciPlace,
        line: Arc<dyn InterruptSink>,
        messages: Option<&dyn MsiController>,
    ) -> Result<AttachedDevice, AttachError> {
        let interrupts = match messages {
            Some(messages) => self.with_messages(line, messages, place.requester.into())?,
            None => Arc::new(Interrupts::wired(line)),
        };
        let description = self.description();
        let features = description.features;
        let mut pci = Pci::new(description, Arc::clone(&interrupts), place.interrupt_line);
        pci.place(place.bar);
        let size = pci.bar_size();
        self.attach(features, Box::new(pci), interrupts, (None, size))
    }

    /// Registers of virtio-mmio.
    fn registers(&self, device: DeviceDescription, interrupts: &Arc<Interrupts>) -> Box<dyn Transport> {
        let mmio = Mmio::new(device, Arc::clone(interrupts));
        Box::new(if self.is_version_3 { mmio.version_3() } else { mmio })
    }

    fn description(&self) -> DeviceDescription {
        DeviceDescription {
            device_id: self.device.device_id(),
            features: offered(self.device.features(), self.rings, self.domain.is_some(), self.suspendable),
            queue_sizes: self.device.queue_sizes().to_vec(),
        }
    }

    /// A vector for each queue and one for the configuration, as far as MSI-X goes.
    fn with_messages(
        &self,
        line: Arc<dyn InterruptSink>,
        messages: &dyn MsiController,
        device: u32,
    ) -> Result<Arc<Interrupts>, AttachError> {
        let queues = self.device.queue_sizes().len();
        let vectors = u16::try_from(queues + 1).unwrap_or(msix::MOST).min(msix::MOST);
        let table = MsiTable::new(messages, vectors, queues)?.of_device(device);
        Ok(Arc::new(Interrupts::with_msi(line, table)))
    }

    fn attach(
        self,
        features: u64,
        transport: Box<dyn Transport>,
        interrupts: Arc<Interrupts>,
        window: (Option<u64>, u64),
    ) -> Result<AttachedDevice, AttachError> {
        let Self {
            device, memory, domain, pool, ioeventfds, number, counters, backend, tracking, saved, ..
        } = self;
        let pool = match pool {
            Some(pool) => pool,
            None => Arc::new(IoPool::fixed(1, Duration::ZERO, Spread::Devices).map_err(AttachError::Thread)?),
        };
        // Its interrupts never block a thread.
        let threads = pool.device(|| ());
        let number = number.unwrap_or(threads.number());
        let events = DeviceEvents { number, interrupts, transport: Mutex::new(transport), counters };
        let settings = Settings { memory, domain, ioeventfds, backend, tracking };
        let attached = AttachedDevice::new(device, events, settings, threads, features, window);
        if let Some(saved) = saved {
            attached.restore(&saved)?;
        }
        Ok(attached)
    }
}

impl std::fmt::Debug for Builder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Builder")
            .field("device_id", &self.device.device_id())
            .field("rings", &self.rings)
            .field("number", &self.number)
            .finish_non_exhaustive()
    }
}
