//! Where queues are served: I/O threads, or exits of kicks.
use crate::lock::lock;
use paravane_io::{HostQueue, Inline, IoThread, IoThreadFigures, NotPutOn};
use std::collections::BTreeSet;
use std::io;
use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// How the queues of devices start on the threads of a pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Spread {
    /// All queues of a device on one thread; devices are assigned round-robin.
    #[default]
    Devices,
    /// Queues are assigned round-robin, beginning with another thread for each device.
    Queues,
}

/// Where the queues of any number of devices are served. Clones share the threads.
#[derive(Clone)]
pub struct Placement(Arc<Shared>);

struct Shared {
    kind: Kind,
    /// Numbers of the attached devices: a queue's thread knows it by them.
    numbers: Mutex<BTreeSet<usize>>,
}

/// What serves queues.
pub(crate) enum Kind {
    Pool { threads: Box<[IoThread]>, spread: Spread },
    Inline(Inline),
}

impl Placement {
    fn new(kind: Kind) -> Self {
        Self(Arc::new(Shared { kind, numbers: Mutex::default() }))
    }

    /// Starts `count` I/O threads named `io0`, `io1` and so on.
    ///
    /// A thread polls a queue for at most `longest_poll` before it waits for a kick; zero turns
    /// polling off.
    ///
    /// # Errors
    /// The host refuses threads or descriptors.
    pub fn spawn(count: NonZeroUsize, spread: Spread, longest_poll: Duration) -> io::Result<Self> {
        let threads = (0..count.get()).map(|number| IoThread::spawn(format!("io{number}"), longest_poll));
        Self::pool(threads.collect::<io::Result<_>>()?, spread)
    }

    /// Serves queues on these threads.
    ///
    /// # Errors
    /// `threads` is empty.
    pub fn pool(threads: Vec<IoThread>, spread: Spread) -> io::Result<Self> {
        if threads.is_empty() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "a pool needs at least one I/O thread"));
        }
        Ok(Self::new(Kind::Pool { threads: threads.into(), spread }))
    }

    /// Serves queues in the exits of their kicks, on the vCPU's thread.
    ///
    /// Completions, and kicks by ioeventfd, are served by a thread of the placement.
    ///
    /// # Errors
    /// The host refuses a thread or descriptors.
    pub fn inline() -> io::Result<Self> {
        Ok(Self::new(Kind::Inline(Inline::spawn()?)))
    }

    /// Number of I/O threads; 0 if this is no pool.
    #[must_use]
    pub fn thread_count(&self) -> usize {
        match &self.0.kind {
            Kind::Pool { threads, .. } => threads.len(),
            Kind::Inline(_) => 0,
        }
    }

    /// I/O thread `index` of a pool.
    #[must_use]
    pub fn thread(&self, index: usize) -> Option<&IoThread> {
        match &self.0.kind {
            Kind::Pool { threads, .. } => threads.get(index),
            Kind::Inline(_) => None,
        }
    }

    /// Counters of each I/O thread.
    #[must_use]
    pub fn figures(&self) -> Vec<IoThreadFigures> {
        (0..self.thread_count()).filter_map(|index| self.thread(index)).map(IoThread::figures).collect()
    }

    /// Ends all I/O threads, and stops the queues that they still have.
    ///
    /// Devices are to be stopped before.
    pub fn quit(&self) {
        (0..self.thread_count()).filter_map(|index| self.thread(index)).for_each(IoThread::quit);
    }

    pub(crate) fn kind(&self) -> &Kind {
        &self.0.kind
    }

    /// Index of the thread that `queue` of device `number` starts on.
    pub(crate) fn first(&self, number: usize, queue: u16) -> usize {
        match &self.0.kind {
            Kind::Pool { threads, spread } => {
                let queue = if *spread == Spread::Queues { usize::from(queue) } else { 0 };
                (number + queue) % threads.len()
            }
            Kind::Inline(_) => 0,
        }
    }

    /// Hands a queue to I/O thread `index`.
    pub(crate) fn put_on(&self, index: usize, queue: Box<HostQueue>) -> Result<(), NotPutOn> {
        match self.thread(index) {
            Some(thread) => thread.put_on(queue),
            None => {
                let source = io::Error::other(format!("there is no I/O thread {index}"));
                Err(NotPutOn { queue: Some(queue), source })
            }
        }
    }

    /// Reserves `number`, or the smallest free one, for a device.
    ///
    /// `None`: a device has it.
    pub(crate) fn claim(&self, number: Option<usize>) -> Option<NumberClaim> {
        let mut numbers = lock(&self.0.numbers);
        let number = number.or_else(|| (0..).find(|number| !numbers.contains(number)))?;
        numbers.insert(number).then(|| NumberClaim { placement: self.clone(), number })
    }
}

impl std::fmt::Debug for Placement {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match &self.0.kind {
            Kind::Pool { .. } => "Placement::Pool",
            Kind::Inline(_) => "Placement::Inline",
        })
    }
}

/// A device's number, free again when this is dropped.
pub(crate) struct NumberClaim {
    placement: Placement,
    pub(crate) number: usize,
}

impl Drop for NumberClaim {
    fn drop(&mut self) {
        lock(&self.placement.0.numbers).remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool(spread: Spread) -> Placement {
        Placement::spawn(NonZeroUsize::new(3).unwrap(), spread, Duration::ZERO).unwrap()
    }

    #[test]
    fn queues_are_assigned_round_robin_or_kept_together() {
        let first = |spread| {
            let pool = pool(spread);
            [(0, 0), (0, 1), (0, 3), (2, 0), (2, 2)].map(|(device, queue)| pool.first(device, queue))
        };
        assert_eq!(first(Spread::Devices), [0, 0, 0, 2, 2]);
        assert_eq!(first(Spread::Queues), [0, 1, 0, 2, 1]);
        assert!(Placement::pool(Vec::new(), Spread::Devices).is_err());
    }

    #[test]
    fn no_two_devices_have_one_number() {
        let pool = pool(Spread::Devices);
        let [one, two] = [pool.claim(None).unwrap(), pool.claim(Some(1)).unwrap()];
        assert!(pool.clone().claim(Some(1)).is_none());
        assert_eq!((one.number, pool.claim(None).unwrap().number), (0, 2));
        drop(two);
        assert_eq!(pool.claim(Some(1)).unwrap().number, 1);
    }
}
