//! Traffic for measurements: a sink for sent frames, and a source of frames.
//!
//! Byte n of a generated frame is the low byte of n, except for eight bytes behind the Ethernet
//! header with its number.
use super::back_end::{BackEnd, Incoming, Outgoing, Receiver, Sender, Sent};
use super::header::EncodedHeader;
use crate::ServeError;
use paravane_spec::net::{ETH_HEADER, MAX_FRAME};
use std::io;

/// Offset of a frame's number: 64 bits, little endian.
const NUMBER_AT: usize = ETH_HEADER;

/// Most frames that a source has ready, and most bytes [at least two frames].
///
/// They stay in the first-level cache.
const MOST: usize = 64;
const STORAGE: usize = 16 << 10;

/// A back end that discards sent frames and generates received ones.
#[derive(Debug)]
pub struct Generator {
    pairs: u16,
    frames: u64,
    len: usize,
}

impl Generator {
    /// Generates `frames` frames of `len` bytes for each pair.
    ///
    /// # Errors
    /// `len` is not from 22 to 65549.
    pub fn new(pairs: u16, frames: u64, len: usize) -> io::Result<Self> {
        let least = NUMBER_AT + size_of::<u64>();
        if !(least..=MAX_FRAME).contains(&len) {
            let what = format!("invalid frame length of {len} bytes: the range is {least} to {MAX_FRAME}");
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
        let count = (STORAGE / self.len).clamp(2, MOST);
        let frames: Box<[Box<[u8]>]> =
            (0..count).map(|_| (0..self.len).map(|at| at as u8).collect()).collect();
        let mut source = Source { left: self.frames, number: 0, frames, at: 0, at_hand: 0 };
        (0..count).for_each(|at| source.write_number(at, at as u64));
        Ok(source)
    }
}

/// Discards frames, after copying them as a network would.
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

/// Generates frames.
#[derive(Debug)]
pub struct Source {
    left: u64,
    /// Number of the first frame at hand.
    number: u64,
    /// The frames at hand and those after them, in a circle.
    ///
    /// Each is written long before it is read: a load that is wider than a store in flight would
    /// wait for that store, and all before it.
    frames: Box<[Box<[u8]>]>,
    /// Index of the first one at hand.
    at: usize,
    /// Number of frames at hand.
    at_hand: usize,
}

impl Source {
    /// Index of frame `number` of those at hand.
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
        Some(Incoming { header: EncodedHeader::default(), bytes })
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
}
