//! Another client: libblkio's `blkio-bench`, a process of its own.
use super::case::{Case, Work};
use crate::figures::Figure;
use crate::meter::CpuClock;
use nix::unistd::Pid;
use serde::Deserialize;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Environment variable with the program.
const PROGRAM: &str = "PARAVANE_BLKIO_BENCH";
/// Where `scripts/blkio-bench` builds it.
const BUILT: &str = "target/blkio/blkio-bench";
/// The note if its cases are missing.
pub(crate) const MISSING: &str = "blkio-bench: not found, the cases blkio/... are missing; build it with scripts/blkio-bench (into target/blkio), or set PARAVANE_BLKIO_BENCH.";

/// Its output, as far as it is read.
#[derive(Deserialize)]
struct Output {
    aggregate: Aggregate,
}

#[derive(Deserialize)]
struct Aggregate {
    kiops: f64,
    mean_lat_us: f64,
}

/// The program, if it is there.
pub(super) fn program() -> Option<PathBuf> {
    let path = std::env::var_os(PROGRAM).map_or_else(|| BUILT.into(), PathBuf::from);
    path.is_file().then_some(path)
}

/// Takes a sample of a second.
///
/// CPU time includes that of the connection, some milliseconds.
///
/// # Errors
/// Why there are no figures, in one line.
pub(super) fn sample(
    server: Pid,
    socket: &Path,
    case: Case,
    client: crate::Client,
    real_time: bool,
) -> Result<Vec<(Figure, f64)>, String> {
    let program = program().ok_or("blkio-bench is gone")?;
    let mut command = Command::new(program);
    command.arg(format!("--iodepth={}", case.depth)).arg(format!("--blocksize={}", case.work.bytes));
    command.arg(format!("--readwrite={}", readwrite(case.work))).arg("--runtime=1");
    command.args((client == crate::Client::Poll).then_some("--poll"));
    command.arg("virtio-blk-vhost-user").arg(format!("path={}", socket.display()));
    let clock = CpuClock::of(server).map_err(|error| error.to_string())?;
    let before = clock.read().map_err(|error| error.to_string())?;
    // It inherits the CPU and the class of this thread.
    let output = command.stdin(Stdio::null()).output().map_err(|error| error.to_string())?;
    let cpu = clock.read().map_err(|error| error.to_string())? - before;
    if !output.status.success() {
        return Err(format!("blkio-bench: {}", String::from_utf8_lossy(&output.stderr).trim()));
    }
    let found: Output =
        serde_json::from_slice(&output.stdout).map_err(|error| format!("blkio-bench: {error}"))?;
    let rate = found.aggregate.kiops * 1e3;
    if rate <= 0.0 {
        return Err("no request completed".into());
    }
    let class = if real_time { ", SCHED_FIFO" } else { "" };
    let by = |method: &str| format!("{method}, {} client{class}", client.name());
    Ok(vec![
        (Figure::new("rate", "requests/s", by("clock")), rate),
        (Figure::new("latency-mean", "us", by("clock")), found.aggregate.mean_lat_us),
        // The run takes a second.
        (Figure::new("cpu", "us/request", by("process clock")), cpu.as_secs_f64() * 1e6 / rate),
    ])
}

fn readwrite(work: Work) -> &'static str {
    match (work.sequential, work.write) {
        (true, false) => "read",
        (true, true) => "write",
        (false, false) => "randread",
        (false, true) => "randwrite",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn its_output_is_read() {
        let text = r#"{"aggregate": {"kiops": 28.5, "gips": 0.1, "mean_lat_us": 34.25}, "threads": []}"#;
        let output: Output = serde_json::from_str(text).unwrap();
        assert_eq!((output.aggregate.kiops, output.aggregate.mean_lat_us), (28.5, 34.25));
        assert_eq!(readwrite(Work { write: true, sequential: false, bytes: 4096 }), "randwrite");
    }
}
