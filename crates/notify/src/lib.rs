//! Notifications both ways: kicks from the driver, interrupts to it.
//!
//! ```text
//! kick:      guest write -> ioeventfd -------------------> Notifier (eventfd) -> its one owner     (assigned)
//!            guest write -> exit -> HostNotifier::kick --> the same eventfd                     (deassigned)
//! interrupt: device -> Interrupts -.-> InterruptLine (status register) --> InterruptSink (irqfd)  --> vCPU
//!                                  '-> MsiTable (message, mask, pending) -> MsiSink (irqfd with a route,
//!                                                                            KVM_SIGNAL_MSI) ----> vCPU
//! ```
//! Feature `kvm` adds ioeventfd, irqfd and MSI on a VM of the crate kvm-ioctls. Without it an embedder implements
//! [`IoEventFds`], [`InterruptSink`] and [`msi::MsiController`].
mod batch_delay;
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
pub use host::{HostNotifier, Kick, NotifierState};
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

/// Why a notification path could not be set up or used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum NotifyError {
    /// cannot {what}: {source}
    #[error("cannot {what}: {source}")]
    Os {
        /// What was tried.
        what: &'static str,
        /// Why not.
        source: std::io::Error,
    },
    /// the notifier is {state:?}, so it cannot be {wanted}
    #[error("the notifier is {state:?}, so it cannot be {wanted}")]
    State {
        /// State that it is in.
        state: NotifierState,
        /// What was asked.
        wanted: &'static str,
    },
    /// all {limit} ioeventfds are in use
    #[error("all {limit} ioeventfds are in use")]
    Limit {
        /// How many there are.
        limit: u32,
    },
    /// a write of {data:#x} to {address:#x} is no interrupt
    #[error("a write of {data:#x} to {address:#x} is no interrupt")]
    Message {
        /// Where to.
        address: u64,
        /// What.
        data: u32,
    },
}

/// What registers an eventfd behind a guest address: KVM's ioeventfd, or a machine without one.
pub trait IoEventFds: Send + Sync {
    /// From now on a 32-bit write of `datamatch` (any write at all if `None`) to guest-physical `addr` signals
    /// `notifier` without an exit. It must not call back into the notifier's [`HostNotifier`].
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

/// A host without ioeventfds, or one that is told not to use them: every kick exits.
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
