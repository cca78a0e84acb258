//! SIGINT and SIGTERM of commands that come to an end by themselves.
use crate::failure::Failure;
use crate::log;
use anyhow::Context;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Signals within this time of the first one count as one.
///
/// A terminal or a wrapper may send two.
const SAME_SIGNAL: Duration = Duration::from_millis(500);

/// A flag that the first signal sets. A later one ends the process, after `at_exit`.
pub(crate) fn flag(at_exit: impl Fn() + Send + 'static) -> Result<Arc<AtomicBool>, Failure> {
    let flag = Arc::new(AtomicBool::new(false));
    let set = flag.clone();
    // Relaxed: the flag carries no data with it.
    on_signal(move || set.swap(true, Ordering::Relaxed), at_exit)?;
    Ok(flag)
}

/// The first signal calls `cancel`. A later one ends the process, after `at_exit`.
///
/// `cancel` returns whether it was called before.
pub(crate) fn on_signal(
    cancel: impl Fn() -> bool + Send + 'static,
    at_exit: impl Fn() + Send + 'static,
) -> Result<(), Failure> {
    let mut first = None;
    ctrlc::set_handler(move || {
        let since = first.get_or_insert_with(Instant::now).elapsed();
        if cancel() && since > SAME_SIGNAL {
            at_exit();
            log::finish();
            std::process::exit(130);
        }
    })
    .context("cannot install the signal handler")?;
    Ok(())
}
