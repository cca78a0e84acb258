//! Queues of a session: their configuration, start and stop.
use super::{BATCH_TIMEOUT, HEADROOM, SessionError, VhostSession};
use crate::device_state::state_of;
use crate::memory::ClientRegions;
use crate::message::Handled;
use crate::vring::{Kick, Vring};
use paravane_device::{StartError, State};
use paravane_dma::{Access, headroom};
use paravane_export::SharedStatus;
use paravane_export::notifiers::Relay;
use paravane_io::{
    DeviceThreads, ForeignKicks, Kicks, NotPutOn, QueueEvents, QueueStart, QueueStartError, Retired,
};
use paravane_spec::feature;
use paravane_spec::net::PAIR;
use paravane_spec::packed::{DESC_FLAGS, DESC_SIZE, EVENT_WRAP};
use paravane_spec::queue::{MAX_SIZE, QueueAddresses};
use paravane_spec::split::USED_IDX;
use paravane_spec::vhost_user::{F_PROTOCOL_FEATURES, VringAddr, VringState, protocol_feature};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

impl VhostSession {
    /// Checks the index of a queue.
    pub(super) fn queue(&self, index: u32) -> Result<u16, SessionError> {
        let queue = u16::try_from(index).map_err(|_| SessionError::Queue(index))?;
        if usize::from(queue) < self.vrings.len() { Ok(queue) } else { Err(SessionError::Queue(index)) }
    }

    fn vring(&mut self, index: u32) -> Result<&mut Vring, SessionError> {
        self.vrings.get_mut(index as usize).ok_or(SessionError::Queue(index))
    }

    /// Returns a queue that must be stopped for `request`.
    pub(super) fn stopped_vring(
        &mut self,
        index: u32,
        request: &'static str,
    ) -> Result<&mut Vring, SessionError> {
        let is_live = u16::try_from(index).is_ok_and(|queue| self.queues.is_live(queue));
        let vring = self.vring(index)?;
        if is_live { Err(SessionError::Live { queue: index, request }) } else { Ok(vring) }
    }

    pub(super) fn set_vring_num(&mut self, state: VringState) -> Result<(), SessionError> {
        let VringState { index, num } = state;
        let vring = self.stopped_vring(index, "SET_VRING_NUM")?;
        match u16::try_from(num) {
            Ok(size @ 1..=MAX_SIZE) => vring.size = size,
            _ => return Err(SessionError::Size { queue: index, size: num }),
        }
        Ok(())
    }

    pub(super) fn set_vring_addr(&mut self, addr: VringAddr) -> Result<(), SessionError> {
        let queue = self.queue(addr.index)?;
        let is_live = self.queues.is_live(queue);
        let vring = self.vring(addr.index)?;
        // Whether the ring is logged may change at any time: while a log is on, it always is.
        let areas = |addr: VringAddr| (addr.desc, addr.driver, addr.device);
        if is_live && vring.addr.map(areas) != Some(areas(addr)) {
            return Err(SessionError::Live { queue: addr.index, request: "SET_VRING_ADDR" });
        }
        vring.addr = Some(addr);
        self.start_if_complete(queue)
    }

    pub(super) fn set_vring_kick(&mut self, (index, fd): (u8, Option<OwnedFd>)) -> Result<(), SessionError> {
        let queue = self.queue(index.into())?;
        let kick = match fd {
            Some(fd) => Kick::Fd(fd),
            None => Kick::Poll,
        };
        let kicks = self.kicks(&kick)?;
        self.vrings[usize::from(queue)].kick = Some(kick);
        // A live queue continues, with kicks from the new descriptor.
        match self.queues.change(queue, |host_queue| host_queue.kick_by(kicks)) {
            Ok(true) => Ok(()),
            Ok(false) => self.start_if_complete(queue),
            Err(refused) => Err(self.refused(queue, refused)),
        }
    }

    pub(super) fn set_vring_enable(&mut self, state: VringState) -> Result<(), SessionError> {
        let queue = self.queue(state.index)?;
        self.vring(state.index)?.enabled = match state.num {
            0 => false,
            1 => true,
            value => return Err(SessionError::Enable { queue: state.index, value }),
        };
        self.shared_status.write().queues[usize::from(queue)].enabled = state.num == 1;
        self.tell_enabled();
        if state.num == 0 && self.needs_enable() {
            self.stop(queue);
        }
        self.start_if_complete(queue)
    }

    /// Tells the device how many queues are enabled.
    pub(super) fn tell_enabled(&mut self) {
        let enabled = self.vrings.iter().take_while(|vring| vring.enabled).count();
        self.device.enable_queues(enabled as u16);
    }

    pub(super) fn get_vring_base(&mut self, state: VringState) -> Result<Handled, SessionError> {
        let VringState { index, .. } = state;
        let queue = self.queue(index)?;
        self.stop(queue);
        self.shared_status.notifiers.set_failure(queue, None);
        let vring = self.vring(index)?;
        // A new kick descriptor starts it again.
        vring.kick = None;
        let num = vring.base;
        if self.is_idle() {
            self.forget_translations();
        }
        Ok(Handled::reply(&VringState { index, num }))
    }

    /// Stops and disables all queues (RESET_OWNER).
    pub(super) fn disable_all(&mut self) {
        for queue in 0..self.vrings.len() as u16 {
            self.stop(queue);
            let vring = &mut self.vrings[usize::from(queue)];
            vring.enabled = false;
            vring.kick = None;
            self.shared_status.write().queues[usize::from(queue)].enabled = false;
        }
    }

    /// Whether queues need SET_VRING_ENABLE, which only exists with protocol features.
    pub(super) fn needs_enable(&self) -> bool {
        self.features.has(F_PROTOCOL_FEATURES)
    }

    /// Changes the client's memory.
    ///
    /// Queues whose rings move or lose their memory are stopped first. Queues whose rings gain
    /// memory are started.
    pub(super) fn change_memory(&mut self, regions: ClientRegions) -> Result<(), SessionError> {
        let translated = self.translations.is_some();
        self.keep_translations(&regions);
        for queue in 0..self.vrings.len() as u16 {
            let vring = &self.vrings[usize::from(queue)];
            let moves = !translated
                && ring_placement(vring, &regions) != ring_placement(vring, self.memory.regions());
            if moves && self.queues.is_live(queue) {
                self.stop(queue);
            }
        }
        self.memory.publish(regions)?;
        for queue in 0..self.vrings.len() as u16 {
            // A queue whose ring is in no region waits for more memory.
            if translated || ring_placement(&self.vrings[usize::from(queue)], self.memory.regions()).is_some()
            {
                self.start_if_complete(queue)?;
            }
        }
        self.look_again();
        if let Err(busy) = self.memory.memory().synchronize(BATCH_TIMEOUT) {
            tracing::warn!("memory that the client removed may still be in use: {busy}");
        }
        Ok(())
    }

    pub(super) fn start_if_complete(&mut self, queue: u16) -> Result<(), SessionError> {
        let vring = &self.vrings[usize::from(queue)];
        if self.is_held
            || self.queues.is_live(queue)
            || !vring.is_complete(self.needs_enable())
            || self.shared_status.notifiers.failure(queue).is_some()
        {
            return Ok(());
        }
        self.start(queue)
    }

    fn start(&mut self, queue: u16) -> Result<(), SessionError> {
        let index = u32::from(queue);
        let features = self.features.of_driver();
        // Its rings and requests are in the byte order of the guest, which is taken for that of the
        // host; all else is as in virtio 1.0.
        if features & feature::VERSION_1 == 0 && cfg!(target_endian = "big") {
            return Err(SessionError::Legacy(index));
        }
        let vring = &self.vrings[usize::from(queue)];
        let (Some(addr), Some(kick)) = (vring.addr, &vring.kick) else { return Ok(()) };
        headroom(HEADROOM)
            .map_err(|source| SessionError::OutOfMemory { what: format!("queue {queue}"), source })?;
        let kicks = self.kicks(kick)?;
        let addresses = self.addresses(index, vring.size, addr)?;
        let max = self.device.queue_sizes()[usize::from(queue)];
        if !self.translates_ring(addresses, max, features) {
            // The translations start it when they arrive.
            return Ok(());
        }
        let (start, state, is_new) = self.begin(queue, addresses, features)?;
        self.warn_of_short_queue(index, vring.size, features);
        let events: Arc<dyn QueueEvents> =
            Arc::<paravane_export::notifiers::ClientNotifiers>::clone(&self.shared_status.notifiers);
        let host_queue = match (start.build(&mut *self.device, kicks, events), &self.translations) {
            (Ok(host_queue), _) => host_queue,
            (Err(QueueStartError::Ring(error @ StartError::Memory { .. })), Some(_)) => {
                self.refuse_ring(queue, &error);
                return Ok(());
            }
            (Err(QueueStartError::Ring(source)), _) => {
                return Err(SessionError::Start { queue: index, source });
            }
            (Err(QueueStartError::Handler(source)), _) => {
                return Err(SessionError::Handler { queue: index, source });
            }
            (Err(_), _) => return Err(SessionError::Queue(index)),
        };
        self.vrings[usize::from(queue)].is_tracked = true;
        self.queues.start(host_queue).map_err(|refused| self.refused(queue, refused))?;
        self.restore_pairs(queue, is_new);
        // Buffers used before this start may have caused no interrupt: an earlier server may have
        // died between the two.
        self.interrupt(queue);
        tracing::debug!(queue, ?addresses, ?state, "queue started");
        self.publish_status(queue, &self.vrings[usize::from(queue)]);
        Ok(())
    }

    /// A queue with its memory and its position, which is returned, and whether nothing has passed it yet.
    fn begin(
        &self,
        queue: u16,
        addresses: QueueAddresses,
        features: u64,
    ) -> Result<(QueueStart, State, bool), SessionError> {
        let vring = &self.vrings[usize::from(queue)];
        let handle = match &self.translations {
            Some(translations) => translations.handle(),
            None => self.memory.memory().handle(),
        };
        let mut handle = handle.named(format!("queue {queue}"));
        // An IOVA can be any number. A ring that wraps is refused when the queue is built.
        let last = (u64::from(addresses.size) - 1) * DESC_SIZE as u64 + DESC_FLAGS as u64;
        let last = addresses.desc.checked_add(last);
        let used_idx = addresses.device.checked_add(USED_IDX as u64);
        // So is missing memory.
        let guard = handle.enter();
        let word = |at: Option<u64>| {
            at.and_then(|at| guard.read_obj(at, Access::RELAXED).ok()).map_or(0, u16::from_le)
        };
        // With IN_ORDER the ring itself says what is in flight: everything from its used position
        // on.
        let is_tracked = features & feature::IN_ORDER == 0;
        let inflight = self.inflight.as_ref().filter(|_| is_tracked);
        // Of ours, which counts only from the second start on: then it has the position.
        let own = self.own_inflight.as_ref().filter(|_| is_tracked && inflight.is_none());
        let state = vring
            .position(features, || word(last), inflight.is_none().then_some(|| word(used_idx)))
            .map_err(|source| SessionError::Position { queue: queue.into(), source })?;
        drop(guard);
        // The position that counts is then in a region.
        let is_recovered = inflight.is_some() || vring.is_tracked && own.is_some();
        let mut start = QueueStart::new(self.queues.threads().key(queue), addresses, features, handle)
            .counted_by(Arc::clone(&self.shared_status.work[usize::from(queue)]))
            .cut_by(Arc::clone(&self.shared_status.cut));
        start = match inflight.or(own) {
            Some(inflight) => {
                let is_packed = features & feature::RING_PACKED != 0;
                start.tracked(state, inflight.memory.mapping(queue, addresses.size, is_packed)?)
            }
            None => start.at(state),
        };
        if let Some(translations) = &self.translations {
            start = start.behind(translations.invalidation_lock());
        }
        Ok((start, state, !is_recovered && is_first_position(state)))
    }

    /// Sets the number of queue pairs that the driver set before it paused, or moved here.
    ///
    /// The control queue tells a driver that continues from a new one, which starts with one pair.
    fn restore_pairs(&mut self, queue: u16, is_new: bool) {
        let is_control = usize::from(queue) + 1 == self.vrings.len() && queue.is_multiple_of(PAIR);
        if is_control {
            let paused = std::mem::take(&mut self.paused_pairs);
            match is_new {
                true => self.device.restore_state(&[]),
                false if paused > 0 => self.device.restore_state(&state_of(paused)),
                false => {}
            }
        }
    }

    /// Warns the operator: the driver cannot know that its queue is too short.
    fn warn_of_short_queue(&self, queue: u32, size: u16, features: u64) {
        let needed = self.device.longest_chain();
        if size < needed && features & feature::INDIRECT_DESC == 0 {
            tracing::warn!(
                queue,
                size,
                needed,
                "queue is shorter than the longest request, and indirect descriptors are off: the guest's I/O can hang; \
                 give the VMM's queues {needed} descriptors, or start with --queue-size {size}"
            );
        }
    }

    /// Ring addresses as the device uses them: guest-physical or IOVA.
    fn addresses(&self, queue: u32, size: u16, addr: VringAddr) -> Result<QueueAddresses, SessionError> {
        if self.translations.is_some() {
            let VringAddr { desc, driver, device, .. } = addr;
            return Ok(QueueAddresses { size, desc, driver, device });
        }
        let find = |user| {
            let regions = self.memory.regions();
            match regions.find(user) {
                Some((gpa, _)) => Ok(gpa),
                None if regions.iter().next().is_none() => Err(SessionError::NothingShared { queue }),
                None => Err(SessionError::NoMemory { queue, addr: user }),
            }
        };
        let (desc, driver, device) = (find(addr.desc)?, find(addr.driver)?, find(addr.device)?);
        Ok(QueueAddresses { size, desc, driver, device })
    }

    /// Duplicates the kick descriptor for an I/O thread.
    fn kicks(&self, kick: &Kick) -> Result<Kicks, SessionError> {
        let refused = |source| SessionError::Fd { request: "SET_VRING_KICK", source };
        let fd = match kick {
            Kick::Fd(fd) => fd.as_fd(),
            Kick::Poll => self.ticker.as_fd(),
        };
        let fd = fd.try_clone_to_owned().map_err(refused)?;
        Ok(Kicks::Foreign(ForeignKicks::new(fd).map_err(refused)?))
    }

    /// Signals the client from an I/O thread: this thread must never block on it.
    pub(super) fn relay(&self, queue: u16) -> Arc<dyn QueueEvents> {
        relay(&self.shared_status, self.queues.threads(), queue)
    }

    /// Interrupts the driver, perhaps once too often.
    pub(super) fn interrupt(&self, queue: u16) {
        self.relay(queue).used_buffer(queue);
        self.queues.threads().finish_tasks(queue);
    }

    /// Ends a queue that no thread takes.
    fn refused(&self, queue: u16, NotPutOn { queue: unserved, source }: NotPutOn) -> SessionError {
        // Nothing of the queue is in flight: it has not started, or everything is completed.
        if let Some(mut unserved) = unserved {
            unserved.tell(self.relay(queue));
            unserved.stop(true);
        }
        SessionError::Handler { queue: queue.into(), source }
    }

    /// Stops a queue, and keeps its position.
    ///
    /// Completes what is in flight; with GET_VRING_BASE_INFLIGHT, leaves it to the in-flight region.
    /// QEMU stops a queue by SET_STATUS or SET_VRING_ENABLE before it sends GET_VRING_BASE, so every
    /// stop leaves it. If the queue starts again, here or elsewhere, it comes first.
    pub(super) fn stop(&mut self, queue: u16) {
        let leave =
            self.inflight.is_some() && self.features.has_protocol(protocol_feature::GET_VRING_BASE_INFLIGHT);
        self.retire(queue..queue + 1, leave);
        self.publish_status(queue, &self.vrings[usize::from(queue)]);
    }

    /// Stops all queues.
    ///
    /// All leave their threads before the first is drained, so that none runs on meanwhile.
    ///
    /// Returns the queues whose position is not known: those that have failed.
    pub(super) fn stop_every(&mut self) -> Vec<u16> {
        self.retire(self.queues.all(), false)
    }

    /// Stops queues, and keeps their positions. Returns those whose position is not known.
    fn retire(&mut self, queues: std::ops::Range<u16>, leave: bool) -> Vec<u16> {
        // Misses that were not reported occur again when the queue continues.
        self.back_channel.forget();
        let (status, threads) = (&self.shared_status, Arc::clone(self.queues.threads()));
        let mut unknown = Vec::new();
        for Retired { queue, position, in_flight } in
            self.queues.retire(queues, leave, |queue| relay(status, &threads, queue))
        {
            match position {
                Some(position) => self.vrings[usize::from(queue)].base = position.vring_base(),
                None => unknown.push(queue),
            }
            if in_flight > 0 {
                tracing::info!(queue, in_flight, "queue stopped; its next server does what is in flight");
            }
            threads.finish_tasks(queue);
            self.publish_status(queue, &self.vrings[usize::from(queue)]);
        }
        unknown
    }

    pub(super) fn publish_status(&self, queue: u16, vring: &Vring) {
        if let Some(shown) = self.shared_status.write().queues.get_mut(usize::from(queue)) {
            shown.live = self.queues.is_live(queue);
            shown.enabled = vring.enabled;
            shown.size = vring.size;
            shown.position = vring.base;
        }
    }
}

/// See [`VhostSession::relay`].
fn relay(status: &SharedStatus, threads: &DeviceThreads, queue: u16) -> Arc<dyn QueueEvents> {
    Arc::new(Relay { notifiers: Arc::clone(&status.notifiers), tasks: threads.tasks(queue) })
}

/// Whether nothing has passed the queue yet.
fn is_first_position(state: State) -> bool {
    let first = [State::Split { avail: 0 }, State::Packed { avail: EVENT_WRAP, used: EVENT_WRAP }];
    first.contains(&state)
}

/// Guest-physical addresses of a ring's areas, and the mappings that hold them.
fn ring_placement(vring: &Vring, regions: &ClientRegions) -> Option<[(u64, usize); 3]> {
    let addr = vring.addr?;
    let placement = |user| {
        let (gpa, region) = regions.find(user)?;
        Some((gpa, Arc::as_ptr(region).addr()))
    };
    Some([placement(addr.desc)?, placement(addr.driver)?, placement(addr.device)?])
}
