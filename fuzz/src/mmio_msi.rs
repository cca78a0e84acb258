//! The MSI extension of virtio-mmio against a driver that ignores all rules, with register versions 2 and 3.
//!
//! Each source is compared with a plain model of message, mask and pending bit, and each message
//! with that of the model.
use arbitrary::{Result, Unstructured};
use paravane_notify::Interrupts;
use paravane_notify::msi::{MsiMessage, MsiTable};
use paravane_spec::mmio_msi::{self as msi, command, state};
use paravane_spec::{feature, mmio as reg, status};
use paravane_test_support::{NoInterrupt, RecordedMessages};
use paravane_transport::mmio::Mmio;
use paravane_transport::{DeviceDescription, Effect, NotifyAddress, Transport};
use std::sync::Arc;

/// Runs one input.
pub fn mmio_msi(data: &[u8]) {
    let mut u = Unstructured::new(data);
    let Ok(mut rig) = Rig::new(&mut u) else { return };
    while !u.is_empty() {
        if rig.step(&mut u).is_err() {
            break;
        }
    }
}

const QUEUES: [u16; 3] = [64, 0, 8];
/// The source of configuration changes, after those of the queues.
const CONFIGURATION: usize = QUEUES.len();
const OFFERED: u64 = feature::VERSION_1 | feature::RING_RESET | msi::F_MSI | msi::F_NOTIFICATION;

/// One source, as docs/reference/virtio-mmio-msi.md specifies.
#[derive(Clone, Copy, Debug, Default)]
struct Source {
    message: Option<MsiMessage>,
    masked: bool,
    pending: bool,
}

struct Rig {
    mmio: Mmio,
    interrupts: Arc<Interrupts>,
    platform: RecordedMessages,
    on: bool,
    refused: bool,
    sources: [Source; QUEUES.len() + 1],
    staged: MsiMessage,
    selected: u32,
    /// Messages that must have been sent since the last check.
    sent: Vec<MsiMessage>,
    /// Queues that a slow owner is resetting.
    stopping: [bool; QUEUES.len()],
    prompt: bool,
    resetting: bool,
}

impl Rig {
    fn new(u: &mut Unstructured<'_>) -> Result<Self> {
        let platform = RecordedMessages::default();
        let vectors = QUEUES.len() as u16 + 1;
        let table = MsiTable::new(&platform, vectors, QUEUES.len()).expect("this platform refuses none");
        let interrupts = Arc::new(Interrupts::with_msi(Arc::new(NoInterrupt), table));
        let device = DeviceDescription { device_id: 1, features: OFFERED, queue_sizes: QUEUES.to_vec() };
        let mmio = Mmio::new(device, Arc::clone(&interrupts));
        let bits = u.arbitrary::<u8>()?;
        Ok(Self {
            mmio: if bits & 2 == 0 { mmio } else { mmio.version_3() },
            interrupts,
            platform,
            on: false,
            refused: false,
            sources: [Source::default(); QUEUES.len() + 1],
            staged: MsiMessage::default(),
            selected: 0,
            sent: Vec::new(),
            stopping: [false; QUEUES.len()],
            prompt: bits & 1 == 0,
            resetting: false,
        })
    }

    fn step(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        match u.arbitrary::<u8>()? % 16 {
            0 | 1 => self.write(msi::MSI_COMMAND, u32::from(u.arbitrary::<u8>()? % 8)),
            2 => {
                let offset = [msi::MSI_ADDRESS_LOW, msi::MSI_ADDRESS_HIGH, msi::MSI_DATA];
                let offset = offset[usize::from(u.arbitrary::<u8>()? % 3)];
                let value = u.arbitrary()?;
                self.write(offset, value);
            }
            3 => {
                // A deliverable message.
                self.write(msi::MSI_ADDRESS_LOW, 0xfee0_0000 | u32::from(u.arbitrary::<u8>()?) << 12);
                self.write(msi::MSI_ADDRESS_HIGH, 0);
                self.write(msi::MSI_DATA, u.arbitrary::<u8>()?.into());
                self.write(msi::MSI_COMMAND, command::CONFIGURE);
            }
            4 | 5 => {
                let select = [0, 1, 2, 3, msi::SELECT_CONFIGURATION, 0x1_0000, u32::MAX, 0];
                self.write(reg::QUEUE_SEL, select[usize::from(u.arbitrary::<u8>()? % 8)]);
            }
            6..9 => self.raise(usize::from(u.arbitrary::<u8>()? % 4)),
            9 => self.negotiate(u.arbitrary()?),
            10 => {
                self.write(reg::QUEUE_SIZE, 8);
                self.write(reg::QUEUE_READY, u32::from(u.arbitrary::<u8>()? % 2));
            }
            11 => self.write(reg::QUEUE_RESET, 1),
            12 => {
                let add = [0, 4, 128, 4][usize::from(u.arbitrary::<u8>()? % 4)];
                self.write(reg::STATUS, self.mmio.status() | add);
            }
            13 => match u.arbitrary::<u8>()? % 4 {
                0 => self.write(reg::STATUS, 0),
                1 => self.write(reg::INTERRUPT_ACK, 3),
                _ => self.finish(),
            },
            14 => {
                let offset = msi::NOTIFY_PAGE + u64::from(u.arbitrary::<u8>()?);
                let value = u.arbitrary()?;
                self.write(offset, value);
            }
            _ => {
                let offset = u64::from(u.arbitrary::<u16>()? % 0x3000);
                let data = u.arbitrary::<[u8; 8]>()?;
                let len = usize::from(u.arbitrary::<u8>()? % 9);
                // The model must see aligned words, which are writes as above.
                match <[u8; 4]>::try_from(&data[..len]) {
                    Ok(word) if offset.is_multiple_of(4) => self.write(offset, u32::from_le_bytes(word)),
                    _ => drop(self.mmio.write(offset, &data[..len])),
                }
            }
        }
        self.check();
        Ok(())
    }

    fn negotiate(&mut self, kind: u8) {
        let accepted = match kind % 4 {
            0 => OFFERED & !msi::F_MSI,
            1 => OFFERED & !msi::F_NOTIFICATION,
            _ => OFFERED,
        };
        self.write(reg::STATUS, status::ACKNOWLEDGE | status::DRIVER);
        for word in 0..2 {
            self.write(reg::DRIVER_FEATURES_SEL, word);
            self.write(reg::DRIVER_FEATURES, (accepted >> (32 * word)) as u32);
        }
        self.write(reg::STATUS, status::ACKNOWLEDGE | status::DRIVER | status::FEATURES_OK);
    }

    /// The selected source, if it exists.
    fn source(&self) -> Option<usize> {
        match self.selected {
            msi::SELECT_CONFIGURATION => Some(CONFIGURATION),
            queue => usize::try_from(queue).ok().filter(|&queue| QUEUES.get(queue).is_some_and(|&q| q > 0)),
        }
    }

    /// Whether the registers of the extension exist, by their answers.
    fn negotiated(&self) -> (bool, bool) {
        let mut word = [0; 4];
        self.mmio.read(msi::MSI_LIMIT, &mut word, |_, _| ());
        let messages = u32::from_le_bytes(word) != 0;
        self.mmio.read(msi::NOTIFY_MULTIPLIER, &mut word, |_, _| ());
        (messages, u32::from_le_bytes(word) != 0)
    }

    fn write(&mut self, offset: u64, value: u32) {
        let before = self.mmio.status();
        let (messages, notifications) = self.negotiated();
        let writable = before & status::FEATURES_OK != 0 && before & status::FAILED == 0 && !self.resetting;
        let violations = self.mmio.violations();
        let effect = self.mmio.write(offset, &value.to_le_bytes());
        if self.resetting {
            let is_allowed = (offset, value) == (reg::STATUS, 0) || offset == reg::INTERRUPT_ACK;
            assert!(is_allowed || self.mmio.violations() == violations + 1, "{offset:#x} during a reset");
            assert_eq!((effect, self.mmio.status()), (None, before));
            return;
        }
        if offset >= msi::NOTIFY_PAGE {
            if let Some(effect) = effect {
                let at = msi::NOTIFY_PAGE..msi::NOTIFY_PAGE + 4 * QUEUES.len() as u64;
                assert!(notifications && at.contains(&offset) && offset.is_multiple_of(4));
                let queue = ((offset - msi::NOTIFY_PAGE) / 4) as u16;
                assert_eq!(effect, Effect::Notify { queue });
                let address = NotifyAddress { offset, datamatch: None };
                assert_eq!(self.mmio.notify_address(queue), Some(address));
            }
            return;
        }
        match offset {
            reg::QUEUE_SEL if !self.resetting => self.selected = value,
            msi::MSI_ADDRESS_LOW if writable && messages => {
                self.staged.address = self.staged.address >> 32 << 32 | u64::from(value);
            }
            msi::MSI_ADDRESS_HIGH if writable && messages => {
                self.staged.address = u64::from(value) << 32 | self.staged.address & 0xffff_ffff;
            }
            msi::MSI_DATA if writable && messages => self.staged.data = value,
            msi::MSI_COMMAND if writable && messages => {
                self.refused = !self.command(value, before & status::DRIVER_OK != 0);
            }
            _ => {}
        }
        match effect {
            Some(Effect::Reset) => {
                self.resetting = true;
                // With version 3 it takes until the owner says so.
                if self.prompt && !self.mmio.polls_reset() {
                    self.finish();
                }
            }
            Some(Effect::ResetQueue { queue }) => {
                // QueueReady=0 stops the queue and keeps its settings.
                self.stopping[usize::from(queue)] = offset == reg::QUEUE_RESET;
                if self.prompt {
                    self.finish();
                }
            }
            None if offset == reg::QUEUE_RESET && value == 1 && writable => self.reset_queue(),
            _ => {}
        }
        if (offset, value) == (reg::STATUS, 0) && self.mmio.status() == 0 {
            self.defaults();
        }
    }

    /// A queue reset without effect: refused, done at once, or under way.
    fn reset_queue(&mut self) {
        let Some(queue) = self.source().filter(|&source| source != CONFIGURATION) else { return };
        let mut word = [0; 4];
        self.mmio.read(reg::QUEUE_RESET, &mut word, |_, _| ());
        if u32::from_le_bytes(word) == 0 {
            self.sources[queue] = Source::default();
        } else {
            self.stopping[queue] = true;
        }
    }

    /// Whether it is carried out.
    fn command(&mut self, value: u32, running: bool) -> bool {
        match value {
            command::ENABLE | command::DISABLE if running => return false,
            command::ENABLE if self.on => return true,
            command::ENABLE | command::DISABLE => {
                self.on = value == command::ENABLE;
                self.sources = Default::default();
                return true;
            }
            _ => {}
        }
        let (true, Some(source)) = (self.on, self.source()) else { return false };
        let source = &mut self.sources[source];
        match value {
            command::CONFIGURE if paravane_test_support::apic_vector(self.staged).is_none() => return false,
            command::CONFIGURE => source.message = Some(self.staged),
            command::MASK => source.masked = true,
            command::UNMASK => {
                source.masked = false;
                if std::mem::take(&mut source.pending) {
                    self.sent.extend(source.message);
                }
            }
            command::UNCONFIGURE => *source = Source::default(),
            _ => return false,
        }
        true
    }

    /// Interrupts, as the device.
    fn raise(&mut self, source: usize) {
        if source == CONFIGURATION {
            self.interrupts.config_change();
        } else {
            self.interrupts.used_buffer(source as u16);
        }
        if self.on {
            let source = &mut self.sources[source];
            if source.masked {
                source.pending = true;
            } else {
                self.sent.extend(source.message);
            }
        }
    }

    /// Reports all requested effects as done.
    fn finish(&mut self) {
        for queue in 0..QUEUES.len() {
            self.mmio.queue_reset_done(queue as u16);
            if std::mem::take(&mut self.stopping[queue]) {
                self.sources[queue] = Source::default();
            }
        }
        self.mmio.reset_done();
        if std::mem::take(&mut self.resetting) {
            assert_eq!(self.mmio.status(), 0);
            self.defaults();
        }
    }

    fn defaults(&mut self) {
        self.on = false;
        self.refused = false;
        self.sources = Default::default();
        self.staged = MsiMessage::default();
        self.selected = 0;
        self.stopping = Default::default();
    }

    fn check(&mut self) {
        assert_eq!(self.interrupts.msi_on(), self.on);
        let sent = self.platform.take();
        assert_eq!(sent, std::mem::take(&mut self.sent));
        if self.on {
            assert_eq!(self.interrupts.line().status(), 0, "a cause in the status register");
        }
        if !self.negotiated().0 {
            return;
        }
        let mut word = [0; 4];
        self.mmio.read(msi::MSI_STATE, &mut word, |_, _| ());
        let source = self.source().map(|source| self.sources[source]).unwrap_or_default();
        let bits = [
            (self.on, state::ON),
            (source.message.is_some(), state::CONFIGURED),
            (source.masked, state::MASKED),
            (source.pending, state::PENDING),
            (self.refused, state::REFUSED),
        ];
        let expected = bits.iter().fold(0, |all, &(set, bit)| if set { all | bit } else { all });
        assert_eq!(u32::from_le_bytes(word), expected, "{source:?}");
    }
}
