//! Registers that are saved and restored: the driver sees no difference, and no bytes do harm.
use paravane_notify::Interrupts;
use paravane_notify::msi::MsiTable;
use paravane_spec::{device_id, feature, mmio, mmio_msi, pci, status};
use paravane_test_support::{NoInterrupt, RecordedMessages};
use paravane_transport::mmio::Mmio;
use paravane_transport::pci::Pci;
use paravane_transport::{DeviceDescription, Effect, RestoreError, Transport};
use proptest::prelude::*;
use std::sync::Arc;

const SIZES: [u16; 2] = [256, 64];
const FEATURES: u64 = feature::VERSION_1 | feature::RING_RESET | feature::SUSPEND | 1 << 5;
const NEGOTIATED: u32 = status::ACKNOWLEDGE | status::DRIVER | status::FEATURES_OK;
const RUNNING: u32 = NEGOTIATED | status::DRIVER_OK;

/// A device that its driver has not touched.
struct Device {
    transport: Box<dyn Transport>,
    interrupts: Arc<Interrupts>,
    messages: RecordedMessages,
    is_pci: bool,
}

impl Device {
    fn new(is_pci: bool) -> Self {
        Self::offering(is_pci, FEATURES | if is_pci { 0 } else { mmio_msi::F_MSI | mmio_msi::F_NOTIFICATION })
    }

    fn offering(is_pci: bool, features: u64) -> Self {
        let messages = RecordedMessages::default();
        let table = MsiTable::new(&messages, 3, SIZES.len()).unwrap();
        let interrupts = Arc::new(Interrupts::with_msi(Arc::new(NoInterrupt), table));
        let device = DeviceDescription { device_id: device_id::BLK, features, queue_sizes: SIZES.to_vec() };
        let transport: Box<dyn Transport> = match is_pci {
            true => Box::new(Pci::new(device, Arc::clone(&interrupts), 5)),
            false => Box::new(Mmio::new(device, Arc::clone(&interrupts))),
        };
        Self { transport, interrupts, messages, is_pci }
    }

    /// Writes, and carries out what that asks for.
    fn write(&mut self, offset: u64, data: &[u8]) {
        match self.transport.write(offset, data) {
            Some(Effect::Reset) => self.transport.reset_done(),
            Some(Effect::ResetQueue { queue }) => self.transport.queue_reset_done(queue),
            Some(Effect::Suspend) => self.transport.suspend_done(),
            Some(Effect::Resume) => self.transport.resume_done(),
            _ => {}
        }
    }

    fn write_status(&mut self, status: u32) {
        match self.is_pci {
            true => self.write(pci::common::DEVICE_STATUS, &[status as u8]),
            false => self.write(mmio::STATUS, &status.to_le_bytes()),
        }
    }

    /// Sets the device up, with messages that the driver has masked, and runs it.
    fn start(&mut self) {
        self.write_status(status::ACKNOWLEDGE | status::DRIVER);
        let features = FEATURES | mmio_msi::F_MSI | mmio_msi::F_NOTIFICATION;
        for word in 0..2_u32 {
            let bits = (if self.is_pci { FEATURES } else { features } >> (32 * word)) as u32;
            let [select, accept] = match self.is_pci {
                true => [pci::common::DRIVER_FEATURE_SELECT, pci::common::DRIVER_FEATURE],
                false => [mmio::DRIVER_FEATURES_SEL, mmio::DRIVER_FEATURES],
            };
            self.write(select, &word.to_le_bytes());
            self.write(accept, &bits.to_le_bytes());
        }
        self.write_status(NEGOTIATED);
        if self.is_pci {
            let at = Pci::CONFIG_SPACE;
            self.write(at + u64::from(pci::header::BAR), &0xe000_0000_u32.to_le_bytes());
            self.write(at + u64::from(pci::header::COMMAND), &6_u16.to_le_bytes());
            // Message control of the first capability: enabled.
            let mut first = [0];
            self.transport.read(at + u64::from(pci::header::CAPABILITIES), &mut first, &mut |_, _| ());
            self.write(at + u64::from(first[0]) + 2, &0x8000_u16.to_le_bytes());
            for (word, value) in [(0, 0xfee0_0000_u32), (1, 0), (2, 0x41), (3, 1)] {
                self.write(0x8000 + 4 * word, &value.to_le_bytes());
            }
            self.write(pci::common::QUEUE_SIZE, &128_u16.to_le_bytes());
            self.write(pci::common::QUEUE_DESC, &0x1000_u64.to_le_bytes());
            self.write(pci::common::QUEUE_MSIX_VECTOR, &0_u16.to_le_bytes());
            self.write(pci::common::QUEUE_ENABLE, &1_u16.to_le_bytes());
        } else {
            for (register, value) in [
                (mmio_msi::MSI_COMMAND, mmio_msi::command::ENABLE),
                (mmio::QUEUE_SIZE, 128),
                (mmio::QUEUE_DESC_LOW, 0x1000),
                (mmio_msi::MSI_ADDRESS_LOW, 0xfee0_0000),
                (mmio_msi::MSI_DATA, 0x41),
                (mmio_msi::MSI_COMMAND, mmio_msi::command::CONFIGURE),
                (mmio_msi::MSI_COMMAND, mmio_msi::command::MASK),
                (mmio::QUEUE_READY, 1),
            ] {
                self.write(register, &value.to_le_bytes());
            }
        }
        self.write_status(RUNNING);
    }

    /// Unmasks the message of queue 0.
    fn unmask(&mut self) {
        match self.is_pci {
            true => self.write(0x800c, &0_u32.to_le_bytes()),
            false => {
                self.write(mmio::QUEUE_SEL, &0_u32.to_le_bytes());
                self.write(mmio_msi::MSI_COMMAND, &mmio_msi::command::UNMASK.to_le_bytes());
            }
        }
    }

    /// An access that may mean something, made of any numbers.
    fn access(&mut self, which: u16, kind: u8, value: u64) {
        let len = [4, 4, 4, 2, 1, 8][usize::from(kind % 6)];
        let window = if self.is_pci { 0x38 } else { 0x110 };
        let offset = match (self.is_pci, which % 4) {
            (true, 0) => Pci::CONFIG_SPACE + u64::from(which / 4 % 256),
            (true, 1) => 0x8000 + u64::from(which / 4 % 64),
            _ => u64::from(which / 4) % window,
        };
        let small = [value, value % 8, value % 300, 0xfee0_0000 | (value % 4096)];
        let value = small[usize::from(kind / 6 % 4)];
        self.write(offset / len * len, &value.to_le_bytes()[..len as usize]);
        if kind.is_multiple_of(5) {
            self.interrupts.used_buffer(which % 2);
            self.transport.config_changed();
        }
    }

    /// What the driver reads everywhere, but where a read has an effect.
    fn registers(&mut self) -> Vec<u8> {
        let mut all = Vec::new();
        let parts: &[(u64, u64)] = match self.is_pci {
            true => {
                &[(0, 0x38), (0x3000, 0x3008), (0x8000, 0x8030), (Pci::CONFIG_SPACE, Pci::CONFIG_SPACE + 256)]
            }
            false => &[(0, 0x100)],
        };
        for &(from, to) in parts {
            for offset in (from..to).step_by(4) {
                let mut data = [0; 4];
                self.transport.read(offset, &mut data, &mut |_, out| out.fill(0));
                all.extend(data);
            }
        }
        all
    }
}

/// The saved registers in another device.
fn restored(is_pci: bool, saved: &[u8]) -> Result<Device, RestoreError> {
    let mut device = Device::new(is_pci);
    device.transport.restore(saved)?;
    Ok(device)
}

#[test]
fn a_running_device_goes_on_with_its_pending_message() {
    for is_pci in [false, true] {
        let mut before = Device::new(is_pci);
        before.start();
        before.interrupts.used_buffer(0);
        assert!(before.messages.is_empty());
        let saved = before.transport.save();
        let mut after = Device::new(is_pci);
        let restored = after.transport.restore(&saved).unwrap();
        let [(0, addresses)] = restored.queues[..] else { panic!("{restored:?}") };
        assert_eq!((addresses.size, addresses.desc, restored.suspended), (128, 0x1000, false));
        assert_eq!(restored.window, is_pci.then_some(0xe000_0000));
        assert_eq!(before.registers(), after.registers());
        assert!(after.messages.is_empty());
        after.unmask();
        let sent = after.messages.take();
        assert!(sent.len() == 1 && sent[0].data == 0x41, "{sent:?}");
        // And suspended.
        after.write_status(RUNNING | status::SUSPEND);
        let saved = after.transport.save();
        let mut last = Device::new(is_pci);
        let restored = last.transport.restore(&saved).unwrap();
        assert!(restored.suspended && restored.queues.len() == 1);
    }
}

#[test]
fn another_device_is_refused() {
    for is_pci in [false, true] {
        let mut device = Device::new(is_pci);
        device.start();
        let saved = device.transport.save();
        assert!(matches!(restored(!is_pci, &saved), Err(RestoreError::Format)));
        let mut other = Device::offering(is_pci, feature::VERSION_1);
        assert!(matches!(other.transport.restore(&saved), Err(RestoreError::Device("offered features"))));
        let mut later = saved.clone();
        later[4] += 1;
        assert!(matches!(restored(is_pci, &later), Err(RestoreError::Format)));
        let mut longer = saved;
        longer.push(0);
        assert!(matches!(restored(is_pci, &longer), Err(RestoreError::Length)));
    }
}

proptest! {
    #[test]
    fn the_driver_sees_no_difference(
        is_pci in any::<bool>(),
        starts in any::<bool>(),
        accesses in prop::collection::vec((any::<u16>(), any::<u8>(), any::<u64>()), 0..80),
    ) {
        let mut before = Device::new(is_pci);
        if starts {
            before.start();
        }
        for (which, kind, value) in accesses {
            before.access(which, kind, value);
        }
        let saved = before.transport.save();
        let mut after = restored(is_pci, &saved).unwrap();
        prop_assert_eq!(&saved, &after.transport.save());
        prop_assert_eq!(before.registers(), after.registers());
    }

    #[test]
    fn no_bytes_do_harm(
        is_pci in any::<bool>(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
        end in any::<prop::sample::Index>(),
        noise in prop::collection::vec(any::<u8>(), 0..400),
    ) {
        let mut device = Device::new(is_pci);
        device.start();
        device.interrupts.used_buffer(0);
        let mut saved = device.transport.save();
        let end = end.index(saved.len());
        prop_assert!(restored(is_pci, &saved[..end]).is_err());
        prop_assert!(restored(is_pci, &noise).is_err());
        for (at, value) in changes {
            let at = at.index(saved.len());
            saved[at] = value;
        }
        // What is taken is a state like any other.
        if let Ok(mut device) = restored(is_pci, &saved) {
            device.registers();
            for which in 0..200 {
                device.access(which, (which % 7) as u8, u64::from(which));
            }
            let saved = device.transport.save();
            prop_assert!(restored(is_pci, &saved).is_ok());
        }
    }
}

#[test]
fn a_driver_that_polls_for_a_reset_is_not_given_to_a_device_of_version_2() {
    let make = |is_3: bool| {
        let device =
            DeviceDescription { device_id: device_id::BLK, features: FEATURES, queue_sizes: vec![4] };
        let mmio = Mmio::new(device, Arc::new(Interrupts::wired(Arc::new(NoInterrupt))));
        if is_3 { mmio.version_3() } else { mmio }
    };
    for (saved, restored) in [(false, true), (true, false), (true, true)] {
        let result = make(restored).restore(&make(saved).save());
        match saved == restored {
            true => drop(result.unwrap()),
            false => assert!(matches!(result.unwrap_err(), RestoreError::Format)),
        }
    }
}
