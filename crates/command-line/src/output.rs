//! Prints results. No call panics if stdout or stderr is closed.
use std::io::{ErrorKind, Write};

/// Writes `text` to stdout. A closed pipe (`| head`) is no error.
///
/// # Errors
/// stdout cannot be written.
pub fn print(text: &str) -> Result<(), std::io::Error> {
    write(text).map(drop)
}

/// Writes `text` to stdout. `false`: the pipe is closed.
///
/// # Errors
/// stdout cannot be written.
pub fn write(text: &str) -> Result<bool, std::io::Error> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(false),
        result => result.map(|()| true),
    }
}

/// Writes `value` to stdout as indented JSON.
///
/// # Errors
/// stdout cannot be written.
pub fn print_json(value: &impl serde::Serialize) -> Result<(), anyhow::Error> {
    let mut text = serde_json::to_string_pretty(value)?;
    text.push('\n');
    Ok(print(&text)?)
}

/// Writes a line to stderr, ignoring errors.
pub fn complain(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}
