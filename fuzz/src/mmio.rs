//! The virtio-mmio registers against a driver that keeps no order, with an owner that carries effects out.
use arbitrary::{Result, Unstructured};
use paravane_notify::{InterruptSink, Interrupts};
use paravane_spec::queue::QueueAddresses;
use paravane_spec::{feature, mmio as reg, status};
use paravane_transport::mmio::Mmio;
use paravane_transport::{DeviceDescription, Effect};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Runs one input.
pub fn mmio(data: &[u8]) {
    let mut u = Unstructured::new(data);
    let Ok(mut rig) = Rig::new(&mut u) else { return };
    while !u.is_empty() {
        if rig.step(&mut u).is_err() {
            break;
        }
    }
    rig.restart_each_queue();
}

const OFFERED: u64 =
    feature::VERSION_1 | feature::RING_RESET | feature::INDIRECT_DESC | feature::EVENT_IDX | 1 << 5;

struct NoLine;

impl InterruptSink for NoLine {
    fn raise(&self) {}
}

struct Rig {
    mmio: Mmio,
    offered: u64,
    queue_sizes: Vec<u16>,
    /// The owner finishes what it is asked to do before the access returns, or at a later step.
    prompt: bool,
    /// Features of the active device.
    active: Option<u64>,
    /// The queues that run, as they were started.
    running: BTreeMap<u16, QueueAddresses>,
    /// Queues being stopped, with what they were started with.
    stopping: BTreeMap<u16, QueueAddresses>,
    resetting: bool,
    needs_reset: bool,
    violations: u64,
}

impl Rig {
    fn new(u: &mut Unstructured<'_>) -> Result<Self> {
        let bits = u.arbitrary::<u8>()?;
        let queue_sizes = [256, 8, 0, 32768, 1, 64][..usize::from(bits >> 4).min(6)].to_vec();
        let mut offered = OFFERED;
        if bits & 1 != 0 {
            offered |= feature::NOTIFICATION_DATA;
        }
        if bits & 2 != 0 {
            offered &= !feature::RING_RESET;
        }
        let interrupts = Arc::new(Interrupts::wired(Arc::new(NoLine)));
        let device = DeviceDescription { device_id: 2, features: offered, queue_sizes: queue_sizes.clone() };
        Ok(Self {
            mmio: Mmio::new(device, interrupts),
            offered,
            queue_sizes,
            prompt: bits & 4 == 0,
            active: None,
            running: BTreeMap::new(),
            stopping: BTreeMap::new(),
            resetting: false,
            needs_reset: false,
            violations: 0,
        })
    }

    fn step(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        match u.arbitrary::<u8>()? % 16 {
            0..6 => {
                let offset = u64::from(u.arbitrary::<u8>()? % 64) * 4;
                let value = value(u)?;
                self.write32(offset, value);
            }
            6 | 7 => {
                let (offset, len) = (offset(u)?, usize::from(u.arbitrary::<u8>()? % 9));
                let value = u.arbitrary::<u64>()?.to_le_bytes();
                self.write(offset, &value[..len.min(8)]);
            }
            8 => {
                let (offset, len) = (offset(u)?, usize::from(u.arbitrary::<u8>()? % 17));
                self.read(offset, len);
            }
            9 => self.negotiate(u)?,
            10 => {
                self.write32(reg::QUEUE_SEL, u32::from(u.arbitrary::<u8>()? % 8));
                let size = 1 << (u.arbitrary::<u8>()? % 17);
                self.write32(reg::QUEUE_SIZE, size);
                self.write32(reg::QUEUE_DESC_HIGH, u.arbitrary::<u8>()?.into());
                self.write32(reg::QUEUE_READY, 1);
            }
            11 => {
                self.write32(reg::QUEUE_SEL, u32::from(u.arbitrary::<u8>()? % 8));
                let register =
                    if u.arbitrary::<u8>()? & 1 == 0 { reg::QUEUE_READY } else { reg::QUEUE_RESET };
                self.write32(register, u32::from(u.arbitrary::<u8>()? % 3));
            }
            12 => {
                let add = [1, 2, 4, 8, 64, 128][usize::from(u.arbitrary::<u8>()? % 6)];
                self.write32(reg::STATUS, self.mmio.status() | add);
            }
            13 => {
                self.mmio.config_changed();
            }
            14 => match u.arbitrary::<u8>()? % 8 {
                0 => {
                    self.needs_reset |= self.mmio.status() != 0 && !self.resetting;
                    self.mmio.needs_reset();
                }
                1 => self.write32(reg::STATUS, 0),
                _ => self.write32(reg::QUEUE_NOTIFY, value(u)?),
            },
            _ => self.finish(u.arbitrary::<u8>()?),
        }
        self.check();
        Ok(())
    }

    /// The owner is done with one of the things that it was asked for; or says so without having been asked.
    fn finish(&mut self, which: u8) {
        if which & 1 == 0 {
            self.mmio.reset_done();
            self.reset_is_done();
        } else {
            let queue = u16::from(which >> 1) % 8;
            self.mmio.queue_reset_done(queue);
            self.stopping.remove(&queue);
        }
    }

    fn reset_is_done(&mut self) {
        if std::mem::take(&mut self.resetting) {
            self.active = None;
            self.needs_reset = false;
            self.running.clear();
            self.stopping.clear();
            assert_eq!(self.mmio.status(), 0);
            assert_eq!(self.read(reg::INTERRUPT_STATUS, 4), 0);
        }
    }

    fn negotiate(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        let accepted = match u.arbitrary::<u8>()? % 4 {
            0 => u.arbitrary()?,
            1 => feature::VERSION_1,
            _ => self.offered,
        };
        self.write32(reg::STATUS, status::ACKNOWLEDGE);
        self.write32(reg::STATUS, status::ACKNOWLEDGE | status::DRIVER);
        for word in 0..2 {
            self.write32(reg::DRIVER_FEATURES_SEL, word);
            self.write32(reg::DRIVER_FEATURES, (accepted >> (32 * word)) as u32);
        }
        self.write32(reg::STATUS, status::ACKNOWLEDGE | status::DRIVER | status::FEATURES_OK);
        Ok(())
    }

    fn write32(&mut self, offset: u64, value: u32) {
        self.write(offset, &value.to_le_bytes());
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        let before = self.mmio.status();
        let Some(effect) = self.mmio.write(offset, data) else { return };
        assert!(!self.resetting, "{effect:?} while a reset is under way");
        let live = self.active.is_some() && !self.needs_reset && before & status::FAILED == 0;
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
                let addresses = self.running.remove(&queue).expect("only a queue that runs is stopped");
                if self.prompt {
                    self.mmio.queue_reset_done(queue);
                } else {
                    assert_eq!(self.stopping.insert(queue, addresses), None);
                }
            }
            Effect::Reset => {
                assert_ne!(before, 0);
                self.resetting = true;
                assert_eq!(self.mmio.status(), before, "status changed before the reset was done");
                if self.prompt {
                    self.mmio.reset_done();
                    self.reset_is_done();
                }
            }
            Effect::Notify { queue } => {
                assert!(live && self.running.contains_key(&queue), "a kick of queue {queue}");
            }
            Effect::Move { window } => panic!("virtio-mmio has moved to {window:x?}"),
            Effect::WriteConfig { offset, data } => {
                assert!(before & status::FEATURES_OK != 0 && before & status::FAILED == 0);
                assert!(matches!(data.len(), 1 | 2 | 4 | 8));
                assert!(u64::from(offset) + data.len() as u64 <= reg::WINDOW - reg::CONFIG);
            }
        }
    }

    fn start(&mut self, queue: u16, addresses: QueueAddresses) {
        let max = self.queue_sizes.get(usize::from(queue)).copied().expect("the queue exists");
        assert!(addresses.size.is_power_of_two() && addresses.size <= max);
        assert!(!self.stopping.contains_key(&queue), "started before it was stopped");
        assert_eq!(self.running.insert(queue, addresses), None, "queue {queue} was started twice");
    }

    /// Reads, and returns the value of a 32-bit read.
    fn read(&self, offset: u64, len: usize) -> u32 {
        let mut data = [0xee; 16];
        self.mmio.read(offset, &mut data[..len], |at, out| {
            assert!(u64::from(at) + out.len() as u64 <= reg::WINDOW - reg::CONFIG);
            out.fill(0xcc);
        });
        assert!(data[len..].iter().all(|&byte| byte == 0xee));
        u32::from_le_bytes([data[0], data[1], data[2], data[3]])
    }

    fn check(&mut self) {
        let now = self.mmio.status();
        assert_eq!(now, self.read(reg::STATUS, 4));
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
        let violations = self.mmio.violations();
        assert!(violations >= self.violations);
        self.violations = violations;
    }

    /// What runs was frozen when it was started: stopped and started again, untouched, it is what it was.
    fn restart_each_queue(&mut self) {
        if self.resetting || self.needs_reset || self.mmio.status() & status::FAILED != 0 {
            return;
        }
        self.prompt = true;
        for (queue, addresses) in self.running.clone() {
            self.write32(reg::QUEUE_SEL, queue.into());
            assert_eq!(self.read(reg::QUEUE_READY, 4), 1);
            self.write32(reg::QUEUE_READY, 0);
            assert_eq!(self.read(reg::QUEUE_READY, 4), 0);
            assert!(!self.running.contains_key(&queue));
            self.write32(reg::QUEUE_READY, 1);
            assert_eq!(self.running.get(&queue), Some(&addresses), "the configuration was not frozen");
        }
    }
}

fn offset(u: &mut Unstructured<'_>) -> Result<u64> {
    Ok(match u.arbitrary::<u8>()? % 4 {
        0 => u.arbitrary::<u8>()?.into(),
        1 | 2 => (u.arbitrary::<u16>()? % 0x1100).into(),
        _ => u.arbitrary()?,
    })
}

fn value(u: &mut Unstructured<'_>) -> Result<u32> {
    let byte = u.arbitrary::<u8>()?;
    if byte < 0xf0 { Ok(byte.into()) } else { u.arbitrary() }
}
