//! What the owner of an export wants to find in the record of a later process.
//!
//! ```text
//!   owner:  set, wake the task, wait        task: pending --> record the state --> recorded
//! ```
use parking_lot::{Condvar, Mutex};
use std::time::{Duration, Instant};

/// See the module.
#[derive(Debug)]
pub(crate) struct Note {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    bytes: Vec<u8>,
    /// Number of changes, and of those that the task knows.
    set: u64,
    recorded: u64,
}

impl Note {
    pub(crate) fn new(bytes: Vec<u8>) -> Self {
        Self { state: Mutex::new(State { bytes, ..State::default() }), changed: Condvar::new() }
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        self.state.lock().bytes.clone()
    }

    /// Changes it. Returns the number of the change.
    pub(super) fn set(&self, bytes: Vec<u8>) -> u64 {
        let mut state = self.state.lock();
        (state.bytes, state.set) = (bytes, state.set + 1);
        state.set
    }

    /// The last change, if it is to be recorded.
    pub(super) fn pending(&self) -> Option<u64> {
        let state = self.state.lock();
        (state.recorded < state.set).then_some(state.set)
    }

    /// The state was recorded with this change, if it is recorded at all.
    pub(super) fn recorded(&self, change: u64) {
        let mut state = self.state.lock();
        state.recorded = state.recorded.max(change);
        drop(state);
        self.changed.notify_all();
    }

    /// Waits until a change is recorded; `false`: it is not within this time.
    pub(super) fn wait(&self, change: u64, patience: Duration) -> bool {
        let end = Instant::now() + patience;
        let mut state = self.state.lock();
        !self.changed.wait_while_until(&mut state, |state| state.recorded < change, end).timed_out()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_waits_for_its_record() {
        let note = Note::new(vec![1]);
        assert_eq!((note.bytes(), note.pending()), (vec![1], None));
        let first = note.set(vec![2]);
        let second = note.set(vec![3]);
        assert_eq!((note.bytes(), note.pending()), (vec![3], Some(second)));
        assert!(!note.wait(second, Duration::from_millis(1)));
        std::thread::scope(|scope| {
            scope.spawn(|| note.recorded(second));
            assert!(note.wait(first, Duration::from_secs(60)) && note.wait(second, Duration::from_secs(60)));
        });
        assert_eq!(note.pending(), None);
    }
}
