//! Device state in a migration.
//!
//! ```text
//!   SET_DEVICE_STATE_FD, save: written to the client's pipe at once       CHECK_DEVICE_STATE: did the write succeed?
//!   SET_DEVICE_STATE_FD, load: the pipe is kept, the client fills it      CHECK_DEVICE_STATE: read; is it valid?
//! ```
//! Paravane's devices have no state beside their queue positions and their configuration, which
//! other requests carry. The state only identifies the device; a different device refuses it. It
//! fits in any pipe, so nothing here waits for the client.
use crate::session::SessionError;
use paravane_spec::vhost_user::StateTransfer;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::FileType;
use rustix::io::{Errno, IoSlice, IoSliceMut, ReadWriteFlags};
use std::io;
use std::os::fd::OwnedFd;

/// Magic number and format version at the start of the state.
const MAGIC: &[u8; 8] = b"PRVANE\x00\x01";
/// Size of the state in bytes.
const SIZE: usize = 16;

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

/// State of a device of this type.
fn state(device_id: u32, queues: u32) -> [u8; SIZE] {
    let mut state = [0; SIZE];
    state[..8].copy_from_slice(MAGIC);
    state[8..12].copy_from_slice(&device_id.to_le_bytes());
    state[12..].copy_from_slice(&queues.to_le_bytes());
    state
}

impl Transfer {
    /// Begins a transfer.
    pub(crate) fn begin(
        transfer: StateTransfer,
        pipe: OwnedFd,
        device_id: u32,
        queues: u32,
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
                Ok(Self::Done(write(&pipe, &state(device_id, queues)) == Some(SIZE)))
            }
            StateTransfer { direction: 1, phase: 0 } => Ok(Self::In(pipe)),
            StateTransfer { direction, phase } => Err(SessionError::Transfer { direction, phase }),
        }
    }

    /// Whether a request that follows depends on it.
    pub(crate) fn is_open(&self) -> bool {
        matches!(self, Self::In(_) | Self::Done(false))
    }

    /// Whether the transfer succeeded so far. Reads a pending state.
    pub(crate) fn check(&mut self, device_id: u32, queues: u32) -> bool {
        if let Self::In(pipe) = self {
            // One byte more than a valid state, to detect a longer one.
            let mut found = [0; SIZE + 1];
            let mut have = 0;
            while let Some(count @ 1..) = read(pipe, &mut found[have..]) {
                have += count;
            }
            let good = found[..have] == state(device_id, queues);
            *self = Self::Done(good);
        }
        match self {
            Self::Done(good) => *good,
            Self::None | Self::In(_) => true,
        }
    }
}

fn is_ready(pipe: &OwnedFd, what: PollFlags) -> bool {
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    let mut fds = [PollFd::new(pipe, what)];
    poll(&mut fds, Some(&now)).is_ok_and(|ready| ready > 0)
}

/// Writes without waiting; returns the number of bytes.
fn write(pipe: &OwnedFd, bytes: &[u8]) -> Option<usize> {
    // Offset -1 (u64::MAX) means none.
    match rustix::io::pwritev2(pipe, &[IoSlice::new(bytes)], u64::MAX, ReadWriteFlags::NOWAIT) {
        Err(Errno::OPNOTSUPP) if is_ready(pipe, PollFlags::OUT) => rustix::io::write(pipe, bytes).ok(),
        written => written.ok(),
    }
}

/// Reads without waiting; returns the number of bytes.
fn read(pipe: &OwnedFd, bytes: &mut [u8]) -> Option<usize> {
    match rustix::io::preadv2(pipe, &mut [IoSliceMut::new(bytes)], u64::MAX, ReadWriteFlags::NOWAIT) {
        Err(Errno::OPNOTSUPP) if is_ready(pipe, PollFlags::IN) => rustix::io::read(pipe, bytes).ok(),
        read => read.ok(),
    }
}
