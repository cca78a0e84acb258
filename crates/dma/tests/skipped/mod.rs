//! Reports tests that are skipped.
use std::io::Write;

/// Reports that a test is skipped, and why.
pub(crate) fn skipped(name: &str, why: &str) {
    let line = format!("SKIPPED {name}: {why}\n");
    eprint!("{line}");
    if let Some(path) = std::env::var_os("PARAVANE_SKIP_LOG") {
        let log = std::fs::OpenOptions::new().create(true).append(true).open(path);
        log.and_then(|mut log| log.write_all(line.as_bytes())).expect("the skip log can be written");
    }
}
