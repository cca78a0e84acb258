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

/// Most frames that a source has ready, and bytes in them unless they are very long: what the nearest cache holds.
const MOST: usize = 64;
const STORAGE: usize = 16 << 10;

/// A back end that swallows and spouts.
#[derive(Debug)]
pub struct Generator {
    pairs: u16,
    frames: u64,
    len: usize,
}

impl Generator {
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

impl BackEnd for Generator {
    type Sender = Sink;
    type Receiver = Source;

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

    fn sender(&self, _pair: u16) -> io::Result<Sink> {
        Ok(Sink { bytes: vec![0; MAX_FRAME].into_boxed_slice() })
    }

    fn receiver(&self, _pair: u16) -> io::Result<Source> {
        let idle = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let count = (STORAGE / self.len).clamp(2, MOST);
        let frames: Box<[Box<[u8]>]> =
            (0..count).map(|_| (0..self.len).map(|at| at as u8).collect()).collect();
        let mut source = Source { left: self.frames, number: 0, frames, at: 0, at_hand: 0, idle };
        (0..count).for_each(|at| source.write_number(at, at as u64));
        Ok(source)
    }
}

/// Swallows frames, having copied them as a network would.
#[derive(Debug)]
pub struct Sink {
    bytes: Box<[u8]>,
}

impl Sender for Sink {
    fn send(&mut self, frame: &Outgoing<'_>) -> Result<Sent, ServeError> {
        frame.copy_to(&mut self.bytes[..frame.len])?;
        Ok(Sent::Sent)
    }
}

/// Spouts frames.
#[derive(Debug)]
pub struct Source {
    left: u64,
    /// That of the first frame at hand.
    number: u64,
    /// The frames at hand and those after them, in a circle. Each is written long before it is read: a load that takes more than
    /// one store has written would wait for that store, and all before it.
    frames: Box<[Box<[u8]>]>,
    /// Where the first one at hand is.
    at: usize,
    /// How many are at hand.
    at_hand: usize,
    /// Never readable: a frame is there at once or not at all.
    idle: OwnedFd,
}

impl Source {
    /// Where number `number` of the frames at hand is.
    #[inline(always)]
    fn place(&self, number: usize) -> usize {
        let place = self.at + number;
        if place < self.frames.len() { place } else { place - self.frames.len() }
    }

    fn write_number(&mut self, at: usize, number: u64) {
        self.frames[at][NUMBER_AT..][..8].copy_from_slice(&number.to_le_bytes());
    }
}

impl Receiver for Source {
    fn fetch(&mut self, most: usize) -> io::Result<usize> {
        self.at_hand = usize::try_from(self.left).unwrap_or(usize::MAX).min(most).min(self.frames.len());
        Ok(self.at_hand)
    }

    #[inline(always)]
    fn frame(&self, number: usize) -> Option<Incoming<'_>> {
        let bytes = self.frames.get(self.place(number)).filter(|_| number < self.at_hand)?;
        Some(Incoming { header: Header::default(), bytes })
    }

    fn done(&mut self, count: usize) {
        let count = count.min(self.at_hand);
        for number in 0..count {
            let later = self.number + (number + self.frames.len()) as u64;
            self.write_number(self.place(number), later);
        }
        self.at = self.place(count);
        self.at_hand -= count;
        self.number += count as u64;
        self.left -= count as u64;
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.idle.as_fd()
    }
}
