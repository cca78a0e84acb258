//! A run, from its arguments to its exit status.
//!
//! ```text
//! read baseline, make DIR -> run -> table or JSON -> compare -> report -> exit status
//! ```
//! What can fail without a measurement fails before it.
use paravane_bench::{Baseline, BenchError, Comparison, Omitted, Options, Recorder, Results, Row, Verdict};
use paravane_command_line::bench::{BenchArgs, Client};
use paravane_command_line::{Failure, output, wrap};
use std::io::{IsTerminal, Write as _};
use std::path::Path;
use std::process::ExitCode;
use std::time::SystemTime;

/// Exit status if a figure is worse than the baseline.
const WORSE: u8 = 3;
/// Value of --baseline for the other build.
const OTHER: &str = "other";

pub(crate) fn main(args: &BenchArgs) -> Result<ExitCode, Failure> {
    if args.name == "list" {
        let mut out = String::new();
        for benchmark in paravane_bench::list() {
            out += &wrap::row(benchmark.name, 12, benchmark.summary, wrap::columns());
        }
        output::print(&out)?;
        return Ok(ExitCode::SUCCESS);
    }
    let file = args.baseline.as_deref().filter(|path| *path != Path::new(OTHER));
    let earlier = file.map(Results::read).transpose().map_err(Failure::request)?;
    if let Some(folder) = &args.report {
        paravane_bench::prepare(folder).map_err(Failure::request)?;
    }
    let started = humantime::format_rfc3339_seconds(SystemTime::now()).to_string();
    let recorder = Recorder::start(started);
    let (rows, omitted) = run(args)?;
    if args.json {
        output::print_json(&rows)?;
    } else {
        let tables: Vec<String> =
            rows.chunk_by(|a, b| a.bench == b.bench).map(paravane_bench::table).collect();
        output::print(&tables.join("\n"))?;
    }
    for Omitted { bench, reason } in &omitted {
        output::complain(&format!("{bench} was omitted: {reason}"));
    }
    let results = recorder.finish(format!("paravane {}", env!("CARGO_PKG_VERSION")), rows, omitted);
    let name = file.map(|path| path.display().to_string()).unwrap_or_default();
    let baseline = match &earlier {
        Some(results) => Some(Baseline::Run { results, name: &name }),
        None => args.baseline.as_ref().map(|_| Baseline::OtherBuild),
    };
    let compare = |baseline| Comparison::of(&results, baseline, args.threshold / 100.0);
    let comparison = baseline.map(compare).transpose();
    // A comparison that fails does not cost the report.
    let written = match &args.report {
        Some(folder) => {
            let known = comparison.as_ref().ok().and_then(Option::as_ref);
            Some(paravane_bench::report(folder, &results, known)?)
        }
        None => None,
    };
    let comparison = comparison?;
    if let Some(comparison) = &comparison {
        let text = format!("\n{}", comparison.text());
        // Stdout is JSON then.
        if args.json { output::complain(text.trim()) } else { output::print(&text)? }
    }
    if let Some(page) = written {
        output::complain(&format!("report: {}", page.display()));
    }
    let worse = comparison.is_some_and(|comparison| comparison.count(Verdict::Worse) > 0);
    Ok(if worse { WORSE.into() } else { ExitCode::SUCCESS })
}

/// Runs the named benchmark, or all that can run here.
///
/// Returns those that cannot as omitted.
fn run(args: &BenchArgs) -> Result<(Vec<Row>, Vec<Omitted>), Failure> {
    let client = match args.client {
        Client::Event => paravane_bench::Client::Event,
        Client::Poll => paravane_bench::Client::Poll,
    };
    let options = Options {
        rounds: args.rounds,
        filter: args.filter.clone(),
        quick: args.quick,
        client,
        contended: args.contended,
    };
    if args.name != "all" {
        let rows = one(&args.name, &options).map_err(|error| match error {
            BenchError::Unknown(_) | BenchError::NoCase(_) => Failure::request(error),
            _ => error.into(),
        })?;
        return Ok((rows, Vec::new()));
    }
    let (mut rows, mut omitted) = (Vec::new(), Vec::new());
    for benchmark in paravane_bench::list() {
        match one(benchmark.name, &options) {
            Ok(of_benchmark) => rows.extend(of_benchmark),
            Err(BenchError::NoCase(_)) => {}
            Err(error) => {
                omitted.push(Omitted { bench: benchmark.name.to_owned(), reason: error.to_string() });
            }
        }
    }
    match (rows.is_empty(), omitted.first()) {
        (true, Some(Omitted { bench, reason })) => Err(anyhow::anyhow!("{bench}: {reason}").into()),
        (true, None) => Err(Failure::request(BenchError::NoCase(args.filter.clone().unwrap_or_default()))),
        _ => Ok((rows, omitted)),
    }
}

/// Runs one benchmark and shows its progress on a terminal.
fn one(name: &str, options: &Options) -> Result<Vec<Row>, BenchError> {
    let show = std::io::stderr().is_terminal();
    let mut progress = |what: &str| {
        if show {
            // Failure to show progress is no error.
            let _ = write!(std::io::stderr(), "\r\x1b[K{what}");
        }
    };
    let result = paravane_bench::run(name, options, &mut progress);
    progress("");
    result
}
