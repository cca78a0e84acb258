//! Frames in one direction, at full speed.
//!
//! ```text
//!   out: sent, each kicked for ---> taken back by the card      in: received, compared ---> its slot on offer again
//! ```
use crate::failure::wrong;
use crate::ping::{NUMBER_AT, SHORTEST};
use crate::platform::Platform;
use crate::report::{DiskPage, Failure, Measured};
use crate::worker::{Interrupts, Step, Worker};
use alloc::vec::Vec;
use paravane_driver::Transport;
use paravane_driver::net::Net;
use paravane_spec::builtin::state;

/// Most frames in one step, before the other devices get their turn.
const STEP: usize = 256;

/// Direction of the frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    Out,
    In,
}

/// Parameters of a stream.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StreamParams {
    pub(crate) direction: Direction,
    /// Frames.
    pub(crate) frames: u64,
    /// Bytes of each, at least [`SHORTEST`].
    pub(crate) len: usize,
}

/// A stream under way, on a card's first pair of queues.
pub(crate) struct Stream<T> {
    net: Net<T>,
    page: DiskPage,
    terms: StreamParams,
    /// The frame to be sent next, or the one that must come next.
    frame: Vec<u8>,
    got: Vec<u8>,
    /// Its number.
    number: u64,
    began: Option<u64>,
    measured: Measured,
}

impl<T: Transport> Stream<T> {
    pub(crate) fn new(net: Net<T>, terms: StreamParams, page: DiskPage) -> Self {
        page.moved(0, terms.frames * terms.len as u64);
        page.state(state::MIX);
        Self {
            net,
            page,
            terms,
            frame: (0..terms.len).map(|at| at as u8).collect(),
            got: alloc::vec![0; terms.len + 1],
            number: 0,
            began: None,
            measured: Measured::default(),
        }
    }

    fn is_done(&self) -> bool {
        self.measured.ops >= self.terms.frames
    }

    /// Sends or receives what can be.
    fn transfer(&mut self, clock: impl Fn() -> u64) -> Result<Step, Failure> {
        let mut step = Step::default();
        match self.terms.direction {
            Direction::Out => self.send(&clock, &mut step)?,
            Direction::In => self.receive(&clock, &mut step)?,
        }
        if step.completed > 0 {
            self.measured.ops += step.completed;
            self.measured.bytes += step.completed * self.terms.len as u64;
            let now = clock();
            self.measured.elapsed_ns = now.saturating_sub(self.began.unwrap_or(now));
            self.page.moved(self.measured.bytes, self.terms.frames * self.terms.len as u64);
            self.page.measured(self.measured);
        }
        if self.is_done() {
            self.page.state(state::DONE);
        }
        Ok(step)
    }

    /// Sends frames, each with a kick, as a program sends messages one by one.
    fn send(&mut self, clock: &impl Fn() -> u64, step: &mut Step) -> Result<(), Failure> {
        for _ in 0..self.most() {
            if self.number == self.terms.frames {
                break;
            }
            self.put_number();
            let now = clock();
            if !self.net.send(0, &self.frame)? {
                break;
            }
            self.began.get_or_insert(now);
            self.number += 1;
            step.sent += 1;
            step.kicks += u64::from(self.net.kick());
        }
        let through = self.number - self.net.in_flight(0)? as u64;
        step.completed = through.saturating_sub(self.measured.ops);
        Ok(())
    }

    fn receive(&mut self, clock: &impl Fn() -> u64, step: &mut Step) -> Result<(), Failure> {
        for _ in 0..self.most() {
            let Some(len) = self.net.receive(0, &mut self.got)? else { break };
            self.began.get_or_insert_with(clock);
            self.put_number();
            if self.number == self.terms.frames || self.got.get(..len) != Some(&self.frame[..]) {
                return Err(wrong(self.number, "a frame was lost, out of order or changed"));
            }
            self.number += 1;
            step.completed += 1;
        }
        self.page.verified(self.number * self.terms.len as u64);
        step.kicks += u64::from(self.net.kick());
        Ok(())
    }

    /// Most frames in this step.
    ///
    /// The first is alone in its step, so that the measured phase has a begin.
    fn most(&self) -> usize {
        if self.number == 0 { 1 } else { STEP }
    }

    fn put_number(&mut self) {
        self.frame[NUMBER_AT..SHORTEST].copy_from_slice(&self.number.to_le_bytes());
    }
}

impl<P: Platform, T: Transport> Worker<P> for Stream<T> {
    fn step(&mut self, platform: &P, _ready: bool) -> Result<Step, Failure> {
        self.transfer(|| platform.now_ns())
    }

    fn finished(&self) -> bool {
        self.is_done()
    }

    /// From the first frame on.
    fn is_measuring(&self) -> bool {
        self.began.is_some()
    }

    fn driver(&mut self) -> &mut dyn Interrupts {
        &mut self.net
    }
}
