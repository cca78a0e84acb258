//! Sends frames on a network card whose peer is an echo, and checks the answers.
//!
//! ```text
//!   the card uses all pairs --> sent, in order ---> came back, in order, with its addresses swapped,
//!                                                   cut to the length of an answer or filled up with 0
//! ```
use crate::failure::wrong;
use crate::histogram;
use crate::pair::CardPair;
use crate::platform::Platform;
use crate::report::{DiskPage, Failure, Measured};
use crate::worker::{Interrupts, Step, Worker};
use alloc::collections::VecDeque;
use alloc::vec::Vec;
use core::ops::Range;
use paravane_driver::Transport;
use paravane_spec::builtin::state;

/// Where frames go.
const FAR: [u8; 6] = [2, 0, 0, 0, 0, 0xee];
/// Address for a card that has none.
const NEAR: [u8; 6] = [2, 0, 0, 0, 0, 1];
/// For local experiments (IEEE 802).
const ETHERTYPE: [u8; 2] = [0x88, 0xb5];
/// Where a frame's number lies.
pub(crate) const NUMBER_AT: usize = 14;
/// Bytes of the shortest frame: addresses, type, number.
pub(crate) const SHORTEST: usize = NUMBER_AT + 8;

/// Parameters of an exchange.
#[derive(Clone, Debug)]
pub(crate) struct PingParams {
    /// Numbers of the frames to send.
    pub(crate) frames: Range<u64>,
    /// Bytes of each, at least [`SHORTEST`].
    pub(crate) len: usize,
    /// Bytes of each that comes back, at least [`SHORTEST`].
    pub(crate) reply: usize,
    /// Frames in flight.
    pub(crate) depth: usize,
}

/// A frame that is not back yet.
#[derive(Clone, Copy, Debug)]
struct Flight {
    number: u64,
    since: u64,
}

/// An exchange under way, on one pair of a card's queues.
pub(crate) struct Ping<T> {
    pair: CardPair<T>,
    page: DiskPage,
    terms: PingParams,
    /// In the order in which they were sent.
    flights: VecDeque<Flight>,
    frame: Vec<u8>,
    answer: Vec<u8>,
    /// Number of the next frame.
    next: u64,
    began: Option<u64>,
    measured: Measured,
}

impl<T: Transport> Ping<T> {
    pub(crate) fn new(pair: CardPair<T>, terms: PingParams, page: DiskPage) -> Self {
        let mut frame = alloc::vec![0; terms.len];
        frame[..6].copy_from_slice(&FAR);
        frame[6..12].copy_from_slice(&pair.mac.unwrap_or(NEAR));
        frame[12..NUMBER_AT].copy_from_slice(&ETHERTYPE);
        let ping = Self {
            flights: VecDeque::with_capacity(terms.depth),
            frame,
            answer: alloc::vec![0; terms.reply + 1],
            next: terms.frames.start,
            pair,
            page,
            terms,
            began: None,
            measured: Measured::default(),
        };
        page.moved(0, ping.total());
        page.state(if ping.is_done() { state::DONE } else { state::MIX });
        ping
    }

    /// Bytes that come back in all.
    fn total(&self) -> u64 {
        (self.terms.frames.end - self.terms.frames.start) * self.terms.reply as u64
    }

    fn is_done(&self) -> bool {
        self.measured.ops >= self.terms.frames.end - self.terms.frames.start
    }

    /// Takes what came back, and sends more if it may.
    fn exchange(&mut self, may_send: bool, clock: impl Fn() -> u64) -> Result<Step, Failure> {
        let mut step = Step::default();
        if !self.pair.comes_up()? {
            return Ok(step);
        }
        while let Some(len) = self.pair.queues.receive(&mut self.answer)? {
            self.came(len, clock())?;
            step.completed += 1;
        }
        while may_send && self.next < self.terms.frames.end && self.flights.len() < self.terms.depth {
            fill(&mut self.frame, self.next);
            let since = clock();
            if !self.pair.queues.send(&self.frame)? {
                break;
            }
            self.began.get_or_insert(since);
            self.flights.push_back(Flight { number: self.next, since });
            self.next += 1;
            step.sent += 1;
        }
        step.kicks = u64::from(self.pair.queues.kick());
        if step.completed > 0 {
            self.page.moved(self.measured.bytes, self.total());
            self.page.measured(self.measured);
            self.page.verified(self.measured.bytes);
        }
        if self.is_done() {
            self.page.state(state::DONE);
        }
        Ok(step)
    }

    /// Checks the frame of `len` bytes that came: the oldest that was sent.
    fn came(&mut self, len: usize, now: u64) -> Result<(), Failure> {
        let Some(flight) = self.flights.pop_front() else {
            return Err(wrong(len as u64, "an unexpected frame was received"));
        };
        fill(&mut self.frame, flight.number);
        let answer = &self.answer[..len.min(self.answer.len())];
        if answer.len() != self.terms.reply || !is_echo(&self.frame, answer) {
            return Err(wrong(flight.number, "a frame came back out of order or changed"));
        }
        self.page.count_latency(histogram::bucket(now.saturating_sub(flight.since)));
        self.measured.ops += 1;
        self.measured.bytes += len as u64;
        self.measured.elapsed_ns = now.saturating_sub(self.began.unwrap_or(now));
        Ok(())
    }
}

impl<P: Platform, T: Transport> Worker<P> for Ping<T> {
    fn step(&mut self, platform: &P, ready: bool) -> Result<Step, Failure> {
        self.exchange(ready, || platform.now_ns())
    }

    fn finished(&self) -> bool {
        self.is_done()
    }

    /// From the first frame on.
    fn is_measuring(&self) -> bool {
        self.began.is_some()
    }

    fn completes_by_interrupt(&self) -> bool {
        true
    }

    /// Frames come back on the pair on which they were sent only when all pairs are in use.
    fn is_ready(&self) -> bool {
        self.pair.is_up()
    }

    fn driver(&mut self) -> &mut dyn Interrupts {
        &mut self.pair
    }
}

/// Whether `got` is the echo of `sent`, at any length from [`SHORTEST`] on.
fn is_echo(sent: &[u8], got: &[u8]) -> bool {
    let same = got.len().min(sent.len());
    let (got, more) = got.split_at(same);
    got[..6] == sent[6..12]
        && got[6..12] == sent[..6]
        && got[12..] == sent[12..same]
        && more.iter().all(|&byte| byte == 0)
}

/// Makes a frame the one with this number: its pattern follows from it.
fn fill(frame: &mut [u8], number: u64) {
    let value = |word: u64| match word {
        0 => number,
        word => number.wrapping_add(word).wrapping_mul(0x9e37_79b9_7f4a_7c15),
    };
    let (chunks, rest) = frame[NUMBER_AT..].as_chunks_mut::<8>();
    let words = chunks.len() as u64;
    for (chunk, word) in chunks.iter_mut().zip(0_u64..) {
        *chunk = value(word).to_le_bytes();
    }
    rest.copy_from_slice(&value(words).to_le_bytes()[..rest.len()]);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(number: u64, len: usize) -> Vec<u8> {
        let mut frame: Vec<u8> = (0..len as u8).collect();
        fill(&mut frame, number);
        frame
    }

    #[test]
    fn only_the_frame_itself_is_its_echo() {
        for len in [SHORTEST, 60, 61] {
            let sent = frame(7, len);
            let mut echo = [&sent[6..12], &sent[..6], &sent[12..]].concat();
            assert!(is_echo(&sent, &echo));
            assert!(!is_echo(&sent, &sent), "the addresses are not swapped");
            assert!(!is_echo(&frame(8, len), &echo), "another number");
            assert!(is_echo(&sent, &echo[..SHORTEST]), "cut off");
            echo.push(0);
            assert!(is_echo(&sent, &echo), "filled up");
            echo[len] = 1;
            assert!(!is_echo(&sent, &echo), "filled up with something");
            echo.truncate(len);
            for at in 0..len {
                echo[at] ^= 1;
                assert!(!is_echo(&sent, &echo), "byte {at}");
                echo[at] ^= 1;
            }
        }
    }
}
