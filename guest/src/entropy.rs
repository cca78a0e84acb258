//! Draws bytes from an entropy source and checks that they can be random.
use crate::platform::Platform;
use crate::report::{DiskPage, Failure};
use crate::worker::{Interrupts, Step, Worker};
use paravane_driver::Transport;
use paravane_driver::rng::Rng;
use paravane_spec::builtin::{error, state};

/// Bytes a request.
pub(crate) const BUFFER: usize = 1024;
/// Most answers of 0 bytes in a row.
const EMPTY_ANSWERS: u32 = 16;
/// Equal bytes in one answer that are no accident (one in 2^120).
const EQUAL_BYTES: usize = 16;

/// A draw under way.
pub(crate) struct Draw<T> {
    rng: Rng<T>,
    page: DiskPage,
    total: u64,
    drawn: u64,
    asked: bool,
    empty: u32,
}

impl<T: Transport> Draw<T> {
    /// Draws `total` bytes.
    pub(crate) fn new(rng: Rng<T>, total: u64, page: DiskPage) -> Self {
        page.moved(0, total);
        let draw = Self { rng, page, total, drawn: 0, asked: false, empty: 0 };
        if draw.is_done() {
            page.state(state::DONE);
        }
        draw
    }

    fn is_done(&self) -> bool {
        self.drawn >= self.total
    }

    /// Takes an answer and asks for more.
    fn draw(&mut self) -> Result<Step, Failure> {
        let mut step = Step::default();
        let mut bytes = [0; BUFFER];
        if let Some(len) = self.rng.poll(&mut bytes)? {
            step.completed = 1;
            step.entropy_bytes = len as u64;
            self.asked = false;
            self.judge(&bytes[..len])?;
            self.drawn += len as u64;
            self.page.moved(self.drawn, self.total);
            if self.is_done() {
                self.page.state(state::DONE);
            }
        }
        if !self.asked && !self.is_done() {
            let len = (self.total - self.drawn).min(BUFFER as u64) as usize;
            step.kicks += u64::from(self.rng.request(len)?);
            step.sent = 1;
            self.asked = true;
        }
        Ok(step)
    }

    fn judge(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        self.empty = if bytes.is_empty() { self.empty + 1 } else { 0 };
        if self.empty >= EMPTY_ANSWERS {
            return Err(Failure {
                error: error::IO,
                detail: u64::from(self.empty),
                sector: 0,
                reason: "the entropy source returns no bytes",
            });
        }
        if !is_plausible(bytes) {
            return Err(Failure {
                error: error::MISMATCH,
                detail: u64::from(bytes[0]),
                sector: 0,
                reason: "the entropy source repeats one byte",
            });
        }
        Ok(())
    }
}

impl<P: Platform, T: Transport> Worker<P> for Draw<T> {
    fn step(&mut self, _platform: &P, _ready: bool) -> Result<Step, Failure> {
        self.draw()
    }

    fn finished(&self) -> bool {
        self.is_done()
    }

    fn driver(&mut self) -> &mut dyn Interrupts {
        &mut self.rng
    }
}

/// Whether bytes can have come from a random source.
fn is_plausible(bytes: &[u8]) -> bool {
    bytes.len() < EQUAL_BYTES || bytes.iter().any(|&byte| byte != bytes[0])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_that_are_all_equal_are_not_plausible_unless_they_are_few() {
        assert!(!is_plausible(&[0; 1024]));
        assert!(!is_plausible(&[0xaa; EQUAL_BYTES]));
        assert!(is_plausible(&[0; EQUAL_BYTES - 1]));
        assert!(is_plausible(&[]));
        let mut bytes = [7; 64];
        bytes[63] = 8;
        assert!(is_plausible(&bytes));
    }
}
