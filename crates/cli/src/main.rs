//! The program `paravane`.
//!
//! Exit status: 0 done and verified; 1 it ran and something is wrong (a disk did not verify, the guest crashed
//! or hung, the host failed, requests were not finished in time); 2 the request was at fault and nothing was touched; 130 stopped by
//! a signal, or a second one where the first lets it finish.
mod args;
mod bench;
mod disk;
mod doctor;
mod linux;
mod log;
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
use std::process::ExitCode;
use std::time::Instant;

fn main() -> ExitCode {
    let started = Instant::now();
    if let Some(code) = paravane_bench::child_main().or_else(paravane_vmm::helper_main) {
        return code;
    }
    let cli = match args::Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return answer(&error),
    };
    // The daemon's file says how it logs, and its sandbox comes before the log's thread.
    if !matches!(cli.command, args::Command::Serve(_)) {
        let settings =
            log::Settings { base: log::Level::Warn, verbose: cli.verbose, json: false, rate: None };
        log::set_up(settings);
        log::start_writing();
    }
    let result = match cli.command {
        args::Command::Run(args) => run::main(&args, started),
        args::Command::Serve(args) => serve::main(&args, cli.verbose),
        args::Command::Status(args) => serve::status::main(&args),
        args::Command::Manuals(args) => manuals::main(&args),
        args::Command::Doctor(args) => doctor::main(&args),
        args::Command::Bench(args) => bench::main(&args),
    };
    let code = result.unwrap_or_else(|failure| {
        log::last_words(&one_line(&failure.error));
        ExitCode::from(failure.status)
    });
    log::finish();
    code
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
    log::last_words(&format!("{line} (try --help)"));
    log::finish();
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

/// Ends the program at once, whatever its threads do. Nothing is dropped: what they use stays mapped until the end.
fn exit(status: u8) -> ! {
    log::finish();
    std::process::exit(status.into())
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
