//! Device state in a migration.
//!
//! ```text
//!   SET_DEVICE_STATE_FD, save: written to the client's pipe at once       CHECK_DEVICE_STATE: did the write succeed?
//!   SET_DEVICE_STATE_FD, load: the pipe is kept, the client fills it      CHECK_DEVICE_STATE: read; is it valid?
//! ```
//! The state identifies the device; a different device refuses it. It carries the number of queue
//! pairs that the driver of a network card has set through the control queue. Other requests carry the
//! rest: queue positions, configuration, and the features, which decide the offloads. The state fits
//! in any pipe, so nothing here waits for the client.
//!
//! | bytes | content |
//! |---|---|
//! | 0 to 7 | magic number and version |
//! | 8 to 11 | device ID |
//! | 12 to 15 | number of queues |
//! | 16 to 19 | queue pairs that the driver has set; absent if it has set none |
use crate::session::SessionError;
use paravane_io::{read_now, write_now};
use paravane_spec::vhost_user::StateTransfer;
use rustix::fs::FileType;
use std::io;
use std::os::fd::OwnedFd;

/// Magic number and format version at the start of the state.
const MAGIC: &[u8; 8] = b"PRVANE\x00\x01";
/// Size of the state in bytes, without queue pairs.
const SIZE: usize = 16;
/// Most bytes of a state.
const MOST: usize = SIZE + 4;

/// The state was not written, or is not that of this device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TransferFailed;

/// State of a transfer.
#[derive(Debug, Default)]
pub(crate) enum Transfer {
    #[default]
    None,
    /// Finished, and whether it succeeded.
    Done(bool),
    /// To be read from this pipe.
    In(OwnedFd),
}

/// State of a device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DeviceState {
    pub(crate) device_id: u32,
    pub(crate) queues: u32,
    /// Queue pairs that the driver has set; 0: none.
    pub(crate) pairs: u16,
}

impl DeviceState {
    /// An earlier version wrote no pairs, and reads a state without.
    fn encode(self) -> Vec<u8> {
        let mut state = [&MAGIC[..], &self.device_id.to_le_bytes(), &self.queues.to_le_bytes()].concat();
        if self.pairs > 0 {
            state.extend(u32::from(self.pairs).to_le_bytes());
        }
        state
    }

    /// Returns the pairs of a state of the same device.
    fn decode(self, state: &[u8]) -> Option<u16> {
        let (identity, pairs) = state.split_at_checked(SIZE)?;
        if identity != (Self { pairs: 0, ..self }).encode() {
            return None;
        }
        match pairs {
            [] => Some(0),
            pairs => u16::try_from(u32::from_le_bytes(pairs.try_into().ok()?)).ok(),
        }
    }
}

impl Transfer {
    /// Begins a transfer.
    pub(crate) fn begin(
        transfer: StateTransfer,
        pipe: OwnedFd,
        state: DeviceState,
    ) -> Result<Self, SessionError> {
        let request = "SET_DEVICE_STATE_FD";
        let refused = |source| SessionError::Fd { request, source };
        let mode = rustix::fs::fstat(&pipe).map_err(|error| refused(error.into()))?.st_mode;
        // A socket could keep its owner's connection open while we hold it, and a file could block.
        if FileType::from_raw_mode(mode) != FileType::Fifo {
            return Err(refused(io::Error::new(io::ErrorKind::InvalidInput, "not a pipe")));
        }
        match transfer {
            StateTransfer { direction: 0, phase: 0 } => {
                let state = state.encode();
                Ok(Self::Done(write_now(&pipe, &state) == Ok(state.len())))
            }
            StateTransfer { direction: 1, phase: 0 } => Ok(Self::In(pipe)),
            StateTransfer { direction, phase } => Err(SessionError::Transfer { direction, phase }),
        }
    }

    /// Whether a request that follows depends on it.
    pub(crate) fn is_open(&self) -> bool {
        matches!(self, Self::In(_) | Self::Done(false))
    }

    /// Checks that the transfer succeeded so far. Returns the pairs of a state that is read now.
    ///
    /// `own`: this device. Reads a pending state.
    ///
    /// # Errors
    /// The transfer failed.
    pub(crate) fn check(&mut self, own: DeviceState) -> Result<Option<u16>, TransferFailed> {
        if let Self::In(pipe) = self {
            // One byte more than a valid state, to detect a longer one.
            let mut found = [0; MOST + 1];
            let mut have = 0;
            while let Ok(count @ 1..) = read_now(&*pipe, &mut found[have..]) {
                have += count;
            }
            let pairs = own.decode(&found[..have]);
            *self = Self::Done(pairs.is_some());
            return pairs.map(Some).ok_or(TransferFailed);
        }
        match self {
            Self::Done(false) => Err(TransferFailed),
            Self::Done(true) | Self::None | Self::In(_) => Ok(None),
        }
    }
}

/// Queue pairs in the state of a card ([`Device::state`](paravane_device::Device::state)); 0: none.
pub(crate) fn pairs_of(state: &[u8]) -> u16 {
    state.try_into().map_or(0, u16::from_le_bytes)
}

/// State of a card whose driver has set this number of queue pairs.
pub(crate) fn state_of(pairs: u16) -> Vec<u8> {
    if pairs == 0 { Vec::new() } else { pairs.to_le_bytes().to_vec() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::pipe::{PipeFlags, pipe_with};

    /// A network card with all that a state can say.
    const CARD: DeviceState = DeviceState { device_id: 1, queues: 3, pairs: u16::MAX };
    const SAVE: StateTransfer = StateTransfer { direction: 0, phase: 0 };

    #[test]
    fn a_state_has_at_most_20_bytes() {
        assert_eq!(CARD.encode().len(), 20);
        assert_eq!(DeviceState { pairs: 0, ..CARD }.encode().len(), 16);
    }

    #[test]
    fn a_full_pipe_fails_a_transfer_that_no_thread_waits_for() {
        let (read, write) = pipe_with(PipeFlags::CLOEXEC).unwrap();
        let ours = write.try_clone().unwrap();
        assert!(matches!(Transfer::begin(SAVE, ours, CARD), Ok(Transfer::Done(true))));
        assert_eq!(rustix::io::read(&read, &mut [0_u8; 64]), Ok(20));
        rustix::io::ioctl_fionbio(&write, true).unwrap();
        while rustix::io::write(&write, &[0; 4096]).is_ok() {}
        rustix::io::ioctl_fionbio(&write, false).unwrap();
        assert!(matches!(Transfer::begin(SAVE, write, CARD), Ok(Transfer::Done(false))));
    }
}
