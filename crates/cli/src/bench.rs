//! `paravane bench`: starts the program `paravane-bench`.
//!
//! Benchmarks and their peers are not in the operator's program. The other program has the same
//! options, prints its own help, and ends with its own status.
use crate::failure::Failure;
use anyhow::anyhow;
use paravane_command_line::bench::PROGRAM;
use std::ffi::{OsStr, OsString};
use std::io::ErrorKind;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

/// The arguments of `paravane-bench`, if a command line starts it.
pub(crate) fn arguments(words: &[OsString]) -> Option<Vec<OsString>> {
    let words = words.get(1..)?;
    let command = words.iter().position(|word| !is_verbose(word))?;
    let arguments = || words[..command].iter().chain(&words[command + 1..]).cloned().collect();
    (words[command] == "bench").then(arguments)
}

/// The only option that stands before a command.
fn is_verbose(word: &OsStr) -> bool {
    let Some(flags) = word.to_str().and_then(|word| word.strip_prefix('-')) else { return false };
    flags == "-verbose" || (!flags.is_empty() && flags.bytes().all(|flag| flag == b'v'))
}

/// Replaces this process by `paravane-bench`: beside this program, else in PATH.
///
/// Returns why there is none.
pub(crate) fn start(arguments: Vec<OsString>) -> Failure {
    let this = std::env::current_exe().ok();
    let beside = this.and_then(|this| Some(this.parent()?.join(PROGRAM))).filter(|path| path.is_file());
    let program = beside.unwrap_or_else(|| PathBuf::from(PROGRAM));
    let error = Command::new(&program).args(arguments).exec();
    Failure::request(match error.kind() {
        ErrorKind::NotFound => anyhow!(
            "{PROGRAM} is not installed: install the package {PROGRAM}, or build it with cargo build --release -p {PROGRAM}"
        ),
        _ => anyhow!("cannot start {}: {error}", program.display()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_of_the_log_are_passed_on() {
        let of = |line: &str| {
            let words: Vec<_> = line.split(' ').map(OsString::from).collect();
            arguments(&words)
                .map(|words| words.iter().map(|word| word.to_str().unwrap()).collect::<Vec<_>>().join(" "))
        };
        assert_eq!(of("paravane bench ring --rounds 9").as_deref(), Some("ring --rounds 9"));
        assert_eq!(of("paravane -v --verbose -vv bench --help").as_deref(), Some("-v --verbose -vv --help"));
        assert_eq!(of("paravane bench").as_deref(), Some(""));
        for line in [
            "paravane",
            "paravane help bench",
            "paravane serve blk",
            "paravane --version bench",
            "paravane - bench",
        ] {
            assert_eq!(of(line), None, "{line}");
        }
    }
}
