//! Queue of lines for stderr.
use super::counts::LOST;
use parking_lot::{Condvar, Mutex};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Maximum number of queued bytes. The writer holds as many again.
const CAPACITY: usize = 256 << 10;

/// A bounded queue of lines. Producers never wait.
pub(super) struct Queue {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    lines: Vec<u8>,
    /// Number of lines lost after the queued ones.
    lost: u64,
    /// The writer is writing lines that it took.
    writing: bool,
    /// [`Queue::take`] must return now.
    woken: bool,
}

/// Lines taken from the queue.
#[derive(Debug, Default)]
pub(super) struct Batch {
    /// Whole lines.
    pub(super) lines: Vec<u8>,
    /// Number of lines lost after these.
    pub(super) lost: u64,
}

impl Queue {
    pub(super) const fn new() -> Self {
        let state = State { lines: Vec::new(), lost: 0, writing: false, woken: false };
        Self { state: Mutex::new(state), changed: Condvar::new() }
    }

    /// Appends a line. Without room, the line is lost and counted.
    pub(super) fn push(&self, line: &str) {
        let mut state = self.state.lock();
        // After a loss, further lines are lost until the queue is taken, to keep the order.
        let room = CAPACITY - state.lines.len();
        if state.lost > 0 || line.len() > room || state.lines.try_reserve(line.len()).is_err() {
            state.lost += 1;
            LOST.fetch_add(1, Ordering::Relaxed);
        } else {
            state.lines.extend_from_slice(line.as_bytes());
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Waits for lines for at most `time` and takes all.
    ///
    /// Lines taken before count as written.
    pub(super) fn take(&self, batch: &mut Batch, time: Option<Duration>) {
        batch.lines.clear();
        batch.lost = 0;
        self.written();
        let mut state = self.state.lock();
        let nothing = |state: &mut State| state.lines.is_empty() && state.lost == 0 && !state.woken;
        match time {
            None => self.changed.wait_while(&mut state, nothing),
            Some(time) => drop(self.changed.wait_while_for(&mut state, nothing, time)),
        }
        std::mem::swap(&mut state.lines, &mut batch.lines);
        batch.lost = std::mem::take(&mut state.lost);
        state.woken = false;
        state.writing = !batch.lines.is_empty() || batch.lost > 0;
    }

    /// Makes [`Queue::take`] return without lines.
    pub(super) fn wake(&self) {
        self.state.lock().woken = true;
        self.changed.notify_all();
    }

    /// Marks the taken lines as written.
    pub(super) fn written(&self) {
        self.state.lock().writing = false;
        self.changed.notify_all();
    }

    /// Whether all lines are written.
    pub(super) fn is_written(&self) -> bool {
        self.state.lock().is_written()
    }

    /// Waits until all lines are written, or until `deadline`.
    pub(super) fn wait_written(&self, deadline: Instant) {
        self.changed.wait_while_until(&mut self.state.lock(), |state| !state.is_written(), deadline);
    }
}

impl State {
    fn is_written(&self) -> bool {
        self.lines.is_empty() && self.lost == 0 && !self.writing
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const AT_ONCE: Option<Duration> = Some(Duration::ZERO);

    #[test]
    fn lines_come_out_in_order_and_what_finds_no_room_is_counted() {
        let queue = Queue::new();
        let line = format!("{}\n", "x".repeat(1023));
        for _ in 0..300 {
            queue.push(&line);
        }
        queue.push("short\n");
        let mut batch = Batch::default();
        queue.take(&mut batch, AT_ONCE);
        assert_eq!((batch.lines.len(), batch.lost), (CAPACITY, 300 - 256 + 1));
        assert!(!queue.is_written(), "it is being written");
        queue.push("next\n");
        queue.take(&mut batch, AT_ONCE);
        assert_eq!((&batch.lines[..], batch.lost), (&b"next\n"[..], 0));
        queue.take(&mut batch, AT_ONCE);
        assert!(batch.lines.is_empty() && queue.is_written());
    }

    #[test]
    fn who_waits_for_a_writer_that_is_stuck_gives_up() {
        let queue = Queue::new();
        queue.push("a\n");
        queue.take(&mut Batch::default(), AT_ONCE);
        queue.wait_written(Instant::now());
        assert!(!queue.is_written());
    }
}
