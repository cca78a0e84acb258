//! ioeventfd, irqfd and MSI on KVM.
mod msi;

pub use msi::{KvmMsi, KvmMsiDelivery, KvmRoutes};

use crate::{InterruptSink, IoEventFds, Notifier, NotifyError};
use kvm_ioctls::{IoEventAddress, NoDatamatch, VmFd};
use std::sync::Arc;

/// ioeventfds of one VM.
///
/// With a datamatch a write must have 4 bytes. Without one KVM accepts a write of any length
/// (length 0), so that a separate address per queue works with NOTIFICATION_DATA, whose upper bits
/// vary (virtio 1.4, section 2.9).
pub struct KvmIoEventFds {
    vm: Arc<VmFd>,
}

impl KvmIoEventFds {
    /// Makes the ioeventfds of `vm`.
    #[must_use]
    pub fn new(vm: Arc<VmFd>) -> Self {
        Self { vm }
    }
}

impl IoEventFds for KvmIoEventFds {
    fn assign(&self, addr: u64, datamatch: Option<u32>, notifier: &Notifier) -> Result<(), NotifyError> {
        let at = IoEventAddress::Mmio(addr);
        match datamatch {
            Some(value) => self.vm.register_ioevent(&notifier.event(), &at, value),
            None => self.vm.register_ioevent(&notifier.event(), &at, NoDatamatch),
        }
        .map_err(|e| NotifyError::Os { what: "register an ioeventfd", source: e.into() })
    }

    fn deassign(&self, addr: u64, datamatch: Option<u32>, notifier: &Notifier) -> Result<(), NotifyError> {
        let at = IoEventAddress::Mmio(addr);
        match datamatch {
            Some(value) => self.vm.unregister_ioevent(&notifier.event(), &at, value),
            None => self.vm.unregister_ioevent(&notifier.event(), &at, NoDatamatch),
        }
        .map_err(|e| NotifyError::Os { what: "remove an ioeventfd", source: e.into() })
    }
}

/// irqfd: raising it makes KVM deliver an edge on a GSI.
///
/// It takes no exit and no system call on the vCPU's side.
///
/// KVM releases it when the eventfd is closed, that is, when this is dropped.
#[derive(Debug)]
pub struct KvmIrqfd {
    notifier: Notifier,
}

impl KvmIrqfd {
    /// Connects a new eventfd to `gsi` of `vm`'s interrupt controller.
    ///
    /// # Errors
    /// The VM has no interrupt controller, or the host refuses.
    pub fn new(vm: &VmFd, gsi: u32) -> Result<Self, NotifyError> {
        let notifier = Notifier::new(false)?;
        vm.register_irqfd(&notifier.event(), gsi)
            .map_err(|e| NotifyError::Os { what: "register an irqfd", source: e.into() })?;
        Ok(Self { notifier })
    }
}

impl InterruptSink for KvmIrqfd {
    fn raise(&self) {
        self.notifier.signal();
    }
}
