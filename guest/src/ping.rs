//! Sends frames on a network card whose peer is an echo, and checks the answers.
//!
//! ```text
//!   asking for pairs --yes--> on each pair: sent, in order ---> came back, in order, with its addresses swapped,
//!                                                              cut to the length of an answer or filled up with 0
//! ```
use crate::histogram;
use crate::platform::Platform;
use crate::report::{DiskPage, Failure, Measured};
use crate::worker::{Interrupts, Step, Worker};
use alloc::collections::VecDeque;
use alloc::vec::Vec;
use paravane_driver::Transport;
use paravane_driver::net::Net;
use paravane_spec::builtin::{error, state};

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
#[derive(Clone, Copy, Debug)]
pub(crate) struct PingParams {
    /// Frames to send.
    pub(crate) frames: u64,
    /// Bytes of each, at least [`SHORTEST`].
    pub(crate) len: usize,
    /// Bytes of each that comes back, at least [`SHORTEST`].
    pub(crate) reply: usize,
    /// Frames in flight on each pair of queues.
    pub(crate) depth: usize,
}

/// A frame that is not back yet.
#[derive(Clone, Copy, Debug)]
struct Flight {
    number: u64,
    since: u64,
}

/// An exchange under way.
pub(crate) struct Ping<T> {
    net: Net<T>,
    page: DiskPage,
    terms: PingParams,
    /// The answer to the question for pairs has not come yet.
    asking: bool,
    /// Of each pair, in the order in which they were sent.
    flights: Vec<VecDeque<Flight>>,
    frame: Vec<u8>,
    answer: Vec<u8>,
    sent: u64,
    began: Option<u64>,
    measured: Measured,
}

pub(crate) fn wrong(detail: u64, reason: &'static str) -> Failure {
    Failure { error: error::MISMATCH, detail, sector: 0, reason }
}

/// Asks the card to use all queue pairs; `true`: an answer will come.
///
/// # Errors
/// The driver refuses.
pub(crate) fn ask_for_pairs<T: Transport>(net: &mut Net<T>) -> Result<bool, Failure> {
    let pairs = net.pairs_set_up();
    if pairs > 1 {
        net.ask_for_pairs(pairs)?;
    }
    Ok(pairs > 1)
}

/// Takes the answer to [`ask_for_pairs`] if `asking`; `true`: all are in use.
///
/// # Errors
/// The card does not use them, or the control queue is broken.
pub(crate) fn uses_pairs<T: Transport>(net: &mut Net<T>, asking: &mut bool) -> Result<bool, Failure> {
    if *asking {
        match net.answer()? {
            None => return Ok(false),
            Some(true) => *asking = false,
            Some(false) => return Err(wrong(0, "the card refused to use its queue pairs")),
        }
    }
    Ok(true)
}

impl<T: Transport> Ping<T> {
    /// On all pairs that the driver has set up.
    ///
    /// # Errors
    /// The driver refuses the question for pairs.
    pub(crate) fn new(mut net: Net<T>, terms: PingParams, page: DiskPage) -> Result<Self, Failure> {
        let asking = ask_for_pairs(&mut net)?;
        let pairs = net.pairs_set_up();
        let mut frame = alloc::vec![0; terms.len];
        frame[..6].copy_from_slice(&FAR);
        frame[6..12].copy_from_slice(&net.mac().unwrap_or(NEAR));
        frame[12..NUMBER_AT].copy_from_slice(&ETHERTYPE);
        page.moved(0, terms.frames * terms.reply as u64);
        page.state(state::MIX);
        Ok(Self {
            net,
            page,
            terms,
            asking,
            flights: (0..pairs).map(|_| VecDeque::with_capacity(terms.depth)).collect(),
            frame,
            answer: alloc::vec![0; terms.reply + 1],
            sent: 0,
            began: None,
            measured: Measured::default(),
        })
    }

    fn is_done(&self) -> bool {
        self.measured.ops >= self.terms.frames
    }

    /// Takes what came back, and sends more if it may.
    fn exchange(&mut self, may_send: bool, clock: impl Fn() -> u64) -> Result<Step, Failure> {
        let mut step = Step::default();
        if !uses_pairs(&mut self.net, &mut self.asking)? {
            return Ok(step);
        }
        for pair in 0..self.flights.len() {
            while let Some(len) = self.net.receive(pair as u16, &mut self.answer)? {
                self.came(pair, len, clock())?;
                step.completed += 1;
            }
        }
        let pairs = if may_send { self.flights.len() } else { 0 };
        for pair in 0..pairs {
            while self.sent < self.terms.frames && self.flights[pair].len() < self.terms.depth {
                fill(&mut self.frame, self.sent);
                let since = clock();
                if !self.net.send(pair as u16, &self.frame)? {
                    break;
                }
                self.began.get_or_insert(since);
                self.flights[pair].push_back(Flight { number: self.sent, since });
                self.sent += 1;
                step.sent += 1;
            }
        }
        step.kicks = u64::from(self.net.kick());
        if step.completed > 0 {
            self.page.moved(self.measured.bytes, self.terms.frames * self.terms.reply as u64);
            self.page.measured(self.measured);
            self.page.verified(self.measured.bytes);
        }
        if self.is_done() {
            self.page.state(state::DONE);
        }
        Ok(step)
    }

    /// Checks the frame of `len` bytes that came on `pair`: the oldest sent there.
    fn came(&mut self, pair: usize, len: usize, now: u64) -> Result<(), Failure> {
        let Some(flight) = self.flights[pair].pop_front() else {
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

    fn driver(&mut self) -> &mut dyn Interrupts {
        &mut self.net
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
