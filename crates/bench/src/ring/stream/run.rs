//! One run of both threads, and how they wait for each other.
use super::case::Case;
use crate::BenchError;
use crate::clock::thread_clock;
use crate::error::broken;
use crate::machine::{Pinned, RealTime, ThreadPlacement};
use crate::subject::PARAVANE;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Longest time of a run.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);
/// The error of a side whose other side has ended.
const ENDED: &str = "the other side ended early";
/// Spins between two checks of the clock and of the other thread.
const SPINS_A_LOOK: u32 = 1 << 12;

/// The driver of a stream, on a separate thread.
///
/// One call covers a run, so that the loop is compiled for the queue.
pub(crate) trait DriverEnd: Send {
    /// Moves `total` buffers; returns how often it found none used and waited.
    ///
    /// # Errors
    /// The queue failed, or the device does not answer.
    fn drive(&mut self, total: u64, case: Case, wait: Wait<'_>) -> Result<u64, BenchError>;
}

/// The device of a stream.
pub(crate) trait DeviceEnd: Send {
    /// Serves `total` buffers.
    ///
    /// # Errors
    /// The queue failed, or the driver does not answer.
    fn serve(&mut self, total: u64, wait: Wait<'_>) -> Result<(), BenchError>;
}

/// The two ends of a queue, and its memory.
pub(crate) struct Pair {
    driver: Box<dyn DriverEnd>,
    device: Box<dyn DeviceEnd>,
    _memory: Box<dyn Send>,
}

impl Pair {
    /// Joins two ends. Keeps `memory` until both are dropped.
    pub(crate) fn new(
        driver: impl DriverEnd + 'static,
        device: impl DeviceEnd + 'static,
        memory: impl Send + 'static,
    ) -> Box<Self> {
        Box::new(Self { driver: Box::new(driver), device: Box::new(device), _memory: Box::new(memory) })
    }

    /// See [`run_once`].
    pub(crate) fn run_once(
        &mut self,
        case: Case,
        placement: &ThreadPlacement,
        total: u64,
    ) -> Result<RunTimes, BenchError> {
        run_once(&mut *self.driver, &mut *self.device, case, placement, total)
    }
}

/// The figures of one run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RunTimes {
    /// Wall time.
    pub(crate) time: Duration,
    /// CPU time of both sides.
    pub(crate) cpu: Duration,
    /// How often the driver found nothing used and waited.
    pub(crate) spins: u64,
}

/// Streams `total` buffers from `driver` to `device` and back.
///
/// # Errors
/// A side failed, the run took too long, or the system refused a CPU.
pub(crate) fn run_once(
    driver: &mut dyn DriverEnd,
    device: &mut dyn DeviceEnd,
    case: Case,
    placement: &ThreadPlacement,
    total: u64,
) -> Result<RunTimes, BenchError> {
    let start = Barrier::new(2);
    let over = AtomicBool::new(false);
    let wait = Wait { yields: placement.cpus.is_none(), over: &over };
    let side = |index: usize| -> Result<(Option<Pinned>, Option<RealTime>), BenchError> {
        let pinned = match placement.cpus {
            Some(cpus) => {
                Some(Pinned::to(cpus[index]).ok_or_else(|| broken(PARAVANE, "the system refused a CPU"))?)
            }
            None => None,
        };
        Ok((pinned, if placement.real_time { RealTime::enter() } else { None }))
    };
    let (served, driven) = std::thread::scope(|scope| {
        let device = scope.spawn(|| {
            let ready = side(1);
            start.wait();
            let _stop = Stop(&over);
            let _held = ready?;
            let cpu = thread_clock()?;
            device.serve(total, wait)?;
            Ok::<_, BenchError>(thread_clock()?.saturating_sub(cpu))
        });
        let driver = scope.spawn(|| {
            let ready = side(0);
            start.wait();
            let _stop = Stop(&over);
            let _held = ready?;
            let cpu = thread_clock()?;
            let began = Instant::now();
            let spins = driver.drive(total, case, wait)?;
            let time = began.elapsed();
            Ok::<_, BenchError>((time, thread_clock()?.saturating_sub(cpu), spins))
        });
        (join(device.join()), join(driver.join()))
    });
    let ((time, cpu, spins), device_cpu) = match (driven, served) {
        (Ok(driven), Ok(served)) => (driven, served),
        // Report the cause, not that the other side has ended.
        (Err(error), Err(other)) => {
            let merely = matches!(&error, BenchError::Subject { reason, .. } if reason == ENDED);
            return Err(if merely { other } else { error });
        }
        (Err(error), _) | (_, Err(error)) => return Err(error),
    };
    Ok(RunTimes { time, cpu: cpu + device_cpu, spins })
}

/// The result of a side; an error if it panicked.
fn join<T>(result: std::thread::Result<Result<T, BenchError>>) -> Result<T, BenchError> {
    result.unwrap_or_else(|_| Err(broken(PARAVANE, "a side panicked")))
}

/// Tells the other side, when dropped, that this side has ended.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        // Relaxed: nothing else is read because of it.
        self.0.store(true, Ordering::Relaxed);
    }
}

/// How a side waits for the other.
#[derive(Clone, Copy)]
pub(crate) struct Wait<'a> {
    yields: bool,
    over: &'a AtomicBool,
}

impl Wait<'_> {
    /// Waits until `ready` returns true; returns how often it returned false.
    ///
    /// # Errors
    /// `ready` failed, the wait took too long, or the other side has ended.
    #[inline(always)]
    pub(crate) fn until(
        self,
        mut ready: impl FnMut() -> Result<bool, BenchError>,
    ) -> Result<u64, BenchError> {
        let mut spins = 0u64;
        let mut looked: Option<Instant> = None;
        loop {
            // Read first: the `ready` that follows sees all that the other side did before it
            // ended.
            let due = spins % u64::from(SPINS_A_LOOK) == u64::from(SPINS_A_LOOK) - 1;
            let over = due && self.over.load(Ordering::Acquire);
            if ready()? {
                return Ok(spins);
            }
            spins += 1;
            if due {
                if over {
                    return Err(broken(PARAVANE, ENDED));
                }
                if looked.get_or_insert_with(Instant::now).elapsed() > PATIENCE {
                    return Err(broken(PARAVANE, "the other side does not answer"));
                }
            }
            if self.yields {
                std::thread::yield_now();
            } else {
                std::hint::spin_loop();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_side_that_fails_ends_the_other() {
        struct Fails;
        impl DeviceEnd for Fails {
            fn serve(&mut self, _total: u64, _wait: Wait<'_>) -> Result<(), BenchError> {
                Err(broken("nobody", "fails"))
            }
        }
        struct Waits;
        impl DriverEnd for Waits {
            fn drive(&mut self, _total: u64, _case: Case, wait: Wait<'_>) -> Result<u64, BenchError> {
                wait.until(|| Ok(false))
            }
        }
        let placement = ThreadPlacement { cpus: None, real_time: false };
        let error = run_once(&mut Waits, &mut Fails, Case::all()[0], &placement, 1).unwrap_err();
        assert!(matches!(error, BenchError::Subject { subject: "nobody", .. }), "{error}");
    }
}
