//! Programs that tests execute.
use std::path::Path;
use std::process::Command;

/// Copies a program, to be executed at once.
///
/// Another process makes the copy. A file that this process writes, its children have open until they
/// start their programs, and a file that somebody has open for writing cannot be executed.
///
/// # Panics
/// It cannot be copied.
pub fn copy_program(program: impl AsRef<Path>, to: impl AsRef<Path>) {
    let copied = Command::new("cp").arg(program.as_ref()).arg(to.as_ref()).status();
    assert!(copied.is_ok_and(|status| status.success()), "{} is not copied", program.as_ref().display());
}
