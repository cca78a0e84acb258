//! Registers as bytes, which another process restores.
//!
//! All numbers are little-endian. What is read may come from anywhere: each value is checked.
use paravane_notify::NotifyError;
use paravane_spec::mmio::{INT_CONFIG_CHANGE, INT_USED_BUFFER};
use paravane_spec::queue::QueueAddresses;
use thiserror::Error;

/// First bytes of saved registers.
const MAGIC: [u8; 4] = *b"PVTR";
/// Version of the format.
const VERSION: u16 = 1;

/// Why registers cannot be restored.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum RestoreError {
    /// They are of another transport, or a later version has written them.
    #[error("saved registers are of another transport or version")]
    Format,
    /// There are too few or too many bytes.
    #[error("saved registers have the wrong length")]
    Length,
    /// The device differs from the one whose registers were saved.
    #[error("saved registers are of another device: {0}")]
    Device(&'static str),
    /// No driver can have brought the registers there.
    #[error("saved registers have an impossible value: {0}")]
    Value(&'static str),
    /// The machine cannot deliver a message of the driver.
    #[error("saved registers have a message that cannot be delivered: {0}")]
    Message(#[from] NotifyError),
}

/// What the owner has to do after registers were restored.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Restored {
    /// Negotiated feature bits.
    pub features: u64,
    /// Queues to start, each where its last server has stopped: index and configuration.
    pub queues: Vec<(u16, QueueAddresses)>,
    /// Serve nothing before [`Effect::Resume`](crate::Effect::Resume).
    pub suspended: bool,
    /// Guest-physical address of the window, if the driver decides on it; see
    /// [`Effect::Move`](crate::Effect::Move).
    pub window: Option<u64>,
}

/// Begins the bytes of a transport of this kind.
pub(crate) fn begin(kind: u8) -> Vec<u8> {
    [&MAGIC[..], &VERSION.to_le_bytes(), &[kind]].concat()
}

/// Checks a value that is the device's own.
pub(crate) fn same<T: PartialEq>(read: T, own: T, what: &'static str) -> Result<(), RestoreError> {
    if read == own { Ok(()) } else { Err(RestoreError::Device(what)) }
}

/// Checks a value that only some drivers can have set.
pub(crate) fn possible(is_possible: bool, what: &'static str) -> Result<(), RestoreError> {
    if is_possible { Ok(()) } else { Err(RestoreError::Value(what)) }
}

/// Reads bytes from their beginning.
pub(crate) struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    /// Begins to read the bytes of a transport of this kind.
    pub(crate) fn new(bytes: &'a [u8], kind: u8) -> Result<Self, RestoreError> {
        let mut this = Self(bytes);
        if this.bytes()? != MAGIC || this.u16()? != VERSION || this.u8()? != kind {
            return Err(RestoreError::Format);
        }
        Ok(this)
    }

    pub(crate) fn bytes<const N: usize>(&mut self) -> Result<[u8; N], RestoreError> {
        let (bytes, rest) = self.0.split_first_chunk().ok_or(RestoreError::Length)?;
        self.0 = rest;
        Ok(*bytes)
    }

    pub(crate) fn u8(&mut self) -> Result<u8, RestoreError> {
        self.bytes().map(|[byte]| byte)
    }

    pub(crate) fn u16(&mut self) -> Result<u16, RestoreError> {
        self.bytes().map(u16::from_le_bytes)
    }

    pub(crate) fn u32(&mut self) -> Result<u32, RestoreError> {
        self.bytes().map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self) -> Result<u64, RestoreError> {
        self.bytes().map(u64::from_le_bytes)
    }

    /// Reads a flag.
    pub(crate) fn flag(&mut self, what: &'static str) -> Result<bool, RestoreError> {
        match self.u8()? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(RestoreError::Value(what)),
        }
    }

    /// Reads the causes of a wired interrupt.
    pub(crate) fn causes(&mut self) -> Result<u32, RestoreError> {
        let causes = self.u32()?;
        possible(causes & !(INT_USED_BUFFER | INT_CONFIG_CHANGE) == 0, "interrupt status")?;
        Ok(causes)
    }

    /// Checks that nothing is left.
    pub(crate) fn end(self) -> Result<(), RestoreError> {
        if self.0.is_empty() { Ok(()) } else { Err(RestoreError::Length) }
    }
}
