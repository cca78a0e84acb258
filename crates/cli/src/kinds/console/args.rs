//! Options of consoles.
use crate::size::Size;
use clap::{ArgGroup, Args};
use paravane_device::console::Window;
use std::path::{Path, PathBuf};

/// Serve a console
///
/// Exactly one of --terminal-socket, --pty and --log selects the host's side. What the guest writes while
/// nobody reads waits in a buffer, and the newest is kept. While somebody reads, the guest waits for a
/// slow reader. Nothing is lost while the VMM disconnects and reconnects.
#[derive(Clone, Debug, PartialEq, Eq, Args)]
#[command(group = ArgGroup::new("terminal").args(["terminal_socket", "pty", "log"]).required(true))]
pub(super) struct Console {
    /// Serve one terminal program at a time on this Unix socket, created with mode 0600
    #[arg(long, value_name = "PATH")]
    pub(super) terminal_socket: Option<PathBuf>,
    /// Serve programs at a new pseudo-terminal, which `paravane status` and the log name
    #[arg(long)]
    pub(super) pty: bool,
    /// Append what the guest writes to FILE, created with mode 0600; the guest gets no input
    #[arg(long, value_name = "FILE")]
    pub(super) log: Option<PathBuf>,
    /// Size of the window that the guest sees, for example 80x25 [default: none, the guest decides]
    #[arg(long, value_name = "COLUMNSxROWS", value_parser = window)]
    pub(super) window: Option<Window>,
    /// Maximum bytes that wait for a reader, from 4k to 1G [default: 1M]
    #[arg(long, value_name = "SIZE", default_value = "1M", hide_default_value = true)]
    pub(super) buffer: Size,
}

impl Console {
    /// The option that names its terminal, and its path.
    pub(super) fn path(&self) -> Option<(&'static str, &Path)> {
        let paths = [("terminal-socket", &self.terminal_socket), ("log", &self.log)];
        paths.into_iter().find_map(|(option, path)| Some((option, path.as_deref()?)))
    }
}

/// Parses columns and rows: "80x25".
fn window(text: &str) -> Result<Window, String> {
    let parse = || {
        let (columns, rows) = text.split_once('x')?;
        let [columns, rows] = [columns, rows].map(|number| number.parse().ok().filter(|number| *number > 0));
        Some(Window { columns: columns?, rows: rows? })
    };
    parse().ok_or_else(|| "write columns and rows, as 80x25".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_has_columns_and_rows() {
        assert_eq!(window("80x25"), Ok(Window { columns: 80, rows: 25 }));
        for text in ["", "80", "80x", "x25", "0x25", "80x25x1", "80X25", "70000x1"] {
            assert!(window(text).is_err(), "{text}");
        }
    }
}
