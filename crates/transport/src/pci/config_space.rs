//! Configuration space of a function: its bytes, and which bits may be written.
//!
//! Unimplemented registers are read-only and 0, as PCI requires. A memory BAR announces its size by
//! the address bits that cannot be written: the driver writes ones and reads back the mask. The
//! list of capabilities ends at the last one added.
use crate::saved::{Reader, RestoreError, same};
use paravane_spec::pci::{bar, command, ecam, header};

/// First 256 bytes of a function's configuration space.
///
/// The extended space behind them is empty.
#[derive(Clone)]
pub(super) struct ConfigSpace {
    bytes: [u8; header::SIZE as usize],
    writable: [u8; header::SIZE as usize],
    /// Offset for the next capability, and of the pointer to it.
    free: u16,
    link: u16,
}

/// Identity of a function.
#[derive(Clone, Copy, Debug)]
pub(super) struct Identity {
    pub(super) vendor: u16,
    pub(super) device: u16,
    pub(super) revision: u8,
    pub(super) class: u32,
    pub(super) subsystem: [u16; 2],
}

impl ConfigSpace {
    /// Makes a space with a header of type 0, no BAR and no capability.
    pub(super) fn new(identity: Identity) -> Self {
        let mut space = Self {
            bytes: [0; header::SIZE as usize],
            writable: [0; header::SIZE as usize],
            free: header::END,
            link: header::CAPABILITIES,
        };
        space.set(header::VENDOR, identity.vendor.to_le_bytes());
        space.set(header::DEVICE, identity.device.to_le_bytes());
        space.set(header::REVISION, [identity.revision]);
        let [interface, subclass, base, _] = identity.class.to_le_bytes();
        space.set(header::CLASS, [interface, subclass, base]);
        space.set(header::SUBSYSTEM_VENDOR, identity.subsystem[0].to_le_bytes());
        space.set(header::SUBSYSTEM, identity.subsystem[1].to_le_bytes());
        space
    }

    /// Adds a 64-bit memory BAR in registers 0 and 1, and its command register bits.
    ///
    /// `size` is in bytes, a power of two from 4096 on.
    pub(super) fn add_memory_bar(&mut self, size: u64) {
        let writable = !(size.next_power_of_two().max(4096) - 1);
        self.set(header::BAR, bar::WIDTH_64.to_le_bytes());
        self.allow(header::BAR, writable.to_le_bytes());
        self.allow(header::COMMAND, (command::MEMORY | command::BUS_MASTER).to_le_bytes());
    }

    /// Adds INTA, on `line`.
    pub(super) fn add_interrupt_pin(&mut self, line: u8) {
        self.set(header::INTERRUPT_LINE, [line, 1]);
        self.allow(header::INTERRUPT_LINE, [0xff]);
        let command = u16::from_le_bytes(self.writable_at(header::COMMAND)) | command::INTX_DISABLE;
        self.allow(header::COMMAND, command.to_le_bytes());
    }

    /// Adds a capability and returns its offset. There is room for 192 bytes of them.
    ///
    /// Its first byte is its identifier, and the second is the link.
    pub(super) fn add_capability<const N: usize>(&mut self, capability: [u8; N]) -> u16 {
        let at = self.free;
        self.set(at, capability);
        self.set(at + 1, [0]);
        self.set(self.link, [at as u8]);
        self.link = at + 1;
        self.free = (at + N as u16).next_multiple_of(4);
        let status = u16::from_le_bytes(self.get(header::STATUS)) | header::STATUS_CAPABILITIES;
        self.set(header::STATUS, status.to_le_bytes());
        at
    }

    /// Allows the driver to write the bits of `mask` at `offset`.
    pub(super) fn allow<const N: usize>(&mut self, offset: u16, mask: [u8; N]) {
        let at = usize::from(offset);
        self.writable[at..at + N].copy_from_slice(&mask);
    }

    fn writable_at<const N: usize>(&self, offset: u16) -> [u8; N] {
        std::array::from_fn(|n| self.writable[usize::from(offset) + n])
    }

    /// Reads for the device. `offset` is a constant inside the space.
    pub(super) fn get<const N: usize>(&self, offset: u16) -> [u8; N] {
        std::array::from_fn(|n| self.bytes[usize::from(offset) + n])
    }

    /// Writes for the device, whatever the driver may write.
    pub(super) fn set<const N: usize>(&mut self, offset: u16, value: [u8; N]) {
        let at = usize::from(offset);
        self.bytes[at..at + N].copy_from_slice(&value);
    }

    /// Reads for the driver; unimplemented bytes are 0.
    pub(super) fn read(&self, offset: u16, data: &mut [u8]) {
        for (at, byte) in (usize::from(offset)..).zip(data) {
            *byte = self.bytes.get(at).copied().unwrap_or(0);
        }
    }

    /// Writes for the driver; protected bits stay.
    pub(super) fn write(&mut self, offset: u16, data: &[u8]) {
        let own = self.bytes.iter_mut().zip(&self.writable).skip(usize::from(offset));
        for ((byte, &mask), &value) in own.zip(data) {
            *byte = *byte & !mask | value & mask;
        }
    }

    /// Writes all registers.
    pub(super) fn save(&self, into: &mut Vec<u8>) {
        into.extend(self.bytes);
    }

    /// Takes up what the driver has written. The other bits must be those of this function.
    pub(super) fn restore(&mut self, from: &mut Reader<'_>) -> Result<(), RestoreError> {
        let bytes: [u8; header::SIZE as usize] = from.bytes()?;
        let own = self.bytes.iter().zip(&self.writable);
        let is_same = bytes.iter().zip(own).all(|(byte, (own, writable))| (byte ^ own) & !writable == 0);
        same(is_same, true, "configuration space")?;
        self.bytes = bytes;
        Ok(())
    }

    /// Command register.
    pub(super) fn command(&self) -> u16 {
        u16::from_le_bytes(self.get(header::COMMAND))
    }

    /// Address in the BAR of [`ConfigSpace::add_memory_bar`], decoded or not.
    pub(super) fn bar(&self) -> u64 {
        u64::from_le_bytes(self.get(header::BAR)) & !u64::from(bar::FLAGS)
    }

    /// Puts that BAR at `address`, truncated to its writable bits.
    pub(super) fn place_bar(&mut self, address: u64) {
        self.write(header::BAR, &address.to_le_bytes());
    }
}

/// Whether an access to a configuration space is valid.
///
/// Valid are 1, 2, 4 or 8 bytes, naturally aligned.
pub(super) fn accessible(offset: u16, len: usize) -> bool {
    matches!(len, 1 | 2 | 4 | 8)
        && usize::from(offset).is_multiple_of(len)
        && u64::from(offset) + len as u64 <= ecam::FUNCTION
}

impl std::fmt::Debug for ConfigSpace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ConfigSpace")
            .field("command", &format_args!("{:#x}", self.command()))
            .field("bar", &format_args!("{:#x}", self.bar()))
            .finish_non_exhaustive()
    }
}
