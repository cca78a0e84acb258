//! The progress bar on a terminal, fed from the run's shared counters, and the end by a signal.
use crate::cancel;
use crate::failure::Failure;
use indicatif::{ProgressBar, ProgressStyle};
use paravane_vmm::Progress;
use std::io::IsTerminal;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// The first signal ends the run with a report, a later one ends the process.
pub(super) fn cancel_on_signal(progress: &Arc<Progress>) -> Result<(), Failure> {
    let progress = progress.clone();
    // Relaxed: the flag carries no data with it.
    cancel::on_signal(move || progress.cancel.swap(true, Ordering::Relaxed), || {})
}

/// A progress bar, redrawn by a thread until dropped.
pub(crate) struct Bar {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Bar {
    /// Starts the bar if stderr is a terminal and `quiet` is not set.
    pub(crate) fn start(progress: &Arc<Progress>, quiet: bool) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let show = !quiet && std::io::stderr().is_terminal();
        let thread = show.then(|| {
            let (progress, stop) = (progress.clone(), stop.clone());
            // Without a thread there is no bar, which is no error.
            std::thread::Builder::new().name("progress".into()).spawn(move || draw(&progress, &stop)).ok()
        });
        let thread = thread.flatten();
        Self { stop, thread }
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        // Relaxed: the flag carries no data with it.
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn draw(progress: &Progress, stop: &AtomicBool) {
    let bar = ProgressBar::new(0);
    if let Ok(style) =
        ProgressStyle::with_template("{msg:12} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec}")
    {
        bar.set_style(style);
    }
    // Relaxed: each counter is shown as it is.
    while !stop.load(Ordering::Relaxed) {
        bar.set_length(progress.bytes_total.load(Ordering::Relaxed));
        bar.set_position(progress.bytes_done.load(Ordering::Relaxed));
        bar.set_message(progress.phase().name());
        std::thread::sleep(Duration::from_millis(100));
    }
    bar.finish_and_clear();
}

#[cfg(test)]
mod tests {
    use paravane_vmm::Phase;

    #[test]
    fn every_phase_has_a_name_that_fits() {
        for phase in Phase::ALL {
            assert!((1..=12).contains(&phase.name().len()), "{phase:?}");
        }
    }
}
