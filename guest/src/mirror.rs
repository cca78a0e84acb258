//! Returns each received frame with swapped addresses, until the others finish.
use crate::failure::wrong;
use crate::pair::CardPair;
use crate::platform::Platform;
use crate::report::{DiskPage, Failure, Measured};
use crate::worker::{Interrupts, Step, Worker};
use alloc::vec::Vec;
use paravane_driver::Transport;
use paravane_spec::builtin::state;

/// A mirror under way, on one pair of a card's queues.
pub(crate) struct Mirror<T> {
    pair: CardPair<T>,
    page: DiskPage,
    /// A received frame that is not sent back yet, with room for any.
    frame: Vec<u8>,
    /// Its length; 0: there is none.
    len: usize,
    measured: Measured,
}

impl<T: Transport> Mirror<T> {
    /// For frames of up to `longest` bytes.
    pub(crate) fn new(pair: CardPair<T>, longest: usize, page: DiskPage) -> Self {
        page.state(state::MIX);
        Self { pair, page, frame: alloc::vec![0; longest], len: 0, measured: Measured::default() }
    }

    /// Takes what came, and sends it back.
    fn echo(&mut self) -> Result<Step, Failure> {
        let mut step = Step::default();
        if !self.pair.comes_up()? {
            return Ok(step);
        }
        let queues = &mut self.pair.queues;
        loop {
            if self.len == 0 {
                let Some(len) = queues.receive(&mut self.frame)? else { break };
                let frame = self.frame.get_mut(..len).ok_or(too_long(len))?;
                let Some((addresses, _)) = frame.split_at_mut_checked(12) else {
                    return Err(too_long(len));
                };
                let (to, from) = addresses.split_at_mut(6);
                to.swap_with_slice(from);
                self.len = len;
            }
            if !queues.send(&self.frame[..self.len])? {
                break;
            }
            self.measured.ops += 1;
            self.measured.bytes += self.len as u64;
            step.sent += 1;
            self.len = 0;
        }
        step.kicks = u64::from(queues.kick());
        step.completed = step.sent;
        if step.sent > 0 {
            self.page.measured(self.measured);
        }
        Ok(step)
    }
}

impl<P: Platform, T: Transport> Worker<P> for Mirror<T> {
    fn step(&mut self, _platform: &P, _ready: bool) -> Result<Step, Failure> {
        self.echo()
    }

    fn finished(&self) -> bool {
        false
    }

    fn serves(&self) -> bool {
        true
    }

    /// Frames go back on the pair on which they came only when all pairs are in use.
    fn is_ready(&self) -> bool {
        self.pair.is_up()
    }

    fn finish(&self) {
        self.page.state(state::DONE);
    }

    fn driver(&mut self) -> &mut dyn Interrupts {
        &mut self.pair
    }
}

fn too_long(len: usize) -> Failure {
    wrong(len as u64, "a frame has an impossible length")
}
