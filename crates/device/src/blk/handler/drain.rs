//! The end of a queue: waits for its requests in flight, and completes or leaves them.
use super::{Handler, leave};
use crate::{MappedQueue, QueueBatch, Served};
use std::sync::atomic::{AtomicBool, Ordering};

impl Handler {
    /// See [`drain_until`](crate::QueueHandler::drain_until).
    pub(super) fn empty(
        &mut self,
        queue: &mut MappedQueue,
        complete: bool,
        cut: Option<&AtomicBool>,
    ) -> Served {
        let mut served = Served::default();
        self.settle(complete.then_some((&mut *queue, &mut served)), cut);
        if complete {
            // A queue that has latched publishes nothing.
            served.interrupt = queue.begin_batch().queue.publish().unwrap_or(false);
        }
        served
    }

    /// Waits for all requests in flight, which `finish` completes [they are forgotten].
    ///
    /// Once `cut` is set, no request takes another step. With in-flight tracking, jobs that the host
    /// has not begun are cancelled.
    ///
    /// Requests that wait for room are tried once more. Then they fail, or stay in flight with
    /// in-flight tracking.
    fn settle(&mut self, mut finish: Option<(&mut MappedQueue, &mut Served)>, cut: Option<&AtomicBool>) {
        let mut cancelled = false;
        self.hurries = true;
        self.hurry(finish.as_ref().is_some_and(|(queue, _)| !queue.queue().is_tracked()));
        loop {
            let tracked = finish.as_ref().is_some_and(|(queue, _)| queue.queue().is_tracked());
            // Relaxed: see below.
            if !cancelled && tracked && cut.is_some_and(|cut| cut.load(Ordering::Relaxed)) {
                cancelled = true;
                self.engine.cancel();
                self.engine.reap(&mut self.outcomes);
            }
            // An earlier error may have left outcomes that were reaped already.
            while let Some(outcome) = self.outcomes.pop_front() {
                let stepped = match &mut finish {
                    Some((queue, served)) => {
                        // The batch ends before the next wait, which may be long.
                        let QueueBatch { queue, memory, latency, .. } = queue.begin_batch();
                        latency.reap();
                        // Relaxed: a request that misses it takes one more step.
                        let last = cut.is_some_and(|cut| cut.load(Ordering::Relaxed));
                        self.step(outcome, queue, &memory, served, (latency, last))
                    }
                    None => self
                        .requests
                        .reaped(outcome)
                        .map_or(Ok(()), |reaped| leave(&reaped.forget(), &self.follower)),
                };
                if let Err(error) = stepped {
                    // The queue has latched: the rest can only be forgotten.
                    tracing::debug!(%error, "cannot complete a request while draining; the rest is forgotten");
                    finish = None;
                }
            }
            if self.requests.in_flight == 0 {
                self.hurries = false;
                self.follower.rest();
                return;
            }
            if let Err(error) = self.engine.wait() {
                // The kernel may still access their memory, so it stays mapped. The handler is
                // useless from here on.
                tracing::error!(%error, "cannot wait for block requests in flight; their memory stays mapped");
                self.requests.leak();
                return;
            }
            self.engine.reap(&mut self.outcomes);
        }
    }

    /// Takes up the requests that wait for room: a last time if `again`, else they are left.
    #[cold]
    fn hurry(&mut self, again: bool) {
        if self.waiting.is_empty() {
            return;
        }
        if again && let Err(error) = self.push_waiting() {
            tracing::debug!(%error, "requests without room cannot be tried again");
        }
        for head in std::mem::take(&mut self.waiting) {
            if let Some(ready) = self.requests.waiting(head) {
                drop(ready.end());
                self.follower.current.full.release();
            }
        }
    }
}

impl Drop for Handler {
    fn drop(&mut self) {
        self.settle(None, None);
    }
}
