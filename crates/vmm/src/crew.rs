//! The I/O threads of a machine, and which of them a queue starts on.
use crate::process::Process;
use paravane_io::{Inline, IoThread, IoThreadFigures};
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// All I/O threads of a machine.
#[derive(Clone)]
pub(crate) struct Crew {
    threads: Arc<[IoThread]>,
    spread: bool,
    /// Who serves the queues in their place.
    elsewhere: Option<Elsewhere>,
}

/// Where queues are served, if not by I/O threads.
#[derive(Clone)]
pub(crate) enum Elsewhere {
    /// In the exits of their kicks.
    Inline(Arc<Inline>),
    /// In another process.
    Process(Arc<Process>),
}

impl Crew {
    /// Starts threads with these numbers in their names, at least one. With `spread` each queue of a device starts on
    /// another; else a device's queues all start on one. A queue is polled for `longest_poll` at most before its thread waits
    /// for a kick.
    ///
    /// # Errors
    /// The host refuses threads or descriptors.
    pub(crate) fn spawn(numbers: Range<usize>, spread: bool, longest_poll: Duration) -> io::Result<Self> {
        let threads = (numbers.start..numbers.end.max(numbers.start + 1))
            .map(|number| IoThread::spawn(format!("io{number}"), longest_poll));
        Ok(Self { threads: threads.collect::<io::Result<_>>()?, spread, elsewhere: None })
    }

    /// Queues are served there from now on.
    pub(crate) fn replaced_by(self, elsewhere: Elsewhere) -> Self {
        Self { elsewhere: Some(elsewhere), ..self }
    }

    /// Where queues are served, if not by these threads.
    pub(crate) fn elsewhere(&self) -> Option<&Elsewhere> {
        self.elsewhere.as_ref()
    }

    /// Number of threads.
    pub(crate) fn len(&self) -> usize {
        self.threads.len()
    }

    /// What each thread has counted.
    pub(crate) fn figures(&self) -> Vec<IoThreadFigures> {
        self.threads.iter().map(IoThread::figures).collect()
    }

    /// Index of the thread that `queue` of `device` starts on.
    pub(crate) fn first(&self, device: usize, queue: u16) -> usize {
        (device + if self.spread { usize::from(queue) } else { 0 }) % self.threads.len()
    }

    /// The thread at `index`, if there is one.
    pub(crate) fn thread(&self, index: usize) -> Option<&IoThread> {
        self.threads.get(index)
    }

    /// Ends all threads; queues that they still have are stopped.
    pub(crate) fn quit(&self) {
        self.threads.iter().for_each(IoThread::quit);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queues_are_dealt_out_or_kept_together() {
        let dealt = |spread| {
            let crew = Crew::spawn(0..3, spread, Duration::ZERO).unwrap();
            [(0, 0), (0, 1), (0, 3), (2, 0), (2, 2)].map(|(device, queue)| crew.first(device, queue))
        };
        assert_eq!(dealt(false), [0, 0, 0, 2, 2]);
        assert_eq!(dealt(true), [0, 1, 0, 2, 1]);
        assert!(Crew::spawn(0..0, true, Duration::ZERO).unwrap().thread(0).is_some());
    }
}
