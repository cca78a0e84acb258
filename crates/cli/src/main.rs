//! The program `paravane`.
//!
//! Each command's exit statuses are in [`sections`].
mod args;
mod bench;
mod cancel;
mod conventions;
mod discreet;
mod disk;
mod disk_arg;
mod doctor;
mod engine;
mod failure;
mod hold;
mod linux;
mod log;
mod manuals;
mod net;
mod options;
mod output;
mod printable;
mod progress;
mod queues;
mod reference;
mod reload;
mod render;
mod run;
mod sections;
mod serve;
mod size;
mod top;
mod trace;
mod wrap;

use args::{Cli, Command};
use clap::error::ErrorKind;
use clap::{CommandFactory, FromArgMatches};
use failure::one_line;
use std::ffi::OsString;
use std::process::ExitCode;
use std::time::Instant;

fn main() -> ExitCode {
    let started = Instant::now();
    if let Some(code) = paravane_bench::child_main().or_else(paravane_vmm::helper_main) {
        return code;
    }
    let words = conventions::expand(std::env::args_os());
    if let Some(back_end) = conventions::asked(&words) {
        return match back_end.print_capabilities() {
            Ok(()) => ExitCode::SUCCESS,
            Err(_) => ExitCode::FAILURE,
        };
    }
    let cli = match parse(words) {
        Ok(cli) => cli,
        Err(error) => return answer(&error),
    };
    // `serve` and `hold` set up their logs themselves. `serve` starts the log's thread after entering
    // the sandbox, `hold` starts none.
    if !matches!(
        cli.command,
        Command::Serve(_) | Command::Hold(_) | Command::Broker | Command::Inspector | Command::Reader
    ) {
        let settings =
            log::Settings { base: log::Level::Warn, verbose: cli.verbose, json: false, rate: None };
        log::set_up(settings);
    }
    // `top` blocks signals first: threads inherit the mask.
    if !matches!(
        cli.command,
        Command::Serve(_)
            | Command::Hold(_)
            | Command::Broker
            | Command::Inspector
            | Command::Reader
            | Command::Top(_)
    ) {
        log::start_writing();
    }
    let result = match cli.command {
        Command::Run(args) => run::main(&args, started),
        Command::Serve(args) => serve::main(&args, cli.verbose),
        Command::Hold(args) => hold::main(&args, cli.verbose),
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
        Command::Bench(args) => bench::main(&args),
        Command::Completions(args) => manuals::completions(&args),
    };
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
    log::last_words(&format!("{} (try --help)", usage(error)));
    log::finish();
    ExitCode::from(2)
}

/// A usage error as one line, with what was probably meant.
fn usage(error: &clap::Error) -> String {
    if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        let command = Cli::command();
        let visible = command.get_subcommands().filter(|command| !command.is_hide_set());
        let names: Vec<_> = visible.map(|command| command.get_name()).collect();
        return format!("no command: use one of {}", names.join(", "));
    }
    let text = error.render().to_string();
    let first = text.lines().next().unwrap_or_default();
    let first = first.strip_prefix("error: ").unwrap_or(first);
    let listed = text.lines().skip(1).map(str::trim).take_while(|line| !line.is_empty());
    let tips = text.lines().filter_map(|line| line.trim_start().strip_prefix("tip: "));
    let line = listed.fold(first.to_owned(), |line, more| format!("{line} {more}"));
    tips.fold(line, |line, tip| format!("{line}; {tip}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(words: &[&str]) -> String {
        let words = std::iter::once("paravane").chain(words.iter().copied()).map(OsString::from).collect();
        parse(words).map(|_| ()).map_err(|error| usage(&error)).expect_err("a usage error")
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
