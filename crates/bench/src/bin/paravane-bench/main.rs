//! The program `paravane-bench`, which `paravane bench` starts.
mod measure;

use paravane_command_line::bench::parse;
use paravane_command_line::{Failure, one_line, output, usage};
use std::process::ExitCode;
use tracing_subscriber::EnvFilter;

fn main() -> ExitCode {
    if let Some(code) = paravane_bench::child_main() {
        return code;
    }
    let (log, bench) = match parse(std::env::args_os()) {
        Ok(parsed) => parsed,
        Err(error) => return answer(&error),
    };
    set_up_log(log.verbose);
    measure::main(&bench).unwrap_or_else(|Failure { status, error }| {
        complain(&one_line(&error));
        ExitCode::from(status)
    })
}

/// Prints the help or version to stdout, or a usage error as one line to stderr.
fn answer(error: &clap::Error) -> ExitCode {
    if !error.use_stderr() {
        // A closed stdout is no error.
        let _ = error.print();
        return ExitCode::SUCCESS;
    }
    complain(&format!("{} (try --help)", usage(error)));
    ExitCode::from(2)
}

/// Says why the program ends, as `paravane` does.
fn complain(words: &str) {
    output::complain(&format!("paravane: {words}"));
}

/// Logs to stderr, warnings and errors unless there are `-v` options. RUST_LOG overrides the level.
fn set_up_log(verbose: u8) {
    const LEVELS: [&str; 4] = ["warn", "info", "debug", "trace"];
    let level = LEVELS[usize::from(verbose).min(LEVELS.len() - 1)];
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(level));
    // A log that cannot be written is lost.
    let log = tracing_subscriber::fmt().log_internal_errors(false).with_writer(std::io::stderr);
    let _ = log.with_env_filter(filter).try_init();
}
