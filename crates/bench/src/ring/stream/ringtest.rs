//! The programs of Linux's `tools/virtio/ringtest`, unmodified.
//!
//! `scripts/ringtest` builds them from the kernel's source package; this program does not include
//! them. A run starts a program with as many cycles as the run has operations. Its guest (the
//! driver) and host (the device) use the same CPUs and scheduling class as the streams. The time of
//! a start with a single cycle is subtracted.
//!
//! ringtest publishes each buffer. `--batch` only sets how often it kicks, and it does not kick
//! without `--sleep`. Its figures in a case with batches are therefore those without batches.
use super::case::Case;
use super::run::{PATIENCE, RunTimes};
use crate::BenchError;
use crate::error::broken;
use crate::machine::{Pinned, RealTime, ThreadPlacement};
use crate::ring::case::QUEUE_SIZE;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::resource::{Usage, UsageWho, getrusage};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Environment variable with the folder of the programs.
const ENV: &str = "PARAVANE_RINGTEST";
/// Folder where the script puts them, from the root of the repository.
const FOLDER: &str = "target/ringtest";
/// The note of a table without them.
pub(crate) const MISSING: &str = "ringtest: not found; build it with scripts/ringtest (into target/ringtest), or set PARAVANE_RINGTEST to its folder.";

/// Name in results, program, packed, in order.
const PROGRAMS: [(&str, &str, bool, bool); 4] = [
    ("ringtest/virtio_ring_0_9", "virtio_ring_0_9", false, false),
    ("ringtest/virtio_ring_poll", "virtio_ring_poll", false, false),
    ("ringtest/virtio_ring_inorder", "virtio_ring_inorder", false, true),
    ("ringtest/ring", "ring", true, false),
];

/// One program for one case.
#[derive(Debug)]
pub(crate) struct Program {
    name: &'static str,
    path: PathBuf,
    outstanding: u16,
    cpus: [usize; 2],
}

/// Whether the subject is one of ringtest's programs.
pub(crate) fn is_program(subject: &str) -> bool {
    PROGRAMS.iter().any(|(name, ..)| *name == subject)
}

/// The programs for `case` that have been built.
pub(crate) fn programs(case: Case, cpus: [usize; 2]) -> Vec<Program> {
    let folder = std::env::var_os(ENV).map_or_else(|| PathBuf::from(FOLDER), PathBuf::from);
    programs_in(&folder, case, cpus)
}

fn programs_in(folder: &Path, case: Case, cpus: [usize; 2]) -> Vec<Program> {
    PROGRAMS
        .iter()
        .filter(|(_, _, packed, in_order)| (*packed, *in_order) == (case.packed, case.in_order))
        .map(|&(name, program, ..)| Program {
            name,
            path: folder.join(program),
            outstanding: case.outstanding(),
            cpus,
        })
        .filter(|program| program.path.is_file())
        .collect()
}

impl Program {
    /// Name in results.
    pub(crate) fn name(&self) -> &'static str {
        self.name
    }

    /// Runs the program for `total` operations.
    ///
    /// # Errors
    /// The program does not start, fails, or takes too long.
    pub(crate) fn run_once(&self, placement: &ThreadPlacement, total: u64) -> Result<RunTimes, BenchError> {
        let empty = self.run(placement, 1)?;
        let full = self.run(placement, total)?;
        Ok(RunTimes { time: full.0.saturating_sub(empty.0), cpu: full.1.saturating_sub(empty.1), spins: 0 })
    }

    /// Wall time and CPU time of one start with `cycles`.
    fn run(&self, placement: &ThreadPlacement, cycles: u64) -> Result<(Duration, Duration), BenchError> {
        let failed = |what: &str, error: std::io::Error| broken(self.name, format_args!("{what}: {error}"));
        let cpu_before = children()?;
        // The program inherits CPUs and class from this thread. On one CPU, its first thread would
        // spin in real time, and never make the second one.
        let _cpus = Pinned::among(&self.cpus).ok_or_else(|| broken(self.name, "the system refused a CPU"))?;
        let real_time = if placement.real_time { RealTime::enter() } else { None };
        let start = Instant::now();
        let mut child = Command::new(&self.path)
            .arg("--guest-affinity")
            .arg(self.cpus[0].to_string())
            .arg("--host-affinity")
            .arg(self.cpus[1].to_string())
            .arg("--ring-size")
            .arg(QUEUE_SIZE.to_string())
            .arg("--run-cycles")
            .arg(cycles.to_string())
            .arg("--outstanding")
            .arg(self.outstanding.to_string())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .map_err(|error| failed("cannot start", error))?;
        if let Some(real_time) = &real_time {
            real_time.raise();
        }
        // The program prints nothing. Its end closes the pipe; waiting for that has a time limit.
        let ended = child.stdout.as_ref().is_none_or(|pipe| {
            let mut pipe = [PollFd::new(pipe.as_fd(), PollFlags::POLLIN)];
            let limit = PollTimeout::try_from(PATIENCE).unwrap_or(PollTimeout::MAX);
            matches!(poll(&mut pipe, limit), Ok(1..))
        });
        if !ended {
            // Fails if the program has ended since.
            let _ = child.kill();
        }
        let status = child.wait().map_err(|error| failed("cannot wait for it", error))?;
        let time = start.elapsed();
        drop(real_time);
        if !ended {
            return Err(broken(self.name, "still running after 10 s"));
        }
        if !status.success() {
            return Err(broken(self.name, status));
        }
        Ok((time, children()?.saturating_sub(cpu_before)))
    }
}

/// CPU time of the child processes that have ended.
fn children() -> Result<Duration, BenchError> {
    let usage: Usage = getrusage(UsageWho::RUSAGE_CHILDREN).map_err(|error| BenchError::Os {
        what: "read the CPU time of child processes",
        source: error.into(),
    })?;
    let micros = |time: nix::sys::time::TimeVal| {
        Duration::from_secs(time.tv_sec().cast_unsigned())
            + Duration::from_micros(time.tv_usec().cast_unsigned())
    };
    Ok(micros(usage.user_time()) + micros(usage.system_time()))
}

#[cfg(test)]
mod tests {
    use super::super::Flow;
    use super::*;

    #[test]
    fn programs_are_those_of_the_layout() {
        let names = |case: Case| {
            let programs = PROGRAMS
                .iter()
                .filter(|(_, _, packed, order)| (*packed, *order) == (case.packed, case.in_order));
            programs.map(|(name, ..)| *name).collect::<Vec<_>>()
        };
        let case = Case { packed: false, in_order: false, flow: Flow::RoundTrip };
        assert_eq!(names(case), ["ringtest/virtio_ring_0_9", "ringtest/virtio_ring_poll"]);
        assert_eq!(names(Case { packed: true, ..case }), ["ringtest/ring"]);
        assert!(names(case).iter().all(|name| is_program(name)) && !is_program(crate::subject::PARAVANE));
    }

    /// A folder without programs gives no subject; a failing program is an error.
    #[test]
    fn what_is_not_ringtest_is_not_measured() {
        let case = Case { packed: true, in_order: false, flow: Flow::RoundTrip };
        assert!(programs_in(Path::new("/nonexistent"), case, [0, 0]).is_empty());
        let program = Program { name: "false", path: "/bin/false".into(), outstanding: 1, cpus: [0, 0] };
        let placement = ThreadPlacement { cpus: Some([0, 0]), real_time: false };
        assert!(matches!(program.run_once(&placement, 1), Err(BenchError::Subject { subject: "false", .. })));
    }
}
