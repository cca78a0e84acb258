//! The virtio-mmio registers against a driver that ignores all rules.
use crate::owner::Owner;
use arbitrary::{Result, Unstructured};
use paravane_notify::Interrupts;
use paravane_spec::{feature, mmio as reg, status};
use paravane_test_support::NoInterrupt;
use paravane_transport::Transport as _;
use paravane_transport::mmio::Mmio;
use paravane_transport::{DeviceDescription, Effect};
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

struct Rig {
    mmio: Mmio,
    owner: Owner,
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
        let interrupts = Arc::new(Interrupts::wired(Arc::new(NoInterrupt)));
        let device = DeviceDescription { device_id: 2, features: offered, queue_sizes: queue_sizes.clone() };
        Ok(Self {
            mmio: Mmio::new(device, interrupts),
            owner: Owner::new(offered, queue_sizes, bits & 4 == 0),
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
                    self.owner.needs_reset(self.mmio.status());
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

    /// Reports an effect as done, requested or not.
    fn finish(&mut self, which: u8) {
        if self.owner.finish(&mut self.mmio, which) {
            self.is_reset();
        }
    }

    fn is_reset(&self) {
        assert_eq!(self.mmio.status(), 0);
        assert_eq!(self.read(reg::INTERRUPT_STATUS, 4), 0);
    }

    fn negotiate(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        let accepted = match u.arbitrary::<u8>()? % 4 {
            0 => u.arbitrary()?,
            1 => feature::VERSION_1,
            _ => self.owner.offered,
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
        if let Effect::Move { window } = effect {
            panic!("virtio-mmio has moved to {window:x?}");
        }
        let after = self.mmio.status();
        if self.owner.carry_out(&mut self.mmio, before, after, effect) {
            self.is_reset();
        }
    }

    /// Reads; returns the value of a 32-bit read.
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
        self.owner.check_status(now);
        let violations = self.mmio.violations();
        assert!(violations >= self.violations);
        self.violations = violations;
    }

    /// Checks that the settings of a running queue are frozen.
    fn restart_each_queue(&mut self) {
        if !self.owner.serves(self.mmio.status()) {
            return;
        }
        self.owner.prompt = true;
        for (queue, addresses) in self.owner.running.clone() {
            self.write32(reg::QUEUE_SEL, queue.into());
            assert_eq!(self.read(reg::QUEUE_READY, 4), 1);
            self.write32(reg::QUEUE_READY, 0);
            assert_eq!(self.read(reg::QUEUE_READY, 4), 0);
            assert!(!self.owner.running.contains_key(&queue));
            self.write32(reg::QUEUE_READY, 1);
            assert_eq!(self.owner.running.get(&queue), Some(&addresses), "the configuration was not frozen");
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
