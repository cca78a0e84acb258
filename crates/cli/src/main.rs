//! The program `paravane`.
//!
//! Each command's exit statuses are in [`sections`].
//!
//! # Files
//!
//! * The program `paravane`: arguments, progress, output.
//! * `run` (a feature) is the microVM's side, `bench` (a feature) starts the program
//!   `paravane-bench`.
//! * `log` makes lines of events, limits them by device, and has a thread write them.
//! * `choices` parses options whose values another crate enumerates; `fds` passes descriptors over Unix
//!   sockets; `peer` knows the process at the other end of one.
//! * `kinds` has a file or folder for each kind of device, and the list of them: options, checks,
//!   opening, sandbox needs, reload, status, doctor, manuals and reference ask the list by what
//!   `kinds/kind` has of each.
//! * `serve` is the daemon: `config` and `args` become a `spec`, its kind opens it, `start` takes a
//!   daemon through its stages (claimed, sandboxed, opened, serving), `run` is its main loop,
//!   `exports` serves the devices (its `lock_wait` waits for the requests of a dead daemon); a
//!   reload is read by `reloader`, asked for by `reload` or a signal, planned by `exports/plan`
//!   from what `exports/change` says of each device, and carried out in place, or by
//!   `exports/exchange`, a take-over within the daemon; `sandbox` drops rights, in the order in
//!   which it must; `broker` is a process that connects to the servers of images from outside of
//!   the sandbox; `inspector` a process that looks at clients' descriptors before the daemon has
//!   them, and may be lost; `reader` one that reads the file of devices again; `helper` starts these three; `control`, `status`
//!   and `metrics` show a `report`, which a `reporter` makes for all clients that ask at the same
//!   time, over a bounded number of `connections`; `threads` are those that devices share;
//!   `sockets` takes sockets that the parent process passed; `systemd` and `signals`.
//! * `hold` is a process without device code that keeps a daemon's descriptors; `serve/store` is
//!   the daemon's side, for it and for systemd; `serve/shelf` sorts what is there by devices.
//! * `serve/snapshot` is the daemon's side of `paravane disk snapshot` and `fork` (`disk/`), over
//!   the `serve/wire` that passes descriptors until a `deadline`.
//! * `serve::trace` is the one observer of a disk's queues; behind it are the slow-request log
//!   (`serve::slow`) and a ring for each reader and queue, which the control thread empties.
//! * `top` shows live what `status` reads; `trace` shows what `serve::trace` sends; `disk` makes,
//!   describes, converts and merges images, a file for each subcommand; `disk/new_file` puts a
//!   complete image in its place, or none.
//! * `conventions` reads the name of the program and answers for capabilities; `doctor` judges the
//!   host, the devices of a file, and a client.
mod args;
#[cfg(feature = "bench")]
mod bench;
mod cancel;
mod choices;
mod conventions;
mod discreet;
mod disk;
mod doctor;
mod engine;
mod failure;
mod fds;
mod hold;
mod images;
mod kinds;
mod log;
mod mac;
mod manuals;
mod options;
mod peer;
mod printable;
mod reference;
mod reload;
#[cfg(feature = "run")]
mod run;
mod sections;
mod serve;
mod size;
mod top;
mod trace;

use args::{Cli, Command};
use clap::error::ErrorKind;
use clap::{CommandFactory, FromArgMatches};
use failure::{Failure, one_line};
use paravane_command_line::usage;
use std::ffi::OsString;
use std::process::ExitCode;
#[cfg(feature = "run")]
use std::time::Instant;

fn main() -> ExitCode {
    #[cfg(feature = "run")]
    let started = Instant::now();
    let words = conventions::expand(std::env::args_os());
    if let Some(kind) = conventions::asked(&words) {
        return match conventions::print_capabilities(kind) {
            Ok(()) => ExitCode::SUCCESS,
            Err(_) => ExitCode::FAILURE,
        };
    }
    // Before the command line is parsed: `paravane-bench` prints its own help and errors.
    #[cfg(feature = "bench")]
    if let Some(arguments) = bench::arguments(&words) {
        return end(Err(bench::start(arguments)));
    }
    let cli = match parse(words) {
        Ok(cli) => cli,
        Err(error) => return answer(&error),
    };
    // These set up their logs themselves. `serve` starts the log's thread after entering the sandbox, the others
    // start none.
    let has_own_log = matches!(
        cli.command,
        Command::Serve(_) | Command::Hold(_) | Command::Broker | Command::Inspector | Command::Reader
    );
    if !has_own_log {
        let verbose = cli.log.verbose;
        log::set_up(log::Settings { base: log::Level::WARN, verbose, json: false, rate: None });
        // `top` blocks signals first: threads inherit the mask.
        if !matches!(cli.command, Command::Top(_)) {
            log::start_writing();
        }
    }
    let result = match cli.command {
        #[cfg(feature = "run")]
        Command::Run(args) => run::main(&args, started),
        Command::Serve(args) => serve::main(&args, cli.log.verbose),
        Command::Hold(args) => hold::main(&args, cli.log.verbose),
        Command::Broker => serve::broker::main(),
        Command::Inspector => serve::inspector::main(),
        Command::Reader => serve::reader::main(),
        Command::Reload(args) => reload::main(&args),
        Command::Status(args) => serve::status::main(&args),
        Command::Top(args) => top::main(&args),
        Command::Trace(args) => trace::main(&args),
        Command::Disk(args) => disk::main(&args),
        Command::Manuals(args) => manuals::main(&args),
        Command::Reference(args) => reference::main(&args),
        Command::Doctor(args) => doctor::main(&args),
        #[cfg(feature = "bench")]
        Command::Bench(_) => Err(bench::start(std::env::args_os().skip(2).collect())),
        Command::Completions(args) => manuals::completions(&args),
    };
    end(result)
}

/// Logs why the program fails, if it does, and writes what is left of the log.
fn end(result: Result<ExitCode, Failure>) -> ExitCode {
    let code = result.unwrap_or_else(|failure| {
        log::last_words(&one_line(&failure.error));
        ExitCode::from(failure.status)
    });
    log::finish();
    code
}

fn parse(words: Vec<OsString>) -> Result<Cli, clap::Error> {
    let mut command = sections::with_sections(Cli::command());
    let matches = command.try_get_matches_from_mut(words)?;
    Cli::from_arg_matches(&matches).map_err(|error| error.format(&mut command))
}

/// Prints the help or version to stdout, or a usage error as one line to stderr.
fn answer(error: &clap::Error) -> ExitCode {
    if !error.use_stderr() {
        // A closed stdout is no error.
        let _ = error.print();
        return ExitCode::SUCCESS;
    }
    log::last_words(&format!("{} (try --help)", one_line_usage(error)));
    log::finish();
    ExitCode::from(2)
}

/// A usage error as one line, with what was probably meant.
fn one_line_usage(error: &clap::Error) -> String {
    if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        let command = Cli::command();
        let visible = command.get_subcommands().filter(|command| !command.is_hide_set());
        let names: Vec<_> = visible.map(|command| command.get_name()).collect();
        return format!("no command: use one of {}", names.join(", "));
    }
    usage(error)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(words: &[&str]) -> String {
        let words = std::iter::once("paravane").chain(words.iter().copied()).map(OsString::from).collect();
        parse(words).map(|_| ()).map_err(|error| one_line_usage(&error)).expect_err("a usage error")
    }

    #[test]
    fn a_usage_error_says_what_was_meant() {
        let serve = said(&["serv"]);
        assert_eq!(serve, "unrecognized subcommand 'serv'; a similar subcommand exists: 'serve'");
        let image = said(&["serve", "blk", "--imgae", "vm.img"]);
        assert!(
            image.starts_with("unexpected argument '--imgae' found; a similar argument exists: '--image'")
        );
        let none = said(&[]);
        assert!(none.starts_with("no command: use one of run, ") && none.contains(", disk"), "{none}");
        assert!(!none.contains("broker"), "{none}");
        let missing = said(&["disk", "snapshot"]);
        assert!(missing.contains("<DEVICE>") && !missing.contains(';'), "{missing}");
    }
}
