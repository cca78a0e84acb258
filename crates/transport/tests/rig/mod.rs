//! Device under test, and the driver's side of its registers.
#![allow(dead_code)] // Each test program uses its part.
use paravane_notify::msi::{MsiController, MsiMessage, MsiSink, MsiTable};
use paravane_notify::{Interrupts, NotifyError};
use paravane_spec::queue::QueueAddresses;
use paravane_spec::{feature, mmio as reg, status};
use paravane_test_support::NoInterrupt;
use paravane_transport::Transport as _;
use paravane_transport::mmio::Mmio;
use paravane_transport::{DeviceDescription, Effect};
use std::sync::{Arc, Mutex};

pub(crate) const DEVICE_ID: u32 = 2;
pub(crate) const QUEUE_SIZES: [u16; 3] = [256, 64, 0];
/// Offered features: a low bit, ring features, and per-queue reset.
pub(crate) const OFFERED: u64 = 1 << 5 | feature::INDIRECT_DESC | feature::VERSION_1 | feature::RING_RESET;
pub(crate) const DRIVER: u32 = status::ACKNOWLEDGE | status::DRIVER;
pub(crate) const NEGOTIATED: u32 = DRIVER | status::FEATURES_OK;
pub(crate) const RUNNING: u32 = NEGOTIATED | status::DRIVER_OK;

/// Platform that accepts messages to the local APICs and records their data.
#[derive(Clone, Default)]
pub(crate) struct Platform(Arc<Mutex<Vec<u32>>>);

impl Platform {
    /// Messages delivered since the last call.
    pub(crate) fn delivered(&self) -> Vec<u32> {
        self.0.lock().unwrap().drain(..).collect()
    }
}

impl MsiController for Platform {
    fn sink(&self) -> Result<Box<dyn MsiSink>, NotifyError> {
        Ok(Box::new(self.clone()))
    }
}

impl MsiSink for Platform {
    fn route(&self, message: MsiMessage) -> Result<(), NotifyError> {
        paravane_test_support::apic_vector(message).map(|_| ()).ok_or(message.refused())
    }

    fn fire(&self, message: MsiMessage) {
        self.0.lock().unwrap().push(message.data);
    }
}

/// Configuration space of the device: each byte is its own offset.
pub(crate) fn config(offset: u32, out: &mut [u8]) {
    for (at, byte) in (offset..).zip(out) {
        *byte = at as u8;
    }
}

pub(crate) fn addresses(size: u16) -> QueueAddresses {
    QueueAddresses { size, desc: 0x1_0000_1000, driver: 0x2_0000_2000, device: 0x3_0000_3000 }
}

pub(crate) struct Rig {
    pub(crate) mmio: Mmio,
    pub(crate) interrupts: Arc<Interrupts>,
}

impl Rig {
    pub(crate) fn new() -> Self {
        Self::offering(OFFERED)
    }

    pub(crate) fn offering(features: u64) -> Self {
        Self::interrupting_by(Interrupts::wired(Arc::new(NoInterrupt)), features)
    }

    /// With a vector for each queue and the configuration change.
    pub(crate) fn with_messages(features: u64) -> (Self, Platform) {
        let platform = Platform::default();
        let table = MsiTable::new(&platform, QUEUE_SIZES.len() as u16 + 1, QUEUE_SIZES.len()).unwrap();
        (Self::interrupting_by(Interrupts::with_msi(Arc::new(NoInterrupt), table), features), platform)
    }

    fn interrupting_by(interrupts: Interrupts, features: u64) -> Self {
        let interrupts = Arc::new(interrupts);
        let device = DeviceDescription { device_id: DEVICE_ID, features, queue_sizes: QUEUE_SIZES.to_vec() };
        Self { mmio: Mmio::new(device, interrupts.clone()), interrupts }
    }

    /// With all offered features negotiated.
    pub(crate) fn negotiated() -> Self {
        Self::negotiated_with(OFFERED)
    }

    pub(crate) fn negotiated_with(accepted: u64) -> Self {
        let mut rig = Self::new();
        rig.negotiate(accepted);
        assert_eq!(rig.status(), NEGOTIATED);
        rig
    }

    /// Running, with queue 0 live at 256 entries.
    pub(crate) fn running() -> Self {
        Self::running_with(OFFERED)
    }

    pub(crate) fn running_with(accepted: u64) -> Self {
        let mut rig = Self::negotiated_with(accepted);
        rig.set_up(0, &addresses(256));
        assert_eq!(rig.write(reg::QUEUE_READY, 1), None);
        let queues = vec![(0, addresses(256))];
        assert_eq!(rig.write(reg::STATUS, RUNNING), Some(Effect::Activate { features: accepted, queues }));
        rig
    }

    pub(crate) fn negotiate(&mut self, accepted: u64) {
        self.write(reg::STATUS, status::ACKNOWLEDGE);
        self.write(reg::STATUS, DRIVER);
        self.accept(accepted);
        self.write(reg::STATUS, NEGOTIATED);
    }

    pub(crate) fn accept(&mut self, accepted: u64) {
        for word in 0..2 {
            self.write(reg::DRIVER_FEATURES_SEL, word);
            self.write(reg::DRIVER_FEATURES, (accepted >> (32 * word)) as u32);
        }
    }

    /// Writes the registers of a queue, all but QueueReady.
    pub(crate) fn set_up(&mut self, queue: u32, to: &QueueAddresses) {
        self.write(reg::QUEUE_SEL, queue);
        self.write(reg::QUEUE_SIZE, to.size.into());
        for (low, high, address) in [
            (reg::QUEUE_DESC_LOW, reg::QUEUE_DESC_HIGH, to.desc),
            (reg::QUEUE_DRIVER_LOW, reg::QUEUE_DRIVER_HIGH, to.driver),
            (reg::QUEUE_DEVICE_LOW, reg::QUEUE_DEVICE_HIGH, to.device),
        ] {
            self.write(low, address as u32);
            self.write(high, (address >> 32) as u32);
        }
    }

    pub(crate) fn write(&mut self, offset: u64, value: u32) -> Option<Effect> {
        self.mmio.write(offset, &value.to_le_bytes())
    }

    pub(crate) fn read(&self, offset: u64) -> u32 {
        let mut data = [0xee; 4];
        self.mmio.read(offset, &mut data, config);
        u32::from_le_bytes(data)
    }

    pub(crate) fn status(&self) -> u32 {
        self.read(reg::STATUS)
    }

    /// The access must be counted as a violation and have no effect.
    #[track_caller]
    pub(crate) fn refused(&mut self, offset: u64, value: u32) {
        let before = self.mmio.violations();
        assert_eq!(self.write(offset, value), None, "{offset:#x} = {value:#x}");
        assert_eq!(self.mmio.violations(), before + 1, "{offset:#x} = {value:#x} was to be a violation");
    }

    /// The access must not be counted, and must request nothing from the owner.
    #[track_caller]
    pub(crate) fn quiet(&mut self, offset: u64, value: u32) {
        let before = self.mmio.violations();
        assert_eq!(self.write(offset, value), None, "{offset:#x} = {value:#x}");
        assert_eq!(self.mmio.violations(), before, "{offset:#x} = {value:#x} was to be legal");
    }

    /// The read must be counted as a violation and return zeroes.
    #[track_caller]
    pub(crate) fn unreadable(&self, offset: u64) {
        let before = self.mmio.violations();
        assert_eq!(self.read(offset), 0, "{offset:#x}");
        assert_eq!(self.mmio.violations(), before + 1, "reading {offset:#x} was to be a violation");
    }
}
