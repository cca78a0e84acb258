//! Capabilities that the daemon keeps after opening its devices.
//!
//! | capability | kept |
//! |---|---|
//! | CAP_DAC_OVERRIDE | always: sockets and images of other users, within the allowed paths |
//! | CAP_NET_ADMIN | with a file that has a TAP device: SIGHUP may open it again |
//! | CAP_IPC_LOCK | with disks that io_uring may serve, now or after SIGHUP: see below |
//!
//! Some kernels (Linux 6.18 is one) count io_uring rings against RLIMIT_MEMLOCK, 8 MiB for most
//! users: a queue of 1024 takes about 1 % of it. With `registered-buffers` they also count the
//! memory of VMMs.
//!
//! The daemon gains no capability, and with `--user` keeps none. It empties the bounding,
//! inheritable and ambient sets.
use super::error::SandboxError;
use crate::serve::spec::DeviceSpec;
use rustix::io::Errno;
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, remove_capability_from_bounding_set, set_capabilities,
};

/// Capabilities that the devices need later.
///
/// `reload`: SIGHUP or a take-over may open devices later.
pub(crate) fn needed(devices: &[DeviceSpec], reload: bool) -> CapabilitySet {
    let always = match reload {
        true => CapabilitySet::DAC_OVERRIDE | CapabilitySet::IPC_LOCK,
        false => CapabilitySet::DAC_OVERRIDE,
    };
    devices.iter().map(|device| device.kind.capabilities(reload)).fold(always, CapabilitySet::union)
}

/// Empties the bounding set of the calling thread if it has CAP_SETPCAP.
///
/// Without CAP_SETPCAP the set stays, which is harmless: the sandbox denies executing programs.
///
/// # Errors
/// The kernel refuses.
pub(super) fn empty_bounding_set() -> Result<(), SandboxError> {
    let effective = capabilities(None).map_err(failed)?.effective;
    if !effective.contains(CapabilitySet::SETPCAP) {
        tracing::debug!("capability bounding set unchanged: no CAP_SETPCAP");
        return Ok(());
    }
    for number in 0..u64::BITS {
        match remove_capability_from_bounding_set(CapabilitySet::from_bits_retain(1 << number)) {
            // Past the kernel's last capability.
            Err(Errno::INVAL) => break,
            removed => removed.map_err(failed)?,
        }
    }
    Ok(())
}

/// Keeps only `kept` in the calling thread.
///
/// Emptying the inheritable set empties the ambient set.
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
