//! Runs a queue with a peer that rewrites shared memory at the same time.
//!
//! `cargo run --release -p paravane-fuzz --bin hostile-peer -- --seconds 3600`
use paravane_fuzz::hostile_peer::{Options, Side, run};
use rustix::time::{ClockId, clock_gettime};
use std::process::ExitCode;
use std::time::Duration;

const USAGE: &str =
    "usage: hostile-peer [--seconds N] [--side device|driver] [--layout split|packed] [--seed N]";

fn options() -> Option<Options> {
    let mut options =
        Options { time: Duration::from_secs(10), writes: None, side: None, packed: None, seed: 1 };
    let mut args = std::env::args().skip(1);
    while let Some(name) = args.next() {
        let value = args.next()?;
        match (name.as_str(), value.as_str()) {
            ("--seconds", value) => options.time = Duration::from_secs(value.parse().ok()?),
            ("--seed", value) => options.seed = value.parse().ok()?,
            ("--side", "device") => options.side = Some(Side::Device),
            ("--side", "driver") => options.side = Some(Side::Driver),
            ("--layout", "split") => options.packed = Some(false),
            ("--layout", "packed") => options.packed = Some(true),
            _ => return None,
        }
    }
    Some(options)
}

fn main() -> ExitCode {
    let Some(options) = options() else {
        eprintln!("{USAGE}");
        return ExitCode::from(2);
    };
    match run(options) {
        Ok(report) => {
            let cpu = clock_gettime(ClockId::ProcessCPUTime);
            println!("{report}{:>12}  seconds of CPU, no finding", cpu.tv_sec);
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("hostile-peer: {error}");
            ExitCode::FAILURE
        }
    }
}
