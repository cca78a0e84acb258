//! Long work on an image: a bar on a terminal, and an end by a signal.
use crate::cancel;
use crate::failure::Failure;
use indicatif::{ProgressBar, ProgressStyle};
use parking_lot::Mutex;
use std::io::IsTerminal;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Work in progress. The bar goes when this is dropped.
pub(super) struct Work {
    bar: ProgressBar,
    stop: Arc<AtomicBool>,
    unfinished: Arc<Mutex<Option<PathBuf>>>,
}

impl Work {
    /// Starts work on a disk of `size` bytes.
    ///
    /// There is a bar if stderr is a terminal and `quiet` is not set. The first signal ends the work
    /// at its next step; a later one ends the process.
    pub(super) fn start(what: &'static str, size: u64, quiet: bool) -> Result<Self, Failure> {
        let unfinished = Arc::new(Mutex::new(None::<PathBuf>));
        let at_exit = unfinished.clone();
        let stop = cancel::flag(move || {
            if let Some(path) = &*at_exit.lock() {
                let _ = std::fs::remove_file(path);
            }
        })?;
        let bar = match !quiet && std::io::stderr().is_terminal() {
            true => ProgressBar::new(size),
            false => ProgressBar::hidden(),
        };
        if let Ok(style) =
            ProgressStyle::with_template("{msg:12} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec} {eta}")
        {
            bar.set_style(style);
        }
        bar.set_message(what);
        Ok(Self { bar, stop, unfinished })
    }

    /// The work has another size, in bytes of the disk.
    pub(super) fn set_size(&self, size: u64) {
        self.bar.set_length(size);
    }

    /// A file to remove if a second signal ends the process.
    ///
    /// The work is started before the file is made: a signal never leaves it behind.
    pub(super) fn unfinished(&self, path: PathBuf) {
        *self.unfinished.lock() = Some(path);
    }

    /// The work has come to byte `at` of the disk.
    pub(super) fn step(&mut self, at: u64) -> ControlFlow<()> {
        self.bar.set_position(at);
        // Relaxed: the flag carries no data with it.
        if self.stop.load(Ordering::Relaxed) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
