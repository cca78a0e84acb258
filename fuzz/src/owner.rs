//! The owner of a device behind a transport, for targets that fuzz a transport.
//!
//! It carries out effects, at once or at a later step, and checks that the transport requests only
//! what it may.
use paravane_spec::queue::QueueAddresses;
use paravane_spec::{feature, mmio, status};
use paravane_transport::{Effect, Transport};
use std::collections::BTreeMap;

pub(crate) struct Owner {
    pub(crate) offered: u64,
    queue_sizes: Vec<u16>,
    /// Whether it carries out effects before the access returns, or at a later step.
    pub(crate) prompt: bool,
    /// Features of the active device.
    active: Option<u64>,
    /// Running queues, with the addresses of their start.
    pub(crate) running: BTreeMap<u16, QueueAddresses>,
    /// Queues being stopped, with the addresses of their start.
    stopping: BTreeMap<u16, QueueAddresses>,
    resetting: bool,
    needs_reset: bool,
}

impl Owner {
    pub(crate) fn new(offered: u64, queue_sizes: Vec<u16>, prompt: bool) -> Self {
        Self {
            offered,
            queue_sizes,
            prompt,
            active: None,
            running: BTreeMap::new(),
            stopping: BTreeMap::new(),
            resetting: false,
            needs_reset: false,
        }
    }

    /// Carries out `effect`; its access changed the status from `before` to `after`.
    ///
    /// Returns whether the device has been reset.
    pub(crate) fn carry_out(
        &mut self,
        transport: &mut dyn Transport,
        before: u32,
        after: u32,
        effect: Effect,
    ) -> bool {
        if let Effect::Move { .. } = effect {
            return false;
        }
        assert!(!self.resetting, "{effect:?} while a reset is under way");
        let live = self.active.is_some() && self.serves(before);
        match effect {
            Effect::Activate { features, queues } => {
                assert_eq!(self.active, None, "activated twice");
                assert!(
                    !self.needs_reset && before & status::DRIVER_OK == 0 && before & status::FEATURES_OK != 0
                );
                assert!(features & !self.offered == 0 && features & feature::VERSION_1 != 0);
                self.active = Some(features);
                for (queue, addresses) in queues {
                    self.start(queue, addresses);
                }
            }
            Effect::StartQueue { features, queue, addresses } => {
                assert!(live);
                assert_eq!(self.active, Some(features), "the features have changed");
                self.start(queue, addresses);
            }
            Effect::ResetQueue { queue } => {
                assert!(self.active.is_some() && before & status::FAILED == 0);
                let addresses = self.running.remove(&queue).expect("only a running queue is stopped");
                if self.prompt {
                    transport.queue_reset_done(queue);
                } else {
                    assert_eq!(self.stopping.insert(queue, addresses), None);
                }
            }
            Effect::Reset => {
                assert_ne!(before, 0);
                self.resetting = true;
                assert_eq!(after, before, "status changed before the reset was done");
                if self.prompt {
                    transport.reset_done();
                    return self.reset_is_done();
                }
            }
            Effect::Suspend | Effect::Resume => panic!("SUSPEND was not offered"),
            Effect::Notify { queue } => {
                assert!(live && self.running.contains_key(&queue), "a kick of queue {queue}");
            }
            Effect::WriteConfig { offset, data } => {
                assert!(before & status::FEATURES_OK != 0 && before & status::FAILED == 0);
                assert!(matches!(data.len(), 1 | 2 | 4 | 8));
                assert!(u64::from(offset) + data.len() as u64 <= mmio::WINDOW - mmio::CONFIG);
            }
            Effect::Move { .. } => {}
        }
        false
    }

    fn start(&mut self, queue: u16, addresses: QueueAddresses) {
        let max = self.queue_sizes.get(usize::from(queue)).copied().expect("the queue exists");
        assert!(addresses.size.is_power_of_two() && addresses.size <= max);
        assert!(!self.stopping.contains_key(&queue), "started before it was stopped");
        assert_eq!(self.running.insert(queue, addresses), None, "queue {queue} was started twice");
    }

    /// Reports an effect as done, requested or not.
    ///
    /// Returns whether the device has been reset.
    pub(crate) fn finish(&mut self, transport: &mut dyn Transport, which: u8) -> bool {
        if which & 1 == 0 {
            transport.reset_done();
            return self.reset_is_done();
        }
        let queue = u16::from(which >> 1) % 8;
        transport.queue_reset_done(queue);
        self.stopping.remove(&queue);
        false
    }

    fn reset_is_done(&mut self) -> bool {
        let was = std::mem::take(&mut self.resetting);
        if was {
            self.active = None;
            self.needs_reset = false;
            self.running.clear();
            self.stopping.clear();
        }
        was
    }

    /// Records that the device needs a reset; `now` is the status.
    pub(crate) fn needs_reset(&mut self, now: u32) {
        self.needs_reset |= now != 0 && !self.resetting;
    }

    /// Whether a device with status `now` serves its queues.
    pub(crate) fn serves(&self, now: u32) -> bool {
        !self.resetting && !self.needs_reset && now & status::FAILED == 0
    }

    /// Checks the invariants of the status.
    pub(crate) fn check_status(&self, now: u32) {
        let bits = [status::ACKNOWLEDGE, status::DRIVER, status::FEATURES_OK, status::DRIVER_OK];
        let legal = bits.iter().fold(status::DEVICE_NEEDS_RESET | status::FAILED, |all, bit| all | bit);
        assert_eq!(now & !legal, 0, "status {now:#x}");
        for pair in bits.windows(2) {
            assert!(now & pair[1] == 0 || now & pair[0] != 0, "status {now:#x}");
        }
        assert_eq!(now & status::DEVICE_NEEDS_RESET != 0, self.needs_reset);
        if self.active.is_some() {
            assert_ne!(now & status::DRIVER_OK, 0);
        }
    }
}
