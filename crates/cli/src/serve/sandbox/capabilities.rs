//! Which capabilities the daemon keeps once its devices are open.
//!
//! | capability | kept |
//! |---|---|
//! | CAP_DAC_OVERRIDE | always: sockets and images of other users, within what Landlock allows |
//! | CAP_NET_ADMIN | with a file that names a TAP device: SIGHUP may open it again |
//! | CAP_IPC_LOCK | for disks that io_uring may serve, also those that SIGHUP may add: see below |
//!
//! Some kernels (Linux 6.18 is one) count the rings of io_uring against RLIMIT_MEMLOCK, 8 MiB for most users: a queue of 1024
//! takes about a hundredth of that. With `registered-buffers` they count the memory of VMMs as well.
//!
//! None is kept that the daemon was not started with, and `--user` leaves none. The bounding, inheritable and ambient sets
//! become empty.
use super::SandboxError;
use crate::args::Engine;
use crate::serve::args::Format;
use crate::serve::spec::{Blk, DeviceSpec, Kind};
use rustix::io::Errno;
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, remove_capability_from_bounding_set, set_capabilities,
};

/// What the devices need later. `reload`: SIGHUP may open them again.
pub(crate) fn needed(devices: &[DeviceSpec], reload: bool) -> CapabilitySet {
    let of = |device: &DeviceSpec| match &device.kind {
        Kind::Net(_) if reload && device.tap().is_some() => CapabilitySet::NET_ADMIN,
        Kind::Blk(Blk { engine: Engine::Auto | Engine::IoUring, format: Format::Raw, .. }) => {
            CapabilitySet::IPC_LOCK
        }
        _ => CapabilitySet::empty(),
    };
    let always = match reload {
        true => CapabilitySet::DAC_OVERRIDE | CapabilitySet::IPC_LOCK,
        false => CapabilitySet::DAC_OVERRIDE,
    };
    devices.iter().map(of).fold(always, CapabilitySet::union)
}

/// Empties the bounding set of the calling thread, if it may. Without CAP_SETPCAP the set stays: no program can be executed
/// that would gain from it.
///
/// # Errors
/// The kernel refuses.
pub(super) fn empty_bounding_set() -> Result<(), SandboxError> {
    let effective = capabilities(None).map_err(failed)?.effective;
    if !effective.contains(CapabilitySet::SETPCAP) {
        tracing::debug!("the capability bounding set stays as it is, without CAP_SETPCAP");
        return Ok(());
    }
    for number in 0..u64::BITS {
        match remove_capability_from_bounding_set(CapabilitySet::from_bits_retain(1 << number)) {
            // The kernel knows no more.
            Err(Errno::INVAL) => break,
            removed => removed.map_err(failed)?,
        }
    }
    Ok(())
}

/// Drops the capabilities of the calling thread that are not in `kept`, and with the inheritable set the ambient set.
///
/// # Errors
/// The kernel refuses.
pub(super) fn keep(kept: CapabilitySet) -> Result<(), SandboxError> {
    let CapabilitySets { effective, permitted, .. } = capabilities(None).map_err(failed)?;
    let sets = CapabilitySets {
        effective: effective & kept,
        permitted: permitted & kept,
        inheritable: CapabilitySet::empty(),
    };
    set_capabilities(None, sets).map_err(failed)
}

fn failed(error: Errno) -> SandboxError {
    SandboxError::Capabilities(error.into())
}
