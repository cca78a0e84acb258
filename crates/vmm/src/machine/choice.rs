//! Which accelerator runs the guest.
use super::accel::Accelerator;
use super::image;
use super::kvm::KvmMachine;
use super::thread::ThreadMachine;
use crate::config::{AccelChoice, MsiDelivery};
use crate::error::RunError;
use paravane_dma::Region;
use std::sync::Arc;

/// Makes the machine that `choice` asks for, with `region` as its RAM, and says why it is that one. With `log` it logs
/// what the guest writes, if it can; messages are delivered by `delivery`, if there is a choice.
///
/// # Errors
/// KVM was asked for and is not usable.
pub(crate) fn choose(
    choice: AccelChoice,
    region: &Arc<Region>,
    log: bool,
    delivery: MsiDelivery,
) -> Result<(Box<dyn Accelerator>, String), RunError> {
    let thread = |reason: String| -> (Box<dyn Accelerator>, String) {
        (Box::new(ThreadMachine::new(Arc::clone(region))), reason)
    };
    if choice == AccelChoice::Thread {
        return Ok(thread("asked for with --accel thread".into()));
    }
    let machine = image::builtin()
        .map_err(|error| error.to_string())
        .and_then(|_| KvmMachine::new(Arc::clone(region), log, delivery));
    match (machine, choice) {
        (Ok(machine), AccelChoice::Kvm) => Ok((Box::new(machine), "asked for with --accel kvm".into())),
        (Ok(machine), _) => Ok((Box::new(machine), "/dev/kvm is usable".into())),
        (Err(reason), AccelChoice::Kvm) => Err(RunError::NoKvm(reason)),
        (Err(reason), _) => Ok(thread(reason)),
    }
}
