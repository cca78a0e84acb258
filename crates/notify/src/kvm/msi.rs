//! MSI on KVM: an irqfd with a message route, or a system call per message.
//!
//! ```text
//! KvmMsi (Irqfd)  --sink--> GSI and eventfd --route--> KvmRoutes: KVM_SET_GSI_ROUTING
//!                                           --fire---> eventfd, and KVM sends the route's message
//! KvmMsi (Signal) --sink--> nothing         --fire---> KVM_SIGNAL_MSI with the message
//! ```
//! The system call takes about three quarters of the time of an irqfd (a write to an eventfd, and
//! KVM's work behind it). A change of message is free, whereas a new table takes some microseconds.
//! Use an irqfd for users that only have a descriptor: vhost, and other processes.
//!
//! KVM_SET_GSI_ROUTING replaces every route of the VM, so they have one owner, [`KvmRoutes`]. KVM
//! applies a new table as a unit, and returns when nothing is sent by the old one any more.
use crate::msi::{MsiController, MsiMessage, MsiSink};
use crate::{Notifier, NotifyError};
use kvm_bindings::{KVM_IRQ_ROUTING_MSI, KVM_MSI_VALID_DEVID, KvmIrqRouting, kvm_irq_routing_entry, kvm_msi};
use kvm_ioctls::VmFd;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// GSIs that KVM routes on x86 (`KVM_MAX_IRQ_ROUTES`).
///
/// 1024 before Linux 4.18, where KVM refuses a larger table.
const MAX_GSIS: u32 = 4096;

/// Whether the interrupt controller takes the device of a message (ITS).
const NEEDS_DEVICE: bool = cfg!(target_arch = "aarch64");

/// Delivery of messages through KVM.
///
/// The system call takes about three quarters of the time of an irqfd, and a change of message is
/// free. An irqfd serves users that only have a descriptor: vhost, and other processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum KvmMsiDelivery {
    /// An eventfd with a route.
    Irqfd,
    /// KVM_SIGNAL_MSI.
    Signal,
}

/// Interrupt routes of one VM.
pub struct KvmRoutes {
    vm: Arc<VmFd>,
    /// Wired routes, from GSI 0 on.
    wired: Vec<kvm_irq_routing_entry>,
    /// Whether a message is an interrupt on this machine.
    is_interrupt: fn(MsiMessage) -> bool,
    /// Allocated GSIs above them, and their messages.
    messages: Mutex<BTreeMap<u32, Option<MsiMessage>>>,
}

impl KvmRoutes {
    /// Takes over the routes of `vm`, and sets the `wired` ones.
    ///
    /// Messages of which `is_interrupt` does not hold are refused. Set routes only through this from
    /// now on.
    ///
    /// # Errors
    /// The host refuses.
    pub fn new(
        vm: Arc<VmFd>,
        wired: Vec<kvm_irq_routing_entry>,
        is_interrupt: fn(MsiMessage) -> bool,
    ) -> Result<Self, NotifyError> {
        let routes = Self { vm, wired, is_interrupt, messages: Mutex::default() };
        routes.set(&routes.lock())?;
        Ok(routes)
    }

    /// Allocates a free GSI.
    fn allocate(&self) -> Result<u32, NotifyError> {
        let mut messages = self.lock();
        let first = self.wired.iter().map(|entry| entry.gsi + 1).max().unwrap_or(0);
        let free = (first..MAX_GSIS).find(|gsi| !messages.contains_key(gsi));
        let gsi = free.ok_or(NotifyError::Os {
            what: "find a free GSI",
            source: std::io::ErrorKind::QuotaExceeded.into(),
        })?;
        messages.insert(gsi, None);
        Ok(gsi)
    }

    /// Checks that a message is an interrupt.
    fn check(&self, message: MsiMessage) -> Result<(), NotifyError> {
        if (self.is_interrupt)(message) { Ok(()) } else { Err(message.refused()) }
    }

    /// Routes `gsi` to `message`.
    fn route(&self, gsi: u32, message: MsiMessage) -> Result<(), NotifyError> {
        let mut messages = self.lock();
        let before = messages.insert(gsi, Some(message)).flatten();
        self.set(&messages).inspect_err(|_| {
            messages.insert(gsi, before);
        })
    }

    /// Frees `gsi`.
    fn free(&self, gsi: u32) {
        let mut messages = self.lock();
        if messages.remove(&gsi).flatten().is_some() {
            // On failure an unused route remains, which is harmless; the next change removes it.
            let _ = self.set(&messages);
        }
    }

    fn set(&self, messages: &BTreeMap<u32, Option<MsiMessage>>) -> Result<(), NotifyError> {
        let mut entries = self.wired.clone();
        for (&gsi, message) in messages {
            if let Some(message) = message {
                let mut entry =
                    kvm_irq_routing_entry { gsi, type_: KVM_IRQ_ROUTING_MSI, ..Default::default() };
                entry.u.msi.address_lo = message.address as u32;
                entry.u.msi.address_hi = (message.address >> 32) as u32;
                entry.u.msi.data = message.data;
                if NEEDS_DEVICE {
                    entry.flags = KVM_MSI_VALID_DEVID;
                    entry.u.msi.__bindgen_anon_1.devid = message.device;
                }
                entries.push(entry);
            }
        }
        let refused = |source| NotifyError::Os { what: "set interrupt routes", source };
        let table = KvmIrqRouting::from_entries(&entries)
            .map_err(|_| refused(std::io::ErrorKind::QuotaExceeded.into()))?;
        self.vm.set_gsi_routing(&table).map_err(|error| refused(error.into()))
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u32, Option<MsiMessage>>> {
        // Each change under the lock leaves a valid map.
        self.messages.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Message delivery on one VM.
pub struct KvmMsi {
    routes: Arc<KvmRoutes>,
    delivery: KvmMsiDelivery,
}

impl KvmMsi {
    /// Delivers by `routes`, or bypasses them, as `delivery` says.
    #[must_use]
    pub fn new(routes: Arc<KvmRoutes>, delivery: KvmMsiDelivery) -> Self {
        Self { routes, delivery }
    }
}

impl MsiController for KvmMsi {
    fn sink(&self) -> Result<Box<dyn MsiSink>, NotifyError> {
        Ok(match self.delivery {
            KvmMsiDelivery::Irqfd => Box::new(RoutedIrqfd::new(Arc::clone(&self.routes))?),
            KvmMsiDelivery::Signal => Box::new(SignalMsi { routes: Arc::clone(&self.routes) }),
        })
    }
}

/// irqfd with its own GSI.
struct RoutedIrqfd {
    routes: Arc<KvmRoutes>,
    gsi: u32,
    notifier: Notifier,
}

impl RoutedIrqfd {
    fn new(routes: Arc<KvmRoutes>) -> Result<Self, NotifyError> {
        let notifier = Notifier::new(false)?;
        let gsi = routes.allocate()?;
        // Without a route yet, a signal goes nowhere.
        if let Err(error) = routes.vm.register_irqfd(&notifier.event(), gsi) {
            routes.free(gsi);
            return Err(NotifyError::Os { what: "register an irqfd", source: error.into() });
        }
        Ok(Self { routes, gsi, notifier })
    }
}

impl MsiSink for RoutedIrqfd {
    fn route(&self, message: MsiMessage) -> Result<(), NotifyError> {
        self.routes.check(message)?;
        self.routes.route(self.gsi, message)
    }

    fn eventfd(&self) -> Option<&Notifier> {
        Some(&self.notifier)
    }

    fn fire(&self, _message: MsiMessage) {
        self.notifier.signal();
    }
}

impl Drop for RoutedIrqfd {
    fn drop(&mut self) {
        // KVM waits for a delivery under way, so the GSI is free afterwards. There is no caller to
        // report a refusal to, and closing the eventfd ends it as well.
        let _ = self.routes.vm.unregister_irqfd(&self.notifier.event(), self.gsi);
        self.routes.free(self.gsi);
    }
}

/// One system call per interrupt, and nothing to set up.
struct SignalMsi {
    routes: Arc<KvmRoutes>,
}

impl MsiSink for SignalMsi {
    fn route(&self, message: MsiMessage) -> Result<(), NotifyError> {
        self.routes.check(message)
    }

    fn fire(&self, message: MsiMessage) {
        let msi = kvm_msi {
            address_lo: message.address as u32,
            address_hi: (message.address >> 32) as u32,
            data: message.data,
            flags: if NEEDS_DEVICE { KVM_MSI_VALID_DEVID } else { 0 },
            devid: message.device,
            ..Default::default()
        };
        // The result says whether a local APIC took the message; a message to none goes nowhere, as
        // on hardware.
        let _ = self.routes.vm.signal_msi(msi);
    }
}
