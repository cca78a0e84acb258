//! The terminal: raw mode and the alternate screen, given back on every way out.
//!
//! ```text
//!   enter --> ours --suspend--> given back, process stopped --SIGCONT--> ours
//!               '-- drop, or the hook of a panic --> given back
//! ```
//! A killed process (SIGKILL) cannot give anything back: use reset(1) then.
use super::view::View;
use parking_lot::Mutex;
use rustix::termios::{LocalModes, SpecialCodeIndex};
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};
use std::io::{self, Write};
use std::sync::Once;

/// Enters the alternate screen, hides the cursor, does not wrap lines.
const ENTER: &str = "\u{1b}[?1049h\u{1b}[?25l\u{1b}[?7l\u{1b}[2J";
/// Undoes [`ENTER`].
const LEAVE: &str = "\u{1b}[0m\u{1b}[?7h\u{1b}[?25h\u{1b}[?1049l";
/// Size of a terminal that does not tell it.
const SIZE: (usize, usize) = (80, 24);

/// State of the terminal while it is ours.
#[derive(Debug)]
struct Saved {
    /// `None`: stdin is no terminal.
    modes: Option<Termios>,
}

// A process has one terminal.
static SAVED: Mutex<Option<Saved>> = Mutex::new(None);
static HOOK: Once = Once::new();

/// The terminal, while it is ours.
#[derive(Debug)]
pub(super) struct Screen {
    columns: usize,
    pub(super) rows: usize,
}

impl Screen {
    /// Takes the terminal.
    ///
    /// # Errors
    /// The terminal refuses.
    pub(super) fn enter() -> io::Result<Self> {
        HOOK.call_once(|| {
            let report = std::panic::take_hook();
            // The report would vanish with the alternate screen.
            std::panic::set_hook(Box::new(move |info| {
                give_back();
                report(info);
            }));
        });
        take()?;
        let mut screen = Self { columns: SIZE.0, rows: SIZE.1 };
        screen.resize();
        Ok(screen)
    }

    /// Learns the size of the terminal.
    pub(super) fn resize(&mut self) {
        if let Ok(size) = tcgetwinsize(io::stdout())
            && size.ws_col > 0
            && size.ws_row > 0
        {
            (self.columns, self.rows) = (size.ws_col.into(), size.ws_row.into());
        }
    }

    /// Gives the terminal back, stops the process, and takes it again.
    ///
    /// # Errors
    /// The terminal refuses.
    pub(super) fn suspend(&mut self) -> io::Result<()> {
        give_back();
        // Continues here after SIGCONT.
        nix::sys::signal::raise(nix::sys::signal::Signal::SIGSTOP)?;
        take()?;
        self.resize();
        Ok(())
    }

    /// Shows the view.
    ///
    /// Lines are overwritten, never cleared first, so that nothing flickers.
    ///
    /// # Errors
    /// The terminal is gone.
    pub(super) fn show(&self, view: &View) -> io::Result<()> {
        let frame = view.frame(self.columns, self.rows);
        // Lines are as long as the screen is wide: to erase behind one would erase its last character.
        let mut out = format!("\u{1b}[H{}", frame.join("\r\n"));
        if frame.len() < self.rows {
            out += "\r\n\u{1b}[J";
        }
        write(&out)
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        give_back();
    }
}

fn write(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}

fn take() -> io::Result<()> {
    let mut saved = SAVED.lock();
    let modes = tcgetattr(io::stdin()).ok();
    if let Some(modes) = &modes {
        let mut raw = modes.clone();
        // Keys arrive at once and unseen. Ctrl-C stays a signal.
        raw.local_modes -= LocalModes::ICANON | LocalModes::ECHO;
        raw.special_codes[SpecialCodeIndex::VMIN] = 1;
        raw.special_codes[SpecialCodeIndex::VTIME] = 0;
        tcsetattr(io::stdin(), OptionalActions::Flush, &raw)?;
    }
    *saved = Some(Saved { modes });
    write(ENTER)
}

/// Gives the terminal back, once.
///
/// Errors have nobody to tell: the terminal may be gone.
fn give_back() {
    let mut saved = SAVED.lock();
    let Some(Saved { modes }) = saved.take() else { return };
    let _ = rustix::io::write(io::stdout(), LEAVE.as_bytes());
    if let Some(modes) = modes {
        let _ = tcsetattr(io::stdin(), OptionalActions::Drain, &modes);
    }
}
