//! Device status register (section 2.1), and what each of its states permits.
use super::Violation;
use paravane_spec::status::{ACKNOWLEDGE, DEVICE_NEEDS_RESET, DRIVER, DRIVER_OK, FAILED, FEATURES_OK};

/// Bits that a driver may set.
const DRIVERS: u32 = ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK | FAILED;

/// Status register, and whether a reset is under way.
#[derive(Debug, Default)]
pub(crate) struct Status {
    bits: u32,
    resetting: bool,
}

/// Meaning of a legal write.
pub(crate) enum StatusWrite {
    /// No action.
    Noted,
    /// A reset of a device that has not left reset.
    AtReset,
    /// A reset begins.
    Reset,
    /// DRIVER_OK has just been set.
    Activate,
}

impl Status {
    pub(crate) fn bits(&self) -> u32 {
        self.bits
    }

    pub(crate) fn resetting(&self) -> bool {
        self.resetting
    }

    fn has(&self, bits: u32) -> bool {
        self.bits & bits == bits
    }

    /// Whether the driver's features may be written.
    pub(crate) fn features_writable(&self) -> bool {
        self.has(DRIVER) && self.bits & (FEATURES_OK | FAILED) == 0
    }

    /// Whether feature negotiation has succeeded.
    pub(crate) fn negotiated(&self) -> bool {
        self.has(FEATURES_OK)
    }

    /// Whether queue registers may be written.
    pub(crate) fn queues_writable(&self) -> bool {
        self.has(FEATURES_OK) && !self.failed() && !self.resetting
    }

    /// Whether the configuration space may be written.
    pub(crate) fn config_writable(&self) -> bool {
        self.queues_writable()
    }

    /// Whether the driver runs, so that it may be interrupted and queues go live.
    pub(crate) fn running(&self) -> bool {
        self.has(DRIVER_OK) && !self.resetting
    }

    pub(crate) fn failed(&self) -> bool {
        self.has(FAILED)
    }

    pub(crate) fn needs_reset(&self) -> bool {
        self.has(DEVICE_NEEDS_RESET)
    }

    /// Records an error of the device. Returns whether it is new.
    pub(crate) fn set_needs_reset(&mut self) -> bool {
        let news = self.bits != 0 && !self.resetting && !self.needs_reset();
        if news {
            self.bits |= DEVICE_NEEDS_RESET;
        }
        news
    }

    /// Handles a write of the driver; `acceptable` says whether its features are.
    pub(crate) fn write(&mut self, value: u32, acceptable: bool) -> Result<StatusWrite, Violation> {
        if value == 0 {
            // A second request during a reset is still one reset.
            return Ok(match (self.bits, self.resetting) {
                (_, true) => StatusWrite::Noted,
                (0, false) => StatusWrite::AtReset,
                (_, false) => {
                    self.resetting = true;
                    StatusWrite::Reset
                }
            });
        }
        let old = self.bits & DRIVERS;
        let new = value & !(self.bits & DEVICE_NEEDS_RESET);
        let added = new & !old;
        let legal = !self.resetting
            && new & !DRIVERS == 0
            && old & !new == 0
            // After FAILED, or with it, no other bit is added.
            && (new & FAILED == 0 || added & !FAILED == 0)
            && (added & DRIVER == 0 || new & ACKNOWLEDGE != 0)
            && (added & FEATURES_OK == 0 || new & DRIVER != 0)
            && (added & DRIVER_OK == 0 || old & FEATURES_OK != 0);
        if !legal {
            return Err(Violation);
        }
        let refused = if acceptable { 0 } else { added & FEATURES_OK };
        self.bits |= added & !refused;
        // A device that needs a reset is not started any more.
        let activate = added & DRIVER_OK != 0 && !self.needs_reset();
        Ok(if activate { StatusWrite::Activate } else { StatusWrite::Noted })
    }
}
