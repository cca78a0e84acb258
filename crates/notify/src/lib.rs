//! Notifications in both directions: kicks from the driver, interrupts to it.
//!
//! A kick is the specification's available buffer notification; an interrupt is its used buffer
//! notification.
//!
//! ```text
//! kick:      guest write -> ioeventfd -------------------> Notifier (eventfd)    (Assigned)
//!            guest write -> exit -> HostNotifier::kick --> Notifier (eventfd)    (Deassigned)
//!            Notifier -> its one owner: an event loop, or a vhost back end
//!
//! interrupt: device -> Interrupts -.-> InterruptLine (status register) -> InterruptSink -> vCPU
//!                                  '-> MsiTable (message, mask, pending) -> MsiSink ----> vCPU
//!            InterruptSink: an irqfd. MsiSink: an irqfd with a route, or KVM_SIGNAL_MSI
//! ```
//!
//! - [`HostNotifier`] decides where the kicks of one queue arrive. Its documentation has the state
//!   machine and the rules by which no kick is lost.
//! - [`Interrupts`] sends the interrupts of one device, by line or by [`msi`].
//! - [`PollWindow`] and [`BatchDelay`] decide how long to poll a queue and how long to let work
//!   accumulate.
//! - [`Baton`] lets another thread go on with what a thread that blocks has at hand.
//! - [`IoEventFds`], [`InterruptSink`] and [`msi::MsiController`] are the interface to the machine;
//!   feature `kvm` implements all three on a VM of the crate kvm-ioctls.
//!
//! # Example
//!
//! On a host without ioeventfds, kicks exit and reach the same eventfd:
//!
//! ```
//! use paravane_notify::{HostNotifier, NoIoEventFds, NotifierState};
//! use std::sync::Arc;
//!
//! let queue = HostNotifier::new(Arc::new(NoIoEventFds), 0xd000_0050, Some(0))?;
//! assert!(queue.assign().is_err());
//! assert_eq!(queue.state(), NotifierState::Deassigned);
//! assert!(queue.notifier().take() > 0); // every start signals: look at the ring
//!
//! queue.kick(); // from the exit handler
//! assert!(queue.notifier().take() > 0);
//! # Ok::<(), paravane_notify::NotifyError>(())
//! ```
//!
//! # Files
//!
//! * `Notifier` (eventfd), `HostNotifier` (the owner of a queue's kicks), `PollWindow` (how long to
//!   look for work before waiting; pure), `BatchDelay` (how long to leave work alone while it
//!   arrives fast; pure), `Baton` (what another thread may take while this one blocks),
//!   `Interrupts` (a device's way to its driver: `InterruptLine`, a status register and an edge, or
//!   `msi`, a table of messages with mask and pending bits), `kvm`, a feature (ioeventfd, irqfd,
//!   `KvmRoutes`: the one owner of a VM's interrupt routes, KVM_SIGNAL_MSI).
mod batch_delay;
mod baton;
mod host;
mod interrupts;
#[cfg(feature = "kvm")]
mod kvm;
mod limit;
mod line;
pub mod msi;
mod notifier;
mod poll;
mod sync;

pub use batch_delay::BatchDelay;
pub use baton::Baton;
pub use host::{HostNotifier, NotifierState};
pub use interrupts::Interrupts;
#[cfg(feature = "kvm")]
pub use kvm::{KvmIoEventFds, KvmIrqfd, KvmMsi, KvmMsiDelivery, KvmRoutes};
pub use limit::LimitedIoEventFds;
pub use line::{InterruptLine, InterruptSink};
#[cfg(feature = "kvm")]
pub use notifier::BorrowedEventFd;
pub use notifier::Notifier;
pub use poll::PollWindow;

use thiserror::Error;

/// Notification path that cannot be set up or used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum NotifyError {
    /// Failed system call.
    #[error("cannot {what}: {source}")]
    Os {
        /// Attempted operation.
        what: &'static str,
        /// Cause.
        source: std::io::Error,
    },
    /// Call in the wrong state.
    #[error("notifier cannot be {wanted}: its state is {state:?}")]
    State {
        /// Current state of the notifier.
        state: NotifierState,
        /// Requested operation, as a participle.
        wanted: &'static str,
    },
    /// No ioeventfd left; kicks exit.
    #[error("all {limit} ioeventfds are in use")]
    Limit {
        /// Number of ioeventfds.
        limit: u32,
    },
    /// Message that the platform does not treat as an interrupt.
    #[error("MSI message {data:#x} to {address:#x} is no interrupt")]
    Message {
        /// Address of the write.
        address: u64,
        /// Data of the write.
        data: u32,
    },
}

/// Registers eventfds at guest addresses (KVM: ioeventfd).
pub trait IoEventFds: Send + Sync {
    /// Makes writes to guest-physical `addr` signal `notifier` without an exit.
    ///
    /// Writes of 32 bits and value `datamatch` signal; with `None` any write does. The
    /// implementation must not call the notifier's [`HostNotifier`].
    ///
    /// # Errors
    /// The host refuses; the caller falls back to exits.
    fn assign(&self, addr: u64, datamatch: Option<u32>, notifier: &Notifier) -> Result<(), NotifyError>;

    /// Undoes [`IoEventFds::assign`]; writes exit again.
    ///
    /// # Errors
    /// It was not assigned.
    fn deassign(&self, addr: u64, datamatch: Option<u32>, notifier: &Notifier) -> Result<(), NotifyError>;
}

/// Host without ioeventfds, or one that must not use them: every kick exits.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoIoEventFds;

impl IoEventFds for NoIoEventFds {
    fn assign(&self, _addr: u64, _datamatch: Option<u32>, _notifier: &Notifier) -> Result<(), NotifyError> {
        Err(NotifyError::Os { what: "register an ioeventfd", source: std::io::ErrorKind::Unsupported.into() })
    }

    fn deassign(&self, _addr: u64, _datamatch: Option<u32>, _notifier: &Notifier) -> Result<(), NotifyError> {
        Err(NotifyError::Os { what: "remove an ioeventfd", source: std::io::ErrorKind::Unsupported.into() })
    }
}
