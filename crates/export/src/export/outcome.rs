//! How far an export has ended, for its owner.
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

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
    fn stage(&self) -> MutexGuard<'_, Stage> {
        // Each change is one assignment.
        self.stage.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The device has been dropped.
    pub(super) fn device_dropped(&self) {
        *self.stage() = Stage::WithoutDevice;
    }

    /// The task has ended.
    pub(super) fn ended(&self) {
        *self.stage() = Stage::Ended;
        self.changed.notify_all();
    }

    /// Whether the device has been dropped.
    pub(super) fn is_device_dropped(&self) -> bool {
        *self.stage() >= Stage::WithoutDevice
    }

    /// Waits until the task has ended.
    pub(super) fn wait(&self) {
        let mut stage = self.stage();
        while *stage < Stage::Ended {
            stage = self.changed.wait(stage).unwrap_or_else(PoisonError::into_inner);
        }
    }
}
