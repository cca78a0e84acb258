//! The program `paravane`.
//!
//! Exit status: 0 done and verified; 1 it ran and something is wrong (a disk did not verify, the guest crashed
//! or hung, the host failed); 2 the request was at fault and nothing was touched; 130 stopped by a signal.
mod args;
mod bench;
mod disk;
mod doctor;
mod linux;
mod manuals;
mod net;
mod output;
mod progress;
mod queues;
mod render;
mod run;
mod serve;
mod size;

use clap::Parser;
use std::io::IsTerminal;
use std::process::ExitCode;
use std::time::Instant;

fn main() -> ExitCode {
    let started = Instant::now();
    if let Some(code) = paravane_bench::child_main().or_else(paravane_vmm::owner_main) {
        return code;
    }
    let cli = match args::Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return answer(&error),
    };
    // A daemon says what it does, as it is told to.
    if !matches!(cli.command, args::Command::Serve(_)) {
        log_to_stderr(cli.verbose, Level::Warn, false);
    }
    let result = match cli.command {
        args::Command::Run(args) => run::main(&args, started),
        args::Command::Serve(args) => serve::main(&args, cli.verbose),
        args::Command::Status(args) => serve::status::main(&args),
        args::Command::Manuals(args) => manuals::main(&args),
        args::Command::Doctor(args) => doctor::main(&args),
        args::Command::Bench(args) => bench::main(&args),
    };
    result.unwrap_or_else(|failure| {
        eprintln!("paravane: {}", one_line(&failure.error));
        ExitCode::from(failure.status)
    })
}

/// Prints the help or version that was asked for, or what is wrong with the command line, on one line.
fn answer(error: &clap::Error) -> ExitCode {
    if !error.use_stderr() {
        // Nobody is left to be told if this fails.
        let _ = error.print();
        return ExitCode::SUCCESS;
    }
    let text = error.render().to_string();
    let first = text.lines().next().unwrap_or_default();
    let first = first.strip_prefix("error: ").unwrap_or(first);
    let listed = text.lines().skip(1).map(str::trim).take_while(|line| !line.is_empty());
    let line = listed.fold(first.to_owned(), |line, more| format!("{line} {more}"));
    eprintln!("paravane: {line} (try --help)");
    ExitCode::from(2)
}

/// The error and its causes, without those that an error has already named itself.
fn one_line(error: &anyhow::Error) -> String {
    error.chain().map(ToString::to_string).fold(String::new(), |line, cause| {
        if line.is_empty() {
            cause
        } else if line.contains(&cause) {
            line
        } else {
            format!("{line}: {cause}")
        }
    })
}

/// What ends the program without a report.
struct Failure {
    /// Exit status: 1 or 2.
    status: u8,
    /// What is printed, on one line.
    error: anyhow::Error,
}

impl Failure {
    /// The request was at fault; nothing was touched.
    fn request(error: impl Into<anyhow::Error>) -> Self {
        Self { status: 2, error: error.into() }
    }
}

impl<E: Into<anyhow::Error>> From<E> for Failure {
    fn from(error: E) -> Self {
        Self { status: 1, error: error.into() }
    }
}

/// What is logged if nobody asks for more.
#[derive(Clone, Copy)]
enum Level {
    Warn,
    Info,
}

/// Logs go to stderr; RUST_LOG overrides the level.
fn log_to_stderr(verbose: u8, base: Level, json: bool) {
    let level = match (base, verbose) {
        (Level::Warn, 0) => "warn",
        (Level::Warn, 1) | (Level::Info, 0) => "info",
        (Level::Warn, 2) | (Level::Info, 1) => "debug",
        _ => "trace",
    };
    let filter = tracing_subscriber::EnvFilter::try_from_default_env()
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new(level));
    let log =
        tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_target(false);
    if json {
        log.json().flatten_event(true).init();
    } else {
        log.with_ansi(std::io::stderr().is_terminal()).init();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::Context;

    #[test]
    fn a_cause_is_named_once() {
        let inner = || std::io::Error::other("no room");
        let named = paravane_vmm::RunError::Os { what: "do it", source: inner() };
        assert_eq!(one_line(&named.into()), "cannot do it: no room");
        let chained = Err::<(), _>(inner()).context("cannot make a disk").unwrap_err();
        assert_eq!(one_line(&chained), "cannot make a disk: no room");
    }
}
