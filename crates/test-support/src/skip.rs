//! Tests that need KVM, root or a program that is missing are skipped loudly.
use std::fmt::Display;
use std::fs::OpenOptions;
use std::io::Write;

/// Reports on stderr that `test` did not run, and why.
///
/// Appends the line to the file that `PARAVANE_SKIP_LOG` names; the test command prints that file
/// at its end.
///
/// # Panics
/// The file cannot be written.
pub fn skip(test: &str, why: impl Display) {
    let line = format!("SKIPPED {test}: {why}\n");
    eprint!("{line}");
    if let Some(path) = std::env::var_os("PARAVANE_SKIP_LOG") {
        let log = OpenOptions::new().create(true).append(true).open(path);
        log.and_then(|mut log| log.write_all(line.as_bytes())).expect("cannot write the skip log");
    }
}
