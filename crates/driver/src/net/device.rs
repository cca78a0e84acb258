//! A card apart from its pairs of queues.
use super::pair::{Pair, QueuePair};
use super::{HEADER, NetOptions, VLAN};
use crate::channel::add;
use crate::latch::Latch;
use crate::shared::SharedDevice;
use crate::slots::ALIGN;
use crate::{DmaArea, DriverError, Pool, Transport, Virtio};
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::mem::offset_of;
use core::sync::atomic::{AtomicU16, Ordering};
use paravane_ring::Segment;
use paravane_ring::driver::Queue;
use paravane_spec::net::{
    CLASS_MQ, CTRL_OK, Command, Config, ETH_HEADER, F_CTRL_VQ, F_MAC, F_MQ, F_MRG_RXBUF, F_MTU, F_STATUS,
    MAX_FRAME, MAX_PAIRS, MQ_VQ_PAIRS_SET, PAIR, S_LINK_UP,
};
use paravane_spec::{device_id, mmio};

/// Where the answer to a control command lies, behind command and data.
const ANSWER_AT: usize = size_of::<Command>() + size_of::<u16>();

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

/// A card apart from its pairs of queues: what they have in common, and the control queue.
///
/// One owner has it, and takes the interrupts of the device.
#[derive(Debug)]
pub struct NetDevice<T> {
    shared: Arc<SharedDevice<T>>,
    described: Described,
    frame: usize,
    pairs: u16,
    in_use: Arc<AtomicU16>,
    control: Option<Control>,
    failed: Latch,
}

/// What set-up makes of a card before it is in use.
struct Started {
    described: Described,
    pairs: Vec<Pair>,
    control: Option<Control>,
}

impl Started {
    fn new<T: Transport>(
        device: &mut Virtio<T>,
        options: NetOptions,
        pool: &mut Pool,
    ) -> Result<Self, DriverError> {
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
        Ok(Self { described, pairs, control })
    }
}

impl<T: Transport> NetDevice<T> {
    /// Sets the card up, with all its receive slots on offer, and sets DRIVER_OK.
    ///
    /// The device may limit the number of pairs and slots. The pairs are independent: send each to the
    /// processor that is to use it. Pair 0 is in use at once, the others after
    /// [`NetDevice::ask_for_pairs`].
    ///
    /// # Errors
    /// No such device, or too little memory: the device is then told FAILED. Or the options are
    /// impossible.
    pub fn new(
        transport: T,
        options: NetOptions,
        pool: &mut Pool,
    ) -> Result<(Self, Vec<QueuePair<T>>), DriverError> {
        if !(ETH_HEADER..=MAX_FRAME).contains(&options.frame) {
            return Err(DriverError::Request("the largest frame is not from 14 to 65553 bytes"));
        }
        let wanted =
            F_MAC | F_MTU | F_STATUS | F_MRG_RXBUF | if options.pairs > 1 { F_CTRL_VQ | F_MQ } else { 0 };
        let start = |device: &mut Virtio<T>| Started::new(device, options, pool);
        let (device, started) = Virtio::set_up(transport, device_id::NET, wanted, start)?;
        let Started { described, pairs, mut control } = started;
        if let Some(control) = &mut control {
            control.queue.disable_interrupts();
        }
        let (shared, in_use) = (SharedDevice::new(device), Arc::new(AtomicU16::new(1)));
        let frame = options.frame;
        let net = Self {
            pairs: pairs.len() as u16,
            shared,
            described,
            frame,
            in_use,
            control,
            failed: Latch::default(),
        };
        let pair =
            |(number, pair)| QueuePair::new(&net.shared, &net.in_use, number, pair, net.largest_frame());
        let pairs = (0..).zip(pairs).map(pair).collect();
        Ok((net, pairs))
    }

    /// MAC address, if the card has one.
    pub fn mac(&self) -> Option<[u8; 6]> {
        self.described.mac
    }

    /// Largest packet in bytes, without the Ethernet header, if the device reports it.
    pub fn mtu(&self) -> Option<u16> {
        self.described.mtu
    }

    /// Whether the link is up. Changes only in [`NetDevice::interrupt`].
    pub fn link_up(&self) -> bool {
        self.described.link_up
    }

    /// Negotiated features.
    pub fn features(&self) -> u64 {
        self.shared.virtio().features()
    }

    /// Bytes of the largest frame that can be sent.
    pub fn largest_frame(&self) -> usize {
        let by_device = self.described.mtu.map_or(MAX_FRAME, |mtu| usize::from(mtu) + ETH_HEADER + VLAN);
        self.frame.min(by_device)
    }

    /// Pairs that are set up; those from [`NetDevice::pairs`] on are not in use.
    pub fn pairs_set_up(&self) -> u16 {
        self.pairs
    }

    /// Pairs in use, from 0 on.
    pub fn pairs(&self) -> u16 {
        // Relaxed: only this owner stores it.
        self.in_use.load(Ordering::Relaxed)
    }

    fn use_pairs(&self, pairs: u16) {
        // Relaxed: see `QueuePair::send`.
        self.in_use.store(pairs, Ordering::Relaxed);
    }

    fn check_failed(&self) -> Result<(), DriverError> {
        self.failed.check()?;
        self.shared.check()
    }

    /// Asks the device to use `pairs` pairs. The answer comes by [`NetDevice::answer`].
    ///
    /// Before it asks for fewer, the owners of the others have stopped sending.
    ///
    /// # Errors
    /// Fewer pairs are set up, an earlier request is not answered yet, or the driver has failed.
    pub fn ask_for_pairs(&mut self, pairs: u16) -> Result<(), DriverError> {
        self.check_failed()?;
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
        self.in_use.fetch_min(pairs, Ordering::Relaxed);
        if control.queue.publish() {
            self.shared.virtio().notify(self.described.pairs * PAIR, &control.queue);
        }
        Ok(())
    }

    /// The answer to [`NetDevice::ask_for_pairs`]: whether they are in use now.
    ///
    /// `None` while there is none.
    ///
    /// # Errors
    /// The device broke the protocol. The control queue has latched.
    pub fn answer(&mut self) -> Result<Option<bool>, DriverError> {
        self.check_failed()?;
        let Some(control) = &mut self.control else { return Ok(None) };
        match control.queue.pop_used() {
            Ok(None) => Ok(None),
            Ok(Some(used)) => {
                let mut answer = [!CTRL_OK];
                // Bytes beyond the used length are not to be believed (section 2.7.8.2).
                let _ = used.len > 0 && control.memory.area.read(ANSWER_AT, &mut answer);
                let asked = control.asked.take().filter(|_| answer[0] == CTRL_OK);
                if let Some(pairs) = asked {
                    self.use_pairs(pairs);
                }
                Ok(Some(asked.is_some()))
            }
            Err(error) => Err(self.failed.set(error)),
        }
    }

    /// Asks for an interrupt at an answer that is awaited; `true`: it is there.
    #[must_use = "`true` means that no interrupt comes for what is there"]
    pub fn enable_interrupts(&mut self) -> bool {
        let mut news = self.check_failed().is_err();
        if let Some(control) = &mut self.control
            && control.asked.is_some()
        {
            let token = control.queue.enable_interrupts();
            news |= control.queue.poll(token);
        }
        news
    }

    /// Suppresses interrupts at answers.
    pub fn disable_interrupts(&mut self) {
        if let Some(control) = &mut self.control {
            control.queue.disable_interrupts();
        }
    }

    /// The device, for what is the same with every driver.
    pub fn device(&self) -> &Virtio<T> {
        self.shared.virtio()
    }

    /// Reads and acknowledges the causes of an interrupt of this device.
    ///
    /// Call it after each wired interrupt, and after the message of the configuration change. Then have
    /// the owner of each pair look for frames: the wired interrupt does not tell whose they are.
    ///
    /// # Errors
    /// The device needs a reset, or its configuration keeps changing. Every later call, of every pair
    /// as well, returns the same error.
    pub fn interrupt(&mut self) -> Result<u32, DriverError> {
        self.failed.check()?;
        let causes = self.shared.interrupt()?;
        if causes & mmio::INT_CONFIG_CHANGE != 0 {
            let described = Described::read(self.shared.virtio(), self.features());
            // The rest does not change while the device is in use, whatever it says.
            self.described.link_up = described.map_err(|error| self.shared.fail(error))?.link_up;
        }
        Ok(causes)
    }
}
