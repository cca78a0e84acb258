//! `dpdk-testpmd`, by its command line: driver of every device, and the peer.
//!
//! ```text
//!   start -> set -> start_traffic -> counts, any number of times -> stop_traffic -> ... -> drop
//! ```
use super::case::{Case, Direction};
use crate::BenchError;
use crate::daemon::Daemon;
use crate::error::broken;
use nix::unistd::Pid;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// The program.
pub(super) const PROGRAM: &str = "dpdk-testpmd";
/// Environment variable with another version of the program.
const OTHER: &str = "PARAVANE_DPDK";
/// Where `scripts/debian-dpdk` puts one, from the root of the repository.
const OTHER_PROGRAM: &str = "target/debian-dpdk/testpmd-sid";
/// The prompt of the program.
const PROMPT: &str = "testpmd> ";
/// Time limit for an answer.
const PATIENCE: Duration = Duration::from_secs(30);
/// Descriptors of the driver's queues.
const QUEUE: &str = "256";

/// The side of the queues that the program plays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    /// DPDK's vhost driver: the peer.
    Device,
    /// DPDK's virtio-user driver: the client.
    Driver(Case),
}

/// A running `dpdk-testpmd`, stopped when dropped.
pub(super) struct Testpmd {
    subject: &'static str,
    commands: ChildStdin,
    answers: Receiver<Vec<u8>>,
    // Dropped after its pipes: the program ends when they close.
    daemon: Daemon,
}

/// Packet counts and their time.
#[derive(Clone, Copy, Debug)]
pub(super) struct Counts {
    pub(super) at: Instant,
    pub(super) received: u64,
    pub(super) transmitted: u64,
}

/// Another version of the program, if there is one.
pub(crate) fn other() -> Option<PathBuf> {
    let program = std::env::var_os(OTHER).map_or_else(|| OTHER_PROGRAM.into(), PathBuf::from);
    program.is_file().then_some(program)
}

/// Version of [`other`], which `scripts/debian-dpdk` writes beside it.
pub(crate) fn other_version() -> Option<String> {
    let text = std::fs::read_to_string(other()?.with_extension("version")).ok()?;
    text.lines().next().map(|line| line.chars().take(60).collect())
}

/// Whether the program is installed.
pub(super) fn is_there() -> bool {
    Command::new(PROGRAM).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok()
}

impl Testpmd {
    /// Starts `program` on `cpu` and waits until its port is set up.
    ///
    /// # Errors
    /// The program cannot be started, ends, or does not answer.
    pub(super) fn start(
        program: &Path,
        side: Side,
        subject: &'static str,
        socket: &Path,
        cpu: Option<usize>,
    ) -> Result<Self, BenchError> {
        let (name, device, descriptors) = match side {
            Side::Device => ("device", format!("net_vhost0,iface={},queues=1", socket.display()), "1024"),
            Side::Driver(Case { packed, mergeable, .. }) => {
                let bit = |is| u8::from(is);
                let options = format!(
                    "net_virtio_user0,path={},queues=1,packed_vq={},in_order=0,mrg_rxbuf={},queue_size={QUEUE}",
                    socket.display(),
                    bit(packed),
                    bit(mergeable)
                );
                ("driver", options, QUEUE)
            }
        };
        // One thread reads commands and sleeps otherwise, one moves packets.
        let lcores = cpu.map_or("0,1".to_owned(), |cpu| format!("0@{cpu},1@{cpu}"));
        let mut command = Command::new("stdbuf");
        command.arg("-oL").arg(program).args([
            "--lcores",
            &lcores,
            "--no-pci",
            "--no-huge",
            "-m",
            "192",
            "--log-level=3",
        ]);
        // DPDK processes with one prefix share their state.
        let pair = subject.replace('/', "-");
        command.arg(format!("--file-prefix=paravane-bench-{}-{pair}-{name}", std::process::id()));
        command.args([
            "--vdev",
            &device,
            "--",
            "-i",
            "--nb-cores=1",
            "--no-flush-rx",
            "--total-num-mbufs=8192",
        ]);
        command.args([format!("--txd={descriptors}"), format!("--rxd={descriptors}")]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut daemon = Daemon::start(command, subject, cpu)?;
        let (commands, mut output) =
            daemon.pipes().ok_or_else(|| broken(subject, "the process has no pipes"))?;
        let (sender, answers) = channel();
        std::thread::spawn(move || {
            let mut bytes = vec![0; 65536];
            while let Ok(count @ 1..) = output.read(&mut bytes) {
                if sender.send(bytes[..count].to_vec()).is_err() {
                    return;
                }
            }
        });
        let mut testpmd = Self { subject, commands, answers, daemon };
        testpmd.answer()?;
        Ok(testpmd)
    }

    /// Its process identifier.
    pub(super) fn pid(&self) -> Pid {
        self.daemon.pid()
    }

    /// Sets the forwarding mode and packet size of `case`.
    pub(super) fn set(&mut self, side: Side, case: Case) -> Result<(), BenchError> {
        let sends = matches!(
            (case.direction, side),
            (Direction::Transmit, Side::Driver(_)) | (Direction::Receive, Side::Device)
        );
        let mode = match (case.direction, sends) {
            (Direction::Forward, _) => "io",
            (_, true) => "txonly",
            (_, false) => "rxonly",
        };
        self.tell(&format!("set fwd {mode}"))?;
        self.tell(&format!("set txpkts {}", case.bytes))?;
        Ok(())
    }

    /// Starts to move packets; with `inject`, sends a first burst.
    pub(super) fn start_traffic(&mut self, inject: bool) -> Result<(), BenchError> {
        self.tell(if inject { "start tx_first 4" } else { "start" }).map(drop)
    }

    /// Stops moving packets.
    pub(super) fn stop_traffic(&mut self) -> Result<(), BenchError> {
        self.tell("stop").map(drop)
    }

    /// The counters of its port.
    pub(super) fn counts(&mut self) -> Result<Counts, BenchError> {
        let text = self.tell("show port stats 0")?;
        let at = Instant::now();
        match (number(&text, "RX-packets:"), number(&text, "TX-packets:")) {
            (Some(received), Some(transmitted)) => Ok(Counts { at, received, transmitted }),
            _ => Err(broken(self.subject, format_args!("cannot parse port statistics {text:?}"))),
        }
    }

    fn tell(&mut self, command: &str) -> Result<String, BenchError> {
        if let Err(error) = writeln!(self.commands, "{command}") {
            return Err(broken(self.subject, format_args!("{command}: {error}")));
        }
        self.answer()
    }

    /// Reads the output up to the next prompt.
    fn answer(&mut self) -> Result<String, BenchError> {
        let end = Instant::now() + PATIENCE;
        let mut text = Vec::new();
        loop {
            match self.answers.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok(more) => text.extend(more),
                Err(why) => {
                    let what = match why {
                        RecvTimeoutError::Timeout => format!("no answer for {PATIENCE:?}"),
                        RecvTimeoutError::Disconnected => {
                            self.daemon.ended().unwrap_or_else(|| "its output has ended".to_owned())
                        }
                    };
                    let said = String::from_utf8_lossy(&text).trim().to_owned();
                    return Err(broken(self.subject, format_args!("{what}; last output: {said:?}")));
                }
            }
            if text.ends_with(PROMPT.as_bytes()) {
                return Ok(String::from_utf8_lossy(&text).into_owned());
            }
        }
    }
}

/// The number that follows `name`.
fn number(text: &str, name: &str) -> Option<u64> {
    text.split_once(name)?.1.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_parsed_from_statistics() {
        let text =
            "  RX-packets: 12         RX-missed: 0          RX-bytes:  768\n  TX-packets: 34 TX-errors: 0\n";
        assert_eq!((number(text, "RX-packets:"), number(text, "TX-packets:")), (Some(12), Some(34)));
        assert_eq!(number(text, "RX-nombuf:"), None);
    }
}
