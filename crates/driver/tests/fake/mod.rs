//! A device in this process: registers, a disk in memory, and a catalogue of lies.
//!
//! Honest service goes through the ring crate's device side; a lie is written straight into the
//! used ring.
#![allow(dead_code, reason = "each test program uses a part of it")]
use paravane_driver::mmio::{Mmio, Registers};
use paravane_driver::{Area, DmaArea, Pool};
use paravane_ring::QueueAddresses;
use paravane_ring::device::{Batch, Queue, QueueConfig};
use paravane_spec::{blk, device_id, feature, mmio, split, status};
use std::cell::RefCell;
use std::ptr::NonNull;
use std::rc::Rc;

/// Where the shared memory lies in the device's address space.
pub(crate) const RAM_BASE: u64 = 0x10_0000;
/// Its size in bytes.
pub(crate) const RAM_SIZE: usize = 1 << 20;
/// Sectors of the disk.
pub(crate) const SECTORS: u64 = 128;
/// Everything that a disk of ours may offer.
pub(crate) const DISK_FEATURES: u64 = feature::VERSION_1
    | feature::INDIRECT_DESC
    | feature::EVENT_IDX
    | blk::F_FLUSH
    | blk::F_BLK_SIZE
    | blk::F_DISCARD
    | blk::F_WRITE_ZEROES;

/// How the device deviates from the specification in its registers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Lie {
    #[default]
    None,
    Magic,
    NeverResets,
    RefusesFeatures,
    NeedsResetAtOnce,
    ConfigKeepsChanging,
    QueueAlreadyReady,
    QueueDoesNotTakeReady,
    QueueResetHangs,
    QueueStaysReady,
}

/// How a request is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// As the specification says.
    Honest,
    /// This status byte, with the full length.
    Status(u8),
    /// No status byte is written, with the full length.
    NoStatus,
    /// Done and OK, with this used length.
    Length(u32),
}

pub(crate) struct State {
    pub(crate) lie: Lie,
    pub(crate) device_id: u32,
    pub(crate) features: u64,
    pub(crate) queue_max: u32,
    pub(crate) capacity: u64,
    pub(crate) status: u32,
    pub(crate) interrupt: u32,
    pub(crate) acknowledged: u32,
    pub(crate) kicks: u32,
    /// Every kick is served before its write returns.
    pub(crate) serves_kicks: bool,
    /// How often QueueReset still reads 1.
    pub(crate) resetting: u32,
    /// Version register.
    pub(crate) version: u32,
    /// Reads of Status that a reset takes.
    pub(crate) slow_reset: u32,
    /// The same for the reset that is under way.
    reset_reads: u32,
    /// Every write, in order.
    pub(crate) writes: Vec<(u64, u32)>,
    pub(crate) disk: Vec<u8>,
    pub(crate) driver_features: u64,
    generation: u32,
    select: [u32; 2],
    queue: QueueAddresses,
    pub(crate) ready: u32,
    live: Option<Queue>,
    ram: DmaArea,
}

/// The device. Copies are the same device.
#[derive(Clone)]
pub(crate) struct Device(pub(crate) Rc<RefCell<State>>);

/// Memory that driver and device share.
///
/// It is never given back: areas have no lifetime.
fn ram() -> DmaArea {
    let words = Box::leak(vec![[0u8; 4096]; RAM_SIZE / 4096 + 1].into_boxed_slice());
    let start = words.as_mut_ptr().cast::<u8>();
    let skip = start.align_offset(4096);
    // SAFETY: the allocation has a page to spare, and was leaked, so it stays mapped and no
    // reference to it is left.
    let area = unsafe { Area::new(NonNull::new(start.add(skip)).unwrap(), RAM_SIZE) };
    DmaArea { area, addr: RAM_BASE }
}

impl Device {
    /// A disk.
    pub(crate) fn disk() -> (Self, Pool) {
        Self::new(device_id::BLK, DISK_FEATURES)
    }

    /// A device that offers these features.
    pub(crate) fn new(device_id: u32, features: u64) -> (Self, Pool) {
        let ram = ram();
        let state = State {
            lie: Lie::None,
            device_id,
            features,
            queue_max: 256,
            capacity: SECTORS,
            status: 0,
            interrupt: 0,
            acknowledged: 0,
            kicks: 0,
            serves_kicks: false,
            resetting: 0,
            version: mmio::VERSION_2,
            slow_reset: 0,
            reset_reads: 0,
            writes: Vec::new(),
            disk: vec![0; (SECTORS * 512) as usize],
            driver_features: 0,
            generation: 0,
            select: [0; 2],
            queue: QueueAddresses::default(),
            ready: 0,
            live: None,
            ram,
        };
        // The upper half is for the test's own buffers.
        let pool = Pool::new(ram.slice(0, RAM_SIZE / 2).unwrap());
        (Self(Rc::new(RefCell::new(state))), pool)
    }

    /// Its registers, as a driver takes them.
    pub(crate) fn transport(&self) -> Mmio<Self> {
        Mmio::new(self.clone()).unwrap()
    }

    pub(crate) fn lying(lie: Lie) -> (Self, Pool) {
        let (device, pool) = Self::disk();
        device.0.borrow_mut().lie = lie;
        (device, pool)
    }

    /// A data buffer that the driver knows nothing of.
    pub(crate) fn buffer(&self, number: usize, len: usize) -> DmaArea {
        self.0.borrow().ram.slice(RAM_SIZE / 2 + number * 4096, len).unwrap()
    }

    /// Serves every request that is available, and says whether an interrupt is due.
    pub(crate) fn serve(&self, answer: Answer) -> bool {
        let mut state = self.0.borrow_mut();
        state.serve(answer)
    }

    /// Writes a used entry without serving, and moves the index by `step`.
    pub(crate) fn forge_used(&self, id: u32, len: u32, step: u16) {
        let state = self.0.borrow();
        let (used, size) = (state.queue.device, state.queue.size);
        let mut index = [0; 2];
        assert!(state.read(used + split::USED_IDX as u64, &mut index));
        let index = u16::from_le_bytes(index);
        let entry = used + split::USED_RING as u64 + u64::from(index % size) * split::USED_ENTRY as u64;
        assert!(state.write(entry, &id.to_le_bytes()));
        assert!(state.write(entry + 4, &len.to_le_bytes()));
        assert!(state.write(used + split::USED_IDX as u64, &index.wrapping_add(step).to_le_bytes()));
    }

    /// The configuration changes, with an interrupt.
    pub(crate) fn change_capacity(&self, sectors: u64) {
        let mut state = self.0.borrow_mut();
        state.capacity = sectors;
        state.generation += 1;
        state.interrupt |= mmio::INT_CONFIG_CHANGE;
    }

    /// The device has an internal error.
    pub(crate) fn ask_for_reset(&self) {
        let mut state = self.0.borrow_mut();
        state.status |= status::DEVICE_NEEDS_RESET;
        state.interrupt |= mmio::INT_CONFIG_CHANGE;
    }

    pub(crate) fn status(&self) -> u32 {
        self.0.borrow().status
    }
}

impl State {
    fn at(&self, addr: u64, len: usize) -> Option<Area> {
        Some(self.ram.slice(usize::try_from(addr.checked_sub(RAM_BASE)?).ok()?, len)?.area)
    }

    fn read(&self, addr: u64, out: &mut [u8]) -> bool {
        self.at(addr, out.len()).is_some_and(|area| area.read(0, out))
    }

    fn write(&self, addr: u64, data: &[u8]) -> bool {
        self.at(addr, data.len()).is_some_and(|area| area.write(0, data))
    }

    fn activate(&mut self) {
        let config = QueueConfig::new(self.queue, 256, self.driver_features).unwrap();
        let [desc, driver, device] = config.areas().map(|area| self.at(area.addr, area.len).unwrap());
        // SAFETY: these are the areas asked for, in memory that is never given back.
        self.live = Some(unsafe { config.activate(desc, driver, device) }.unwrap());
    }

    fn serve(&mut self, answer: Answer) -> bool {
        let mut queue = self.live.take().unwrap();
        let mut batch = Batch::new(64);
        queue.pop(&mut batch, |addr, out| self.read(addr, out)).unwrap();
        for chain in batch.chains() {
            let (readable, writable) = (batch.readable(chain), batch.writable(chain));
            let full = chain.writable_len();
            let status = if self.device_id == device_id::BLK {
                self.request(readable, writable)
            } else {
                for segment in writable {
                    let bytes: Vec<u8> = (0..segment.len).map(|n| n as u8).collect();
                    assert!(self.write(segment.addr, &bytes));
                }
                blk::S_OK
            };
            let (status, len) = match answer {
                Answer::Honest => (Some(status), full),
                Answer::Status(status) => (Some(status), full),
                Answer::NoStatus => (None, full),
                Answer::Length(len) => (Some(blk::S_OK), len),
            };
            if let (Some(status), device_id::BLK) = (status, self.device_id) {
                assert!(self.write(writable.last().unwrap().addr, &[status]));
            }
            queue.complete(chain.head, len).unwrap();
        }
        let wanted = queue.publish().unwrap();
        assert!(!queue.arm_kicks().unwrap());
        self.live = Some(queue);
        if wanted {
            self.interrupt |= mmio::INT_USED_BUFFER;
        }
        wanted
    }

    /// Serves one block request.
    fn request(&mut self, readable: &[paravane_ring::Segment], writable: &[paravane_ring::Segment]) -> u8 {
        let mut header = [0; 16];
        assert_eq!(readable[0].len, 16, "the header comes first and alone");
        assert!(self.read(readable[0].addr, &mut header));
        let kind = u32::from_le_bytes(header[..4].try_into().unwrap());
        let sector = u64::from_le_bytes(header[8..].try_into().unwrap());
        let range = |state: &Self, segment: &paravane_ring::Segment| {
            let start = (sector * 512) as usize;
            let end = start + segment.len as usize;
            (end <= state.disk.len()).then_some(start..end)
        };
        match kind {
            blk::T_IN => {
                let Some(range) = range(self, &writable[0]) else { return blk::S_IOERR };
                assert!(self.write(writable[0].addr, &self.disk[range]));
            }
            blk::T_OUT => {
                let Some(range) = range(self, &readable[1]) else { return blk::S_IOERR };
                let mut data = vec![0; range.len()];
                assert!(self.read(readable[1].addr, &mut data));
                self.disk[range].copy_from_slice(&data);
            }
            blk::T_FLUSH => assert_eq!((readable.len(), writable.len()), (1, 1)),
            blk::T_GET_ID => {
                assert_eq!(writable[0].len, 20);
                assert!(self.write(writable[0].addr, b"a fake disk\0\0\0\0\0\0\0\0\0"));
            }
            blk::T_DISCARD | blk::T_WRITE_ZEROES => {
                let mut bytes = [0; 16];
                assert!(self.read(readable[1].addr, &mut bytes));
                let first = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize * 512;
                let len = u32::from_le_bytes(bytes[8..12].try_into().unwrap()) as usize * 512;
                self.disk[first..first + len].fill(0);
            }
            _ => return blk::S_UNSUPP,
        }
        blk::S_OK
    }

    fn config(&self) -> blk::Config {
        blk::Config {
            capacity: self.capacity,
            blk_size: 4096,
            max_discard_sectors: 64,
            max_discard_seg: 1,
            max_write_zeroes_sectors: 32,
            max_write_zeroes_seg: 1,
            write_zeroes_may_unmap: 1,
            ..blk::Config::default()
        }
    }

    fn register(&mut self, offset: u64) -> u32 {
        match offset {
            mmio::MAGIC_VALUE if self.lie == Lie::Magic => 0x1234_5678,
            mmio::MAGIC_VALUE => mmio::MAGIC,
            mmio::VERSION => self.version,
            mmio::DEVICE_ID => self.device_id,
            mmio::DEVICE_FEATURES => (self.features >> (32 * self.select[0].min(1))) as u32,
            mmio::QUEUE_SIZE_MAX => self.queue_max,
            mmio::QUEUE_READY if self.lie == Lie::QueueAlreadyReady => 1,
            mmio::QUEUE_READY if self.lie == Lie::QueueDoesNotTakeReady => 0,
            mmio::QUEUE_READY => self.ready,
            mmio::QUEUE_RESET if self.lie == Lie::QueueResetHangs => 1,
            mmio::QUEUE_RESET => {
                let now = u32::from(self.resetting > 0);
                self.resetting = self.resetting.saturating_sub(1);
                now
            }
            mmio::INTERRUPT_STATUS => self.interrupt,
            mmio::STATUS if self.lie == Lie::NeverResets => 0x40,
            mmio::STATUS if self.reset_reads > 0 => {
                self.reset_reads -= 1;
                let status = self.status;
                if self.reset_reads == 0 {
                    self.status = 0;
                }
                status
            }
            mmio::STATUS => self.status,
            mmio::CONFIG_GENERATION => {
                if self.lie == Lie::ConfigKeepsChanging {
                    self.generation = self.generation.wrapping_add(1);
                }
                self.generation
            }
            mmio::CONFIG.. => {
                use zerocopy::IntoBytes;
                let at = (offset - mmio::CONFIG) as usize;
                let config = self.config();
                u32::from_le_bytes(config.as_bytes()[at..at + 4].try_into().unwrap())
            }
            _ => 0,
        }
    }

    fn set_register(&mut self, offset: u64, value: u32) {
        self.writes.push((offset, value));
        let low = |old: u64| old & !0xffff_ffff | u64::from(value);
        let high = |old: u64| old & 0xffff_ffff | u64::from(value) << 32;
        match offset {
            mmio::DEVICE_FEATURES_SEL => self.select[0] = value,
            mmio::DRIVER_FEATURES_SEL => self.select[1] = value,
            mmio::DRIVER_FEATURES if self.select[1] == 0 => self.driver_features = low(self.driver_features),
            mmio::DRIVER_FEATURES => self.driver_features = high(self.driver_features),
            mmio::QUEUE_SIZE => self.queue.size = value as u16,
            mmio::QUEUE_DESC_LOW => self.queue.desc = low(self.queue.desc),
            mmio::QUEUE_DESC_HIGH => self.queue.desc = high(self.queue.desc),
            mmio::QUEUE_DRIVER_LOW => self.queue.driver = low(self.queue.driver),
            mmio::QUEUE_DRIVER_HIGH => self.queue.driver = high(self.queue.driver),
            mmio::QUEUE_DEVICE_LOW => self.queue.device = low(self.queue.device),
            mmio::QUEUE_DEVICE_HIGH => self.queue.device = high(self.queue.device),
            mmio::QUEUE_READY => {
                self.ready = value;
                if value == 1 && self.status & status::DRIVER_OK != 0 {
                    self.activate();
                }
            }
            mmio::QUEUE_RESET => {
                assert_eq!(value, 1);
                self.resetting = 3;
                self.live = None;
                self.ready = u32::from(self.lie == Lie::QueueStaysReady);
            }
            mmio::QUEUE_NOTIFY => self.kicks += 1,
            mmio::INTERRUPT_ACK => {
                self.interrupt &= !value;
                self.acknowledged |= value;
            }
            mmio::STATUS => self.set_status(value),
            _ => {}
        }
    }

    fn set_status(&mut self, value: u32) {
        assert!(value == 0 || self.reset_reads == 0, "the driver does not wait for the end of a reset");
        let mut value = value;
        if self.lie == Lie::RefusesFeatures {
            value &= !status::FEATURES_OK;
        }
        if value & status::DRIVER_OK != 0 {
            if self.lie == Lie::NeedsResetAtOnce {
                value |= status::DEVICE_NEEDS_RESET;
            } else if self.status & status::DRIVER_OK == 0 {
                self.activate();
            }
        }
        if value == 0 {
            (self.ready, self.resetting, self.live) = (0, 0, None);
            if self.status != 0 && self.slow_reset > 0 {
                self.reset_reads = self.slow_reset;
                return;
            }
        }
        self.status = value;
    }
}

impl Registers for Device {
    fn pause(&self) {}

    fn read32(&self, offset: u64) -> u32 {
        assert!(offset.is_multiple_of(4), "an unaligned access at {offset:#x}");
        self.0.borrow_mut().register(offset)
    }

    fn write32(&self, offset: u64, value: u32) {
        assert!(offset.is_multiple_of(4), "an unaligned access at {offset:#x}");
        let mut state = self.0.borrow_mut();
        state.set_register(offset, value);
        if offset == mmio::QUEUE_NOTIFY && state.serves_kicks {
            state.serve(Answer::Honest);
        }
    }

    fn read16(&self, offset: u64) -> u16 {
        assert!(offset.is_multiple_of(2), "an unaligned access at {offset:#x}");
        u16::from_le_bytes([self.read8(offset), self.read8(offset + 1)])
    }

    fn read8(&self, offset: u64) -> u8 {
        assert!(offset >= mmio::CONFIG, "registers are 32 bits wide");
        use zerocopy::IntoBytes;
        self.0.borrow().config().as_bytes()[(offset - mmio::CONFIG) as usize]
    }
}
