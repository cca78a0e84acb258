//! Registers of virtio over MMIO, versions 2 and 3 (section 4.2), and of our extension.
//!
//! docs/reference/virtio-mmio-msi.md specifies the extension, which a device may offer.
//!
//! ```text
//! new: magic, version --use_messages--> (what each interrupt would be)
//!    | FEATURES_OK
//!    v
//! set_up_interrupts: ENABLE, message of the configuration change --.
//! enable_queue: message of the queue, its notification address     | refused before DRIVER_OK: DISABLE,
//!    |                                                             v and the wired interrupt is used
//!  in use                                                        wired
//! ```
use crate::transport::pause;
use crate::{DriverError, Message, Space, Transport, VolatileSpace};
use alloc::vec::Vec;
use paravane_spec::mmio_msi::{self as msi, command, state};
use paravane_spec::queue::QueueAddresses;
use paravane_spec::{mmio, status};

/// Access to one device's registers; offsets in bytes from its base.
pub trait Registers {
    /// Reads 32 bits.
    fn read32(&self, offset: u64) -> u32;
    /// Writes 32 bits.
    fn write32(&self, offset: u64, value: u32);
    /// Reads 16 bits (configuration space).
    fn read16(&self, offset: u64) -> u16;
    /// Reads 8 bits (configuration space).
    fn read8(&self, offset: u64) -> u8;
    /// See [`Transport::pause`] \[its default\].
    fn pause(&self) {
        pause();
    }
    /// Length of the register window in bytes, from firmware.
    ///
    /// The driver touches nothing beyond.
    fn window(&self) -> u64 {
        mmio::WINDOW
    }
}

/// The registers of a device in a [`Space`].
#[derive(Clone, Copy, Debug)]
pub struct Window<S> {
    space: S,
    base: u64,
    len: u64,
}

/// Registers of a device in memory that the processor accesses directly.
pub type VolatileRegisters = Window<VolatileSpace>;

impl<S: Space> Window<S> {
    /// The `len` bytes at address `base`, as firmware tells both.
    ///
    /// Registers of a device without our extension take [`mmio::WINDOW`] bytes.
    #[must_use]
    pub const fn new(space: S, base: u64, len: u64) -> Self {
        Self { space, base, len }
    }
}

impl VolatileRegisters {
    /// The `len` bytes that are mapped at `registers`.
    ///
    /// # Safety
    /// As for [`VolatileSpace::new`], with these bytes as its range.
    #[must_use]
    #[allow(unsafe_code, reason = "passes a promise on")]
    pub const unsafe fn at(registers: *mut u8, len: u64) -> Self {
        // SAFETY: the caller's promise is the same.
        Self { space: unsafe { VolatileSpace::new(registers, 0..len) }, base: 0, len }
    }
}

impl<S: Space> Registers for Window<S> {
    fn read32(&self, offset: u64) -> u32 {
        self.space.read32(self.base.wrapping_add(offset))
    }

    fn write32(&self, offset: u64, value: u32) {
        self.space.write32(self.base.wrapping_add(offset), value);
    }

    fn read16(&self, offset: u64) -> u16 {
        self.space.read16(self.base.wrapping_add(offset))
    }

    fn read8(&self, offset: u64) -> u8 {
        self.space.read8(self.base.wrapping_add(offset))
    }

    fn window(&self) -> u64 {
        self.len
    }
}

/// A device on virtio-mmio.
#[derive(Debug)]
pub struct Mmio<R> {
    registers: R,
    /// For the configuration change, then for each queue.
    ///
    /// Empty: the wired interrupt is used.
    messages: Vec<Message>,
    /// MSI is on.
    msi: bool,
    /// Each queue has its own notification address.
    notification: bool,
    /// Those of the queues that were enabled.
    kicks: Vec<u64>,
}

impl<R: Registers> Mmio<R> {
    /// Checks magic value and version.
    ///
    /// # Errors
    /// It is not a virtio-mmio device of version 2 or 3.
    pub fn new(registers: R) -> Result<Self, DriverError> {
        // Section 4.2.3.1.1: wrong magic or version is "no device", and no other register may be
        // touched then.
        let magic = registers.read32(mmio::MAGIC_VALUE);
        if magic != mmio::MAGIC {
            return Err(DriverError::Magic(magic));
        }
        let version = registers.read32(mmio::VERSION);
        // With version 3 a reset takes until Status reads 0, which `Virtio` waits for on any transport.
        if !matches!(version, mmio::VERSION_2 | mmio::VERSION_3) {
            return Err(DriverError::Version(version));
        }
        Ok(Self { registers, messages: Vec::new(), msi: false, notification: false, kicks: Vec::new() })
    }

    /// Has the device interrupt by messages, if it can.
    ///
    /// The first is for the configuration change, number n + 1 for queue n, and the last for all
    /// further queues.
    ///
    /// To be called before the device is negotiated with.
    pub fn use_messages(&mut self, messages: Vec<Message>) {
        self.messages = messages;
    }

    /// Whether the device interrupts by messages. Final after DRIVER_OK.
    pub fn uses_messages(&self) -> bool {
        self.msi
    }

    fn read(&self, register: u64) -> u32 {
        self.registers.read32(register)
    }

    fn write(&self, register: u64, value: u32) {
        self.registers.write32(register, value);
    }

    fn select(&self, queue: u16) {
        self.write(mmio::QUEUE_SEL, u32::from(queue));
    }

    /// Turns MSI on or off; `true` if the device did so.
    fn switch_msi(&mut self, on: bool) -> bool {
        self.write(msi::MSI_COMMAND, if on { command::ENABLE } else { command::DISABLE });
        self.msi = self.read(msi::MSI_STATE) & state::ON != 0;
        self.msi == on
    }

    /// Gives the selected source message `number`.
    ///
    /// Where the device refuses, the wire is used for everything.
    fn configure(&mut self, source: u32, number: usize) -> Result<(), DriverError> {
        if !self.msi {
            return Ok(());
        }
        // No more different ones than the device can tell apart; those beyond share the last.
        let limit = self.messages.len().min(self.read(msi::MSI_LIMIT) as usize);
        let message = limit.checked_sub(1).and_then(|last| self.messages.get(number.min(last)));
        if let Some(&message) = message {
            self.write(mmio::QUEUE_SEL, source);
            if self.put_message(message) {
                return Ok(());
            }
        }
        // Once it is in use MSI cannot be turned off any more, and the queue is not started.
        let running = self.status() & status::DRIVER_OK != 0;
        if running || !self.switch_msi(false) { Err(DriverError::Message(source)) } else { Ok(()) }
    }

    /// Gives the selected source a message; `false` if the device refuses it.
    fn put_message(&self, Message { address, data }: Message) -> bool {
        self.write(msi::MSI_ADDRESS_LOW, address as u32);
        self.write(msi::MSI_ADDRESS_HIGH, (address >> 32) as u32);
        self.write(msi::MSI_DATA, data);
        self.write(msi::MSI_COMMAND, command::CONFIGURE);
        self.read(msi::MSI_STATE) & (state::CONFIGURED | state::REFUSED) == state::CONFIGURED
    }

    /// Notification address of queue `index`, checked.
    ///
    /// The device must not choose an arbitrary address.
    fn notification_address(&self, index: u16) -> Result<u64, DriverError> {
        if !self.notification {
            return Ok(mmio::QUEUE_NOTIFY);
        }
        let base = u64::from(self.read(msi::NOTIFY_BASE));
        let multiplier = u64::from(self.read(msi::NOTIFY_MULTIPLIER));
        let offset = base + u64::from(index) * multiplier;
        let good = base != 0
            && base.is_multiple_of(msi::NOTIFY_PAGE)
            && multiplier != 0
            && multiplier.is_multiple_of(4)
            && offset + 4 <= self.registers.window();
        if good { Ok(offset) } else { Err(DriverError::Queue(index)) }
    }
}

impl<R: Registers> Transport for Mmio<R> {
    fn device_id(&self) -> u32 {
        self.read(mmio::DEVICE_ID)
    }

    fn status(&self) -> u32 {
        self.read(mmio::STATUS)
    }

    fn set_status(&self, status: u32) {
        self.write(mmio::STATUS, status);
    }

    fn pause(&self) {
        self.registers.pause();
    }

    fn device_features(&self) -> u64 {
        let word = |select: u32| {
            self.write(mmio::DEVICE_FEATURES_SEL, select);
            u64::from(self.read(mmio::DEVICE_FEATURES))
        };
        word(0) | word(1) << 32
    }

    fn set_driver_features(&self, accepted: u64) {
        for (word, bits) in [(0, accepted as u32), (1, (accepted >> 32) as u32)] {
            self.write(mmio::DRIVER_FEATURES_SEL, word);
            self.write(mmio::DRIVER_FEATURES, bits);
        }
    }

    fn queue_max(&self, index: u16) -> u32 {
        self.select(index);
        self.read(mmio::QUEUE_SIZE_MAX)
    }

    fn queue_enabled(&self, index: u16) -> bool {
        self.select(index);
        self.read(mmio::QUEUE_READY) != 0
    }

    fn wanted_features(&self) -> u64 {
        // The bits are not assigned yet: another vendor may use them for something else.
        if self.read(mmio::VENDOR_ID) != mmio::VENDOR {
            return 0;
        }
        // Addresses beyond the window would be of no use.
        let notification = if self.registers.window() > msi::NOTIFY_PAGE { msi::F_NOTIFICATION } else { 0 };
        notification | if self.messages.is_empty() { 0 } else { msi::F_MSI }
    }

    fn set_up_interrupts(&mut self, features: u64) -> Result<(), DriverError> {
        self.notification = features & msi::F_NOTIFICATION != 0;
        self.msi = false;
        if features & msi::F_MSI != 0 && self.switch_msi(true) {
            self.configure(msi::SELECT_CONFIGURATION, 0)?;
        }
        Ok(())
    }

    /// Masked meanwhile: an interrupt is pending until the new message is in place.
    fn set_message(&self, number: u16, message: Message) -> Result<(), DriverError> {
        if !self.msi {
            return Err(DriverError::Message(number.into()));
        }
        let source = number.checked_sub(1).map_or(msi::SELECT_CONFIGURATION, u32::from);
        self.write(mmio::QUEUE_SEL, source);
        self.write(msi::MSI_COMMAND, command::MASK);
        let configured = self.put_message(message);
        self.write(msi::MSI_COMMAND, command::UNMASK);
        if configured { Ok(()) } else { Err(DriverError::Message(source)) }
    }

    fn enable_queue(&mut self, index: u16, at: &QueueAddresses) -> Result<(), DriverError> {
        let (place, kick) = (usize::from(index), self.notification_address(index)?);
        if self.kicks.len() <= place {
            self.kicks.resize(place + 1, mmio::QUEUE_NOTIFY);
        }
        self.kicks[place] = kick;
        self.configure(index.into(), place + 1)?;
        self.select(index);
        self.write(mmio::QUEUE_SIZE, u32::from(at.size));
        for (low, high, addr) in [
            (mmio::QUEUE_DESC_LOW, mmio::QUEUE_DESC_HIGH, at.desc),
            (mmio::QUEUE_DRIVER_LOW, mmio::QUEUE_DRIVER_HIGH, at.driver),
            (mmio::QUEUE_DEVICE_LOW, mmio::QUEUE_DEVICE_HIGH, at.device),
        ] {
            self.write(low, addr as u32);
            self.write(high, (addr >> 32) as u32);
        }
        self.write(mmio::QUEUE_READY, 1);
        Ok(())
    }

    fn reset_queue(&self, index: u16) {
        self.select(index);
        self.write(mmio::QUEUE_RESET, 1);
    }

    fn queue_resetting(&self, index: u16) -> bool {
        self.select(index);
        self.read(mmio::QUEUE_RESET) != 0
    }

    fn notify(&self, index: u16, data: Option<u32>) {
        let kick = self.kicks.get(usize::from(index)).copied().unwrap_or(mmio::QUEUE_NOTIFY);
        self.write(kick, data.unwrap_or(u32::from(index)));
    }

    fn take_causes(&self) -> u32 {
        if self.msi {
            return mmio::INT_CONFIG_CHANGE;
        }
        // Bits that the specification does not define are neither believed nor acknowledged
        // (section 4.2.2.2).
        let causes = self.read(mmio::INTERRUPT_STATUS) & (mmio::INT_USED_BUFFER | mmio::INT_CONFIG_CHANGE);
        if causes != 0 {
            self.write(mmio::INTERRUPT_ACK, causes);
        }
        causes
    }

    fn generation(&self) -> u32 {
        self.read(mmio::CONFIG_GENERATION)
    }

    fn config32(&self, offset: u64) -> u32 {
        self.read(mmio::CONFIG + offset)
    }

    fn config16(&self, offset: u64) -> u16 {
        self.registers.read16(mmio::CONFIG + offset)
    }

    fn config8(&self, offset: u64) -> u8 {
        self.registers.read8(mmio::CONFIG + offset)
    }
}
