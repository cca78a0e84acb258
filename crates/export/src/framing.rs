//! Where a message of a protocol ends, and how large it can be.
use std::error::Error;

/// Error that ends a session.
pub type SessionEnd = Box<dyn Error + Send + Sync>;

/// Frame of a protocol's messages on a stream socket.
///
/// A message is a header of fixed length and a payload whose length the header determines.
#[derive(Clone, Copy, Debug)]
pub struct Framing {
    /// Length of a header in bytes.
    pub header: usize,
    /// Largest message in bytes, header included.
    pub max_message: usize,
    /// Largest number of descriptors with a message.
    pub max_fds: usize,
    /// Returns the length of the payload in bytes, from a whole header.
    ///
    /// Fails if the header is malformed, or the message would exceed the maximum.
    pub payload: fn(&[u8]) -> Result<usize, SessionEnd>,
}

impl Framing {
    /// Length of a message in bytes, as far as its first bytes determine it.
    ///
    /// # Errors
    /// The header is malformed, or the message exceeds the maximum.
    pub(crate) fn message_len(&self, part: &[u8]) -> Result<usize, SessionEnd> {
        let Some(header) = part.get(..self.header) else { return Ok(self.header) };
        let len = self.header.saturating_add((self.payload)(header)?);
        match len <= self.max_message {
            true => Ok(len),
            false => Err(format!("message of {len} bytes: at most {}", self.max_message).into()),
        }
    }
}
