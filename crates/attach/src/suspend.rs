//! Suspends a running device, and resumes it (virtio 1.4, section 3.4).
//!
//! The ioeventfd stays registered all the time, and kicks wait in the notifier. Frames of a network
//! device that wait for room on the host's side are dropped. A queue is lent again only to the back
//! end of [`Builder::lend_to`](crate::Builder::lend_to).
use crate::AttachedDevice;
use crate::control::Control;

impl AttachedDevice {
    /// Carries out a suspension.
    pub(crate) fn suspend(&self, control: &mut Control) {
        control.suspended = true;
        for queue in control.queues.all() {
            if let Err(reason) = control.queues.suspend(queue) {
                self.events.fault(format!("queue {queue} cannot be suspended: {reason}"));
            }
        }
        self.events.transport.lock().suspend_done();
    }

    /// Carries out a resumption, and a refresh that was asked for meanwhile.
    pub(crate) fn resume_from_suspend(&self, control: &mut Control) {
        control.suspended = false;
        for queue in control.queues.all() {
            if let Err(reason) = self.lend_or_resume(control, queue) {
                self.events.fault(format!("queue {queue} cannot be resumed: {reason}"));
            }
        }
        // The transport holds a change back until `resume_done`.
        if std::mem::take(&mut control.refresh)
            && let Err(error) = self.refresh_device(control)
        {
            tracing::warn!(device = self.events.number, "cannot read the host's side again: {error}");
        }
        self.events.transport.lock().resume_done();
    }
}
