//! Device status register (section 2.1), and what each of its states permits.
use crate::saved::{RestoreError, possible};
use crate::violation::Violation;
use paravane_spec::status::{
    ACKNOWLEDGE, DEVICE_NEEDS_RESET, DRIVER, DRIVER_OK, FAILED, FEATURES_OK, SUSPEND,
};

/// Bits that a driver may set.
const DRIVERS: u32 = ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK | FAILED;

/// Change that the owner carries out.
///
/// The status reads what it was until that is done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Change {
    #[default]
    None,
    Reset,
    Suspend,
    Resume,
}

/// Status register, and the change that is under way.
#[derive(Debug, Default)]
pub(crate) struct Status {
    pub(crate) bits: u32,
    change: Change,
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
    /// A suspension begins.
    Suspend,
    /// A suspension is to end.
    Resume,
}

impl Status {
    /// Whether the owner is carrying out a change.
    pub(crate) fn is_changing(&self) -> bool {
        self.change != Change::None
    }

    /// The status with these bits, which a driver and a device can have set.
    ///
    /// `acceptable` and `suspendable` are as for [`Status::write`].
    pub(crate) fn restored(bits: u32, acceptable: bool, suspendable: bool) -> Result<Self, RestoreError> {
        let this = Self { bits, change: Change::None };
        let follows = |bit, needed| !this.has(bit) || this.has(needed);
        let is_possible = bits & !(DRIVERS | DEVICE_NEEDS_RESET | SUSPEND) == 0
            && bits != DEVICE_NEEDS_RESET
            && follows(DRIVER, ACKNOWLEDGE)
            && follows(FEATURES_OK, DRIVER)
            && follows(DRIVER_OK, FEATURES_OK)
            && follows(SUSPEND, FEATURES_OK)
            && (!this.has(FEATURES_OK) || acceptable)
            && (!this.has(SUSPEND) || suspendable && !this.has(DRIVER_OK));
        possible(is_possible, "device status")?;
        Ok(this)
    }

    pub(crate) fn resetting(&self) -> bool {
        self.change == Change::Reset
    }

    /// Whether the device is suspended, or about to be, or not yet resumed.
    pub(crate) fn suspended(&self) -> bool {
        self.has(SUSPEND) || matches!(self.change, Change::Suspend | Change::Resume)
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

    /// Whether queue registers and the configuration space may be written.
    pub(crate) fn queues_writable(&self) -> bool {
        self.has(FEATURES_OK) && !self.failed() && !self.resetting() && !self.suspended()
    }

    /// Whether the driver runs, so that it may be interrupted and queues go live.
    pub(crate) fn running(&self) -> bool {
        self.has(DRIVER_OK) && !self.resetting()
    }

    pub(crate) fn failed(&self) -> bool {
        self.has(FAILED)
    }

    pub(crate) fn needs_reset(&self) -> bool {
        self.has(DEVICE_NEEDS_RESET)
    }

    /// Records an error of the device. Returns whether it is new.
    pub(crate) fn set_needs_reset(&mut self) -> bool {
        let news = self.bits != 0 && !self.resetting() && !self.needs_reset();
        if news {
            self.bits |= DEVICE_NEEDS_RESET;
            // It is neither suspended nor resumed.
            self.change = Change::None;
        }
        news
    }

    /// Completes a suspension, if one is under way: SUSPEND replaces DRIVER_OK.
    pub(crate) fn suspend_done(&mut self) {
        if self.change == Change::Suspend {
            self.change = Change::None;
            self.bits = self.bits & !DRIVER_OK | SUSPEND;
        }
    }

    /// Completes a resumption: DRIVER_OK replaces SUSPEND.
    ///
    /// Returns whether one was under way.
    pub(crate) fn resume_done(&mut self) -> bool {
        let done = self.change == Change::Resume;
        if done {
            self.change = Change::None;
            self.bits = self.bits & !SUSPEND | DRIVER_OK;
        }
        done
    }

    /// Handles a write of the driver.
    ///
    /// `acceptable` says whether its features are, `suspendable` whether it negotiated SUSPEND.
    pub(crate) fn write(
        &mut self,
        value: u32,
        acceptable: bool,
        suspendable: bool,
    ) -> Result<StatusWrite, Violation> {
        if value == 0 {
            // A second request during a reset is still one reset.
            return Ok(match (self.bits, self.resetting()) {
                (_, true) => StatusWrite::Noted,
                (0, false) => StatusWrite::AtReset,
                (_, false) => {
                    self.change = Change::Reset;
                    StatusWrite::Reset
                }
            });
        }
        // Before DRIVER_OK the bit is ignored (section 3.4). A suspended device has it set.
        let suspend = suspendable && value & SUSPEND != 0;
        let value = if suspend { value & !SUSPEND } else { value };
        if self.suspended() {
            return self.write_suspended(value);
        }
        let old = self.bits & DRIVERS;
        let new = value & !(self.bits & DEVICE_NEEDS_RESET);
        let added = new & !old;
        let legal = !self.resetting()
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
        if suspend && old & DRIVER_OK != 0 && !self.needs_reset() && !self.failed() {
            self.change = Change::Suspend;
            return Ok(StatusWrite::Suspend);
        }
        Ok(if activate { StatusWrite::Activate } else { StatusWrite::Noted })
    }

    /// Handles a write to a suspended device, without the bit SUSPEND.
    ///
    /// The driver adds DRIVER_OK or FAILED, or nothing.
    fn write_suspended(&mut self, value: u32) -> Result<StatusWrite, Violation> {
        let old = self.bits & DRIVERS;
        let new = value & !(self.bits & DEVICE_NEEDS_RESET);
        let added = new & !old;
        let legal = self.change == Change::None
            && old & !new == 0
            && matches!(added, 0 | DRIVER_OK | FAILED)
            && (added & DRIVER_OK == 0 || !self.failed());
        if !legal {
            return Err(Violation);
        }
        // A device that needs a reset is not resumed any more.
        if added == DRIVER_OK && !self.needs_reset() {
            self.change = Change::Resume;
            return Ok(StatusWrite::Resume);
        }
        self.bits |= added & FAILED;
        Ok(StatusWrite::Noted)
    }
}
