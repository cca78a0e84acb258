//! A device whose queues have owners of their own, each on its processor.
//!
//! ```text
//! owner of a queue ---kick---> device <---interrupt--- owner of the device
//!       ^ check                  | failed: all owners find it at their next call
//!       '------------------------'
//! ```
use crate::{DriverError, Transport, Virtio};
use alloc::sync::Arc;
use core::sync::atomic::{AtomicU8, Ordering};

/// Values of [`SharedDevice::failed`].
const WORKS: u8 = 0;
const NEEDS_RESET: u8 = 1;
const CONFIG_UNSTABLE: u8 = 2;

/// A device, and whether it has failed. The errors of a queue are its owner's.
#[derive(Debug)]
pub(crate) struct SharedDevice<T> {
    virtio: Virtio<T>,
    failed: AtomicU8,
}

impl<T: Transport> SharedDevice<T> {
    /// Of a device that was told DRIVER_OK.
    pub(crate) fn new(virtio: Virtio<T>) -> Arc<Self> {
        Arc::new(Self { virtio, failed: AtomicU8::new(WORKS) })
    }

    pub(crate) fn virtio(&self) -> &Virtio<T> {
        &self.virtio
    }

    /// The device's error, if there is one.
    pub(crate) fn check(&self) -> Result<(), DriverError> {
        // Relaxed: it orders nothing. Whoever finds it a call later has not harmed the device.
        match self.failed.load(Ordering::Relaxed) {
            WORKS => Ok(()),
            CONFIG_UNSTABLE => Err(DriverError::ConfigUnstable),
            _ => Err(DriverError::NeedsReset),
        }
    }

    /// See [`Virtio::interrupt`]. The error latches for all owners.
    pub(crate) fn interrupt(&self) -> Result<u32, DriverError> {
        self.check()?;
        self.virtio.interrupt().map_err(|error| self.fail(error))
    }

    /// Latches an error of the device, and returns it.
    pub(crate) fn fail(&self, error: DriverError) -> DriverError {
        let failed = if error == DriverError::ConfigUnstable { CONFIG_UNSTABLE } else { NEEDS_RESET };
        // Relaxed: as in `check`.
        self.failed.store(failed, Ordering::Relaxed);
        error
    }
}
