//! ioeventfd and irqfd on KVM.
use crate::{InterruptSink, IoEventFds, Notifier, NotifyError};
use kvm_ioctls::VmFd;
use std::sync::Arc;

/// ioeventfds of one VM.
pub struct KvmIoEventFds {
    _vm: Arc<VmFd>,
}

impl KvmIoEventFds {
    /// For `vm`.
    #[must_use]
    pub fn new(vm: Arc<VmFd>) -> Self {
        Self { _vm: vm }
    }
}

impl IoEventFds for KvmIoEventFds {
    fn assign(&self, addr: u64, datamatch: Option<u32>, notifier: &Notifier) -> Result<(), NotifyError> {
        let _ = (addr, datamatch, notifier);
        todo!()
    }

    fn deassign(&self, addr: u64, datamatch: Option<u32>, notifier: &Notifier) -> Result<(), NotifyError> {
        let _ = (addr, datamatch, notifier);
        todo!()
    }
}

/// An irqfd: raising it makes KVM deliver an edge on `gsi`, with no exit and no system call on the vCPU's side.
pub struct KvmIrqfd {
    _notifier: Notifier,
}

impl KvmIrqfd {
    /// Connects a new eventfd to `gsi` of `vm`'s interrupt controller.
    ///
    /// # Errors
    /// The VM has no interrupt controller, or the host refuses.
    pub fn new(vm: &VmFd, gsi: u32) -> Result<Self, NotifyError> {
        let _ = (vm, gsi);
        todo!()
    }
}

impl InterruptSink for KvmIrqfd {
    fn raise(&self) {
        todo!()
    }
}
