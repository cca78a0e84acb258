//! SIGINT and SIGTERM of `paravane run`.
use crate::failure::Failure;
use crate::log;
use anyhow::Context;
use paravane_vmm::Progress;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Signals within this time of the first one count as one.
///
/// A terminal or a wrapper may send two.
const SAME_SIGNAL: Duration = Duration::from_millis(500);

/// The first signal ends the run with a report, a later one ends the process.
pub(crate) fn on_signal(progress: &Arc<Progress>) -> Result<(), Failure> {
    let progress = progress.clone();
    let mut first = None;
    ctrlc::set_handler(move || {
        let since = first.get_or_insert_with(Instant::now).elapsed();
        // Relaxed: the flag carries no data with it.
        if progress.cancel.swap(true, Ordering::Relaxed) && since > SAME_SIGNAL {
            log::finish();
            std::process::exit(130);
        }
    })
    .context("cannot install the signal handler")?;
    Ok(())
}
