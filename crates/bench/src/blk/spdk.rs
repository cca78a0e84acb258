//! Another server: SPDK's `vhost` with a malloc bdev, the disk of which is in its own memory.
//!
//! ```text
//!   start [stderr: log] -> RPC: bdev_malloc_create, vhost_create_blk_controller -> paused
//!   sample: resume -> client ... relay ... vhost-user socket of SPDK -> pause
//! ```
//! Its reactor polls one CPU without end, which the other servers need between its samples: the
//! process is stopped then. The first client writes the image.
//!
//! The clients insist on memory slots, which DPDK's library lacks: see [`relay`].
use crate::error::broken;
use crate::{BenchError, machine};
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::Signal;
pub(super) use relay::Relay;
use std::fs::File;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

mod relay;
mod rpc;

/// Name in results.
pub(crate) const NAME: &str = "spdk-vhost";
/// Environment variable with the program.
pub(crate) const PROGRAM: &str = "PARAVANE_SPDK_VHOST";
/// Memory of the process in MiB: the disk, and pools of messages.
const MEMORY: u64 = 512;
/// Where the kernel counts its huge pages.
const FREE: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages";
/// Time limit for the process to accept commands.
const START: Duration = Duration::from_secs(30);
/// Bytes of a sector of the malloc bdev.
const SECTOR: u64 = 512;

/// The program, or why it cannot be measured.
pub(super) fn program() -> Result<PathBuf, String> {
    let path = std::env::var_os(PROGRAM).ok_or_else(|| format!("{PROGRAM} is not set"))?;
    let path = PathBuf::from(path);
    if !path.is_file() {
        return Err(format!("{PROGRAM}: {} is not a file", path.display()));
    }
    if machine::two_cpus().0.is_none() {
        return Err("it polls a CPU without end; need two CPUs".into());
    }
    let pages = MEMORY / 2;
    let free = std::fs::read_to_string(FREE).ok().and_then(|text| text.trim().parse::<u64>().ok());
    if free.unwrap_or(0) < pages {
        return Err(format!(
            "{} huge pages of 2 MiB are free; need {pages}: echo {} > /proc/sys/vm/nr_hugepages",
            free.unwrap_or(0),
            2 * pages
        ));
    }
    let mounts = std::fs::read_to_string("/proc/mounts").unwrap_or_default();
    if !mounts.lines().any(|line| line.split(' ').nth(2) == Some("hugetlbfs")) {
        return Err("no hugetlbfs is mounted: mount -t hugetlbfs none /dev/hugepages".into());
    }
    Ok(path)
}

/// The note if it was not measured.
pub(crate) fn missing() -> String {
    let reason = program().err().map_or_else(String::new, |reason| format!(": {reason}"));
    format!("{NAME} (tmpfs/...) is missing{reason}. docs/bench.md says how to build SPDK's vhost.")
}

/// The sockets of a process, and the log of its errors.
struct Paths {
    rpc: PathBuf,
    log: PathBuf,
}

impl Paths {
    fn beside(socket: &Path) -> Self {
        Self { rpc: socket.with_extension("rpc"), log: socket.with_extension("log") }
    }
}

/// Name of its vhost-user socket, in the folder of `socket`.
const CONTROLLER: &str = "spdk-controller";

/// The command that starts it on `cpu`, to be reached at `socket`.
///
/// # Errors
/// The log cannot be made.
pub(super) fn command(program: &Path, socket: &Path, cpu: usize) -> io::Result<Command> {
    let paths = Paths::beside(socket);
    let folder = socket.parent().ok_or(io::ErrorKind::InvalidInput)?;
    let mut command = Command::new(program);
    command.arg("--cpumask").arg(format!("[{cpu}]"));
    command.args(["--disable-cpumask-locks", "--no-pci", "--huge-unlink", "--silence-noticelog"]);
    command.args(["--num-trace-entries", "0", "--mem-size"]).arg(MEMORY.to_string());
    command.arg("-S").arg(folder).arg("--rpc-socket").arg(&paths.rpc);
    command.stderr(File::create(&paths.log)?);
    // If the benchmark is killed, its reactor must not poll that CPU for ever.
    // SAFETY: a system call, which is all that the new process does here.
    unsafe { command.pre_exec(|| Ok(set_pdeathsig(Signal::SIGKILL)?)) };
    Ok(command)
}

/// Gives a started process a disk of `bytes` and makes it reachable at `socket`.
///
/// `alive` returns its exit status if it has ended.
///
/// # Errors
/// It cannot be configured; the error has the last line of its log.
pub(super) fn configure(
    socket: &Path,
    cpu: usize,
    bytes: u64,
    mut alive: impl FnMut() -> Option<String>,
) -> Result<Relay, BenchError> {
    let paths = Paths::beside(socket);
    let controller = socket.with_file_name(CONTROLLER);
    let make = || -> Result<Relay, String> {
        let start = Instant::now();
        let mut connection = loop {
            match rpc::Connection::new(&paths.rpc) {
                Ok(connection) => break connection,
                Err(error) => {
                    if let Some(ended) = alive() {
                        return Err(ended);
                    }
                    if start.elapsed() > START {
                        return Err(format!("no RPC socket after {START:?}: {error}"));
                    }
                    std::thread::sleep(Duration::from_millis(10));
                }
            }
        };
        let disk = serde_json::json!({"name": "disk", "block_size": SECTOR, "num_blocks": bytes / SECTOR});
        connection.call("bdev_malloc_create", &disk)?;
        // A client that does not ask for packed rings gets split ones.
        let controller_of = serde_json::json!({
            "ctrlr": CONTROLLER, "dev_name": "disk", "cpumask": format!("[{cpu}]"), "packed_ring": true
        });
        connection.call("vhost_create_blk_controller", &controller_of)?;
        Relay::start(socket, controller).map_err(|error| format!("{}: {error}", socket.display()))
    };
    make().map_err(|reason| {
        let log = std::fs::read_to_string(&paths.log).unwrap_or_default();
        match log.lines().rev().find(|line| !line.trim().is_empty()) {
            Some(last) => broken(NAME, format_args!("{reason}; its last line: {last}")),
            None => broken(NAME, reason),
        }
    })
}
