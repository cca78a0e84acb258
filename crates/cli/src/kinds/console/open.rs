//! Opens consoles.
use super::args::Console;
use crate::kinds::observe::Observe;
use crate::kinds::opening::Opened;
use crate::serve::{private_socket, report};
use anyhow::Context;
use paravane_device::console::{self, BackEnd, ConsoleCounters, Pty};
use paravane_export::ExportStatus;
use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

/// Opens a console and its terminal.
///
/// # Errors
/// The terminal cannot be opened.
pub(super) fn open(console: &Console) -> Result<Opened, anyhow::Error> {
    let (end, back_end, socket) = match (&console.terminal_socket, &console.log) {
        (Some(path), _) => {
            let name = format!("terminal socket {}", path.display());
            let listener = private_socket::bind(path).with_context(|| name.clone())?;
            (BackEnd::Socket(listener), name, Some(path.clone()))
        }
        (None, None) => {
            let pty = Pty::open().context("cannot open a pseudo-terminal")?;
            let name = format!("pty {}", pty.path().display());
            (BackEnd::Pty(pty), name, None)
        }
        (None, Some(path)) => {
            let name = format!("log {}", path.display());
            let file = OpenOptions::new().append(true).create(true).mode(0o600).open(path);
            (BackEnd::Log(file.with_context(|| name.clone())?), name, None)
        }
    };
    let device = console::Console::new(end, console.window, console.buffer.0 as usize)
        .context("cannot start a console")?;
    let observer = Box::new(ConsoleObserver { counters: device.counters(), socket });
    Ok(Opened { device: Box::new(device), observer, back_end, hold: None })
}

/// A console while it is served.
struct ConsoleObserver {
    counters: ConsoleCounters,
    /// File of the terminal's socket.
    socket: Option<PathBuf>,
}

impl Observe for ConsoleObserver {
    fn report(&self, device: &mut report::Device, _: &ExportStatus) {
        let carried = self.counters.carried();
        let figures = [
            ("output_bytes", carried.output),
            ("input_bytes", carried.input),
            ("dropped_bytes", carried.dropped),
            ("waiting_bytes", carried.waiting),
            ("readers", carried.attached.into()),
        ];
        device.figures = figures.map(|(name, value)| (name.to_owned(), value)).into();
    }

    fn release(&mut self) {
        // Before a successor binds it.
        if let Some(path) = self.socket.take() {
            // May fail after a change of user. The next bind replaces a socket without a listener.
            let _ = std::fs::remove_file(path);
        }
    }
}

impl Drop for ConsoleObserver {
    fn drop(&mut self) {
        self.release();
    }
}
