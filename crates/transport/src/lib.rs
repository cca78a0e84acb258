//! Transports: how a driver finds a device, configures it and kicks it. Each is a pure register machine:
//! it does no I/O, takes no lock and touches no guest memory; it turns register accesses into [`Effect`]s.
pub mod mmio;
mod state;

use paravane_spec::queue::QueueAddresses;

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
