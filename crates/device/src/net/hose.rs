//! The far side of a stream: takes whatever is sent, and sends a number of frames as fast as the driver has buffers.
//!
//! Byte n of a frame that it sends is the low byte of n, but for eight bytes behind the Ethernet header that hold its number.
use super::back_end::{BackEnd, Incoming, Outgoing, Receiver, Sender, Sent};
use crate::ServeError;
use paravane_spec::net::{ETH_HEADER, Header, MAX_FRAME};
use rustix::event::{EventfdFlags, eventfd};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Where a frame's number lies: 64 bits, little endian.
const NUMBER_AT: usize = ETH_HEADER;

/// A back end that swallows and spouts.
#[derive(Debug)]
pub struct Hose {
    pairs: u16,
    frames: u64,
    len: usize,
}

impl Hose {
    /// Sends `frames` frames of `len` bytes on each pair, which is from 22 to the length of the longest frame.
    ///
    /// # Errors
    /// `len` is not.
    pub fn new(pairs: u16, frames: u64, len: usize) -> io::Result<Self> {
        let least = NUMBER_AT + size_of::<u64>();
        if !(least..=MAX_FRAME).contains(&len) {
            let what = format!("frames of {len} bytes are not from {least} to {MAX_FRAME}");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        }
        Ok(Self { pairs, frames, len })
    }
}

impl BackEnd for Hose {
    type Sender = Drain;
    type Receiver = Spout;

    fn pairs(&self) -> u16 {
        self.pairs
    }

    fn offloads(&self) -> u64 {
        0
    }

    fn accept(&self, _features: u64) -> io::Result<()> {
        Ok(())
    }

    fn use_pairs(&self, _pairs: u16) -> io::Result<()> {
        Ok(())
    }

    fn inject(&self, _frame: &[u8]) -> io::Result<()> {
        Ok(())
    }

    fn sender(&self, _pair: u16) -> io::Result<Drain> {
        Ok(Drain { bytes: vec![0; MAX_FRAME].into_boxed_slice() })
    }

    fn receiver(&self, _pair: u16) -> io::Result<Spout> {
        let idle = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Spout { left: self.frames, number: 0, bytes: (0..self.len).map(|at| at as u8).collect(), idle })
    }
}

/// Swallows frames, having copied them as a network would.
#[derive(Debug)]
pub struct Drain {
    bytes: Box<[u8]>,
}

impl Sender for Drain {
    fn send(&mut self, frame: &Outgoing<'_>) -> Result<Sent, ServeError> {
        frame.copy_to(&mut self.bytes[..frame.len])?;
        Ok(Sent::Sent)
    }
}

/// Spouts frames.
#[derive(Debug)]
pub struct Spout {
    left: u64,
    number: u64,
    bytes: Vec<u8>,
    /// Never readable: a frame is there at once or not at all.
    idle: OwnedFd,
}

impl Receiver for Spout {
    fn next(&mut self) -> io::Result<Option<Incoming<'_>>> {
        if self.left == 0 {
            return Ok(None);
        }
        self.bytes[NUMBER_AT..][..8].copy_from_slice(&self.number.to_le_bytes());
        Ok(Some(Incoming { header: Header::default(), bytes: &self.bytes }))
    }

    fn done(&mut self) {
        self.left = self.left.saturating_sub(1);
        self.number += 1;
    }

    fn at_hand(&self) -> usize {
        usize::try_from(self.left).unwrap_or(usize::MAX)
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.idle.as_fd()
    }
}
