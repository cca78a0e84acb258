//! Virtio over PCI, modern (section 4.1), from ECAM to the registers of a device.
//!
//! ```text
//! Ecam --functions--> Function --Pci::open--> capabilities, memory on --> Pci: Transport
//!                                                 | use_messages: MSI-X table    | after FEATURES_OK
//!                                                 v                              v
//!                                              function masked ---- vectors mapped, each read back
//! ```
//! The device is hostile: the list of capabilities is followed for a bounded number of steps; every
//! structure that it names must lie in the PCI window that firmware reports, so a BAR that claims
//! to be RAM is not touched; and registers that must read back are read back.
use crate::{DriverError, Transport};
pub use crate::{Message, Space};
use alloc::vec::Vec;
use core::ops::Range;
use paravane_spec::mmio::{INT_CONFIG_CHANGE, INT_USED_BUFFER};
use paravane_spec::pci::{
    self, NO_VECTOR, NO_VENDOR, bar, cap, capability, command, common, ecam, header, msix,
};
use paravane_spec::queue::QueueAddresses;

/// Configuration spaces of bus 0 in memory, and the window for BARs.
///
/// Firmware tells both.
#[derive(Clone, Debug)]
pub struct Ecam<S> {
    space: S,
    base: u64,
    /// Where BARs lie.
    window: Range<u64>,
}

impl<S: Space + Clone> Ecam<S> {
    /// At `base`, with BARs in `window`.
    #[must_use]
    pub fn new(space: S, base: u64, window: Range<u64>) -> Self {
        Self { space, base, window }
    }

    /// The function 0 of each device on the bus.
    pub fn functions(&self) -> impl Iterator<Item = Function<S>> + '_ {
        (0..ecam::DEVICES).filter_map(|device| self.function(device as u8))
    }

    /// The function 0 of device `number`, if there is one.
    #[must_use]
    pub fn function(&self, number: u8) -> Option<Function<S>> {
        if u64::from(number) >= ecam::DEVICES {
            return None;
        }
        let base = self.base.wrapping_add(u64::from(number) * ecam::FUNCTIONS * ecam::FUNCTION);
        let function = Function { space: self.space.clone(), base, window: self.window.clone() };
        (function.vendor() != NO_VENDOR).then_some(function)
    }
}

/// One function, by its configuration space.
#[derive(Debug)]
pub struct Function<S> {
    space: S,
    base: u64,
    window: Range<u64>,
}

/// A structure in a BAR; it lies in the window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Region {
    addr: u64,
    len: u64,
}

impl<S: Space> Function<S> {
    fn read8(&self, register: u16) -> u8 {
        self.space.read8(self.base + u64::from(register))
    }

    fn read16(&self, register: u16) -> u16 {
        self.space.read16(self.base + u64::from(register))
    }

    fn read32(&self, register: u16) -> u32 {
        self.space.read32(self.base + u64::from(register))
    }

    fn write16(&self, register: u16, value: u16) {
        self.space.write16(self.base + u64::from(register), value);
    }

    /// Vendor identifier.
    pub fn vendor(&self) -> u16 {
        self.read16(header::VENDOR)
    }

    /// Device identifier.
    pub fn device(&self) -> u16 {
        self.read16(header::DEVICE)
    }

    /// Virtio device identifier; `None`: no modern virtio device (section 4.1.2).
    pub fn virtio(&self) -> Option<u32> {
        let number = self.device().checked_sub(pci::DEVICE_BASE)?;
        (self.vendor() == pci::VENDOR && number < 0x40).then_some(number.into())
    }

    /// Offsets of the capabilities.
    ///
    /// # Errors
    /// The list does not end, or leaves the space.
    fn capabilities(&self) -> Result<Vec<u16>, DriverError> {
        let mut found = Vec::new();
        if self.read16(header::STATUS) & header::STATUS_CAPABILITIES == 0 {
            return Ok(found);
        }
        let mut next = self.read8(header::CAPABILITIES) & capability::POINTER;
        while next != 0 {
            let at = u16::from(next);
            // No capability is shorter than 4 bytes, so no list is longer than this.
            if at < header::END || found.len() >= usize::from((header::SIZE - header::END) / 4) {
                return Err(DriverError::Capabilities(at));
            }
            found.push(at);
            next = self.read8(at + 1) & capability::POINTER;
        }
        Ok(found)
    }

    /// Where a memory BAR is.
    fn bar(&self, number: u8) -> Option<u64> {
        if number >= header::BARS {
            return None;
        }
        let at = header::BAR + 4 * u16::from(number);
        let low = self.read32(at);
        if low & bar::IO != 0 {
            return None;
        }
        let high = match low & bar::WIDTH {
            bar::WIDTH_64 if number + 1 < header::BARS => self.read32(at + 4),
            0 => 0,
            _ => return None,
        };
        Some(u64::from(high) << 32 | u64::from(low & !bar::FLAGS))
    }

    /// What lies in BAR `number`, if it lies in the window.
    fn region(&self, number: u8, offset: u32, len: u64) -> Option<Region> {
        let addr = self.bar(number)?.checked_add(u64::from(offset))?;
        let end = addr.checked_add(len)?;
        (addr >= self.window.start && end <= self.window.end).then_some(Region { addr, len })
    }

    /// Structure that the virtio capability at `at` names, if its type is `cfg_type`.
    ///
    /// `None` if it is not aligned as section 4.1.4 demands.
    fn structure(&self, at: u16, cfg_type: u8) -> Option<Region> {
        let fits = at + u16::from(cap::SIZE) <= header::SIZE;
        let len = fits.then(|| self.read32(at + cap::LENGTH))?;
        let region = self.region(self.read8(at + cap::BAR), self.read32(at + cap::OFFSET), len.into())?;
        let align = match cfg_type {
            cap::ISR => 1,
            cap::NOTIFY => 2,
            _ => 4,
        };
        region.addr.is_multiple_of(align).then_some(region)
    }
}

/// The MSI-X vectors of a function.
#[derive(Clone, Copy, Debug)]
struct Vectors {
    control: u16,
    table: u64,
    count: u16,
}

/// A device on virtio-pci.
#[derive(Debug)]
pub struct Pci<S> {
    function: Function<S>,
    device_id: u32,
    common: Region,
    isr: Region,
    notify: Region,
    notify_multiplier: u32,
    device: Option<Region>,
    vectors: Option<Vectors>,
    /// How many vectors are used; 0: the wired interrupt is.
    used_vectors: u16,
    /// Notification addresses of the queues that were enabled.
    kicks: Vec<u64>,
}

impl<S: Space> Pci<S> {
    /// Finds the structures of a device, and enables its memory and bus mastering.
    ///
    /// # Errors
    /// It is no modern virtio device, or what it says of itself cannot be.
    pub fn open(function: Function<S>) -> Result<Self, DriverError> {
        let unknown = DriverError::Function { vendor: function.vendor(), device: function.device() };
        let device_id = function.virtio().ok_or(unknown)?;
        if function.read8(header::HEADER_TYPE) & header::HEADER_TYPE_MASK != 0 {
            return Err(unknown);
        }
        let (mut common, mut isr, mut notify, mut device, mut vectors) = (None, None, None, None, None);
        for at in function.capabilities()? {
            match function.read8(at) {
                capability::MSIX => vectors = vectors.or(Vectors::find(&function, at)),
                capability::VENDOR => {
                    // The first usable one of each counts (section 4.1.4.1).
                    let cfg_type = function.read8(at + cap::CFG_TYPE);
                    let slot = match cfg_type {
                        cap::COMMON => &mut common,
                        cap::ISR => &mut isr,
                        cap::NOTIFY => &mut notify,
                        cap::DEVICE => &mut device,
                        _ => continue,
                    };
                    if slot.is_none() {
                        *slot = function.structure(at, cfg_type).map(|region| (at, region));
                    }
                }
                _ => {}
            }
        }
        let needed = |found: Option<(u16, Region)>, cfg_type: u8, least: u64| {
            found.filter(|(_, region)| region.len >= least).ok_or(DriverError::Structure(cfg_type))
        };
        let (_, common) = needed(common, cap::COMMON, common::LEAST)?;
        let (_, isr) = needed(isr, cap::ISR, 1)?;
        let (notify_at, notify) = needed(notify, cap::NOTIFY, 2)?;
        if notify_at + u16::from(cap::SIZE_LONG) > header::SIZE {
            return Err(DriverError::Structure(cap::NOTIFY));
        }
        let notify_multiplier = function.read32(notify_at + cap::NOTIFY_OFF_MULTIPLIER);
        let on = function.read16(header::COMMAND) | command::MEMORY | command::BUS_MASTER;
        function.write16(header::COMMAND, on);
        Ok(Self {
            function,
            device_id,
            common,
            isr,
            notify,
            notify_multiplier,
            device: device.map(|(_, region)| region),
            vectors,
            used_vectors: 0,
            kicks: Vec::new(),
        })
    }

    /// Has the device interrupt by messages.
    ///
    /// Message 0 is for the configuration change and n + 1 for queue n. If the device has too few,
    /// the last one is for all further queues.
    ///
    /// To be called before the device is negotiated with.
    pub fn use_messages(&mut self, message: impl Fn(u16) -> Message) -> bool {
        let Some(vectors) = self.vectors else { return false };
        let wanted = self.common16(common::NUM_QUEUES).saturating_add(1);
        let used = vectors.count.min(wanted);
        let space = &self.function.space;
        let function = |bits| self.function.write16(vectors.control, bits);
        function(msix::ENABLE | msix::FUNCTION_MASK);
        for vector in 0..vectors.count {
            let entry = vectors.table + u64::from(vector) * msix::ENTRY;
            if vector >= used {
                space.write32(entry + msix::VECTOR_CONTROL, msix::MASKED);
                continue;
            }
            self.put_message(entry, message(vector));
        }
        function(msix::ENABLE);
        self.used_vectors = used;
        true
    }

    /// Writes the message of a masked table entry, and unmasks it.
    fn put_message(&self, entry: u64, Message { address, data }: Message) {
        let space = &self.function.space;
        space.write32(entry + msix::ADDRESS_LOW, address as u32);
        space.write32(entry + msix::ADDRESS_HIGH, (address >> 32) as u32);
        space.write32(entry + msix::DATA, data);
        space.write32(entry + msix::VECTOR_CONTROL, 0);
    }

    /// How many messages are used: 0 is the wired interrupt.
    pub fn messages(&self) -> u16 {
        self.used_vectors
    }

    /// Maps an interrupt to `vector` by the register at `register`.
    fn map_vector(&self, register: u64, vector: u16) -> Result<(), DriverError> {
        self.set_common16(register, vector);
        // The driver must verify it: a device may lack the resources (section 4.1.5.1.2.2).
        let got = self.common16(register);
        if got == vector && got != NO_VECTOR {
            Ok(())
        } else {
            Err(DriverError::Vector { wanted: vector, got })
        }
    }

    fn common16(&self, register: u64) -> u16 {
        self.function.space.read16(self.common.addr + register)
    }

    fn set_common16(&self, register: u64, value: u16) {
        self.function.space.write16(self.common.addr + register, value);
    }

    fn common32(&self, register: u64) -> u32 {
        self.function.space.read32(self.common.addr + register)
    }

    fn set_common32(&self, register: u64, value: u32) {
        self.function.space.write32(self.common.addr + register, value);
    }

    fn select(&self, queue: u16) {
        self.set_common16(common::QUEUE_SELECT, queue);
    }

    /// Where `len` bytes of the device's configuration space are.
    fn config(&self, offset: u64, len: u64) -> Option<u64> {
        let device = self.device?;
        (offset.checked_add(len)? <= device.len).then_some(device.addr + offset)
    }
}

impl Vectors {
    /// Of the capability at `at`, if its table lies in the window.
    fn find<S: Space>(function: &Function<S>, at: u16) -> Option<Self> {
        if at + u16::from(msix::LEN) > header::SIZE {
            return None;
        }
        let control = at + msix::CONTROL;
        let count = (function.read16(control) & msix::SIZE) + 1;
        let table = function.read32(at + msix::TABLE);
        let len = u64::from(count) * msix::ENTRY;
        let region = function.region((table & msix::BIR) as u8, table & !msix::BIR, len)?;
        Some(Self { control, table: region.addr, count })
    }
}

impl<S: Space> Transport for Pci<S> {
    fn device_id(&self) -> u32 {
        self.device_id
    }

    fn status(&self) -> u32 {
        self.function.space.read8(self.common.addr + common::DEVICE_STATUS).into()
    }

    fn set_status(&self, status: u32) {
        // All bits of the status fit.
        self.function.space.write8(self.common.addr + common::DEVICE_STATUS, status as u8);
    }

    fn device_features(&self) -> u64 {
        let word = |select: u32| {
            self.set_common32(common::DEVICE_FEATURE_SELECT, select);
            u64::from(self.common32(common::DEVICE_FEATURE))
        };
        word(0) | word(1) << 32
    }

    fn set_driver_features(&self, accepted: u64) {
        for (word, bits) in [(0, accepted as u32), (1, (accepted >> 32) as u32)] {
            self.set_common32(common::DRIVER_FEATURE_SELECT, word);
            self.set_common32(common::DRIVER_FEATURE, bits);
        }
    }

    fn set_up_interrupts(&mut self, _features: u64) -> Result<(), DriverError> {
        if self.used_vectors == 0 { Ok(()) } else { self.map_vector(common::CONFIG_MSIX_VECTOR, 0) }
    }

    fn queue_max(&self, index: u16) -> u32 {
        self.select(index);
        self.common16(common::QUEUE_SIZE).into()
    }

    fn queue_enabled(&self, index: u16) -> bool {
        self.select(index);
        self.common16(common::QUEUE_ENABLE) != 0
    }

    /// Masked meanwhile: an interrupt is pending until the new message is in place.
    ///
    /// Queues that share a vector share the message.
    fn set_message(&self, number: u16, message: Message) -> Result<(), DriverError> {
        let vectors = self.vectors.filter(|_| self.used_vectors > 0);
        let vectors = vectors.ok_or(DriverError::Message(number.into()))?;
        let vector = number.min(self.used_vectors - 1);
        let entry = vectors.table + u64::from(vector) * msix::ENTRY;
        self.function.space.write32(entry + msix::VECTOR_CONTROL, msix::MASKED);
        self.put_message(entry, message);
        // The read waits for the writes, which may be posted (PCI Local Bus 3.0, section 6.8.3.5).
        self.function.space.read32(entry + msix::VECTOR_CONTROL);
        Ok(())
    }

    fn enable_queue(&mut self, index: u16, at: &QueueAddresses) -> Result<(), DriverError> {
        self.select(index);
        let offset = u64::from(self.common16(common::QUEUE_NOTIFY_OFF)) * u64::from(self.notify_multiplier);
        // Room for NOTIFICATION_DATA, where the device has said that there is.
        let width = self.notify.len.min(4);
        if !offset.is_multiple_of(2) || offset > self.notify.len - width {
            return Err(DriverError::Queue(index));
        }
        let place = usize::from(index);
        if self.kicks.len() <= place {
            self.kicks.resize(place + 1, 0);
        }
        self.kicks[place] = self.notify.addr + offset;

        self.set_common16(common::QUEUE_SIZE, at.size);
        for (register, addr) in [
            (common::QUEUE_DESC, at.desc),
            (common::QUEUE_DRIVER, at.driver),
            (common::QUEUE_DEVICE, at.device),
        ] {
            self.set_common32(register, addr as u32);
            self.set_common32(register + 4, (addr >> 32) as u32);
        }
        if self.used_vectors != 0 {
            let vector = index.saturating_add(1).min(self.used_vectors - 1);
            self.map_vector(common::QUEUE_MSIX_VECTOR, vector)?;
        }
        self.set_common16(common::QUEUE_ENABLE, 1);
        Ok(())
    }

    fn reset_queue(&self, index: u16) {
        self.select(index);
        self.set_common16(common::QUEUE_RESET, 1);
    }

    fn queue_resetting(&self, index: u16) -> bool {
        self.select(index);
        self.common16(common::QUEUE_RESET) != 0
    }

    fn notify(&self, index: u16, data: Option<u32>) {
        let Some(&addr) = self.kicks.get(usize::from(index)) else { return };
        match data {
            Some(data) => self.function.space.write32(addr, data),
            None => self.function.space.write16(addr, index),
        }
    }

    fn take_causes(&self) -> u32 {
        if self.used_vectors != 0 {
            return INT_CONFIG_CHANGE;
        }
        u32::from(self.function.space.read8(self.isr.addr)) & (INT_USED_BUFFER | INT_CONFIG_CHANGE)
    }

    fn generation(&self) -> u32 {
        self.function.space.read8(self.common.addr + common::CONFIG_GENERATION).into()
    }

    /// 0 where the device has no configuration space.
    fn config32(&self, offset: u64) -> u32 {
        self.config(offset, 4).map_or(0, |addr| self.function.space.read32(addr))
    }

    /// 0 where the device has no configuration space.
    fn config16(&self, offset: u64) -> u16 {
        self.config(offset, 2).map_or(0, |addr| self.function.space.read16(addr))
    }

    /// 0 where the device has no configuration space.
    fn config8(&self, offset: u64) -> u8 {
        self.config(offset, 1).map_or(0, |addr| self.function.space.read8(addr))
    }
}
