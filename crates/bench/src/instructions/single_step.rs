//! Exact counts by single steps of a child process (`PTRACE_SINGLESTEP`).
//!
//! ```text
//! parent                                   child: the same program, in `child_main`
//! spawn, STEP_ENV names the subject ---->  makes the subject, warms it up
//! wait                              <----  traceme, SIGSTOP             (mark 0)
//! step, not counted                        get ready
//! step, step, step ...              <----  SIGSTOP                      (mark 1)
//!                                          run a few batches or none
//! steps to mark 2                   <----  SIGSTOP                      (mark 2)
//! step, not counted                        get ready
//! step, step, step ...              <----  SIGSTOP                      (mark 3)
//!                                          run more batches
//! steps to mark 4                   <----  SIGSTOP                      (mark 4)
//! kill
//! ```
//!
//! The difference is the cost of the additional batches; the steps between the marks cancel out.
//! The result is the number of instructions retired in user mode. An instruction with a REP prefix
//! takes a step per repetition. The count repeats exactly if the program takes the same path.
use nix::sys::ptrace;
use nix::sys::signal::Signal;
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::Pid;
use std::io;
use std::process::{Child, Command, Stdio};

/// Environment variable: the child's job, as case, subject, batches per mark.
pub(crate) const STEP_ENV: &str = "PARAVANE_BENCH_STEP";
/// An argument that `paravane` rejects.
///
/// A program that does not call `child_main` exits at once.
const GUARD: &str = "bench-single-step";
/// Case, batch and subject that show whether stepping works.
///
/// It is the script, which every build has.
pub(crate) const PROBE: (&str, u16, &str) = ("split/device/1desc/batch1", 1, "script");
/// Fewest chains whose steps are counted. A step costs microseconds.
const CHAINS: u16 = 8;
/// Most steps between two marks; a child that takes more is killed.
const MOST_STEPS: u64 = 20_000_000;

/// Steps between two marks.
#[derive(Clone, Copy, Debug, Default)]
struct Steps {
    /// Steps taken.
    taken: u64,
    /// Of these, repetitions of an instruction.
    repeated: u64,
    /// Of these, readings of the cycle counter.
    clock_reads: u64,
}

/// Counts per operation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Counts {
    /// Instructions; one with a REP prefix is one.
    pub(crate) instructions: f64,
    /// Readings of the cycle counter, also by way of the vDSO.
    pub(crate) clock_reads: f64,
}

/// The stepped child; killed when dropped.
struct Tracee(Child);

impl Tracee {
    fn spawn(case: &str, subject: &str, marks: [u16; 2]) -> io::Result<Self> {
        Command::new(std::env::current_exe()?)
            .arg(GUARD)
            .env(STEP_ENV, format!("{case} {subject} {} {}", marks[0], marks[1]))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .map(Self)
    }

    fn pid(&self) -> Pid {
        Pid::from_raw(self.0.id().cast_signed())
    }

    /// Waits for the first mark, where tracing starts.
    fn first_mark(&self) -> io::Result<()> {
        match waitpid(self.pid(), None)? {
            WaitStatus::Stopped(_, Signal::SIGSTOP) => {}
            other => return Err(unexpected(other)),
        }
        Ok(ptrace::setoptions(self.pid(), ptrace::Options::PTRACE_O_EXITKILL)?)
    }

    /// Where the next instruction is, and whether it reads the cycle counter.
    #[cfg(target_arch = "x86_64")]
    fn instruction(&self) -> io::Result<(u64, bool)> {
        let place = ptrace::getregs(self.pid())?.rip;
        let bytes = ptrace::read(self.pid(), std::ptr::without_provenance_mut(place as usize))?.to_le_bytes();
        // RDTSC, RDTSCP.
        Ok((place, bytes.starts_with(&[0x0f, 0x31]) || bytes.starts_with(&[0x0f, 0x01, 0xf9])))
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn instruction(&self) -> io::Result<(u64, bool)> {
        Err(io::Error::other("readings of the clock are counted on x86-64 only"))
    }

    /// Counts the steps to the next mark.
    ///
    /// With `clock`, also the readings of the clock; a repetition is then no step.
    fn next_mark(&self, clock: bool) -> io::Result<Steps> {
        let mut deliver = None;
        let mut steps = Steps::default();
        let mut last = 0;
        for _ in 0..MOST_STEPS {
            if clock {
                let (place, reads) = self.instruction()?;
                steps.clock_reads += u64::from(reads);
                steps.repeated += u64::from(place == last);
                last = place;
            }
            ptrace::step(self.pid(), deliver)?;
            deliver = match waitpid(self.pid(), None)? {
                WaitStatus::Stopped(_, Signal::SIGTRAP) => None,
                WaitStatus::Stopped(_, Signal::SIGSTOP) => return Ok(steps),
                WaitStatus::Stopped(_, other) => Some(other),
                other => return Err(unexpected(other)),
            };
            steps.taken += 1;
        }
        Err(io::Error::other("the child process took too many steps"))
    }
}

impl Drop for Tracee {
    fn drop(&mut self) {
        // Both fail only if the child has ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn unexpected(status: WaitStatus) -> io::Error {
    io::Error::other(format!("the stepped child process did not stop at its mark: {status:?}"))
}

/// Counts instructions per chain of `subject`, script and loop included.
pub(crate) fn per_chain(case: &str, batch: u16, subject: &str) -> io::Result<f64> {
    let (steps, chains) = count((case, batch, subject), false)?;
    Ok(steps.taken as f64 / chains)
}

/// Counts instructions and readings of the clock per request of `subject`, script and loop included.
pub(crate) fn counts(case: &str, batch: u16, subject: &str) -> io::Result<Counts> {
    let (steps, requests) = count((case, batch, subject), true)?;
    Ok(Counts {
        instructions: steps.taken.saturating_sub(steps.repeated) as f64 / requests,
        clock_reads: steps.clock_reads as f64 / requests,
    })
}

/// Counts the steps of several batches; returns them and the number of chains.
fn count((case, batch, subject): (&str, u16, &str), clock: bool) -> io::Result<(Steps, f64)> {
    let batches = CHAINS.div_ceil(batch);
    // A first batch absorbs the cost of entering the loop. In a long batch that cost is negligible,
    // and another long batch would take long; but readings of the clock are few.
    let first = u16::from(batches > 1 || clock);
    let tracee = Tracee::spawn(case, subject, [first, first + batches])?;
    tracee.first_mark()?;
    tracee.next_mark(false)?;
    let before = tracee.next_mark(clock)?;
    tracee.next_mark(false)?;
    let after = tracee.next_mark(clock)?;
    let less = |of: fn(&Steps) -> u64| {
        of(&after).checked_sub(of(&before)).ok_or_else(|| io::Error::other("more batches took fewer steps"))
    };
    let steps = Steps {
        taken: less(|steps| steps.taken)?,
        repeated: less(|steps| steps.repeated)?,
        clock_reads: less(|steps| steps.clock_reads)?,
    };
    Ok((steps, f64::from(batches * batch)))
}

/// Checks that this program can be stepped.
pub(crate) fn probe() -> io::Result<()> {
    let (case, batch, subject) = PROBE;
    per_chain(case, batch, subject).map(|_| ())
}
