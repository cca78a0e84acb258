//! Makes one report for all clients that wait, in at most half of the time.
//!
//! A report is made after the request, so it is never stale.
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;
use tokio::sync::{mpsc, oneshot};

/// Pause after a report, in multiples of the time that it took.
const REST: u32 = 1;

/// Requests reports of type `T`, which is cheap to clone.
#[derive(Debug)]
pub(crate) struct Reporter<T>(mpsc::Sender<oneshot::Sender<T>>);

impl<T> Clone for Reporter<T> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<T: Clone + Send + 'static> Reporter<T> {
    /// Makes reports in a task of this runtime, for at most `most` clients at a time.
    pub(crate) fn start(most: usize, make: impl Fn() -> T + Send + 'static) -> Self {
        let (sender, receiver) = mpsc::channel(most);
        tokio::spawn(work(receiver, make));
        Self(sender)
    }

    /// Waits for a report. `None`: making it failed.
    pub(crate) async fn report(&self) -> Option<T> {
        let (sender, receiver) = oneshot::channel();
        self.0.send(sender).await.ok()?;
        receiver.await.ok()
    }
}

async fn work<T: Clone>(mut waiting: mpsc::Receiver<oneshot::Sender<T>>, make: impl Fn() -> T) {
    while let Some(first) = waiting.recv().await {
        // Let other clients ask as well.
        tokio::task::yield_now().await;
        let mut all = vec![first];
        while let Ok(more) = waiting.try_recv() {
            all.push(more);
        }
        let start = Instant::now();
        // The panic hook has logged a panic; the clients get no report.
        if let Ok(report) = catch_unwind(AssertUnwindSafe(&make)) {
            for one in all {
                // The client may have disconnected.
                let _ = one.send(report.clone());
            }
        }
        tokio::time::sleep(start.elapsed() * REST).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    #[test]
    fn one_report_is_for_all_who_wait_and_a_panic_ends_nothing() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let made = Arc::new(AtomicU32::new(0));
        let count = made.clone();
        runtime.block_on(async move {
            let reporter = Reporter::start(8, move || {
                let number = count.fetch_add(1, Ordering::Relaxed);
                assert_ne!(number, 1, "the second one fails");
                number
            });
            let ask = || {
                tokio::spawn({
                    let reporter = reporter.clone();
                    async move { reporter.report().await }
                })
            };
            let all: Vec<_> = (0..4).map(|_| ask()).collect();
            for one in all {
                assert_eq!(one.await.unwrap(), Some(0));
            }
            assert_eq!(ask().await.unwrap(), None);
            assert_eq!(ask().await.unwrap(), Some(2));
        });
        assert_eq!(made.load(Ordering::Relaxed), 3);
    }
}
