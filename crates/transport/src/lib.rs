//! Transports: how a driver finds a device, configures it and kicks it. Each is a pure register machine: it does no I/O
//! and touches no guest memory; it turns register accesses into [`Effect`]s. [`Transport`] is what the machine that owns
//! device and threads needs of any of them.
pub mod mmio;
pub mod pci;
mod state;

use paravane_spec::queue::QueueAddresses;

/// A register machine, as its owner sees it. Interrupts are not here: a transport and the device's queues share one
/// [`paravane_notify::Interrupts`].
pub trait Transport: Send {
    /// Reads at `offset` of the transport's window. `config` reads the device's configuration space (offset,
    /// destination). Whatever a guest does, `data` is filled.
    fn read(&mut self, offset: u64, data: &mut [u8], config: &mut dyn FnMut(u32, &mut [u8]));

    /// Writes at `offset` of the transport's window.
    fn write(&mut self, offset: u64, data: &[u8]) -> Option<Effect>;

    /// What an access there is about. Of no consequence to the guest.
    fn access(&self, offset: u64, write: bool) -> AccessKind;

    /// Where kicks of `queue` arrive, as negotiated; asked when the queue starts. `None` if they can only be told apart
    /// by looking at them, so that they must exit.
    fn notify_address(&self, queue: u16) -> Option<NotifyAddress>;

    /// The owner has carried out [`Effect::Reset`].
    fn reset_done(&mut self);

    /// The owner has carried out [`Effect::ResetQueue`].
    fn queue_reset_done(&mut self, queue: u16);

    /// The owner could not start the device, or a queue has failed: the driver is to be told that the device needs
    /// a reset.
    fn needs_reset(&mut self);

    /// The configuration space has changed: the driver is to be told.
    fn config_changed(&mut self);

    /// Accesses that the specification forbids the driver, counted. They had no effect.
    fn violations(&self) -> u64;
}

/// What an access to a transport's registers is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AccessKind {
    /// Available-buffer notification.
    Notify,
    /// The driver asks why it was interrupted.
    InterruptStatus,
    /// The driver acknowledges an interrupt.
    InterruptAcknowledge,
    /// The device's configuration space.
    Config,
    /// Anything else: set-up, for the most part.
    Other,
}

/// Where the kicks of one queue arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotifyAddress {
    /// In the transport's window, in bytes.
    pub offset: u64,
    /// A 32-bit value that tells this queue's kicks from others at the same offset; `None`: any write there is one.
    pub datamatch: Option<u32>,
}

/// What a register access asks the owner of the device to do. The owner does it before the access returns
/// to the guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// DRIVER_OK was written: start the device with these negotiated features and the queues that are ready.
    Activate {
        /// Negotiated feature bits.
        features: u64,
        /// Ready queues: index and what the driver asked for.
        queues: Vec<(u16, QueueAddresses)>,
    },
    /// A queue became ready after DRIVER_OK (after a queue reset, or late): start it.
    StartQueue {
        /// Negotiated feature bits.
        features: u64,
        /// Index.
        queue: u16,
        /// What the driver asked for.
        addresses: QueueAddresses,
    },
    /// Stop one queue: nothing is used or notified afterwards. Then call the transport's `queue_reset_done`.
    ResetQueue {
        /// Index.
        queue: u16,
    },
    /// Stop everything: no access to guest memory and no interrupt afterwards. Then call `reset_done`.
    Reset,
    /// Available-buffer notification that came as an exit.
    Notify {
        /// Queue index (checked: it exists and is live).
        queue: u16,
    },
    /// The transport's window is at another guest-physical address now, and with it the notification addresses (PCI:
    /// the driver has moved the BAR, or switched memory on or off).
    Move {
        /// Where; `None`: nowhere.
        window: Option<u64>,
    },
    /// The driver wrote to the device's configuration space.
    WriteConfig {
        /// Offset in the configuration space.
        offset: u32,
        /// The bytes: 1, 2, 4 or 8.
        data: Vec<u8>,
    },
}

/// What a device tells its transport, once.
#[derive(Clone, Debug)]
pub struct DeviceDescription {
    /// Virtio device identifier.
    pub device_id: u32,
    /// Offered feature bits (the transport adds nothing).
    pub features: u64,
    /// Largest size of each queue.
    pub queue_sizes: Vec<u16>,
}
