//! Function under test, and the driver's side of its registers.
use paravane_notify::msi::{MsiController, MsiMessage, MsiSink, MsiTable};
use paravane_notify::{InterruptSink, Interrupts, NotifyError};
use paravane_spec::queue::QueueAddresses;
use paravane_spec::{device_id, feature, pci, status};
use paravane_transport::pci::Pci;
use paravane_transport::{DeviceDescription, Effect, Transport};
use pci::common as reg;
use std::sync::{Arc, Mutex};

pub(crate) const QUEUE_SIZES: [u16; 3] = [256, 64, 0];
pub(crate) const OFFERED: u64 = 1 << 5 | feature::INDIRECT_DESC | feature::VERSION_1 | feature::RING_RESET;
pub(crate) const DRIVER: u32 = status::ACKNOWLEDGE | status::DRIVER;
pub(crate) const NEGOTIATED: u32 = DRIVER | status::FEATURES_OK;
pub(crate) const RUNNING: u32 = NEGOTIATED | status::DRIVER_OK;
pub(crate) const VECTORS: u16 = 4;
pub(crate) const LINE: u8 = 11;

/// Counts edges, and records the messages that were sent.
#[derive(Default)]
pub(crate) struct Wires {
    pub(crate) edges: Mutex<u32>,
    pub(crate) messages: Mutex<Vec<MsiMessage>>,
}

struct Line(Arc<Wires>);

impl InterruptSink for Line {
    fn raise(&self) {
        *self.0.edges.lock().unwrap() += 1;
    }
}

struct Sink(Arc<Wires>);

impl MsiSink for Sink {
    fn route(&self, message: MsiMessage) -> Result<(), NotifyError> {
        paravane_test_support::apic_vector(message).map(|_| ()).ok_or(message.refused())
    }

    fn fire(&self, message: MsiMessage) {
        self.0.messages.lock().unwrap().push(message);
    }
}

impl MsiController for Sink {
    fn sink(&self) -> Result<Box<dyn MsiSink>, NotifyError> {
        Ok(Box::new(Self(Arc::clone(&self.0))))
    }
}

pub(crate) fn addresses(size: u16) -> QueueAddresses {
    QueueAddresses { size, desc: 0x1_0000_1000, driver: 0x2_0000_2000, device: 0x3_0000_3000 }
}

/// Configuration space of the device: each byte is its own offset.
pub(crate) fn config(offset: u32, out: &mut [u8]) {
    for (at, byte) in (offset..).zip(out) {
        *byte = at as u8;
    }
}

pub(crate) struct Rig {
    pub(crate) pci: Pci,
    pub(crate) interrupts: Arc<Interrupts>,
    pub(crate) wires: Arc<Wires>,
}

impl Rig {
    pub(crate) fn new() -> Self {
        Self::offering(OFFERED)
    }

    pub(crate) fn offering(features: u64) -> Self {
        let wires = Arc::new(Wires::default());
        let table = MsiTable::new(&Sink(Arc::clone(&wires)), VECTORS, QUEUE_SIZES.len()).unwrap();
        let interrupts = Arc::new(Interrupts::with_msi(Arc::new(Line(Arc::clone(&wires))), table));
        Self::with(features, interrupts, wires)
    }

    /// Function with its wired line only.
    pub(crate) fn wired() -> Self {
        let wires = Arc::new(Wires::default());
        let interrupts = Arc::new(Interrupts::wired(Arc::new(Line(Arc::clone(&wires)))));
        Self::with(OFFERED, interrupts, wires)
    }

    fn with(features: u64, interrupts: Arc<Interrupts>, wires: Arc<Wires>) -> Self {
        let device =
            DeviceDescription { device_id: device_id::BLK, features, queue_sizes: QUEUE_SIZES.to_vec() };
        Self { pci: Pci::new(device, Arc::clone(&interrupts), LINE), interrupts, wires }
    }

    pub(crate) fn negotiated() -> Self {
        let mut rig = Self::new();
        rig.negotiate(OFFERED);
        assert_eq!(rig.status(), NEGOTIATED);
        rig
    }

    /// Running, with queue 0 live at 256 entries.
    pub(crate) fn running() -> Self {
        let mut rig = Self::negotiated();
        rig.start();
        rig
    }

    /// From negotiated to running.
    pub(crate) fn start(&mut self) {
        self.set_up(0, &addresses(256));
        assert_eq!(self.write(reg::QUEUE_ENABLE, 2, 1), None);
        let queues = vec![(0, addresses(256))];
        let activate = Effect::Activate { features: OFFERED, queues };
        assert_eq!(self.write(reg::DEVICE_STATUS, 1, RUNNING.into()), Some(activate));
    }

    pub(crate) fn negotiate(&mut self, accepted: u64) {
        self.write(reg::DEVICE_STATUS, 1, status::ACKNOWLEDGE.into());
        self.write(reg::DEVICE_STATUS, 1, DRIVER.into());
        for word in 0..2 {
            self.write(reg::DRIVER_FEATURE_SELECT, 4, word);
            self.write(reg::DRIVER_FEATURE, 4, accepted >> (32 * word));
        }
        self.write(reg::DEVICE_STATUS, 1, NEGOTIATED.into());
    }

    /// Writes the fields of a queue, all but `queue_enable`.
    pub(crate) fn set_up(&mut self, queue: u16, to: &QueueAddresses) {
        self.write(reg::QUEUE_SELECT, 2, queue.into());
        self.write(reg::QUEUE_SIZE, 2, to.size.into());
        for (at, address) in
            [(reg::QUEUE_DESC, to.desc), (reg::QUEUE_DRIVER, to.driver), (reg::QUEUE_DEVICE, to.device)]
        {
            self.write(at, 4, address);
            self.write(at + 4, 4, address >> 32);
        }
    }

    pub(crate) fn write(&mut self, offset: u64, len: usize, value: u64) -> Option<Effect> {
        self.pci.write(offset, &value.to_le_bytes()[..len])
    }

    pub(crate) fn read(&mut self, offset: u64, len: usize) -> u64 {
        let mut data = [0xee; 8];
        self.pci.read(offset, &mut data[..len], &mut config);
        data[len..].fill(0);
        u64::from_le_bytes(data)
    }

    pub(crate) fn status(&mut self) -> u32 {
        self.read(reg::DEVICE_STATUS, 1) as u32
    }

    pub(crate) fn config_read(&mut self, register: u16, len: usize) -> u64 {
        let mut data = [0xee; 8];
        self.pci.read(Pci::CONFIG_SPACE + u64::from(register), &mut data[..len], &mut config);
        data[len..].fill(0);
        u64::from_le_bytes(data)
    }

    pub(crate) fn config_write(&mut self, register: u16, len: usize, value: u64) -> Option<Effect> {
        self.pci.write(Pci::CONFIG_SPACE + u64::from(register), &value.to_le_bytes()[..len])
    }

    /// Offset of the `n`-th capability (from 0) whose first 4 bytes `wanted` accepts.
    pub(crate) fn capability(&mut self, wanted: impl Fn([u8; 4]) -> bool) -> Option<u16> {
        let mut at = self.config_read(pci::header::CAPABILITIES, 1) as u16;
        while at != 0 {
            let head = (self.config_read(at, 4) as u32).to_le_bytes();
            if wanted(head) {
                return Some(at);
            }
            at = head[1].into();
        }
        None
    }

    pub(crate) fn virtio(&mut self, cfg_type: u8) -> u16 {
        self.capability(|[id, _, _, kind]| id == pci::capability::VENDOR && kind == cfg_type).unwrap()
    }

    /// Offset in the BAR and length of a structure.
    pub(crate) fn region(&mut self, cfg_type: u8) -> (u64, u64) {
        let at = self.virtio(cfg_type);
        assert_eq!(self.config_read(at + pci::cap::BAR, 1), 0);
        (self.config_read(at + pci::cap::OFFSET, 4), self.config_read(at + pci::cap::LENGTH, 4))
    }

    /// The access must be counted as a violation and have no effect.
    #[track_caller]
    pub(crate) fn refused(&mut self, offset: u64, len: usize, value: u64) {
        let before = self.pci.violations();
        assert_eq!(self.write(offset, len, value), None, "{offset:#x} = {value:#x}");
        assert_eq!(self.pci.violations(), before + 1, "{offset:#x} = {value:#x} was to be a violation");
    }

    /// The access must not be counted, and must request nothing from the owner.
    #[track_caller]
    pub(crate) fn quiet(&mut self, offset: u64, len: usize, value: u64) {
        let before = self.pci.violations();
        assert_eq!(self.write(offset, len, value), None, "{offset:#x} = {value:#x}");
        assert_eq!(self.pci.violations(), before, "{offset:#x} = {value:#x} was to be legal");
    }

    pub(crate) fn edges(&self) -> u32 {
        *self.wires.edges.lock().unwrap()
    }

    /// The data of the messages sent since the last call.
    pub(crate) fn sent(&self) -> Vec<u32> {
        self.wires.messages.lock().unwrap().drain(..).map(|message| message.data).collect()
    }
}
