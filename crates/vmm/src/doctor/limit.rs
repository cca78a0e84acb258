//! Number of ioeventfds that a VM gets: tried, on a VM without vCPUs.
//!
//! Kernels differ: 6 devices a bus once, 200, 1000, or ioeventfds not counted at all. Each
//! registration copies the bus and waits until nobody reads the old one, so the time is bounded as
//! well as the number.
use kvm_ioctls::Kvm;
use paravane_notify::{IoEventFds, KvmIoEventFds, Notifier};
use paravane_spec::builtin::MMIO_BASE;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// More than a machine needs: counts as no limit.
pub(super) const ENOUGH: u32 = 1024;
/// How long trying may take.
const PATIENCE: Duration = Duration::from_millis(200);

/// What was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Limit {
    /// Number of registered ioeventfds.
    pub(super) registered: u32,
    /// Why not one more; `None` if it was not tried.
    pub(super) refused: Option<String>,
    /// What one took.
    pub(super) each: Duration,
}

/// Registers ioeventfds until the host refuses, or it is enough.
///
/// # Errors
/// KVM makes no VM, or the process has no descriptors left.
pub(super) fn probe(kvm: &Kvm) -> Result<Limit, String> {
    let vm = kvm.create_vm().map_err(|error| format!("KVM makes no VM: {error}"))?;
    let fds = KvmIoEventFds::new(Arc::new(vm));
    let notifier = Notifier::new(false).map_err(|error| error.to_string())?;
    let start = Instant::now();
    let (mut registered, mut refused) = (0, None);
    while registered < ENOUGH && start.elapsed() < PATIENCE {
        // One eventfd will do for all addresses. They go with the VM.
        match fds.assign(MMIO_BASE + 8 * u64::from(registered), None, &notifier) {
            Ok(()) => registered += 1,
            Err(error) => {
                refused = Some(error.to_string());
                break;
            }
        }
    }
    Ok(Limit { registered, refused, each: start.elapsed() / registered.max(1) })
}
