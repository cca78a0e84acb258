//! The KVM machine: a VM and its vCPUs.
pub(crate) mod stats;
mod vcpu;

use crate::arch::{self, Place};
use crate::config::MsiDelivery;
use crate::error::RunError;
use crate::machine::accel::{Accelerator, Ended, Running};
use crate::machine::bus::Bus;
use crate::machine::dirty::VcpuLog;
use kvm_bindings::{KVM_API_VERSION, KVM_MEM_LOG_DIRTY_PAGES, kvm_userspace_memory_region};
use kvm_ioctls::{Cap, Kvm, VcpuFd, VmFd};
use paravane_dma::Region;
use paravane_notify::msi::MsiController;
use paravane_notify::{
    InterruptSink, IoEventFds, KvmIoEventFds, KvmIrqfd, KvmMsi, KvmMsiDelivery, KvmRoutes, NotifyError,
};
use std::fmt;
use std::sync::Arc;
use std::sync::mpsc::Sender;

/// Capabilities that the machine requires.
const NEEDED: [(Cap, &str); 6] = [
    (Cap::UserMemory, "KVM_CAP_USER_MEMORY"),
    (Cap::Irqchip, "KVM_CAP_IRQCHIP"),
    (Cap::IrqRouting, "KVM_CAP_IRQ_ROUTING"),
    (Cap::Irqfd, "KVM_CAP_IRQFD"),
    (Cap::SignalMsi, "KVM_CAP_SIGNAL_MSI"),
    (Cap::ImmediateExit, "KVM_CAP_IMMEDIATE_EXIT"),
];

const LOAD: &str =
    "enable virtualization in the firmware and load kvm_intel or kvm_amd; in a container, pass the device in";
const PERMIT: &str =
    "add your user to the group that owns /dev/kvm (usermod -aG kvm USER), then log in again";
const UPDATE: &str = "use a newer host kernel";

/// KVM is not usable.
#[derive(Debug)]
pub(crate) struct NoKvm {
    /// The reason, in words for the report.
    pub(crate) reason: String,
    /// What to do.
    pub(crate) remedy: &'static str,
}

impl NoKvm {
    fn new(reason: impl Into<String>, remedy: &'static str) -> Self {
        Self { reason: reason.into(), remedy }
    }
}

impl From<String> for NoKvm {
    /// KVM is there, and refused something.
    fn from(reason: String) -> Self {
        Self::new(reason, "look at the kernel log (dmesg)")
    }
}

impl fmt::Display for NoKvm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}; {}", self.reason, self.remedy)
    }
}

/// Opens /dev/kvm and checks what the machine needs of it.
///
/// # Errors
/// It is missing, or not what the machine needs.
pub(crate) fn open() -> Result<Kvm, NoKvm> {
    let kvm = Kvm::new().map_err(|error| match error.errno() {
        libc::ENOENT => NoKvm::new("there is no /dev/kvm", LOAD),
        libc::ENODEV | libc::ENXIO => NoKvm::new("no driver serves /dev/kvm", LOAD),
        libc::EACCES | libc::EPERM => NoKvm::new("no permission to open /dev/kvm", PERMIT),
        _ => NoKvm::from(format!("cannot open /dev/kvm: {error}")),
    })?;
    let version = kvm.get_api_version();
    if version < 0 {
        return Err(NoKvm::new("/dev/kvm is not KVM", LOAD));
    }
    if u32::try_from(version) != Ok(KVM_API_VERSION) {
        let reason = format!("/dev/kvm speaks version {version}, and {KVM_API_VERSION} is needed");
        return Err(NoKvm::new(reason, UPDATE));
    }
    match NEEDED.iter().find(|(cap, _)| !kvm.check_extension(*cap)) {
        Some((_, name)) => Err(NoKvm::new(format!("/dev/kvm lacks {name}"), UPDATE)),
        None => Ok(kvm),
    }
}

/// How many vCPUs a machine has that is to have `wanted`, at least one and at most `most`.
fn vcpus(wanted: u16, most: usize) -> u16 {
    wanted.clamp(1, u16::try_from(most).unwrap_or(u16::MAX).max(1))
}

/// The machine before its start.
pub(crate) struct KvmMachine {
    region: Arc<Region>,
    vm: Arc<VmFd>,
    routes: Arc<KvmRoutes>,
    delivery: MsiDelivery,
    vcpus: Vec<VcpuFd>,
    /// Whether KVM logs what the vCPUs write.
    log: bool,
}

/// Number of the one memory slot.
const SLOT: u32 = 0;

/// KVM's log of the memory slot.
struct SlotLog {
    vm: Arc<VmFd>,
    region: Arc<Region>,
}

impl VcpuLog for SlotLog {
    fn take(&self) -> std::io::Result<Vec<u64>> {
        let size = usize::try_from(self.region.size()).map_err(std::io::Error::other)?;
        self.vm.get_dirty_log(SLOT, size).map_err(|error| std::io::Error::from_raw_os_error(error.errno()))
    }
}

impl KvmMachine {
    /// Makes a machine with `region` as RAM.
    ///
    /// With `log`, KVM logs the writes of the vCPUs. Messages are delivered by `delivery`. Of `cpus`
    /// vCPUs it has as many as KVM can give.
    ///
    /// # Errors
    /// KVM is not usable here.
    pub(crate) fn new(
        region: Arc<Region>,
        log: bool,
        delivery: MsiDelivery,
        cpus: u16,
    ) -> Result<Self, NoKvm> {
        let kvm = open()?;
        let failed = |what: &'static str| move |error| format!("KVM cannot {what}: {error}");
        let vm = kvm.create_vm().map_err(failed("make a VM"))?;
        arch::set_up_vm(&vm)?;
        let slot = kvm_userspace_memory_region {
            slot: SLOT,
            flags: if log { KVM_MEM_LOG_DIRTY_PAGES } else { 0 },
            guest_phys_addr: region.gpa(),
            memory_size: region.size(),
            userspace_addr: region.host().as_ptr() as u64,
        };
        // SAFETY: the region is one mapping of that size. It stays mapped as long as the guest
        // runs: the machine and then the vCPU's thread hold its Arc and drop it after the vCPU.
        unsafe { vm.set_user_memory_region(slot) }.map_err(failed("take guest memory"))?;
        let count = vcpus(cpus, kvm.get_max_vcpus());
        if count < cpus {
            tracing::warn!(
                "KVM gives a VM at most {count} CPUs: the guest has {count}, not {cpus}; lower --cpus"
            );
        }
        let vcpus = (0..count).map(|number| arch::new_vcpu(&kvm, &vm, Place { number, count }));
        let vcpus = vcpus.collect::<Result<_, _>>()?;
        let vm = Arc::new(vm);
        let routes = KvmRoutes::new(Arc::clone(&vm), arch::wired_routes(), arch::is_interrupt)
            .map_err(|error| error.to_string())?;
        Ok(Self { region, vm, routes: Arc::new(routes), delivery, vcpus, log })
    }

    /// The vCPUs; the first one starts a guest.
    pub(crate) fn vcpus(&self) -> &[VcpuFd] {
        &self.vcpus
    }

    /// Message controller of the chosen delivery.
    pub(crate) fn msi_by(&self, delivery: MsiDelivery) -> Arc<dyn MsiController> {
        let delivery = match delivery {
            MsiDelivery::Signal => KvmMsiDelivery::Signal,
            MsiDelivery::Irqfd => KvmMsiDelivery::Irqfd,
        };
        Arc::new(KvmMsi::new(Arc::clone(&self.routes), delivery))
    }

    /// The parts, for a bare guest (see `doctor`).
    pub(crate) fn into_parts(self) -> (Arc<VmFd>, Vec<VcpuFd>, Arc<Region>) {
        (self.vm, self.vcpus, self.region)
    }
}

impl Accelerator for KvmMachine {
    fn name(&self) -> &'static str {
        "kvm"
    }

    fn sink(&self, gsi: u32) -> Result<Arc<dyn InterruptSink>, NotifyError> {
        Ok(Arc::new(KvmIrqfd::new(&self.vm, gsi)?))
    }

    fn msi(&self) -> Arc<dyn MsiController> {
        self.msi_by(self.delivery)
    }

    fn ioeventfds(&self) -> Arc<dyn IoEventFds> {
        Arc::new(KvmIoEventFds::new(Arc::clone(&self.vm)))
    }

    fn cpus(&self) -> u16 {
        self.vcpus.len() as u16
    }

    fn clock_khz(&self) -> u64 {
        arch::clock_khz(&self.vcpus[0])
    }

    fn prepare(&mut self) -> Result<(), RunError> {
        arch::start_builtin(&self.region, &self.vcpus)
    }

    fn vcpu_log(&self) -> Option<Box<dyn VcpuLog>> {
        let log = SlotLog { vm: Arc::clone(&self.vm), region: Arc::clone(&self.region) };
        self.log.then(|| Box::new(log) as Box<dyn VcpuLog>)
    }

    fn start(self: Box<Self>, bus: Arc<Bus>, ended: Sender<Ended>) -> Result<Box<dyn Running>, RunError> {
        let (vm, vcpus, region) = self.into_parts();
        Ok(Box::new(vcpu::RunningVcpus::spawn(&vm, vcpus, region, bus, ended)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_has_at_most_as_many_cpus_as_kvm_gives() {
        assert_eq!(vcpus(4, 64), 4);
        assert_eq!(vcpus(0, 64), 1);
        assert_eq!(vcpus(1, 0), 1);
        assert_eq!(vcpus(64, 16), 16);
        assert_eq!(vcpus(64, 1 << 20), 64);
    }
}
