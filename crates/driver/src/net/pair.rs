//! One pair of queues of a card, with its slots.
use super::{Dropped, HEADER, NOT_IN_USE, NetOptions};
use crate::channel::add;
use crate::latch::Latch;
use crate::shared::SharedDevice;
use crate::slots::Slots;
use crate::{DriverError, Pool, Transport, Virtio};
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::mem::offset_of;
use core::sync::atomic::{AtomicU16, Ordering};
use paravane_ring::driver::poll::Poller;
use paravane_ring::driver::{PollToken, Queue, Used};
use paravane_spec::net::{ETH_HEADER, F_MRG_RXBUF, Header, PAIR, RECEIVE, TRANSMIT};
use paravane_spec::queue;
use zerocopy::IntoBytes;

/// Transmit slots taken back at once.
const RECLAIM: usize = 16;

/// The queues of a pair and their slots.
#[derive(Debug)]
pub(super) struct Pair {
    receive: Queue,
    poller: Poller,
    receive_slots: Slots,
    /// Slots that hold the frame at hand, and the bytes in each.
    gathered: Vec<(u16, usize)>,
    /// How many they will be; 0 while no frame is at hand.
    expected: usize,
    transmit: Queue,
    transmit_slots: Slots,
    /// Transmit slots that are not in flight, as far as is known.
    free: Vec<u16>,
    /// The caller waits for a slot to come back.
    waited_for: bool,
}

impl Pair {
    pub(super) fn start<T: Transport>(
        device: &mut Virtio<T>,
        number: u16,
        options: &NetOptions,
        slot: usize,
        pool: &mut Pool,
    ) -> Result<Self, DriverError> {
        let size = |slots: u16| slots.clamp(1, queue::MAX_SIZE).next_power_of_two();
        let of_pair = number * PAIR;
        let (receive, poller) =
            device.start_polled_queue(of_pair + RECEIVE, size(options.receive_slots), 0, pool)?;
        let transmit = device.start_queue(of_pair + TRANSMIT, size(options.transmit_slots), 0, pool)?;
        let count = |slots: u16, queue: &Queue| slots.max(1).min(queue.size());
        let slots = count(options.receive_slots, &receive);
        let receive_slots = Slots::new(slots, slot, receive.size(), pool)?;
        let free = count(options.transmit_slots, &transmit);
        let transmit_slots = Slots::new(free, HEADER + options.frame, transmit.size(), pool)?;
        let mut pair = Self {
            gathered: Vec::with_capacity(slots.into()),
            expected: 0,
            receive,
            poller,
            receive_slots,
            transmit,
            transmit_slots,
            free: (0..free).rev().collect(),
            waited_for: false,
        };
        for slot in 0..slots {
            pair.offer(slot)?;
        }
        Ok(pair)
    }

    /// Adds a receive slot; the device sees it after the next kick.
    fn offer(&mut self, slot: u16) -> Result<(), DriverError> {
        let segment = self.receive_slots.segment(slot, self.receive_slots.len(slot));
        // There are no more slots than descriptors.
        let id = add(&mut self.receive, &[], &[segment])?.ok_or(DriverError::Queue(RECEIVE))?;
        Ok(self.receive_slots.in_flight.insert(id, slot)?)
    }

    fn send(&mut self, frame: &[u8]) -> Result<bool, DriverError> {
        if self.free.is_empty() {
            self.reclaim()?;
        }
        self.waited_for = true;
        let Some(&slot) = self.free.last() else { return Ok(false) };
        let area = self.transmit_slots.memory[usize::from(slot)].area;
        let written = area.write(0, Header::default().as_bytes()) && area.write(HEADER, frame);
        debug_assert!(written, "a slot holds a header and the largest frame");
        let segment = self.transmit_slots.segment(slot, HEADER + frame.len());
        let Some(id) = add(&mut self.transmit, &[segment], &[])? else { return Ok(false) };
        self.waited_for = false;
        self.free.pop();
        self.transmit_slots.in_flight.insert(id, slot)?;
        Ok(true)
    }

    /// Takes back what the device has sent.
    fn reclaim(&mut self) -> Result<(), DriverError> {
        let mut used = [Used::default(); RECLAIM];
        loop {
            let count = self.transmit.take_used(&mut used)?;
            if count == 0 {
                return Ok(());
            }
            for used in &used[..count] {
                self.free.push(self.transmit_slots.in_flight.remove(used.id)?);
            }
        }
    }

    /// Gathers buffers until a frame is whole; `false` if none is.
    fn gather(&mut self, mergeable: bool, dropped: &mut Dropped) -> Result<bool, DriverError> {
        // What is offered again is not published before the next kick: there are as many turns as
        // slots at most.
        while let Some(used) = self.receive.pop_used()? {
            let slot = self.receive_slots.in_flight.remove(used.id)?;
            let len = used.len as usize;
            if self.expected == 0 {
                if len < HEADER {
                    dropped.runts += 1;
                    self.offer(slot)?;
                    continue;
                }
                self.expected = if mergeable { self.buffers(slot)? } else { 1 };
            }
            self.gathered.push((slot, len));
            if self.gathered.len() == self.expected {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// In how many buffers the frame lies that begins in `slot`, by the device's word.
    fn buffers(&self, slot: u16) -> Result<usize, DriverError> {
        let mut bytes = [0; 2];
        // A slot is longer than a header, so the read cannot fail; if it did, the number would be
        // impossible.
        let memory = &self.receive_slots.memory;
        let _ = memory[usize::from(slot)].area.read(offset_of!(Header, num_buffers), &mut bytes);
        let (buffers, most) = (usize::from(u16::from_le_bytes(bytes)), memory.len());
        if buffers == 0 || buffers > most {
            return Err(DriverError::Buffers { buffers, most });
        }
        Ok(buffers)
    }

    /// Copies the frame at hand into `out`, as far as it fits; offers its slots again.
    fn take(&mut self, out: &mut [u8]) -> Result<usize, DriverError> {
        let mut frame = 0;
        for index in 0..self.gathered.len() {
            let (slot, len) = self.gathered[index];
            let skip = if index == 0 { HEADER } else { 0 };
            let part = len - skip;
            let room = out.len().saturating_sub(frame).min(part);
            if room > 0 {
                let area = self.receive_slots.memory[usize::from(slot)].area;
                let read = area.read(skip, &mut out[frame..frame + room]);
                debug_assert!(read, "the ring has clamped the length to the slot's");
            }
            frame += part;
            self.offer(slot)?;
        }
        self.gathered.clear();
        self.expected = 0;
        Ok(frame)
    }
}

/// One pair of queues of a card: one to receive on, one to send on.
///
/// It has its own rings, slots and interrupts, so each pair of a card can be used on another processor,
/// without a lock.
///
/// An error of a queue latches its pair alone; [`NetDevice::interrupt`](super::NetDevice::interrupt)
/// latches errors of the device for all pairs.
#[derive(Debug)]
pub struct QueuePair<T> {
    shared: Arc<SharedDevice<T>>,
    /// Pairs that may be sent on, from 0 on.
    in_use: Arc<AtomicU16>,
    number: u16,
    pair: Pair,
    is_mergeable: bool,
    largest_frame: usize,
    dropped: Dropped,
    failed: Latch,
}

impl<T: Transport> QueuePair<T> {
    /// Pair `number`, with all its receive slots on offer.
    pub(super) fn new(
        shared: &Arc<SharedDevice<T>>,
        in_use: &Arc<AtomicU16>,
        number: u16,
        pair: Pair,
        largest_frame: usize,
    ) -> Self {
        let is_mergeable = shared.virtio().features() & F_MRG_RXBUF != 0;
        let (shared, in_use) = (Arc::clone(shared), Arc::clone(in_use));
        let (dropped, failed) = (Dropped::default(), Latch::default());
        let mut pair = Self { shared, in_use, number, pair, is_mergeable, largest_frame, dropped, failed };
        pair.disable_interrupts();
        pair.kick();
        pair
    }

    /// Number of the pair in the card.
    pub fn number(&self) -> u16 {
        self.number
    }

    /// Numbers of the messages of its receive queue and its transmit queue, for [`Virtio::set_message`].
    pub fn messages(&self) -> [u16; 2] {
        [RECEIVE, TRANSMIT].map(|queue| self.number * PAIR + queue + 1)
    }

    /// The device, which all pairs share.
    pub fn device(&self) -> &Virtio<T> {
        self.shared.virtio()
    }

    /// Bytes of the largest frame that can be sent.
    pub fn largest_frame(&self) -> usize {
        self.largest_frame
    }

    /// Counters of dropped buffers.
    pub fn dropped(&self) -> Dropped {
        self.dropped
    }

    fn check_failed(&self) -> Result<(), DriverError> {
        self.failed.check()?;
        self.shared.check()
    }

    fn fail(&mut self, error: DriverError) -> DriverError {
        self.failed.set(error)
    }

    /// Adds a frame to be sent; the device sees it after [`QueuePair::kick`].
    ///
    /// `false` if no slot is free.
    ///
    /// # Errors
    /// The frame is shorter than an Ethernet header or longer than [`QueuePair::largest_frame`], the
    /// pair is not in use, or the driver has failed.
    pub fn send(&mut self, frame: &[u8]) -> Result<bool, DriverError> {
        self.check_failed()?;
        if !(ETH_HEADER..=self.largest_frame).contains(&frame.len()) {
            return Err(DriverError::Request("the frame is too short or too long"));
        }
        // Relaxed: the device has agreed before the number was stored, and it takes frames of the pair
        // by the ring's own order.
        if self.number >= self.in_use.load(Ordering::Relaxed) {
            return Err(NOT_IN_USE);
        }
        self.pair.send(frame).map_err(|error| self.fail(error))
    }

    /// Sent frames that the device has not given back yet.
    ///
    /// If there are any, [`QueuePair::enable_interrupts`] asks for an interrupt when that changes.
    ///
    /// # Errors
    /// The device broke the protocol. The pair has latched.
    pub fn in_flight(&mut self) -> Result<usize, DriverError> {
        self.check_failed()?;
        self.pair.reclaim().map_err(|error| self.fail(error))?;
        let in_flight = self.pair.transmit_slots.memory.len() - self.pair.free.len();
        self.pair.waited_for = in_flight > 0;
        Ok(in_flight)
    }

    /// Copies the next received frame into `out` and returns its length.
    ///
    /// Bytes without room are lost.
    ///
    /// # Errors
    /// The device broke the protocol. The pair has latched.
    pub fn receive(&mut self, out: &mut [u8]) -> Result<Option<usize>, DriverError> {
        self.check_failed()?;
        let taken = match self.pair.gather(self.is_mergeable, &mut self.dropped) {
            Ok(true) => self.pair.take(out).map(Some),
            Ok(false) => Ok(None),
            Err(error) => Err(error),
        };
        taken.map_err(|error| self.fail(error))
    }

    /// Publishes all that was added and kicks where the device wants it.
    ///
    /// Returns the number of kicks.
    pub fn kick(&mut self) -> u32 {
        if self.check_failed().is_err() {
            return 0;
        }
        let mut kicks = 0;
        for (in_pair, queue) in [(RECEIVE, &mut self.pair.receive), (TRANSMIT, &mut self.pair.transmit)] {
            if queue.publish() {
                self.shared.virtio().notify(self.number * PAIR + in_pair, queue);
                kicks += 1;
            }
        }
        kicks
    }

    /// Asks for interrupts; `true`: something is there, and the caller must not sleep.
    ///
    /// It asks for one at received frames. It asks for one at sent frames, too, if [`QueuePair::send`]
    /// found no free slot or [`QueuePair::in_flight`] frames are not back.
    #[must_use = "`true` means that no interrupt comes for what is there"]
    pub fn enable_interrupts(&mut self) -> bool {
        let pair = &mut self.pair;
        let token = pair.receive.enable_interrupts();
        let mut news = pair.receive.poll(token);
        // A frame that has gone is no news to a caller that waits for an answer and not for room.
        if pair.waited_for {
            let token = pair.transmit.enable_interrupts();
            news |= pair.transmit.poll(token);
        }
        news || self.check_failed().is_err()
    }

    /// Suppresses interrupts.
    pub fn disable_interrupts(&mut self) {
        self.pair.receive.disable_interrupts();
        self.pair.transmit.disable_interrupts();
    }

    /// Position of the receive queue; asks for an interrupt at the next buffer.
    ///
    /// For [`QueuePair::has_news`] and [`QueuePair::poller`].
    pub fn position(&mut self) -> PollToken {
        self.pair.receive.enable_interrupts()
    }

    /// Whether anything was received since `token`, or the driver has failed.
    pub fn has_news(&self, token: PollToken) -> bool {
        self.check_failed().is_err() || self.pair.receive.poll(token)
    }

    /// Answers as [`QueuePair::has_news`] does, from any thread or interrupt handler.
    pub fn poller(&self) -> Poller {
        self.pair.poller.clone()
    }
}
