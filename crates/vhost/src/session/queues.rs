//! Queues of a session: their configuration, start and stop.
use super::{BATCH_TIMEOUT, HEADROOM, SessionError, VhostSession};
use crate::memory::ClientRegions;
use crate::message::Reply;
use crate::vring::{Kick, Stage, Vring};
use paravane_device::{StartError, State};
use paravane_dma::{Access, headroom};
use paravane_export::notifiers::Relay;
use paravane_io::{
    ForeignKicks, HostQueue, Kicks, NotPutOn, QueueEvents, QueueKey, QueueStart, QueueStartError,
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
        let vring = self.vring(index)?;
        if vring.is_live() { Err(SessionError::Live { queue: index, request }) } else { Ok(vring) }
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
        let vring = self.vring(addr.index)?;
        // Whether the ring is logged may change at any time: while a log is on, it always is.
        let areas = |addr: VringAddr| (addr.desc, addr.driver, addr.device);
        if vring.is_live() && vring.addr.map(areas) != Some(areas(addr)) {
            return Err(SessionError::Live { queue: addr.index, request: "SET_VRING_ADDR" });
        }
        vring.addr = Some(addr);
        self.start_if_complete(queue)
    }

    pub(super) fn set_vring_kick(&mut self, index: u8, fd: Option<OwnedFd>) -> Result<(), SessionError> {
        let queue = self.queue(index.into())?;
        let kick = match fd {
            Some(fd) => Kick::Fd(fd),
            None => Kick::Poll,
        };
        let kicks = self.kicks(&kick)?;
        self.vrings[usize::from(queue)].kick = Some(kick);
        let Some(mut host_queue) = self.take_off(queue) else {
            return self.start_if_complete(queue);
        };
        // The queue continues, with kicks from the new descriptor.
        host_queue.kick_by(kicks);
        self.put_on(queue, host_queue)
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

    /// Tells a network device how many queues are enabled.
    pub(super) fn tell_enabled(&mut self) {
        let enabled = self.vrings.iter().take_while(|vring| vring.enabled).count();
        if let Some(net) = self.device.net() {
            net.enable_queues(enabled as u16);
        }
    }

    pub(super) fn get_vring_base(&mut self, index: u32) -> Result<Option<Reply>, SessionError> {
        let queue = self.queue(index)?;
        self.stop(queue);
        self.shared_status.notifiers.forget_failure(queue);
        let vring = self.vring(index)?;
        // A new kick descriptor starts it again.
        vring.kick = None;
        let num = vring.base;
        if self.is_idle() {
            self.forget_translations();
        }
        Ok(Some(Reply::Vring(VringState { index, num })))
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
            if vring.is_live() && moves {
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
            || vring.is_live()
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
        let handle = match &self.translations {
            Some(translations) => translations.handle(),
            None => self.memory.memory().handle(),
        };
        let mut handle = handle.named(format!("queue {queue}"));
        // An IOVA can be any number. A ring that wraps is refused below.
        let last = (u64::from(vring.size) - 1) * DESC_SIZE as u64 + DESC_FLAGS as u64;
        let last = addresses.desc.checked_add(last);
        let used_idx = addresses.device.checked_add(USED_IDX as u64);
        // Missing memory is refused below.
        let guard = handle.enter();
        let word = |at: Option<u64>| {
            at.and_then(|at| guard.read_obj(at, Access::RELAXED).ok()).map_or(0, u16::from_le)
        };
        // With IN_ORDER the ring itself says what is in flight: everything from its used position
        // on.
        let inflight = self.inflight.as_ref().filter(|_| features & feature::IN_ORDER == 0);
        // Of ours, which counts only from the second start on: then it has the position.
        let own =
            self.own_inflight.as_ref().filter(|_| inflight.is_none() && features & feature::IN_ORDER == 0);
        let state = vring
            .position(features, || word(last), inflight.is_none().then_some(|| word(used_idx)))
            .map_err(|source| SessionError::Position { queue: index, source })?;
        drop(guard);
        // The position that counts is then in a region.
        let is_recovered = inflight.is_some() || vring.is_tracked && own.is_some();
        let is_new = !is_recovered && is_first_position(state);
        self.warn_of_short_queue(index, vring.size, features);
        let mut start = QueueStart::new(self.key(queue), addresses, features, handle)
            .counted_by(Arc::clone(&self.shared_status.work[usize::from(queue)]))
            .cut_by(Arc::clone(&self.shared_status.cut));
        start = match inflight.or(own) {
            Some(inflight) => {
                let tracking =
                    inflight.region(queue, addresses.size, features & feature::RING_PACKED != 0)?;
                start.tracked(state, tracking)
            }
            None => start.at(state),
        };
        if let Some(translations) = &self.translations {
            start = start.behind(translations.invalidation_lock());
        }
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
        self.put_on(queue, host_queue)?;
        self.vrings[usize::from(queue)].stage = Stage::Live(addresses);
        self.restore_pairs(queue, is_new);
        // Buffers used before this start may have caused no interrupt: an earlier server may have
        // died between the two.
        self.interrupt(queue);
        tracing::debug!(queue, ?addresses, ?state, "queue started");
        self.publish_status(queue, &self.vrings[usize::from(queue)]);
        Ok(())
    }

    /// Sets the number of queue pairs that the driver set before it paused, or moved here.
    ///
    /// The control queue tells a driver that continues from a new one, which starts with one pair.
    fn restore_pairs(&mut self, queue: u16, is_new: bool) {
        let is_control = usize::from(queue) + 1 == self.vrings.len() && queue.is_multiple_of(PAIR);
        if let Some(net) = self.device.net()
            && is_control
        {
            let paused = std::mem::take(&mut self.paused_pairs);
            match is_new {
                true => net.restore_pairs(0),
                false if paused > 0 => net.restore_pairs(paused),
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
        Arc::new(Relay {
            notifiers: Arc::clone(&self.shared_status.notifiers),
            tasks: self.threads.tasks(queue),
        })
    }

    /// Interrupts the driver, perhaps once too often.
    pub(super) fn interrupt(&self, queue: u16) {
        self.relay(queue).used_buffer(queue);
        self.threads.finish_tasks(queue);
    }

    fn key(&self, queue: u16) -> QueueKey {
        self.threads.key(queue)
    }

    fn put_on(&self, queue: u16, host_queue: Box<HostQueue>) -> Result<(), SessionError> {
        self.threads.put_on(host_queue).map_err(|NotPutOn { queue: unserved, source }| {
            // Nothing of the queue is in flight: it has not started, or everything is completed.
            if let Some(mut unserved) = unserved {
                unserved.tell(self.relay(queue));
                unserved.stop(true);
            }
            SessionError::Handler { queue: queue.into(), source }
        })
    }

    /// Takes a queue off its thread. `None` if it is not live or has failed.
    fn take_off(&self, queue: u16) -> Option<Box<HostQueue>> {
        if !self.vrings[usize::from(queue)].is_live() {
            return None;
        }
        self.threads.take_off(self.key(queue))
    }

    /// Stops a queue, and keeps its position.
    ///
    /// Completes what is in flight; with GET_VRING_BASE_INFLIGHT, leaves it to the in-flight region.
    pub(super) fn stop(&mut self, queue: u16) {
        // Misses that were not reported occur again when the queue continues.
        self.back_channel.forget();
        if let Some(host_queue) = self.take_off(queue) {
            let leave = self.inflight.is_some()
                && self.features.has_protocol(protocol_feature::GET_VRING_BASE_INFLIGHT);
            self.put_away(queue, host_queue, leave);
        }
        self.set_stopped(queue);
    }

    /// Stops all queues.
    ///
    /// All leave their threads before the first is drained, so that none runs on meanwhile.
    ///
    /// Returns the queues whose position is not known: those that have failed.
    pub(super) fn stop_every(&mut self) -> Vec<u16> {
        let mut unknown = Vec::new();
        self.back_channel.forget();
        let live = (0..).zip(&self.vrings).filter(|(_, vring)| vring.is_live());
        let taking_off: Vec<_> =
            live.map(|(queue, _)| (queue, self.threads.begin_take_off(self.key(queue)))).collect();
        for (queue, taking_off) in taking_off {
            let taken = taking_off.and_then(|leaving| self.threads.taken_off(leaving));
            if !taken.is_some_and(|host_queue| self.put_away(queue, host_queue, false)) {
                unknown.push(queue);
            }
            self.set_stopped(queue);
        }
        unknown
    }

    /// Ends a queue that has left its thread, and keeps its position.
    ///
    /// With `leave`, requests in flight stay in the tracking region; else they are completed. QEMU
    /// stops a queue by SET_STATUS or SET_VRING_ENABLE before it sends GET_VRING_BASE, so every stop
    /// leaves them. If the queue starts again, here or elsewhere, they come first.
    ///
    /// Returns whether the position is known.
    fn put_away(&mut self, queue: u16, mut host_queue: Box<HostQueue>, leave: bool) -> bool {
        host_queue.tell(self.relay(queue));
        let ended = match leave {
            true => host_queue.leave(),
            false => host_queue.park().map(|resting| (resting.position(), 0)),
        };
        let is_known = ended.is_ok();
        match ended {
            Ok((position, in_flight)) => {
                self.vrings[usize::from(queue)].base = position.vring_base();
                if in_flight > 0 {
                    tracing::info!(queue, in_flight, "queue stopped; its next server does what is in flight");
                }
            }
            Err(error) => tracing::warn!(queue, "cannot save the queue's position: {error}"),
        }
        self.threads.finish_tasks(queue);
        is_known
    }

    /// Stops a queue whose driver has been reset.
    pub(super) fn abandon(&mut self, queue: u16) {
        if let Some(host_queue) = self.take_off(queue) {
            host_queue.stop(false);
        }
        self.set_stopped(queue);
    }

    fn set_stopped(&mut self, queue: u16) {
        self.vrings[usize::from(queue)].stage = Stage::Stopped;
        self.publish_status(queue, &self.vrings[usize::from(queue)]);
    }

    pub(super) fn publish_status(&self, queue: u16, vring: &Vring) {
        if let Some(shown) = self.shared_status.write().queues.get_mut(usize::from(queue)) {
            shown.live = vring.is_live();
            shown.enabled = vring.enabled;
            shown.size = vring.size;
            shown.position = vring.base;
        }
    }
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
