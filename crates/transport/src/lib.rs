//! Virtio transports: how a driver finds a device, configures it and kicks it.
//!
//! Each transport is a pure register machine: it does no I/O and touches no guest memory; it turns
//! register accesses into [`Effect`]s. [`Transport`] is the interface to the owner of the device
//! and its threads.
//!
//! ```text
//! register access --> Transport::read, Transport::write --> Effect --> the owner: start, stop, reset queues; kick
//!                           |                                            |
//!                           '--> paravane_notify::Interrupts             '--> reset_done, queue_reset_done,
//!                                (status, acknowledge, vectors)               needs_reset, config_changed
//! ```
//!
//! [`mmio`] is virtio-mmio, version 2 or 3, with the MSI extension, [`pci`] is modern virtio-pci.
//!
//! # Example
//!
//! A driver's first steps on a virtio-mmio device with one queue:
//!
//! ```
//! use paravane_notify::{InterruptSink, Interrupts};
//! use paravane_spec::{device_id, feature, mmio as reg, status};
//! use paravane_transport::{DeviceDescription, Effect, Transport, mmio::Mmio};
//! use std::sync::Arc;
//!
//! struct NoLine;
//! impl InterruptSink for NoLine {
//!     fn raise(&self) {}
//! }
//!
//! let device = DeviceDescription {
//!     device_id: device_id::RNG,
//!     features: feature::VERSION_1,
//!     queue_sizes: vec![64],
//! };
//! let interrupts = Arc::new(Interrupts::wired(Arc::new(NoLine)));
//! let mut transport = Mmio::new(device, interrupts);
//!
//! let mut magic = [0; 4];
//! Transport::read(&mut transport, reg::MAGIC_VALUE, &mut magic, &mut |_, _| ());
//! assert_eq!(u32::from_le_bytes(magic), reg::MAGIC);
//!
//! let mut write_status = |value: u32| transport.write(reg::STATUS, &value.to_le_bytes());
//! assert_eq!(write_status(status::ACKNOWLEDGE | status::DRIVER), None);
//! assert_eq!(write_status(0), Some(Effect::Reset)); // the owner stops all queues, then calls reset_done()
//! ```
//!
//! # Saved registers
//!
//! [`Transport::save`] returns the registers as bytes, with what the driver has set of the interrupts
//! and what of them is pending; [`Transport::restore`] takes them up in another process, and says what
//! to start. The bytes have a version, and each value is checked: no bytes bring the registers where
//! no driver can.
//!
//! # States
//!
//! ```text
//!                ACKNOWLEDGE, DRIVER        FEATURES_OK               DRIVER_OK
//!   Reset (0) ------------------------> Features ----------> Queues -------------> Running
//!      ^                                (features may        (queue registers      (kicks; queues may
//!      |                                 be accepted)         may be written)       start, stop, reset)
//!      | reset_done                                                                    |
//!      |                            status = 0, from anywhere                          |
//!   Resetting <------------------------------------------------------------------------+
//!   (the status reads what it was, writes have no effect;
//!    as long as the access, or until the driver reads 0: `Transport::polls_reset`)
//!
//!                 SUSPEND                 suspend_done
//!   Running -----------------> Suspending ---------------> Suspended (SUSPEND, not DRIVER_OK)
//!      ^                                                        |
//!      '-------- resume_done --------- Resuming <---------------' DRIVER_OK
//!
//!   FAILED             (driver) from anywhere: only a reset leads out
//!   DEVICE_NEEDS_RESET (device) from anywhere but Reset: nothing more is started or notified until a reset
//!
//! one queue:
//!              enable               DRIVER_OK
//!     Idle <--------------> Ready ------------> Live ------ disable -----> Stopping  --+
//!      ^       disable                           |                           |         |
//!      |  `---------- enable in Running -------->|                         reset       |
//!      |                                         |                           v         |
//!      |                                         +--------- reset ------> Resetting ---+
//!      +------------------------- queue_reset_done --------------------------+---------+
//! ```
//!
//! The following holds on every transport where the specification leaves a choice, or forbids the
//! driver something:
//!
//! - A forbidden access has no effect, reads 0, and is counted. The exception is FEATURES_OK with
//!   an unacceptable set: it is no violation, the bit just does not stick (section 2.2.2), and the
//!   other bits of the same write count.
//! - **Status.** Bits are only ever added. DRIVER needs ACKNOWLEDGE, FEATURES_OK needs DRIVER (both
//!   may be set in one write), DRIVER_OK needs that FEATURES_OK stuck in an *earlier* write, since
//!   the driver must have read it back (section 3.1.1). FAILED is set alone. DEVICE_NEEDS_RESET
//!   belongs to the device: the driver may write back what it read, or may not have seen it yet; it
//!   cannot set or clear the bit.
//! - **Queue registers** may be written between FEATURES_OK and FAILED, while the queue is Idle.
//!   Once it is enabled they are frozen: a later write has no effect, then or afterwards
//!   (CVE-2026-5747). A valid size is a power of two (in a packed queue: any number) from 1 to the
//!   queue's maximum; with any other size the queue is not enabled. Activation of the queue checks
//!   the addresses.
//! - **A reset of one queue** needs RING_RESET. During it the queue reads enabled and resetting;
//!   afterwards its registers are at their defaults (section 2.6.1). A queue that is not live needs
//!   no stop, so it is reset at once.
//! - **SUSPEND** (version 1.4, section 3.4) needs its feature; before DRIVER_OK it is ignored. Until
//!   the owner has carried it out the status reads what it was. While the
//!   device is suspended, kicks and writes to queue registers and to the configuration space are
//!   forbidden. A change of
//!   the configuration space becomes visible when the device is resumed.
//! - **Reset of a device whose status is 0** is done at once too: before ACKNOWLEDGE nothing could
//!   have been started or changed outside of these registers.
//! - The configuration space may be written from FEATURES_OK on (section 3.1.1, step 4), with 1, 2,
//!   4 or 8 bytes, naturally aligned.
mod common;
mod effect;
pub mod mmio;
pub mod pci;
mod saved;
mod state;
mod violation;

pub use effect::{DeviceDescription, Effect};
pub use saved::{RestoreError, Restored};

use common::Common;

/// Register machine of a transport, as its owner sees it.
///
/// Interrupts are not here: a transport and the device's queues share one
/// [`paravane_notify::Interrupts`].
pub trait Transport: Common + Send {
    /// Reads at `offset` of the transport's window.
    ///
    /// Fills `data` for any offset and length.
    ///
    /// `config` reads the device's configuration space (offset, destination).
    fn read(&mut self, offset: u64, data: &mut [u8], config: &mut dyn FnMut(u32, &mut [u8]));

    /// Writes at `offset` of the transport's window.
    ///
    /// Carry out the effect before the access returns to the guest; see [`Effect::Reset`] for the one
    /// exception.
    fn write(&mut self, offset: u64, data: &[u8]) -> Option<Effect>;

    /// Classifies an access, for statistics. Has no effect on the guest.
    fn access(&self, offset: u64, write: bool) -> AccessKind;

    /// Address of the kicks of `queue`, as negotiated. Ask when the queue starts.
    ///
    /// `None` if only the exit path can tell them apart, so that they must exit.
    fn notify_address(&self, queue: u16) -> Option<NotifyAddress>;

    /// Whether every driver of the device polls the status after a reset until it reads 0.
    ///
    /// Then [`Effect::Reset`] may be carried out after the access has returned.
    fn polls_reset(&self) -> bool {
        false
    }

    /// Resets the device, as a driver does by writing 0 to the device status.
    fn reset(&mut self) -> Option<Effect>;

    /// Reports that the owner has carried out [`Effect::Reset`]; without one, does nothing, as the others.
    fn reset_done(&mut self) {
        if self.state_mut().reset_done() {
            self.set_defaults();
        }
    }

    /// Reports that the owner has carried out [`Effect::ResetQueue`].
    fn queue_reset_done(&mut self, queue: u16) {
        if self.state_mut().queue_reset_done(queue) {
            self.set_queue_defaults(queue);
        }
    }

    /// Reports that the owner has carried out [`Effect::Suspend`].
    fn suspend_done(&mut self) {
        self.state_mut().status.suspend_done();
    }

    /// Reports that the owner has carried out [`Effect::Resume`].
    fn resume_done(&mut self) {
        self.state_mut().resume_done();
    }

    /// Tells the driver that the device needs a reset, once (section 2.1.2).
    ///
    /// Call it if the device could not start, or if a queue has failed. Does nothing at reset or during
    /// one.
    fn needs_reset(&mut self) {
        self.state_mut().needs_reset();
    }

    /// Tells the driver that the configuration space changed.
    fn config_changed(&mut self) {
        self.state_mut().config_changed();
    }

    /// Number of accesses that the specification forbids the driver.
    ///
    /// They had no effect.
    fn violations(&self) -> u64 {
        self.state().violations()
    }

    /// Registers as bytes, with interrupts that are pending and the messages that send them.
    ///
    /// Stop all queues first. Every [`Effect`] has been carried out.
    fn save(&self) -> Vec<u8>;

    /// Takes up registers that [`Transport::save`] has returned, perhaps in another process.
    ///
    /// Call it right after the transport was made, for the same device. An interrupt that is pending
    /// on the wired line is raised again.
    ///
    /// # Errors
    /// See [`RestoreError`]. Drop the transport.
    fn restore(&mut self, saved: &[u8]) -> Result<Restored, RestoreError>;
}

/// Subject of an access to a transport's registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AccessKind {
    /// Kick (available buffer notification).
    Notify,
    /// The driver reads the causes of an interrupt.
    InterruptStatus,
    /// The driver acknowledges an interrupt.
    InterruptAcknowledge,
    /// The device's configuration space.
    Config,
    /// Anything else, mostly set-up.
    Other,
}

/// Address of the kicks of one queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotifyAddress {
    /// Offset in the transport's window in bytes.
    pub offset: u64,
    /// 32-bit value that identifies this queue's kicks at the offset.
    ///
    /// `None` if any write there is one.
    pub datamatch: Option<u32>,
}
