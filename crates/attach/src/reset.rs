//! Resets a device, perhaps after the write that asks for it.
//!
//! ```text
//!   the driver writes 0 to the status
//!     | queues begin to leave their threads, the register reads what it was
//!     |
//!     |  drivers poll (virtio-mmio version 3)
//!     +-----------> the write returns; a thread waits for the queues --.
//!     |                                                                |
//!     '-- they do not: the write waits for the queues ----------------->  device reset, status 0
//! ```
//! A device has at most one such thread: the transport asks for no second reset before the first is
//! done. Meanwhile the queues count as stopped, and the transport refuses what a driver could want of
//! them, so register accesses take [`ControlLock::lock`] as ever and wait for nobody; nor does the host
//! that lends or moves a queue, or looks at its side again. What ends the device or its reset takes
//! [`ControlLock::lock_settled`].
use crate::AttachedDevice;
use crate::control::{Control, ControlLock, Reset};
use crate::events::DeviceEvents;
use paravane_device::LogDevice;
use paravane_io::caught;
use std::mem;
use std::sync::Arc;
use std::thread::Builder;

impl AttachedDevice {
    /// Carries out a reset, which may still be under way when this returns if it `may_last`.
    pub(crate) fn begin_reset(&self, control: &mut Control, may_last: bool) {
        control.suspended = false;
        let stopping = control.queues.begin_stop(control.queues.all());
        if !may_last || stopping.is_empty() {
            stopping.finish(false);
            reset_device(control, &self.events);
            return;
        }
        control.join_resetter();
        control.reset = Reset::Begun(stopping);
        let (lock, events) = (Arc::clone(&self.control), Arc::clone(&self.events));
        let device = LogDevice::current();
        let thread = Builder::new().name(format!("reset {}", events.number)).spawn(move || {
            let _named = LogDevice::enter(device);
            finish_reset(&lock, &events);
        });
        match thread {
            Ok(thread) => control.resetter = Some(thread),
            // The host has no thread for it.
            Err(_) => {
                if let Reset::Begun(stopping) = mem::take(&mut control.reset) {
                    stopping.finish(false);
                }
                reset_device(control, &self.events);
            }
        }
    }
}

/// Carries out the rest of a reset.
fn finish_reset(lock: &ControlLock, events: &DeviceEvents) {
    let begun = mem::replace(&mut lock.lock().reset, Reset::UnderWay);
    let stopped = caught(|| {
        if let Reset::Begun(stopping) = begun {
            stopping.finish(false);
        }
    });
    let mut control = lock.lock();
    let ended = stopped.and_then(|()| caught(|| reset_device(&mut control, events)));
    if let Err(panic) = ended {
        // A queue may still use memory. The driver is not told that it does not.
        events.counters.fault(events.number, format!("the device was not reset: {panic}"));
    }
    lock.end_reset(control);
}

/// Resets the device, now that its queues have stopped.
fn reset_device(control: &mut Control, events: &DeviceEvents) {
    if let Some(device) = &mut control.device {
        device.reset();
    }
    events.transport.lock().reset_done();
}
