//! Returns each received frame with swapped addresses, until the others finish.
use crate::ping::{ask_for_pairs, uses_pairs, wrong};
use crate::platform::Platform;
use crate::report::{DiskPage, Failure, Measured};
use crate::worker::{Interrupts, Step, Worker};
use alloc::vec::Vec;
use paravane_driver::Transport;
use paravane_driver::net::Net;
use paravane_spec::builtin::state;

/// A received frame that is not sent back yet.
struct Held {
    /// As long as any frame.
    frame: Vec<u8>,
    /// 0: there is none.
    len: usize,
}

/// A mirror under way.
pub(crate) struct Mirror<T> {
    net: Net<T>,
    page: DiskPage,
    /// The answer to the question for pairs has not come yet.
    asking: bool,
    /// Of each pair.
    held: Vec<Held>,
    measured: Measured,
}

impl<T: Transport> Mirror<T> {
    /// For frames of up to `longest` bytes, on all pairs that the driver has set up.
    ///
    /// # Errors
    /// The driver refuses the question for pairs.
    pub(crate) fn new(mut net: Net<T>, longest: usize, page: DiskPage) -> Result<Self, Failure> {
        let asking = ask_for_pairs(&mut net)?;
        page.state(state::MIX);
        let held = (0..net.pairs_set_up()).map(|_| Held { frame: alloc::vec![0; longest], len: 0 }).collect();
        Ok(Self { net, page, asking, held, measured: Measured::default() })
    }

    /// Takes what came, and sends it back.
    fn echo(&mut self) -> Result<Step, Failure> {
        let mut step = Step::default();
        if !uses_pairs(&mut self.net, &mut self.asking)? {
            return Ok(step);
        }
        for (held, pair) in self.held.iter_mut().zip(0..) {
            loop {
                if held.len == 0 {
                    let Some(len) = self.net.receive(pair, &mut held.frame)? else { break };
                    let frame = held.frame.get_mut(..len).ok_or(too_long(len))?;
                    let Some((addresses, _)) = frame.split_at_mut_checked(12) else {
                        return Err(too_long(len));
                    };
                    let (to, from) = addresses.split_at_mut(6);
                    to.swap_with_slice(from);
                    held.len = len;
                }
                if !self.net.send(pair, &held.frame[..held.len])? {
                    break;
                }
                self.measured.ops += 1;
                self.measured.bytes += held.len as u64;
                step.sent += 1;
                held.len = 0;
            }
        }
        step.kicks = u64::from(self.net.kick());
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
        !self.asking
    }

    fn finish(&self) {
        self.page.state(state::DONE);
    }

    fn driver(&mut self) -> &mut dyn Interrupts {
        &mut self.net
    }
}

fn too_long(len: usize) -> Failure {
    wrong(len as u64, "a frame has an impossible length")
}
