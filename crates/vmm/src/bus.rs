//! What the guest finds behind addresses that are not RAM.
use crate::console::{Console, GuestEnd};
use crate::slot::Slot;
use paravane_spec::builtin::CONTROL_BASE;

/// The MMIO bus: the devices' windows and the control page. Any thread that runs guest code may use it.
/// Nothing that a guest does here is an error; what is not there reads as all ones.
pub(crate) struct Bus {
    slots: Vec<Slot>,
    console: Console,
}

impl Bus {
    /// With these devices, each in its own window.
    pub(crate) fn new(slots: Vec<Slot>, console: Console) -> Self {
        Self { slots, console }
    }

    fn slot(&self, addr: u64) -> Option<(&Slot, u64)> {
        self.slots.iter().find_map(|slot| Some((slot, slot.offset(addr)?)))
    }

    /// The guest reads `data.len()` bytes at `addr`.
    pub(crate) fn read(&self, addr: u64, data: &mut [u8]) {
        match self.slot(addr) {
            Some((slot, offset)) => slot.read(offset, data),
            None => data.fill(0xff),
        }
    }

    /// The guest writes; says so when that was the last thing it does.
    pub(crate) fn write(&self, addr: u64, data: &[u8]) -> Option<GuestEnd> {
        if let Some((slot, offset)) = self.slot(addr) {
            slot.write(offset, data);
            return None;
        }
        let offset = addr.checked_sub(CONTROL_BASE)?;
        let value = u32::from_le_bytes(data.try_into().ok()?);
        self.console.write(offset, value)
    }

    /// The control page.
    pub(crate) fn console(&self) -> &Console {
        &self.console
    }

    /// The devices.
    pub(crate) fn slots(&self) -> &[Slot] {
        &self.slots
    }
}
