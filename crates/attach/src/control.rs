//! The control path of a device, behind its lock.
use crate::queue::Queue;
use paravane_device::Device;
use paravane_io::{QueueSet, StoppingQueues};
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;

/// What one register access at a time may touch.
pub(crate) struct Control {
    /// `None`: stopped.
    pub(crate) device: Option<Box<dyn Device>>,
    pub(crate) queues: QueueSet,
    pub(crate) slots: Vec<Queue>,
    /// The driver has suspended the device.
    pub(crate) suspended: bool,
    /// The host's side is to be looked at when the device is resumed.
    pub(crate) refresh: bool,
    /// Whether a thread carries out a reset.
    pub(crate) reset: Reset,
    /// The thread of the last reset.
    pub(crate) resetter: Option<JoinHandle<()>>,
}

/// A reset that a thread carries out.
#[derive(Default)]
pub(crate) enum Reset {
    #[default]
    None,
    /// For the thread that has been started.
    Begun(StoppingQueues),
    /// The thread waits for the queues.
    UnderWay,
}

impl Control {
    pub(crate) fn new(device: Box<dyn Device>, queues: QueueSet) -> Self {
        Self {
            slots: queues.all().map(|_| Queue::default()).collect(),
            device: Some(device),
            queues,
            suspended: false,
            refresh: false,
            reset: Reset::None,
            resetter: None,
        }
    }

    /// Waits for the thread of the last reset, which has nothing left to do.
    pub(crate) fn join_resetter(&mut self) {
        if let Some(thread) = self.resetter.take() {
            // It catches panics.
            let _ = thread.join();
        }
    }
}

/// The control path of a device, behind its lock.
pub(crate) struct ControlLock {
    control: Mutex<Control>,
    /// A reset has ended.
    ended: Condvar,
}

impl ControlLock {
    pub(crate) fn new(control: Control) -> Self {
        Self { control: Mutex::new(control), ended: Condvar::new() }
    }

    /// Locks the control path. A reset may be under way.
    pub(crate) fn lock(&self) -> MutexGuard<'_, Control> {
        self.control.lock()
    }

    /// Locks the control path when no reset is under way.
    pub(crate) fn lock_settled(&self) -> MutexGuard<'_, Control> {
        let mut control = self.control.lock();
        self.ended.wait_while(&mut control, |control| !matches!(control.reset, Reset::None));
        control.join_resetter();
        control
    }

    /// Ends the reset that a thread has carried out.
    pub(crate) fn end_reset(&self, mut control: MutexGuard<'_, Control>) {
        control.reset = Reset::None;
        self.ended.notify_all();
    }
}
