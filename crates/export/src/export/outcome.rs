//! How far an export has ended, for its owner.
use parking_lot::{Condvar, Mutex};

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Outcome {
    stage: Mutex<Stage>,
    changed: Condvar,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
enum Stage {
    #[default]
    Runs,
    /// The device has been dropped.
    WithoutDevice,
    /// The task has ended.
    Ended,
}

impl Outcome {
    /// The device has been dropped.
    pub(super) fn device_dropped(&self) {
        *self.stage.lock() = Stage::WithoutDevice;
    }

    /// The task has ended.
    pub(super) fn ended(&self) {
        *self.stage.lock() = Stage::Ended;
        self.changed.notify_all();
    }

    /// Whether the device has been dropped.
    pub(super) fn is_device_dropped(&self) -> bool {
        *self.stage.lock() >= Stage::WithoutDevice
    }

    /// Waits until the task has ended.
    pub(super) fn wait(&self) {
        self.changed.wait_while(&mut self.stage.lock(), |stage| *stage < Stage::Ended);
    }
}
