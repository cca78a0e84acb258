//! `paravane trace`: each request of a disk, as it ends.
//!
//! ```text
//!   source: ask the daemons --> the one with the device --TraceLine--> rows (text) --> stdout
//!                                                             |------> JSON lines --> stdout
//!                                                             '------> chrome: kept, written to a file at the end
//! ```
mod chrome;
mod rows;
mod source;

use crate::failure::Failure;
use crate::serve::args::TraceArgs;
use crate::serve::trace::lines::{TraceLine, TraceRequest};
use anyhow::{Context, anyhow};
use paravane_command_line::output;
use serde::Serialize;
use source::{Event, Source};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Default and maximum number of requests in a Chrome trace.
const CHROME_COUNT: u64 = 100_000;
const CHROME_MOST: u64 = 1_000_000;

/// A request as `--json` prints it.
#[derive(Serialize)]
struct Named<'a> {
    device: &'a str,
    #[serde(flatten)]
    line: &'a TraceLine,
}

/// Where requests go.
enum Sink {
    Rows,
    Json,
    /// Written at the end.
    Chrome(File, Vec<TraceLine>),
}

pub(crate) fn main(args: &TraceArgs) -> Result<ExitCode, Failure> {
    let count = count(args).map_err(Failure::request)?;
    let request = TraceRequest {
        device: args.device.clone(),
        slower_than_ns: args.slower_than.map_or(0, |time| nanos(time.into())),
        operations: args.operation.iter().map(|operation| operation.name()).collect(),
        queue: args.queue,
        limit: count,
    };
    // Before the daemon traces for a file that cannot be written.
    let mut sink = match &args.chrome {
        Some(path) => {
            let file = File::create(path).with_context(|| path.display().to_string());
            Sink::Chrome(file.map_err(Failure::request)?, Vec::new())
        }
        None if args.json => Sink::Json,
        None => Sink::Rows,
    };
    let stop = stop_on_signals()?;
    let mut source = Source::open(args.control.as_deref(), request)?;
    let deadline = args.duration.map(|time| Instant::now() + Duration::from(time));
    let result = follow(args, &mut source, &mut sink, deadline, &stop);
    if let (Sink::Chrome(file, lines), Some(path)) = (sink, &args.chrome) {
        let mut file = BufWriter::new(file);
        let written = chrome::write(&mut file, &args.device, source.pid, lines);
        written.and_then(|()| file.flush()).with_context(|| path.display().to_string())?;
    }
    if source.dropped > 0 {
        output::complain(&format!(
            "paravane: {} requests dropped: use filters to trace fewer",
            source.dropped
        ));
    }
    result?;
    // Relaxed: the flag carries no data with it.
    Ok(if stop.load(Ordering::Relaxed) { ExitCode::from(130) } else { ExitCode::SUCCESS })
}

fn count(args: &TraceArgs) -> Result<Option<u64>, anyhow::Error> {
    match (&args.chrome, args.count) {
        (None, count) => Ok(count),
        (Some(_), None) => Ok(Some(CHROME_COUNT)),
        (Some(_), Some(count)) if count <= CHROME_MOST => Ok(Some(count)),
        (Some(_), Some(count)) => {
            Err(anyhow!("--count {count}: a Chrome trace has at most {CHROME_MOST} requests"))
        }
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Set by SIGINT, SIGTERM and SIGHUP.
fn stop_on_signals() -> Result<Arc<AtomicBool>, anyhow::Error> {
    let stop = Arc::new(AtomicBool::new(false));
    let set = stop.clone();
    // Relaxed: as above.
    ctrlc::set_handler(move || set.store(true, Ordering::Relaxed))
        .context("cannot install the signal handler")?;
    Ok(stop)
}

/// Handles requests until something ends the trace.
fn follow(
    args: &TraceArgs,
    source: &mut Source,
    sink: &mut Sink,
    deadline: Option<Instant>,
    stop: &AtomicBool,
) -> Result<(), anyhow::Error> {
    if matches!(sink, Sink::Rows) && !output::write(rows::HEADER)? {
        return Ok(());
    }
    let late = || deadline.is_some_and(|deadline| Instant::now() >= deadline);
    while !stop.load(Ordering::Relaxed) && !late() {
        let line = match source.next()? {
            Event::Request(line) => line,
            Event::Nothing => continue,
            Event::End => return Ok(()),
        };
        let text = match sink {
            Sink::Chrome(_, lines) => {
                lines.push(line);
                continue;
            }
            Sink::Rows => rows::row(&line),
            Sink::Json => {
                serde_json::to_string(&Named { device: &args.device, line: &line }).context("JSON")? + "\n"
            }
        };
        if !output::write(&text)? {
            return Ok(());
        }
    }
    Ok(())
}
