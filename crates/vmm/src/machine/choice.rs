//! The choice of an accelerator.
use super::accel::Accelerator;
use super::kvm::{KvmMachine, NoKvm};
use super::thread::ThreadMachine;
use crate::arch::builtin_image;
use crate::config::{AccelChoice, MsiDelivery};
use crate::error::RunError;
use paravane_dma::Region;
use std::sync::Arc;

/// Makes the accelerator of `choice` with `region` as RAM, and names the reason.
///
/// With `log` the guest's writes are logged, if the accelerator can. `delivery` chooses how KVM
/// delivers messages. The machine has `cpus` processors, or as many as KVM can give.
///
/// # Errors
/// `choice` is KVM, which is not usable.
pub(crate) fn choose(
    choice: AccelChoice,
    region: &Arc<Region>,
    log: bool,
    delivery: MsiDelivery,
    cpus: u16,
) -> Result<(Box<dyn Accelerator>, String), RunError> {
    let thread = |reason: String| -> (Box<dyn Accelerator>, String) {
        (Box::new(ThreadMachine::new(Arc::clone(region), cpus)), reason)
    };
    if choice == AccelChoice::Thread {
        return Ok(thread("asked for with --accel thread".into()));
    }
    let machine = builtin_image()
        .map_err(|reason| NoKvm { reason, remedy: "use --accel thread" })
        .and_then(|_| KvmMachine::new(Arc::clone(region), log, delivery, cpus));
    match (machine, choice) {
        (Ok(machine), AccelChoice::Kvm) => Ok((Box::new(machine), "asked for with --accel kvm".into())),
        (Ok(machine), _) => Ok((Box::new(machine), "/dev/kvm is usable".into())),
        (Err(why), AccelChoice::Kvm) => Err(RunError::NoKvm(why.to_string())),
        (Err(why), _) => Ok(thread(why.reason)),
    }
}
