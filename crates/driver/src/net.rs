//! Network card driver (section 5.1).
//!
//! ```text
//!  transmit: free slot --send--> added --kick--> with the device --(taken back when slots run out)--> free slot
//!  receive:  slot with the device --> gathered, until the frame is whole --receive--> added again --kick--> ...
//! ```
//! Both directions live on a bounded set of slots in shared memory, taken from the pool once. A
//! slot is a header and room behind it. Frames are copied out of and into them, so that the device
//! can change nothing of what the caller has.
//!
//! Frames are whole and plain: neither checksums nor segmentation are left to the device, nor taken
//! from it.
use crate::channel::add;
use crate::latch::Latch;
use crate::slots::{ALIGN, Slots};
use crate::{DmaArea, DriverError, Pool, Transport, Virtio};
use alloc::vec::Vec;
use core::mem::offset_of;
use paravane_ring::Segment;
use paravane_ring::driver::poll::Poller;
use paravane_ring::driver::{PollToken, Queue, Used};
use paravane_spec::net::{
    CLASS_MQ, CTRL_OK, Command, Config, ETH_HEADER, F_CTRL_VQ, F_MAC, F_MQ, F_MRG_RXBUF, F_MTU, F_STATUS,
    Header, MAX_FRAME, MAX_PAIRS, MQ_VQ_PAIRS_SET, PAIR, RECEIVE, S_LINK_UP, TRANSMIT,
};
use paravane_spec::{device_id, mmio, queue};
use zerocopy::IntoBytes;

/// Bytes before each frame.
const HEADER: usize = size_of::<Header>();
/// A VLAN tag, which an MTU does not count.
const VLAN: usize = 4;
/// Transmit slots taken back at once.
const RECLAIM: usize = 16;
/// Where the answer to a control command lies, behind command and data.
const ANSWER_AT: usize = size_of::<Command>() + size_of::<u16>();

/// Size of a card's queues and frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NetOptions {
    /// Most pairs of queues to set up. One is in use until [`Net::ask_for_pairs`].
    pub pairs: u16,
    /// Slots a receive queue.
    pub receive_slots: u16,
    /// Slots a transmit queue.
    pub transmit_slots: u16,
    /// Bytes of the largest frame, with its Ethernet header: from 14 to [`MAX_FRAME`].
    pub frame: usize,
    /// Bytes of a receive slot, if the device spreads a frame over several (MRG_RXBUF).
    ///
    /// Else, and at most, a slot has room for one frame.
    pub receive_slot: usize,
}

impl Default for NetOptions {
    /// One pair, 64 slots each way, frames for an MTU of 1500.
    fn default() -> Self {
        Self { pairs: 1, receive_slots: 64, transmit_slots: 64, frame: 1518, receive_slot: 2048 }
    }
}

/// Counters of received buffers that were dropped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Dropped {
    /// Buffers that came back with less than a header in them.
    pub runts: u64,
}

/// One pair of queues.
#[derive(Debug)]
struct Pair {
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
    fn start<T: Transport>(
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

/// The control queue.
#[derive(Debug)]
struct Control {
    queue: Queue,
    memory: DmaArea,
    /// The number of pairs that was asked for, until the answer comes.
    asked: Option<u16>,
}

/// Fields of the configuration space.
#[derive(Clone, Copy, Debug, Default)]
struct Described {
    mac: Option<[u8; 6]>,
    mtu: Option<u16>,
    link_up: bool,
    pairs: u16,
}

impl Described {
    /// Reads the fields that the negotiated features make valid, consistently.
    fn read<T: Transport>(device: &Virtio<T>, features: u64) -> Result<Self, DriverError> {
        let has = |bit: u64| features & bit != 0;
        device.consistently(|config| {
            let half = |offset: usize| config.half(offset as u64);
            Self {
                mac: has(F_MAC).then(|| core::array::from_fn(|at| config.byte(at as u64))),
                mtu: has(F_MTU).then(|| half(offset_of!(Config, mtu))),
                // Section 5.1.4: without the field the link is up.
                link_up: !has(F_STATUS) || half(offset_of!(Config, status)) & S_LINK_UP != 0,
                pairs: if has(F_MQ) { half(offset_of!(Config, max_virtqueue_pairs)) } else { 1 },
            }
        })
    }
}

/// A network card.
#[derive(Debug)]
pub struct Net<T> {
    device: Virtio<T>,
    features: u64,
    described: Described,
    options: NetOptions,
    pairs: Vec<Pair>,
    /// Pairs that may be sent on.
    in_use: u16,
    control: Option<Control>,
    dropped: Dropped,
    failed: Latch,
}

impl<T: Transport> Net<T> {
    /// Sets the card up, with all its receive slots on offer, and sets DRIVER_OK.
    ///
    /// The device may limit the number of pairs and slots.
    ///
    /// # Errors
    /// No such device, or too little memory: the device is then told FAILED. Or the options are
    /// impossible.
    pub fn new(transport: T, options: NetOptions, pool: &mut Pool) -> Result<Self, DriverError> {
        if !(ETH_HEADER..=MAX_FRAME).contains(&options.frame) {
            return Err(DriverError::Request("the largest frame is not from 14 to 65553 bytes"));
        }
        let wanted =
            F_MAC | F_MTU | F_STATUS | F_MRG_RXBUF | if options.pairs > 1 { F_CTRL_VQ | F_MQ } else { 0 };
        let start = |device: &mut Virtio<T>| Self::start(device, options, pool);
        let (device, (described, pairs, control)) = Virtio::set_up(transport, device_id::NET, wanted, start)?;
        let mut net = Self {
            features: device.features(),
            device,
            described,
            options,
            pairs,
            in_use: 1,
            control,
            dropped: Dropped::default(),
            failed: Latch::default(),
        };
        net.disable_interrupts();
        net.kick();
        Ok(net)
    }

    #[allow(clippy::type_complexity, reason = "the parts of a card, once")]
    fn start(
        device: &mut Virtio<T>,
        options: NetOptions,
        pool: &mut Pool,
    ) -> Result<(Described, Vec<Pair>, Option<Control>), DriverError> {
        let features = device.features();
        let described = Described::read(device, features)?;
        // Section 5.1.4.1: from 1 to 0x8000. The queues of more would have no numbers.
        if described.pairs == 0 || described.pairs > MAX_PAIRS - 1 {
            return Err(DriverError::Queue(described.pairs));
        }
        let one = HEADER + options.frame;
        let slot = match features & F_MRG_RXBUF {
            0 => one,
            _ => options.receive_slot.clamp(ALIGN, one.max(ALIGN)),
        };
        let mut pairs = Vec::new();
        for number in 0..options.pairs.clamp(1, described.pairs) {
            pairs.push(Pair::start(device, number, &options, slot, pool)?);
        }
        let control = if features & F_CTRL_VQ != 0 && features & F_MQ != 0 {
            // One command of two segments is in flight at a time.
            let queue = device.start_queue(described.pairs * PAIR, 2, 0, pool)?;
            Some(Control { queue, memory: pool.take(ANSWER_AT + 1, ALIGN)?, asked: None })
        } else {
            None
        };
        Ok((described, pairs, control))
    }

    /// MAC address, if the card has one.
    pub fn mac(&self) -> Option<[u8; 6]> {
        self.described.mac
    }

    /// Largest packet in bytes, without the Ethernet header, if the device reports it.
    pub fn mtu(&self) -> Option<u16> {
        self.described.mtu
    }

    /// Whether the link is up. Changes only in [`Net::interrupt`].
    pub fn link_up(&self) -> bool {
        self.described.link_up
    }

    /// Negotiated features.
    pub fn features(&self) -> u64 {
        self.features
    }

    /// Bytes of the largest frame that can be sent.
    pub fn largest_frame(&self) -> usize {
        let by_device = self.described.mtu.map_or(MAX_FRAME, |mtu| usize::from(mtu) + ETH_HEADER + VLAN);
        self.options.frame.min(by_device)
    }

    /// Pairs that are set up; those from [`Net::pairs`] on are not in use.
    pub fn pairs_set_up(&self) -> u16 {
        self.pairs.len() as u16
    }

    /// Pairs in use, from 0 on.
    pub fn pairs(&self) -> u16 {
        self.in_use
    }

    /// Counters of dropped buffers.
    pub fn dropped(&self) -> Dropped {
        self.dropped
    }

    /// Adds a frame to be sent on a pair; the device sees it after [`Net::kick`].
    ///
    /// `false` if no slot is free.
    ///
    /// # Errors
    /// The frame is shorter than an Ethernet header or longer than [`Net::largest_frame`], the pair
    /// is not in use, or the driver has failed.
    pub fn send(&mut self, pair: u16, frame: &[u8]) -> Result<bool, DriverError> {
        self.failed.check()?;
        if !(ETH_HEADER..=self.largest_frame()).contains(&frame.len()) {
            return Err(DriverError::Request("the frame is too short or too long"));
        }
        if pair >= self.in_use {
            return Err(NOT_IN_USE);
        }
        let sent = self.pairs[usize::from(pair)].send(frame);
        sent.map_err(|error| self.failed.set(error))
    }

    /// Frames sent on a pair that the device has not given back yet.
    ///
    /// If there are any, [`Net::enable_interrupts`] asks for an interrupt when that changes.
    ///
    /// # Errors
    /// There is no such pair. Or the device broke the protocol, and the driver has latched.
    pub fn in_flight(&mut self, pair: u16) -> Result<usize, DriverError> {
        self.failed.check()?;
        let pair = self.pairs.get_mut(usize::from(pair)).ok_or(NOT_IN_USE)?;
        if let Err(error) = pair.reclaim() {
            return Err(self.failed.set(error));
        }
        let in_flight = pair.transmit_slots.memory.len() - pair.free.len();
        pair.waited_for = in_flight > 0;
        Ok(in_flight)
    }

    /// Copies the next frame of a pair into `out` and returns its length.
    ///
    /// Bytes without room are lost.
    ///
    /// # Errors
    /// There is no such pair. Or the device broke the protocol, and the driver has latched.
    pub fn receive(&mut self, pair: u16, out: &mut [u8]) -> Result<Option<usize>, DriverError> {
        self.failed.check()?;
        let mergeable = self.features & F_MRG_RXBUF != 0;
        let pair = self.pairs.get_mut(usize::from(pair)).ok_or(NOT_IN_USE)?;
        let taken = match pair.gather(mergeable, &mut self.dropped) {
            Ok(true) => pair.take(out).map(Some),
            Ok(false) => Ok(None),
            Err(error) => Err(error),
        };
        taken.map_err(|error| self.failed.set(error))
    }

    /// Publishes all that was added and kicks where the device wants it.
    ///
    /// Returns the number of kicks.
    pub fn kick(&mut self) -> u32 {
        if self.failed.is_set() {
            return 0;
        }
        let mut kicks = 0;
        for (number, pair) in (0..).zip(&mut self.pairs) {
            for (in_pair, queue) in [(RECEIVE, &mut pair.receive), (TRANSMIT, &mut pair.transmit)] {
                if queue.publish() {
                    self.device.notify(number * PAIR + in_pair, queue);
                    kicks += 1;
                }
            }
        }
        kicks
    }

    /// Asks the device to use `pairs` pairs. The answer comes by [`Net::answer`].
    ///
    /// # Errors
    /// Fewer pairs are set up, an earlier request is not answered yet, or the driver has failed.
    pub fn ask_for_pairs(&mut self, pairs: u16) -> Result<(), DriverError> {
        self.failed.check()?;
        if pairs == 0 || pairs > self.pairs_set_up() {
            return Err(DriverError::Request("fewer pairs of queues are set up"));
        }
        let Some(control) = self.control.as_mut().filter(|control| control.asked.is_none()) else {
            return Err(DriverError::Request("the control queue is missing or busy"));
        };
        let command = Command { class: CLASS_MQ, command: MQ_VQ_PAIRS_SET };
        let [low, high] = pairs.to_le_bytes();
        let bytes = [command.class, command.command, low, high, !CTRL_OK];
        let written = control.memory.area.write(0, &bytes);
        debug_assert!(written, "there is room for a command and its answer");
        let addr = control.memory.addr;
        let command = Segment { addr, len: ANSWER_AT as u32 };
        let answer = Segment { addr: addr + ANSWER_AT as u64, len: 1 };
        match add(&mut control.queue, &[command], &[answer]) {
            Ok(Some(_)) => {}
            Ok(None) => return Err(self.failed.set(DriverError::Queue(self.described.pairs * PAIR))),
            Err(error) => return Err(self.failed.set(error)),
        }
        control.asked = Some(pairs);
        // Section 5.1.6.5.6.1: nothing is sent on a pair that is given up.
        self.in_use = self.in_use.min(pairs);
        if control.queue.publish() {
            self.device.notify(self.described.pairs * PAIR, &control.queue);
        }
        Ok(())
    }

    /// The answer to [`Net::ask_for_pairs`]: whether they are in use now.
    ///
    /// `None` while there is none.
    ///
    /// # Errors
    /// The device broke the protocol. The driver has latched.
    pub fn answer(&mut self) -> Result<Option<bool>, DriverError> {
        self.failed.check()?;
        let Some(control) = &mut self.control else { return Ok(None) };
        match control.queue.pop_used() {
            Ok(None) => Ok(None),
            Ok(Some(used)) => {
                let mut answer = [!CTRL_OK];
                // Bytes beyond the used length are not to be believed (section 2.7.8.2).
                let _ = used.len > 0 && control.memory.area.read(ANSWER_AT, &mut answer);
                let asked = control.asked.take().filter(|_| answer[0] == CTRL_OK);
                self.in_use = asked.unwrap_or(self.in_use);
                Ok(Some(asked.is_some()))
            }
            Err(error) => Err(self.failed.set(error)),
        }
    }

    /// Asks for interrupts; `true`: something is there, and the caller must not sleep.
    ///
    /// It asks for one at received frames. It asks for one at sent frames, too, if [`Net::send`]
    /// found no free slot or [`Net::in_flight`] frames are not back.
    #[must_use = "`true` means that no interrupt comes for what is there"]
    pub fn enable_interrupts(&mut self) -> bool {
        let mut news = self.failed.is_set();
        for pair in &mut self.pairs {
            let token = pair.receive.enable_interrupts();
            news |= pair.receive.poll(token);
            // A frame that has gone is no news to a caller that waits for an answer and not for
            // room.
            if pair.waited_for {
                let token = pair.transmit.enable_interrupts();
                news |= pair.transmit.poll(token);
            }
        }
        if let Some(control) = &mut self.control
            && control.asked.is_some()
        {
            let token = control.queue.enable_interrupts();
            news |= control.queue.poll(token);
        }
        news
    }

    /// Suppresses interrupts.
    pub fn disable_interrupts(&mut self) {
        for pair in &mut self.pairs {
            pair.receive.disable_interrupts();
            pair.transmit.disable_interrupts();
        }
        if let Some(control) = &mut self.control {
            control.queue.disable_interrupts();
        }
    }

    /// Position of a pair's receive queue; asks for an interrupt at the next buffer.
    ///
    /// For [`Net::has_news`] and [`Net::poller`].
    pub fn position(&mut self, pair: u16) -> Option<PollToken> {
        Some(self.pairs.get_mut(usize::from(pair))?.receive.enable_interrupts())
    }

    /// Whether anything was received on a pair since `token`, or the driver has failed.
    pub fn has_news(&self, pair: u16, token: PollToken) -> bool {
        self.failed.is_set() || self.pairs.get(usize::from(pair)).is_some_and(|pair| pair.receive.poll(token))
    }

    /// Answers as [`Net::has_news`] does, from any thread or interrupt handler.
    pub fn poller(&self, pair: u16) -> Option<Poller> {
        self.pairs.get(usize::from(pair)).map(|pair| pair.poller.clone())
    }

    /// The device, for what is the same with every driver.
    pub fn device(&self) -> &Virtio<T> {
        &self.device
    }

    /// Reads and acknowledges the causes of an interrupt of this device.
    ///
    /// Call it after an interrupt, before you look for frames.
    ///
    /// # Errors
    /// The device needs a reset, or its configuration keeps changing. The driver has latched.
    pub fn interrupt(&mut self) -> Result<u32, DriverError> {
        self.failed.check()?;
        let causes = self.device.interrupt().map_err(|error| self.failed.set(error))?;
        if causes & mmio::INT_CONFIG_CHANGE != 0 {
            let described = Described::read(&self.device, self.features);
            // The rest does not change while the device is in use, whatever it says.
            self.described.link_up = described.map_err(|error| self.failed.set(error))?.link_up;
        }
        Ok(causes)
    }
}

/// The pair is not set up, or not in use.
const NOT_IN_USE: DriverError = DriverError::Request("the pair is not in use");
