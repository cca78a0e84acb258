//! Registers of one queue. The front page of the crate draws the states.
use crate::saved::{Reader, RestoreError, possible, same};
use crate::violation::Violation;
use paravane_spec::queue::QueueAddresses;

/// Size of a queue before the driver sets one.
#[derive(Clone, Copy, Debug)]
pub(crate) enum SizeAtReset {
    /// No size (section 4.2.2).
    None,
    /// The maximum (section 4.1.4.3).
    Largest,
}

/// One of the three areas of a queue.
#[derive(Clone, Copy)]
pub(crate) enum Part {
    /// Descriptor area.
    Desc,
    /// Driver area.
    Driver,
    /// Device area.
    Device,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Not in use: the registers may be written.
    Idle = 0,
    /// Enabled before DRIVER_OK.
    Ready,
    /// Served by the device.
    Live,
    /// Being stopped by the owner; the registers stay.
    Stopping,
    /// Being stopped by the owner; then the registers return to their defaults.
    Resetting,
}

/// Action after enabling or disabling.
pub(crate) enum EnableWrite {
    /// Start the queue.
    Start(QueueAddresses),
    /// Stop it.
    Stop,
}

/// Registers of one queue.
///
/// Values are kept as written and checked when it is enabled.
#[derive(Debug)]
pub(crate) struct QueueRegisters {
    max: u16,
    size_at_reset: SizeAtReset,
    state: State,
    /// All 32 bits: a size of 0x1_0100 must not be taken for 0x100.
    size: u32,
    desc: u64,
    driver: u64,
    device: u64,
}

impl QueueRegisters {
    pub(crate) fn new(max: u16, size_at_reset: SizeAtReset) -> Self {
        let size = match size_at_reset {
            SizeAtReset::None => 0,
            SizeAtReset::Largest => max.into(),
        };
        Self { max, size_at_reset, state: State::Idle, size, desc: 0, driver: 0, device: 0 }
    }

    /// Returns to the state after [`QueueRegisters::new`].
    pub(crate) fn set_defaults(&mut self) {
        *self = Self::new(self.max, self.size_at_reset);
    }

    pub(crate) fn max(&self) -> u16 {
        self.max
    }

    /// Whether it reads enabled.
    ///
    /// It does until the owner has stopped the queue: 0 promises that the device does not access it
    /// (sections 4.1.4.3.1 and 4.2.2.1).
    pub(crate) fn enabled(&self) -> bool {
        self.state != State::Idle
    }

    pub(crate) fn live(&self) -> bool {
        self.state == State::Live
    }

    /// Whether it is being reset.
    pub(crate) fn resetting(&self) -> bool {
        self.state == State::Resetting
    }

    pub(crate) fn size(&self) -> u32 {
        self.size
    }

    /// Address of an area.
    pub(crate) fn area(&self, part: Part) -> u64 {
        match part {
            Part::Desc => self.desc,
            Part::Driver => self.driver,
            Part::Device => self.device,
        }
    }

    fn idle(&mut self) -> Result<&mut Self, Violation> {
        if self.state == State::Idle { Ok(self) } else { Err(Violation) }
    }

    pub(crate) fn set_size(&mut self, size: u32) -> Result<(), Violation> {
        self.idle()?.size = size;
        Ok(())
    }

    pub(crate) fn set_low(&mut self, part: Part, low: u32) -> Result<(), Violation> {
        let area = self.idle()?.area_mut(part);
        *area = (*area & !0xffff_ffff) | u64::from(low);
        Ok(())
    }

    pub(crate) fn set_high(&mut self, part: Part, high: u32) -> Result<(), Violation> {
        let area = self.idle()?.area_mut(part);
        *area = (*area & 0xffff_ffff) | (u64::from(high) << 32);
        Ok(())
    }

    fn area_mut(&mut self, part: Part) -> &mut u64 {
        match part {
            Part::Desc => &mut self.desc,
            Part::Driver => &mut self.driver,
            Part::Device => &mut self.device,
        }
    }

    /// Configuration, if the device can serve its size.
    ///
    /// A power of two, or any number in a `packed` queue (section 2.8.10.1).
    fn addresses(&self, packed: bool) -> Option<QueueAddresses> {
        let size = u16::try_from(self.size).ok().filter(|&size| size != 0 && size <= self.max)?;
        if !packed && !size.is_power_of_two() {
            return None;
        }
        Some(QueueAddresses { size, desc: self.desc, driver: self.driver, device: self.device })
    }

    /// Enables it. If the device is `running`, the queue must be started.
    pub(crate) fn enable(
        &mut self,
        running: bool,
        packed: bool,
    ) -> Result<Option<QueueAddresses>, Violation> {
        match self.state {
            State::Idle => {
                let addresses = self.addresses(packed).ok_or(Violation)?;
                self.state = if running { State::Live } else { State::Ready };
                Ok(running.then_some(addresses))
            }
            // It is enabled already.
            State::Ready | State::Live => Ok(None),
            State::Stopping | State::Resetting => Err(Violation),
        }
    }

    /// Disables it.
    pub(crate) fn disable(&mut self) -> Option<EnableWrite> {
        match self.state {
            State::Live => {
                self.state = State::Stopping;
                Some(EnableWrite::Stop)
            }
            State::Ready => {
                self.state = State::Idle;
                None
            }
            State::Idle | State::Stopping | State::Resetting => None,
        }
    }

    /// Resets it.
    ///
    /// Returns whether it must be stopped first; otherwise it is reset, or a reset was under way.
    pub(crate) fn reset(&mut self) -> bool {
        match self.state {
            State::Live => {
                self.state = State::Resetting;
                return true;
            }
            State::Stopping => self.state = State::Resetting,
            State::Idle | State::Ready => self.set_defaults(),
            State::Resetting => {}
        }
        false
    }

    /// Makes a ready queue live at DRIVER_OK.
    pub(crate) fn go_live(&mut self) -> Option<QueueAddresses> {
        if self.state != State::Ready {
            return None;
        }
        // The size was checked when the queue became ready, and has been frozen since.
        let addresses = self.addresses(true)?;
        self.state = State::Live;
        Some(addresses)
    }

    /// Records that the owner has stopped the queue.
    ///
    /// Returns whether that completes a reset.
    pub(crate) fn stopped(&mut self) -> bool {
        match self.state {
            State::Stopping => self.state = State::Idle,
            State::Resetting => {
                self.set_defaults();
                return true;
            }
            State::Idle | State::Ready | State::Live => {}
        }
        false
    }

    /// Writes the registers.
    pub(super) fn save(&self, into: &mut Vec<u8>) {
        into.extend(self.max.to_le_bytes());
        into.push(self.state as u8);
        into.extend(self.size.to_le_bytes());
        for area in [self.desc, self.driver, self.device] {
            into.extend(area.to_le_bytes());
        }
    }

    /// Takes up registers. Returns the configuration of a live queue.
    pub(super) fn restore(
        &mut self,
        from: &mut Reader<'_>,
        packed: bool,
    ) -> Result<Option<QueueAddresses>, RestoreError> {
        same(from.u16()?, self.max, "size of a queue")?;
        let state = [State::Idle, State::Ready, State::Live];
        let state = state.get(usize::from(from.u8()?)).ok_or(RestoreError::Value("state of a queue"))?;
        self.state = *state;
        self.size = from.u32()?;
        (self.desc, self.driver, self.device) = (from.u64()?, from.u64()?, from.u64()?);
        let addresses = self.addresses(packed);
        possible(!self.enabled() || addresses.is_some(), "size of an enabled queue")?;
        Ok(addresses.filter(|_| self.live()))
    }
}
