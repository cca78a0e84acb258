//! A console that is not open yet.
use paravane_device::console::Window;
use std::path::{Path, PathBuf};

/// A validated console.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Console {
    pub(super) terminal: Terminal,
    pub(super) window: Option<Window>,
    /// Most bytes of output that wait.
    pub(super) buffer: usize,
}

/// The host's side.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Terminal {
    Socket(PathBuf),
    Pty,
    Log(PathBuf),
}

impl Console {
    /// The option that names its terminal, and its path.
    pub(super) fn path(&self) -> Option<(&'static str, &Path)> {
        match &self.terminal {
            Terminal::Socket(path) => Some(("terminal-socket", path)),
            Terminal::Log(path) => Some(("log", path)),
            Terminal::Pty => None,
        }
    }
}
