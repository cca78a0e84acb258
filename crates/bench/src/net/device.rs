//! The devices: another program each, the one end of a socket.
use super::case::{Case, Direction};
use super::testpmd::{Side, Testpmd};
use crate::BenchError;
use crate::builds::Build;
use crate::daemon::Daemon;
use nix::unistd::Pid;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// How long a server may take to listen.
const START: Duration = Duration::from_secs(10);

/// Who is measured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Subject {
    /// `paravane serve net`.
    Paravane(Build),
    /// DPDK's vhost driver in its packet generator.
    Dpdk,
}

impl Subject {
    /// Ours first, then the other build, if one is named, then the peer.
    ///
    /// # Errors
    /// The system does not tell which program this is.
    pub(super) fn all() -> Result<Vec<Self>, BenchError> {
        Ok(Build::all()?.into_iter().map(Self::Paravane).chain([Self::Dpdk]).collect())
    }

    /// As the rows have it.
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Paravane(build) => build.name,
            Self::Dpdk => "dpdk-vhost",
        }
    }
}

/// A device that listens.
pub(super) enum Device {
    Paravane(Daemon),
    Dpdk(Box<Testpmd>),
}

impl Device {
    /// Starts it on `cpu`; it listens when this returns.
    ///
    /// # Errors
    /// It cannot be started, or does not listen.
    pub(super) fn start(
        subject: &Subject,
        case: Case,
        socket: &Path,
        cpu: Option<usize>,
    ) -> Result<Self, BenchError> {
        let name = subject.name();
        let Build { program, extra_args, .. } = match subject {
            Subject::Dpdk => {
                let mut testpmd = Testpmd::start(Side::Device, name, socket, cpu)?;
                testpmd.set(Side::Device, case)?;
                return Ok(Self::Dpdk(Box::new(testpmd)));
            }
            Subject::Paravane(build) => build,
        };
        let mut command = Command::new(program);
        // DPDK's vhost driver never sleeps; this is as near as ours comes.
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
                let reason = ended.unwrap_or_else(|| "it does not listen".to_owned());
                return Err(crate::error::broken(name, format_args!("{case}: {reason}")));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(Self::Paravane(daemon))
    }

    /// Its process.
    pub(super) fn pid(&self) -> Pid {
        match self {
            Self::Paravane(daemon) => daemon.pid(),
            Self::Dpdk(testpmd) => testpmd.pid(),
        }
    }

    /// Moves packets from now on. Ours always does.
    pub(super) fn start_traffic(&mut self) -> Result<(), BenchError> {
        match self {
            Self::Paravane(_) => Ok(()),
            Self::Dpdk(testpmd) => testpmd.start_traffic(false),
        }
    }

    /// Moves none, so that the other subject has the machine for itself. Ours sleeps when its driver does.
    pub(super) fn stop_traffic(&mut self) -> Result<(), BenchError> {
        match self {
            Self::Paravane(_) => Ok(()),
            Self::Dpdk(testpmd) => testpmd.stop_traffic(),
        }
    }
}
