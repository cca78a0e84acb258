//! State of a device in every register layout: status, features, queues.
//!
//! The front page of the crate draws the states and lists the rules.
mod features;
mod queue;
mod status;

use crate::saved::{Reader, RestoreError, possible, same};
use crate::violation::Violation;
use crate::{DeviceDescription, Effect, Restored};
use features::Features;
use paravane_notify::Interrupts;
use paravane_spec::feature;
use queue::QueueRegisters;
use status::{Status, StatusWrite};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// State of one device.
#[derive(Debug)]
pub struct DeviceState {
    pub(crate) interrupts: Arc<Interrupts>,
    pub(crate) status: Status,
    pub(crate) features: Features,
    queues: Vec<QueueRegisters>,
    /// Queue selector, as written: the queue need not exist.
    pub(crate) queue_sel: u32,
    /// Number that changes with the configuration space.
    pub(crate) generation: u32,
    /// The configuration space changed while the device was suspended.
    changed: bool,
    /// A plain statistic, atomic only because reads take `&self`.
    violations: AtomicU64,
}

impl DeviceState {
    /// Makes a device after reset.
    ///
    /// `size_at_reset` is the size that a queue with this maximum has before the driver sets one.
    pub(crate) fn new(
        device: &DeviceDescription,
        interrupts: Arc<Interrupts>,
        size_at_reset: fn(u16) -> u16,
    ) -> Self {
        let queue = |&max: &u16| QueueRegisters::new(max, size_at_reset(max));
        Self {
            interrupts,
            status: Status::default(),
            features: Features::new(device.features),
            queues: device.queue_sizes.iter().map(queue).collect(),
            queue_sel: 0,
            generation: 0,
            changed: false,
            violations: AtomicU64::new(0),
        }
    }

    /// Number of accesses that the specification forbids.
    pub(crate) fn violations(&self) -> u64 {
        self.violations.load(Ordering::Relaxed) // A statistic: orders nothing.
    }

    /// Counts a violation.
    pub(crate) fn violation(&self) {
        self.violations.fetch_add(1, Ordering::Relaxed); // A statistic: orders nothing.
    }

    /// Result of a write for the owner. Counts a violation.
    pub(crate) fn effect(&self, done: Result<Option<Effect>, Violation>) -> Option<Effect> {
        done.unwrap_or_else(|Violation| {
            self.violation();
            None
        })
    }

    /// Writes the device status.
    ///
    /// If it is 0 afterwards, the device has just returned to its defaults.
    pub(crate) fn write_status(&mut self, value: u32) -> Result<Option<Effect>, Violation> {
        let suspendable = self.negotiated(feature::SUSPEND);
        match self.status.write(value, self.features.acceptable(), suspendable)? {
            StatusWrite::Noted => Ok(None),
            StatusWrite::AtReset => {
                self.set_defaults();
                Ok(None)
            }
            StatusWrite::Reset => Ok(Some(Effect::Reset)),
            StatusWrite::Suspend => Ok(Some(Effect::Suspend)),
            StatusWrite::Resume => Ok(Some(Effect::Resume)),
            StatusWrite::Activate => {
                let queues =
                    (0..=u16::MAX).zip(&mut self.queues).filter_map(|(index, q)| Some((index, q.go_live()?)));
                Ok(Some(Effect::Activate { features: self.features.accepted, queues: queues.collect() }))
            }
        }
    }

    /// Whether the feature `bit` was negotiated.
    pub(crate) fn negotiated(&self, bit: u64) -> bool {
        self.status.negotiated() && self.features.accepted & bit != 0
    }

    /// Records a change of the configuration space, and interrupts the driver.
    ///
    /// While the device is suspended, nothing changes; the change becomes visible when it is resumed.
    pub(crate) fn config_changed(&mut self) {
        if self.status.suspended() {
            self.changed = true;
            return;
        }
        self.generation = self.generation.wrapping_add(1);
        self.interrupt();
    }

    /// Sets DEVICE_NEEDS_RESET (section 2.1.2), and interrupts the driver.
    ///
    /// Does nothing at reset or during one.
    pub(crate) fn needs_reset(&mut self) {
        if self.status.set_needs_reset() {
            self.interrupt();
        }
    }

    /// Reports a change of the configuration or the status to a driver that runs.
    fn interrupt(&self) {
        if self.status.running() {
            self.interrupts.config_change();
        }
    }

    /// Completes [`Effect::Reset`]. Returns whether one was under way.
    pub(crate) fn reset_done(&mut self) -> bool {
        let resetting = self.status.resetting();
        if resetting {
            self.set_defaults();
        }
        resetting
    }

    /// Completes [`Effect::Resume`]. Reports a change of the configuration space meanwhile.
    pub(crate) fn resume_done(&mut self) {
        if self.status.resume_done() && std::mem::take(&mut self.changed) {
            self.config_changed();
        }
    }

    /// Completes [`Effect::ResetQueue`].
    ///
    /// Returns whether the queue is at its defaults now, not only stopped.
    pub(crate) fn queue_reset_done(&mut self, queue: u16) -> bool {
        self.queues.get_mut(usize::from(queue)).is_some_and(QueueRegisters::stopped)
    }

    /// Number of queues, at most 65535: a driver cannot select more.
    pub(crate) fn queue_count(&self) -> u16 {
        u16::try_from(self.queues.len()).unwrap_or(u16::MAX)
    }

    /// Index of the selected queue, if it exists.
    pub(crate) fn selected_index(&self) -> Option<u16> {
        self.selected()?;
        u16::try_from(self.queue_sel).ok()
    }

    /// Selected queue, if it exists.
    pub(crate) fn selected(&self) -> Option<&QueueRegisters> {
        self.queues.get(usize::from(u16::try_from(self.queue_sel).ok()?))
    }

    /// Selected queue, if the device status permits writes to its registers.
    fn writable_queue(&mut self) -> Result<&mut QueueRegisters, Violation> {
        let index = self.queue_index()?;
        let queue = self.queues.get_mut(usize::from(index)).filter(|q| q.max != 0).ok_or(Violation)?;
        if self.status.queues_writable() { Ok(queue) } else { Err(Violation) }
    }

    /// Selected queue, if its size and areas may be written.
    pub(crate) fn idle_queue(&mut self) -> Result<&mut QueueRegisters, Violation> {
        let queue = self.writable_queue()?;
        if queue.idle() { Ok(queue) } else { Err(Violation) }
    }

    fn queue_index(&self) -> Result<u16, Violation> {
        u16::try_from(self.queue_sel).map_err(|_| Violation)
    }

    /// Enables (1) or disables (0) the selected queue.
    pub(crate) fn enable_queue(&mut self, value: u32) -> Result<Option<Effect>, Violation> {
        let (running, broken) = (self.status.running(), self.status.needs_reset());
        if value == 0 && self.selected().is_some_and(|q| !q.enabled()) {
            // Drivers do so for clean-up after a reset, when no register may be written any more.
            // It reads 0 already.
            return Ok(None);
        }
        let (queue, features) = (self.queue_index()?, self.features.accepted);
        let registers = self.writable_queue()?;
        match value {
            // A device that needs a reset starts nothing; the driver may not have seen that yet.
            1 if broken => Ok(None),
            1 => {
                let started = registers.enable(running, features & feature::RING_PACKED != 0)?;
                Ok(started.map(|addresses| Effect::StartQueue { features, queue, addresses }))
            }
            0 => Ok(registers.disable().then_some(Effect::ResetQueue { queue })),
            _ => Err(Violation),
        }
    }

    /// Resets the selected queue, if `value` is 1.
    pub(crate) fn reset_queue(&mut self, value: u32) -> Result<Option<Effect>, Violation> {
        if value != 1 || !self.negotiated(feature::RING_RESET) {
            return Err(Violation);
        }
        let index = self.queue_index()?;
        let stop = self.writable_queue()?.reset();
        Ok(stop.then_some(Effect::ResetQueue { queue: index }))
    }

    /// Handles a kick of `queue`.
    pub(crate) fn notify(&self, queue: u16) -> Result<Option<Effect>, Violation> {
        let live = self.queues.get(usize::from(queue)).is_some_and(QueueRegisters::live);
        if !live || self.status.failed() || self.status.resetting() || self.status.suspended() {
            return Err(Violation);
        }
        // The driver may kick a device before it notices that it needs a reset; the kick has no
        // effect (section 2.1.1).
        Ok((!self.status.needs_reset()).then_some(Effect::Notify { queue }))
    }

    /// Writes the state.
    pub(crate) fn save(&self, into: &mut Vec<u8>) {
        self.features.save(into);
        into.extend(self.status.bits.to_le_bytes());
        into.push(self.status.is_changing().into());
        into.extend(self.queue_sel.to_le_bytes());
        into.extend(self.generation.to_le_bytes());
        into.push(self.changed.into());
        into.extend(self.violations().to_le_bytes());
        into.extend(self.queue_count().to_le_bytes());
        self.queues.iter().for_each(|queue| queue.save(into));
    }

    /// Takes up a state that was written by [`DeviceState::save`].
    pub(crate) fn restore(&mut self, from: &mut Reader<'_>) -> Result<Restored, RestoreError> {
        self.features.restore(from)?;
        let suspendable = self.features.accepted & feature::SUSPEND != 0;
        self.status = Status::restored(from.u32()?, self.features.acceptable(), suspendable)?;
        possible(!from.flag("status")?, "a change of the status is under way")?;
        self.queue_sel = from.u32()?;
        self.generation = from.u32()?;
        self.changed = from.flag("configuration change")?;
        self.violations = AtomicU64::new(from.u64()?);
        same(from.u16()?, self.queue_count(), "number of queues")?;
        let features = self.features.accepted;
        let packed = features & feature::RING_PACKED != 0;
        let has_started = self.status.running() || self.status.suspended();
        let mut queues = Vec::new();
        for (index, queue) in (0..=u16::MAX).zip(&mut self.queues) {
            let live = queue.restore(from, packed)?;
            possible(!queue.enabled() || self.status.negotiated(), "enabled queue before the negotiation")?;
            possible(live.is_none() || has_started, "live queue of a device that was not started")?;
            queues.extend(live.map(|addresses| (index, addresses)));
        }
        Ok(Restored { features, queues, suspended: self.status.suspended(), window: None })
    }

    /// Completes a reset (section 2.4).
    ///
    /// The generation continues to count: a driver that compares it across a reset must see a
    /// change.
    fn set_defaults(&mut self) {
        self.status = Status::default();
        self.features.reset();
        for queue in &mut self.queues {
            queue.set_defaults();
        }
        self.queue_sel = 0;
        self.changed = false;
    }
}
