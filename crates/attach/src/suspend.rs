//! Suspends a running device, and resumes it (virtio 1.4, section 3.4).
//!
//! ```text
//!  suspend   each queue: taken back from a back end -> off its thread -> what is in flight completed, parked
//!  resume    each queue: resumed where it was, with the same handler -> on the thread that it had -> lent again
//! ```
//! The ioeventfd stays registered all the time, and kicks wait in the notifier. Frames of a network
//! device that wait for room on the host's side are dropped. A queue is lent again only to the back
//! end of [`Builder::lend_to`](crate::Builder::lend_to).
use crate::AttachedDevice;
use crate::device::Control;
use crate::lock::lock;
use crate::placement::Kind;
use crate::queue::Serving;
use paravane_io::{HostQueue, RestingQueue};

impl AttachedDevice {
    /// Carries out a suspension.
    pub(crate) fn suspend(&self, control: &mut Control) {
        control.suspended = true;
        self.each_queue(control, "suspended", Self::suspend_queue);
        lock(&self.events.transport).suspend_done();
    }

    /// Carries out a resumption, and a refresh that was asked for meanwhile.
    pub(crate) fn resume_from_suspend(&self, control: &mut Control) {
        control.suspended = false;
        self.each_queue(control, "resumed", Self::resume_queue);
        // The transport holds a change back until `resume_done`.
        if std::mem::take(&mut control.refresh)
            && let Err(error) = self.refresh_device(control)
        {
            tracing::warn!(device = self.events.number, "cannot read the host's side again: {error}");
        }
        lock(&self.events.transport).resume_done();
    }

    /// Changes each queue. Reports a failure as a fault: the queue "cannot be `done`".
    fn each_queue(
        &self,
        control: &mut Control,
        done: &str,
        change: fn(&Self, &mut Control, u16) -> Result<(), String>,
    ) {
        for queue in 0..control.queues.len() {
            let queue = u16::try_from(queue).unwrap_or(u16::MAX);
            if let Err(reason) = change(self, control, queue) {
                self.events.fault(format!("queue {queue} cannot be {done}: {reason}"));
            }
        }
    }

    fn suspend_queue(&self, control: &mut Control, queue: u16) -> Result<(), String> {
        if matches!(control.queues[usize::from(queue)].serving, Serving::Lent(_)) {
            self.take_back(control, queue).map_err(|error| error.to_string())?;
        }
        let slot = &mut control.queues[usize::from(queue)];
        let placement = &self.settings.placement;
        let taken: Option<Box<HostQueue>> = match (&slot.serving, placement.kind()) {
            (Serving::Thread(index), _) => {
                placement.thread(*index).and_then(|thread| thread.take_off(self.key(queue)))
            }
            (Serving::Inline, Kind::Inline(inline)) => inline.take_off(self.key(queue)),
            _ => return Ok(()),
        };
        slot.serving = Serving::Lost;
        // Its thread has given up a queue that has failed, and said so.
        let Some(taken) = taken else { return Ok(()) };
        slot.serving = Serving::Resting(Box::new(taken.park().map_err(|error| error.to_string())?));
        Ok(())
    }

    fn resume_queue(&self, control: &mut Control, queue: u16) -> Result<(), String> {
        let slot = &mut control.queues[usize::from(queue)];
        let resting: RestingQueue = match std::mem::replace(&mut slot.serving, Serving::Lost) {
            Serving::Resting(resting) => *resting,
            other => {
                slot.serving = other;
                return Ok(());
            }
        };
        let position = resting.position();
        let resumed = resting.resume(position).map_err(|error| error.to_string())?;
        let placement = &self.settings.placement;
        if let Kind::Inline(inline) = placement.kind() {
            inline.put_on(resumed).map_err(|error| error.to_string())?;
            slot.serving = Serving::Inline;
            return Ok(());
        }
        self.put_on(slot, resumed)?;
        self.lend_again(control, queue);
        Ok(())
    }
}
