//! Watches a run: progress, cancelling, and hangs.
//!
//! ```text
//!             Ended arrives
//!  watching ------------------------------------------> Verdict
//!     |  cancel asked for, or heartbeat stands still       ^
//!     v                                                    |
//!  stopping --- Ended arrives, or it cannot be stopped ----+
//! ```
use crate::error::RunError;
use crate::machine::accel::{Ended, Running, lost, stop};
use crate::machine::{Machine, PERIOD};
use crate::report::GuestFailure;
use crate::run::Progress;
use crate::run::report_area::ReportArea;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

/// End of the guest's part of a run.
#[derive(Debug)]
pub(crate) enum Verdict {
    /// By itself, with this exit code and these registers.
    Exit(u32, Vec<String>),
    /// It crashed or hung.
    Failed(GuestFailure),
    /// The operator stopped it.
    Cancelled,
}

/// What is looked at while the guest runs.
pub(crate) struct Watch<'a> {
    pub(crate) machine: &'a Machine,
    pub(crate) area: &'a ReportArea,
    pub(crate) progress: &'a Progress,
    pub(crate) hang_timeout: Duration,
}

impl Watch<'_> {
    /// Waits for the guest's end.
    ///
    /// # Errors
    /// The host failed under it.
    pub(crate) fn watch(
        &self,
        running: Box<dyn Running>,
        ended: &Receiver<Ended>,
    ) -> Result<Verdict, RunError> {
        let mut heartbeat = 0;
        let mut alive = Instant::now();
        loop {
            match ended.recv_timeout(PERIOD) {
                Ok(end) => {
                    running.join();
                    self.area.show(self.progress);
                    return verdict(end, GuestFailure { reason: String::new(), registers: Vec::new() });
                }
                Err(RecvTimeoutError::Disconnected) => return Err(lost()),
                Err(RecvTimeoutError::Timeout) => {}
            }
            self.machine.rebalance();
            let beat = self.area.show(self.progress);
            if beat != heartbeat {
                heartbeat = beat;
                alive = Instant::now();
            }
            // Relaxed: a request that is seen one period later is as good.
            if self.progress.cancel.load(Ordering::Relaxed) {
                return match stop(running, ended)? {
                    Some(Ended::Host(error)) => Err(error),
                    _ => Ok(Verdict::Cancelled),
                };
            }
            if alive.elapsed() >= self.hang_timeout {
                let seconds = self.hang_timeout.as_secs_f64();
                let mut failure =
                    GuestFailure { reason: format!("no progress for {seconds} s"), registers: Vec::new() };
                return match stop(running, ended)? {
                    Some(end) => verdict(end, failure),
                    None => {
                        failure.reason += "; its thread cannot be stopped and was abandoned";
                        Ok(Verdict::Failed(failure))
                    }
                };
            }
        }
    }
}

/// Judges `end`.
///
/// `stopped` is the failure if the guest ended because it was stopped.
fn verdict(end: Ended, stopped: GuestFailure) -> Result<Verdict, RunError> {
    match end {
        Ended::Exit(code, registers) => Ok(Verdict::Exit(code, registers)),
        Ended::Failed(failure) => Ok(Verdict::Failed(failure)),
        Ended::TripleFault(registers) => Ok(Verdict::Failed(GuestFailure::triple_fault(registers))),
        Ended::Power(power) => {
            let reason = format!("it asked for its power supply: {power:?}");
            Ok(Verdict::Failed(GuestFailure { reason, registers: Vec::new() }))
        }
        Ended::Stopped(registers) => Ok(Verdict::Failed(GuestFailure { registers, ..stopped })),
        Ended::Host(error) => Err(error),
    }
}
