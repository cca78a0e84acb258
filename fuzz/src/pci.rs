//! A virtio-pci function against a driver that ignores all rules.
//!
//! Checks the requests to the owner, and that every interrupt follows table, masks and vectors.
use crate::owner::Owner;
use arbitrary::{Result, Unstructured};
use paravane_notify::Interrupts;
use paravane_notify::msi::{MsiMessage, MsiTable};
use paravane_spec::pci::{NO_VECTOR, cap, command, common as reg, header, msix};
use paravane_spec::{feature, status};
use paravane_test_support::{NoInterrupt, RecordedMessages};
use paravane_transport::pci::Pci;
use paravane_transport::{DeviceDescription, Effect, Transport};
use std::sync::Arc;

/// Runs one input.
pub fn pci(data: &[u8]) {
    let mut u = Unstructured::new(data);
    let Ok(mut rig) = Rig::new(&mut u) else { return };
    while !u.is_empty() {
        if rig.step(&mut u).is_err() {
            break;
        }
        rig.check();
    }
    rig.restart_each_queue();
}

const OFFERED: u64 =
    feature::VERSION_1 | feature::RING_RESET | feature::INDIRECT_DESC | feature::EVENT_IDX | 1 << 5;
const VECTORS: u16 = 3;
/// Offsets that a driver learns from the capabilities.
///
/// The tests of the transport check them.
const ISR: u64 = 0x1000;
const DEVICE: u64 = 0x2000;
const PENDING: u64 = 0x3000;
const TABLE: u64 = 0x8000;
const MSIX_AT: u16 = 0x40;
const WINDOW_AT: u16 = 0x90;

/// One vector, as the driver reads it.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Vector {
    message: MsiMessage,
    /// By itself or with all others.
    closed: bool,
    pending: bool,
}

struct Rig {
    pci: Pci,
    interrupts: Arc<Interrupts>,
    platform: RecordedMessages,
    owner: Owner,
    queues: u16,
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
        let platform = RecordedMessages::default();
        let table = MsiTable::new(&platform, VECTORS, queue_sizes.len()).expect("this one has enough");
        let interrupts = Arc::new(Interrupts::with_msi(Arc::new(NoInterrupt), table));
        let device = DeviceDescription { device_id: 2, features: offered, queue_sizes: queue_sizes.clone() };
        let mut rig = Self {
            pci: Pci::new(device, Arc::clone(&interrupts), 5),
            interrupts,
            platform,
            queues: queue_sizes.len() as u16,
            owner: Owner::new(offered, queue_sizes, bits & 4 == 0),
            violations: 0,
        };
        assert_eq!(rig.config(MSIX_AT, 1), u32::from(paravane_spec::pci::capability::MSIX));
        assert_eq!(rig.config(WINDOW_AT + cap::CFG_TYPE, 1), u32::from(cap::PCI));
        Ok(rig)
    }

    fn step(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        match u.arbitrary::<u8>()? % 20 {
            // Random access.
            0 | 1 => {
                let (offset, len) = (offset(u)?, usize::from(u.arbitrary::<u8>()? % 9));
                let value = u.arbitrary::<u64>()?.to_le_bytes();
                self.write(offset, &value[..len.min(8)]);
            }
            2 => {
                let (offset, len) = (offset(u)?, usize::from(u.arbitrary::<u8>()? % 17));
                self.read(offset, len);
            }
            3 => {
                let register = u.arbitrary::<u16>()? % 0x110;
                let len = 1 << (u.arbitrary::<u8>()? % 4);
                let value = u.arbitrary::<u64>()?.to_le_bytes();
                self.write(Pci::CONFIG_SPACE + u64::from(register), &value[..len]);
            }
            4 => {
                let register = u.arbitrary::<u16>()? % 0x110;
                self.read(Pci::CONFIG_SPACE + u64::from(register), 1 << (u.arbitrary::<u8>()? % 4));
            }
            5 | 6 => {
                const WIDE: [(u64, usize); 11] = [
                    (reg::DEVICE_FEATURE_SELECT, 4),
                    (reg::DRIVER_FEATURE_SELECT, 4),
                    (reg::DRIVER_FEATURE, 4),
                    (reg::QUEUE_SELECT, 2),
                    (reg::QUEUE_SIZE, 2),
                    (reg::QUEUE_ENABLE, 2),
                    (reg::QUEUE_DESC, 4),
                    (reg::QUEUE_DRIVER, 8),
                    (reg::QUEUE_DEVICE + 4, 4),
                    (reg::QUEUE_RESET, 2),
                    (reg::NUM_QUEUES, 2),
                ];
                let (offset, len) = WIDE[usize::from(u.arbitrary::<u8>()?) % WIDE.len()];
                self.write(offset, &value(u)?.to_le_bytes()[..len]);
            }
            7 => self.negotiate(u)?,
            8 => {
                self.write16(reg::QUEUE_SELECT, u16::from(u.arbitrary::<u8>()? % 8));
                self.write16(reg::QUEUE_SIZE, 1 << (u.arbitrary::<u8>()? % 16));
                self.write16(reg::QUEUE_ENABLE, 1);
            }
            9 => {
                self.write16(reg::QUEUE_SELECT, u16::from(u.arbitrary::<u8>()? % 8));
                self.write16(reg::QUEUE_RESET, 1);
            }
            10 => {
                let add = [1, 2, 4, 8, 64, 128][usize::from(u.arbitrary::<u8>()? % 6)];
                self.write(reg::DEVICE_STATUS, &[self.pci.status() as u8 | add]);
            }
            11 => {
                let queue = u16::from(u.arbitrary::<u8>()? % 8);
                self.write(Pci::notification(queue), &u.arbitrary::<u32>()?.to_le_bytes());
            }
            12 => match u.arbitrary::<u8>()? % 4 {
                0 => {
                    self.owner.needs_reset(self.pci.status());
                    self.expecting_configuration(Transport::needs_reset);
                }
                1 => self.expecting_configuration(Transport::config_changed),
                _ => self.write(reg::DEVICE_STATUS, &[0]),
            },
            13 => {
                if self.owner.finish(&mut self.pci, u.arbitrary()?) {
                    self.is_reset();
                }
            }
            // Interrupts.
            14 => {
                let (queue, vector) = (u.arbitrary::<u8>()? % 8, u.arbitrary::<u8>()? % 8);
                self.write16(reg::QUEUE_SELECT, queue.into());
                let vector = if vector == 7 { NO_VECTOR } else { vector.into() };
                self.write16(reg::QUEUE_MSIX_VECTOR, vector);
                self.write16(reg::CONFIG_MSIX_VECTOR, vector ^ u16::from(queue & 1));
            }
            15 | 16 => {
                let (vector, bits) = (u.arbitrary::<u8>()? % 4, u.arbitrary::<u8>()?);
                let entry = TABLE + u64::from(vector) * msix::ENTRY;
                let address: u64 = if bits & 2 != 0 { 0xfee0_0000 } else { u64::from(bits) << 20 };
                if bits & 4 != 0 {
                    self.write(entry, &address.to_le_bytes());
                    self.write(entry + msix::DATA, &u32::from(bits >> 3).to_le_bytes());
                }
                self.write(entry + msix::VECTOR_CONTROL, &u32::from(bits & 1).to_le_bytes());
            }
            17 => {
                let bits = u.arbitrary::<u8>()?;
                let control = u16::from(bits & 3) << 14;
                self.write(Pci::CONFIG_SPACE + u64::from(MSIX_AT + msix::CONTROL), &control.to_le_bytes());
                let master = u16::from(bits >> 2 & 1) * command::BUS_MASTER;
                let command = master | (u16::from(bits >> 3 & 1) * command::MEMORY);
                self.write(Pci::CONFIG_SPACE + u64::from(header::COMMAND), &command.to_le_bytes());
            }
            18 => self.raise(u16::from(u.arbitrary::<u8>()? % 8)),
            _ => {
                let (offset, len) = (u.arbitrary::<u16>()?, u.arbitrary::<u8>()? % 5);
                let window = Pci::CONFIG_SPACE + u64::from(WINDOW_AT);
                self.write(window + u64::from(cap::OFFSET), &u32::from(offset).to_le_bytes());
                self.write(window + u64::from(cap::LENGTH), &u32::from(len).to_le_bytes());
                let data = window + u64::from(cap::PCI_CFG_DATA);
                self.write(data, &value(u)?.to_le_bytes());
                self.read(data, 4);
            }
        }
        Ok(())
    }

    fn negotiate(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        let accepted = match u.arbitrary::<u8>()? % 4 {
            0 => u.arbitrary()?,
            1 => feature::VERSION_1,
            _ => self.owner.offered,
        };
        let driver = status::ACKNOWLEDGE | status::DRIVER;
        self.write(reg::DEVICE_STATUS, &[status::ACKNOWLEDGE as u8]);
        self.write(reg::DEVICE_STATUS, &[driver as u8]);
        for word in 0..2_u32 {
            self.write(reg::DRIVER_FEATURE_SELECT, &word.to_le_bytes());
            self.write(reg::DRIVER_FEATURE, &((accepted >> (32 * word)) as u32).to_le_bytes());
        }
        self.write(reg::DEVICE_STATUS, &[(driver | status::FEATURES_OK) as u8]);
        Ok(())
    }

    fn write16(&mut self, offset: u64, value: u16) {
        self.write(offset, &value.to_le_bytes());
    }

    /// Writes, carries out the effect, and checks the messages sent.
    ///
    /// Only pending ones, by unmasked vectors.
    fn write(&mut self, offset: u64, data: &[u8]) {
        let (before, pending) = (self.pci.status(), self.vectors());
        let effect = self.pci.write(offset, data);
        if let Some(effect) = effect {
            if let Effect::Move { window } = effect {
                assert_eq!(window, self.pci.window());
            }
            let after = self.pci.status();
            if self.owner.carry_out(&mut self.pci, before, after, effect) {
                self.is_reset();
            }
        }
        let now = self.vectors();
        for sent in self.sent() {
            let from = |(was, is): (&Vector, &Vector)| was.pending && !is.closed && is.message == sent;
            assert!(pending.iter().zip(&now).any(from), "{sent:x?} of {pending:x?}, now {now:x?}");
        }
    }

    /// Interrupts for used buffers of `queue`.
    fn raise(&mut self, queue: u16) {
        let vector = self.interrupts.msi().map_or(NO_VECTOR, |msi| msi.queue_vector(queue));
        self.expecting(vector, |rig| rig.interrupts.used_buffer(queue));
    }

    /// Reports a configuration change, if the driver is running and none is pending.
    fn expecting_configuration(&mut self, report: impl FnOnce(&mut Pci)) {
        let before = self.vectors();
        report(&mut self.pci);
        if self.vectors() == before && self.platform.is_empty() {
            return;
        }
        let vector = self.interrupts.msi().map_or(NO_VECTOR, MsiTable::configuration_vector);
        let (sent, closed) = (self.sent(), before[usize::from(vector)].closed);
        assert_eq!(sent.is_empty(), closed, "{sent:x?} by {vector}, {before:x?}");
        assert!(sent.iter().all(|&message| message == before[usize::from(vector)].message));
    }

    /// An interrupt by `vector`: sent, pending, or nothing.
    fn expecting(&mut self, vector: u16, raise: impl FnOnce(&Self)) {
        let before = self.vectors();
        let on = self.interrupts.msi_on();
        raise(self);
        let (sent, now) = (self.sent(), self.vectors());
        let Some(old) = before.get(usize::from(vector)).filter(|_| on) else {
            assert!(sent.is_empty() && now == before, "{sent:x?} by {vector}");
            return;
        };
        let mut want = before.clone();
        want[usize::from(vector)].pending |= old.closed;
        assert_eq!(now, want);
        let goes = !old.closed && paravane_test_support::apic_vector(old.message).is_some();
        assert_eq!(sent, vec![old.message; usize::from(goes)]);
    }

    fn sent(&self) -> Vec<MsiMessage> {
        self.platform.take()
    }

    fn vectors(&mut self) -> Vec<Vector> {
        let all = self.config(MSIX_AT + msix::CONTROL, 2) as u16 & msix::FUNCTION_MASK != 0
            || self.config(header::COMMAND, 2) as u16 & command::BUS_MASTER == 0;
        let pending = self.read(PENDING, 4);
        let entry = |vector: u16| {
            let entry = TABLE + u64::from(vector) * msix::ENTRY;
            let [low, high, data, control] = [0, 4, 8, 12].map(|at| self.read(entry + at, 4));
            let message = MsiMessage { address: u64::from(high) << 32 | u64::from(low), data, device: 0 };
            Vector { message, closed: all || control & 1 != 0, pending: pending >> vector & 1 != 0 }
        };
        (0..VECTORS).map(entry).collect()
    }

    fn config(&mut self, register: u16, len: usize) -> u32 {
        self.read(Pci::CONFIG_SPACE + u64::from(register), len)
    }

    /// Reads; returns the first 32 bits.
    fn read(&mut self, offset: u64, len: usize) -> u32 {
        let mut data = [0xee; 16];
        self.pci.read(offset, &mut data[..len], &mut |at, out| {
            assert!(u64::from(at) + out.len() as u64 <= 0xf00);
            out.fill(0xcc);
        });
        assert!(data[len..].iter().all(|&byte| byte == 0xee));
        data[len..].fill(0);
        u32::from_le_bytes([data[0], data[1], data[2], data[3]])
    }

    fn is_reset(&mut self) {
        assert_eq!(self.pci.status(), 0);
        assert_eq!(self.read(ISR, 1), 0);
        assert_eq!(self.read(PENDING, 4), 0);
        let msi = self.interrupts.msi().expect("it has messages");
        assert_eq!(msi.configuration_vector(), NO_VECTOR);
        assert!((0..self.queues).all(|queue| msi.queue_vector(queue) == NO_VECTOR));
    }

    fn check(&mut self) {
        let now = self.pci.status();
        assert_eq!(now, self.read(reg::DEVICE_STATUS, 1));
        self.owner.check_status(now);
        for vector in self.vectors() {
            assert!(vector.closed || !vector.pending, "{vector:x?}");
        }
        let violations = self.pci.violations();
        assert!(violations >= self.violations);
        self.violations = violations;
    }

    /// Checks that the settings of a running queue are frozen.
    fn restart_each_queue(&mut self) {
        if self.owner.serves(self.pci.status()) {
            for (queue, addresses) in self.owner.running.clone() {
                self.write16(reg::QUEUE_SELECT, queue);
                for (offset, len) in [(reg::QUEUE_SIZE, 2), (reg::QUEUE_DESC, 8), (reg::QUEUE_DEVICE, 4)] {
                    self.write(offset, &[0x5a; 8][..len]);
                }
                assert_eq!(self.read(reg::QUEUE_ENABLE, 2), 1);
                assert_eq!(self.read(reg::QUEUE_SIZE, 2), u32::from(addresses.size));
                assert_eq!(self.read(reg::QUEUE_DESC, 4), addresses.desc as u32);
                assert_eq!(self.read(reg::QUEUE_DEVICE + 4, 4), (addresses.device >> 32) as u32);
            }
        }
    }
}

fn offset(u: &mut Unstructured<'_>) -> Result<u64> {
    Ok(match u.arbitrary::<u8>()? % 6 {
        0 => u.arbitrary()?,
        1 => ISR + u64::from(u.arbitrary::<u8>()? % 8),
        2 => DEVICE + u64::from(u.arbitrary::<u16>()? % 0x1100),
        3 => TABLE + u64::from(u.arbitrary::<u8>()?),
        4 => Pci::notification(0) + u64::from(u.arbitrary::<u8>()?),
        _ => u64::from(u.arbitrary::<u8>()? % 0x40),
    })
}

fn value(u: &mut Unstructured<'_>) -> Result<u64> {
    let byte = u.arbitrary::<u8>()?;
    if byte < 0xf0 { Ok(byte.into()) } else { u.arbitrary() }
}
