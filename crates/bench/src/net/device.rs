//! The devices: one process per subject.
use super::case::{Case, Direction};
use super::testpmd::{self, Side, Testpmd};
use crate::BenchError;
use crate::builds::Build;
use crate::daemon::Daemon;
use nix::unistd::Pid;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Time limit for a server to listen.
const START: Duration = Duration::from_secs(10);

/// A subject.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Subject {
    /// `paravane serve net`.
    Paravane(Build),
    /// DPDK's vhost driver in `dpdk-testpmd`.
    Dpdk,
    /// The same in another version, which is this program.
    OtherDpdk(PathBuf),
}

impl Subject {
    /// This build, then the other one if named, then the peer in all versions.
    ///
    /// # Errors
    /// There is no program `paravane`.
    pub(super) fn all() -> Result<Vec<Self>, BenchError> {
        let peers = [Self::Dpdk].into_iter().chain(testpmd::other().map(Self::OtherDpdk));
        Ok(Build::all()?.into_iter().map(Self::Paravane).chain(peers).collect())
    }

    /// Name in results.
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Paravane(build) => build.name,
            Self::Dpdk => "dpdk-vhost",
            Self::OtherDpdk(_) => "dpdk-vhost/other",
        }
    }
}

/// A listening device.
pub(super) enum Device {
    Paravane(Daemon),
    Dpdk(Box<Testpmd>),
}

impl Device {
    /// Starts a device on `cpu` and waits until it listens.
    ///
    /// # Errors
    /// The process cannot be started, or does not listen.
    pub(super) fn start(
        subject: &Subject,
        case: Case,
        socket: &Path,
        cpu: Option<usize>,
    ) -> Result<Self, BenchError> {
        let name = subject.name();
        let peer = |program| {
            let mut testpmd = Testpmd::start(program, Side::Device, name, socket, cpu)?;
            testpmd.set(Side::Device, case)?;
            Ok(Self::Dpdk(Box::new(testpmd)))
        };
        let Build { program, extra_args, .. } = match subject {
            Subject::Dpdk => return peer(Path::new(testpmd::PROGRAM)),
            Subject::OtherDpdk(program) => return peer(program),
            Subject::Paravane(build) => build,
        };
        let mut command = Command::new(program);
        // DPDK's vhost driver never sleeps. A long polling window is the nearest setting.
        command.args(["serve", "net", "--control", "off", "--poll-us", "1000", "--socket"]).arg(socket);
        match case.direction {
            Direction::Transmit => command.arg("--sink"),
            Direction::Receive => command.args(["--source", &case.bytes.to_string()]),
            Direction::Forward => command.arg("--echo"),
        };
        command.args(extra_args);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut daemon = Daemon::start(command, name, cpu)?;
        let start = Instant::now();
        while !socket.exists() {
            let ended = daemon.ended();
            if ended.is_some() || start.elapsed() > START {
                let reason = ended.unwrap_or_else(|| "the process does not listen".to_owned());
                return Err(crate::error::broken(name, format_args!("{case}: {reason}")));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(Self::Paravane(daemon))
    }

    /// Its process identifier.
    pub(super) fn pid(&self) -> Pid {
        match self {
            Self::Paravane(daemon) => daemon.pid(),
            Self::Dpdk(testpmd) => testpmd.pid(),
        }
    }

    /// Starts to move packets. Paravane always does.
    pub(super) fn start_traffic(&mut self) -> Result<(), BenchError> {
        match self {
            Self::Paravane(_) => Ok(()),
            Self::Dpdk(testpmd) => testpmd.start_traffic(false),
        }
    }

    /// Stops moving packets, to free the CPU. Paravane sleeps when its driver does.
    pub(super) fn stop_traffic(&mut self) -> Result<(), BenchError> {
        match self {
            Self::Paravane(_) => Ok(()),
            Self::Dpdk(testpmd) => testpmd.stop_traffic(),
        }
    }
}
