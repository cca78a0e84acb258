//! What a transport wants of the owner of its device, and knows of the device.
use paravane_spec::queue::QueueAddresses;

/// Action that a register access requests from the owner of the device.
///
/// The owner carries it out before the access returns to the guest, [`Effect::Reset`] perhaps after.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// DRIVER_OK was written: start the device with the ready queues.
    Activate {
        /// Negotiated feature bits.
        features: u64,
        /// Ready queues: index and configuration.
        queues: Vec<(u16, QueueAddresses)>,
    },
    /// A queue became ready after DRIVER_OK (after a queue reset, or late): start it.
    StartQueue {
        /// Negotiated feature bits.
        features: u64,
        /// Index of the queue.
        queue: u16,
        /// Configuration of the queue.
        addresses: QueueAddresses,
    },
    /// Stop one queue: no used buffer and no interrupt afterwards.
    ///
    /// Then call `queue_reset_done`.
    ResetQueue {
        /// Index of the queue.
        queue: u16,
    },
    /// Stop everything: no access to guest memory and no interrupt afterwards.
    ///
    /// Then call `reset_done`. Where drivers poll for that
    /// ([`Transport::polls_reset`](crate::Transport::polls_reset)), the access may return before.
    Reset,
    /// Stop serving: complete and announce what is being served, and keep all queues.
    ///
    /// No access to guest memory and no interrupt afterwards. Then call `suspend_done`; or
    /// `needs_reset` if the device cannot be suspended.
    Suspend,
    /// Serve all queues again, from where they were.
    ///
    /// Then call `resume_done`; or `needs_reset` if the device cannot be resumed.
    Resume,
    /// Kick that came as an exit.
    Notify {
        /// Index of a queue that exists and is live.
        queue: u16,
    },
    /// The transport's window has moved, and with it the notification addresses.
    ///
    /// PCI: the driver moved the BAR, or enabled or disabled memory.
    Move {
        /// Guest-physical address; `None` for nowhere.
        window: Option<u64>,
    },
    /// The driver wrote to the device's configuration space.
    WriteConfig {
        /// Offset in the configuration space in bytes.
        offset: u32,
        /// 1, 2, 4 or 8 bytes.
        data: Vec<u8>,
    },
}

/// Description of a device for its transport.
#[derive(Clone, Debug)]
pub struct DeviceDescription {
    /// Virtio device identifier.
    pub device_id: u32,
    /// Offered feature bits. The transport adds none.
    pub features: u64,
    /// Maximum size of each queue.
    pub queue_sizes: Vec<u16>,
}
