//! Registers of one queue. The front page of the crate draws the states.
use crate::saved::{Reader, RestoreError, possible, same};
use crate::violation::Violation;
use paravane_spec::queue::QueueAddresses;

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

/// Registers of one queue.
///
/// Values are kept as written and checked when it is enabled.
#[derive(Debug)]
pub(crate) struct QueueRegisters {
    pub(crate) max: u16,
    /// Size before the driver sets one.
    size_at_reset: u16,
    state: State,
    /// All 32 bits: a size of 0x1_0100 must not be taken for 0x100.
    pub(crate) size: u32,
    /// Addresses of the descriptor, driver and device area, the low word of each first.
    pub(crate) areas: [u32; 6],
}

impl QueueRegisters {
    pub(crate) fn new(max: u16, size_at_reset: u16) -> Self {
        Self { max, size_at_reset, state: State::Idle, size: size_at_reset.into(), areas: [0; 6] }
    }

    /// Returns to the state after [`QueueRegisters::new`].
    pub(crate) fn set_defaults(&mut self) {
        *self = Self::new(self.max, self.size_at_reset);
    }

    /// Whether it reads enabled.
    ///
    /// It does until the owner has stopped the queue: 0 promises that the device does not access it
    /// (sections 4.1.4.3.1 and 4.2.2.1).
    pub(crate) fn enabled(&self) -> bool {
        !self.idle()
    }

    pub(crate) fn live(&self) -> bool {
        self.state == State::Live
    }

    /// Whether it is being reset.
    pub(crate) fn resetting(&self) -> bool {
        self.state == State::Resetting
    }

    /// Whether its registers may be written.
    pub(crate) fn idle(&self) -> bool {
        self.state == State::Idle
    }

    /// Configuration, if the device can serve its size.
    ///
    /// A power of two, or any number in a `packed` queue (section 2.8.10.1).
    fn addresses(&self, packed: bool) -> Option<QueueAddresses> {
        let size = u16::try_from(self.size).ok().filter(|&size| size != 0 && size <= self.max)?;
        if !packed && !size.is_power_of_two() {
            return None;
        }
        let [desc, driver, device] =
            [0, 2, 4].map(|low| u64::from(self.areas[low]) | u64::from(self.areas[low + 1]) << 32);
        Some(QueueAddresses { size, desc, driver, device })
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

    /// Disables it. Returns whether it must be stopped.
    pub(crate) fn disable(&mut self) -> bool {
        let stops = self.live();
        match self.state {
            State::Live => self.state = State::Stopping,
            State::Ready => self.state = State::Idle,
            State::Idle | State::Stopping | State::Resetting => {}
        }
        stops
    }

    /// Resets it.
    ///
    /// Returns whether it must be stopped first; otherwise it is reset, or a reset was under way.
    pub(crate) fn reset(&mut self) -> bool {
        let stops = self.live();
        match self.state {
            State::Live | State::Stopping | State::Resetting => self.state = State::Resetting,
            State::Idle | State::Ready => self.set_defaults(),
        }
        stops
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
        into.extend(self.areas.iter().flat_map(|word| word.to_le_bytes()));
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
        for word in &mut self.areas {
            *word = from.u32()?;
        }
        let addresses = self.addresses(packed);
        possible(!self.enabled() || addresses.is_some(), "size of an enabled queue")?;
        Ok(addresses.filter(|_| self.live()))
    }
}
